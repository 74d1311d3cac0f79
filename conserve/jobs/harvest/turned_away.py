"""Jobs that must not run: they fail for all harvesters, or wait for one that may read their files."""

from collections.abc import Callable, Collection, Sequence

from conserve.errors import JobRefused, StoreDamaged, StoreError, StoreForbidden
from conserve.jobs.harvest.comparing import StillCompared
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.workload import Workload
from conserve.store.books import catalog, leases, spans
from conserve.store.books.shapes import RunnableRow
from conserve.store.books.states import FailedBy
from conserve.store.database.store import Store

AGAIN_S = 60.0  # until files that this process may not read are tried again


class TurnedAway:
    """Turns jobs away with their reasons, which the tally holds.

    A file that this process may not read says nothing about the job: other harvesters take it meanwhile. So they do
    while large files of it are compared here.
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
        self.times = 0  # that a job was turned away

    def looked_at(self, job_id: str, epoch: int | None = None) -> bool:
        """True if this job must not run here; it is then turned away, and the lease on its rows ends."""
        reason = self._workload.refusal(job_id)
        if reason is not None:
            self.add(job_id, reason, epoch)
        elif self._again_at.pop(job_id, None) is not None:
            self._tally.refused.pop(job_id, None)
        return reason is not None

    def add(self, job_id: str, reason: JobRefused | StoreError, epoch: int | None = None) -> None:
        """Turn a job away with a reason, and end the lease on its rows."""
        self.times += 1
        waits = isinstance(reason, StoreForbidden | StillCompared)
        with self._store.write() as tx:
            if epoch is not None:
                leases.end(tx, spans.lock(tx, [epoch], self._owner))
            if not waits:
                by = FailedBy.DAMAGE if isinstance(reason, StoreDamaged) else FailedBy.INPUT
                catalog.refuse(tx, job_id, str(reason), by, now=self._clock())
        if isinstance(reason, StillCompared):
            return
        self._workload.close([job_id])  # once it is mended, it is opened anew
        self._tally.refused[job_id] = reason if isinstance(reason, JobRefused) else JobRefused(str(reason))
        if waits:
            self._again_at[job_id] = self._monotonic() + AGAIN_S

    @property
    def compared(self) -> Collection[str]:
        """Jobs that wait until their files have been compared with their digests."""
        return self._workload.comparisons.unfinished

    @property
    def waiting(self) -> Collection[str]:
        """Jobs that wait for another harvester until they are tried again here, and those that are compared."""
        now = self._monotonic()
        return {*self.compared, *(job_id for job_id, again_at in self._again_at.items() if now < again_at)}

    def others(self, runnable: Sequence[RunnableRow], *, all_listed: bool = True) -> Sequence[RunnableRow]:
        """Runnable jobs but for those that wait for another harvester, or are compared.

        If all are listed, those that run no more are forgotten.
        """
        if not self._again_at and not self.compared:
            return runnable
        if all_listed:
            listed = {job.id for job in runnable}
            self._workload.comparisons.forget_others(listed)
            for job_id in self._again_at.keys() - listed:
                del self._again_at[job_id]
                self._tally.refused.pop(job_id, None)
        waiting = self.waiting
        return [job for job in runnable if job.id not in waiting]
