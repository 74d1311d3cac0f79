"""`conserve run` beside vLLM's own run_batch: the same rows, model and engine flags, in turn, both orders."""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from conserve.config import load
from conserve.engine.vllm.launching.number_format import format_of
from conserve.engine.vllm.model.demo_model import ensure_demo_model
from tests.benchmarks.report import REPOSITORY, Figure, conserve, timed

PAIRS = 10  # alternating which goes first
MAX_TOKENS = 64
FLAGS = (
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    str(1 << 30),
    "--max-num-seqs",
    "128",
)
FLAGS += ("--enable-prefix-caching", "--max-model-len", "2048")


def measure() -> list[Figure]:
    """Rows a second from a ready engine to the last durable answer: ours over theirs, pair by pair."""
    model = str(ensure_demo_model(load().models_folder))
    chosen = format_of(model)
    flags = (*FLAGS, "--dtype", chosen.name if chosen else "auto")
    with tempfile.TemporaryDirectory() as folder:
        batch = batch_file(Path(folder))
        rows = sum(1 for _ in batch.open())
        ours, theirs, cpu_share = [], [], []
        for pair in range(PAIRS):
            for who in ("ours", "theirs") if pair % 2 == 0 else ("theirs", "ours"):
                if who == "ours":
                    work_s, cpu_s = run_conserve(Path(folder) / f"home-{pair}", batch, model, flags)
                    ours.append(rows / work_s)
                    cpu_share.append(100 * cpu_s / work_s)
                else:
                    theirs.append(rows / run_vllm(Path(folder), batch, model, flags))
                print(
                    f"     pair {pair + 1}: {who} {(ours if who == 'ours' else theirs)[-1]:.3f} rows/s",
                    flush=True,
                )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [
        Figure(
            name=f"conserve run / vLLM run_batch, {rows} GSM8K rows",
            unit="ratio",
            samples=ratios,
            target=">= 1.0",
            reached=statistics.median(ratios) >= 1.0,
            command="python -m tests.benchmarks run_batch",
            note=f"rows/s: {', '.join(f'{a:.2f}/{b:.2f}' for a, b in zip(ours, theirs, strict=True))}",
        )
    ]


def batch_file(folder: Path) -> Path:
    """The example's questions as an OpenAI Batch file."""
    path = folder / "batch.jsonl"
    questions = pq.read_table(REPOSITORY / "examples" / "gsm8k.parquet")["question"].to_pylist()
    with path.open("w") as file:
        for number, question in enumerate(questions):
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            }
            line = {
                "custom_id": f"row-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")
    return path


def run_conserve(home: Path, batch: Path, model: str, flags: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of work and of the front end's CPU time."""
    conserve("submit", str(batch), home=home)
    done = conserve("run", "--json", "--model", model, "--", *flags, home=home)
    outcome = json.loads(done.stdout)
    assert outcome["failed"] == 0, outcome
    return outcome["work_s"], done.cpu_s


def run_vllm(folder: Path, batch: Path, model: str, flags: tuple[str, ...]) -> float:
    """Seconds of work."""
    out = folder / "out.jsonl"
    command = [sys.executable, "-m", "tests.benchmarks.vllm_run_batch", "-i", str(batch), "-o", str(out)]
    done = timed([*command, "--model", model, "--served-model-name", "demo", "--disable-log-stats", *flags])
    answers = [json.loads(line) for line in out.open()]
    assert all(answer["error"] is None for answer in answers), answers[0]
    return float(done.stdout.strip().splitlines()[-1])
