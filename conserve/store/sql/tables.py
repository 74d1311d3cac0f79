"""Results as a data set of many files, for Spark, Trino and Athena: Hive's folders, or a Delta table.

Both are parted by `job_id`, and an export takes the place of the same job's earlier one. In Delta that is one
transaction. Of Hive's folders a reader may meet none or a part for the moment in which new files take the place of
old ones.
"""

import os
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from conserve.errors import PackageMissing, StoreError, one_line
from conserve.installation import install_line
from conserve.store.files.bucket import Bucket, endpoint_of, reached
from conserve.store.files.home import explained, remove_tree
from conserve.store.files.objects import FilePath, ObjectPath
from conserve.store.sql.batches import RowBatches
from conserve.store.sql.export import held
from conserve.store.sql.quoting import literal

PART = "job_id"
FILE_ROWS = 1 << 18  # services copy objects of 5 GB at most
GROUP_ROWS = 1 << 17
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

    An export that fails leaves the earlier one as it was.
    """
    counted, part = CountedRows(rows), f"{PART}={job_id}"
    unfinished = f"_{job_id}"  # readers pass over such names
    remove_tree(place / unfinished)  # of an export that was killed
    try:
        with reached(place.bucket) if isinstance(place, ObjectPath) else explained(place):
            write_files(counted, place / unfinished)
            remove_tree(place / part)
            if isinstance(place, ObjectPath):
                for path in (place / unfinished / part).iterdir():
                    path.copy_to(place / part / path.name)
            elif counted.rows:
                (place / unfinished / part).rename(place / part)
    finally:
        remove_tree(place / unfinished)
    return counted.rows


def write_files(counted: CountedRows, place: FilePath) -> None:
    """Write rows to files in folders by job."""
    from pyarrow import dataset, fs

    target: dict[str, Any] = {"filesystem": fs.LocalFileSystem(), "base_dir": str(place)}
    if isinstance(place, ObjectPath):  # in which a folder would be an object
        target = {"filesystem": place.bucket.filesystem(), "base_dir": place.at, "create_dir": False}
    dataset.write_dataset(
        counted.reader(),
        format="parquet",
        partitioning=dataset.partitioning(pa.schema([(PART, pa.string())]), flavor="hive"),
        basename_template=f"part-{uuid.uuid4().hex[:8]}-{{i}}.parquet",
        max_rows_per_file=FILE_ROWS,
        max_rows_per_group=GROUP_ROWS,
        file_options=dataset.ParquetFileFormat().make_write_options(compression="zstd"),
        **target,
    )


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
