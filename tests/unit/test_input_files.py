"""Inputs people have: CSV, packed lines, patterns, folders with partitions, and whatever DuckDB scans."""

import errno
import gzip
import io
import json
import os
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.errors import InputError, UsageError
from conserve.jobs.inputs import text_rows
from conserve.jobs.inputs.files import FileFormat, files_of, partitions, spelled_out
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.source import Input
from conserve.jobs.requests.file import RequestFile
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql.query import views
from conserve.store.sql.scan import scanned
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.submitting import submit

PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}")
CSV = 'q,n\r\n"one, two",007\r\n"line\nbreak",\r\n"quote "" here",x\r\n'
FOREVER = 2**63 - 1  # as DuckDB writes an infinite timestamp
ROWS = ["one, two", "line\nbreak", 'quote " here']


def packed(path: Path, content: bytes) -> Path:
    """A file whose name says how it is packed."""
    if path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as sink:
            sink.write(content)
    else:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def openai_line(custom_id: str) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**request, "body": {"messages": [{"role": "user", "content": "hi"}]}})


def payloads(store: Store, job_id: str, rows: int) -> list[str | None]:
    file = RequestFile(layout.requests_file(store.home, job_id))
    found = [row.payload for row in file.read(range(rows))]
    file.close()
    return found


def source(store: Store, job_id: str) -> catalog.Source:
    with store.read() as tx:
        return catalog.get(tx, job_id).source


def inputs(store: Store, columns: str = "*") -> list[tuple[Any, ...]]:
    with views(store, now=0.0) as opened:
        return opened.duck.execute(
            f"select row_index, {columns} from inputs order by job_id, row_index"
        ).fetchall()


def parquet(path: Path, **columns: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_csv_is_text_as_it_stands(store: Store, tmp_path: Path, suffix: str) -> None:
    path = packed(tmp_path / f"rows.csv{suffix}", CSV.encode())
    done = submit(store, str(path), PROMPT)
    assert payloads(store, done.job_id, 3) == ROWS
    assert done.job_id.startswith("rows-")
    assert inputs(store, "q, n") == [
        (n, q, v) for n, (q, v) in enumerate(zip(ROWS, ["007", "", "x"], strict=True))
    ]
    found = source(store, done.job_id)
    assert (found.format, found.copied, found.size) == ("csv", True, path.stat().st_size)
    assert len(found.digest) == 40


def test_tsv_and_files_from_spreadsheets(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes("﻿q\t\r\nä\t1\r\n\r\nb\t2\r\n".encode())
    done = submit(store, str(tmp_path / "a.tsv"), PROMPT)
    assert payloads(store, done.job_id, 2) == ["ä", "b"]
    assert inputs(store, "q, column_1") == [(0, "ä", "1"), (1, "b", "2")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("q,n\na,1\nb\n", "line 3 of .*rows.csv has 1 values and the header 2"),
        ("q,n\na,1,2\n", "line 2 of .* has 3 values and the header 2"),
        ("q,q\na,b\n", "two columns called 'q'"),
        ('q\n"a\n', "line 2 .* is not CSV"),
        ('q\n"a"b\n', "line 2 .* is not CSV"),
        ("q\nx\n".encode("utf-16"), "rows.csv is UTF-16; convert it: iconv -f utf-16 -t utf-8 FILE"),
        ("q\nx\n".encode("utf-16-be").join([b"\xfe\xff", b""]), "rows.csv is UTF-16; convert it"),
        (b"q\nfine\ncaf\xe9\n", "line 3 .* is not UTF-8; if it is Latin-1, .* iconv -f latin1 -t utf-8"),
        ("", "has no rows"),
        ("q\n", "has no rows"),
    ],
)
def test_csv_that_is_none_is_named_with_its_line(
    store: Store, tmp_path: Path, content: str | bytes, words: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=words):
        submit(store, str(path), PROMPT)


def test_a_field_may_be_longer_than_pythons_reader_likes(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q\n" + "x" * 300_000 + "\n")
    done = submit(store, str(tmp_path / "a.csv"), PROMPT)
    assert [len(payload or "") for payload in payloads(store, done.job_id, 1)] == [300_000]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_lines_are_read_as_they_would_be_unpacked(store: Store, tmp_path: Path, suffix: str) -> None:
    rows = [{"q": {"a": n}, "n": n} for n in range(5)]
    content = "\n".join(map(json.dumps, rows)).encode()
    done = submit(
        store,
        str(packed(tmp_path / f"a.jsonl{suffix}", content)),
        Task(kind=Kind.PROMPT, template="{{ q.a }}"),
    )
    assert payloads(store, done.job_id, 5) == [str(n) for n in range(5)]
    path = packed(tmp_path / f"batch.jsonl{suffix}", openai_line("a").encode())
    assert submit(store, str(path), Task(kind=Kind.OPENAI)).rows == 1


def test_several_members_of_a_gzip_file_are_one(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"q": "a"}\n') + gzip.compress(b'{"q": "b"}\n'))
    assert payloads(store, submit(store, str(path), PROMPT).job_id, 2) == ["a", "b"]


@pytest.mark.parametrize("magic", [b"\x50\x2a\x4d\x18", b"\x5f\x2a\x4d\x18"])
def test_a_zstd_file_may_begin_with_a_frame_to_be_skipped(store: Store, tmp_path: Path, magic: bytes) -> None:
    path = packed(tmp_path / "a.zst", b'{"q": "a"}\n')
    path.write_bytes(magic + (4).to_bytes(4, "little") + b"note" + path.read_bytes())
    assert payloads(store, submit(store, str(path), PROMPT).job_id, 1) == ["a"]


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.jsonl.zst"])
def test_a_packed_file_that_was_cut_off_is_damaged(store: Store, tmp_path: Path, name: str) -> None:
    content = "\n".join(json.dumps({"q": f"{n * 7919 % 10_007}"}) for n in range(5000)).encode()
    path = packed(tmp_path / name, content)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=rf"{name} is damaged or truncated"):
        submit(store, str(path), PROMPT)


def test_packed_parquet_is_refused(store: Store, write_input: WriteInput, tmp_path: Path) -> None:
    path = packed(tmp_path / "a.parquet.gz", write_input(q=["a"]).read_bytes())
    with pytest.raises(InputError, match="Parquet file that was packed; unpack it"):
        submit(store, str(path), PROMPT)


def test_rows_are_read_in_bounded_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rows, "GROUP_BYTES", 1000)
    path = packed(tmp_path / "a.csv.gz", ("q\n" + ("x" * 400 + "\n") * 9).encode())
    rows = text_rows.CsvRows([path], "x")
    assert [len(batch) for batch in rows.batches(["q"])] == [3, 3, 3]


