"""Inputs of every kind: each is queued or refused in one sentence, and of what is queued every row ends once."""

import asyncio
import csv
import gzip
import io
import json
import shutil
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from conserve.config import load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.jobs.harvest.harvester import Harvester
from conserve.store.database.store import Store
from conserve.store.files import folder_place, layout
from conserve.store.sql.query import views
from tests import virtual_time
from tests.commands import Done, conserve

from .table import report

PER_ROUND = 125  # 100,000 inputs are 800 rounds
ENOUGH = 50  # tries of a kind that say how many of them are queued
PER_STORE = 50  # jobs, until they are run

pytestmark = pytest.mark.breakage


@dataclass(frozen=True, slots=True)
class Case:
    """An input file and the flags it is submitted with."""

    kind: str
    name: str
    content: bytes
    flags: Sequence[str] = ()


# Words, values, rows.

UNICODE = st.characters(exclude_categories=["Cs"])  # every other class: letters, marks, controls, unassigned
WORDS = st.text(UNICODE, max_size=8)
NAMES = st.one_of(st.sampled_from(["q", "text", "a b", "Text", "row_index", "job_id", "", "range"]), WORDS)
IDENTIFIERS = st.sampled_from(["q", "text", "n", "größe", "данные"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    WORDS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
FLAGS = st.one_of(
    st.just([]),
    st.sampled_from(
        [
            ["--max-tokens", "3"],
            ["--temperature", "0.5", "--seed", "7"],
            ["--order", "random:3"],
            ["--order", "input"],
            ["--system", "Be brief."],
            ["--schema", '{"type": "object"}'],
            ["--schema", '{"type": "nonsense"}'],
            ["--stop", "x", "--stop", "y"],
            ["-n", "2"],
            ["--priority", "-5"],
        ]
    ),
    st.builds(lambda word: ["--name", f"n{word}"], WORDS.filter(lambda word: "\0" not in word)),
    st.builds(lambda word: ["--param", f"user={word}"], WORDS.filter(lambda word: "\0" not in word)),
)


def line(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


LINES = st.one_of(
    st.dictionaries(IDENTIFIERS, SCALARS, min_size=1, max_size=3).map(line),
    st.dictionaries(NAMES, VALUES, max_size=4).map(line),
    VALUES.map(line),
    st.binary(max_size=20),
    st.integers(1, 3000).map(lambda depth: b'{"q": ' + b"[" * depth + b"]" * depth + b"}"),
    st.just(b'{"q": "half \\ud83d"}'),
)
GOOD_LINES = st.fixed_dictionaries({"q": WORDS}, optional={"n": SCALARS, "text": VALUES}).map(line)

SOUND = st.sampled_from(["{{ q }}", "{{ q or 'none' }}", "{{ q | tojson }}", "{% if q %}{{ q }}{% endif %}"])
TEMPLATES = st.one_of(
    SOUND,
    SOUND,
    st.lists(
        st.one_of(
            WORDS,
            IDENTIFIERS.map(lambda name: "{{ " + name + " }}"),
            st.sampled_from(
                [
                    "{{ q.x }}",
                    "{{ q[0] }}",
                    "{{ q | upper }}",
                    "{{ q | nope }}",
                    "{{ 1 / 0 }}",
                    "{{ '\\ud800' }}",
                    "{{ q.__class__ }}",
                    "{% if q %}",
                    "{% endif %}",
                    "{% for x in q %}{{ x }}{% endfor %}",
                    "{% include q %}",
                    "{% set a = q %}{{ a }}",
                    "{#",
                    "{{ " + "(" * 300 + "q" + ")" * 300 + " }}",
                    "{% raw %}",
                    "{{ q ~ q }}",
                    "{{ cycler }}",
                ]
            ),
        ),
        min_size=1,
        max_size=4,
    ).map("".join),
).filter(lambda template: "\0" not in template)


@st.composite
def json_lines(draw: st.DrawFn) -> Case:
    good = st.lists(GOOD_LINES, min_size=1, max_size=4)
    odd = draw(st.sampled_from(["lines", "template", "none", "none"]))
    lines = draw(st.lists(st.one_of(GOOD_LINES, LINES), max_size=4) if odd == "lines" else good)
    template = draw(TEMPLATES if odd == "template" else SOUND)
    return Case("lines of JSON", "rows.jsonl", b"\n".join(lines), ["--prompt", template, *draw(FLAGS)])


@st.composite
def ids(draw: st.DrawFn) -> Case:
    rows = draw(
        st.lists(st.fixed_dictionaries({"q": WORDS, "id": st.one_of(WORDS, SCALARS)}), min_size=1, max_size=4)
    )
    content = b"\n".join(map(line, rows))
    return Case("ids", "rows.jsonl", content, ["--prompt", "{{ q }}", "--id", "id", *draw(FLAGS)])


MESSAGES = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "system", "", None, 7]),
                "content": st.one_of(WORDS, VALUES),
            },
            optional={"name": WORDS, "tool_calls": VALUES},
        ),
        max_size=3,
    ),
    VALUES,
)


