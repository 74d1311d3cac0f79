"""`conserve store move`: the database arrives whole, also after kills, and the old one is left alone."""

import asyncio
import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from conserve import owners
from conserve.config import Settings, load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.errors import SettingsError, StoreDamaged, StoreError, StoreInUse, StoreMoved
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.release import Release, waited
from conserve.store.books import catalog, hooks, keys, leases
from conserve.store.books.events import Event
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import FailedBy
from conserve.store.copying import filling, tables
from conserve.store.copying import move as moves
from conserve.store.copying.tables import TableDigest
from conserve.store.database import connection, guard, lineage, schema
from conserve.store.database.connection import address, engine_of, transaction
from conserve.store.database.moves import MoveMark, MoveState, said_by_guard
from conserve.store.database.store import Store
from tests.commands import Done, conserve
from tests.postgres import Databases
from tests.store_rows import add_job, claim, finish, leased, put_back, select
from tests.tiers import in_full


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'other.db'}"
    databases: Databases = request.getfixturevalue("databases")
    return databases.new(empty=True)


def fill(store: Store, rows: int = 300, done: int = 250) -> None:
    """Put a row into every place: waiting with saved tokens, journalled, in a shard, and never leased."""
    add_job(store, "one", rows=6)
    add_job(store, "two", rows=rows)
    first = leased(store, only=["one"], limit=4)
    finish(store, first, of=(0, 1), failed=(1,))
    put_back(store, first, 2, failed=True, suspect=True)
    put_back(store, first, 3)
    second = leased(store, only=["two"], limit=done)
    finish(store, second)
    with store.write() as tx:
        leases.end_if_empty(tx, {first.epoch, second.epoch})
        keys.add(
            tx, "night", project="search", now=1.5, live=True, batch=True, limit_rows=7, limit_tokens=None
        )
        hooks.add(tx, "https://example.org/it's", events=tuple(Event), allow_private=False, now=2.0)
        tx.execute(
            text("update request set tokens = :tokens where position = 3"), {"tokens": b"\x00\xff\x01"}
        )


