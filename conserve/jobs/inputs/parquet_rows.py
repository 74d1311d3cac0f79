"""Rows of Parquet files: of one, or of several as if they were one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import InputError, first_line
from conserve.installation import quoted
from conserve.jobs.inputs.cells import for_python, python_rows
from conserve.jobs.inputs.files import Partition, no_memory
from conserve.jobs.inputs.groups import GROUP_BYTES, ROWS_PER_GROUP
from conserve.jobs.task import Kind, Task, in_template
from conserve.store.files.objects import FilePath, source
from conserve.store.files.row_groups import grouped

WIDEST = 76  # digits of a decimal
READ_ROWS = 512  # metadata counts a text of a dictionary once, however many rows share it


class Columns(ABC):
    """Rows with the columns of a schema."""

    name: str
    schema: pa.Schema

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns."""
        return list(self.schema.names)

    def check(self, task: Task) -> None:
        """Raise `InputError` if the task's column cannot hold chats."""
        check_chats(self.schema, self.name, task)

    @abstractmethod
    def arrow(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, with these columns."""

    def batches(self, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """Yield the same rows as dictionaries of Python values."""
        for batch in self.arrow(names):
            yield python_rows(batch)


class ParquetRows(Columns):
    """Rows of a Parquet file."""

    def __init__(self, path: FilePath, name: str) -> None:
        self.path, self.name = path, name
        try:
            with pq.ParquetFile(source(path)) as file:
                self.schema = file.schema_arrow
                meta = file.metadata
        except MemoryError as error:
            raise no_memory(name, error) from error
        except (OSError, pa.ArrowException) as error:
            raise InputError(
                f"{name} is damaged or truncated ({first_line(error)}); write it again"
            ) from error
        self.num_rows: int = meta.num_rows
        self._bytes = sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))
        twice = next((n for n in self.schema.names if self.schema.names.count(n) > 1), None)
        if twice is not None:
            raise InputError(f"{name} has two columns called {twice!r}; rename one")

    def batch_rows(self) -> int:
        """Number of rows to read at once, fewer if they are long."""
        fitting = int(GROUP_BYTES * self.num_rows / max(1, self._bytes))
        return max(1, min(READ_ROWS, fitting))

    def arrow(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in file order, with these columns."""
        try:
            with pq.ParquetFile(source(self.path)) as file:
                yield from file.iter_batches(self.batch_rows(), columns=list(names))
        except MemoryError as error:
            raise no_memory(self.name, error) from error
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self.name} is damaged ({first_line(error)}); write it again") from error


