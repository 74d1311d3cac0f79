"""Rows of an answer: unique names, and values as Python has them, or as text where it has no type for them."""

import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from conserve.errors import UsageError
from conserve.store.sql.batches import RowBatches, keepable, rows_of, unique, values
from conserve.store.sql.relation import relation

AT = datetime(2026, 1, 2, 3, 4, 5, 6)
LATER = "12000-01-01"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "A", "a"], ["a", "a_1", "A_2", "a_3"]),
        (["a", "a", "A_1", "b", "B"], ["a", "a_2", "A_1", "b", "B_1"]),
        (["a_1", "a", "a", "a_1"], ["a_1", "a", "a_2", "a_1_1"]),
    ],
)
def test_a_second_column_of_a_name_gets_a_number_that_makes_it_unique(
    names: list[str], found: list[str]
) -> None:
    assert unique(names) == found


@pytest.mark.parametrize(("rows", "length", "most"), [(5_000, 1, 2_048), (600, 300_000, 224)])
def test_a_batch_has_fewer_rows_where_they_are_long(rows: int, length: int, most: int) -> None:
    """Arrow holds no more than 2 GiB of text in a column of a batch, which 2,048 long answers exceed."""
    answer = duckdb.sql(f"select i, repeat('x', {length}) as text from range({rows}) r(i) order by i")
    batches = list(rows_of(answer).batches)
    assert [len(batch) for batch in batches] == [most] * (rows // most) + [rows % most]
    assert [number for batch in batches for number in batch["i"].to_pylist()] == list(range(rows))


def test_columns_of_json_are_named_and_others_are_not() -> None:
    rows = rows_of(duckdb.sql("""select '{}'::json as document, '{}' as text, ['{}'::json] as list"""))
    assert (rows.schema.names, rows.documents) == (["document", "text", "list"], {"document"})
    assert list(rows.tuples()) == [("{}", "{}", ["{}"])]


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        (f"date '{LATER}'", LATER),
        ("date '2026-01-02'", date(2026, 1, 2)),
        (f"[date '{LATER}', null, date '2026-01-02']", [LATER, None, date(2026, 1, 2)]),
        (f"[date '{LATER}', date '2026-01-02']::date[2]", [LATER, date(2026, 1, 2)]),
        (f"{{'at': date '{LATER}', 'n': 1}}", {"at": LATER, "n": 1}),
        (f"[{{'at': [date '{LATER}']}}]", [{"at": [LATER]}]),
        ("timestamp_ns '2026-01-02 03:04:05.000006'", AT),
        ("timestamp_ns '2026-01-02 03:04:05.000006007'", "2026-01-02 03:04:05.000006007"),
        (
            "[timestamp_ns '2026-01-02 03:04:05.000006', timestamp_ns '2026-01-02 03:04:05.000006007', null]",
            [AT, "2026-01-02 03:04:05.000006007", None],
        ),
        ("{'at': timestamp_ns '2026-01-02 03:04:05.000006'}", {"at": AT}),
        ("null::timestamp_ns", None),
        ("null::timestamp_ns[]", None),
        ("map {'k': 1}", {"k": 1}),
        ("map {1: 2}", [(1, 2)]),
    ],
)
def test_a_value_is_pythons_own_or_text(sql: str, value: Any) -> None:
    rows = rows_of(duckdb.sql(f"select {sql} as a union all select {sql}"))
    assert list(rows.tuples()) == [(value,), (value,)]


HUGE = str(2**128 - 1)
U = f"{HUGE}::uhugeint"
OF_DUCKDB = {
    U: HUGE,
    f"{HUGE}0": f"{HUGE}0",
    "{'k': 1}::variant": "{'k': 1}",
    "'101'::bit": "101",
    "'01:00:00+02'::timetz": "01:00:00+02",
    "null::bignum": None,
    f"[{U}, null]": [HUGE, None],
    f"[{U}, 2]::uhugeint[2]": [HUGE, "2"],
    f"map {{'k': [{U}]}}": {"k": [HUGE]},
    "map {'1'::bit: 2}": {"1": 2},
    "union_value(k := '101'::bit)": "101",
    "row(1::bignum, 2)": {"element1": "1", "element2": 2},
    "{'UHUGEINT': 1, 'a \"b': ['01:00:00+02'::timetz], 'n': null, 'e': 'BIT'::enum('BIT')}": {
        "UHUGEINT": 1,
        'a "b': ["01:00:00+02"],
        "n": None,
        "e": "BIT",
    },
    "{'BIT': {'VARIANT': 1.5}}": {"BIT": {"VARIANT": Decimal("1.5")}},
    "null::struct(u uhugeint)": None,
}
"""Values of types that Arrow lacks, and of some that are only called so."""


@pytest.mark.parametrize("sql", OF_DUCKDB)
def test_a_value_of_a_type_that_arrow_lacks_is_text_wherever_it_is(sql: str) -> None:
    found = duckdb.sql(f"select {sql} as a")
    assert list(rows_of(found).tuples()) == [(OF_DUCKDB[sql],)]
    assert keepable(found).to_arrow_table().equals(pa.Table.from_batches(rows_of(found).batches))


