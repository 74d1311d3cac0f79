"""Files of a store that cannot be opened, and the rows that a view therefore leaves out."""

from dataclasses import dataclass

from conserve.errors import first_line
from conserve.store.files.objects import FilePath, ObjectPath, source

MAGIC = b"PAR1"
BATCH_ROWS = 4096
LEAST_BYTES = 12  # magic, length of the footer, magic

CHECK = "run: conserve check"
REPAIR = "run: conserve check --repair"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows of a job that a view leaves out: the reason, and the next command."""

    view: str
    job_id: str
    reason: str
    fix: str

    @property
    def damaged(self) -> bool:
        """True if a file of the store is damaged; False if the user's own input changed or was odd all along."""
        return self.fix.startswith(CHECK)

    @property
    def sentence(self) -> str:
        """One sentence for the user."""
        return f"the view {self.view} leaves out rows of job {self.job_id}: {self.reason}; {self.fix}"


def damage(path: FilePath) -> str | None:
    """Read a Parquet file to its end; returns the reason why that fails, None if it does not.

    Raises `MemoryError` if there is no memory for that.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source(path), page_checksum_verification=True) as file:
            for _ in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                pass
    except MemoryError:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        return f"is damaged ({first_line(error)})"
    return None


def fault(path: FilePath) -> str | None:
    """Reason why a Parquet file cannot be opened, None if it can; reads its last 8 bytes.

    Of an object nothing is read: its length was compared, and DuckDB reads its end anyway.
    """
    if isinstance(path, ObjectPath):
        return None
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < LEAST_BYTES:
                return "is cut short"
            file.seek(-8, 2)
            tail = file.read(8)
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if tail[4:] != MAGIC or int.from_bytes(tail[:4], "little") > size - LEAST_BYTES:
        return "is cut short or was overwritten"
    return None
