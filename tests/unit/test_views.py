"""One odd or damaged job costs `conserve sql` that job's rows in one view, and no other job anything."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog, shards
from conserve.store.books.states import FailedBy
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql import query
from conserve.store.sql.query import views, views_of
from conserve.store.sql.snapshot import snapshot
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.store_rows import finish, leased
from tests.submitting import submit

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
ODD = ("text", "json", "Text", "input_text", "job_id", "row_index", "file_row_number")


def queue(store: Store, path: Path) -> str:
    return submit(store, str(path), TASK).job_id


def answer(store: Store, job_id: str) -> None:
    """Finish every row of the job and move the results into a shard."""
    finish(store, leased(store, only=[job_id]))
    shards.compact(store, job_id, now=0.0)


def shard_of(store: Store, job_id: str) -> Path:
    (path,) = (layout.job_folder(store.home, job_id) / layout.RESULTS).glob("*.parquet")
    return path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def rows(store: Store, sql: str) -> list[tuple[Any, ...]]:
    with views(store, now=0.0, uses=lambda empty: views_of(empty, sql)) as opened:
        return opened.duck.execute(sql).fetchall()


def test_a_column_called_like_duckdbs_row_number_is_the_users(store: Store, write_input: WriteInput) -> None:
    plain = queue(store, write_input("plain.parquet", q=["a", "b"]))
    odd = queue(store, write_input("odd.parquet", q=["c", "d"], File_Row_Number=[70, 80]))
    assert rows(store, "select job_id, row_index, q, file_row_number from inputs order by q") == [
        (plain, 0, "a", None),
        (plain, 1, "b", None),
        (odd, 0, "c", 70),
        (odd, 1, "d", 80),
    ]


def test_rows_are_numbered_as_they_lie_in_the_file(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    numbers = list(range(30_000))
    table = pa.table({"q": [str(n) for n in numbers], "file_row_number": numbers})
    pq.write_table(table, path, row_group_size=1000)
    queue(store, path)
    wrong = "select count(*) from inputs where row_index <> file_row_number"
    assert rows(store, wrong) == [(0,)]
    assert rows(store, "select q from inputs where row_index = 12345") == [("12345",)]


def test_names_that_differ_in_case_are_one_column(store: Store, write_input: WriteInput) -> None:
    """To SQL they are; where their types disagree they are text."""
    queue(store, write_input("one.parquet", q=["a"], Tag=[[1, 2]]))
    queue(store, write_input("two.parquet", q=["b"], tag=["x"]))
    assert rows(store, "select tag from inputs order by q") == [("[1, 2]",), ("x",)]


def test_a_prefixed_name_may_be_another_jobs_own(store: Store, write_input: WriteInput) -> None:
    queue(store, write_input("one.parquet", q=["a"], job_id=["theirs"]))
    queue(store, write_input("two.parquet", q=["b"], input_job_id=[{"x": 1}]))
    assert rows(store, "select input_job_id from inputs order by q") == [("theirs",), ("{'x': 1}",)]


def test_a_folder_called_like_a_partition_adds_no_column(tmp_path: Path, write_input: WriteInput) -> None:
    from conserve.config import load

    folder = tmp_path / "day=1"
    folder.mkdir()
    store = Store.open(load({"home": folder / "home"}))
    try:
        job_id = queue(store, write_input("day=1/input.parquet", q=["a"]))
        answer(store, job_id)
        assert rows(store, "select count(*) from results join inputs using (job_id, row_index)") == [(1,)]
        assert "day" not in [name for name, *_ in rows(store, "describe inputs")]
    finally:
        store.close()


@pytest.mark.parametrize("damage", [Path.unlink, truncate, lambda path: path.write_bytes(b"")])
def test_a_shard_that_cannot_be_read_costs_its_rows_alone(
    store: Store, write_input: WriteInput, damage: Any
) -> None:
    good, bad = (queue(store, write_input(f"{name}.parquet", q=["a", "b"])) for name in ("good", "bad"))
    for job_id in (good, bad):
        answer(store, job_id)
    damage(shard_of(store, bad))
    with views(store, now=0.0) as opened:
        found = opened.duck.execute("select job_id, count(*) from results group by 1").fetchall()
        (left_out,) = opened.left_out
        states = opened.duck.execute("select distinct job_id, state from requests order by 1").fetchall()
    assert found == [(good, 2)]
    assert (left_out.view, left_out.job_id) == ("results", bad)
    assert left_out.sentence.endswith(f"run: conserve check {bad}")
    assert sorted(states) == sorted([(good, "succeeded"), (bad, "unreadable")])


@pytest.mark.parametrize("damage", [Path.unlink, truncate])
@pytest.mark.parametrize("name", [layout.INPUTS, layout.REQUESTS])
def test_a_copied_input_or_request_file_that_cannot_be_read_costs_its_rows_alone(
    store: Store, tmp_path: Path, damage: Any, name: str
) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"q": "a"}\n')
    good, bad = queue(store, lines), queue(store, lines)
    damage(layout.job_folder(store.home, bad) / name)
    view = name.removesuffix(".parquet")
    with views(store, now=0.0) as opened:
        assert opened.duck.execute(f"select job_id from {view}").fetchall() == [(good,)]
        (left_out,) = opened.left_out
    assert (left_out.view, left_out.job_id) == (view, bad)


def test_an_input_that_is_no_parquet_any_more_is_left_out(store: Store, tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"q": "a"}\n')
    good, bad = queue(store, lines), queue(store, lines)
    path = layout.inputs_file(store.home, bad)
    size = path.stat().st_size
    path.write_bytes(b"PAR1" + b"\xff" * (size - 12) + (20).to_bytes(4, "little") + b"PAR1")
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select job_id from inputs").fetchall() == [(good,)]
        assert [left_out.job_id for left_out in opened.left_out] == [bad]


def flip(path: Path) -> None:
    """Damage the pages of a file, and leave the description of its columns as it is."""
    data = bytearray(path.read_bytes())
    footer = int.from_bytes(data[-8:-4], "little") + 8
    for at in range(4, len(data) - footer, 7):
        data[at] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("view", "sql"),
    [
        ("results", "select job_id, count(*), max(text) from results group by 1"),
        ("inputs", "select job_id, count(*), max(q) from inputs group by 1"),
        ("requests", "select job_id, count(*), max(prompt) from requests group by 1"),
    ],
)
def test_a_file_that_turns_out_to_be_damaged_is_left_out(
    store: Store, tmp_path: Path, view: str, sql: str
) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"q": f"text {n * 7919}"}) + "\n" for n in range(500)))
    good, bad = queue(store, lines), queue(store, lines)
    for job_id in (good, bad):
        finish(store, leased(store, only=[job_id], limit=500), text="some text")
        shards.compact(store, job_id, now=0.0)
    folder = layout.job_folder(store.home, bad)
    flip({"results": shard_of(store, bad)}.get(view, folder / f"{view}.parquet"))
    done = conserve("sql", "--csv", sql)
    assert done.returncode == 1, done.stderr
    assert [line.split(",")[:2] for line in done.stdout.splitlines()[1:]] == [[good, "500"]]
    assert done.stderr.startswith(f"warning: the view {view} leaves out rows of job {bad}: ")
    assert done.stderr.count("\n") == 1


def test_a_damage_found_after_the_first_rows_ends_the_answer(store: Store, tmp_path: Path) -> None:
    """The store is of an earlier version and has no digests."""
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"q": "a"}\n')
    path = layout.inputs_file(store.home, queue(store, lines))
    with store.write() as tx:
        tx.execute(text("update job set files = null"))
    dice = random.Random(1)
    pq.write_table(
        pa.table({"q": [dice.randbytes(2500).hex() for _ in range(5_000)]}), path, row_group_size=100
    )
    data = bytearray(path.read_bytes())
    start = len(data) - int.from_bytes(data[-8:-4], "little") - 50_000
    data[start : start + 40_000] = bytes(40_000)
    path.write_bytes(bytes(data))
    out = tmp_path / "out.csv"
    done = conserve("sql", "-o", str(out), "select q from inputs", CONSERVE_SQL_THREADS="1")
    assert done.returncode == 1
    assert done.stderr.startswith(f"conserve: {path} is damaged (")
    assert done.stderr.endswith("; run: conserve check --repair\n")
    assert not out.exists()


def test_sql_warns_of_what_the_query_would_have_read(store: Store, write_input: WriteInput) -> None:
    good, bad = (queue(store, write_input(f"{name}.parquet", q=["a", "b"])) for name in ("good", "bad"))
    for job_id in (good, bad):
        answer(store, job_id)
    shard_of(store, bad).unlink()
    done = conserve("sql", "--csv", "select job_id, count(*) as n from results group by 1")
    assert (done.returncode, done.stdout) == (1, f"job_id,n\n{good},2\n")
    assert done.stderr.startswith(f"warning: the view results leaves out rows of job {bad}: ")
    assert done.stderr.endswith(f"is missing; run: conserve check {bad}\n")
    assert conserve("sql", "--csv", "select count(*) from jobs").stderr == ""
    assert conserve("sql", "--csv", "select 1").stderr == ""
    join = "select count(*) as n from jobs join inputs using (job_id) join requests using (job_id, row_index)"
    assert conserve("sql", "--csv", join.replace("requests", "inputs i")).stderr == ""
    assert conserve("sql", "--csv", join).stderr.count("\n") == 1, "the view requests reads results"


def test_results_of_a_damaged_job_are_written_and_exit_1(store: Store, write_input: WriteInput) -> None:
    job_id = queue(store, write_input(q=[str(n) for n in range(4)]))
    for part in ([0, 1], [2, 3]):
        finish(store, leased(store, limit=2), of=part)
        shards.compact(store, job_id, now=0.0)
    sorted((layout.job_folder(store.home, job_id) / layout.RESULTS).glob("*.parquet"))[0].unlink()
    done = conserve("results", job_id)
    assert done.returncode == 1
    assert [json.loads(line)["row_index"] for line in done.stdout.splitlines()] == [2, 3]
    assert done.stderr.startswith(f"warning: the view results leaves out rows of job {job_id}: ")


def unsealed(store: Store) -> None:
    """Make the store one of an earlier version, whose files have no digests."""
    with store.write() as tx:
        tx.execute(text("update job set files = null"))
        tx.execute(text("update shard set digest = null, bytes = null"))


def rewrite(path: Path, table: pa.Table) -> None:
    path.unlink()
    pq.write_table(table, path)


def test_a_shard_of_an_earlier_version_has_no_column_of_engines(
    store: Store, write_input: WriteInput
) -> None:
    job_id = queue(store, write_input(q=["a"]))
    answer(store, job_id)
    unsealed(store)
    path = shard_of(store, job_id)
    rewrite(path, pq.read_table(path).drop_columns(["engine"]))
    assert rows(store, "select job_id, text, engine from results") == [(job_id, "yes", None)]


def test_a_file_of_requests_that_is_something_else_costs_its_rows_alone(
    store: Store, write_input: WriteInput
) -> None:
    bad, good = (queue(store, write_input(f"{name}.parquet", q=["a"])) for name in ("bad", "good"))
    unsealed(store)
    rewrite(layout.requests_file(store.home, bad), pa.table({"row_index": [0], "error": ["x"]}))
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select job_id from requests").fetchall() == [(good,)]
        assert len(opened.files["requests"]) == 1
        (left_out,) = opened.left_out
    assert (left_out.view, left_out.job_id) == ("requests", bad)
    assert left_out.reason == "requests.parquet has no column custom_id"
    assert left_out.fix == "run: conserve check"


def garble(path: Path) -> None:
    """Damage a file in its footer, and leave its end as it is."""
    size = path.stat().st_size
    path.write_bytes(b"PAR1" + b"\xff" * (size - 12) + (20).to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize("damage", [Path.unlink, truncate, garble])
def test_a_file_that_is_damaged_after_the_snapshot_costs_its_rows_alone(
    store: Store, write_input: WriteInput, tmp_path: Path, damage: Any
) -> None:
    bad, good = (queue(store, write_input(f"{name}.parquet", q=["a"])) for name in ("bad", "good"))
    for job_id in (good, bad):
        answer(store, job_id)
    taken = snapshot(store, now=0.0)
    for path in (
        shard_of(store, bad),
        layout.requests_file(store.home, bad),
        layout.inputs_file(store.home, bad),
    ):
        damage(path)
    with query.opened(taken, spill=tmp_path) as opened:
        for view in ("results", "inputs", "requests"):
            assert opened.duck.execute(f"select job_id from {view}").fetchall() == [(good,)]
        for view in ("results", "requests"):
            assert len(opened.files[view]) == 1
        left_out = {one.view: one for one in opened.left_out}
    assert {one.job_id for one in left_out.values()} == {bad}
    reasons = {view: one.reason for view, one in left_out.items()}
    what = {Path.unlink: "is gone", truncate: "is cut short or was overwritten", garble: "cannot be read ("}[
        damage
    ]
    assert reasons["requests"].startswith(f"requests.parquet {what}")
    assert f".parquet {what}" in reasons["results"]
    assert reasons["results"].startswith(f"jobs/{bad}/results/")
    copy = (
        f"its input {layout.inputs_file(store.home, bad)}"
        if damage is garble
        else "the copy of its input, inputs.parquet,"
    )
    assert reasons["inputs"].startswith(f"{copy} {what}")
    assert [left_out[view].fix for view in ("results", "inputs", "requests")] == [
        "run: conserve check --repair",
        "run: conserve check",
        "run: conserve check",
    ]


@pytest.mark.parametrize("sealed", [True, False])
def test_of_a_job_with_several_damaged_files_the_first_is_named(
    store: Store, write_input: WriteInput, sealed: bool
) -> None:
    bad = queue(store, write_input("bad.parquet", q=["a", "b", "c"]))
    for part in range(3):
        finish(store, leased(store, limit=1), of=[part])
        shards.compact(store, bad, now=0.0)
    other = queue(store, write_input("other.parquet", q=["a"]))
    answer(store, other)
    if not sealed:
        unsealed(store)
    paths = sorted((layout.job_folder(store.home, bad) / layout.RESULTS).glob("*.parquet"))
    for path in [*paths, shard_of(store, other)]:
        truncate(path)
    with views(store, now=0.0) as opened:
        first, second = opened.left_out
    assert (first.job_id, second.job_id) == (bad, other)
    assert first.reason.startswith(f"jobs/{bad}/results/{paths[0].name} ")
    assert first.reason.endswith(", and 2 more of its files")
    assert "more of its files" not in second.reason


def test_columns_of_jobs_and_results_have_their_types(store: Store, write_input: WriteInput) -> None:
    """Also where no job has a value in them."""
    for job in range(2):
        kinds = dict(rows(store, "select column_name, column_type from (describe jobs)"))
        texts = {"id", "job_id", "state", "error", "row_order", "model", "on_late", "failed_by"}
        assert {name for name, kind in kinds.items() if kind == "VARCHAR"} == texts
        assert kinds["tags"] == "MAP(VARCHAR, VARCHAR)"
        times = {name for name, kind in kinds.items() if kind == "TIMESTAMP WITH TIME ZONE"}
        assert times == {"submitted_at", "started_at", "finished_at", "deadline"}
        assert set(kinds.values()) == {*map(kinds.get, ("id", "tags", "deadline")), "BIGINT"}
        kinds = dict(rows(store, "select column_name, column_type from (describe results)"))
        assert {name for name, kind in kinds.items() if kind == "JSON"} == {"json", "choices", "logprobs"}
        assert "position" not in kinds
        queue(store, write_input(f"{job}.parquet", q=["a"]))


def test_a_job_is_a_row_of_counters(store: Store, write_input: WriteInput) -> None:
    job_id = submit(
        store, str(write_input(q=["a", "b", "c"])), TASK, priority=3, tags={"team": "a", "of": "b"}
    ).job_id
    finish(store, leased(store, limit=2), failed=[1], prompt_tokens=5)
    counters = "id, state, rows, waiting, succeeded, failed, prompt_tokens, priority, tags['of']"
    assert rows(store, f"select {counters} from jobs") == [(job_id, "queued", 3, 1, 1, 1, 10, 3, "b")]
    joined = "select distinct id, job_id, state from results join jobs using (job_id)"
    assert rows(store, joined) == [(job_id, job_id, "queued")]


def test_the_cause_of_a_failure_is_a_column(store: Store, write_input: WriteInput) -> None:
    job_id = queue(store, write_input(q=["a"]))
    with store.write() as tx:
        catalog.refuse(tx, job_id, "its input changed", FailedBy.INPUT, now=0.0)
    assert rows(store, "select failed_by from jobs") == [("input",)]


def odd_table() -> pa.Table:
    return pa.table({"q": ["a"], **{name: [f"their {name}"] for name in ODD}})


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_input_column_has_one_name_everywhere(store: Store, tmp_path: Path, kind: str) -> None:
    """The name holds in `sql` and beside results, in every format; the results' own columns keep their names."""
    source = tmp_path / f"input.{kind}"
    if kind == "parquet":
        pq.write_table(odd_table(), source)
    else:
        source.write_text(json.dumps(odd_table().to_pylist()[0]) + "\n")
    job_id = queue(store, source)
    answer(store, job_id)
    beside = {}
    for ending in ("jsonl", "csv", "parquet"):
        out = tmp_path / f"out.{ending}"
        assert conserve("results", job_id, "--with-inputs", "-o", str(out)).returncode == 0
        beside[ending] = read_back(out)
    (asked,) = (json.loads(line) for line in conserve("sql", "--json", "from inputs").stdout.splitlines())
    theirs = {name: value for name, value in asked.items() if str(value).startswith("their ")}
    assert sorted(theirs.values()) == sorted(f"their {name}" for name in ODD)
    assert len({name.lower() for name in theirs}) == len(ODD)
    assert not {name.lower() for name in theirs} & {"text", "json", "job_id", "row_index"}
    for row in beside.values():
        assert {name: row[name] for name in theirs} == theirs
        assert (row["text"], row["job_id"]) == ("yes", job_id)
        assert int(row["row_index"]) == 0
    both = conserve("sql", "--json", "select * from results join inputs using (job_id, row_index)")
    assert json.loads(both.stdout) == beside["jsonl"]


