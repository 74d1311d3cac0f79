"""Values that Python, UTF-8 or JSON cannot hold: each spoils its own row, or is refused in one sentence."""

import datetime
import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from conserve.errors import InputError, UsageError
from conserve.jobs.inputs.cells import Unreadable, for_python, python_values
from conserve.jobs.requests.admission import HIGHEST, LOWEST
from conserve.jobs.requests.file import RequestFile, StoredRequest
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from conserve.store.files import layout
from tests.commands import conserve, ended, until
from tests.conftest import StartForked, WriteInput
from tests.submitting import submit
from tests.tiers import in_full

PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}")
INSTANT = 1_700_000_000_123_456_789  # ns
BEYOND = 10_000_000  # days: the year 29,349


def text_of(*values: bytes) -> pa.Array:
    """A column of unchecked text."""
    offsets = [sum(map(len, values[:n])) for n in range(len(values) + 1)]
    buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def requests(store: Store, job_id: str, rows: int) -> list[StoredRequest]:
    return RequestFile(layout.requests_file(store.home, job_id)).read(range(rows))


@pytest.mark.parametrize(
    ("column", "printed"),
    [
        (pa.array([INSTANT], pa.timestamp("ns")), "2023-11-14 22:13:20.123456"),
        (pa.array([INSTANT], pa.timestamp("ns", "UTC")), "2023-11-14 22:13:20.123456+00:00"),
        (pa.array([1_001], pa.time64("ns")), "00:00:00.000001"),
        (pa.array([1_500], pa.duration("ns")), "0:00:00.000001"),
        (
            pa.array([[INSTANT]], pa.list_(pa.timestamp("ns"))),
            "[datetime.datetime(2023, 11, 14, 22, 13, 20, 123456)]",
        ),
        (pa.array([{"t": 1_001}], pa.struct([("t", pa.time64("ns"))])), "{'t': datetime.time(0, 0, 0, 1)}"),
        (pa.array([INSTANT], pa.timestamp("ns")).dictionary_encode(), "2023-11-14 22:13:20.123456"),
        (pa.array(["plain"]), "plain"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_times_in_nanoseconds_are_printed_to_the_microsecond(
    store: Store, write_input: WriteInput, column: pa.Array, printed: str
) -> None:
    done = submit(store, str(write_input(q=column)), PROMPT)
    assert [row.payload for row in requests(store, done.job_id, 1)] == [printed]


@pytest.mark.parametrize(
    ("bad", "good", "reason"),
    [
        (pa.array([BEYOND], pa.date32()), pa.array([0], pa.date32()), "a date32"),
        (pa.array([BEYOND * 86_400], pa.timestamp("s")), pa.array([0], pa.timestamp("s")), "a timestamp"),
        (text_of(b"caf\xe9"), pa.array(["café"]), "text that is not UTF-8"),
    ],
    ids=["date", "timestamp", "text"],
)
def test_a_value_that_python_cannot_hold_fails_its_row_alone(
    store: Store, write_input: WriteInput, bad: pa.Array, good: pa.Array, reason: str
) -> None:
    done = submit(store, str(write_input(q=pa.concat_arrays([bad, good]))), PROMPT)
    assert (done.rows, done.unrendered) == (2, 1)
    first, second = requests(store, done.job_id, 2)
    assert first.error_type == "template"
    assert f"column 'q' holds {reason}" in (first.error or "")
    assert second.payload is not None


def test_the_values_around_an_unreadable_one_are_read() -> None:
    found = python_values(pa.concat_arrays([text_of(b"\xff"), pa.array(["b", None])]))
    assert found == [Unreadable("text that is not UTF-8"), "b", None]
    days = python_values(pa.array([0, BEYOND, None], pa.date32()))
    assert (days[0], days[2]) == (datetime.date(1970, 1, 1), None)
    assert isinstance(days[1], Unreadable)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.map_(pa.timestamp("ns"), pa.duration("ns")), pa.map_(pa.timestamp("us"), pa.duration("us"))),
        (pa.large_list(pa.time64("ns")), pa.large_list(pa.time64("us"))),
        (pa.list_(pa.timestamp("ns"), 2), pa.list_(pa.timestamp("us"), 2)),
        (pa.timestamp("ms"), pa.timestamp("ms")),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.string())),
        (pa.int64(), pa.int64()),
    ],
    ids=str,
)
def test_types_are_for_python_at_every_depth(kind: pa.DataType, expected: pa.DataType) -> None:
    assert for_python(kind) == expected


def test_chats_that_hold_unreadable_text_fail_alone(store: Store, write_input: WriteInput) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    messages = pa.StructArray.from_arrays(
        [pa.array(["user", "user"]), text_of(b"\xff", b"ok")], fields=list(kind.value_type)
    )
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), messages, type=kind)
    done = submit(store, str(write_input(m=column)), Task(kind=Kind.MESSAGES, column="m"))
    first, second = requests(store, done.job_id, 2)
    assert (first.error_type, second.payload) == ("invalid_messages", '[{"role":"user","content":"ok"}]')


