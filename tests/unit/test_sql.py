"""`conserve sql` as a user meets it."""

import contextlib
import csv
import gzip
import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from unittest import mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.cli import app, output, queries, stdout
from conserve.store.sql.named_files import kind_of, named_file
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forked
from tests.commands import conserve, ended, until
from tests.conftest import StartForked, WriteInput
from tests.unit.test_answer import Ticking
from tests.unit.test_cli import submit

ENDLESS = "select count(*) from range(1000000000000) where hash(range) = 1"
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "first-file.md"


def lines(*arguments: str) -> list[dict[str, object]]:
    done = conserve("sql", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_sums_are_numbers(write_input: WriteInput) -> None:
    done = conserve(
        "sql",
        "--json",
        "select sum(range) as s, 9007199254740993::bigint as exact, "
        "170141183460469231731687303715884105727 as huge, 1.50::decimal(5, 2) as d, "
        "avg(range) as mean from range(4)",
    )
    assert done.stdout == (
        '{"s":6,"exact":9007199254740993,"huge":170141183460469231731687303715884105727,"d":1.50,"mean":1.5}\n'
    )


def test_the_query_of_the_first_tutorial_answers_over_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands_of = [line.strip() for line in TUTORIAL.read_text().splitlines() if line.startswith("    ")]
    subprocess.run(next(line for line in commands_of if line.startswith("printf ")), shell=True, check=True)
    (select,) = [shlex.split(line)[2] for line in commands_of if line.startswith("conserve sql ")]
    assert conserve("submit", "reviews.csv", "--prompt", "{{ text }}").returncode == 0
    assert conserve("run", "--endpoint", "fake:", CONSERVE_FAKE="1").returncode == 0
    assert {row["input_text"] for row in lines(select)} == {
        "The parcel came late and open.",
        "Good soup, friendly people.",
    }


def test_wide_letters_take_two_places_of_a_column_and_accents_none() -> None:
    """Names of models and answers are in any language."""
    rows = [["日本語", "1"], ["cafe\u0301", "22"], ["\x1b[31mok\x1b[0m", "3"], ["a\u200db", "4"]]
    found = output.columns(["語", "n"], rows, right=[1])
    assert [output.STYLE.sub("", line) for line in found] == [
        "語       n",
        "日本語   1",
        "cafe\u0301    22",
        "ok       3",
        "a\u200db       4",
    ]


def test_csv_ends_its_lines_in_a_newline_alone() -> None:
    done = conserve(
        "sql", "--csv", "select 'a\r\nb' as text, 'c\rd' as r, 'e\nf' as n, [1, 2] as list, null as z"
    )
    assert done.stdout == 'text,r,n,list,z\n"a\r\nb","c\rd","e\nf","[1,2]",\n'
    assert list(csv.reader(io.StringIO(done.stdout, newline="")))[1] == [
        "a\r\nb",
        "c\rd",
        "e\nf",
        "[1,2]",
        "",
    ]


def test_columns_of_one_name_are_all_there() -> None:
    assert lines("select 1 as a, 2 as a, 3 as A_1") == [{"a": 1, "a_2": 2, "A_1": 3}]


def test_pivot(write_input: WriteInput) -> None:
    submit(write_input(q=["a", "b", "c"], kind=["x", "y", "x"], n=[1, 2, 3]))
    assert lines("pivot inputs on kind using sum(n) group by job_id")[0]["x"] == 4
    assert lines("from (pivot inputs on kind using sum(n) group by job_id) select y") == [{"y": 2}]
    assert lines("select * from (select kind, n from inputs) pivot (sum(n) for kind in ('x', 'z'))") == [
        {"x": 4, "z": None}
    ]
    assert lines("""from (select kind, n as "copy" from inputs) pivot (sum("copy") for kind in ('x'))""")


@pytest.mark.parametrize(
    "sql",
    [
        "create type t as enum ('a'); select 1",
        "create temp table t as select 1; select 1",
        "pivot (from range(3)) on range; select 1",
    ],
)
def test_pivot_lets_nothing_else_in(sql: str) -> None:
    done = conserve("sql", sql)
    assert done.returncode == 2
    assert "one statement at a time" in done.stderr


def test_a_query_that_is_not_utf8_is_refused_in_a_sentence() -> None:
    done = conserve("sql", "select '\udcff'")
    assert done.returncode == 2
    assert done.stderr == "conserve: the query is not UTF-8; write it again in UTF-8\n"


@pytest.mark.parametrize(
    "sql", ["summarize results", "summarize select 1 as a", "describe inputs", "show tables"]
)
def test_looking_around(sql: str, write_input: WriteInput) -> None:
    submit(write_input(q=["a"]))
    assert lines(sql)
    assert conserve("sql", sql).returncode == 0


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_an_answer_can_be_a_file(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"out.{ending}"
    done = conserve("sql", "-o", str(out), "select range as n, 'x' as s from range(3000)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"wrote 3,000 rows to {out}\n")
    if ending == "parquet":
        table = pq.read_table(out)
        assert (table.num_rows, table["n"].to_pylist()[-1]) == (3000, 2999)
    else:
        text = out.read_text()
        assert text.startswith("n,s\n0,x\n" if ending == "csv" else '{"n":0,"s":"x"}\n')
        assert text.count("\n") == 3000 + (ending == "csv")


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_every_type_of_duckdbs_can_be_written(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"out.{ending}"
    done = conserve("sql", "-o", str(out), "from test_all_types()")
    assert done.returncode == 0, done.stderr
    if ending == "parquet":
        rows = pq.read_table(out).to_batches()
        assert [batch.num_rows for batch in rows] == [3]
    elif ending == "csv":
        assert len(list(csv.reader(out.read_text().splitlines(keepends=True)))) == 4
    else:
        assert len([json.loads(line) for line in out.read_text().splitlines()]) == 3


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("what was there")
    sql = "select case when range = 90000 then error('no') else range end as n from range(100000)"
    done = conserve("sql", "-o", str(out), sql)
    assert done.returncode == 2
    assert out.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.csv"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-o", "out.txt", "select 1"], 2, "end it in .parquet, .csv or .jsonl"),
        (["-o", "nowhere/out.csv", "select 1"], 2, "there is no folder"),
        (["-o", ".", "--csv", "select 1"], 2, "is a folder"),
        (["--json", "--csv", "select 1"], 2, "not both"),
        (["--json", "-o", "out.csv", "select 1"], 2, "ends as csv does, and --json asks for jsonl"),
        (["--csv", "-o", "out.parquet", "select 1"], 2, "leave --csv out"),
        (["--memory", "lots", "select 1"], 2, "a size like 4GiB"),
        (["--memory", "1MiB", "select 1"], 2, "too little memory"),
        (["--memory", "9000000TiB", "select 1"], 2, "a size below 8388608TiB"),
        (["--memory", "9" * 400 + "TiB", "select 1"], 2, "a size below 8388608TiB"),
        (["--timeout", "0.2", ENDLESS], 1, "longer than 0.2 s"),
        (["--memory", "512MiB", "select repeat('x', 2000000000)"], 1, "more memory than 512 MiB"),
        (["select cast('x' as int)"], 2, "Could not convert string 'x'"),
        (["--with", "a", "select 1"], 2, "--with takes NAME=PATH"),
        (["--with", "a b=x.csv", "select 1"], 2, "--with takes NAME=PATH"),
        (["--with", "a=nowhere.csv", "select 1"], 2, "there is no file"),
        (["--with", "a=*.csv", "select 1"], 2, "patterns are not expanded"),
        (["--with", "a=/dev/zero", "select 1"], 2, "there is no file"),
        (["--with", f"a={__file__}", "select 1"], 2, "is none of .parquet"),
        (["select * from read_csv('/etc/passwd')"], 2, "no other files"),
    ],
)
def test_a_mistake_is_a_sentence(arguments: list[str], code: int, words: str) -> None:
    done = conserve("sql", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_settings_bound_a_query(tmp_path: Path) -> None:
    done = conserve("sql", "select repeat('x', 2000000000)", CONSERVE_SQL_MEMORY="300MiB")
    assert "more memory than 300 MiB" in done.stderr
    assert "longer than 0.1 s" in conserve("sql", ENDLESS, CONSERVE_SQL_TIMEOUT_S="0.1").stderr
    shown = "select name, value from duckdb_settings() where name in ('threads', 'max_temp_directory_size')"
    done = conserve("sql", "--csv", shown, CONSERVE_SQL_THREADS="3", CONSERVE_SQL_DISK="3MiB")
    assert "threads,3\n" in done.stdout
    assert "3.0 MiB" in done.stdout
    for name, value in (("THREADS", "0"), ("TIMEOUT_S", "-1"), ("DISK", "much"), ("MEMORY", "0")):
        assert conserve("sql", "select 1", **{f"CONSERVE_SQL_{name}": value}).returncode == 2


def test_a_query_loads_nothing_and_sees_no_secrets_of_the_user() -> None:
    closed = ("allow_persistent_secrets", "autoinstall_known_extensions", "autoload_known_extensions")
    shown = f"select name, value from duckdb_settings() where name in {closed} order by name"
    assert conserve("sql", "--csv", shown).stdout.splitlines()[1:] == [f"{name},false" for name in closed]


class TestNamedFiles:
    """`--with`: files that the user names, and no others."""

    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "gold.csv").write_text("q,label\na,1\nb,2\n")
        (tmp_path / "gold.tsv").write_text("q\tlabel\na\t1\nb\t2\n")
        (tmp_path / "gold.jsonl").write_text('{"q": "a", "label": 1}\n{"q": "b", "label": 2}\n')
        pq.write_table(pa.table({"q": ["a", "b"], "label": [1, 2]}), tmp_path / "gold.parquet")

    @pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
    def test_each_kind_joins(self, ending: str, write_input: WriteInput) -> None:
        submit(write_input("input.parquet", q=["a", "b"]))
        sql = "select label from inputs join gold using (q) order by 1 desc"
        assert lines("--with", f"gold=gold.{ending}", sql) == [{"label": 2}, {"label": 1}]

    def test_a_packed_file_joins_and_its_folder_adds_no_column(self, tmp_path: Path) -> None:
        (tmp_path / "day=1").mkdir()
        for name in ("gold.csv", "gold.jsonl"):
            packed = tmp_path / "day=1" / f"{name}.gz"
            packed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
            assert lines("--with", f"a={packed}", "from a") == [
                {"q": "a", "label": 1},
                {"q": "b", "label": 2},
            ]

    def test_the_home_folder_and_equals_signs_may_be_in_a_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "a=b.csv").write_text("n\n1\n")
        assert named_file("_gold1=~/a=b.csv") == ("_gold1", tmp_path / "a=b.csv", "csv")

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("a.parquet", "parquet"),
            ("a.PQ", "parquet"),
            ("a.csv", "csv"),
            ("a.tsv", "csv"),
            ("a.jsonl", "json"),
            ("a.b.ndjson", "json"),
            ("a.CSV.ZST", "csv"),
            ("a.jsonl.gz", "json"),
            ("a.parquet.gz", None),
            ("a.csv.bz2", None),
            ("a.csv.old", None),
            ("a.gz", None),
            ("csv", None),
        ],
    )
    def test_the_name_tells_the_kind(self, name: str, kind: str | None) -> None:
        assert kind_of(Path("some.day") / name) == kind

    def test_several_join(self) -> None:
        sql = "select sum(a.label + b.label) as n from a join b using (q)"
        assert lines("--with", "a=gold.csv", "--with", "b=gold.jsonl", sql) == [{"n": 6}]

    def test_names_are_not_taken_twice(self) -> None:
        for names in (["jobs"], ["Results"], ["a", "A"]):
            flags = [word for name in names for word in ("--with", f"{name}=gold.csv")]
            done = conserve("sql", *flags, "select 1")
            assert done.returncode == 2
            assert "choose another" in done.stderr

    def test_awkward_names_are_one_file_each(self, tmp_path: Path) -> None:
        (tmp_path / "it's [a] *.csv").write_text("n\n1\n")
        (tmp_path / "it's a 2.csv").write_text("n\n2\n")
        assert lines("--with", "a=it's [a] *.csv", "from a") == [{"n": 1}]

    def test_a_link_counts_as_its_target_and_brings_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "link.csv").symlink_to(tmp_path / "gold.csv")
        assert len(lines("--with", "a=link.csv", "from a")) == 2
        for other in ("gold.tsv", "gold.parquet"):
            done = conserve("sql", "--with", "a=link.csv", f"from '{tmp_path / other}'")
            assert done.returncode == 2

    def test_a_file_that_is_something_else_is_a_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "no.parquet").write_text("q,label\n")
        done = conserve("sql", "--with", "a=no.parquet", "from a")
        assert done.returncode == 2
        assert "cannot be read as parquet" in done.stderr