@pytest.fixture
def filled(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with rows in every place; those of two tables are more than one page."""
    monkeypatch.setattr(tables, "PAGE_ROWS", 200)
    fill(store)
    return store


def source_of(settings: Settings) -> str:
    return settings.store_url


def contents(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of a database, in one order."""
    with closing(Disposed(url)) as opened, transaction(opened.engine, read_only=True) as tx:
        return {
            table.name: sorted((tuple(row) for row in tables.every(tx, table)), key=repr)
            for table in tables.in_order()
        }


class Disposed:
    """An engine that can be closed."""

    def __init__(self, url: str) -> None:
        self.engine = engine_of(url)

    def close(self) -> None:
        self.engine.dispose()


def moved(source: str, target: str, *words: str) -> Done:
    done = conserve("store", "move", source, target, *words)
    assert "Traceback" not in done.stderr
    return done


def at(url: str, settings: Settings) -> Settings:
    return load({"home": settings.home, "store": url}, environ={})


def test_every_row_arrives_there_and_comes_back(filled: Store, settings: Settings, target: str) -> None:
    here = source_of(settings)
    with filled.write() as tx:
        catalog.refuse(tx, "one", "it cannot be read", FailedBy.DAMAGE, now=3.0)
    before = contents(here)
    assert all(before[name] for name in ("job", "request", "journal", "api_key", "hook", "meta"))
    done = moved(here, target, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["tables"]
    assert {name: table["rows"] for name, table in said.items()} == {
        name: len(rows) for name, rows in before.items()
    }
    assert contents(target) == before
    with closing(Store.open(at(target, settings))) as there:
        assert there.id == filled.id
        assert select(there, "select failed_by from job order by seq") == [("damage",), (None,)]
        add_job(there, "three")
    after = contents(target)
    back = moved(target, here)
    assert back.returncode == 0, back.stderr
    assert contents(here) == after
    with closing(Store.open(settings)) as again:
        assert (again.id, len(select(again, "select id from job"))) == (filled.id, 3)
    assert conserve("status").returncode == 0


def test_the_old_place_refuses_every_command_with_the_address_of_the_new_one(
    filled: Store, settings: Settings, target: str, tmp_path: Path
) -> None:
    assert moved(source_of(settings), target).returncode == 0
    path = tmp_path / "more.jsonl"
    path.write_text('{"q": "a"}\n')
    for words in (
        ["status"],
        ["jobs"],
        ["sql", "select 1"],
        ["check"],
        ["check", "--repair"],
        ["submit", str(path), "--prompt", "{{ q }}"],
        ["run", "--endpoint", "fake:"],
        ["store", "size"],
    ):
        done = conserve(*words)
        assert (done.returncode, done.stdout) == (1, ""), words
        assert "this store was moved to" in done.stderr, (words, done.stderr)
        assert "set CONSERVE_STORE" in done.stderr
    from_a_file = f"{target}\n"
    assert moved(source_of(settings), from_a_file).returncode == 0, "it is there already"
    assert "was moved before" in moved(source_of(settings), target).stderr


def test_a_process_that_had_the_old_database_open_writes_nothing_into_it(
    filled: Store, settings: Settings, target: str
) -> None:
    before = contents(source_of(settings))
    assert moved(source_of(settings), target).returncode == 0
    for statement in (
        "insert into meta (key, value) values ('a', 'b')",
        "update job set priority = 1",
        "delete from journal",
        "update meta set value = value",
    ):
        with pytest.raises(StoreMoved, match="set CONSERVE_STORE"), filled.write() as tx:
            tx.execute(text(statement))
    with pytest.raises(StoreMoved):
        claim(filled)
    after = contents(source_of(settings))
    assert after == before


def test_a_harvester_that_follows_the_old_database_ends(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    """A harvester without a row is not waited for by the move, and would itself wait for rows for ever."""
    ends = moves.Ends.of(source_of(settings), f"sqlite:///{tmp_path / 'other.db'}")
    harvester = Harvester(store, FakeEndpoint(Script()), follow=True)

    def move_once_it_runs() -> None:
        moves.move(settings.home, ends, lambda *_: None, lambda tx: None)

    async def follow() -> None:
        working = asyncio.create_task(harvester.run(asyncio.Event()))
        await asyncio.to_thread(move_once_it_runs)
        await working

    with pytest.raises(StoreMoved, match="moved to"):
        asyncio.run(follow())
    ends.close()


def test_another_store_made_at_the_old_place_does_not_own_the_jobs(
    filled: Store, settings: Settings, tmp_path: Path
) -> None:
    place = filled.place
    assert moved(source_of(settings), f"sqlite:///{tmp_path / 'other.db'}").returncode == 0
    assert lineage.ids(settings.home, place) == []
    filled.close()
    for path in settings.home.glob("conserve.db*"):
        path.unlink()
    done = conserve("check")
    assert (done.returncode, "damaged" in done.stdout) == (0, False), done.stdout


def test_a_move_that_is_killed_as_it_forgets_the_old_place_forgets_it_when_it_is_run_again(
    small: Store, settings: Settings, ends: moves.Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(lineage, "forget", killed)
        with pytest.raises(Killed):
            moves.move(settings.home, ends, lambda *_: None, nobody)
    assert lineage.ids(settings.home, small.place) == [small.id]
    assert moves.move(settings.home, ends, lambda *_: None, nobody)
    assert lineage.ids(settings.home, small.place) == []
    lineage.note(settings.home, small.place, small.id)  # as an earlier version may have left it
    assert moves.move(settings.home, ends, lambda *_: None, nobody) == {}
    assert lineage.ids(settings.home, small.place) == []


def test_a_move_in_another_home_forgets_the_old_place_in_the_home_that_has_the_file(
    small: Store, tmp_path: Path, settings: Settings, ends: moves.Ends
) -> None:
    moves.move(tmp_path / "another", ends, lambda *_: None, nobody)
    assert lineage.ids(settings.home, small.place) == []


def test_epochs_go_on_where_they_were(filled: Store, settings: Settings, target: str) -> None:
    """No lease is left whose number shows the last epoch."""
    last = leased(filled, only=["two"], limit=1)
    finish(filled, last)
    assert select(filled, "select * from lease") == []
    assert moved(source_of(settings), target).returncode == 0
    with closing(Store.open(at(target, settings))) as there:
        first = leased(there, only=["two"], limit=1)
        assert first.epoch == last.epoch + 1
        finish(there, first)
        add_job(there, "three")
    assert moved(target, source_of(settings)).returncode == 0
    with closing(Store.open(settings)) as back:
        assert leased(back, only=["two"], limit=1).epoch == last.epoch + 2


class Killed(BaseException):
    """Stands for a kill: no code of the program catches it."""


def killing(engines: list[Engine], number: int, *, after: bool) -> Callable[[], bool]:
    """Raise `Killed` before or after the commit of this number; returns if it came to that."""
    seen = [0]
    name = "commit"

    def strike(connection: Any) -> None:
        seen[0] += 1
        if seen[0] == number:
            if after:
                connection.connection.dbapi_connection.commit()
            raise Killed

    for engine in engines:
        event.listen(engine, name, strike)
    return lambda: seen[0] >= number


@pytest.mark.parametrize(
    "target", ["sqlite", pytest.param("postgresql", marks=pytest.mark.full)], indirect=True
)
@pytest.mark.parametrize("after", [True, *in_full(False)])
def test_a_move_that_is_killed_at_any_commit_goes_on(
    filled: Store, settings: Settings, target: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is never a moment at which both databases are stores, nor one from which the command does not go on."""
    monkeypatch.setattr(tables, "PAGE_ROWS", 90)
    here, there = source_of(settings), target
    before = contents(here)
    kills = 0
    while True:
        ends = moves.Ends.of(here, there)
        kills += 1
        killing([ends.source, ends.target], kills, after=after)
        try:
            found = moves.move(settings.home, ends, lambda *_: None, lambda tx: None)
        except Killed:
            assert not (is_store(here) and is_store(there))
            back = moves.Ends.of(there, here)
            left = contents(here)
            with pytest.raises((StoreMoved, SettingsError)):  # the ends exchanged by mistake
                moves.move(settings.home, back, lambda *_: None, lambda tx: None)
            back.close()
            assert contents(here) == left
            continue
        finally:
            ends.close()
        break
    assert contents(there) == before
    assert is_store(there)
    assert not is_store(here)
    assert kills > 8
    assert not found or found["journal"].rows == len(before["journal"])


def is_store(url: str) -> bool:
    """True if a command would open the database at this address as the store that is moved."""
    with closing(Disposed(url)) as opened, transaction(opened.engine, read_only=True) as tx:
        return guard.is_store(tx) and guard.mark_of(tx) is None and moves.rows_in(tx) > 0


def test_a_move_waits_for_no_harvester_unless_asked(
    store: Store, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store)
    held = leased(store, owner=owners.this_process())
    there = f"sqlite:///{tmp_path / 'other.db'}"
    done = moved(source_of(settings), there)
    assert done.returncode == 1
    assert "stop these harvesters and run this again, or add --wait" in done.stderr
    assert conserve("status").returncode == 0  # nothing has changed
    refused, require = threading.Event(), Release.require

    def noted(release: Release, tx: Any) -> None:
        try:
            require(release, tx)
        except StoreInUse:
            refused.set()
            raise

    monkeypatch.setattr(Release, "require", noted)
    harvester = threading.Thread(target=lambda: refused.wait() and finish(store, held))
    harvester.start()
    done = moved(source_of(settings), there, "--wait")
    harvester.join()
    assert done.returncode == 0, done.stderr
    assert "waiting: rows are with" in done.stderr


def test_leases_of_a_harvester_that_died_do_not_hold_a_move_up(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    add_job(store)
    leased(store, owner=dead_owner())
    there = f"sqlite:///{tmp_path / 'other.db'}"
    assert moved(source_of(settings), there).returncode == 0
    with closing(Store.open(at(there, settings))) as opened:
        assert select(opened, "select count(*) from request where epoch is null") == [(4,)]


def dead_owner() -> str:
    host, pid, started, nonce = owners.this_process().rsplit(":", 3)
    return f"{host}:{pid}:{float(started) - 9:.2f}:{nonce}"


def test_a_wait_ends_leases_of_silent_harvesters_of_other_machines(store: Store) -> None:
    add_job(store)
    leased(store, owner="elsewhere:1:2:3", lease_s=10.0)
    clock = [0.0]
    release = Release(lease_s=60.0, monotonic=lambda: clock[0])
    said: list[str] = []

    def attempt() -> int:
        with store.write() as tx:
            release.require(tx)
        return 7

    def sleep(seconds: float) -> None:
        clock[0] += 3.0
        assert clock[0] < 20.0

    assert waited(attempt, said.append, sleep=sleep) == 7
    assert said == ["waiting: rows are with elsewhere:1"]
    assert select(store, "select * from lease") == []


def test_what_a_target_holds_is_not_overwritten(
    filled: Store, settings: Settings, target: str, tmp_path: Path
) -> None:
    other = load({"home": tmp_path / "elsewhere", "store": target}, environ={})
    with closing(Store.open(other)) as there:
        add_job(there)
    done = moved(source_of(settings), target)
    assert (done.returncode, "holds another store" in done.stderr) == (2, True), done.stderr
    assert conserve("status").returncode == 0
    with closing(Store.open(other)) as there:
        assert select(there, "select id from job") == [("job-1",)]


def test_a_target_that_becomes_a_store_while_the_source_is_frozen_is_not_emptied(
    small: Store, settings: Settings, ends: moves.Ends, tmp_path: Path
) -> None:
    """The source takes changes again."""
    url = ends.target.url.render_as_string(hide_password=False)
    other = load({"home": tmp_path / "elsewhere", "store": url}, environ={})

    def submitted(_: Connection) -> None:
        with closing(Store.open(other)) as there:
            add_job(there)

    with pytest.raises(SettingsError, match="holds another store"):
        moves.move(settings.home, ends, lambda *_: None, submitted)
    with closing(Store.open(other)) as there:
        assert select(there, "select id from job") == [("job-1",)]
    assert (mark_at(ends.source), guards(ends.source)) == (None, 0)


def test_what_another_process_has_moved_there_meanwhile_is_not_emptied(
    small: Store, settings: Settings, ends: moves.Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = filling.begin

    def late(*given: Any) -> None:
        monkeypatch.setattr(filling, "begin", begin)
        go(settings, ends)
        begin(*given)

    monkeypatch.setattr(filling, "begin", late)
    with pytest.raises(StoreMoved, match="was moved to"):
        go(settings, ends)
    with transaction(ends.target, read_only=True) as tx:
        assert moves.rows_in(tx) > 0
    assert mark_at(ends.target) is None


def test_a_store_without_rows_is_an_empty_target(filled: Store, settings: Settings, target: str) -> None:
    with closing(Store.open(at(target, settings))):
        pass
    assert moved(source_of(settings), target).returncode == 0
    with closing(Store.open(at(target, settings))) as there:
        assert there.id == filled.id


def test_tables_of_other_programs_are_left_alone(filled: Store, settings: Settings, target: str) -> None:
    with closing(Disposed(target)) as opened, transaction(opened.engine) as tx:
        tx.execute(text("create table message (id integer)"))
    done = moved(source_of(settings), target)
    assert (done.returncode, "tables of others" in done.stderr) == (2, True), done.stderr


def test_a_copy_that_still_takes_changes_is_not_overwritten(
    filled: Store, settings: Settings, tmp_path: Path
) -> None:
    there = f"sqlite:///{tmp_path / 'other.db'}"
    assert moved(source_of(settings), there).returncode == 0
    with closing(Disposed(source_of(settings))) as opened, transaction(opened.engine) as tx, guard.lifted(tx):
        guard.put_mark(tx, None)  # as if the file came from a backup
    done = moved(there, source_of(settings))
    assert (done.returncode, "a copy of this store that takes changes" in done.stderr) == (2, True), (
        done.stderr
    )


def test_a_move_to_itself_or_from_nowhere_is_refused(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    assert "are one database" in moved(source_of(settings), source_of(settings)).stderr
    done = moved(f"sqlite:///{tmp_path / 'none.db'}", source_of(settings))
    assert (done.returncode, "there is no store at" in done.stderr) == (2, True)
    done = moved("nonsense", source_of(settings))
    assert done.returncode == 2, done.stderr


def test_a_difference_is_noticed_and_the_move_can_be_cancelled(
    filled: Store, settings: Settings, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = source_of(settings)
    before = contents(here)
    with monkeypatch.context() as patch:
        patch.setattr("conserve.store.copying.filling.counters.carry", spoil)
        done = moved(here, target)
    assert (done.returncode, "the copy of the table job has other rows" in done.stderr) == (1, True), (
        done.stderr
    )
    assert "is being moved to" in conserve("status").stderr
    there = conserve("jobs", CONSERVE_STORE=target)
    assert (there.returncode, "is being filled from" in there.stderr) == (1, True), there.stderr
    done = moved(here, target, "--cancel")
    assert (done.returncode, "was cancelled" in done.stderr) == (0, True), done.stderr
    assert contents(here) == before
    assert conserve("jobs").returncode == 0
    assert "no move" in moved(here, target, "--cancel").stderr
    assert moved(here, target).returncode == 0
    done = moved(here, target, "--cancel")
    assert (done.returncode, "was moved to" in done.stderr) == (1, True)


def spoil(source: Any, tx: Any) -> None:
    tx.execute(text("update job set priority = 9 where id = 'one'"))


def test_a_frozen_store_says_by_which_command_the_move_goes_on(
    filled: Store, settings: Settings, tmp_path: Path
) -> None:
    ends = moves.Ends.of(source_of(settings), f"sqlite:///{tmp_path / 'other.db'}")
    moves.freeze(ends, lambda tx: None)
    ends.close()
    done = moved(source_of(settings), f"sqlite:///{tmp_path / 'third.db'}")
    assert (done.returncode, "run the same conserve store move again" in done.stderr) == (1, True)
    assert moved(source_of(settings), f"sqlite:///{tmp_path / 'other.db'}").returncode == 0


def test_every_table_of_the_schema_is_carried() -> None:
    assert {table.name for table in tables.in_order()} == set(schema.metadata.tables)


def test_a_lease_that_comes_between_holds_the_move_up(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    """The leases are looked at in the transaction that freezes the store."""
    add_job(store)
    ends = moves.Ends.of(source_of(settings), f"sqlite:///{tmp_path / 'other.db'}")
    leased(store, owner=owners.this_process())
    with pytest.raises(StoreInUse):
        moves.move(settings.home, ends, lambda *_: None, Release(lease_s=60.0).require)
    ends.close()
    assert read_jobs(settings, now=0.0)[0].running == 4


# Parts of a move


@pytest.fixture
def small(store: Store) -> Store:
    fill(store, rows=30, done=25)
    return store


@pytest.fixture
def ends(small: Store, settings: Settings, target: str) -> Iterator[moves.Ends]:
    found = moves.Ends.of(source_of(settings), target)
    yield found
    found.close()


@pytest.fixture
def to_sqlite(small: Store, settings: Settings, tmp_path: Path) -> Iterator[moves.Ends]:
    found = moves.Ends.of(source_of(settings), f"sqlite:///{tmp_path / 'other.db'}")
    yield found
    found.close()


def nobody(tx: Connection) -> None:
    """No harvester holds a lease."""


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def go(settings: Settings, ends: moves.Ends) -> dict[str, TableDigest]:
    return moves.move(settings.home, ends, lambda *_: None, nobody)


def mark_at(engine: Engine) -> MoveMark | None:
    with transaction(engine, read_only=True) as tx:
        return guard.mark_of(tx)


def guards(engine: Engine) -> int:
    """Number of triggers and functions by which a database refuses changes."""
    sqlite = "select count(*) from sqlite_master where type = 'trigger'"
    postgresql = (
        "select (select count(*) from pg_trigger where not tgisinternal) + "
        "(select count(*) from pg_proc where proname = 'conserve_moved')"
    )
    with transaction(engine, read_only=True) as tx:
        return int(tx.scalar(text(sqlite if engine.dialect.name == "sqlite" else postgresql)) or 0)


def test_a_move_tells_its_pages_and_leaves_a_mark_with_its_address(
    small: Store, settings: Settings, ends: moves.Ends
) -> None:
    told: Counter[str] = Counter()

    def tell(name: str, rows: int) -> None:
        told[name] += rows

    found = moves.move(settings.home, ends, tell, nobody)
    assert dict(told) == {name: digest.rows for name, digest in found.items() if digest.rows}
    assert found.keys() == set(schema.metadata.tables)
    mark = mark_at(ends.source)
    assert mark is not None
    assert (mark.state, mark.other, mark.store_id) == (MoveState.LEFT, address(ends.target), small.id)
    assert mark.sentence.startswith(f"this store was moved to {address(ends.target)}; ")
    assert mark_at(ends.target) is None
    assert (guards(ends.source) > 0, guards(ends.target)) == (True, 0)
    assert lineage.ids(settings.home, small.place) == []
    assert lineage.ids(settings.home, lineage.place(settings.home, ends.target)) == [small.id]
    assert go(settings, ends) == {}


def test_a_frozen_database_refuses_every_change_until_the_move_is_cancelled(
    small: Store, settings: Settings, tmp_path: Path, target: str
) -> None:
    """On both databases, which take turns as the source."""
    first = moves.Ends.of(source_of(settings), target)
    go(settings, first)
    ends = moves.Ends(source=first.target, target=engine_of(f"sqlite:///{tmp_path / 'third.db'}"))
    moves.freeze(ends, nobody)
    verbs = ["insert into meta values ('a', 'b')", "update meta set value = ''", "delete from hook"]
    if ends.source.dialect.name == "postgresql":
        verbs.append("truncate hook")
    for statement in verbs:
        with pytest.raises(StoreMoved, match=r"is being moved to .*third"), transaction(ends.source) as tx:
            tx.execute(text(statement))
    assert guards(ends.source) >= len(schema.metadata.tables)
    with transaction(ends.source, read_only=True) as tx:
        mark = guard.mark_of(tx)
        assert mark is not None
        assert guard.said(tx) == mark.sentence
    moves.cancel(ends)
    assert guards(ends.source) == 0
    assert mark_at(ends.source) is None
    with transaction(ends.source) as tx:
        for statement in verbs[:1]:
            tx.execute(text(statement))
    for each in (first, ends):
        each.close()


def test_a_move_that_was_begun_goes_on_where_it_was(
    small: Store, settings: Settings, ends: moves.Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have arrived are not copied again."""
    monkeypatch.setattr(tables, "PAGE_ROWS", 9)
    told: list[str] = []

    def break_off(name: str, rows: int) -> None:
        told.append(f"{name} {rows}")
        if name == "journal":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moves.move(settings.home, ends, break_off, nobody)
    begun = mark_at(ends.target)
    assert begun is not None
    assert (begun.state, begun.other, begun.store_id) == (MoveState.ARRIVING, address(ends.source), small.id)
    assert begun.after["journal"] == ["two", 9 - 2 - 1]
    frozen = mark_at(ends.source)
    assert frozen is not None
    assert (frozen.id, frozen.state) == (begun.id, MoveState.LEAVING)
    found = moves.move(settings.home, ends, lambda name, rows: told.append(f"{name} {rows}"), nobody)
    assert sum(int(each.split()[1]) for each in told) == sum(digest.rows for digest in found.values())
    assert told.count("job 2") == told.count("journal 9") - 2 == 1


def test_a_move_goes_on_only_to_the_database_that_it_began_with(
    small: Store, settings: Settings, to_sqlite: moves.Ends, tmp_path: Path
) -> None:
    moves.freeze(to_sqlite, nobody)
    third = moves.Ends.of(source_of(settings), f"sqlite:///{tmp_path / 'third.db'}")
    for attempt in (lambda: go(settings, third), lambda: moves.cancel(third)):
        with pytest.raises(StoreMoved, match=r"is being moved to .*other\.db"):
            attempt()
    assert guards(third.source) > 0
    third.close()


def test_a_store_that_is_just_leaving_is_no_target(
    small: Store, settings: Settings, to_sqlite: moves.Ends, tmp_path: Path
) -> None:
    """It may be the only whole copy."""
    moves.freeze(to_sqlite, nobody)
    third = load({"home": settings.home, "store": f"sqlite:///{tmp_path / 'third.db'}"}, environ={})
    Store.open(third).close()
    ends = moves.Ends.of(third.store_url, source_of(settings))
    with pytest.raises(StoreMoved, match="is being moved to"):
        go(settings, ends)
    ends.close()


def test_a_place_that_the_store_left_takes_it_again_also_from_a_third_one(
    small: Store, settings: Settings, to_sqlite: moves.Ends, tmp_path: Path
) -> None:
    before = contents(source_of(settings))
    go(settings, to_sqlite)
    for source, goal in (
        (to_sqlite.target.url, f"sqlite:///{tmp_path / 'third.db'}"),
        (None, source_of(settings)),
    ):
        where = str(source or f"sqlite:///{tmp_path / 'third.db'}")
        step = moves.Ends.of(where, goal)
        assert go(settings, step)
        step.close()
    assert contents(source_of(settings)) == before
    assert mark_at(small.engine) is None


def test_a_place_that_another_store_left_is_no_target(
    small: Store, settings: Settings, to_sqlite: moves.Ends, tmp_path: Path
) -> None:
    go(settings, to_sqlite)
    other = load({"home": tmp_path / "elsewhere"}, environ={})
    with closing(Store.open(other)) as there:
        add_job(there)
    ends = moves.Ends.of(other.store_url, source_of(settings))
    with pytest.raises(SettingsError, match="holds another store"):
        go(settings, ends)
    ends.close()


def test_a_move_that_is_cancelled_meanwhile_ends(
    small: Store, settings: Settings, to_sqlite: moves.Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it copies, and after it has compared."""

    def cancel(*_: object) -> None:
        moves.cancel(to_sqlite)

    with pytest.raises(StoreError, match="was cancelled meanwhile"):
        moves.move(settings.home, to_sqlite, cancel, nobody)
    assert mark_at(to_sqlite.source) is None
    with closing(Store.open(settings)) as store:
        add_job(store, "three")

    def changed(source: Connection, tx: Connection) -> dict[str, TableDigest]:
        guard.put_mark(tx, None)
        return {}

    monkeypatch.setattr(filling, "end", changed)
    real = moves.mark_on
    looks = iter([real(to_sqlite.source)])
    monkeypatch.setattr(moves, "mark_on", lambda engine: next(looks, None))
    with pytest.raises(StoreError, match="was changed by another process; run this again"):
        go(settings, to_sqlite)


def test_a_source_that_is_marked_anew_meanwhile_is_not_left(
    small: Store, settings: Settings, to_sqlite: moves.Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = filling.end

    def compared(source: Connection, tx: Connection) -> dict[str, TableDigest]:
        found = real(source, tx)
        source.rollback()
        return found

    def end(source: Connection, tx: Connection) -> dict[str, TableDigest]:
        found = compared(source, tx)
        with transaction(to_sqlite.source) as other, guard.lifted(other):
            guard.put_mark(other, None)
        return found

    monkeypatch.setattr(filling, "end", end)
    with pytest.raises(StoreError, match="the move was cancelled meanwhile"):
        go(settings, to_sqlite)
    assert mark_at(to_sqlite.source) is None
    assert guards(to_sqlite.source) == 0


def test_rows_that_are_missing_are_counted(
    small: Store, settings: Settings, ends: moves.Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(source: Connection, tx: Connection) -> None:
        tx.execute(text("delete from journal where position > 9"))

    monkeypatch.setattr("conserve.store.copying.filling.counters.carry", lose)
    with pytest.raises(StoreDamaged, match="journal has 12 rows instead of 27; nothing was lost"):
        go(settings, ends)
    assert mark_at(ends.target) is not None, "it is no store yet"


def test_what_another_move_fills_is_not_emptied(ends: moves.Ends) -> None:
    mark = MoveMark(id="this", state=MoveState.ARRIVING, other="x", store_id="y")
    filling.begin(ends.target, mark)
    filling.discard(ends.target, "another")
    assert mark_at(ends.target) == mark
    filling.discard(ends.target, "this")
    with transaction(ends.target, read_only=True) as tx:
        assert guard.tables(tx) == []


def test_what_a_move_has_filled_and_handed_over_is_not_emptied(ends: moves.Ends) -> None:
    filling.begin(ends.target, MoveMark(id="this", state=MoveState.ARRIVING, other="x", store_id="y"))
    over = MoveMark(id="this", state=MoveState.LEFT, other="x", store_id="y")
    with transaction(ends.target) as tx:
        guard.put_mark(tx, over)
    filling.discard(ends.target, "this")
    assert mark_at(ends.target) == over
    with transaction(ends.target, read_only=True) as tx:
        assert len(guard.tables(tx)) > 10


def test_another_move_begins_with_empty_tables(ends: moves.Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same move goes on; one with another name, or after the target was a store, starts anew."""

    monkeypatch.setattr(tables, "PAGE_ROWS", 20)

    def begin(name: str) -> dict[str, int]:
        mark = MoveMark(id=name, state=MoveState.ARRIVING, other="x", store_id="y")
        filling.begin(ends.target, mark)
        with transaction(ends.source, read_only=True) as source:
            pages = [filling.add_page(source, ends.target, table) for table in tables.in_order()]
        return dict(zip([table.name for table in tables.in_order()], pages, strict=True))

    assert begin("one")["journal"] == 20
    assert begin("one")["journal"] == 7
    assert begin("two")["journal"] == 20
    with transaction(ends.target) as tx:
        guard.put_mark(tx, MoveMark(id="two", state=MoveState.LEFT, other="x", store_id="y"))
        guard.add(tx, "moved")
    assert begin("two")["journal"] == 20
    assert guards(ends.target) == 0


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"state": "left"}', '{"state": "nowhere", "id": "x"}'])
def test_a_mark_that_is_damaged_is_told_and_the_triggers_say_if_the_move_may_be_cancelled(
    small: Store, settings: Settings, to_sqlite: moves.Ends, damaged: str
) -> None:
    def damage(sentence: str | None) -> None:
        with transaction(to_sqlite.source) as tx:
            guard.drop(tx)
            tx.execute(text("delete from meta where key = 'move'"))
            tx.execute(text("insert into meta values ('move', :value)"), {"value": damaged})
            if sentence is not None:
                guard.add(tx, sentence)

    other = address(to_sqlite.target)
    mark = MoveMark(id="x", state=MoveState.LEAVING, other=other, store_id=small.id)
    left = dataclasses.replace(mark, state=MoveState.LEFT).sentence
    elsewhere = dataclasses.replace(mark, other=f"{other}it's").sentence
    for sentence, said in ((None, "is no whole store"), (left, "was moved to"), (elsewhere, "it's")):
        damage(sentence)
        for attempt in (lambda: Store.open(settings), lambda: go(settings, to_sqlite)):
            with pytest.raises(StoreMoved, match=r"damaged; to go on .*store move SOURCE TARGET --cancel"):
                attempt()
        with pytest.raises(StoreMoved, match=said):
            moves.cancel(to_sqlite)

    damage(mark.sentence)
    assert moves.cancel(to_sqlite) is None
    assert guards(to_sqlite.source) == 0
    Store.open(settings).close()


def test_a_move_whose_target_is_gone_can_be_cancelled(
    small: Store, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    there = f"sqlite:///{tmp_path / 'there' / 'new.db'}"
    with closing(moves.Ends.of(source_of(settings), there)) as ends, pytest.raises(KeyboardInterrupt):
        moves.move(settings.home, ends, interrupt, nobody)
    (tmp_path / "there").rename(tmp_path / "away")
    done = moved(source_of(settings), there, "--cancel")
    assert done.returncode == 0, done.stderr
    assert "what was copied stays there, and is no store: the store sqlite:///" in done.stderr
    assert "was cancelled" in done.stderr
    with closing(Store.open(settings)) as again:
        add_job(again, "three")
    (tmp_path / "away").rename(tmp_path / "there")
    assert not is_store(there)
    assert moved(source_of(settings), there).returncode == 0


def test_only_the_refusal_of_a_guard_is_taken_for_one() -> None:
    left = MoveMark(id="x", state=MoveState.LEFT, other="postgresql://db/it's", store_id="y")
    for state in (MoveState.LEFT, MoveState.LEAVING):
        sentence = dataclasses.replace(left, state=state).sentence
        assert said_by_guard(f"ERROR: {sentence}\nCONTEXT: a function") == sentence
    assert said_by_guard(dataclasses.replace(left, state=MoveState.ARRIVING).sentence) is None
    assert said_by_guard("disk I/O error") is None


def test_holders_of_rows_are_named_by_machine_and_process() -> None:
    assert moves.named({"b:2:x:y"}) == "b:2"
    assert moves.named({"c:3:x:y", "a:1:x:y", "b:2:x:y"}) == "a:1, b:2, c:3"
    assert moves.named({f"{name}:1:x:y" for name in "edcba"}) == "a:1, b:1, c:1 and 2 others"


def test_a_look_at_both_databases_waits_for_no_writer(
    small: Store, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.0)
    target = at(f"sqlite:///{tmp_path / 'other.db'}", settings)
    with (
        closing(Store.open(target)) as there,
        closing(moves.Ends.of(settings.store_url, target.store_url)) as ends,
        small.write(),
        there.write(),
    ):
        moves.require_store(ends.source)
        assert moves.mark_on(ends.source) is None
        moves.require_place(ends)
        with pytest.raises(StoreError, match="locked"):
            moves.freeze(ends, nobody)


@pytest.fixture
def from_postgresql(databases: Databases, tmp_path: Path) -> Iterator[tuple[Store, moves.Ends]]:
    """A store on PostgreSQL, and an empty SQLite database."""
    where = load({"home": tmp_path / "home", "store": databases.new()}, environ={})
    with (
        closing(Store.open(where)) as store,
        closing(moves.Ends.of(where.store_url, f"sqlite:///{tmp_path / 'other.db'}")) as found,
    ):
        add_job(store)
        yield store, found


def test_a_move_waits_for_transactions_that_write(
    from_postgresql: tuple[Store, moves.Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ends = from_postgresql
    real = moves.lock
    with store.write() as writer:
        writer.execute(text("update job set priority = 7"))
        tries: list[Connection] = []

        def lock(tx: Connection) -> None:
            tries.append(tx)
            if len(tries) == 3:
                writer.commit()
            real(tx)

        monkeypatch.setattr(moves, "lock", lock)
        assert go(load({"home": store.home}, environ={}), ends)
    assert len(tries) == 3
    with transaction(ends.target, read_only=True) as tx:
        assert tx.scalar(text("select priority from job")) == 7


def test_a_move_that_writers_never_let_in_ends(
    from_postgresql: tuple[Store, moves.Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ends = from_postgresql
    monkeypatch.setattr(moves, "LOCK_TRIES", 2)
    with store.write() as writer:
        writer.execute(text("update job set priority = 7"))
        with pytest.raises(StoreInUse, match="other processes write all the time"):
            go(load({"home": store.home}, environ={}), ends)
    assert (mark_at(ends.source), guards(ends.source)) == (None, 0)


def test_a_lock_that_is_not_to_be_had_is_known_in_any_language(
    settings: Settings, ends: moves.Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Exception("Zeitüberschreitung einer Sperre")
    held.sqlstate = "55P03"  # type: ignore[attr-defined]
    tries = iter([held, held, None])

    def lock(tx: Connection) -> None:
        if (error := next(tries)) is not None:
            raise OperationalError("lock table", {}, error)

    monkeypatch.setattr(moves, "lock", lock)
    assert go(settings, ends)
    assert next(tries, "none") == "none"


def test_a_refusal_to_freeze_is_told_at_once(settings: Settings, ends: moves.Ends) -> None:
    asked: list[Connection] = []

    def ask(tx: Connection) -> None:
        asked.append(tx)
        raise StoreInUse("rows are with ann")

    with pytest.raises(StoreInUse, match="rows are with ann"):
        moves.move(settings.home, ends, lambda *_: None, ask)
    assert len(asked) == 1
    assert (mark_at(ends.source), guards(ends.source)) == (None, 0)


# Pages and digests


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("size", [1, 7, 400])
def test_pages_hold_every_row_once_in_the_order_of_its_key(
    store: Store, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PAGE_ROWS", size)
    for name in ("a", "B", "ä"):
        add_job(store, name, rows=4)
        finish(store, leased(store, only=[name], limit=4))
    with store.read() as tx:
        for table in tables.in_order():
            after, pages = None, []
            while rows := tables.page(tx, table, after):
                assert len(rows) <= size
                pages += rows
                after = tables.key_of(table, rows[-1])
            assert sorted(pages, key=repr) == sorted(tables.every(tx, table), key=repr), table.name
            assert len({tuple(tables.key_of(table, row)) for row in pages}) == len(pages)


def test_a_page_ends_with_the_row_that_makes_it_large(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that long answers do not fill the memory; at least one row goes across whatever its size."""
    add_job(store, rows=4)
    finish(store, leased(store), text="x" * 1000)
    with store.read() as tx:
        first, *_ = tables.page(tx, schema.journal, None)
        one = sum(len(value) for value in first if isinstance(value, (bytes, str)))
        for bound, rows in ((1, 1), (one, 1), (one + 1, 2), (2 * one, 2), (10 * one, 4)):
            monkeypatch.setattr(tables, "PAGE_BYTES", bound)
            assert len(tables.page(tx, schema.journal, None)) == rows


def test_a_digest_depends_on_each_value_and_on_no_order(store: Store) -> None:
    def digest() -> TableDigest:
        with store.read() as tx:
            return tables.digest(tx, schema.message)

    def put(seq: int, body: str) -> None:
        values = {"seq": seq, "id": f"m{seq}", "hook_id": "h", "event": "e", "body": body, "created_at": 0.0,
                  "state": "s", "attempts": 0, "next_at": 0.0}  # fmt: skip
        with store.write() as tx:
            tx.execute(insert(schema.message).values(**values))

    empty = digest()
    assert empty == TableDigest(0, "0" * 32)
    for seq in (1, 2, 3):
        put(seq, f"body {seq}")
    three = digest()
    assert (three.rows, len(three.digest), set(three.digest) <= set("0123456789abcdef")) == (3, 32, True)
    with store.write() as tx:
        tx.execute(text("delete from message where seq = 1"))
    two = digest()
    assert two != three
    put(1, "body 1")
    assert digest() == three
    with store.write() as tx:
        tx.execute(text("update message set body = 'body 2 ' where seq = 2"))
    assert (digest().rows, digest() != three) == (3, True)


def test_the_mark_of_a_move_is_no_row_of_the_store(store: Store) -> None:
    with store.read() as tx:
        before = tables.digests(tx)["meta"]
    with store.write() as tx:
        guard.put_mark(tx, MoveMark(id="x", state=MoveState.LEAVING, other="x", store_id="y"))
    with store.read() as tx:
        assert tables.digests(tx)["meta"] == before
        assert [row.key for row in tables.page(tx, schema.meta, None)] == ["store_id", "version"]
