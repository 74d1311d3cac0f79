"""The first rows of a job: where all are refused in the same words, the job's parameters are at fault."""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from conserve.endpoints.protocol import Call, Completion, Endpoint, OnTokens
from conserve.endpoints.wrapped import WrappedEndpoint
from conserve.errors import ConserveError, RequestRejected
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
        self.paused: dict[str, str] = {}

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer a call; a row of a job that was paused meanwhile waits until the harvester takes it back."""
        job_id = call.key.partition("/")[0]
        if job_id in self.paused:
            await asyncio.sleep(TAKEN_BACK_S)  # a job that is resumed at once has no row that waits for ever
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
        why = all_refused(job_id, error)
        self.paused[job_id] = why
        try:
            await asyncio.to_thread(self._pause_in_store, job_id, str(error))
        except ConserveError as trouble:  # an outage, or a job that has ended
            del self.paused[job_id]
            log.warning("%s; job %s is not paused: %s", why, job_id, trouble)

    def _pause_in_store(self, job_id: str, words: str) -> None:
        with self._store.write() as tx:
            catalog.move(tx, job_id, "pause", now=time.time(), why=f"its first rows were refused: {words}")


def all_refused(job_id: str, error: RequestRejected) -> str:
    """Sentence on a job whose first rows were all refused, with the ways to go on."""
    said = str(error).rstrip(". ")
    return (
        f"the first {FIRST_ROWS} rows of job {job_id} were refused in the same words, so it is paused: {said}; "
        f"a job keeps its parameters: run: conserve cancel {job_id}, and submit the rows with others (as --param "
        f"max_completion_tokens=N in place of --max-tokens N); or send its other rows too: conserve resume {job_id}"
    )