def at_work(running: Forked) -> bool:
    """True if the command's child computes."""
    children = psutil.Process(running.pid).children()
    return bool(children) and children[0].cpu_times().user > 0.05


@pytest.mark.parametrize(
    "sql", [ENDLESS, "select sum(length(repeat(range::varchar, 400000000))) from range(10000)"]
)
def test_ctrl_c_ends_a_query_at_once(sql: str, forked: StartForked) -> None:
    heeds = {"tests.acceptance.forks:heeds": str(int(signal.SIGINT))}
    running = forked("sql", "--memory", "4GiB", sql, thawed=True, also=heeds)
    until(lambda: at_work(running), running)
    (child,) = psutil.Process(running.pid).children()
    running.send_signal(signal.SIGINT)
    done = ended(running)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not child.is_running()


def test_a_query_ends_with_the_command_that_was_killed(forked: StartForked) -> None:
    running = forked("sql", ENDLESS)
    until(lambda: at_work(running), running)
    (child,) = psutil.Process(running.pid).children()
    running.send_signal(signal.SIGKILL)
    child.wait(timeout=60)


def test_a_temporary_file_of_a_killed_command_goes_at_the_next(tmp_path: Path, forked: StartForked) -> None:
    out = tmp_path / "out.csv"
    running = forked("sql", "-o", str(out), "from range(1000000000000)")
    until(lambda: any(path.is_file() for path in tmp_path.glob(".conserve-tmp-*")), running)
    running.send_signal(signal.SIGKILL)
    ended(running)
    assert [path for path in tmp_path.glob(".conserve-tmp-*") if path.is_file()]
    assert conserve("sql", "-o", str(out), "select 1").returncode == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.csv"]


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, Future[str]]]:
    """A terminal's descriptor, which is closed at the end, and then what was shown on it."""
    master, slave = pty.openpty()
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(all_of, master)
        try:
            yield slave, shown
        finally:
            os.close(slave)
            wait([shown])
            os.close(master)