@st.composite
def chats(draw: st.DrawFn) -> Case:
    said = WORDS.map(lambda word: [{"role": "user", "content": word}])
    rows = draw(st.lists(st.fixed_dictionaries({"m": said | said | MESSAGES}), min_size=1, max_size=4))
    return Case("chats", "chats.jsonl", b"\n".join(map(line, rows)), ["--messages", "m", *draw(FLAGS)])


GREETING = st.just({"messages": [{"role": "user", "content": "hi"}]})
BODIES = st.one_of(
    GREETING,
    st.fixed_dictionaries(
        {"messages": st.one_of(st.just([{"role": "user", "content": "hi"}]), MESSAGES)},
        optional={
            "temperature": st.one_of(st.floats(0, 2), SCALARS),
            "max_tokens": st.one_of(st.integers(1, 9), SCALARS),
            "n": SCALARS,
            "stop": VALUES,
            "seed": SCALARS,
            "logprobs": SCALARS,
            "response_format": st.one_of(st.just({"type": "json_object"}), VALUES),
            "stream": st.booleans(),
            "model": WORDS,
        },
    ),
    st.fixed_dictionaries({"prompt": st.one_of(WORDS, VALUES)}),
    VALUES,
)


@st.composite
def openai_lines(draw: st.DrawFn) -> Case:
    good = st.fixed_dictionaries(
        {
            "custom_id": st.uuids().map(str),
            "method": st.just("POST"),
            "url": st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]),
            "body": BODIES,
        }
    )
    odd = st.fixed_dictionaries(
        {"custom_id": WORDS, "method": st.sampled_from(["POST", "GET"]), "url": WORDS, "body": VALUES}
    )
    rows = draw(
        st.one_of(st.lists(good, min_size=1, max_size=4), st.lists(good | odd, min_size=1, max_size=4))
    )
    flags = [flag for flag in draw(FLAGS) if flag not in ("--system", "Be brief.")]
    return Case("OpenAI lines", "batch.jsonl", b"\n".join(map(line, rows)), flags)


# Parquet of every type.

WHOLE = st.integers(-(2**63), 2**63 - 1)


def cast(kind: pa.DataType, low: int = -(2**63), high: int = 2**63 - 1, of: pa.DataType | None = None) -> Any:
    """Columns of a type whose values are stored as integers: any bit pattern that the type allows."""
    return lambda rows: st.lists(st.none() | st.integers(low, high), min_size=rows, max_size=rows).map(
        lambda values: pa.array(values, of or pa.int64()).cast(kind)
    )


def of_python(kind: pa.DataType, values: Any) -> Any:
    """Columns of a type made from Python's values."""
    return lambda rows: st.lists(st.none() | values, min_size=rows, max_size=rows).map(
        lambda found: pa.array(found, kind)
    )


def unchecked(rows: int) -> Any:
    """Text of arbitrary bytes."""

    def column(values: list[bytes]) -> pa.Array:
        offsets = [sum(map(len, values[:n])) for n in range(rows + 1)]
        buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))]
        return pa.Array.from_buffers(pa.string(), rows, buffers)

    return st.lists(st.binary(max_size=6), min_size=rows, max_size=rows).map(column)


