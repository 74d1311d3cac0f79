"""Requests that no engine would answer are known at submit: parameters, schemas, lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from conserve.endpoints.protocol import Url
from conserve.errors import InputError, TemplateError, UsageError
from conserve.jobs.requests.fault import parameter_fault, prompt_fault, request_fault
from conserve.jobs.requests.file import RequestFile
from conserve.jobs.requests.json_schema import MOST_BYTES, MOST_ITEMS, MOST_SAID, schema_fault
from conserve.jobs.requests.parameter_names import unknown_name
from conserve.jobs.task import KEEP_LOGPROBS, Kind, Task
from conserve.store.books import catalog
from conserve.store.database.store import Store
from conserve.store.files import layout
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.submitting import submit

CHAT, COMPLETIONS = str(Url.CHAT), str(Url.COMPLETIONS)
MESSAGES = [{"role": "user", "content": "hi"}]
NONSENSE = {"type": "nonsense"}


def answer(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {}),
        (CHAT, {"temperature": 0, "top_p": 1, "max_tokens": 1, "n": 1, "seed": 0, "stop": "x"}),
        (CHAT, {"temperature": 2, "top_p": 1e-9, "min_p": 0, "top_k": -1, "stop": ["a", "b", "c", "d"]}),
        (CHAT, {"seed": 2**63 - 1, "presence_penalty": -2, "frequency_penalty": 2, "n": 16_384}),
        (CHAT, {"seed": -(2**63), "repetition_penalty": 0.1, "min_tokens": 0, "stop": []}),
        (CHAT, {"temperature": "0.5", "max_tokens": 3.0, "top_k": None, "n": None, "stop": None}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}),
        (COMPLETIONS, {"logprobs": 5, "min_tokens": 3, "max_tokens": 3}),
        (COMPLETIONS, {"logprobs": 0}),
        (COMPLETIONS, {"logprobs": -1}),
        (CHAT, {"response_format": {"type": "text"}}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, answer({"type": "object", "properties": {"a": {"type": ["string", "null"]}}})),
        (CHAT, answer({})),
        (CHAT, answer({"$ref": "#/$defs/a", "$defs": {"a": {"const": {"$ref": "https://example.com"}}}})),
        (CHAT, answer({"properties": {"$ref": {"type": "string"}}})),
        (CHAT, {"max_tokens": 2**31 - 1}),
        (CHAT, {"structured_outputs": {"json": {"type": "object"}}}),
        (CHAT, {"structured_outputs": {"regex": "a+"}}),
        (CHAT, {"n": 3, "temperature": 0.1}),
        (CHAT, {"anything": "else"}),
    ],
)
def test_parameters_within_their_ranges_have_no_fault(url: str, body: dict[str, Any]) -> None:
    assert parameter_fault(url, body) is None


@pytest.mark.parametrize(
    ("url", "body", "words"),
    [
        (CHAT, {"temperature": -0.1}, "temperature is a number from 0 to 2, not -0.1"),
        (CHAT, {"temperature": 2.1}, "not 2.1"),
        (CHAT, {"temperature": "hot"}, 'not "hot"'),
        (CHAT, {"temperature": [1]}, "not [1]"),
        (CHAT, {"temperature": float("nan")}, "temperature is"),
        (CHAT, {"top_p": 0}, "top_p is a number above 0 to 1, not 0"),
        (CHAT, {"top_p": 1.01}, "top_p"),
        (CHAT, {"n": 0}, "n is a whole number from 1 to 16,384, not 0"),
        (CHAT, {"n": 16_385}, "n is"),
        (CHAT, {"n": 1.5}, "n is"),
        (CHAT, {"max_tokens": 0}, "max_tokens is a whole number from 1 to 2,147,483,647, not 0"),
        (CHAT, {"max_tokens": 2**31}, "max_tokens is a whole number from 1 to 2,147,483,647, not 2147483648"),
        (CHAT, {"top_k": 10**12}, "top_k is a whole number from -1 to 2,147,483,647"),
        (CHAT, answer({"$ref": "https://example.com/a.json"}), 'refers to "https://example.com/a.json"'),
        (CHAT, answer({"properties": {"a": {"anyOf": [{"$ref": "b.json#/a"}]}}}), 'refers to "b.json#/a"'),
        (CHAT, answer({"$ref": "#/nowhere"}), 'refers to "#/nowhere", which it does not have'),
        (CHAT, answer({"$defs": {"a": {}}, "items": {"$ref": "#/$defs/b"}}), 'refers to "#/$defs/b"'),
        (CHAT, answer({"anyOf": [{"$ref": "#/anyOf/2"}, {}]}), 'refers to "#/anyOf/2"'),
        (CHAT, {"structured_outputs": {"json": {"$dynamicRef": "file:///b"}}}, "no engine fetches"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {"seed": 2**63}, "seed is a whole number of 64 bits"),
        (CHAT, {"seed": 10**400}, "seed is"),
        (CHAT, {"seed": 0.5}, "seed is"),
        (CHAT, {"stop": ""}, 'stop is a string that is not empty, or a list of such, not ""'),
        (CHAT, {"stop": ["a", ""]}, "stop is"),
        (CHAT, {"stop": 7}, "stop is"),
        (CHAT, {"stop": list("abcde")}, "stop has 5 strings, and vLLM takes 4"),
        (CHAT, {"logprobs": 5}, "top_logprobs says of how many"),
        (CHAT, {"top_logprobs": 5}, "goes with logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": -2}, "logprobs is a whole number from 0"),
        (COMPLETIONS, {"logprobs": "all"}, "logprobs is"),
        (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9 and max_tokens is only 8"),
        (CHAT, {"min_tokens": 9, "max_tokens": 8, "max_completion_tokens": None}, "max_tokens is only 8"),
        (CHAT, {"n": 2, "temperature": 0}, "one answer only"),
        (CHAT, {"response_format": "json"}, "response_format has a type"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format has a type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "with a name and a schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "is an object, not null",
        ),
        (CHAT, answer(NONSENSE), "this is no JSON schema ($.type"),
        (CHAT, {"structured_outputs": {"json": NONSENSE}}, "no JSON schema"),
        (CHAT, {"structured_outputs": {"json": json.dumps(NONSENSE)}}, "no JSON schema"),
        (CHAT, {"structured_outputs": {"json": "{"}}, "is not JSON"),
    ],
)
def test_what_no_engine_takes_is_a_fault(url: str, body: dict[str, Any], words: str) -> None:
    fault = parameter_fault(url, body)
    assert fault is not None
    assert words in fault
    assert "\n" not in fault


WHOLE = ("top_k", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "top_logprobs")
FRACTIONS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("name", [*WHOLE, "prompt_logprobs", "seed", "n", KEEP_LOGPROBS])
def test_a_part_of_a_token_is_a_fault(name: str) -> None:
    assert f"{name} is a whole number" in (parameter_fault(CHAT, {name: 1.5}) or "")
    assert f"{name} is a whole number" in (parameter_fault(CHAT, {name: "1.5"}) or "")


MOST = 2**31 - 1
LIMITS = {
    "temperature": (0, 2), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "top_k": (-1, MOST), "max_tokens": (1, MOST), "max_completion_tokens": (1, MOST), "min_tokens": (0, MOST),
    "max_output_tokens": (1, MOST), "top_logprobs": (-1, MOST), "prompt_logprobs": (-1, MOST), "n": (1, 16_384),
    KEEP_LOGPROBS: (1, MOST), "seed": (-(2**63), 2**63 - 1),
}  # fmt: skip
"""Ends of the ranges of vLLM's `SamplingParams` and `ChatCompletionRequest`."""


