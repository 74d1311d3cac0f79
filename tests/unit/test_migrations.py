"""Stores of earlier versions open, with all that is in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, insert, inspect, text

from conserve.config import Settings
from conserve.store.books import catalog, shards
from conserve.store.books.readings import read_harvested, read_jobs, read_task, untaken
from conserve.store.books.results import encode
from conserve.store.books.states import FailedBy, JobState, OnLate
from conserve.store.database import first_schema, migrations, schema
from conserve.store.database.connection import engine_of
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from conserve.store.sql.query import views
from tests.postgres import Databases
from tests.store_rows import add_job, claim, finish, job, leased, positions, result, select


@contextmanager
def first_version(settings: Settings) -> Iterator[Connection]:
    """The database that the first version would have made."""
    settings.home.mkdir(parents=True)
    engine = create_engine(settings.store_url)
    with engine.begin() as tx:
        migrations.m001_first_tables(tx)
        migrations.remember(tx, 1)
        yield tx
    engine.dispose()


def add(tx: Connection, table: str, **values: Any) -> None:
    """Insert a row, with the values that the first version gave to columns that are not named."""
    counters = ("next_position", "succeeded", "failed", "retries", "prompt_tokens", "completion_tokens",
                "cached_tokens", "resumed_tokens")  # fmt: skip
    first: dict[str, dict[str, Any]] = {"job": {"priority": 0, **dict.fromkeys(counters, 0)},
             "request": {"failures": 0, "available_at": 0.0, "suspect": False}}  # fmt: skip
    tx.execute(insert(first_schema.metadata.tables[table]).values({**first.get(table, {}), **values}))


def add_old_job(tx: Connection) -> None:
    """Four rows: one in a journal, one under a lease, two never leased."""
    add(tx, "job", id="job-1", state="queued", submitted_at=0.0, task="{}", num_rows=4, next_position=2,
        succeeded=1, source='{"path": null, "format": "jsonl"}')  # fmt: skip
    add(tx, "lease", job_id="job-1", owner="ann", claimed_at=0.0, expires_at=10.0)
    add(tx, "request", job_id="job-1", position=1, epoch=1, attempts=1)
    add(tx, "journal", job_id="job-1", position=0, failed=False, payload=encode(result(0)))


def test_a_store_of_the_first_version_goes_on(settings: Settings) -> None:
    with first_version(settings) as tx:
        add_old_job(tx)
    (settings.home / "jobs" / "job-1").mkdir(parents=True)
    store = Store.open(settings)
    assert store.id
    lease = leased(store)
    assert positions(lease) == [2, 3]
    finish(store, lease)
    finish(store, lease_of(1), of=[1])
    assert job(store).state is JobState.COMPLETED
    assert shards.compact(store, "job-1", now=0.0) == 4
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select row_index from results order by 1").fetchall() == [
            (0,),
            (1,),
            (2,),
            (3,),
        ]
    assert claim(store) is None
    store.close()


def lease_of(epoch: int) -> Any:
    """A lease that the first version gave out."""
    from conserve.store.books.leases import Lease, LeasedRow

    return Lease(epoch, "job-1", 10.0, (LeasedRow(1, 1, 0, 0.0),))


Shape = dict[str, dict[str, Any]]


def shape(engine: Engine) -> Shape:
    """Description of each table by the database itself, in no order."""
    found = inspect(engine)
    said: dict[str, str] = {}
    if engine.dialect.name == "sqlite":
        with engine.connect() as tx:
            rows = tx.execute(text("select name, sql from sqlite_master where type = 'table'"))
            said = {row.name: row.sql for row in rows}

    return {
        name: {
            "columns": {c["name"]: (str(c["type"]), c["nullable"]) for c in found.get_columns(name)},
            "options": [each for each in ("AUTOINCREMENT", "WITHOUT ROWID") if each in said.get(name, "")],
            "key": found.get_pk_constraint(name)["constrained_columns"],
            "indexes": sorted(
                (i["name"], i["column_names"], i["unique"], condition(i)) for i in found.get_indexes(name)
            ),
            "unique": sorted(each["column_names"] for each in found.get_unique_constraints(name)),
            "refers": sorted(
                (each["constrained_columns"], each["referred_table"], each["options"])
                for each in found.get_foreign_keys(name)
            ),
        }
        for name in found.get_table_names()
    }


def condition(index: Any) -> str:
    """Condition of the rows that an index has, as the database says it; empty for an index of all rows."""
    options = index.get("dialect_options", {})
    return str(options.get("sqlite_where", options.get("postgresql_where", ""))).lower()


@pytest.fixture(scope="module")
def declared() -> Shape:
    """The tables as `schema` declares them, on SQLite."""
    engine = create_engine("sqlite://")
    schema.metadata.create_all(engine)
    return shape(engine)


@pytest.mark.parametrize("number", range(LATEST))
def test_every_earlier_version_arrives_at_the_schema(
    settings: Settings, declared: Shape, number: int
) -> None:
    settings.home.mkdir(parents=True)
    engine = create_engine(settings.store_url)
    apply: list[Callable[[Connection], None]] = migrations.MIGRATIONS[:number]
    with engine.begin() as tx:
        for count, migration in enumerate(apply, start=1):
            migration(tx)
            migrations.remember(tx, count)
    engine.dispose()
    store = Store.open(settings)
    assert shape(store.engine) == declared
    assert select(store, "select value from meta where key = 'version'") == [(str(LATEST),)]
    store.close()


@pytest.mark.parametrize("number", range(1, LATEST + 1))
def test_a_store_of_every_earlier_version_is_read_as_it_is(settings: Settings, number: int) -> None:
    """`conserve status` shows what the version knew, and changes nothing."""
    known = {
        "model": 3,
        "tags": 3,
        "deadline": 6,
        "on_late": 8,
        "failed_by": 14,
    }  # columns, and the versions that brought them
    values = {"model": "m", "tags": '{"a":"b"}', "deadline": 7.0, "on_late": "push", "failed_by": "loss"}
    with first_version(settings) as tx:
        add_old_job(tx)
        for count, migration in enumerate(migrations.MIGRATIONS[1:number], start=2):
            migration(tx)
            migrations.remember(tx, count)
        for column in [name for name, since in known.items() if number >= since]:
            tx.execute(text(f"update job set {column} = :value"), {"value": values[column]})
        if number >= 8:
            tx.execute(text("insert into harvested values (2, 3.0, 4.0, 5.0)"))
    (found,) = read_jobs(settings, now=9.0)
    assert (found.id, found.state, found.row_order) == ("job-1", JobState.RUNNING, "input")
    assert (found.rows, found.waiting, found.running, found.succeeded) == (4, 2, 1, 1)
    has = {name for name, since in known.items() if number >= since}
    assert found.model == ("m" if "model" in has else None)
    assert found.tags == ({"a": "b"} if "tags" in has else {})
    assert found.deadline == (7.0 if "deadline" in has else None)
    assert found.on_late is (OnLate.PUSH if "on_late" in has else None)
    assert found.failed_by is (FailedBy.LOSS if "failed_by" in has else None)
    assert read_harvested(settings) == ([(2, 3.0, 4.0)] if number >= 8 else [])
    assert (untaken(settings, "job-1"), read_task(settings, "job-1")) == ([2], "{}")


def test_a_postgresql_database_arrives_there_too(databases: Databases) -> None:
    """But for the foreign key of the journal, whose check took longer than the row. So does one made at once."""
    at_once, migrated, made = (engine_of(databases.new(empty=empty)) for empty in (False, True, True))
    with migrated.begin() as tx:
        for migration in migrations.MIGRATIONS:
            migration(tx)
    schema.metadata.create_all(made)
    expected = shape(made)
    assert expected["journal"]["refers"]
    expected["journal"]["refers"] = []
    assert shape(migrated) == expected
    assert shape(at_once) == expected
    for engine in (at_once, migrated, made):
        engine.dispose()


REASONS = {
    "the requests of job lost-1 are lost, and its input is not as it was; submit it again": "damage",
    "the record of job lost-1 is damaged (no JSON); run: conserve check lost-1": "damage",
    "in.jsonl changed after job lost-1 was submitted; restore it": None,
    "what job lost-1 asks is lost (no JSON); submit it again": None,
}
"""Reasons of jobs that failed under versions without causes, and the cause that the migration finds."""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_jobs_that_failed_under_a_version_without_causes_are_queued_again_as_before(
    kind: str, settings: Settings, request: pytest.FixtureRequest
) -> None:
    """The sentence of a job that was cancelled says nothing."""
    settings.home.mkdir(parents=True)
    url = settings.store_url
    if kind == "postgresql":
        url = request.getfixturevalue("databases").new(empty=True)
    engine = engine_of(url)
    with engine.begin() as tx:
        for migration in migrations.MIGRATIONS[:13]:
            migration(tx)
        for state in ("failed", "cancelled"):
            for number, reason in enumerate(REASONS):
                values = {"id": f"{state}-{number}", "state": state, "error": reason, "submitted_at": 0.0}
                source = '{"path": null, "format": "jsonl"}'
                add(tx, "job", **values, task="{}", num_rows=4, source=source)
        migrations.m014_causes(tx)
        query = "select error, failed_by from job where state = :state"
        assert dict(map(tuple, tx.execute(text(query), {"state": "failed"}))) == REASONS
        assert {cause for _, cause in tx.execute(text(query), {"state": "cancelled"})} == {None}
        for number, cause in enumerate(REASONS.values()):
            assert catalog.forgive(tx, f"failed-{number}", now=1.0) is (cause is not None)
    engine.dispose()


def test_migrations_that_were_released_are_not_edited() -> None:
    """Their tables are a matter of record: stores of all later versions went through them."""
    record = Path(__file__).with_name("tables_10.sql").read_text()
    with create_engine("sqlite://").begin() as tx:
        for migration in migrations.MIGRATIONS[:10]:
            migration(tx)
        made = tx.scalars(text("select sql from sqlite_master where sql is not null order by name")).all()
    assert [" ".join(statement.split()) for statement in made] == record.splitlines()


def test_a_table_that_is_there_is_not_made_again() -> None:
    """A migration that was repeated by hand, or by a copy of a database without its version, changes nothing."""
    engine = create_engine("sqlite://")
    with engine.begin() as tx:
        for _ in range(2):
            for migration in migrations.MIGRATIONS:
                migration(tx)
            store_id = migrations.store_id(tx)
            assert len(store_id) == 32
            assert tx.execute(text("select key from meta")).all() == [("store_id",)]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (None, (False, "default")),
        ("no JSON", (False, "default")),
        ("[]", (False, "default")),
        ('{"batch": "mine", "project": "search"}', (False, "default")),
        ('{"batch": "batch_%s"}' % ("0a" * 16), (True, "default")),
        ('{"batch": "batch_%s", "project": "search"}' % ("0a" * 16), (True, "search")),
    ],
)
def test_a_job_of_a_version_without_batches_gets_that_of_its_tags(
    tags: str | None, expected: tuple[bool, str]
) -> None:
    """An id is taken only if it is one that the Batch API gave out."""
    batch_id, project = migrations.batch_of_tags(tags)
    assert (batch_id == f"batch_{'0a' * 16}", project) == expected
    assert migrations.BATCH_ID.fullmatch(batch_id)


def test_jobs_without_a_batch_get_one_each(store: Store) -> None:
    """Also if two of them name the same one in their tags, as copies of a job may."""
    tags = {"batch": f"batch_{'0a' * 16}", "project": "search"}
    for number, named in enumerate((None, tags, tags)):
        add_job(store, f"job-{number}", tags=named, now=float(number))
    for _ in range(2):
        with store.write() as tx:
            migrations.add_missing_batches(tx)
    query = "select job_id, project, created_at from batch order by seq"
    assert select(store, query) == [
        ("job-0", "default", 0.0),
        ("job-1", "search", 1.0),
        ("job-2", "search", 2.0),
    ]
    ids = [batch_id for (batch_id,) in select(store, "select id from batch order by seq")]
    assert [batch_id == tags["batch"] for batch_id in ids] == [False, True, False]
    assert len(set(ids)) == 3


def test_ids_of_batches_cannot_be_guessed() -> None:
    made = {migrations.new_batch_id() for _ in range(100)}
    assert len(made) == 100
    assert all(migrations.BATCH_ID.fullmatch(each) for each in made)
