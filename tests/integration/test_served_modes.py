"""`conserve serve` in modes that only whole processes show: embeddings, two engines behind one address."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from conserve.engine.vllm.model.demo_model import FOLDER
from tests.integration.test_serve import FLAGS, FRANCE, MODEL, Service, answered_by_transformers, rows_file
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


def embedded_by_transformers(model: Path, texts: list[str]) -> list[list[float]]:
    """The first token's hidden state at the end, of length 1, of each text."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    plain = transformers.BertModel.from_pretrained(model, add_pooling_layer=False)
    found = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            state = plain(input_ids=ids).last_hidden_state[0, 0]
            found.append((state / state.norm()).tolist())
    return found


def test_rows_and_live_requests_that_ask_for_embeddings(demo_model: Path, tmp_path: Path) -> None:
    """No plan cuts what an encoder reads, however long the server has run."""
    bert = build_tiny_bert(tmp_path / "bert", tokenizer_from=demo_model)
    wanted = embedded_by_transformers(bert, TEXTS)
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
        for _ in range(ROUNDS):
            for text, right in zip(TEXTS, wanted, strict=True):
                answer = client.embeddings.create(model=MODEL, input=text, encoding_format="float")
                assert answer.data[0].embedding == pytest.approx(right, abs=1e-4)
        job_id = service.conserve("submit", str(path))
        together = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        for one, right in zip(together.data, wanted, strict=True):
            assert one.embedding == pytest.approx(right, abs=1e-4)
        service.until(lambda: service.job(job_id)["state"] == "completed")
        rows = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
        for row, right in zip(rows, wanted, strict=True):
            assert json.loads(row["text"]) == pytest.approx(right, abs=1e-4)
        said = service.report()
        assert said["latency_model"] is None
        assert said["preemption"]["why_off"] == "it does not generate"


def test_two_engines_behind_one_address(tiny_llama: Path, tmp_path: Path) -> None:
    greedy = answered_by_transformers(tiny_llama, FRANCE, 24)
    flags = (*FLAGS, "--data-parallel-size", "2")
    with served(tmp_path, tiny_llama, flags=flags) as service, service.client() as client:
        job_id = service.conserve("submit", str(rows_file(tmp_path, 40)))
        for _ in range(8):
            assert asked(client) == greedy
        service.until(lambda: service.job(job_id)["state"] == "completed")
        results = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
        assert [row["custom_id"] for row in results] == [str(number) for number in range(40)]
        assert all(row["text"] for row in results)
        said = service.report()
        assert said["preemption"]["why_off"] == "data parallel engines wait for each other"
        assert said["checkpoint"]["policy"] == "adaptive"


def asked(client: openai.OpenAI) -> str | None:
    """Live text."""
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
    return answer.choices[0].message.content