@pytest.mark.parametrize("name", LIMITS)
def test_the_ends_of_a_range_are_in_it_and_nothing_beyond(name: str) -> None:
    low, high = LIMITS[name]
    beside = {"logprobs": True} if name == "top_logprobs" else {}
    for value, fault in ((low - 1, True), (low, False), (high, False), (high + 1, True)):
        said = parameter_fault(CHAT, {name: value, **beside})
        assert (said is not None and said.startswith(f"{name} is a")) is fault, value


@pytest.mark.parametrize("name", FRACTIONS)
def test_parameters_of_sampling_may_be_fractions(name: str) -> None:
    assert parameter_fault(CHAT, {name: 0.25}) is None
    assert f"{name} is a number" in (parameter_fault(CHAT, {name: float("nan")}) or "")


@pytest.mark.parametrize("keyword", ["const", "default", "enum", "examples"])
def test_values_in_a_schema_are_no_schemas(keyword: str) -> None:
    value: object = {"$ref": "https://example.com"}
    schema = {keyword: value if keyword in ("const", "default") else [value]}
    assert schema_fault(schema) is None


def test_a_server_that_takes_more_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", "5")
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "3")
    assert parameter_fault(CHAT, {"stop": list("abcde")}) is None
    assert "from 1 to 3" in (parameter_fault(CHAT, {"n": 4}) or "")


