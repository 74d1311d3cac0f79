"""Times and texts in inputs that DuckDB cannot hold: they cost `conserve sql` the inputs of one job alone."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.store.database.store import Store
from conserve.store.sql.query import views
from conserve.store.sql.unsupported_values import read_fault, text_fault, time_fault
from tests.commands import conserve
from tests.unit.test_views import answer, queue

LATEST_MS = (2**63 - 1) // 1000
DAY_MS = 24 * 3600 * 1000


UNHELD = {
    "a time beyond DuckDB's": pa.array([LATEST_MS + 1], pa.timestamp("ms")),
    "a time before DuckDB's": pa.array([-LATEST_MS - 1], pa.timestamp("ms", "UTC")),
    "a time that DuckDB cannot write as text": pa.array([-(2**63)], pa.timestamp("us")),
    "a time of day beyond the day": pa.array([DAY_MS + 1], pa.time32("ms")),
    "a negative time of day": pa.array([-1], pa.time64("ns")),
    "one in a list": pa.array([[0, LATEST_MS + 1]], pa.list_(pa.timestamp("ms"))),
}
BYTES = [b"noon", b"no\xff"]
OFFSETS = pa.array([0, *map(len, BYTES)], pa.int32()).to_numpy().cumsum().astype("int32")
NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(OFFSETS.tobytes()), pa.py_buffer(b"".join(BYTES))]
)
NOT_JSON = pa.array(['{"at": "noon"}', None, "noon"], pa.json_())
HELD = {
    "the latest": pa.array([LATEST_MS], pa.timestamp("ms")),
    "the earliest": pa.array([-LATEST_MS + 1], pa.timestamp("ms")),
    "microseconds": pa.array([2**63 - 1], pa.timestamp("us")),
    "nanoseconds": pa.array([2**63 - 1], pa.timestamp("ns")),
    "the end of the day": pa.array([DAY_MS], pa.time32("ms")),
    "midnight": pa.array([0], pa.time64("us")),
    "a date": pa.array([2**31 - 1], pa.date32()),
    "a number": pa.array([2**63 - 1]),
    "none": pa.array([None], pa.timestamp("ms")),
}


def written(path: Path, column: pa.Array, *, statistics: bool = True, **columns: list[object]) -> Path:
    table = pa.table({**({"q": ["a"] * len(column)} | columns), "seen at": column})
    pq.write_table(table, path, write_statistics=statistics)
    return path


@pytest.mark.parametrize("what", UNHELD)
def test_a_time_that_duckdb_cannot_hold_is_found_in_the_files_statistics(tmp_path: Path, what: str) -> None:
    path = written(tmp_path / "odd.parquet", UNHELD[what])
    fault = time_fault(path)
    assert fault is not None
    assert fault.startswith("has a time in the column seen at that SQL cannot hold")
    assert read_fault(path, ["seen at"]) is not None or "as text" in what, "DuckDB fails at it too"


@pytest.mark.parametrize("what", HELD)
def test_all_other_times_are_held(tmp_path: Path, what: str) -> None:
    path = written(tmp_path / "plain.parquet", HELD[what])
    assert time_fault(path) is None
    assert read_fault(path, ["seen at", "q"]) is None, "DuckDB reads it"


def test_a_time_is_found_in_whatever_row_group_it_is(tmp_path: Path) -> None:
    times = pa.array([None, 0, LATEST_MS + 1], pa.timestamp("ms"))
    plain = pa.array([0, 0, 0], pa.timestamp("ms"))
    path = tmp_path / "odd.parquet"
    for columns, fault in (
        ({"n": [1, 2, 3], "first": plain, "seen at": times}, "in the column seen at"),
        ({"n": [2**63 - 1] * 3, "first": plain, "seen at": plain}, None),
        ({"record": pa.StructArray.from_arrays([times], ["seen at"])}, "in the column record"),
    ):
        pq.write_table(pa.table(columns), path, row_group_size=1)
        found = time_fault(path)
        assert found is None if fault is None else fault in str(found)


def test_times_without_statistics_are_read(tmp_path: Path) -> None:
    """Other columns are not: a query finds what is odd in them."""
    odd = written(tmp_path / "odd.parquet", UNHELD["a time beyond DuckDB's"], statistics=False)
    found = str(time_fault(odd))
    assert found.startswith("has a value that SQL cannot hold (")
    assert found.endswith(")")
    assert time_fault(written(odd, HELD["the latest"], statistics=False)) is None
    beside = pa.table({"text": NOT_UTF8, "seen at": pa.array([0, None], pa.timestamp("ms"))})
    pq.write_table(beside, odd, write_statistics=False)
    assert time_fault(odd) is None
    assert text_fault(odd) == "has a text in the column text that is not UTF-8"


def test_sound_texts_have_no_fault(tmp_path: Path) -> None:
    assert text_fault(written(tmp_path / "plain.parquet", pa.array(["noon", None, "ä"]))) is None
    documents = pa.array(['{"at": [NaN, 1e999]}', None, '"ä"'], pa.json_())
    path = written(tmp_path / "documents.parquet", documents, odd=["{", None, ""])
    assert text_fault(path) is None, "of a column that is JSON, and one that is not"
    assert read_fault(path, ["seen at"]) is None, "DuckDB takes them too"


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("what", ["a time beyond DuckDB's", "a time of day beyond the day", "one in a list"])
def test_one_odd_value_costs_its_jobs_inputs_alone(
    store: Store, tmp_path: Path, what: str, statistics: bool
) -> None:
    good = queue(store, written(tmp_path / "good.parquet", pa.array(["noon"])))
    bad = queue(store, written(tmp_path / "bad.parquet", UNHELD[what], statistics=statistics))
    for job_id in (good, bad):
        answer(store, job_id)
    done = conserve(
        "sql", "--csv", 'select job_id, q, "seen at" from inputs join results using (job_id, row_index)'
    )
    assert (done.returncode, done.stdout) == (0, f"job_id,q,seen at\n{good},a,noon\n"), done.stderr
    assert done.stderr.startswith(f"warning: the view inputs leaves out rows of job {bad}: its input ")
    assert "mend the file and submit the file again" in done.stderr
    assert done.stderr.count("\n") == 1
    done = conserve("results", bad, "--with-inputs")
    assert done.returncode == 2
    assert "leave out --with-inputs" in done.stderr
    assert conserve("results", bad).returncode == 0


def test_a_jobs_inputs_are_left_out_of_the_view(store: Store, tmp_path: Path) -> None:
    bad = queue(store, written(tmp_path / "bad.parquet", UNHELD["one in a list"]))
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select * from inputs").fetchall() == []
        (left_out,) = opened.left_out
    assert (left_out.view, left_out.job_id) == ("inputs", bad)


@pytest.mark.parametrize(
    ("column", "what"), [(NOT_UTF8, "that is not UTF-8"), (NOT_JSON, "that is not JSON")]
)
def test_a_text_that_duckdb_cannot_read_costs_its_jobs_inputs_alone(
    store: Store, tmp_path: Path, column: pa.Array, what: str
) -> None:
    good = queue(store, written(tmp_path / "good.parquet", pa.array(["noon"])))
    bad = queue(store, written(tmp_path / "bad.parquet", column))
    for job_id in (good, bad):
        answer(store, job_id)
    done = conserve(
        "sql", "--csv", 'select job_id, "seen at" from inputs join results using (job_id, row_index)'
    )
    assert (done.returncode, done.stdout) == (0, f"job_id,seen at\n{good},noon\n"), done.stderr
    assert done.stderr.startswith(f"warning: the view inputs leaves out rows of job {bad}: ")
    assert f"has a text in the column seen at {what}; mend the file" in done.stderr
    assert conserve("sql", "select q from inputs").stderr == "", "columns that are sound are read"
    done = conserve("results", bad, "--with-inputs")
    assert done.returncode == 2
    assert "leave out --with-inputs" in done.stderr