def all_of(master: int) -> str:
    """Text that a terminal shows until no process has it open."""
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(master, 65536):
            shown += data
    return shown.decode()


def on_a_terminal(*arguments: str, **variables: str) -> str:
    """Output of a command of this process on a terminal, both streams together."""
    variables = {"TERM": "xterm"} | variables
    with terminal() as (slave, shown), open(slave, closefd=False) as stdin:
        out, err = (
            stdout.text_stream(stdout.Stdout(slave, "w", closefd=False), None, line_buffering=True)
            for _ in range(2)
        )
        streams = mock.patch.multiple(sys, stdin=stdin, stdout=out, stderr=err)
        words = mock.patch.object(sys, "argv", ["conserve", *arguments])
        with streams, words, mock.patch.dict(os.environ, variables):
            stdout.run_flushed(app.main)
        err.flush()
    return shown.result()


def process_on_a_terminal(*arguments: str, **variables: str) -> str:
    """Output of a process."""
    command = [sys.executable, "-m", "conserve", *arguments]
    with terminal() as (slave, shown):
        subprocess.run(
            command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | variables, check=False
        )
    return shown.result()


ESCAPES = "select chr(27) || ']0;owned' || chr(7) || chr(155) || '2J' as \"a\x1b[31m\""


def test_a_terminal_gets_no_commands_from_answers() -> None:
    shown = process_on_a_terminal("sql", ESCAPES, NO_COLOR="1")
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
    assert r"\x1b]0;owned\x07\x9b2J" in shown
    assert r"a\x1b[31m" in shown
    value = ESCAPES.split(" as ")[0].removeprefix("select ")
    shown = on_a_terminal("sql", f"select cast(a as int) from (select {value} as a)", NO_COLOR="1")
    assert "\x1b" not in shown
    assert r"\x1b]0;owned" in shown


