"""`conserve serve` in other modes: rows and live requests get the vectors or texts that they would get alone."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from conserve.engine.vllm.model.demo_model import FOLDER
from tests import patient
from tests.integration.test_serve import KEY, MODEL, Service
from tests.tiny_kinds import build_tiny_bert

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the openai client's
]
TEXTS = [" ".join(f"word{n * 31 + place}" for place in range(5 + 11 * n)) for n in range(12)]
ROUNDS = 6  # of live requests: far more iterations than a latency model is learned from


@contextmanager
def served(folder: Path, model: Path, **rest: Any) -> Iterator[Service]:
    """A server that finds this model where the demo model is kept."""
    models = folder / "models"
    models.mkdir()
    (models / FOLDER).symlink_to(model)
    started = Service(folder / "home", models, **rest)
    try:
        started.until(lambda: started.says(f"serving {MODEL}"))
        yield started
    finally:
        started.kill()


def embedded(client: openai.OpenAI, asked: str | list[str]) -> list[list[float]]:
    """The vector of each text."""
    answer = client.embeddings.create(model=MODEL, input=asked, encoding_format="float")
    return [one.embedding for one in answer.data]


def assert_close(got: list[list[float]], wanted: list[list[float]]) -> None:
    assert [*map(len, got)] == [*map(len, wanted)]
    for one, right in zip(got, wanted, strict=True):
        assert one == pytest.approx(right, abs=1e-4)


def test_rows_and_live_requests_that_ask_for_embeddings(demo_model: Path, tmp_path: Path) -> None:
    """No plan cuts what an encoder reads, however long the server has run."""
    bert = build_tiny_bert(tmp_path / "bert", tokenizer_from=demo_model)
    flags = ("--max-model-len", "512", "--dtype", "float32", "--max-num-batched-tokens", "512")
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number, text in enumerate(TEXTS):
            line = {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"input": text},
            }
            file.write(json.dumps(line) + "\n")
    with served(tmp_path, bert, promises=(), flags=flags) as service, service.client() as client:
        wanted = [embedded(client, text)[0] for text in TEXTS]
        assert len({round(vector[0], 4) for vector in wanted}) > len(TEXTS) // 2, "nothing to compare"
        for _ in range(ROUNDS):
            assert_close([embedded(client, text)[0] for text in TEXTS], wanted)
        job_id = service.conserve("submit", str(path))
        assert_close(embedded(client, TEXTS), wanted)
        service.until(lambda: service.job(job_id)["state"] == "completed")
        rows = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
        assert_close([json.loads(row["text"]) for row in rows], wanted)
        said = service.report()
        assert said["latency_model"] is None
        assert said["preemption"]["why_off"] == "it does not generate"


@pytest.fixture
def one_thread_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two engines share the cores: threads that wait for each other would spin on them."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def completed(client: openai.OpenAI, asked: dict[str, Any]) -> str:
    """The answer to a live request."""
    return client.completions.create(model=MODEL, **asked).choices[0].text


def metrics(service: Service) -> str:
    """The page of /metrics."""
    headers = {"Authorization": f"Bearer {KEY}"}
    page: str = patient.get(f"{service.url}/metrics", headers=headers, trust_env=False).text
    return page


def prompt_tokens(page: str) -> dict[str, float]:
    """Prompt tokens of each engine, as vLLM counts them."""
    found = re.findall(r'^vllm:prompt_tokens_total\{engine="(\d+)".*\} (\S+)$', page, re.MULTILINE)
    return {engine: float(count) for engine, count in found}


@pytest.mark.usefixtures("one_thread_an_engine")
def test_two_data_parallel_engines(six_layers: Path, tmp_path: Path) -> None:
    """Rows and live requests of both engines get their answers, and the report has all of them."""
    flags = (
        *("--data-parallel-size", "2", "--max-model-len", "2048", "--max-num-batched-tokens", "512"),
        *("--kv-cache-memory-bytes", str(128 << 20), "--dtype", "float32"),
    )
    shape = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    rows = [
        {"prompt": " ".join(f"word{n * 37 + place}" for place in range(40 + 9 * n)), **shape}
        for n in range(24)
    ]
    live = [{"prompt": " ".join(f"live{n * 41 + place}" for place in range(20)), **shape} for n in range(12)]
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number, row in enumerate(rows):
            body = {"prompt": row["prompt"], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    with served(tmp_path, six_layers, flags=flags) as service, service.client() as client:
        wanted = [completed(client, one) for one in live]
        assert len({*wanted}) > len(live) // 2, "nothing to compare"
        before, at_first = service.report(), prompt_tokens(metrics(service))
        assert (before["engines"], before["max_num_seqs"] % 2) == (2, 0)
        assert before["online"]["requests"] == len(live)
        assert before["latency_model"]["source"] == "warm-up"
        assert before["preemption"]["why_off"] is None
        assert [*at_first] == ["0", "1"]
        job_id = service.conserve("submit", str(path))
        rounds = 0
        with ThreadPoolExecutor(len(live)) as threads:
            while service.job(job_id)["state"] != "completed":
                assert [*threads.map(partial(completed, client), live)] == wanted
                rounds += 1
        job, after = service.job(job_id), service.report()
        page = metrics(service)
        assert all(count > at_first[engine] for engine, count in prompt_tokens(page).items())
        assert after["online"]["requests"] == len(live) * (1 + rounds)
        computed = job["prompt_tokens"] - job["cached_tokens"] + job["completion_tokens"] - len(rows)
        assert job["completion_tokens"] == 24 * len(rows)
        assert after["offline"]["tokens"] - before["offline"]["tokens"] >= computed
        assert f"conserve_offline_tokens_total {float(after['offline']['tokens'])}\n" in page
        found = [json.loads(line)["text"] for line in service.conserve("results", job_id).splitlines()]
        assert found == [completed(client, row) for row in rows]
