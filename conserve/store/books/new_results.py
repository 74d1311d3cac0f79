"""Results of one job as they become durable, each row once."""

import logging
from collections.abc import Sequence, Set
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, select

from conserve.errors import StoreDamaged
from conserve.store.books.catalog import JobRecord
from conserve.store.books.journal import is_whole
from conserve.store.books.results import Result, decode, from_arrow
from conserve.store.books.shards import DAMAGED_ROW, ShardFile, files
from conserve.store.database import schema
from conserve.store.database.bulk import along_indexes
from conserve.store.database.connection import chunks
from conserve.store.database.store import Store
from conserve.store.files.objects import source
from conserve.store.files.os_errors import damage_apart

log = logging.getLogger(__name__)
journal = schema.journal


class NewResults:
    """Reader of a job's results that remembers the rows it has read; a row that `retry` asks again is not new."""

    def __init__(self, store: Store, job: JobRecord) -> None:
        self._store, self._job = store, job
        self._seen = bytearray(job.num_rows)  # by position
        self._read: set[int] = set()  # ids of shards
        self._damaged: set[int] = set()  # positions in the journal that were told

    def look(self) -> list[Result]:
        """Results of rows that had none at the last look."""
        with self._store.read() as tx:
            journalled = self._journalled(tx)
            shards = [shard for shard in files(tx, [self._job.id]) if shard.id not in self._read]
        whole = [row for row in journalled if is_whole(row)]
        found = [decode(row.payload) for row in whole]
        self._mark([row.position for row in whole])
        self._tell_damaged({row.position for row in journalled} - {row.position for row in whole})
        for shard in shards:
            found += self._of_shard(shard)
        return found

    def _tell_damaged(self, positions: Set[int]) -> None:
        """Warn of damaged rows, once of each; a repair has them answered again, and then they are new."""
        for position in sorted(positions - self._damaged):
            log.warning(DAMAGED_ROW, position, self._job.id)
        self._damaged |= positions

    def _journalled(self, tx: Connection) -> list[Any]:
        ours = journal.c.job_id == self._job.id
        along_indexes(tx)
        positions = tx.scalars(select(journal.c.position).where(ours).order_by(journal.c.position))
        new = [position for position in positions if not self._seen[position]]
        return [
            row
            for chunk in chunks(new)
            for row in tx.execute(select(journal).where(ours, journal.c.position.in_(chunk)))
        ]

    def _of_shard(self, shard: ShardFile) -> list[Result]:
        """New results in a shard; none where `retry` has removed it since."""
        path = self._store.data / shard.file
        try:
            with damage_apart(path):
                table = pq.read_table(source(path))
        except FileNotFoundError:
            return []
        except (pa.ArrowException, OSError) as error:
            raise StoreDamaged(
                f"{shard.file} cannot be read; run: conserve check --repair {self._job.id}",
                job_id=self._job.id,
            ) from error
        positions = table["position"].to_pylist()
        new = pa.array([not self._seen[position] for position in positions])
        self._read.add(shard.id)
        self._mark(positions)
        return from_arrow(table.filter(new))

    def _mark(self, positions: Sequence[int]) -> None:
        for position in positions:
            self._seen[position] = 1
