"""Dry runs: of submit, which queue nothing, and of run, which leave the queue as it is."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from conserve.config import Settings, load
from conserve.endpoints import exchange
from conserve.endpoints.protocol import Url
from conserve.endpoints.tokens import ServerTokens
from conserve.errors import EndpointUnusable, SettingsError
from conserve.jobs.requests import dry_run
from conserve.jobs.requests.dry_run import DryRun, Length, dry_run_of, prompt_tokens
from conserve.jobs.task import Kind, Task
from conserve.store.books import queue
from conserve.store.books.readings import read_jobs
from conserve.store.database.store import Store
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.store_rows import claim_in, select
from tests.submitting import submit

PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}", params={"max_tokens": 4})


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No demo model of the developer's counts tokens."""
    monkeypatch.setenv("CONSERVE_MODELS", str(tmp_path / "models"))


class Words:
    """Counts words; a chat has one token more a message."""

    def __init__(self, context: int | None = None) -> None:
        self.context = context

    async def of_text(self, text: str, *, special: bool) -> int | None:
        return None if "?" in text else len(text.split()) + special

    async def of_chat(self, body: Mapping[str, Any]) -> int | None:
        return sum(len(message["content"].split()) + 1 for message in body["messages"])


def everything(settings: Settings) -> dict[str, str]:
    """Digests of all files of the store but the database's log, and the database's rows."""
    store = Store.open(settings)
    rows = {
        table: repr(select(store, f"select * from {table}"))
        for table in ("meta", "job", "lease", "request", "journal", "shard")
    }
    store.close()
    files = (path for path in settings.home.rglob("*") if path.is_file() and "conserve.db" not in path.name)
    return rows | {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def findings(settings: Settings, task: Task, tokens: Words | None) -> DryRun:
    (job,) = read_jobs(settings, now=0.0)
    return asyncio.run(dry_run_of(settings, job, task, tokens, lambda url, body: None))


def test_prompts_are_counted_and_compared_with_the_context(
    store: Store, settings: Settings, write_input: WriteInput
) -> None:
    rows = ["a", "a b c d", None, " ".join("x" * 9), " ".join("x" * 20)]
    submit(store, str(write_input(q=rows)), PROMPT)
    found = findings(settings, PROMPT, Words(context=10))
    assert (found.rows, found.unrendered, found.counted, found.prompt_tokens) == (5, 1, 4, 2 + 5 + 10 + 21)
    assert found.longest == Length(4, 21, 4)
    assert (found.too_long, found.first_too_long) == (2, Length(3, 10, 4))
    assert found.cut_short == 0
    assert "row 2" in (found.first_error or "")
    found = findings(settings, PROMPT, Words(context=12))
    assert (found.too_long, found.cut_short) == (1, 1)
    assert findings(settings, PROMPT, Words()).too_long == 0
    assert findings(settings, PROMPT, None).counted == 0


def test_an_answer_longer_than_the_context_is_too_long() -> None:
    found = DryRun("job")
    found.add_length(Length(0, 1, 11), context=10)
    found.add_length(Length(1, 1, 10), context=10)
    found.add_length(Length(2, 1, None), context=10)
    assert (found.too_long, found.cut_short, found.first_too_long) == (1, 1, Length(0, 1, 11))


def test_only_rows_that_wait_are_counted(
    store: Store, settings: Settings, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "CHUNK", 2)
    submit(store, str(write_input(q=list("abcdefgh"))), PROMPT)
    with store.write() as tx:
        lease = claim_in(tx, owner="ann", now=0.0, lease_s=9.0, limit=3)
        assert lease is not None
        queue.put_rows_back(tx, [queue.Returned(epoch=lease.epoch, job_id=lease.job_id, position=1)])
    found = findings(settings, PROMPT, Words())
    assert (found.rows, found.counted) == (6, 6)


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        (Url.COMPLETIONS, {"prompt": "a b"}, 3),
        (Url.COMPLETIONS, {"prompt": "a b", "add_special_tokens": False}, 2),
        (Url.COMPLETIONS, {"prompt": [5, 6, 7, 8]}, 4),
        (Url.COMPLETIONS, {"prompt": ["a", "a b c"]}, 4),
        (Url.COMPLETIONS, {"prompt": [[1, 2], [3, 4, 5]]}, 3),
        (Url.COMPLETIONS, {"prompt": ["a", "?"]}, None),
        (Url.CHAT, {"messages": [{"role": "user", "content": "a b"}]}, 3),
    ],
)
def test_the_longest_prompt_of_a_request_counts(url: Url, body: dict[str, Any], expected: int | None) -> None:
    assert asyncio.run(prompt_tokens(url, body, Words())) == expected