def test_rows_of_a_job_have_lengths_of_time_as_text_too() -> None:
    found = keepable(duckdb.sql("select interval 1 month as a, {'INTERVAL': [interval 2 day]} as b, 1 as c"))
    assert found.to_arrow_table().to_pylist() == [{"a": "1 month", "b": {"INTERVAL": ["2 days"]}, "c": 1}]


def test_a_map_with_keys_that_no_dictionary_has_is_pairs() -> None:
    """A key that comes twice, as Parquet may hold it, and in an inner map a structure."""
    numbers = pa.array([[("a", 1), ("a", 2)], [("a", 1)], None, []], pa.map_(pa.string(), pa.int64()))
    assert values(numbers) == [[("a", 1), ("a", 2)], {"a": 1}, None, {}]
    inner = pa.map_(pa.struct([("k", pa.int64())]), pa.int64())
    nested = pa.array([[("a", [({"k": 1}, 2)])], [("a", [])]], pa.map_(pa.string(), inner))
    assert values(nested) == [[("a", [({"k": 1}, 2)])], {"a": {}}]


@pytest.mark.parametrize(
    ("kind", "numbers", "found"),
    [
        (pa.timestamp("ns", "UTC"), [1_000], [datetime(1970, 1, 1, microsecond=1, tzinfo=UTC)]),
        (
            pa.timestamp("ns"),
            [1_000, 1],
            [datetime(1970, 1, 1, microsecond=1), "1970-01-01 00:00:00.000000001"],
        ),
        (pa.duration("ns"), [1_000, None], [timedelta(microseconds=1), None]),
        (pa.time64("ns"), [1_000, 1], [time(microsecond=1), "00:00:00.000000001"]),
        (pa.time64("us"), [1], [time(microsecond=1)]),
    ],
)
def test_times_in_nanoseconds_are_pythons_unless_they_are_finer(
    kind: pa.DataType, numbers: list[int], found: list[Any]
) -> None:
    column = pa.array(numbers, kind)
    assert values(column) == found
    nested = pa.array([[number] for number in numbers], pa.list_(kind))
    assert values(nested) == [[value] for value in found]
    assert {type(value) for value in values(column)} <= {datetime, timedelta, time, str, type(None)}


def test_an_answer_as_a_relation_is_of_the_connection_that_goes_on_with_it() -> None:
    """Documents are JSON there, and times have no zone, for which DuckDB would need another package."""
    at = pa.array([datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)])
    table = pa.table({"document": ['{"a": 1}'], "moment": at, 'a"b': [1], "t": ["x"]})

    def rows() -> RowBatches:
        return RowBatches(table.schema, frozenset({"document"}), table.to_batches())

    with duckdb.connect() as own:
        found = relation(rows(), own)
        assert [str(kind) for kind in found.types] == ["JSON", "TIMESTAMP", "BIGINT", "VARCHAR"]
        assert found.columns == ["document", "moment", 'a"b', "t"]
        assert own.sql('select document->\'a\', moment, "a""b", t from found').fetchall() == [
            ("1", datetime(2026, 1, 2, 3, 4, 5), 1, "x")
        ]
    shared = relation(rows()).query("shared", "select count(*) from shared")
    assert shared.join(duckdb.sql("select 7 as n"), "true").fetchall() == [(1, 7)]
    nothing = relation(RowBatches(table.schema, frozenset(), []))
    assert (nothing.columns, nothing.fetchall()) == (table.schema.names, [])


class HeldConnection:
    """A connection on which another thread makes a call that lasts until `release`."""

    def __init__(self) -> None:
        self.duck = duckdb.connect()
        self._begun, self._free = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._call)
        self._thread.start()
        self._begun.wait()

    def _call(self) -> None:
        held = pa.RecordBatchReader.from_batches(pa.schema([("n", pa.int64())]), self._batches())
        duckdb.from_arrow(held, connection=self.duck).fetchall()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        self._begun.set()
        self._free.wait()
        yield pa.record_batch({"n": [1]})

    def release(self, after_s: float = 0.0) -> None:
        """End the call."""
        self._free.set()
        self._thread.join()


NUMBERED = pa.table({"n": [7]})


def numbered() -> RowBatches:
    return RowBatches(NUMBERED.schema, frozenset(), NUMBERED.to_batches())


@pytest.fixture
def held() -> Iterator[HeldConnection]:
    connection = HeldConnection()
    yield connection
    connection.release()
    connection.duck.close()


def test_a_relation_waits_for_a_call_of_another_thread(
    held: HeldConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conserve.store.sql.relation.time.sleep", held.release)
    assert relation(numbered(), held.duck).fetchall() == [(7,)]


def test_a_connection_that_is_never_free_is_told_of(
    held: HeldConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conserve.store.sql.relation.BUSY_S", 0.0)
    with pytest.raises(
        UsageError, match=r"was busy with another thread's calls for 0 s; make those on duckdb"
    ):
        relation(numbered(), held.duck)
