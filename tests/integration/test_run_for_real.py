"""`conserve run` on the real engine and the demo model: answers, exit codes, a kill that ends the engine too."""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.engine]

LONG_TOKENS = 200
ROWS = [
    {"q": "What is the capital of France?", "max_tokens": 24},
    {"q": "word " * 3000, "max_tokens": 24},  # too long for the context below
    {"q": "Tell me a long story about a lighthouse.", "max_tokens": LONG_TOKENS, "ignore_eos": True},
]
FLAGS = ("--", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(256 << 20))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "conserve", *arguments]


def conserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=240)


def saved_tokens(home: Path) -> int:
    """The most tokens that the store holds of any row in flight."""
    database = sqlite3.connect(home / "conserve.db", timeout=10)
    try:
        (length,) = database.execute("select max(length(tokens)) from request").fetchone()
    finally:
        database.close()
    return (length or 0) // 4


def batch_file(folder: Path) -> Path:
    lines = []
    for number, row in enumerate(ROWS):
        body = {"messages": [{"role": "user", "content": row["q"]}], "temperature": 0}
        body |= {name: value for name, value in row.items() if name != "q"}
        request = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(request))
    path = folder / "batch.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_killed_run_continues_its_long_row_and_the_rest_is_right(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSERVE_MODELS", str(demo_cache))
    job_id = conserve("submit", str(batch_file(tmp_path))).stdout.strip()
    with subprocess.Popen(
        command("run", *FLAGS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as first:
        give_up_at = time.monotonic() + 200
        while saved_tokens(tmp_path / "home") < 64:
            assert first.poll() is None, first.stderr and first.stderr.read()
            assert time.monotonic() < give_up_at
            time.sleep(0.1)
        engine = psutil.Process(first.pid).children(recursive=True)
        first.kill()
        _, alive = psutil.wait_procs(engine, timeout=60)
        assert alive == [], "the engine outlives the run"
        said = "".join(first.communicate())
    assert "EngineCore" not in said
    assert "Traceback" not in said

    second = conserve("run", "--json", *FLAGS)
    assert second.returncode == 5, second.stderr
    assert "Traceback" not in second.stderr

    paris, too_long, story = (json.loads(line) for line in conserve("results", job_id).stdout.splitlines())
    assert "Paris" in paris["text"]
    assert paris["error_type"] is None
    assert (too_long["error_type"], too_long["text"]) == ("too_long", None)
    assert story["completion_tokens"] == LONG_TOKENS
    assert story["finish_reason"] == "length"
    assert story["resumed_tokens"] >= 64
    assert story["attempts"] == 2
    assert json.loads(second.stdout)["resumed_tokens"] == story["resumed_tokens"]