# By a server.


def server(*, models: list[dict[str, Any]] | None = None, tokenizes: bool = True) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}] if models is None else models})
        if request.url.path == "/tokenize" and tokenizes:
            body = json.loads(request.content)
            said = body.get("prompt") or "".join(message["content"] for message in body["messages"])
            return httpx.Response(200, json={"count": len(said), "max_model_len": 99, "tokens": []})
        return httpx.Response(404, json={"detail": "Not Found"})

    return httpx.MockTransport(answer)


def asked(
    transport: httpx.MockTransport, model: str | None = None
) -> tuple[int | None, int | None, int | None]:
    async def ask() -> tuple[int | None, int | None, int | None]:
        tokens = await ServerTokens.ask("http://server/v1/", api_key="k", model=model, transport=transport)
        try:
            chat = await tokens.of_chat({"messages": [{"role": "user", "content": "four"}], "temperature": 0})
            return await tokens.of_text("three", special=True), chat, tokens.context
        finally:
            await tokens.close()

    return asyncio.run(ask())


def test_a_server_counts_and_says_its_context() -> None:
    assert asked(server()) == (5, 4, 99)
    assert asked(server(models=[{"id": "a"}, {"id": "m", "max_model_len": 7}]), "m") == (5, 4, 7)
    assert asked(server(tokenizes=False)) == (None, None, None)
    with pytest.raises(EndpointUnusable, match="serves no model"):
        asked(server(models=[]))


def test_a_server_that_floods_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = server()

    def answer(request: httpx.Request) -> httpx.Response:
        reply = counts.handler(request)
        assert isinstance(reply, httpx.Response)
        return httpx.Response(reply.status_code, content=reply.content + b" " * 100)

    assert asked(httpx.MockTransport(answer), "m") == (5, 4, 99)
    monkeypatch.setattr(exchange, "PAGE_BYTES", 100)
    assert asked(httpx.MockTransport(answer), "m") == (None, None, None)


def test_a_server_is_not_asked_with_a_key_that_no_header_carries() -> None:
    with pytest.raises(SettingsError, match="correct CONSERVE_API_KEY"):
        asyncio.run(ServerTokens.ask("http://server", api_key="sk-a\nb", transport=server()))


# The commands.


def test_a_dry_run_leaves_the_queue_as_it_was(write_input: WriteInput, settings: Settings) -> None:
    path = write_input(q=["a", None, "c"])
    job_id = conserve("submit", str(path), "--prompt", "{{ q }}").stdout.strip()
    before = everything(settings)
    done = conserve("run", "--dry-run", "--endpoint", "fake:")
    assert done.returncode == 5, "a row cannot be answered"
    assert done.stdout == ""
    assert f"{job_id}: 3 rows to run" in done.stderr
    assert "1 of them cannot be answered (row 1: the template prints a null" in done.stderr
    assert "nothing was sent, and the queue is as it was" in done.stderr
    assert everything(settings) == before


