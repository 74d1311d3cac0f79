"""Makes an outbox durable: one transaction, in which `journal.commit` writes the results."""

import time
from collections import Counter
from collections.abc import Callable

from conserve.jobs.harvest.outbox import Outbox
from conserve.store.books import journal, leases, queue, saved_tokens, shards
from conserve.store.books.journal import Committed
from conserve.store.database.store import Store


class Recorder:
    """Writes outboxes to the store; runs in the store's thread."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._uncompacted: Counter[str] = Counter()

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
        self._uncompacted.update(f.job_id for f in committed.written)
        self._compact(committed.completed)
        return committed

    def _compact(self, completed: list[str]) -> None:
        """Move the journal of completed jobs to shards, and that of jobs that can fill one."""
        for job_id, rows in list(self._uncompacted.items()):
            if job_id in completed:
                shards.compact(self._store, job_id, now=self._clock())
                del self._uncompacted[job_id]
            elif rows >= shards.SHARD_ROWS:
                moved = shards.compact(self._store, job_id, now=self._clock(), at_least=shards.SHARD_ROWS)
                self._uncompacted[job_id] -= moved