def test_an_id_that_cannot_be_read_is_refused(store: Store, write_input: WriteInput) -> None:
    path = write_input(q=["a", "b"], n=text_of(b"x", b"\xff"))
    with pytest.raises(InputError, match="the id of row 1 is text that is not UTF-8"):
        submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}", id_column="n"))


def test_half_a_surrogate_pair_fails_its_row(store: Store, write_input: WriteInput) -> None:
    path = write_input(q=[0, 1])
    task = Task(kind=Kind.PROMPT, template='{{ "\\ud800" if q else "fine" }}')
    first, second = requests(store, submit(store, str(path), task).job_id, 2)
    assert (first.payload, second.error_type) == ("fine", "template")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ q | nope }}", "mistake in line 1: No filter named 'nope'"),
        ("{{ " + "(" * 3000 + "q" + ")" * 3000 + " }}", "nests too deep"),
        ("{% if q %}" * 200 + "{% endif %}" * 200, "nests too deep"),
        ("\udcff {{ q }}", "not UTF-8"),
    ],
    ids=["filter", "parentheses", "blocks", "bytes"],
)
def test_templates_that_cannot_be_compiled_are_refused(
    store: Store, write_input: WriteInput, template: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        submit(store, str(write_input(q=["a"])), Task(kind=Kind.PROMPT, template=template))


@pytest.mark.parametrize(
    "line",
    ['{"q": ' + "[" * depth + "]" * depth + "}" for depth in (101, 2_000, 200_000)]
    + ['{"q": ' + "9" * 5000 + "}"],
    ids=["101", "2000", "200000", "digits"],
)
def test_lines_beyond_what_json_readers_take_are_named(store: Store, tmp_path: Path, line: str) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"q": [[{}]]}\n' + line)
    with pytest.raises(InputError, match=r"line 2 of .*deep\.jsonl"):
        submit(store, str(path), PROMPT)


def test_lines_as_deep_as_allowed_are_queued(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"q": ' + "[" * 99 + "]" * 99 + "}")
    assert submit(store, str(path), PROMPT).unrendered == 0


def test_numbers_of_a_column_that_is_neither_whole_nor_not_are_kept(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text(f'{{"q": {2**60 + 1}}}\n{{"q": 0.5}}')
    assert submit(store, str(path), PROMPT).rows == 2


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 2**64, 2**200])
def test_a_priority_that_no_database_holds_says_the_range(write_input: WriteInput, priority: int) -> None:
    done = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", "--priority", str(priority))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--priority goes from {LOWEST:,} to {HIGHEST:,}, not {priority}" in done.stderr


@pytest.mark.parametrize("priority", [LOWEST, HIGHEST])
def test_the_ends_of_the_range_are_taken(store: Store, write_input: WriteInput, priority: int) -> None:
    submit(store, str(write_input(q=["a"])), PROMPT, priority=priority)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--param", "x=" + "[" * 100_000], "nests too deep"),
        (["--schema", '{"a": ' + "[" * 100_000], "nests too deep"),
        (["--param", "user=" + "[" * 900 + "]" * 900], "nests too deep"),
        (["--system", "\udcff"], "not UTF-8"),
        (["--stop", "\udcff"], "not UTF-8"),
        (["--param", "user=\udcff"], "not UTF-8"),
    ],
    ids=["param", "schema", "param read", "system", "stop", "value"],
)
def test_flags_that_no_request_can_hold_are_refused(
    write_input: WriteInput, arguments: list[str], words: str
) -> None:
    done = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["a" * 300 + ".jsonl", "no\0thing.jsonl", "\udcff.jsonl"])
def test_names_that_no_file_can_have_are_a_sentence(name: str) -> None:
    done = conserve("submit", name, "--prompt", "{{ q }}")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "a"}\n')
    monkeypatch.chdir(tmp_path)
    done = conserve("submit", "", "--prompt", "{{ q }}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the name of an input is empty" in done.stderr


def begun(folder: Path) -> bool:
    """True once a submit has made its folder."""
    return any(folder.glob("jobs/.new-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, *in_full(signal.SIGHUP, signal.SIGINT)])
def test_a_submit_that_is_told_to_stop_leaves_nothing(
    tmp_path: Path, forked: StartForked, number: int
) -> None:
    folder, lines = tmp_path / "home", tmp_path / "lines"
    os.mkfifo(lines)
    heeds = {"tests.acceptance.forks:heeds": str(int(number))}
    waiting = forked("submit", "-", "--prompt", "{{ q }}", source=lines, also=heeds)
    writer = os.open(lines, os.O_RDWR)  # which waits for nothing, and nothing is written
    until(lambda: begun(folder), waiting)
    waiting.send_signal(number)
    code, stdout, stderr = ended(waiting)
    os.close(writer)
    assert (code, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert list((folder / "jobs").iterdir()) == []