def test_a_dry_run_names_what_the_embedded_engine_refuses(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    lines: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {**chat, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("chat/completions", {**chat, "use_beam_search": True}),
        ("embeddings", {"input": "hi"}),
        ("responses", {"input": "hi"}),
        ("chat/completions", chat),
    ]
    (tmp_path / "batch.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": str(n), "method": "POST", "url": f"/v1/{route}", "body": body}) + "\n"
            for n, (route, body) in enumerate(lines)
        )
    )
    conserve("submit", str(tmp_path / "batch.jsonl"), "--order", "input")
    done = conserve("run", "--dry-run")
    assert done.returncode == 5
    assert (
        "4 of them cannot be answered (row 0: the embedded engine does not parse tool calls; " in done.stderr
    )
    assert "the first run puts it there" in done.stderr
    assert "1 prompt could not be counted: no tokenizer of smollm2-demo is on this machine; " in done.stderr
    assert conserve("run", "--dry-run", "--endpoint", "fake:").returncode == 0, "a server may answer them"


def test_a_dry_run_as_json(write_input: WriteInput) -> None:
    job_id = conserve("submit", str(write_input(q=["a", "b"])), "--prompt", "{{ q }}").stdout.strip()
    done = conserve("run", job_id, "--dry-run", "--endpoint", "fake:", "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)["jobs"][job_id]
    assert (told["rows"], told["counted"], told["too_long"], told["longest"]) == (2, 0, 0, None)


def test_a_dry_run_at_a_port_that_no_machine_has_is_a_sentence(write_input: WriteInput) -> None:
    assert conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}").returncode == 0
    done = conserve("run", "--dry-run", "--endpoint", "http://127.0.0.1:65536")
    assert done.returncode == 2
    assert done.stderr.endswith("'http://127.0.0.1:65536' is no address: the last port is 65535\n")


def test_a_dry_run_names_the_jobs_that_the_run_would_refuse(write_input: WriteInput) -> None:
    path, ids = str(write_input(q=["a"])), {}
    for model in ("fake", "other", None):
        named = ["--model", model] if model else []
        ids[model] = conserve("submit", path, "--prompt", "{{ q }}", *named).stdout.strip()
    done = conserve("run", "--dry-run", "--endpoint", "fake:", "--json")
    assert done.returncode == 1
    assert f"refused: job {ids['other']} is bound to other and this run has fake; give" in done.stderr
    told = json.loads(done.stdout)["jobs"]
    assert [told[ids[model]]["refused"] is None for model in ("fake", "other", None)] == [True, False, True]
    ran = conserve("run", "--endpoint", "fake:", "--json")
    assert (ran.returncode, list(json.loads(ran.stdout)["refused"])) == (1, [ids["other"]])
    assert json.loads(ran.stdout)["refused"][ids["other"]] == told[ids["other"]]["refused"]
    assert conserve("run", "--dry-run", "--endpoint", "fake:", "--rebind").returncode == 0


def test_a_dry_run_of_nothing_says_so() -> None:
    done = conserve("run", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing to run" in done.stderr


def test_the_fake_endpoint_is_for_tests_alone(
    write_input: WriteInput, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}")
    before = everything(settings)
    monkeypatch.delenv("CONSERVE_FAKE")
    for command in (["run"], ["harvest", "--until-empty"], ["run", "--dry-run"]):
        done = conserve(*command, "--endpoint", "fake:")
        assert (done.returncode, done.stdout) == (2, "")
        assert "made-up words" in done.stderr
        assert "conserve run --dry-run" in done.stderr
    assert everything(settings) == before


def test_submit_refuses_an_input_without_rows_with_and_without_dry_run(write_input: WriteInput) -> None:
    empty = str(write_input("empty.parquet", q=[]))
    full = write_input("full.parquet", q=["a"])
    for given in ([empty], ["--sql", f"select q from '{full}' where false"]):
        for flags in ([], ["--dry-run", "1"]):
            done = conserve("submit", *given, "--prompt", "{{ q }}", *flags)
            assert (done.returncode, done.stdout) == (2, "")
            assert "the input has no rows; nothing was submitted" in done.stderr


def test_submit_shows_the_first_prompts_and_queues_nothing(
    write_input: WriteInput, settings: Settings
) -> None:
    path = write_input(q=["first\nline", None, "third"], n=[1, 2, 3])
    flags = ("--prompt", "Say {{ q }}", "--system", "Be brief.", "--max-tokens", "5", "--id", "n")
    done = conserve("submit", str(path), *flags, "--dry-run", "2")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "row 0, id 1",
        "  system: Be brief.",
        "  user: Say first",
        "        line",
        "row 1, id 2 cannot be answered: the template prints a null; write {{ column or '' }} if that is meant",
    ]
    assert "with max_tokens 5" in done.stderr
    assert "nothing was queued" in done.stderr
    assert not settings.home.exists() or not list(settings.home.rglob("*.parquet"))
    assert read_jobs(settings, now=0.0) == []


