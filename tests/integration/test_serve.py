"""`conserve serve` on the real engine over HTTP: live clients, rows, a killed engine, an orderly end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import psutil
import pytest

from conserve.endpoints.http import PIECE_TOKENS
from conserve.engine.vllm.model.demo_model import FOLDER
from conserve.server_report import read
from tests import commands, patient
from tests.acceptance import aimed
from tests.held_port import hold

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the openai client's
]

KEY = "sesame"
HARVEST_KEY = "open-" + "x" * 40
MODEL = "smollm2-demo"
FLAGS = (
    *("--max-model-len", "2048", "--max-num-batched-tokens", "512"),
    *("--kv-cache-memory-bytes", str(512 << 20)),
    *("--dtype", "float32"),  # in bf16 greedy text varies with the shape of the batch
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
PROMISES = ("--ttft-slo", "5s", "--tbt-slo", "500ms")
PATIENT = {"conserve__engine__service__HARVESTER_S": commands.HANGS_S}
"""A harvester saves its progress before it is killed, however busy the machine is."""
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


class Service:
    """A `conserve serve` in a home of its own, at a port of its own."""

    def __init__(
        self,
        home: Path,
        models: Path,
        *more: str,
        promises: tuple[str, ...] = PROMISES,
        flags: tuple[str, ...] = FLAGS,
    ) -> None:
        self.home = home
        self._held_port = hold()
        self.port = self._held_port.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CONSERVE_")},
            "CONSERVE_HOME": str(home),
            "CONSERVE_MODELS": str(models),
            "CONSERVE_API_KEY": KEY,
            "CONSERVE_HARVEST_KEY": HARVEST_KEY,
            "CONSERVE_WARM_UP_S": "2",
        }
        self.said = home.parent / "said.txt"
        words = ("serve", MODEL, *promises, "--port", str(self.port), *more, *flags)
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", aimed.__name__, *aimed.command((), *words, **PATIENT)],
                cwd=commands.REPOSITORY,
                env=self.environment,
                stdout=out,
                stderr=out,
            )

    def conserve(self, *words: str) -> str:
        """Output of another command over the same store."""
        with mock.patch.dict(os.environ, self.environment):
            done = commands.conserve(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def until(self, condition: Callable[[], object], within_s: float = commands.HANGS_S) -> None:
        """Wait for it."""
        give_up_at = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < give_up_at, self.said.read_text()
            time.sleep(0.05)

    def says(self, words: str) -> bool:
        return words in self.said.read_text()

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.conserve("status", job_id, "--json"))
        return found

    def report(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = patient.get(f"{self.url}/v1/conserve", headers=headers, trust_env=False)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def client(self, key: str = KEY) -> openai.OpenAI:
        """A live client that asks once."""
        http_client = patient.Client(trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http_client)

    def kill(self) -> None:
        """Kill the server and all of its processes: none is left to end the others."""
        self._held_port.close()
        if self.process.poll() is not None:
            return
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=30)

    def engine_core(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


@pytest.fixture(scope="module")
def service(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server that finds a tiny model where the demo model is kept: most of its time goes by without computing."""
    folder = tmp_path_factory.mktemp("serve")
    models = folder / "models"
    models.mkdir()
    (models / FOLDER).symlink_to(tiny_llama)
    started = Service(folder / "home", models)
    try:
        started.until(lambda: started.says(f"serving {MODEL}"))
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module")
def greedy(tiny_llama: Path) -> str:
    """First 24 tokens of the answer to FRANCE, as the library computes them that the model is from."""
    return answered_by_transformers(tiny_llama, FRANCE, 24)


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with service.client() as made:
        yield made


@pytest.fixture
def harvester(service: Service) -> Iterator[openai.OpenAI]:
    """A client with the harvester's key."""
    with service.client(HARVEST_KEY) as made:
        yield made


