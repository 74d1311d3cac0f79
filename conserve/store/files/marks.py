"""The mark of a job's folder: it names the store that owns the folder, and is locked by processes at work there.

Two databases may share one home, and a database may be moved aside. So a folder that this database does not name
may be another's. The mark is a file in the folder. A process that submits the job or writes shards holds an flock
on it. The operating system ends the lock with the process and not before: a process that was suspended for hours
still holds it. In a bucket the mark is an object, and there are no locks: age decides there (`sweep`). The mark
also carries the job's record, in case the database is damaged.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MARK = "job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Contents of a mark."""

    store_id: str
    registered: bool = False
    """True once a database has named the folder. A database that does not name it any more may be an older copy."""
    record: Mapping[str, Any] | None = None
    """The row of the table `job` as it was at submit."""

    def is_of(self, store_id: str) -> bool:
        """True for the mark of this store."""
        return self.store_id == store_id != ""


def decoded(content: bytes) -> Mark | None:
    """Inverse of `encoded`; None for a mark whose checksum is wrong."""
    try:
        outer = json.loads(content)
        body = outer["mark"]
        return Mark(**json.loads(body)) if zlib.crc32(body.encode()) == outer["checksum"] else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def encoded(mark: Mark) -> bytes:
    """Contents of a mark, with their checksum."""
    body = json.dumps(asdict(mark))
    return json.dumps({"mark": body, "checksum": zlib.crc32(body.encode())}).encode()
