"""A batch of 50,000 requests: seconds from the begin of its upload until its first row is done.

    python -m tests.benchmarks first_row

`conserve api` and `conserve harvest` run as for a user, on an endpoint that answers at once. The client is the
`openai` package, which reads its file from a disk, creates the batch and polls. The figure is an upper bound of the
time until the first row runs, since a row that is done has been running.
"""

import json
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

from tests.batch_rig import CHAT
from tests.benchmarks.polling import await_answer
from tests.benchmarks.report import REPOSITORY, Figure

ROWS = 50_000
RUNS = 5
POLL_S = 0.05
PORT = 8792
COMMAND = "python -m tests.benchmarks first_row"


class Seconds(NamedTuple):
    """Seconds since the begin of the upload."""

    uploaded: float
    created: float
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
    with path.open("w") as out:
        for number in range(ROWS):
            text = f"{number}: {questions[number % len(questions)]}"
            body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 16}
            row = {"custom_id": f"r-{number}", "method": "POST", "url": CHAT, "body": body}
            out.write(json.dumps(row) + "\n")
    return path.stat().st_size


def timed(home: Path, data: Path) -> Seconds:
    """One batch, from its upload to its first row."""
    with served(home) as base:
        api = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        began = time.monotonic()
        file = api.files.create(file=data, purpose="batch")
        uploaded = time.monotonic() - began
        batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        created = time.monotonic() - began
        while not (batch.request_counts and batch.request_counts.completed):
            if batch.status not in ("validating", "in_progress"):
                raise SystemExit(f"the batch is {batch.status}")
            time.sleep(POLL_S)
            batch = api.batches.retrieve(batch.id)
        return Seconds(uploaded, created, time.monotonic() - began)


@contextmanager
def served(home: Path) -> Iterator[str]:
    """The Batch API over a fresh store, and a harvester of it."""
    conserve = [sys.executable, "-m", "conserve", "--home", str(home)]
    surroundings = {**os.environ, "CONSERVE_FAKE": "1"}
    api = subprocess.Popen([*conserve, "api", "--port", str(PORT)], cwd=REPOSITORY, env=surroundings)
    base = f"http://127.0.0.1:{PORT}"
    await_answer(f"{base}/health", api)
    harvester = subprocess.Popen(
        [*conserve, "harvest", "--endpoint", "fake:", "--model", "any"], cwd=REPOSITORY, env=surroundings
    )
    try:
        yield base
    finally:
        for process in (harvester, api):
            process.terminate()
            process.wait()
