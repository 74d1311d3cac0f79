"""The first rows of a job: where all are refused in the same words, the job's parameters are at fault."""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from conserve.endpoints.protocol import Call, Completion, Endpoint, OnTokens
from conserve.endpoints.wrapped import WrappedEndpoint
from conserve.errors import ConserveError, JobNotFound, JobRefused, RequestRejected
from conserve.jobs.harvest.waiting import elapsed_or_set
from conserve.store.books import catalog
from conserve.store.database.store import Store

FIRST_ROWS = 20
TAKEN_BACK_S = 30.0  # within which a harvester takes the rows of a paused job back, by far

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SameRefusals:
    """Refusals of a job's rows, all in the same words so far."""

    words: str
    rows: int = 1


class FirstRowsEndpoint(WrappedEndpoint):
    """An endpoint that pauses those of the jobs `new` whose first rows are all refused in the same words.

    A row that is answered, or refused in other words, ends the watch over its job. `paused` tells why of
    each paused job, and how to go on.
    """

    def __init__(self, endpoint: Endpoint, store: Store, new: Collection[str]) -> None:
        super().__init__(endpoint)
        self._store = store
        self._watched: dict[str, SameRefusals | None] = dict.fromkeys(new)
        self._resumed: dict[str, asyncio.Event] = {}  # for rows of paused jobs
        self.paused: dict[str, str] = {}

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer a call; a row of a job that was paused meanwhile waits until the harvester takes it back."""
        job_id = call.key.partition("/")[0]
        if (resumed := self._resumed.get(job_id)) is not None:
            await elapsed_or_set(resumed, TAKEN_BACK_S)
            self._go_on(job_id)  # a row that is still here is of a job that was resumed
        try:
            completion = await self._endpoint.complete(call, on_tokens)
        except RequestRejected as error:
            if self._is_last(job_id, error):
                await self._pause(job_id, error)
            raise
        self._watched.pop(job_id, None)
        return completion

    def _is_last(self, job_id: str, error: RequestRejected) -> bool:
        """Note the refusal of a row; True if no more rows of its job need be sent."""
        if job_id not in self._watched:
            return False
        seen = self._watched[job_id]
        if seen is None:
            seen = self._watched[job_id] = SameRefusals(str(error), rows=0)
        seen.rows += 1
        over = seen.words != str(error) or seen.rows >= FIRST_ROWS
        if over:
            del self._watched[job_id]
        return over and seen.words == str(error)

    async def _pause(self, job_id: str, error: RequestRejected) -> None:
        self._resumed[job_id] = asyncio.Event()
        self.paused[job_id] = all_refused(job_id, error)
        try:
            if await asyncio.to_thread(self._pause_in_store, job_id, str(error)):
                return
        except (JobRefused, JobNotFound) as ended:
            log.info("job %s is not paused for its first rows: %s", job_id, ended)
        except ConserveError as trouble:
            log.warning(
                "the first rows of job %s were refused (%s), and it goes on: %s", job_id, error, trouble
            )
        self._go_on(job_id)

    def _go_on(self, job_id: str) -> None:
        """Send rows of this job again."""
        self.paused.pop(job_id, None)
        if (resumed := self._resumed.pop(job_id, None)) is not None:
            resumed.set()

    def _pause_in_store(self, job_id: str, words: str) -> bool:
        """Pause the job, unless another harvester's server answers it."""
        with self._store.write() as tx:
            if catalog.get(tx, job_id).succeeded:
                return False
            catalog.move(tx, job_id, "pause", now=time.time(), why=f"its first rows were refused: {words}")
        return True


def all_refused(job_id: str, error: RequestRejected) -> str:
    """Sentence on a job whose first rows were all refused, with the ways to go on."""
    said = str(error).rstrip(". ")
    return (
        f"the first {FIRST_ROWS} rows of job {job_id} were refused in the same words, so it is paused: {said}; "
        f"a job keeps its parameters: run: conserve cancel {job_id}, and submit the rows with others (as --param "
        f"max_completion_tokens=N in place of --max-tokens N); or send its other rows too: conserve resume {job_id}"
    )
