"""A job under little memory, bursts of live requests and three dead engines ends with every row once."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.integration.test_serve import MODEL, Service

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

ROWS, WORDS, ANSWER = 14, 120, 120  # a word is two tokens or three
MEMORY = 72 << 20  # bytes: not half of the rows and a burst
BURST = 6  # live requests at once
DEATHS = 3
ENOUGH = 1500  # tokens of rows that an engine computes before it dies
FLAGS = (
    *("--max-model-len", "1024", "--max-num-batched-tokens", "512", "--block-size", "32"),
    *("--kv-cache-memory-bytes", str(MEMORY), "--dtype", "float32"),
)


def rows_file(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for row in range(ROWS):
            words = " ".join(str(row * 1000 + number) for number in range(WORDS))
            body = {"messages": [{"role": "user", "content": f"Go on counting: {words}"}]}
            body |= {"temperature": 0, "max_tokens": ANSWER, "ignore_eos": True}
            line = {"custom_id": str(row), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


@contextmanager
def bursts(client: openai.OpenAI) -> Iterator[None]:
    """Live requests that come together, again and again, whatever becomes of them."""
    over = threading.Event()

    def ask(number: int) -> None:
        words = " ".join(str(number * 100 + word) for word in range(80))
        try:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": words}], max_tokens=24, timeout=60
            )
        except openai.OpenAIError:  # the engine has died
            over.wait(1.0)

    def play() -> None:
        number = 0
        with ThreadPoolExecutor(BURST) as pool:
            while not over.wait(3.0):
                list(pool.map(ask, range(number, number + BURST)))
                number += BURST

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_every_row_comes_once(demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integration.test_serve.FLAGS", FLAGS)
    ours = ("--kv-checkpoint", "eager", "--kv-host-memory", "512MiB")
    service = Service(tmp_path / "home", demo_cache, *ours)
    restored = 0
    try:
        service.until(lambda: service.says(f"serving {MODEL}"))
        job_id = service.conserve("submit", str(rows_file(tmp_path)))
        with service.client() as client, bursts(client):
            for death in range(1, DEATHS + 1):
                service.until(lambda: service.report()["offline"]["tokens"] > ENOUGH)
                if death == 1:  # memory is short only once most prompts are computed
                    service.until(lambda: service.report()["checkpoint"]["tokens_restored"] > 0)
                shown = service.conserve("status")
                assert all(word in shown for word in (" saved, ", " restored, ", " recomputed")), shown
                restored += service.report()["checkpoint"]["tokens_restored"]
                assert service.job(job_id)["state"] != "completed", f"before death {death}"
                service.engine_core().kill()
                service.until(lambda death=death: service.said.read_text().count("serving again") == death)
        service.until(lambda: service.job(job_id)["state"] == "completed")
        results = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
        assert [row["custom_id"] for row in results] == [str(number) for number in range(ROWS)]
        assert [row["completion_tokens"] for row in results] == [ANSWER] * ROWS
        assert sum(row["resumed_tokens"] for row in results) > 0
        assert restored > 0
    finally:
        service.kill()
