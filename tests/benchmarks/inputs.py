"""Input files for the benchmarks; the same bytes every time."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

STRIDE = 7_368_787  # a prime: steps of it visit all numbers of a smaller range, far apart


def short_rows(folder: Path, count: int, *, shuffled: bool = False) -> Path:
    """A Parquet file of short questions and a number each."""
    path = folder / f"short-{count}.parquet"
    schema = pa.schema([("q", pa.string()), ("n", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 100_000):
            numbers: Sequence[int] = range(start, min(start + 100_000, count))
            if shuffled:
                numbers = [n * STRIDE % count for n in numbers]
            questions = [f"What is {n} plus {n % 97}? Answer with a number." for n in numbers]
            writer.write_table(pa.table({"q": questions, "n": numbers}, schema=schema))
    return path
