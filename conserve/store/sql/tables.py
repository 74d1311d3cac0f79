"""Results as a data set of many files, for Spark, Trino and Athena: Hive's folders, or a Delta table.

Both are parted by `job_id`, and an export takes the place of the same job's earlier one. In Delta that is one
transaction. For the moment in which new files take the place of old ones, a reader may meet no folder of Hive's, or
in a bucket both the old files and the new.
"""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import PackageMissing, StoreError, StoreUnreachable, one_line
from conserve.installation import install_line
from conserve.store.files.bucket import Bucket, endpoint_of, reached
from conserve.store.files.layout import listed
from conserve.store.files.locks import alone
from conserve.store.files.objects import FilePath, ObjectPath
from conserve.store.files.os_errors import explained
from conserve.store.files.place import place_of
from conserve.store.sql.batches import RowBatches, joined
from conserve.store.sql.export import held
from conserve.store.sql.quoting import literal

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

PART = "job_id"
FILE_ROWS = 1 << 18
FILE_BYTES = 4 << 30  # before they are compressed; services copy objects of 5 GB at most
GROUP_ROWS = 1 << 17
GROUP_BYTES = 256 << 20
NEW = "new"  # folder of an export's files until they are whole
KILLED_S = 24 * 3600.0  # without a new file, after which an export is not waited for
PATIENCE = {"connect_timeout": "5s", "max_retries": "3", "retry_timeout": "30s"}
COLOUR = re.compile("\x1b\\[[0-9;]*m|↳")


class CountedRows:
    """Batches of rows, and the number of rows so far."""

    def __init__(self, rows: RowBatches) -> None:
        self.schema, self._batches = held(rows)
        self.rows = 0

    def reader(self) -> pa.RecordBatchReader:
        """Reader of the batches, once."""
        return pa.RecordBatchReader.from_batches(self.schema, self._counted())

    def _counted(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.rows += batch.num_rows
            yield batch


def write_dataset(rows: RowBatches, place: FilePath, job_id: str) -> int:
    """Write PLACE/job_id=.../part-*.parquet in place of the job's earlier ones; returns the number of rows.

    An export that fails leaves the earlier one as it was. Of two at a time the one that ends last stays.
    """
    from pyarrow.fs import LocalFileSystem

    counted, part, export = CountedRows(rows), f"{PART}={job_id}", uuid.uuid4().hex[:8]
    scratch = place / f"_{job_id}.{export}"  # readers pass over such names
    try:
        if isinstance(place, ObjectPath):
            with reached(place.bucket):
                write_files(counted, place.bucket.filesystem(), f"{place.at}/{scratch.name}/{NEW}", export)
                replace_objects(place / part, place / scratch.name / NEW)
        else:
            with explained(place):
                (place / scratch.name / NEW).mkdir(parents=True)
                write_files(counted, LocalFileSystem(), f"{scratch}/{NEW}", export)
                with alone(place):
                    replace_folder(place / part, place / scratch.name)
        for folder in leftovers(place, job_id, beside=scratch):
            remove(folder)
    finally:
        remove(scratch)
    return counted.rows


def write_files(counted: CountedRows, filesystem: "FileSystem", folder: str, export: str) -> None:
    """Write rows to files whose names have the order of the rows, without the column that the folder names.

    Arrow's own writer of data sets keeps that order in newer versions alone.
    """
    schema = counted.schema.remove(counted.schema.get_field_index(PART))
    groups = joined(counted.reader(), rows=GROUP_ROWS, size=GROUP_BYTES)
    for number, first in enumerate(groups):
        path = f"{folder}/part-{number:05}-{export}.parquet"
        rows = size = 0
        with (
            filesystem.open_output_stream(path) as stream,
            pq.ParquetWriter(stream, schema, compression="zstd") as writer,
        ):
            for group in chain([first], groups):
                writer.write_batch(group.select(schema.names))
                rows += group.num_rows
                size += group.nbytes
                if rows >= FILE_ROWS or size >= FILE_BYTES:
                    break


def replace_folder(part: Path, scratch: Path) -> None:
    """Put the new files of an export, if there are any, in place of earlier ones, which come back if that fails."""
    earlier = scratch / "earlier"
    if part.exists():
        part.rename(earlier)
    try:
        if any((scratch / NEW).iterdir()):
            (scratch / NEW).rename(part)
    except BaseException:
        if earlier.exists() and not part.exists():
            earlier.rename(part)
        raise


def replace_objects(part: ObjectPath, new: ObjectPath) -> None:
    """Copy objects to their place, then delete those that were there before.

    There are no locks. Raises `StoreError` where others appeared meanwhile, as another export's do.
    """
    before = {entry.path for entry in part.entries()}
    copies = {path: part / path.name for path in new.iterdir()}
    try:
        for path, copy in copies.items():
            path.copy_to(copy)
        if {entry.path for entry in part.entries()} - before - {*copies.values()}:
            raise StoreError(
                f"another export writes {part} at the same time, and this one wrote nothing; run it again"
            )
    except BaseException:
        for copy in copies.values():
            with suppress(StoreUnreachable):
                copy.unlink(missing_ok=True)
        raise
    for path in before:
        path.unlink(missing_ok=True)


def remove(folder: FilePath) -> None:
    """Delete a folder; in a bucket with its mark, since each export has a folder of another name."""
    if isinstance(folder, ObjectPath):
        folder.remove_folder()
    else:
        place_of(folder).remove_tree()


def leftovers(place: FilePath, job_id: str, *, beside: FilePath) -> Iterator[FilePath]:
    """Yield the unfinished files of a job's killed exports: those that were last written a day before `beside`."""
    now = written_at(beside)
    for path in listed(place):
        if path.name.partition(".")[0] == f"_{job_id}":
            then = written_at(path)
            if now is not None and then is not None and then < now - KILLED_S:
                yield path


def written_at(folder: FilePath) -> float | None:
    """Time of the last change below a folder, by the clock of its disk or service; None if nothing is there."""
    if isinstance(folder, ObjectPath):
        return max((entry.modified_at for entry in folder.entries()), default=None)
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return None


def write_delta(rows: RowBatches, place: FilePath, job_id: str) -> int:
    """Replace the rows of a job in a Delta table, which is made if it is missing; returns the number of rows."""
    try:
        from deltalake import write_deltalake
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise PackageMissing(f"--format delta needs deltalake; run: {install_line('delta')}") from error
    options = storage_options(place.bucket) if isinstance(place, ObjectPath) else {}
    counted, where = CountedRows(rows), str(place)
    try:
        write_deltalake(
            where,
            counted.reader(),
            mode="overwrite",
            predicate=f"{PART} = {literal(job_id)}",
            schema_mode="merge",
            partition_by=[PART],
            storage_options=options,
        )
    except (DeltaError, OSError) as error:
        raise StoreError(
            f"the table {where} cannot be written ({plain(error)}); nothing of it changed"
        ) from error
    return counted.rows


def storage_options(bucket: Bucket) -> dict[str, str]:
    """Address of the service for Delta's own client, which takes credentials from the same environment."""
    endpoint = endpoint_of(bucket) if bucket.scheme == "s3" else None
    if endpoint is None:
        return dict(PATIENCE)
    options = PATIENCE | {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": str(endpoint.startswith("http:")).lower(),
    }
    region = bucket.region or os.environ.get("AWS_REGION") or "us-east-1"
    return options | {"AWS_REGION": region}


def plain(error: Exception) -> str:
    """Message of Delta's library on one line, without its colours."""
    return one_line(COLOUR.sub(" ", str(error)), most=300)
