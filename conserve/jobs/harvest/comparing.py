"""Comparisons of files with their digests, beside the store's thread, which renews leases meanwhile."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, TypeVar

from conserve.errors import StoreError

AT_ONCE_BYTES = 16 << 20  # most that the store's thread reads itself: 0.1 s of a slow disk

T = TypeVar("T")


class StillCompared(StoreError):
    """Files of the job `job_id` are being compared with their digests, and the job waits for that."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the files of job {job_id} are being compared with their digests")
        self.job_id = job_id


class Comparisons:
    """Compares large files in threads of their own, one after the other; the process ends without them."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[str, str], Future[Any]] = {}  # of a job and a part of its files
        self._turn = Lock()

    @property
    def unfinished(self) -> set[str]:
        """Jobs whose files are being compared, or are to be."""
        return {job_id for (job_id, _), outcome in self._outcomes.items() if not outcome.done()}

    def outcome(self, job_id: str, part: str, reads: int, compare: Callable[[], T]) -> T:
        """Outcome of a comparison that `reads` so many bytes; raises `StillCompared` while a large one goes on.

        The outcome of a large one stays until the job is forgotten; an error is raised once.
        """
        key = job_id, part
        outcome: Future[T] | None = self._outcomes.get(key)
        if outcome is None:
            if reads <= AT_ONCE_BYTES:
                return compare()
            outcome = self._outcomes[key] = self._begun(compare)
        if not outcome.done():
            raise StillCompared(job_id)
        if outcome.exception() is not None:  # of storage that is away: the next time may tell
            del self._outcomes[key]
        return outcome.result()

    def _begun(self, compare: Callable[[], T]) -> "Future[T]":
        outcome: Future[T] = Future()

        def run() -> None:
            with self._turn:
                if not outcome.set_running_or_notify_cancel():
                    return
                try:
                    outcome.set_result(compare())
                except BaseException as error:
                    outcome.set_exception(error)

        Thread(target=run, name="digest", daemon=True).start()
        return outcome

    def forget(self, job_ids: Collection[str]) -> None:
        """Forget the outcomes of these jobs; what has not begun does not."""
        self._keep(lambda job_id: job_id not in job_ids)

    def forget_others(self, job_ids: Collection[str]) -> None:
        """Forget the outcomes of all jobs but these."""
        self._keep(lambda job_id: job_id in job_ids)

    def _keep(self, is_kept: Callable[[str], bool]) -> None:
        for key in [key for key in self._outcomes if not is_kept(key[0])]:
            self._outcomes.pop(key).cancel()
