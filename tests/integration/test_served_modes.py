"""`conserve serve` with a model that embeds: rows and live requests get the vectors that they would get alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from conserve.engine.vllm.model.demo_model import FOLDER
from tests.integration.test_serve import MODEL, Service
from tests.tiny_kinds import build_tiny_bert

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(900),
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
