"""Input files for the benchmarks; the same bytes every time."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def short_rows(folder: Path, count: int) -> Path:
    """A Parquet file of short questions and a number each."""
    path = folder / f"short-{count}.parquet"
    schema = pa.schema([("q", pa.string()), ("n", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 100_000):
            numbers = range(start, min(start + 100_000, count))
            questions = [f"What is {n} plus {n % 97}? Answer with a number." for n in numbers]
            writer.write_table(pa.table({"q": questions, "n": list(numbers)}, schema=schema))
    return path
