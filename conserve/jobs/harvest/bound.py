"""Jobs that are bound to another model than the one that answers."""

from collections.abc import Collection

from conserve.errors import JobRefused
from conserve.jobs.harvest.tally import Tally
from conserve.store.books import catalog, leases
from conserve.store.database.store import Store, Transaction


class ModelDiffers(JobRefused):
    """A job is bound to another model than this run's."""


def bound_elsewhere(job_id: str, bound_to: str, model: str | None) -> ModelDiffers:
    """The error for a job that is bound to another model than this run's."""
    return ModelDiffers(
        f"job {job_id} is bound to {bound_to} and this run has {model}",
        step=f"give --model {bound_to}, or --rebind to answer the rest of it with this one",
    )


class BoundElsewhere:
    """Counts such jobs as refused, for as long as they are queued, and frees those that have no answer."""

    def __init__(self, store: Store, tally: Tally, owner: str) -> None:
        self._store, self._tally, self._owner = store, tally, owner
        self._jobs: set[str] = set()
        self._last: str | None = None  # model of the last claim
        self._switched = False  # rows for a model before that one may be in flight, or just back

    def free(self, model: str | None) -> None:
        """Free the jobs without an answer that this owner bound to another model, once their rows are back."""
        self._switched |= self._last not in (None, model)
        self._last = model
        if self._switched and model is not None:
            with self._store.write() as tx:
                catalog.unbind(tx)
                self._switched = leases.holds_others(tx, self._owner, model)

    def look(self, tx: Transaction, model: str | None, only: Collection[str] | None) -> None:
        """Note which of these queued jobs, or of all, are bound elsewhere now."""
        found = catalog.of_other_models(tx, model, only) if model else {}
        for job_id in self._jobs - found.keys():
            self._tally.refused.pop(job_id, None)
        for job_id, bound_to in found.items():
            self._tally.refused[job_id] = bound_elsewhere(job_id, bound_to, model)
        self._jobs = set(found)