DAYS = (-(2**31), 2**31 - 1)
COLUMNS: list[Callable[[int], Any]] = [
    of_python(pa.string(), WORDS),
    of_python(pa.large_string(), WORDS),
    of_python(pa.string_view(), WORDS),
    unchecked,
    of_python(pa.binary(), st.binary(max_size=6)),
    of_python(pa.large_binary(), st.binary(max_size=6)),
    of_python(pa.binary(3), st.binary(min_size=3, max_size=3)),
    of_python(pa.bool_(), st.booleans()),
    *(cast(kind, -(2**7), 2**7 - 1) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *(cast(kind, 0, 2**8 - 1) for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())),
    of_python(pa.uint64(), st.integers(0, 2**64 - 1)),
    of_python(pa.float64(), st.floats()),
    of_python(pa.float32(), st.floats(width=32)),
    of_python(pa.float16(), st.floats(width=16)),
    of_python(pa.decimal128(20, 3), st.integers(-(10**16), 10**16).map(lambda n: Decimal(n) / 1000)),
    of_python(pa.decimal256(50, 0), st.integers(-(10**49), 10**49).map(Decimal)),
    cast(pa.date32(), *DAYS, of=pa.int32()),
    cast(pa.date64(), -(2**31), 2**31 - 1),
    *(cast(pa.timestamp(unit), -(2**62) // scale, 2**62 // scale) for unit, scale in
      (("s", 10**6), ("ms", 10**3), ("us", 1), ("ns", 1))),
    *(cast(pa.timestamp(unit, zone), -(2**62) // 10**6, 2**62 // 10**6) for unit, zone in
      (("s", "UTC"), ("us", "Europe/Berlin"), ("ns", "+05:30"), ("ms", "Nowhere/Land"))),
    cast(pa.time32("s"), 0, 86_399, of=pa.int32()),
    cast(pa.time32("ms"), 0, 86_399_999, of=pa.int32()),
    cast(pa.time64("us"), 0, 86_399_999_999),
    cast(pa.time64("ns"), 0, 86_399_999_999_999),
    *(cast(pa.duration(unit)) for unit in ("s", "ms", "us", "ns")),
    of_python(pa.null(), st.none()),
    of_python(pa.list_(pa.int64()), st.lists(WHOLE, max_size=3)),
    of_python(pa.large_list(pa.string()), st.lists(WORDS, max_size=3)),
    of_python(pa.list_(pa.int8(), 2), st.lists(st.integers(0, 9), min_size=2, max_size=2)),
    of_python(pa.list_(pa.timestamp("ns")), st.lists(st.integers(0, 2**60), max_size=2)),
    of_python(pa.struct([("a", pa.string()), ("b", pa.time64("ns"))]), st.fixed_dictionaries({"a": WORDS})),
    of_python(pa.map_(pa.string(), pa.int64()), st.lists(st.tuples(WORDS, WHOLE), max_size=2)),
    lambda rows: of_python(pa.string(), WORDS)(rows).map(lambda column: column.dictionary_encode()),
]  # fmt: skip


SELDOM = st.sampled_from([False] * 9 + [True])


@st.composite
def parquet(draw: st.DrawFn) -> Case:
    rows = 0 if draw(SELDOM) else draw(st.integers(1, 4))
    wanted = draw(IDENTIFIERS)
    names = [wanted, *draw(st.lists(NAMES, max_size=2, unique=not draw(SELDOM)))]
    columns = [draw(draw(st.sampled_from(COLUMNS))(rows)) for _ in names]
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.Table.from_arrays(columns, names), sink)
        content = sink.getvalue().to_pybytes()
    except (pa.ArrowException, UnicodeError):  # a type that no Parquet file holds
        content = b"PAR1"
    if draw(SELDOM):
        content = content[: draw(st.integers(0, len(content)))]
    asked = ["--prompt", "{{ " + wanted + " is none or " + wanted + " }}"]
    if draw(SELDOM):
        asked = draw(st.sampled_from([["--messages", wanted], ["--prompt", "{{ q }}"]]))
    elif draw(st.booleans()):
        asked = ["--prompt", "{{ " + wanted + " }}"]
    named = ["--id", wanted] if draw(SELDOM) else []
    return Case("Parquet", "rows.parquet", content, [*asked, *named, *draw(FLAGS)])


FILE_NAMES = st.text(UNICODE, min_size=1, max_size=12).filter(
    lambda name: not set(name) & {"/", "\0"} and name not in (".", "..", "-") and len(name.encode()) < 200
)


@st.composite
def names(draw: st.DrawFn) -> Case:
    name = draw(FILE_NAMES)
    return Case("names of files", name, b'{"q": "a"}\n{"q": "b"}', ["--prompt", "{{ q }}", *draw(FLAGS)])


FIELDS = st.one_of(WORDS, st.sampled_from(['"', '""', 'a "b" c', ",", "\t", "a\nb", "\r", " ", "007", "é"]))


@st.composite
def csv_files(draw: st.DrawFn) -> Case:
    """Fields quoted as they must be, or not; whole files, or cut off and packed."""
    width = draw(st.integers(1, 3))
    header = ["q", *draw(st.lists(WORDS, min_size=width - 1, max_size=width - 1))]
    rows = draw(st.lists(st.lists(FIELDS, min_size=width, max_size=width), min_size=1, max_size=4))
    quoting = draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_ALL, None]))
    ending = draw(st.sampled_from([".csv", ".tsv"]))
    delimiter = "," if ending == ".csv" else "\t"
    if quoting is None:
        content = "\n".join(delimiter.join(row) for row in [header, *rows]).encode()
    else:
        sink = io.StringIO()
        csv.writer(sink, delimiter=delimiter, quoting=quoting).writerows([header, *rows])
        content = sink.getvalue().encode()
    if draw(SELDOM):
        content += draw(st.binary(max_size=6))
    packing = draw(st.sampled_from(["", "", ".gz", ".zst"]))
    content = packed(content, packing)
    if draw(SELDOM):
        content = content[: draw(st.integers(0, len(content)))]
    return Case("CSV", f"rows{ending}{packing}", content, ["--prompt", "{{ q }}", *draw(FLAGS)])