def test_a_terminal_gets_no_commands_from_csv_results_and_previews(write_input: WriteInput) -> None:
    path = write_input(q=["\x1b]0;owned\x07\x9b2J"])
    submit(path)
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    for words in (
        ("sql", "--csv", ESCAPES),
        ("sql", "--json", ESCAPES),
        ("results", "last", "--with-inputs", "--format", "csv"),
        ("submit", str(path), "--prompt", "{{ q }}", "--dry-run", "1"),
    ):
        shown = on_a_terminal(*words, NO_COLOR="1")
        assert not {"\x1b", "\x07", "\x9b"} & set(shown), words
        assert "]0;owned" in shown, words


def test_pipes_and_files_get_answers_as_they_are(tmp_path: Path) -> None:
    raw = "\x1b]0;owned\x07\x9b2J"
    assert raw in conserve("sql", ESCAPES).stdout
    assert raw in conserve("sql", "--csv", ESCAPES).stdout
    assert raw in json.loads(conserve("sql", "--json", ESCAPES).stdout).values()
    conserve("sql", "-o", str(tmp_path / "out.csv"), ESCAPES)
    assert raw in (tmp_path / "out.csv").read_text()


def test_a_long_query_says_on_a_terminal_that_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "SPINNER_AFTER_S", 0.05)
    monkeypatch.setattr("conserve.store.sql.child.TICK_S", 0.01)
    monkeypatch.setattr("conserve.store.sql.child.time", Ticking(0.06))
    shown = on_a_terminal("sql", "--timeout", "0.3", ENDLESS)
    assert "the query is at work" in shown
    assert "longer than 0.3 s" in shown
    assert "at work" not in on_a_terminal("sql", "--timeout", "0.3", ENDLESS, NO_COLOR="1")
    assert "at work" not in conserve("sql", "--timeout", "0.3", ENDLESS).stderr


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGTERM, ["sql", "select 1"]),
        (signal.SIGHUP, ["sql", "select 1"]),
        (signal.SIGTERM, ["results", "last"]),
    ],
)
def test_a_command_that_is_told_to_stop_leaves_the_file_as_it_was(
    write_input: WriteInput, tmp_path: Path, forked: StartForked, number: int, command: list[str]
) -> None:
    submit(write_input(q=["a"]))
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    out = tmp_path / "answers" / "out.jsonl"
    out.parent.mkdir()
    out.write_text("before")
    half_written = Shot(at="conserve.store.sql.export:write_lines", after=True, number=number)
    also = {"tests.acceptance.forks:heeds": str(int(number))}
    place = str(out.parent)
    words = [*command, "-o", str(out)]
    done = ended(forked(*words, shots=[half_written], also=also, thawed=True, TMPDIR=place))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "before"
