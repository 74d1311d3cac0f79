"""A batch of 50,000 requests: seconds from the begin of its upload until its first row is done.

    python -m tests.benchmarks first_row

`conserve api` and `conserve harvest` run as for a user, on an endpoint that answers at once. The client is the
`openai` package, which reads its file from a disk, creates the batch and polls. The figure is an upper bound of the
time until the first row runs, since a row that is done has been running.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import openai
import pyarrow.parquet as pq

from tests.batch_rig import CHAT, lines
from tests.benchmarks.polling import ended_with_block, served
from tests.benchmarks.report import REPOSITORY, Figure

ROWS = 50_000
RUNS = 5
POLL_S = 0.05
COMMAND = "python -m tests.benchmarks first_row"


class Seconds(NamedTuple):
    """Seconds since the begin of the upload."""

    uploaded: float
    first_row: float


def measure() -> list[Figure]:
    """Medians over `RUNS` fresh stores."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        size = written(data)
        runs = [timed(Path(folder) / f"home-{number}", data) for number in range(RUNS)]
    first = [run.first_row for run in runs]
    return [
        Figure(
            name=f"a batch of {ROWS:,} rows: from upload to first row done",
            unit="s",
            samples=first,
            target="<= 10",
            reached=statistics.median(first) <= 10,
            command=COMMAND,
            note=f"{size / 1e6:.0f} MB; the upload alone {statistics.median(run.uploaded for run in runs):.1f} s",
        )
    ]


def written(path: Path) -> int:
    """Write the rows, GSM8K's questions again and again with a number each; returns the file's size in bytes."""
    questions = pq.read_table(REPOSITORY / "examples" / "gsm8k.parquet").column("question").to_pylist()
    texts = [f"{number}: {questions[number % len(questions)]}" for number in range(ROWS)]
    return path.write_bytes(lines(texts))


def timed(home: Path, data: Path) -> Seconds:
    """One batch, from its upload to its first row."""
    with harvested(home) as base:
        api = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        began = time.monotonic()
        file = api.files.create(file=data, purpose="batch")
        uploaded = time.monotonic() - began
        batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while not (batch.request_counts and batch.request_counts.completed):
            if batch.status not in ("validating", "in_progress"):
                raise SystemExit(f"the batch is {batch.status}")
            time.sleep(POLL_S)
            batch = api.batches.retrieve(batch.id)
        return Seconds(uploaded, time.monotonic() - began)


@contextmanager
def harvested(home: Path) -> Iterator[str]:
    """The Batch API over a fresh store, and a harvester of it."""
    harvest = ("harvest", "--endpoint", "fake:", "--model", "any")
    words = [sys.executable, "-m", "conserve", "--home", str(home), *harvest]
    with served(home) as (base, _):
        harvester = subprocess.Popen(words, cwd=REPOSITORY, env={**os.environ, "CONSERVE_FAKE": "1"})
        with ended_with_block(harvester):
            yield base