def packed(content: bytes, packing: str) -> bytes:
    """The bytes as gzip or zstd packs them."""
    if packing == ".gz":
        return gzip.compress(content, mtime=0)
    return pa.compress(content, "zstd", asbytes=True) if packing == ".zst" else content


CASES = st.one_of(json_lines(), ids(), chats(), openai_lines(), parquet(), csv_files(), names())


# Submit, run, count.


@dataclass(slots=True)
class Attempts:
    """Stores that take some jobs each; their rows are counted once they have run."""

    folder: Path
    tried: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    queued: dict[str, int] = field(default_factory=dict)  # jobs of this store, and their rows
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    stores: int = 0

    @property
    def home(self) -> Path:
        return self.folder / f"home-{self.stores}"

    def submit(self, case: Case) -> None:
        """Submit one case; refused in one sentence or queued."""
        path = self.folder / case.name
        path.write_bytes(case.content)
        try:
            done = conserve(
                "--home", str(self.home), "submit", str(path), "--json", *case.flags, CONSERVE_FAKE="1"
            )
        finally:
            path.unlink()
        self.tried[case.kind] += 1
        check(done, case)
        if done.returncode == 0:
            self.accepted[case.kind] += 1
            told = json.loads(done.stdout)
            self.queued[told["job_id"]] = told["rows"]
            if len(self.queued) == PER_STORE:
                self.run()

    def run(self) -> None:
        """Run what is queued, and see that every row has ended once."""
        if self.queued:
            store = Store.open(load({"home": self.home}, environ={}))
            try:
                virtual_time.run(drained(store))
                self._count(store)
            finally:
                store.close()
        shutil.rmtree(self.home, ignore_errors=True)
        self.queued = {}
        self.stores += 1

    def _count(self, store: Store) -> None:
        with views(store, now=0.0) as opened:
            found = opened.duck.execute("select job_id, row_index from results").fetchall()
            inputs = opened.duck.execute("select job_id, row_index from inputs").fetchall()
        expected = {(job_id, row) for job_id, rows in self.queued.items() for row in range(rows)}
        self.rows += len(expected)
        self.lost += len(expected - set(found))
        self.doubled += len(found) - len(set(found))
        assert set(found) <= expected
        assert sorted(inputs) == sorted(expected)
        assert not [path for path in layout.jobs_folder(store.home).iterdir() if path.name.startswith(".")]


async def drained(store: Store) -> None:
    clock = asyncio.get_running_loop().time
    await Harvester(store, FakeEndpoint(Script(tokens=2)), max_attempts=2, clock=clock).run(asyncio.Event())


def check(done: Done, case: Case) -> None:
    """No traceback, nothing on stdout of a refusal, and one sentence that names the program."""
    assert done.returncode in (0, 2), (case, done)
    assert "Traceback" not in done.stderr, (case, done)
    said = done.stderr.split("\n")[:-1]
    if done.returncode == 2:
        assert done.stdout == "", (case, done)
        assert len(said) == 1, (case, done)
        assert said[0].startswith("conserve: "), (case, done)
    assert all(character in string.printable or character > "\x9f" for character in said[0]), (case, done)


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    found = Attempts(tmp_path)
    yield found
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_every_input_is_queued_or_refused_and_every_queued_row_ends_once(
    attempts: Attempts, rounds: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_place, "sync", lambda path: None)  # fsyncs would take most of the time
    number = rounds * PER_ROUND

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=tuple(hypothesis.HealthCheck),
    )
    @hypothesis.given(CASES)
    def try_all(case: Case) -> None:
        attempts.submit(case)

    try_all()
    attempts.run()
    for kind, tried in attempts.tried.items():
        report(f"inputs: {kind}", tried=tried, lost=0, doubled=0)
    report("rows of inputs", tried=attempts.rows, lost=attempts.lost, doubled=attempts.doubled)
    for kind, tried in attempts.tried.items():
        if tried >= ENOUGH:
            assert attempts.accepted[kind] / tried > 0.1, f"{kind}: hardly ever queued"
            # Every name of a file will do; what is refused there are a few of the flags.
            assert attempts.accepted[kind] < tried or kind == "names of files", f"{kind}: always queued"
