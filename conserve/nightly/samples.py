"""Data sets of suites: local files, their digest, and the same sample of their rows every night."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from conserve.api.handing import Source, input_of
from conserve.errors import InputError
from conserve.evals.plan import SuitePlan
from conserve.jobs.inputs.cells import Unreadable
from conserve.jobs.inputs.files import spelled_out
from conserve.jobs.inputs.fingerprint import fingerprint, together
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.parquet_rows import Columns
from conserve.jobs.inputs.source import COPY_GIB, Input, InputRows, open_input
from conserve.jobs.requests.admission import check_input, check_task
from conserve.jobs.task import Task
from conserve.store.files import layout
from conserve.store.sql.export import PROMPT
from conserve.store.sql.input_columns import RESULT_COLUMNS, shown_names
from conserve.store.sql.input_parts import InputPart, parts_of

HALF = "\ud800"  # of a surrogate pair: a row of JSON with it fails alone, in the same words as at its first reading


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Files of a suite, their digest, and the rows that are asked; None for all of them.

    `names` are the columns' own names by those that they have beside results.
    """

    paths: Sequence[str]
    digest: str
    rows: int
    chosen: Sequence[int] | None
    names: Mapping[str, str]

    @property
    def asked(self) -> int:
        """Number of rows that are asked."""
        return self.rows if self.chosen is None else len(self.chosen)

    def row_number(self, row_index: int) -> int:
        """Row of the files that a job's row is."""
        return row_index if self.chosen is None else self.chosen[row_index]

    def asked_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows that are asked, with the values that their prompts have."""
        with open_rows(self.paths) as rows:
            yield from chosen_rows(rows, self.chosen)

    @contextmanager
    def source(self) -> Iterator[Source]:
        """Yield what `Store.submit` takes: the files, or their chosen rows one after the other."""
        if self.chosen is None:
            yield self.paths
            return
        with open_rows(self.paths) as rows:
            yield (
                chosen_table(rows, self.chosen)
                if isinstance(rows, Columns)
                else chosen_rows(rows, self.chosen)
            )


def data_set(suite: SuitePlan, names: Sequence[str], folder: Path) -> DataSet:
    """Data set of a suite, sampled by its seed; raises `InputError` for a file that is missing."""
    paths = paths_of(names, folder)
    marks = [fingerprint(path) for path in spelled_out(paths).paths]
    with open_rows(paths) as rows:
        count, own = number_of(rows), own_names(list(rows.columns))
    return DataSet(
        paths=paths,
        digest=together(marks)[2],
        rows=count,
        chosen=sample(count, suite.limit, suite.seed),
        names=own,
    )


@contextmanager
def kept_inputs(data: DataSet) -> Iterator[list[InputPart]]:
    """Yield the files of the rows that are asked, as a job keeps them, with the types of the night."""
    with TemporaryDirectory() as place, data.source() as source:
        folder = layout.job_folder(Path(place), "job")
        folder.mkdir(parents=True)
        opened_input = open_input(
            input_of(source, form=None, keep=None, copy_gib=COPY_GIB), folder, openai=False
        )
        opened_input.copy_text(folder)
        yield parts_of(Path(place), "job", opened_input.source)


def size_of(names: Sequence[str], folder: Path) -> int:
    """Bytes of a suite's files."""
    return sum(path.stat().st_size for path in spelled_out(paths_of(names, folder)).paths)


def own_names(columns: Sequence[str]) -> dict[str, str]:
    """Columns by their names beside results and prompts, which the store gives in two steps."""
    in_view = shown_names(columns)
    shown = shown_names(list(in_view.values()), (*RESULT_COLUMNS, PROMPT))
    return {shown[alias]: name for name, alias in in_view.items()}


def columns_of(names: Sequence[str], task: Task, folder: Path) -> list[str]:
    """Columns of the files; raises for a missing file, or a task that asks no row anything."""
    check_task(task)
    with open_rows(paths_of(names, folder)) as rows:
        check_input(rows, task, constant_prompt=False)
        return list(rows.columns)


def paths_of(names: Sequence[str], folder: Path) -> list[str]:
    """Paths of files, which begin at the folder of nightly.toml; raises `InputError` for a URL."""
    for name in names:
        if "://" in name:
            raise InputError(
                f"{name} is a URL, and data of an evaluation lies on this machine; copy it here first"
            )
    return [str(folder / Path(name).expanduser()) for name in names]


def sample(count: int, limit: int | None, seed: int) -> list[int] | None:
    """Rows of a sample in their order; None for all. A larger limit keeps the rows of a smaller one."""
    if limit is None or limit >= count:
        return None
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return sorted(order[:limit])


@contextmanager
def open_rows(paths: Sequence[str]) -> Iterator[InputRows]:
    """Yield the rows of files where they lie."""
    with TemporaryDirectory() as scratch:
        yield open_input(Input(names=paths, keep=Keep.REFERENCE), Path(scratch), openai=False).rows


def number_of(rows: InputRows) -> int:
    """Number of rows; text has to be read for it."""
    return sum(len(batch) for batch in rows.batches(list(rows.columns)[:1]))


def chosen_rows(rows: InputRows, chosen: Sequence[int] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the chosen rows, or all of them; a value that cannot be read fails its row when it is asked for."""
    wanted, number = None if chosen is None else set(chosen), 0
    for batch in rows.batches(list(rows.columns)):
        for row in batch:
            if wanted is None or number in wanted:
                yield {name: HALF if isinstance(value, Unreadable) else value for name, value in row.items()}
            number += 1


def chosen_table(rows: Columns, chosen: Sequence[int]) -> pa.RecordBatchReader:
    """The chosen rows as a table that is read once."""
    return pa.RecordBatchReader.from_batches(rows.schema, chosen_batches(rows, chosen))


def chosen_batches(rows: Columns, chosen: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yield batches of the chosen rows."""
    wanted, begin = set(chosen), 0
    for batch in rows.arrow(list(rows.columns)):
        here = [n for n in range(batch.num_rows) if begin + n in wanted]
        begin += batch.num_rows
        if here:
            yield batch.take(pa.array(here))