@pytest.mark.parametrize(
    "schema",
    [
        [],
        "{}",
        None,
        {"$schema": []},
        {"properties": []},
        {"required": "a"},
        {"minimum": "1"},
        {"items": {"type": 3}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "nonsense"},
    ],
)
def test_schemas_that_are_none_are_named(schema: Any) -> None:
    assert schema_fault(schema) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {}}, "items": {"$ref": "#/$defs/a"}},
        {"$defs": {"a b/c~": {}}, "items": {"$ref": "#/$defs/a%20b~1c~0"}},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {}]},
        {"properties": {"next": {"$ref": "#"}}},
        {"$defs": {"a": {"$anchor": "there"}}, "items": {"$ref": "#there"}},
        {"$defs": {"a": {"$id": "a", "$defs": {"b": {}}, "items": {"$ref": "#/$defs/b"}}}},
        {"properties": {"$ref": {"type": "string"}, "x": {"const": {"$ref": "#/nowhere"}}}},
    ],
)
def test_references_within_a_schema_are_followed(schema: dict[str, Any]) -> None:
    assert schema_fault(schema) is None


def test_a_schema_nests_as_deep_as_vllm_reads() -> None:
    def nested(levels: int) -> dict[str, Any]:
        return {} if levels == 1 else {"not": nested(levels - 1)}

    assert schema_fault(nested(64)) is None
    assert "64 levels" in (schema_fault(nested(65)) or "")


def test_a_schema_is_as_long_as_a_check_may_take() -> None:
    around = len(json.dumps({"title": ""}, separators=(",", ":")))
    assert schema_fault({"title": "x" * (MOST_BYTES - around)}) is None
    longer = {"title": "x" * (MOST_BYTES - around + 1)}
    for body in (answer(longer), {"structured_outputs": {"json": json.dumps(longer)}}):
        assert "bytes, and at most 262,144 are taken; shorten it" in (parameter_fault(CHAT, body) or "")


@pytest.mark.parametrize("keyword", ["type", "required", "enum", "default"])
@pytest.mark.parametrize("under", ["properties", "dependentRequired"])
def test_items_that_would_be_compared_each_with_each_are_few(keyword: str, under: str) -> None:
    def schema(*items: object) -> dict[str, Any]:
        return {under: {"default": {keyword: [*items]}}}

    names = [f"a{number}" for number in range(MOST_ITEMS)]
    assert "a list of 501 items that are neither" in (schema_fault(schema(*names, 1)) or "")
    assert "a list of" not in (schema_fault(schema(*names[1:], 1)) or "")
    assert "a list of" not in (schema_fault(schema(*names, "z")) or "")


def test_many_values_of_one_kind_may_be_allowed() -> None:
    assert schema_fault({"enum": [f"a{number}" for number in range(10 * MOST_ITEMS)]}) is None
    assert schema_fault({"enum": [number / 2 for number in range(10 * MOST_ITEMS)]}) is None
    assert "neither all text nor all numbers" in (schema_fault({"enum": [True] * (MOST_ITEMS + 1)}) or "")


def test_what_is_said_of_a_schema_does_not_repeat_the_whole_of_it() -> None:
    fault = schema_fault({"properties": {"a": {"type": "x" * 10_000}}}) or ""
    assert "this is no JSON schema ($.properties.a.type: 'xxx" in fault
    assert len(fault) < MOST_SAID + 50


@pytest.mark.parametrize(
    ("url", "body", "words"),
    [
        (CHAT, {"messages": MESSAGES}, None),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, None),
        (CHAT, {}, "no messages"),
        (CHAT, {"messages": []}, "no messages"),
        (CHAT, {"messages": "hi"}, "no messages"),
        (CHAT, {"messages": [*MESSAGES, {"content": "x"}]}, "message 1 has no role"),
        (CHAT, {"messages": ["hi"]}, "message 0 has no role"),
        (COMPLETIONS, {"prompt": "hi"}, None),
        (COMPLETIONS, {"prompt": [1, 2]}, None),
        (COMPLETIONS, {"prompt_embeds": "..."}, None),
        (COMPLETIONS, {}, "no prompt"),
        (COMPLETIONS, {"prompt": 7}, "no prompt"),
    ],
)
def test_a_request_says_something(url: str, body: dict[str, Any], words: str | None) -> None:
    fault = prompt_fault(url, body)
    assert (fault is None) if words is None else (words in (fault or ""))
    assert request_fault(url, {**body, "n": 0}) is not None


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"messages": MESSAGES, **body}}
    return json.dumps(request)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_lines_that_cannot_be_answered_fail_without_an_engine(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("a"), line("b", temperature=9), line("c", messages=[]))
    done = submit(store, str(path), Task(kind=Kind.OPENAI))
    assert (done.rows, done.unrendered, done.first_row) == (3, 2, 1)
    rows = RequestFile(layout.requests_file(store.home, done.job_id)).read(range(3))
    assert [row.error_type for row in rows] == [None, "invalid_request", "invalid_request"]