def test_openai_lines_have_no_place_for_input_columns(store: Store, write_input: WriteInput) -> None:
    job_id = queue(store, write_input(q=["a"], text=["theirs"]))
    answer(store, job_id)
    for flag in ("--with-inputs", "--with-prompts"):
        assert conserve("results", job_id, "--format", "openai", flag).returncode == 2
    (line,) = conserve("results", job_id, "--format", "openai").stdout.splitlines()
    body = json.loads(line)["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "yes"


def read_back(path: Path) -> dict[str, Any]:
    """Only row of a file."""
    if path.suffix == ".parquet":
        (row,) = pq.read_table(path).to_pylist()
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            (row,) = csv.DictReader(file)
    else:
        row = json.loads(path.read_text())
    return dict(row)


def test_inputs_that_are_alike_are_read_in_one_scan_and_each_row_is_its_jobs(
    store: Store, tmp_path: Path
) -> None:
    def lines(name: str, *documents: dict[str, Any]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in documents))
        return queue(store, path)

    alike = [lines(f"alike{n}", *({"q": f"{n} {row}", "n": row} for row in range(3))) for n in range(20)]
    other = lines("other", {"q": "other", "n": "text"})  # its column is none of numbers
    odd = lines("odd", {"q": "odd", "file_row_number": 7})
    clash = [lines(f"clash{n}", {"q": "clash", "text": "mine", "filename": str(n)}) for n in range(2)]
    with views(store, now=0.0) as opened:
        ((sql,),) = opened.duck.execute(
            "select sql from duckdb_views() where view_name = 'inputs'"
        ).fetchall()
        assert sql.lower().count("union all by name") == 3, "of four kinds"
        found = opened.duck.execute(
            "select job_id, row_index, q, n from inputs where n is not null"
        ).fetchall()
        mine = opened.duck.execute(
            "select job_id, input_text, filename from inputs where filename is not null"
        )
        assert sorted(mine.fetchall()) == sorted((job, "mine", str(n)) for n, job in enumerate(clash))
    expected = [(job, row, f"{n} {row}", str(row)) for n, job in enumerate(alike) for row in range(3)]
    assert sorted(found) == sorted([*expected, (other, 0, "other", "text")])
    numbered = rows(store, "select job_id, row_index, file_row_number from inputs where q = 'odd'")
    assert numbered == [(odd, 0, 7)]