def test_previews_are_of_the_input_in_its_order_as_json(write_input: WriteInput, tmp_path: Path) -> None:
    path = write_input(q=["b", "a"])
    done = conserve("submit", str(path), "--prompt", "{{ q }}", "--completions", "--dry-run", "9", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == [
        {
            "row_index": n,
            "custom_id": None,
            "url": "/v1/completions",
            "body": {"prompt": text},
            "error": None,
            "tokens": None,
        }
        for n, text in enumerate("ba")
    ]
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 0}
    (tmp_path / "batch.jsonl").write_text(json.dumps({**line, "body": body}))
    done = conserve("submit", str(tmp_path / "batch.jsonl"), "--dry-run", "1", "--json")
    assert "n is a whole number" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("rows", ["1", str(1 << 64)])
def test_a_preview_reads_standard_input(rows: str) -> None:
    done = conserve("submit", "-", "--prompt", "{{ q }}", "--dry-run", rows, stdin='{"q": "a"}\n{"q": "b"}\n')
    shown = ["row 0", "  user: a", "row 1", "  user: b"]
    assert done.stdout.splitlines() == (shown[:2] if rows == "1" else shown)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "{{ nope }}"], "names 'nope'"),
        (["--prompt", "constant"], "names no column"),
        (["--prompt", "{{ q }}", "--temperature", "3"], "temperature"),
    ],
)
def test_a_preview_refuses_what_submit_refuses(
    write_input: WriteInput, arguments: list[str], words: str
) -> None:
    done = conserve("submit", str(write_input(q=["a"])), *arguments, "--dry-run", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_local_tokenizer_counts(tmp_path: Path, write_input: WriteInput) -> None:
    pytest.importorskip("transformers")
    from conserve.engine.vllm.model.tokenizer import folder_tokens
    from tests.tiny_models import word_tokenizer

    folder = word_tokenizer(tmp_path / "model", context=12)
    tokens = folder_tokens(str(folder), tmp_path, ["--max-model-len", "8"])
    assert tokens is not None
    assert tokens.context == 8
    assert asyncio.run(tokens.of_text("a b c", special=False)) == 3
    assert asyncio.run(tokens.of_chat({"messages": [{"role": "user", "content": "a b"}]})) == 4
    assert asyncio.run(tokens.of_chat({"messages": [{"role": "alien", "content": "a"}]})) is None
    assert folder_tokens(str(tmp_path), tmp_path) is None
    done = conserve(
        "submit", str(write_input(q=["a b"])), "--prompt", "{{ q }}", "--model", str(folder), "--dry-run", "1"
    )
    assert done.stdout.splitlines() == ["row 0, 4 tokens", "  user: a b"]
    conserve("submit", str(write_input(q=["a b", "a " * 30])), "--prompt", "{{ q }}")
    ran = conserve("run", "--dry-run", "--model", str(folder))
    assert ran.returncode == 5
    assert "1 of them is too long" in ran.stderr
    assert load().home.exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max-model-len", "8192"], 8192),
        (["--max_model_len=8k"], 8000),
        (["--max-model-len", "8192", "--max_model_len=8k"], 8000),
        (["--max-model-len", "1K"], 1024),
        (["--max-model-len", "auto"], None),
        (["--max-model-len", "-1"], None),
        (["--dtype", "float32"], None),
        ([], None),
    ],
)
def test_the_context_that_flags_ask_for(flags: list[str], expected: int | None) -> None:
    from conserve.engine.vllm.model.tokenizer import asked_length

    assert asked_length(flags) == expected