# Several files.


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any depth: its files would be missing from the job."""
    (tmp_path / "data" / "inner").mkdir(parents=True)
    (tmp_path / "data" / "rows.jsonl").write_text('{"q": 1}\n')
    scandir = os.scandir

    def refused(path: Any) -> Any:
        if Path(path).name == "inner":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    for name in (tmp_path / "data", tmp_path / "d*"):
        with pytest.raises(InputError, match=r"cannot read .*/data/inner: Permission denied; check the path"):
            files_of(str(name))


def test_a_pattern_is_one_input_in_the_order_of_names(store: Store, tmp_path: Path) -> None:
    for name, rows in (("b", ["3"]), ("a", ["1", "2"]), ("c", ["4", "5"])):
        parquet(tmp_path / "data" / f"{name}.parquet", q=rows)
    done = submit(store, str(tmp_path / "data" / "*.parquet"), PROMPT)
    assert payloads(store, done.job_id, 5) == list("12345")
    assert inputs(store, "q") == list(enumerate("12345"))
    assert done.job_id.startswith("data-")
    found = source(store, done.job_id)
    assert [Path(part.path).name for part in found.parts] == ["a.parquet", "b.parquet", "c.parquet"]
    assert len({part.digest for part in found.parts}) == 3
    assert found.size == sum(part.size for part in found.parts)


@pytest.mark.parametrize("keep", list(Keep))
def test_folders_of_partitions_have_their_columns(store: Store, tmp_path: Path, keep: Keep) -> None:
    table = tmp_path / "table"
    parquet(table / "year=2023" / "lang=de" / "a.parquet", q=["x"], n=[1])
    parquet(table / "year=2024" / "lang=__HIVE_DEFAULT_PARTITION__" / "b.parquet", q=["y", "z"], n=[2.5, 3.5])
    parquet(table / "year=2024" / "lang=pt%2FBR" / "c.parquet", q=["u"], extra=["e"])
    (table / "_SUCCESS").write_text("")
    parquet(table / "_temporary" / "year=1" / "d.parquet", q=["no"])
    task = Task(kind=Kind.PROMPT, template="{{ year + 1 }} {{ lang or '-' }} {{ q }} {{ n }}")
    done = submit(store, Input(names=[str(table)], keep=keep), task)
    assert payloads(store, done.job_id, 4)[:3] == ["2024 de x 1.0", "2025 - y 2.5", "2025 - z 3.5"]
    assert done.unrendered == 1, "n is null in the last file"
    assert inputs(store, "q, n, year, lang, extra") == [
        (0, "x", 1.0, 2023, "de", None),
        (1, "y", 2.5, 2024, None, None),
        (2, "z", 3.5, 2024, None, None),
        (3, "u", None, 2024, "pt/BR", "e"),
    ]


def test_folders_of_openai_lines_have_the_columns_of_their_names(store: Store, tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        (tmp_path / f"day={day}" / "a.jsonl").write_text(openai_line(f"r-{day}"))
    done = submit(store, f"{tmp_path}/day=*/a.jsonl", Task(kind=Kind.OPENAI))
    assert inputs(store, "day, input_custom_id") == [(0, 1, "r-1"), (1, 2, "r-2")]
    assert done.unrendered == 0


@pytest.mark.parametrize("pattern", ["year=*", "year=*/", "**/"])
def test_a_pattern_of_folders_stands_for_their_files(store: Store, tmp_path: Path, pattern: str) -> None:
    table = tmp_path / "table"
    parquet(table / "year=2023" / "lang=de" / "a.parquet", q=["x"])
    parquet(table / "year=2024" / "lang=en" / "b.parquet", q=["y"])
    parquet(table / "year=2024" / "_temporary" / "c.parquet", q=["no"])
    task = Task(kind=Kind.PROMPT, template="{{ year }} {{ lang }} {{ q }}")
    done = submit(store, f"{table}/{pattern}", task)
    assert payloads(store, done.job_id, 2) == ["2023 de x", "2024 en y"]


def test_links_within_a_folder_are_followed_and_each_file_is_asked_once(store: Store, tmp_path: Path) -> None:
    table, other = tmp_path / "table", tmp_path / "other"
    for name, rows in ((table / "2024" / "a.jsonl", "a"), (other / "deep" / "b.jsonl", "b")):
        name.parent.mkdir(parents=True)
        name.write_text(json.dumps({"q": rows}) + "\n")
    (table / "0").symlink_to(table)  # without an end
    (table / "1-latest").symlink_to("2024")
    (table / "2024" / "0.jsonl").symlink_to("a.jsonl")
    (table / "elsewhere").symlink_to(other)
    (table / ".hidden").symlink_to(tmp_path)
    expected = [table / "2024" / "a.jsonl", table / "elsewhere" / "deep" / "b.jsonl"]
    assert files_of(str(table)) == expected
    assert files_of(f"{tmp_path}/tabl*") == expected
    done = submit(store, str(table), PROMPT)
    assert payloads(store, done.job_id, 2) == ["a", "b"]


def test_a_link_to_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": 1}\n')
    (tmp_path / "z.jsonl").symlink_to("gone.jsonl")
    (tmp_path / "z.txt").symlink_to("gone.txt")  # is no data
    with pytest.raises(InputError, match=r"z\.jsonl is a link to a file that is not there; mend it"):
        files_of(str(tmp_path))


def test_one_file_by_two_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"q": 1}\n')
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    for name in ("b.jsonl", f"{tmp_path}/a.jsonl", "./../" + tmp_path.name + "/a.jsonl"):
        with pytest.raises(InputError, match=r"a\.jsonl and .*[ab]\.jsonl are one file; name each file once"):
            spelled_out(["a.jsonl", name])


def test_whole_numbers_beyond_a_floats_digits_stay_beside_floats(store: Store, tmp_path: Path) -> None:
    numbers = [9007199254740993, 1.5, -9007199254740993]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"q": 1, "n": {n}}}\n' for n in numbers))
    submit(store, str(tmp_path / "a.jsonl"), PROMPT)
    assert inputs(store, "n") == [(row, str(n)) for row, n in enumerate(numbers)]


def test_whole_numbers_of_any_length_are_numbers(store: Store, tmp_path: Path) -> None:
    numbers = [2**53, 2**53 + 1, -(2**63), 2**63 - 1]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"q": 1, "n": {n}}}\n' for n in numbers))
    submit(store, str(tmp_path / "a.jsonl"), PROMPT)
    assert inputs(store, "n") == [*enumerate(numbers)]


@pytest.mark.parametrize(
    ("number", "found"), [(7, Decimal("7.00")), (-(10**17), Decimal(-(10**17))), (2**63 - 1, None)]
)
def test_whole_numbers_stand_beside_decimals_that_hold_them(
    store: Store, tmp_path: Path, number: int, found: Decimal | None
) -> None:
    cents = pa.array([Decimal("1.50")], pa.decimal128(10, 2))
    parquet(tmp_path / "data" / "a.parquet", q=["x"], n=cents)
    parquet(tmp_path / "data" / "b.parquet", q=["y"], n=[number])
    if found is None:
        with pytest.raises(
            InputError, match=r"row 0 of .*/b.parquet has in column 'n' a int64 that no decimal"
        ):
            submit(store, str(tmp_path / "data"), PROMPT)
        return
    submit(store, str(tmp_path / "data"), PROMPT)
    assert inputs(store, "n") == [(0, Decimal("1.50")), (1, found)]


def test_partitions_of_files_are_alike_or_none() -> None:
    def of(*names: str) -> list[dict[str, Any]]:
        return [dict(one) for one in partitions([Path(name) for name in names])]

    assert of("a=1/x", "a=2/x") == [{"a": 1}, {"a": 2}]
    assert of("a=01/x", "a=2/x") == [{"a": "01"}, {"a": "2"}]
    assert of("a=1/x", "b=2/x") == [{}, {}]
    assert of("a=1/x", "x") == [{}, {}]
    assert of("a=-5/b=c%20d/x") == [{"a": -5, "b": "c d"}]


@pytest.mark.parametrize("days", [1, 2])
def test_rows_of_files_that_number_their_own_are_numbered_together(
    store: Store, tmp_path: Path, days: int
) -> None:
    for day in range(days):
        parquet(tmp_path / "table" / f"day={day}" / "a.parquet", q=["x", "y"], file_row_number=[8, 7])
    submit(store, str(tmp_path / "table"), PROMPT)
    numbers = enumerate((q, number, day) for day in range(days) for q, number in (("x", 8), ("y", 7)))
    assert inputs(store, "q, file_row_number, day") == [(n, *row) for n, row in numbers]


def test_a_column_of_the_files_wins_over_a_partition(store: Store, tmp_path: Path) -> None:
    for year in (1, 2):
        parquet(tmp_path / "data" / f"year={year}" / "a.parquet", q=["x"], year=[year * 100])
    for keep in Keep:
        done = submit(
            store,
            Input(names=[str(tmp_path / "data")], keep=keep),
            Task(kind=Kind.PROMPT, template="{{ q }}{{ year }}"),
        )
        assert payloads(store, done.job_id, 2) == ["x100", "x200"]
    assert [row[1] for row in inputs(store, "year")] == [100, 200] * 3


@pytest.mark.parametrize(
    ("files", "row"),
    [
        ({"a": ["name", "NAME"], "b": ["NAME", "name"]}, ("b.name", "b.NAME")),
        ({"a": ["name"], "b": ["NAME"]}, (None, "b.NAME")),
        ({"NAME=1/a": ["name"], "NAME=2/b": ["name"]}, ("NAME=2/b.name", 2)),
    ],
)
def test_names_that_differ_in_case_alone_are_told_apart_in_a_copy(
    store: Store, tmp_path: Path, files: dict[str, list[str]], row: tuple[object, ...]
) -> None:
    """DuckDB would give such columns their numbers by the first file that has them."""
    folder = tmp_path / "data"
    for file, names in files.items():
        parquet(folder / f"{file}.parquet", q=["x"], **{name: [f"{file}.{name}"] for name in names})
    for keep in (Keep.LINK, Keep.REFERENCE):
        with pytest.raises(InputError, match=r"'name' and 'NAME' of .*; submit with --keep-input copy"):
            submit(store, Input(names=[str(folder)], keep=keep), PROMPT)
    assert submit(store, Input(names=[str(folder)], copy_gib=0), PROMPT).kept is Keep.COPY
    assert inputs(store, 'name, "NAME_1"')[1] == (1, *row)


def test_a_file_without_columns_is_copied_with_the_others(store: Store, tmp_path: Path) -> None:
    """Arrow writes such a file without rows, and DuckDB reads none like that."""
    parquet(tmp_path / "data" / "a.parquet", q=["x"])
    parquet(tmp_path / "data" / "b.parquet")
    task = Task(kind=Kind.PROMPT, template="{{ q or '-' }}")
    with pytest.raises(InputError, match=r"b.parquet has no columns, .*; submit with --keep-input copy"):
        submit(store, Input(names=[str(tmp_path / "data")], keep=Keep.REFERENCE), task)
    assert submit(store, Input(names=[str(tmp_path / "data")], copy_gib=0), task).kept is Keep.COPY
    assert inputs(store, "q") == [(0, "x")]


def test_names_that_differ_in_case_alone_are_told_apart_in_like_files(store: Store, tmp_path: Path) -> None:
    for file in ("a", "b"):
        parquet(tmp_path / "data" / f"{file}.parquet", q=["x"], name=[f"{file}1"], NAME=[f"{file}2"])
    done = submit(store, Input(names=[str(tmp_path / "data")], keep=Keep.LINK), PROMPT)
    assert done.kept is not Keep.REFERENCE
    assert inputs(store, 'name, "NAME_1"') == [(0, "a1", "a2"), (1, "b1", "b2")]


def test_several_files_of_lines_are_one_input(store: Store, tmp_path: Path) -> None:
    for day, suffix in ((1, ""), (2, ".gz"), (3, ".zst")):
        folder = tmp_path / "data" / f"day={day}"
        folder.mkdir(parents=True)
        packed(folder / f"x.jsonl{suffix}", json.dumps({"q": f"q{day}", f"only{day}": day}).encode())
    names = [str(path) for path in sorted(tmp_path.glob("data/*/*"))]
    task = Task(kind=Kind.PROMPT, template="{{ day }} {{ q }}")
    done = submit(store, Input(names=names), task)
    assert payloads(store, done.job_id, 3) == ["1 q1", "2 q2", "3 q3"]
    assert inputs(store, "day, only2") == [(0, 1, None), (1, 2, 2), (2, 3, None)]
    (tmp_path / "data" / "day=2" / "x.jsonl.gz").unlink()
    (tmp_path / "data" / "day=2" / "y.jsonl").write_text("not JSON")
    with pytest.raises(InputError, match=r"line 1 of .*day=2/y\.jsonl is not JSON"):
        submit(store, str(tmp_path / "data"), task)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["nothing/*.parquet"], "no file matches nothing/"),
        (["empty"], "the folder empty holds no file of rows"),
        (["a.parquet", "a.parquet"], "a.parquet is named twice"),
        (["*.parquet", "a.parquet"], "a.parquet is named twice"),
        (["a.parquet", "b.jsonl"], "a.parquet is parquet and b.jsonl is jsonl"),
        (["a.parquet", "c.parquet"], "c.parquet has other columns than the files before it"),
        (["a.parquet", "missing.parquet"], "there is no file missing.parquet"),
        (["-", "a.parquet"], "goes with no other file"),
        (["twice.parquet"], "two columns called 'q'"),
    ],
)
def test_files_that_are_no_input_together_say_why(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    parquet(Path("a.parquet"), q=["a"])
    parquet(Path("c.parquet"), q=[[1]])
    Path("b.jsonl").write_text('{"q": "b"}')
    Path("empty").mkdir()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["q", "q"]), "twice.parquet")
    with pytest.raises(UsageError, match=words):
        submit(store, Input(names=names), PROMPT)


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "a[1].jsonl"
    path.write_text('{"q": "a"}')
    assert spelled_out([str(path)]) == ([path], False)


@pytest.mark.parametrize("name", ["a[1]", "a*", "back\\slash", "back\\*", "back\\[1]"])
def test_files_whose_names_are_patterns_are_joined_where_they_are(
    store: Store, tmp_path: Path, name: str
) -> None:
    for file in ("x", "y"):
        parquet(tmp_path / name / f"{file}.parquet", q=[file])
    submit(store, Input(names=[str(tmp_path / name)], keep=Keep.REFERENCE), PROMPT)
    assert inputs(store, "q") == [(0, "x"), (1, "y")]


def test_the_form_may_be_said(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.txt").write_text("q\na\n")
    done = submit(store, Input(names=[str(tmp_path / "rows.txt")], form=FileFormat.CSV), PROMPT)
    assert payloads(store, done.job_id, 1) == ["a"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b"q\tn\nb\t1\n"))))
    done = submit(store, Input(names=["-"], form=FileFormat.TSV), PROMPT)
    assert payloads(store, done.job_id, 1) == ["b"]
    assert sorted(path.name for path in layout.job_folder(store.home, done.job_id).iterdir()) == [
        layout.INPUTS,
        "job.json",
        layout.REQUESTS,
    ]
    with pytest.raises(InputError, match="is not a Parquet file"):
        submit(store, Input(names=[str(tmp_path / "rows.txt")], form=FileFormat.PARQUET), PROMPT)


# Queries.


def test_a_query_is_an_input(store: Store, tmp_path: Path) -> None:
    parquet(tmp_path / "x.parquet", text=["a", "b", "c"], n=[1, 2, 3])
    with duckdb.connect(str(tmp_path / "mine.duckdb")) as mine:
        mine.execute("create table notes as select 2 as n, 'noted' as note")
    sql = (
        f"select upper(text) as q, n, now() as t, interval 1 hour as i, 10::hugeint as h "
        f"from '{tmp_path}/x.parquet' where n > 1 order by n desc"
    )
    done = submit(store, Input(sql=sql), PROMPT)
    assert payloads(store, done.job_id, 2) == ["C", "B"]
    assert inputs(store, "q, n") == [(0, "C", 3), (1, "B", 2)]
    found = source(store, done.job_id)
    assert (found.path, found.format, found.sql, found.copied) == (None, "sql", sql, True)
    assert len(found.digest) == 40
    (tmp_path / "x.parquet").unlink()
    assert conserve("run", "--endpoint", "fake:").returncode == 0


def test_a_query_spills_into_the_jobs_folder_and_reads_times_in_utc(tmp_path: Path) -> None:
    names = ("temp_directory", "TimeZone", "python_enable_replacements")
    sql = ", ".join(f"current_setting('{name}') as {name}" for name in names)
    with scanned(f"select {sql}, interval 90 minute as i, [interval 1 day] as l", tmp_path / "spill") as rows:
        (found,) = rows.read_all().to_pylist()
    assert tuple(found.values()) == (str(tmp_path / "spill"), "UTC", False, "01:30:00", ["1 day"])


def test_a_query_may_give_chats(store: Store) -> None:
    sql = "select [{'role': 'user', 'content': 'hi ' || n}] as m from range(2) t(n)"
    done = submit(store, Input(sql=sql), Task(kind=Kind.MESSAGES, column="m"))
    assert payloads(store, done.job_id, 2)[1] == '[{"role":"user","content":"hi 1"}]'


def test_rows_of_a_query_are_streamed(store: Store) -> None:
    done = submit(store, Input(sql="select n as q from range(20000) t(n)"), PROMPT)
    assert done.rows == 20_000
    assert payloads(store, done.job_id, 20_000)[19_999] == "19999"


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("select", "--sql fails"),
        ("select * from 'missing.parquet'", "--sql fails.*missing.parquet"),
        ("select cast('x' as int) as q", "--sql fails"),
        ("select 1 as q; select 2 as q", "takes one SELECT"),
        ("create table x as select 1", "takes one SELECT"),
        ("explain analyze select 1 as q", "takes one SELECT"),
        ("pragma version", "takes one SELECT"),
        ("select '\udcff' as q", "--sql fails: it is not UTF-8; correct it"),
        ("copy (select 1 as q) to 'written.csv'", "takes one SELECT"),
        ("with x as (copy (select 1 as q) to 'written.csv') select 1 as q from x", "takes one SELECT"),
        ("", "takes one SELECT"),
        ("select 'a' as q where false", "no rows"),
        ("select 1 as q, 2 as q", "two columns called 'q'"),
        ("select 'a' as other", "names 'q', but the columns are: other"),
    ],
)
def test_a_query_that_gives_no_input_is_one_sentence(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words) as error:
        submit(store, Input(sql=sql), PROMPT)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert list(layout.jobs_folder(store.home).iterdir()) == []


# The command.


def test_the_command_takes_them_all(
    tmp_path: Path, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (1, 2):
        write_input(f"{n}.parquet", q=[f"row {n}"])
    flags = ["--prompt", "{{ q }}"]
    two = [str(tmp_path / f"{n}.parquet") for n in (1, 2)]
    assert json.loads(conserve("submit", *two, *flags, "--json").stdout)["rows"] == 2
    assert conserve("submit", "--sql", f"from '{tmp_path}/1.parquet'", *flags).stdout.startswith("sql-")
    piped = conserve(
        "submit",
        "-",
        *flags,
        "--format",
        "csv",
        stdin="q\nx\ny\n",
    )
    assert piped.returncode == 0
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    for wrong, words in (
        ([], "there is no input"),
        ([*two, "--sql", "select 1"], "not both"),
        ([*two, "--format", "xml"], "--format takes parquet, jsonl, csv, tsv"),
        ([*two, "--keep-input", "maybe"], "--keep-input takes copy, link, reference"),
        (["--sql", "select \udcff"], "--sql fails"),
    ):
        done = conserve("submit", *wrong, *flags)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    monkeypatch.setenv("CONSERVE_MODELS", str(tmp_path))
    shown = conserve("submit", "--sql", "select 'x' as q", *flags, "--dry-run", "1")
    assert shown.stdout.splitlines() == ["row 0", "  user: x"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", b'{"q": "a"}\n'),
        ("x.csv", b"q\na\n"),
        ("x.jsonl.gz", b'{"q": "a"}\n'),
        ("x.tsv", b"q\na\n"),
    ],
)
@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_text(
    store: Store, tmp_path: Path, name: str, content: bytes, from_stdin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path / name, b"\xef\xbb\xbf" + content)
    if from_stdin:
        stdin = io.TextIOWrapper(io.BytesIO(path.read_bytes()))
        monkeypatch.setattr("sys.stdin", stdin)
    form = FileFormat(name.split(".")[1])
    given = Input(names=["-" if from_stdin else str(path)], form=form if from_stdin else None)
    done = submit(store, given, PROMPT)
    assert payloads(store, done.job_id, 1) == ["a"]


def test_openai_lines_may_begin_with_a_byte_order_mark(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + openai_line("1").encode())
    assert submit(store, str(path), Task(kind=Kind.OPENAI)).rows == 1


def test_a_file_of_a_byte_order_mark_alone_has_no_rows(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(InputError, match="has no rows"):
        submit(store, str(path), PROMPT)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.date32()], ids=str)
def test_a_time_that_python_cannot_hold_fails_its_row_in_plain_words(
    tmp_path: Path, kind: pa.DataType, nested: bool
) -> None:
    whole = pa.int32() if kind == pa.date32() else pa.int64()
    times = pa.array([0, 2**31 - 1 if kind == pa.date32() else FOREVER], whole).cast(kind)
    column = pa.ListArray.from_arrays([0, 1, 2], times) if nested else times
    pq.write_table(pa.table({"q": ["a", "b"], "t": column}), tmp_path / "x.parquet")
    done = conserve("submit", str(tmp_path / "x.parquet"), "--prompt", "{{ q }} {{ t }}")
    assert done.returncode == 0
    assert "the first is row 1: column 't' holds a " in done.stderr
    assert done.stderr.rstrip().endswith("that is infinite or outside of the years 1 to 9999")


def test_a_time_beyond_the_type_of_other_files_is_named(tmp_path: Path) -> None:
    fine = pa.array([0], pa.int64()).cast(pa.timestamp("ns"))
    pq.write_table(pa.table({"q": ["a"], "t": fine}), tmp_path / "a.parquet")
    times = pa.array([0, 0, FOREVER], pa.int64()).cast(pa.timestamp("us"))
    pq.write_table(pa.table({"q": ["a", "b", "c"], "t": times}), tmp_path / "b.parquet")
    done = conserve("submit", str(tmp_path / "*.parquet"), "--prompt", "{{ q }} {{ t }}")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "row 2 of " in done.stderr
    assert "b.parquet has in column 't' a timestamp[us] that no timestamp[ns] can hold" in done.stderr