class ParquetParts(Columns):
    """Rows of several Parquet files, one file after the other; a column that a file lacks is null there.

    Folders called key=value make a column of their key, where the files have none of that name.
    """

    def __init__(self, paths: Sequence[Path], name: str, partitions: Sequence[Partition]) -> None:
        self.name = name
        self.parts = [ParquetRows(path, str(path)) for path in paths]
        taken = {column for part in self.parts for column in part.columns}
        self.partitions: list[Partition] = [
            {key: value for key, value in one.items() if key not in taken} for one in partitions
        ]
        self.schema = self._unified()

    def _unified(self) -> pa.Schema:
        schema = self.parts[0].schema.remove_metadata()
        for part in self.parts[1:]:
            try:
                schema = pa.unify_schemas(
                    [schema, part.schema.remove_metadata()], promote_options="permissive"
                )
            except pa.ArrowException as error:
                raise InputError(
                    f"{part.name} has other columns than the files before it ({first_line(error)}); "
                    "give them one type, or submit the files one by one"
                ) from error
        for key in self.partitions[0]:
            values = [partition[key] for partition in self.partitions]
            schema = schema.append(pa.field(key, partition_type(values)))
        return pa.schema([field.with_nullable(True) for field in schema])

    def unjoined(self) -> str | None:
        """Reason why SQL cannot read the columns of these files while they lie apart; None if it can.

        Columns whose names differ in case alone are numbered alike in files that all have the same ones, unless
        one is a folder's.
        """
        empty = next((part for part in self.parts if not part.columns), None)
        if empty is not None:
            return f"{empty.name} has no columns, and SQL reads no such file"
        alike = len({tuple(part.columns) for part in self.parts}) == 1
        known: dict[str, str] = {}
        for name in self.columns:
            first = known.setdefault(name.lower(), name)
            if first != name and (name in self.partitions[0] or not alike):
                return (
                    f"columns {first!r} and {name!r} of {self.name} differ in case alone, which SQL confuses"
                )
        return None

    @property
    def first_rows(self) -> list[int]:
        """Row index of each file's first row."""
        starts = [0]
        for part in self.parts[:-1]:
            starts.append(starts[-1] + part.num_rows)
        return starts

    def arrow(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, with these columns in the types that fit all files."""
        wanted = pa.schema([self.schema.field(name) for name in names])
        for part, partition in zip(self.parts, self.partitions, strict=True):
            read = 0
            for batch in part.arrow([name for name in names if name in part.schema.names]):
                try:
                    yield conformed(batch, wanted, partition)
                except MemoryError as error:
                    raise no_memory(part.name, error) from error
                except pa.ArrowException as error:
                    raise misfit(batch, wanted, part.name, read) from error
                read += batch.num_rows

    def copy_to(self, path: Path) -> None:
        """Write all rows as one Parquet file."""
        with pq.ParquetWriter(
            path, self.schema, compression="zstd", compression_level=1, write_page_checksum=True
        ) as writer:
            for group in grouped(self.arrow(self.columns), rows=ROWS_PER_GROUP, size=GROUP_BYTES):
                writer.write_table(pa.Table.from_batches(group))


def partition_type(values: Sequence[int | str | None]) -> pa.DataType:
    """The type of a partition's column."""
    return pa.int64() if all(isinstance(value, int | None) for value in values) else pa.string()


def conformed(batch: pa.RecordBatch, schema: pa.Schema, partition: Partition) -> pa.RecordBatch:
    """A batch with the columns of a schema: cast, read off the file's partition, or null."""
    if not schema.names:
        return batch
    arrays = []
    for field in schema:
        if field.name in batch.schema.names:
            column = batch.column(field.name)
            arrays.append(fitted(column, field.type))
        else:
            scalar = pa.scalar(partition.get(field.name), field.type)
            arrays.append(pa.repeat(scalar, batch.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def fitted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in its type in all files together; raises `ArrowException` for a value that does not fit."""
    if column.type == kind:
        return column
    # Without a cast the widest number would have to fit.
    if pa.types.is_integer(column.type) and pa.types.is_decimal(kind):
        column = column.cast(pa.decimal256(WIDEST, kind.scale))
    return column.cast(kind)


def misfit(batch: pa.RecordBatch, schema: pa.Schema, name: str, first_row: int) -> InputError:
    """Error for a batch of a file of which a value does not fit the type of its column in all files together."""
    for field in schema:
        if field.name in batch.schema.names:
            column = batch.column(field.name)
            for row in range(len(column)):
                try:
                    fitted(column.slice(row, 1), field.type)
                except pa.ArrowException:
                    return InputError(
                        f"row {first_row + row:,} of {name} has in column {field.name!r} a {column.type} that no "
                        f"{field.type} can hold, as other files have it; correct it, or submit the files one by one"
                    )
    raise AssertionError("each value fits its column")


def check_chats(schema: pa.Schema, name: str, task: Task) -> None:
    """Raise if the type of the task's messages column is not that of chats."""
    if task.kind is not Kind.MESSAGES:
        return
    assert task.column is not None
    kind = schema.field(task.column).type
    if not is_messages(kind):
        raise InputError(
            f"column {task.column!r} of {name} is {kind}, not list<struct<role, content>>; "
            f"use --prompt {quoted(in_template(task.column))} to send it as text"
        )


def is_messages(kind: pa.DataType) -> bool:
    """True if a column's type is list<struct<role: string, content: string, ...>>."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= fields.keys() and is_text(fields["role"])


def is_text(kind: pa.DataType) -> bool:
    """True if a column's type is text, of any of Arrow's widths, or bytes, which are read as text."""
    return for_python(kind) in (pa.string(), pa.large_string(), pa.string_view())
