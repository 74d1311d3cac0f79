"""Validation of batch files: each fault is named by its line, and a file without one becomes a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from conserve.jobs.batches import lines
from conserve.jobs.batches.lines import MOST_FAULTS, MOST_NAMES, Limits, faults

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}


def found(
    folder: Path, content: bytes, limits: Limits | None = None
) -> list[tuple[int | None, str, str | None]]:
    path = folder / "input.jsonl"
    path.write_bytes(content)
    return [(fault.line, fault.code, fault.param) for fault in faults(path, CHAT, limits or Limits())]


def line(**changes: Any) -> bytes:
    row = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    return json.dumps(row).encode() + b"\n"


def test_a_good_file_has_no_fault(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + line() + b"\n  \r\n" + line(custom_id="b").rstrip(b"\n")
    assert found(tmp_path, content) == []


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b'{"a":' * 500, "invalid_json_line", None),
        (line(custom_id=...), "missing_required_parameter", "custom_id"),
        (line(body=...), "missing_required_parameter", "body"),
        (line(custom_id=1), "invalid_type", "custom_id"),
        (line(body=[]), "invalid_type", "body"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_url", "url"),
        (line(body={"a": json.loads("[" * 120 + "]" * 120)}), "invalid_json_line", None),
    ],
)
def test_a_fault_names_its_line(tmp_path: Path, bad: bytes, code: str, param: str | None) -> None:
    assert found(tmp_path, line() + b"\n" + bad.rstrip(b"\n") + b"\n") == [(3, code, param)]


def test_half_an_emoji_in_a_body_is_left_to_its_row(tmp_path: Path) -> None:
    half = {"messages": [{"role": "user", "content": "cut \ud83d"}]}
    assert found(tmp_path, line(body=half) + line(custom_id="b")) == []
    assert found(tmp_path, line(body=half) + line(body=half)) == [(2, "duplicate_custom_id", "custom_id")]
    assert found(tmp_path, line(body=half, url="/v1/embeddings")) == [(1, "mismatched_url", "url")]


def test_half_an_emoji_in_an_id_is_left_to_its_row(tmp_path: Path) -> None:
    half = line(custom_id="cut \ud83d")
    assert found(tmp_path, half + line()) == []
    assert found(tmp_path, half + line() + half) == [(3, "duplicate_custom_id", "custom_id")]
    assert found(tmp_path, half + line(custom_id=r"cut \ud83d")) == [(2, "duplicate_custom_id", "custom_id")]
    assert found(tmp_path, line(custom_id=["\ud83d"])) == [(1, "invalid_type", "custom_id")]
    assert found(tmp_path, line(url="\ud83d")) == [(1, "invalid_type", "url")]


def test_a_line_may_nest_a_hundred_levels_deep(tmp_path: Path) -> None:
    def nested(levels: int) -> bytes:
        return line(body={"a": json.loads("[" * levels + "]" * levels)})

    assert found(tmp_path, nested(98)) == []
    assert found(tmp_path, nested(99)) == [(1, "invalid_json_line", None)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"[1]", "This line is not parseable as valid JSON: a line is a JSON object."),
        (line(custom_id=1), "Invalid type for 'custom_id': expected a string."),
        (line(body=[]), "Invalid type for 'body': expected an object."),
        (line(body=...), "Missing required parameter: 'body'."),
        (line(method="x" * 99), f"The method is '{'x' * 19}…'; only POST is possible."),
        (b"\n", "The input file has no requests."),
    ],
)
def test_a_fault_is_a_sentence(tmp_path: Path, bad: bytes, said: str) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(bad)
    (fault,) = faults(path, CHAT, Limits())
    assert fault.message == said


def test_the_limits_are_openais() -> None:
    assert Limits() == Limits(file_bytes=200_000_000, requests=50_000)


def test_an_id_that_is_there_twice_is_named_at_its_second_line(tmp_path: Path) -> None:
    assert found(tmp_path, line() + line(custom_id="b") + line()) == [(3, "duplicate_custom_id", "custom_id")]


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\r\n"])
def test_a_file_without_requests_is_a_fault(tmp_path: Path, content: bytes) -> None:
    assert found(tmp_path, content) == [(None, "empty_file", None)]


def test_a_file_may_have_so_many_requests_and_no_more(tmp_path: Path) -> None:
    content = b"".join(line(custom_id=str(n)) for n in range(3))
    assert found(tmp_path, content, Limits(requests=3)) == []
    assert found(tmp_path, content, Limits(requests=2)) == [(None, "too_many_requests", None)]


def test_lines_may_have_some_fields_more_and_not_one_each(tmp_path: Path) -> None:
    """Each name is a column of the kept input, which takes memory for every line."""
    content = b"".join(line(custom_id=str(n), **{f"more {n}": n, "alike": 1}) for n in range(1000))
    assert found(tmp_path, b"".join(content.splitlines(keepends=True)[: MOST_NAMES - 1])) == []
    assert found(tmp_path, content) == [(MOST_NAMES, "too_many_fields", None)]


def test_a_line_that_would_fill_the_memory_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES", 300)
    monkeypatch.setattr(lines, "MOST_PARTS", 20)
    for bad in (b"x" * 301, line(body={"a": "x" * 300})):
        assert found(tmp_path, line() + bad + line(custom_id="b")) == [(2, "line_too_large", None)]
    for bad in (b"[[]," * 11 + b"\n", line(body={"a": [[]] * 20})):
        content = line() + bad + line()
        assert found(tmp_path, content) == [
            (2, "line_too_large", None),
            (3, "duplicate_custom_id", "custom_id"),
        ]
    assert found(tmp_path, line(body={"a": [[]] * 17})) == []


def test_of_many_faults_the_first_hundred_are_told(tmp_path: Path) -> None:
    lines = [line for line, _, _ in found(tmp_path, b"x\n" * 200)]
    assert lines == list(range(1, MOST_FAULTS + 1))
    assert MOST_FAULTS == 100
