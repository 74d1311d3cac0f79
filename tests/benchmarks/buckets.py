"""SQL over 10 million results in 100 shards: in a folder, and in a bucket of moto's server."""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import insert

from conserve.config import load
from conserve.store.books import catalog, results
from conserve.store.books.catalog import Source
from conserve.store.books.job_terms import JobTerms
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import digests, layout
from conserve.store.files.marks import Mark
from conserve.store.files.objects import below
from conserve.store.files.place import place_of, scratch_of
from tests.benchmarks.report import Figure, Finished, conserve
from tests.s3 import KEYS, make_bucket, s3_server

SHARDS = 100
ROWS = 100_000  # in each
RUNS = 3
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
]
JOB = "many-rows"
QUERY = "select finish_reason, count(*), sum(completion_tokens), avg(prompt_tokens) from results group by 1"
LOOK_UP = f"select text from results where job_id = '{JOB}' and row_index = 7654321"
COMMAND = "python -m tests.benchmarks buckets"


def measure() -> list[Figure]:
    """Wall time and peak memory of an aggregate and of the look-up of one row."""
    figures = []
    for where in ("folder", "bucket"):
        with tempfile.TemporaryDirectory() as folder, place(where, Path(folder)) as data:
            at_home = Path(folder) / "home"
            fill(at_home, data)
            for name, query in (("aggregate", QUERY), ("one row", LOOK_UP)):
                runs = [conserve("sql", query, home=at_home) for _ in range(RUNS)]
                figures += figures_of(f"{name} over 10 million results, {where}", runs)
    return figures


def figures_of(name: str, runs: list[Finished]) -> list[Figure]:
    """Figures of one query."""
    wall_s, peak_mb = [run.wall_s for run in runs], [run.peak_mb for run in runs]
    return [
        Figure(name=f"{name}: time", unit="s", samples=wall_s, target="", reached=True, command=COMMAND),
        Figure(
            name=f"{name}: peak memory",
            unit="MB",
            samples=peak_mb,
            target="<= 2000",
            reached=max(peak_mb) <= 2000,
            command=COMMAND,
        ),
    ]


@contextmanager
def place(where: str, folder: Path) -> Iterator[str]:
    """Yield the place of the files: a folder, or a bucket that is served meanwhile."""
    if where == "folder":
        yield str(folder / "data")
        return
    with s3_server() as server, mock.patch.dict("os.environ", KEYS):
        yield f"s3://{make_bucket(server)}/team?endpoint=http://{server}"


def fill(at: Path, data: str) -> None:
    """Make a store with one job, and shards of results that no engine computed."""
    store = Store.open(load({"home": at, "data": data}, environ={}))
    folder = layout.job_folder(store.data, JOB)
    place_of(folder / layout.RESULTS).make_with_parents()
    with store.write() as tx:
        source = Source(path=None, format="table")
        catalog.add(
            tx,
            JOB,
            JobTerms(),
            source=source,
            num_rows=SHARDS * ROWS,
            task='{"kind":"prompt"}',
            now=0.0,
        )
        record = catalog.record(tx, JOB)
    place_of(folder).set_mark(Mark(store_id=store.id, registered=True, record=record))
    for number in range(SHARDS):
        path = folder / layout.RESULTS / f"{number:03}.parquet"
        with scratch_of(path, store.local) as scratch:
            pq.write_table(shard(number), scratch, compression="zstd", write_page_checksum=True)
            seal = digests.seal(scratch)
            place_of(path).write(scratch)
        values = {"job_id": JOB, "file": below(path, store.data), "failed": False, "num_rows": ROWS}
        with store.write() as tx:
            tx.execute(
                insert(schema.shard).values(
                    **values, created_at=time.time(), digest=seal.digest, bytes=seal.bytes
                )
            )
    store.close()


def shard(number: int) -> pa.Table:
    """Results of one shard: answers of 30 words."""
    dice, numbers = random.Random(number), np.random.default_rng(number)
    answers = [" ".join(dice.choices(WORDS, k=30)) for _ in range(1000)]
    positions = range(number * ROWS, (number + 1) * ROWS)
    empty = results.to_arrow([], [], [])
    columns = {
        "job_id": pa.repeat(pa.scalar(JOB), ROWS),
        "position": pa.array(positions),
        "row_index": pa.array(positions),
        "text": pa.array(answers).take(pa.array(numbers.integers(0, 1000, ROWS))),
        "finish_reason": pa.array(["stop", "length"]).take(pa.array(numbers.integers(0, 2, ROWS))),
        "prompt_tokens": pa.array(numbers.integers(10, 500, ROWS)),
        "completion_tokens": pa.array(numbers.integers(1, 60, ROWS)),
    }
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(ROWS, field.type)
        for field in empty.schema
    ]
    return pa.Table.from_arrays(arrays, schema=empty.schema)