def answered_by_transformers(model: Path, messages: list[dict[str, str]], tokens: int) -> str:
    """The likeliest so many tokens."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    plain = transformers.LlamaForCausalLM.from_pretrained(model)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.no_grad():
        for _ in range(tokens):
            asked = [*asked, int(plain(torch.tensor([asked])).logits[0, -1].argmax())]
    return str(tokenizer.decode(asked[-tokens:], skip_special_tokens=True))


def rows_file(folder: Path, count: int, *, longest: int | None = None, **params: Any) -> Path:
    """Rows with answers of so many tokens; the first has the `longest`."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for number in range(count):
            body = {"messages": [{"role": "user", "content": f"Count from {number} to {number + 5}."}]}
            body |= {"temperature": 0, "max_tokens": 24, **params}
            if longest is not None and number == 0:
                body["max_tokens"] = longest
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def test_openai_batches_run_at_the_live_servers_address(service: Service, client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": FRANCE, "max_tokens": 12, "temperature": 0}
    row = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps({"custom_id": f"r-{number}", **row}) for number in range(3)]
    file = client.files.create(file=("france.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    service.until(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert done.model == MODEL
    answers = [json.loads(line) for line in client.files.content(str(done.output_file_id)).text.splitlines()]
    live = client.chat.completions.create(**body).choices[0].message.content
    said = [line["response"]["body"]["choices"][0]["message"]["content"] for line in answers]
    assert said == [live] * 3
    with service.client("guess") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.batches.retrieve(batch.id)
    key = service.conserve("keys", "add", "ann", "--project", "ann")
    with service.client(key) as other:
        service.until(lambda: accepted(other))  # the server reads the keys now and then
        assert other.batches.list().data == []
        assert other.chat.completions.create(**body).choices[0].message.content == live


def accepted(client: openai.OpenAI) -> bool:
    """True once the server knows the client's key."""
    try:
        client.models.list()
    except openai.AuthenticationError:
        return False
    return True


def test_a_live_client_sees_plain_vllm(service: Service, client: openai.OpenAI, greedy: str) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
    assert whole.choices[0].message.content == greedy
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=24, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    live = read(json.dumps(service.report()).encode()).scheduler.online
    assert live.requests >= 2
    assert live.ttft_ms.p99 is not None
    assert live.ttft_ms.p99 > 0


def test_promises_are_kept_earlier_by_the_way_that_streamed_tokens_have_to_clients(
    service: Service, client: openai.OpenAI
) -> None:
    def told() -> bool:
        stream = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=8, stream=True)
        assert list(stream)
        return bool(service.report()["online"]["way_ms"]["ttft_ms"]["p99"])

    service.until(told)


def test_without_the_key_nothing_is_answered(service: Service) -> None:
    with patient.Client(base_url=service.url, trust_env=False) as http:
        routes = http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()["paths"]
        tried = {(method, path) for path, methods in routes.items() for method in methods}
        tried |= {("get", path) for path in ("/metrics", "/docs", "/load", "/v1/conserve")}
        assert ("post", "/invocations") in tried
        found = {path for method, path in tried if http.request(method, path).status_code != 401}
    assert found == {"/health", "/ping", "/version"}


def test_keys_are_in_no_command_line_log_or_report(service: Service) -> None:
    commands: list[list[str]] = []

    def harvester_runs() -> bool:
        children = psutil.Process(service.process.pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            commands[:] = [child.cmdline() for child in children]
        return any("harvest" in command for command in commands)

    service.until(harvester_runs)
    seen = [" ".join(command) for command in commands]
    seen += [
        path.read_text(errors="replace") for path in (service.home / "serving").rglob("*") if path.is_file()
    ]
    seen += [service.said.read_text(), json.dumps(service.report())]
    assert not [text for text in seen if KEY in text or HARVEST_KEY in text]


def test_a_live_client_cannot_push_others_aside(client: openai.OpenAI, harvester: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": FRANCE, "max_tokens": 1}
    for said in (
        {"priority": -1_000_000_000},
        {"vllm_xargs": {"conserve_ttft_ms": 1e-9}},
        {"vllm_xargs": {"conserve_resume": [1, 2]}},
    ):
        for stream in (False, True):
            with pytest.raises(openai.PermissionDeniedError, match="harvester's key"):
                client.chat.completions.create(**asked, extra_body=said, stream=stream)
        assert harvester.chat.completions.create(**asked, extra_body=said).choices
    with pytest.raises(openai.PermissionDeniedError, match="harvester's key"):
        client.responses.create(model=MODEL, input="a", max_output_tokens=1, extra_body={"priority": -1})
    with pytest.raises(openai.PermissionDeniedError, match="harvester's key"):
        client.chat.completions.create(**asked, extra_headers={"X-Vllm-Priority": "-1"})
    for said in ({"priority": 3}, {"vllm_xargs": {"conserve_ttft_ms": 9000}}):
        assert client.chat.completions.create(**asked, extra_body=said).choices


def test_what_cannot_be_resumed_is_refused_at_once(harvester: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "max_tokens": 40}
    saved = {"vllm_xargs": {"conserve_resume": [1, 2, 3]}}
    for more in ({"logprobs": True}, {"n": 2}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(openai.BadRequestError, match="cannot go on from saved tokens"):
            harvester.chat.completions.create(**asked, **more, extra_body=saved)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_vllms(client: openai.OpenAI, tiny_llama: Path, stream: bool) -> None:
    from transformers import AutoTokenizer

    (closing,) = AutoTokenizer.from_pretrained(tiny_llama).encode("}", add_special_tokens=False)
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": parameters}}
    asked: dict[str, Any] = {
        "model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 60, "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "logit_bias": {str(closing): 100},  # or the model writes white space for ever before it
    }  # fmt: skip
    if stream:
        deltas = [
            chunk.choices[0].delta
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices
        ]
        calls = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
        name = "".join(call.name or "" for call in calls)
        arguments = "".join(call.arguments or "" for call in calls)
    else:
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
        name, arguments = call.function.name, call.function.arguments  # type: ignore[union-attr]
    assert name == "weather"
    assert set(json.loads(arguments)) == {"city"}


def test_responses_are_answered_and_embeddings_refused_as_openai_words_it(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="What is the capital of France?", max_output_tokens=24
    )
    assert answer.output_text
    with pytest.raises(openai.NotFoundError, match="does not answer POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="a")


@pytest.mark.parametrize("key", [KEY, HARVEST_KEY])
def test_policy_and_slo_stay_what_they_are_unless_control_was_allowed(
    service: Service, client: openai.OpenAI, key: str
) -> None:
    client.completions.create(model=MODEL, prompt="One of eight iterations teaches:", max_tokens=24)
    answer = patient.post(
        f"{service.url}/v1/conserve",
        json={"policy": "priority"},
        headers={"Authorization": f"Bearer {key}"},
        trust_env=False,
    )
    assert answer.status_code == 403
    assert service.report()["policy"] == "conserve"
    model = service.report()["latency_model"]
    assert model["source"] == "warm-up"
    assert model["off"]["iterations"] > 0
    assert "model    conserve from the warm-up, off by" in service.conserve("status")


def test_the_flex_tier_and_a_high_priority_are_offline(service: Service, client: openai.OpenAI) -> None:
    before = service.report()
    client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=8, service_tier="flex")
    between = service.report()
    assert between["offline"]["tokens"] > before["offline"]["tokens"]
    assert between["offline"]["work"] > before["offline"]["work"]
    client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=8, extra_body={"priority": 1000})
    after = service.report()
    assert after["offline"]["tokens"] > between["offline"]["tokens"]
    assert after["online"]["requests"] == before["online"]["requests"]


def test_submitted_rows_run_beside_live_requests(
    service: Service, client: openai.OpenAI, greedy: str, tmp_path: Path
) -> None:
    job_id = service.conserve("submit", str(rows_file(tmp_path, 40)))
    for _ in range(6):
        answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
        assert answer.choices[0].message.content == greedy
    shown = service.conserve("status")
    assert "online   TTFT" in shown
    assert "offline  " in shown
    service.until(lambda: service.job(job_id)["state"] == "completed")
    results = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
    assert [row["custom_id"] for row in results] == [str(number) for number in range(40)]
    assert all(row["text"] for row in results)


def test_rows_say_what_they_found_in_the_prefix_cache(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    shared = "Take note of this. " * 80
    path.write_text("\n".join(json.dumps({"q": f"{shared}{number}"}) for number in range(12)))
    job_id = service.conserve("submit", str(path), "--prompt", "{{ q }}", "--max-tokens", "2")
    service.until(lambda: service.job(job_id)["state"] == "completed")
    results = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
    assert [row["row_index"] for row in results] == list(range(12))
    cached = [row["cached_tokens"] for row in results]
    assert sum(tokens >= 256 for tokens in cached) >= 6, cached
    job = service.job(job_id)
    assert job["cached_tokens"] == sum(cached)
    assert 0 < job["hit_rate"] < 1


def test_saved_tokens_come_back_as_the_beginning_of_the_answer(harvester: openai.OpenAI) -> None:
    client = harvester
    asked = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**asked, extra_body={"return_token_ids": True, "ignore_eos": True})
    ids = whole.choices[0].token_ids  # type: ignore[attr-defined]
    assert len(ids) == 40
    extra = {"return_token_ids": True, "ignore_eos": True, "vllm_xargs": {"conserve_resume": ids[:15]}}
    resumed = client.chat.completions.create(**asked, extra_body=extra)
    assert resumed.choices[0].token_ids == ids  # type: ignore[attr-defined]
    assert resumed.choices[0].message.content == whole.choices[0].message.content
    assert resumed.usage is not None
    assert resumed.usage.completion_tokens == 40
    extra["stream_interval"] = PIECE_TOKENS
    stream = client.chat.completions.create(**asked, extra_body=extra, stream=True)
    texts = [text for chunk in stream if chunk.choices and (text := chunk.choices[0].delta.content)]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) <= 6  # saved tokens, the first new one, and 24 in pieces


def test_a_request_that_is_too_long_disturbs_nobody(client: openai.OpenAI, greedy: str) -> None:
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.completions.create(model=MODEL, prompt="word " * 3000, max_tokens=8)
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == greedy


def ask_until_refused(client: openai.OpenAI) -> None:
    """One request may still slip in before the death is noticed."""
    while True:
        client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=200, timeout=200)


@pytest.mark.full
def test_a_killed_engine_comes_back_and_no_row_is_lost_or_doubled(
    service: Service, client: openai.OpenAI, greedy: str, tmp_path: Path
) -> None:
    # After the death each runs alone, since any of them may be why.
    rows = rows_file(tmp_path, 4, longest=1500, max_tokens=20, ignore_eos=True)
    job_id = service.conserve("submit", str(rows))
    service.until(lambda: service.job(job_id)["running"])
    (batch,) = client.batches.list(limit=1).data
    events, key = f"{service.url}/v1/batches/{batch.id}/events", {"Authorization": f"Bearer {KEY}"}
    with patient.stream("GET", events, headers=key, trust_env=False) as stream:
        next(stream.iter_lines())  # of a process that lives on
        service.engine_core().kill()
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)) as refused:
            ask_until_refused(client)
        assert not isinstance(refused.value, openai.APITimeoutError), "a request of a dead engine hangs"
        service.until(lambda: service.says("serving again"))
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == greedy
    service.until(lambda: service.job(job_id)["state"] == "completed")
    results = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
    assert [row["custom_id"] for row in results] == [str(number) for number in range(4)]
    assert [row["completion_tokens"] for row in results] == [1500, 20, 20, 20]


def test_sigterm_finishes_live_requests_and_saves_progress(
    service: Service, client: openai.OpenAI, tmp_path: Path
) -> None:
    job_id = service.conserve("submit", str(rows_file(tmp_path, 200, max_tokens=1500, ignore_eos=True)))
    service.until(lambda: service.job(job_id)["running"])
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    service.process.send_signal(signal.SIGTERM)
    assert [chunk for chunk in chunks if chunk.choices][-1].choices[0].finish_reason == "length"
    assert service.process.wait(600) == 0
    job = service.job(job_id)
    assert job["state"] == "queued"
    assert job["running"] == 0
    assert job["waiting"] + job["succeeded"] == 200
