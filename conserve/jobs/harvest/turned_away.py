"""Jobs that must not run: they fail for all harvesters, or wait for one that may read their files."""

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any

from conserve.errors import StoreError, StoreForbidden
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.workload import Workload
from conserve.store.books import catalog, leases, spans
from conserve.store.database.store import Store

AGAIN_S = 60.0  # until files that this process may not read are tried again


class TurnedAway:
    """Turns jobs away with their reasons, which the tally holds.

    A file that this process may not read says nothing about the job: other harvesters take it meanwhile.
    """

    def __init__(
        self,
        store: Store,
        tally: Tally,
        workload: Workload,
        *,
        owner: str,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._store, self._tally, self._workload, self._owner = store, tally, workload, owner
        self._clock, self._monotonic = clock, monotonic
        self._again_at: dict[str, float] = {}  # of the jobs that wait for another harvester

    def looked_at(self, job_id: str, epoch: int | None = None) -> bool:
        """True if this job must not run here; it is then turned away, and the lease on its rows ends."""
        reason = self._workload.refusal(job_id)
        if reason is not None:
            self.add(job_id, reason, epoch)
        elif self._again_at.pop(job_id, None) is not None:
            self._tally.refused.pop(job_id, None)
        return reason is not None

    def add(self, job_id: str, reason: str | StoreError, epoch: int | None = None) -> None:
        """Turn a job away with a reason, and end the lease on its rows."""
        waits = isinstance(reason, StoreForbidden)
        with self._store.write() as tx:
            if epoch is not None:
                leases.end(tx, spans.lock(tx, [epoch], self._owner))
            if not waits:
                catalog.refuse(tx, job_id, str(reason), now=self._clock())
        self._workload.close([job_id])  # once it is mended, it is opened anew
        self._tally.refused[job_id] = str(reason)
        if waits:
            self._again_at[job_id] = self._monotonic() + AGAIN_S

    @property
    def waiting(self) -> Collection[str]:
        """Jobs that wait for another harvester, until they are tried again here."""
        now = self._monotonic()
        return [job_id for job_id, again_at in self._again_at.items() if now < again_at]

    def others(self, runnable: Sequence[Any], *, all_listed: bool = True) -> Sequence[Any]:
        """These runnable jobs but for those that wait for another harvester.

        If all are listed, those that run no more are forgotten.
        """
        if not self._again_at:
            return runnable
        for job_id in self._again_at.keys() - {job.id for job in runnable} if all_listed else ():
            del self._again_at[job_id]
            self._tally.refused.pop(job_id, None)
        now = self._monotonic()
        return [job for job in runnable if self._again_at.get(job.id, -inf) <= now]
