"""Jobs and the model that answers them: bound to another one, or by this run."""

from collections.abc import Iterable, Mapping
from typing import Any

from conserve.jobs.harvest.tally import Tally
from conserve.store.books import catalog


def bound_elsewhere(job_id: str, bound_to: str, model: str | None) -> str:
    """Sentence for a job that is bound to another model than this run's."""
    return (
        f"job {job_id} is answered by {bound_to} and this run has {model}; give --model {bound_to}, "
        "or --rebind to answer the rest of it with this one"
    )


class BoundElsewhere:
    """Counts such jobs as refused, for as long as they are queued."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._jobs: set[str] = set()

    def note(self, found: Mapping[str, str], model: str | None) -> None:
        """Take the jobs that are bound elsewhere now, with their models."""
        for job_id in self._jobs - found.keys():
            self._tally.refused.pop(job_id, None)
        for job_id, bound_to in found.items():
            self._tally.refused[job_id] = bound_elsewhere(job_id, bound_to, model)
        self._jobs = set(found)


class BoundHere:
    """Jobs that had no model yet when this run saw them first.

    The first lease binds them. Where nothing was answered, as by a server without that model, the end of the run
    frees them. A job that `submit --model` has bound is not among them.
    """

    def __init__(self) -> None:
        self._jobs: set[str] = set()

    def note(self, runnable: Iterable[Any]) -> None:
        """Take the runnable jobs without a model."""
        self._jobs.update(job.id for job in runnable if job.model is None)

    def answered(self, job_ids: Iterable[str]) -> None:
        """Leave out jobs that have a result, whatever becomes of it: they stay bound."""
        self._jobs.difference_update(job_ids)

    def end(self, tx: Any, model: str | None) -> None:
        """Free those for which the model has done nothing; their leases have ended before."""
        if self._jobs and model is not None:
            catalog.unbind(tx, self._jobs, model)
        self._jobs.clear()