def test_what_a_task_adds_counts_for_its_lines(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line("a", n=2), line("b", n=2, temperature=1))
    done = submit(store, str(path), Task(kind=Kind.OPENAI, params={"temperature": 0}))
    assert (done.unrendered, done.first_row) == (1, 0)


@pytest.mark.parametrize(
    "lines",
    [[line("a", url="/v1/images")], [line("a", n=0), line("b", url="/v1/images")]],
    ids=["one", "all"],
)
def test_an_input_of_which_no_row_can_be_answered_is_refused(
    store: Store, tmp_path: Path, lines: list[str]
) -> None:
    with pytest.raises(InputError, match=r"no row can be answered \(row 0: .*\); correct"):
        submit(store, str(write(tmp_path / "a.jsonl", *lines)), Task(kind=Kind.OPENAI))
    with store.read() as tx:
        assert catalog.ids(tx) == []


def test_chats_of_which_none_is_right_are_refused_with_the_first_error(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"m": []}', '{"m": null}')
    with pytest.raises(InputError, match=r"row 0: m: not a list of messages with at least one"):
        submit(store, str(path), Task(kind=Kind.MESSAGES, column="m"))


def test_the_first_error_is_the_inputs_first(store: Store, write_input: WriteInput) -> None:
    path = write_input(q=["b", "a", None, "c", None])
    with pytest.raises(TemplateError, match=r"every row \(row 0: .*\)"):
        submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q.x }}"))
    done = submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}"))
    assert (done.first_row, done.unrendered) == (2, 2)


def test_a_warning_says_the_share_and_the_first_error(write_input: WriteInput) -> None:
    done = conserve("submit", str(write_input(q=["a", None, "c", "d"])), "--prompt", "{{ q }}")
    assert done.returncode == 0
    assert "warning: 1 of 4 rows (25 %) cannot be answered and will fail; the first is row 1: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schema", '{"type":"nonsense"}'], "this is no JSON schema ($.type: 'nonsense' is not"),
        (["--temperature", "2.5"], "temperature is a number from 0 to 2"),
        (["--top-p", "0"], "top_p"),
        (["--stop", ""], "stop is"),
        (["--seed", str(2**63)], "seed is"),
        (["-n", "4", "--temperature", "0"], "one answer only"),
        (["--param", "response_format=json"], "response_format has a type"),
        (["--param", "stream=true"], "stream is no parameter"),
        (["--param", "model=x"], "name it to the job: --model"),
        (
            ["--param", "top_kk=20"],
            "has a field top_kk; did you mean top_k? If not, --unknown-params sends it",
        ),
        (["--param", "zzzz=20"], "has a field zzzz; --unknown-params sends it all the same"),
        (["--max-tokens", str(2**31)], "max_tokens is a whole number from 1 to 2,147,483,647"),
        (
            ["--schema", '{"$ref": "https://example.com/a.json"}'],
            "which no engine fetches; put it under $defs",
        ),
    ],
)
def test_parameters_are_checked_at_submit(write_input: WriteInput, arguments: list[str], words: str) -> None:
    done = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert conserve("jobs", "--json").stdout.strip() == "[]"


def test_a_parameter_of_another_server_can_be_sent(write_input: WriteInput) -> None:
    given = ["submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", "--param", "dry_multiplier=0.8"]
    done = conserve(*given, "--unknown-params", "--dry-run", "1", "--json")
    assert done.returncode == 0
    assert "dry_multiplier" in done.stdout


def test_every_field_of_vllm_is_known() -> None:
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol").CompletionRequest
    responses = pytest.importorskip("vllm.entrypoints.openai.responses.protocol").ResponsesRequest
    fields = {name for kind in (chat, completion, responses) for name in kind.model_fields}
    assert unknown_name(sorted(fields)) is None


def test_a_task_with_a_wrong_parameter_is_refused(store: Store, write_input: WriteInput) -> None:
    with pytest.raises(UsageError, match="max_tokens is"):
        submit(
            store,
            str(write_input(q=["a"])),
            Task(kind=Kind.PROMPT, template="{{ q }}", params={"max_tokens": 0}),
        )
