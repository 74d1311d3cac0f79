"""Makes an outbox durable: one transaction, in which `journal.commit` writes the results."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from conserve.jobs.deadlines.work import computed_tokens
from conserve.jobs.harvest.outbox import Outbox
from conserve.store.books import harvested, journal, leases, queue, saved_tokens, shards
from conserve.store.books.journal import Committed
from conserve.store.database.store import Store

NOTE_S = 1.0  # between two notes of harvested tokens, which then cost a row nothing


class Recorder:
    """Writes outboxes to the store; runs in the store's thread."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._uncompacted: Counter[str] = Counter()
        self._busy_since: float | None = None  # rows have run since then, or since the last note; None: never
        self._idle_since: float | None = None  # no row runs since; None: rows run
        self._tokens = 0  # computed since the last note

    def begin(self) -> None:
        """Note that rows are in flight from now on."""
        if self._busy_since is None or self._idle_since is not None:
            self._busy_since, self._idle_since, self._tokens = self._clock(), None, 0

    def pause(self) -> None:
        """Note that no row is in flight from now on; what the last ones took may still be written."""
        if self._idle_since is None:
            self._idle_since = self._clock()

    def write(self, outbox: Outbox) -> Committed:
        """Write the outbox in one transaction, then shards where enough results have gathered."""
        now = self._clock()
        with self._store.write() as tx:
            if outbox.saved:
                saved_tokens.save_tokens(tx, list(outbox.saved.values()))
            for work, decision in outbox.returned:
                queue.put_back(
                    tx,
                    epoch=work.epoch,
                    job_id=work.job_id,
                    position=work.row.position,
                    available_at=now + decision.after_s if decision.after_s else 0.0,
                    failed=decision.counts,
                    suspect=decision.suspect,
                )
            leases.end_if_empty(tx, {work.epoch for work, _ in outbox.returned})
            committed = journal.commit(tx, outbox.finished, now=now)
            tokens = self._tokens + computed(committed)
            until = now if self._idle_since is None else min(now, self._idle_since)
            noted = self._note(tx, tokens, until)
        self._tokens = 0 if noted else tokens
        self._busy_since = until if noted else self._busy_since
        self._uncompacted.update(f.job_id for f in committed.written)
        self._compact(committed.completed)
        return committed

    def _note(self, tx: Any, tokens: int, until: float) -> bool:
        """Write down the tokens since the last note if it is time; returns True if they count anew from then on."""
        since = self._busy_since
        if since is None or since <= until < since + NOTE_S:
            return False
        if since < until:  # else the clock was set back
            harvested.note(tx, tokens, since=since, now=until)
        return True

    def _compact(self, completed: list[str]) -> None:
        """Move the journal of completed jobs to shards, and that of jobs that can fill one."""
        for job_id, rows in list(self._uncompacted.items()):
            if job_id in completed:
                shards.compact(self._store, job_id, now=self._clock())
                del self._uncompacted[job_id]
            elif rows >= shards.SHARD_ROWS:
                moved = shards.compact(self._store, job_id, now=self._clock(), at_least=shards.SHARD_ROWS)
                self._uncompacted[job_id] -= moved


def computed(committed: Committed) -> int:
    """Tokens that the answers of a transaction took."""
    results = (finished.result for finished in committed.written)
    return sum(computed_tokens(result) for result in results if not result.failed)
