"""Write-behind: outcomes of rows, gathered in the event loop until `recorder` makes them durable in batches."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conserve.errors import StoreError
from conserve.jobs.harvest.outage import Outage
from conserve.jobs.harvest.retry import RetryDecision
from conserve.jobs.harvest.waiting import elapsed_or_set
from conserve.jobs.harvest.workload import ReadyRow
from conserve.store.books import saved_tokens
from conserve.store.books.journal import Finished
from conserve.store.books.results import Result
from conserve.store.books.saved_tokens import SavedTokens

FLUSH_ROWS = 512  # results that make a transaction without waiting for more
FLUSH_S = 0.25  # longest wait of a result for others; a crash costs at most that much work


@dataclass(slots=True)
class Outcomes:
    """Outcomes and saved tokens that wait for the next transaction."""

    finished: list[Finished] = field(default_factory=list)
    returned: list[tuple[ReadyRow, RetryDecision]] = field(default_factory=list)
    saved: dict[tuple[str, int], SavedTokens] = field(default_factory=dict)
    repeated: bool = False  # a write of them failed, and may have been durable all the same

    def __bool__(self) -> bool:
        return bool(self.finished or self.returned or self.saved)

    @property
    def epochs(self) -> Counter[int]:
        """Number of rows that end with these outcomes, by lease."""
        rows = Counter(f.epoch for f in self.finished)
        rows.update(work.epoch for work, _ in self.returned)
        return rows


class WriteBehind:
    """Gathers outcomes and has them written; `write` makes them durable."""

    def __init__(self, write: Callable[[Outcomes], Coroutine[Any, Any, None]], outage: Outage) -> None:
        self._write, self._outage = write, outage
        self.outcomes = Outcomes()
        self._failed: Outcomes | None = None  # in a write that failed
        self.full = asyncio.Event()
        self.unwritten_rows: Counter[int] = Counter()  # epoch -> rows whose outcome is not written yet
        self.writing = asyncio.Lock()  # held for a write and until `unwritten_rows` knows of it

    @property
    def is_at_work(self) -> bool:
        """True if outcomes are being written or wait for it."""
        return bool(self.outcomes or self._failed) or self.writing.locked()

    def finish(self, work: ReadyRow, result: Result) -> None:
        """Add the result of a row."""
        self.outcomes.saved.pop(work.key, None)
        self.outcomes.finished.append(Finished(work.epoch, *work.key, result))
        if len(self.outcomes.finished) >= FLUSH_ROWS:
            self.full.set()

    def put_back(self, work: ReadyRow, decision: RetryDecision) -> None:
        """Add a row that returns to the queue."""
        self.outcomes.returned.append((work, decision))

    def save(self, work: ReadyRow, tokens: Sequence[int]) -> None:
        """Add the tokens generated so far for a row, which replace earlier ones."""
        assert work.call is not None
        self.outcomes.saved[work.key] = SavedTokens(
            work.epoch, *work.key, saved_tokens.pack_tokens(tokens), work.call.identity or ""
        )

    async def run(self) -> None:
        """Write the outcomes whenever enough have gathered, or after `FLUSH_S`."""
        while True:
            await elapsed_or_set(self.full, FLUSH_S)
            self.full.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write the outcomes; their rows are unwritten no more.

        A stop waits for the write. A write that the store's thread has yet to begin would otherwise never begin,
        and its rows would be done again. After an error of the store the write is repeated once, at the next flush:
        rows that were written are no longer under their leases, and stay as they are.
        """
        async with self.writing:
            failed, self._failed = self._failed, None
            if failed:
                await self._flush(failed)
            outcomes, self.outcomes = self.outcomes, Outcomes()
            if outcomes:
                await self._flush(outcomes)

    async def _flush(self, outcomes: Outcomes) -> None:
        writing = asyncio.ensure_future(self._write(outcomes))
        try:
            await asyncio.shield(writing)
        except BaseException:
            (error,) = await asyncio.gather(writing, return_exceptions=True)
            if isinstance(error, StoreError) and not outcomes.repeated:
                self._failed = replace(outcomes, repeated=True)
            raise
        self._outage.forget()
        self.unwritten_rows.subtract(outcomes.epochs)
        self.unwritten_rows += Counter()  # drops leases that have come to zero
