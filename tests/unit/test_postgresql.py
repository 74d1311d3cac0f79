"""PostgreSQL alone: transactions that see one moment, locks of rows, calls that wake harvesters."""

import asyncio
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from select import select as select_files
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    event,
    null,
    text,
    update,
)
from sqlalchemy import select as query
from sqlalchemy.exc import OperationalError

from conserve.api import runs
from conserve.config import Settings, load
from conserve.endpoints.fake import FakeEndpoint
from conserve.errors import StoreError, StoreMoved
from conserve.jobs.harvest import harvester
from conserve.jobs.harvest.notes import ServerNotes
from conserve.jobs.harvest.recorder import Recorder
from conserve.jobs.harvest.write_behind import Outcomes
from conserve.jobs.hooks.courier import Courier
from conserve.jobs.task import Kind, Task
from conserve.store.books import (
    batches,
    catalog,
    choice,
    harvested,
    hooks,
    journal,
    keys,
    leases,
    outbox,
    queue,
    saved_tokens,
    servers,
    shards,
    spans,
    uploads,
)
from conserve.store.books.events import Event
from conserve.store.books.journal import Committed, Finished
from conserve.store.books.leases import Lease, Terms
from conserve.store.books.new_results import NewResults
from conserve.store.books.readings import read_jobs
from conserve.store.books.results import encode
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.books.servers import Sighting
from conserve.store.books.slots import HarvestedQuarter
from conserve.store.books.states import FailedBy, JobState
from conserve.store.database import bulk, schema, trial
from conserve.store.database.connection import engine_of
from conserve.store.database.moves import MoveState
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from conserve.store.database.wakeup import CHANNEL, Listener
from conserve.store.files import layout
from conserve.store.sql.query import views
from conserve.store.upkeep.mending import mend_rows
from conserve.store.upkeep.removal import remove
from conserve.store.upkeep.sweep import sweep
from tests.commands import HANGS_S, conserve, until
from tests.conftest import WriteInput
from tests.ledgers import ledger_of
from tests.postgres import Databases
from tests.receiver import receiving
from tests.store_rows import (
    add_job,
    add_mark,
    claim_in,
    finish,
    job,
    leased,
    live,
    positions,
    put_back,
    result,
    select,
)
from tests.submitting import submit
from tools.deploy.chart import CHART

ROWS = 100


@pytest.fixture
def postgres(tmp_path: Path, databases: Databases) -> Settings:
    """An empty store."""
    return load({"home": tmp_path / "home", "store": databases.emptied()}, environ={})


@pytest.fixture
def store(postgres: Settings) -> Iterator[Store]:
    opened = Store.open(postgres)
    yield opened
    opened.close()


def submitted(store: Store, path: Path) -> str:
    """Id of a job of one prompt a row."""
    return submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}")).job_id


def finished_job(store: Store) -> None:
    add_job(store, rows=ROWS)
    finish(store, leased(store, limit=ROWS))


def test_a_read_sees_every_row_once_while_a_compaction_commits(store: Store, postgres: Settings) -> None:
    """Between the two statements of a read all rows move from the journal to a shard."""
    finished_job(store)
    with store.read() as tx:
        before = shards.files(tx)
        assert shards.compact(store, "job-1", now=0.0) == ROWS
        assert shards.files(tx) == before == []
        assert tx.scalar(text("select count(*) from journal")) == ROWS
        assert tx.scalar(text("show transaction_isolation")) == "repeatable read"
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select count(*) from results").fetchall() == [(ROWS,)]
    (reading,) = read_jobs(postgres, now=0.0)
    assert reading.done == ROWS


@pytest.mark.parametrize(("default", "kept"), [("off", "on"), ("remote_write", "remote_write")])
def test_a_commit_is_durable_whatever_the_servers_default_is(
    postgres: Settings, databases: Databases, default: str, kept: str
) -> None:
    assert postgres.store
    with closing(Store.open(postgres)) as store, store.write() as tx:
        name = tx.execute(text("select current_database()")).scalar_one()
        tx.execute(text(f'alter database "{name}" set synchronous_commit = {default}'))
    databases.end_kept()
    try:
        with closing(Store.open(postgres)) as store, store.read() as tx:
            assert tx.execute(text("show synchronous_commit")).scalar_one() == kept
    finally:
        with closing(Store.open(postgres)) as store, store.write() as tx:
            tx.execute(text(f'alter database "{name}" reset synchronous_commit'))
        databases.end_kept()


def test_a_connection_that_the_server_ended_is_replaced(store: Store) -> None:
    """A server that was started anew, or a network that dropped an idle connection, fails no command."""
    with store.read() as tx:
        (pid,) = tx.execute(text("select pg_backend_pid()")).one()
    with closing(Store.over(store.home, engine_of(store.engine.url.render_as_string(False)))) as other:
        with other.write() as tx:
            tx.execute(text("select pg_terminate_backend(:pid)"), {"pid": pid})
        until(lambda: select(other, f"select 1 from pg_stat_activity where pid = {pid}") == [])
    assert select(store, "select count(*) from job") == [(0,)]


@pytest.mark.parametrize("state", [None, MoveState.LEFT])
def test_a_wait_for_a_job_has_one_connection_and_no_transaction_between_two_looks(
    store: Store, postgres: Settings, monkeypatch: pytest.MonkeyPatch, state: MoveState | None
) -> None:
    """A store that is moved meanwhile ends the wait."""
    add_job(store, rows=1)
    opened, closed, open_now = Mock(wraps=Store.open), Mock(), list[int]()
    close = Store.close
    monkeypatch.setattr(Store, "open", opened)
    monkeypatch.setattr(Store, "close", lambda kept: closed(close(kept)))
    monkeypatch.setattr(runs, "SHOW_S", 0.0)

    def clock() -> float:
        if len(open_now) == 2:
            add_mark(store, state)
        ours = "from pg_stat_activity where datname = current_database()"
        (idle,) = select(store, f"select count(*) {ours} and state like 'idle in transaction%'")
        open_now.append(*idle)
        return len(open_now)

    with pytest.raises(TimeoutError if state is None else StoreMoved):
        asyncio.run(runs.ended(postgres, "job-1", 3.0, clock=clock))
    assert open_now == [0, 0, 0, 0][: 4 if state is None else 3]
    assert (opened.call_count, closed.call_count) == (1, 1)
    add_mark(store, None)


def test_a_transaction_that_writes_sees_what_others_commit(store: Store) -> None:
    with store.write() as tx:
        assert tx.scalar(text("show transaction_isolation")) == "read committed"
        assert tx.scalar(text("show transaction_read_only")) == "off"


@pytest.mark.parametrize("works", [("compact a", "compact b"), ("sweep", "deliver job-1")])
def test_pieces_of_work_keep_each_other_out_by_name(store: Store, works: tuple[str, str]) -> None:
    one, other = works
    with store.alone(one) as mine, store.alone(one) as again, store.alone(other) as another:
        assert (mine, again, another) == (True, False, True)


def test_work_that_is_to_be_waited_for_begins_when_the_other_is_done(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that waits keeps no deleted row from being cleared either."""
    done: list[str] = []
    sleeps, freed = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        sleeps.set()
        assert freed.wait(HANGS_S)

    def work() -> None:
        with store.alone("sweep", wait=True) as alone:
            done.append(f"second {alone}")

    monkeypatch.setattr("conserve.store.database.store.time.sleep", sleep)
    thread = threading.Thread(target=work)
    with store.alone("sweep") as alone:
        assert alone
        thread.start()
        assert sleeps.wait(HANGS_S)
        with store.write() as tx:
            assert not tx.scalar(SNAPSHOTS)
        done.append("first")
    freed.set()
    thread.join(HANGS_S)
    assert done == ["first", "second True"]


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_drain_waits_for_rows_of_a_harvester_whose_clock_is_wrong(
    store: Store, postgres: Settings, ahead_s: float
) -> None:
    """Its notes are dated by the clock of the database's server, as the drain is."""

    async def in_store(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    seen = Sighting(
        url="http://gpu-a:8000", state="serving", model="m", version=None, alive=True, in_flight=3, waiting=0,
        tokens_per_s=0.0, why=None,
    )  # fmt: skip
    fleet = SimpleNamespace(sightings=lambda: [seen], drain=lambda urls: None)
    notes = ServerNotes(
        fleet, store, "ann", in_store, clock=lambda: time.time() + ahead_s, monotonic=lambda: 0.0
    )
    asyncio.run(notes.look())
    place = {"CONSERVE_HOME": str(postgres.home), "CONSERVE_STORE": str(postgres.store)}
    done = conserve("fleet", "drain", "gpu-a", "--wait", "--within-s", "1", **place)
    assert (done.returncode, "rows are still in flight" in done.stderr) == (1, True)


def test_files_expire_by_the_servers_clock_too(store: Store) -> None:
    """The clock of a machine that is an hour ahead ends none of them early."""
    now = time.time()
    new = uploads.NewFile(
        purpose="batch", filename="a", bytes=1, num_lines=1, digest="d", path="a", expires_at=now + 1800
    )
    with store.write() as tx:
        uploads.add(tx, "ann", "file-1", new, now=now)
    assert uploads.remove_expired(store, now=now + 3600) == 0
    with store.read() as tx:
        assert uploads.get(tx, "ann", "file-1", now=now + 3600) is not None
        assert uploads.page(tx, "ann", now=now + 3600, limit=9) != []


def test_the_servers_clock_is_read(store: Store) -> None:
    """The moment at which the statement runs, not that at which its transaction began."""
    with store.read() as tx:
        begun, first = tx.execute(
            text("select extract(epoch from now()), extract(epoch from clock_timestamp())")
        ).one()
        found = trial.server_time_s(tx)
        assert found is not None
        assert (
            float(begun)
            < float(first)
            <= found
            <= float(tx.scalar(text("select extract(epoch from clock_timestamp())")) or 0)
        )


def test_a_clock_that_is_ahead_expires_no_job_before_its_deadline(store: Store) -> None:
    """The database's clock has to be past the deadline too."""
    with store.read() as tx:
        server_s = trial.server_time_s(tx)
    assert server_s is not None
    for job_id, deadline in (("early", server_s + 3600.0), ("late", server_s)):
        add_job(store, job_id, deadline=deadline)
    for now, expired in ((server_s - 1.0, []), (server_s + 7200.0, ["late"])):
        with store.write() as tx:
            assert catalog.late(tx, now=now) == catalog.expire(tx, now=now) == expired
    assert job(store, "early").state is JobState.QUEUED


def test_a_clock_that_is_ahead_delivers_no_cancelled_job_before_its_rows_in_flight_have_ended(
    store: Store,
) -> None:
    with store.read() as tx:
        server_s = trial.server_time_s(tx)
    assert server_s is not None
    lease_ends = {"early": server_s + 3600.0, "late": server_s - 1.0}
    for job_id, ends in lease_ends.items():
        add_job(store, job_id)
        leased(store, now=ends, lease_s=0.0, only=[job_id])
        with store.write() as tx:
            batches.of_submitted(tx, job_id, now=server_s)
            catalog.move(tx, job_id, "cancel", now=server_s)
    asked = [batch_id for (batch_id,) in select(store, "select id from batch order by seq")]
    assert len(asked) == 2
    with store.read() as tx:
        assert batches.deliverable(tx, asked=asked, now=server_s - 2.0) == []
        assert batches.deliverable(tx, asked=asked, now=server_s + 7200.0) == asked[1:]


def test_a_read_may_not_write(store: Store) -> None:
    with pytest.raises(Exception, match="read-only"), store.read() as tx:
        tx.execute(text("delete from job"))


def test_looking_for_rows_to_claim_is_a_read(store: Store) -> None:
    add_job(store)
    with store.read() as tx:
        assert len(queue.runnable_jobs(tx, None, locked=False)) == 1


def test_a_sweep_and_a_registration_wait_for_each_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is swept before it is registered, or not at all: also where locks on files tell nothing."""
    finished_job(store)
    shards.compact(store, "job-1", now=0.0)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    (file,) = [store.home / file for (file,) in select(store, "select file from shard")]
    with store.write() as tx:
        tx.execute(text("delete from shard"))
    swept: list[int] = []
    with store.write() as tx:  # a registration under way
        catalog.lock_job(tx, "job-1")
        thread = threading.Thread(target=lambda: swept.append(sweep(store, now=4e9)))
        thread.start()
        until(lambda: swept != [] or tx.scalar(text("select count(*) from pg_locks where not granted")) > 0)
        assert swept == []
        tx.execute(
            text(
                "insert into shard (job_id, file, failed, num_rows, created_at) "
                "values ('job-1', :file, false, 100, 0)"
            ),
            {"file": str(file.relative_to(store.home))},
        )
    thread.join()
    assert swept == [0]
    assert file.is_file()


def test_an_orphan_is_swept(store: Store) -> None:
    finished_job(store)
    shards.compact(store, "job-1", now=0.0)
    left = layout.job_folder(store.home, "job-1") / layout.RESULTS / "left.parquet"
    left.write_bytes(b"")
    assert sweep(store, now=4e9) == 1
    assert not left.exists()


def test_a_retry_puts_failed_rows_back(store: Store) -> None:
    add_job(store, rows=4)
    finish(store, leased(store), failed=(1, 2))
    shards.compact(store, "job-1", now=0.0)
    assert shards.retry_failed(store, "job-1", now=0.0) == 2
    assert (job(store).succeeded, job(store).failed) == (2, 0)


def test_a_retry_leaves_rows_that_were_never_rendered(store: Store) -> None:
    add_job(store, rows=3)
    finish(store, leased(store), failed=(1, 2))
    requests = layout.requests_file(store.home, "job-1")
    requests.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.table({"row_index": range(3), "payload": ["a", None, "c"], "error": [None, "empty", None]})
    pq.write_table(rows, requests)
    shards.compact(store, "job-1", now=0.0)
    assert shards.retry_failed(store, "job-1", now=0.0) == 1
    assert select(store, "select position, failed from journal") == [(1, True)]
    assert (job(store).succeeded, job(store).failed) == (1, 1)


def test_deaths_of_an_engine_are_counted(store: Store) -> None:
    add_job(store, rows=1)
    for deaths, suspect in enumerate((False, True, True)):
        lease = leased(store, suspect=bool(deaths))
        assert lease.rows[0].deaths == max(0, deaths - 1)
        with store.write() as tx:
            queue.put_rows_back(
                tx,
                [queue.Returned(epoch=lease.epoch, job_id="job-1", position=0, failed=suspect, suspect=True)],
            )
    assert select(store, "select failures, deaths from request") == [(2, 2)]


def test_two_stores_in_one_home_have_ids_of_their_own(store: Store, postgres: Settings) -> None:
    other = Store.open(load({"home": postgres.home}, environ={}))
    assert store.id != other.id
    assert store.place != other.place
    other.close()


def test_two_couriers_send_each_message_once(store: Store) -> None:
    with receiving() as receiver:
        with store.write() as tx:
            hooks.add(tx, receiver.url, events=tuple(Event), allow_private=True, now=0.0)
        for number in range(20):
            add_job(store, f"job-{number}")
            with store.write() as tx:
                batches.of_submitted(tx, f"job-{number}", now=0.0)
        threads = [threading.Thread(target=Courier(store).finish, args=[60.0]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with store.read() as tx:
            sent = outbox.page(tx, limit=100)
    assert {message.state for message in sent} == {"delivered"}
    assert sorted(got.id for got in receiver.got) == sorted(message.id for message in sent)


def test_the_charts_migration_job_brings_the_tables_up_to_date(postgres: Settings) -> None:
    template = (CHART / "templates/migration.yaml").read_text()
    (words,) = re.findall(r"^ +args: \[(.*)\]$", template, re.MULTILINE)
    done = conserve(*words.split(", "), CONSERVE_HOME=str(postgres.home), CONSERVE_STORE=postgres.store)
    assert done.returncode == 0, done.stderr
    store = Store.open(postgres)
    assert select(store, "select value from meta where key = 'version'") == [(str(LATEST),)]
    store.close()


def open_at_once(settings: Settings, barrier: Any, ids: Any) -> None:
    barrier.wait()
    store = Store.open(settings)
    ids.put(store.id)
    store.close()


def test_processes_that_open_an_empty_database_at_once_migrate_it_once(
    databases: Databases, tmp_path: Path
) -> None:
    url = databases.new(empty=True)
    settings = load({"home": tmp_path / "home", "store": url}, environ={})
    fork = multiprocessing.get_context("fork")
    barrier, ids = fork.Barrier(4), fork.Queue()
    processes = [fork.Process(target=open_at_once, args=(settings, barrier, ids)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {ids.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(found) == 1
    store = Store.open(settings)
    assert {store.id} == found
    assert select(store, "select value from meta where key = 'version'") == [(str(LATEST),)]
    store.close()
    databases.drop(url)


Lock = Callable[[Connection], None]


def within_a_second(tx: Connection) -> None:
    """A wait for a lock is an error."""
    tx.execute(text("set local lock_timeout = '1s'"))


LOCKS: dict[str, tuple[Lock, Lock]] = {  # of one thing, and of another
    "key": (lambda tx: keys.lock(tx, "one"), lambda tx: keys.lock(tx, "other")),
    "job": (lambda tx: catalog.lock_job(tx, "one"), lambda tx: catalog.lock_job(tx, "other")),
    "jobs": (lambda tx: catalog.lock_jobs(tx, ["one"]), lambda tx: catalog.lock_jobs(tx, ["other"])),
    "ids": (catalog.lock_ids, lambda tx: catalog.lock_job(tx, "one")),
}


@pytest.mark.parametrize("of", LOCKS)
def test_a_lock_keeps_others_out_of_the_same_thing_alone(store: Store, of: str) -> None:
    with store.write() as tx:
        for name in ("one", "other"):
            keys.add(tx, name, project="p", now=0.0)
    for name in ("one", "other"):
        add_job(store, name)
    same, another = LOCKS[of]
    with store.write() as first:
        same(first)
        for lock, said in ((another, None), (same, "lock timeout")):
            refused = nullcontext() if said is None else pytest.raises(StoreError, match=said)
            with refused, store.write() as second:
                second.execute(text("set local lock_timeout = '20ms'"))
                lock(second)


def test_claims_of_two_jobs_do_not_wait_for_each_other(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name)
    with store.write() as first, store.write() as second:
        within_a_second(second)
        claim_in(first, owner="ann", now=0.0, lease_s=9.0, limit=2, only=["one"])
        lease = claim_in(second, owner="ben", now=0.0, lease_s=9.0, limit=2, only=["other"])
        assert positions(lease) == [0, 1]


@pytest.mark.parametrize(("came_back", "limit"), [(True, 8), (False, 8), (False, 2)])
def test_a_claim_that_finds_a_job_emptied_holds_no_lock_while_it_asks_for_another(
    store: Store, write_input: WriteInput, came_back: bool, limit: int
) -> None:
    """Commits take the jobs in the order of their ids, claims in that of their turns: the two would deadlock."""
    later, earlier = (submitted(store, write_input(f"{name}.parquet", q=["a", "b"])) for name in ("z", "a"))
    for job_id in [later, earlier] if came_back else [earlier]:
        put_back(store, (lease := leased(store, only=[job_id])), 0)
        put_back(store, lease, 1)
    claimed: list[str] = []
    with closing(ledger_of(store)) as ledger, store.write() as commit:
        catalog.lock_job(commit, earlier)
        thread = threading.Thread(
            target=lambda: claimed.extend(row.job_id for row in ledger.claim(limit, False, ""))
        )
        with store.write() as other:
            assert positions(claim_in(other, owner="ben", now=0.0, lease_s=9.0, limit=2, only=[later])) == [
                0,
                1,
            ]
            thread.start()
            until(lambda: waits_for_a_lock(other))
        until(lambda: waits_for_a_lock(commit))
        within_a_second(commit)
        catalog.lock_job(commit, later)
        assert claimed == []
    thread.join()
    assert claimed == [earlier, earlier]


@pytest.mark.parametrize("claimed", ["rows that came back", "the last rows", "chosen rows"])
def test_tokens_are_saved_while_another_harvester_claims_of_the_same_job(store: Store, claimed: str) -> None:
    add_job(store, rows=8)
    lease = leased(store, limit=4)
    if claimed == "rows that came back":
        put_back(store, lease, 3)
    with store.write() as first, store.write() as second:
        within_a_second(second)
        if claimed == "chosen rows":
            theirs: Lease | None = choice.choose(first, [("job-1", 5)], Terms("ben", 0.0, 9.0))[0]
        else:
            limit = 1 if claimed == "rows that came back" else 9
            theirs = claim_in(first, owner="ben", now=0.0, lease_s=9.0, limit=limit)
        saved_tokens.save_tokens(second, [SavedTokens(lease.epoch, "job-1", 0, b"1234", "model")])
    assert {"rows that came back": [3], "the last rows": [4, 5, 6, 7], "chosen rows": [5]}[
        claimed
    ] == positions(theirs)
    assert select(store, "select tokens from request where position = 0") == [(b"1234",)]


def test_a_claim_of_new_rows_takes_three_statements(store: Store) -> None:
    """It finds the job, looks for rows that came back, and takes the rows."""
    add_job(store, rows=40)
    said: list[str] = []

    def listen(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    event.listen(store.engine, "before_cursor_execute", listen)
    assert [positions(leased(store, limit=20)) for _ in range(2)] == [[*range(20)], [*range(20, 40)]]
    event.remove(store.engine, "before_cursor_execute", listen)
    assert len(said) == 6


def test_a_claim_waits_for_no_result_that_is_just_written(store: Store) -> None:
    """Up to the counters of the job, the last statement of a commit."""
    add_job(store, rows=8)
    lease = leased(store, limit=2)
    with store.write() as first, store.write() as second:
        within_a_second(second)
        spans.locked(first, [lease.epoch])
        first.execute(text("insert into journal values ('job-1', 0, false, '')"))
        assert positions(claim_in(second, owner="ben", now=0.0, lease_s=9.0, limit=2)) == [2, 3]


@pytest.mark.parametrize("ends", [False, True])
def test_the_last_statement_of_a_claim_may_bring_its_commit_along(store: Store, ends: bool) -> None:
    """Then no other harvester of the job waits for this process to send the commit."""
    add_job(store, rows=8)
    with store.write() as first, store.write() as second:
        within_a_second(second)
        mine = claim_in(first, owner="ann", now=0.0, lease_s=9.0, limit=2, ends=ends)
        waits = nullcontext() if ends else pytest.raises(OperationalError, match="lock timeout")
        with waits:
            theirs = claim_in(second, owner="ben", now=0.0, lease_s=9.0, limit=2)
            assert (positions(mine), positions(theirs)) == ([0, 1], [2, 3])


@pytest.mark.parametrize("ended", [2, 4])
def test_results_are_committed_with_their_count_unless_a_job_may_be_complete(
    store: Store, ended: int
) -> None:
    """A lease that still has rows of the job shows that it is not; its end is written in the same transaction."""
    add_job(store, rows=4)
    lease = leased(store)
    finished = [Finished(lease.epoch, "job-1", position, result(position)) for position in range(ended)]
    with suppress(ZeroDivisionError), store.write() as tx:
        committed = journal.commit(tx, finished, now=5.0, ends=True)
        assert committed.counted == [("job-1", ended, ended, 4, ended * len(encode(result(0))))]
        assert committed.completed == ["job-1"] * (ended == 4)
        raise ZeroDivisionError
    assert (job(store).succeeded, len(live(store))) == ((2, 2) if ended == 2 else (0, 4))


def test_a_last_statement_that_fails_commits_nothing(store: Store) -> None:
    add_job(store)

    def end_with(rows: Any) -> list[int]:
        with store.write() as tx:
            tx.execute(text("update job set priority = 7"))
            found = bulk.finish(tx, update(schema.job).values(num_rows=rows).returning(schema.job.c.num_rows))
            return [row.num_rows for row in found] + [job(store).num_rows, job(store).priority]

    with pytest.raises(StoreError, match="violates not-null"):
        end_with(null())
    assert job(store).priority == 0
    assert end_with(9) == [9, 9, 7]


def test_a_lease_that_is_just_renewed_is_not_ended_and_not_waited_for(store: Store) -> None:
    add_job(store, rows=4)
    kept, silent = leased(store, limit=1), leased(store, limit=1)
    with store.write() as first, store.write() as second:
        within_a_second(second)
        over = leases.signs(second)
        leases.renew(first, [kept.epoch], now=5.0, lease_s=9.0)
        assert leases.end_silent(second, over) == 1
    assert live(store) == {0: kept.epoch, 1: None}
    assert finish(store, silent).written == []


def waits_for_a_lock(tx: Connection) -> bool:
    """True if a transaction waits for another one's lock."""
    return bool(tx.scalar(text("select count(*) from pg_locks where not granted")))


def free_leases(tx: Connection) -> set[int]:
    """Leases that no other transaction has locked."""
    return set(tx.scalars(text("select epoch from lease for update skip locked")))


def test_leases_are_renewed_in_the_order_in_which_all_others_lock_them(store: Store) -> None:
    """The first lease lies behind the second, since it was renewed alone."""
    add_job(store, rows=4)
    first, second = leased(store, limit=1), leased(store, limit=1)
    epochs = {first.epoch, second.epoch}
    with store.write() as tx:
        leases.renew(tx, {first.epoch}, now=1.0, lease_s=9.0)
    renewed: list[set[int]] = []

    def renew() -> None:
        with store.write() as tx:
            for index in ("indexscan", "bitmapscan"):  # as where leases fill several pages
                tx.execute(text(f"set local enable_{index} = off"))
            renewed.append(leases.renew(tx, epochs, now=2.0, lease_s=9.0))

    with store.write() as tx:
        spans.locked(tx, [first.epoch])
        thread = threading.Thread(target=renew)
        thread.start()
        until(lambda: waits_for_a_lock(tx))
        assert free_leases(tx) == epochs
    thread.join()
    assert renewed == [epochs]


def test_jobs_are_bound_anew_in_the_order_in_which_commits_lock_them(store: Store) -> None:
    """The job that is locked first lies behind the other."""
    for job_id in ("job-2", "job-1"):
        add_job(store, job_id, model="old")

    def rebind() -> None:
        with store.write() as tx:
            catalog.rebind(tx, ["job-2", "job-1"], "new")

    with store.write() as tx:
        catalog.lock_job(tx, "job-1")
        thread = threading.Thread(target=rebind)
        thread.start()
        until(lambda: waits_for_a_lock(tx))
        free = select_free(tx)
    thread.join()
    assert free == {"job-1", "job-2"}
    assert {job(store, job_id).model for job_id in free} == {"new"}


@pytest.mark.parametrize("command", [("pause",), ("deadline", "--within", "8h")])
def test_commands_lock_the_jobs_that_they_name_in_the_order_in_which_commits_do(
    store: Store, postgres: Settings, command: Sequence[str]
) -> None:
    """A commit of results of both would wait for the one, and the command for the other."""
    for job_id in ("job-2", "job-1"):
        add_job(store, job_id)
    codes: list[int] = []
    place = {"CONSERVE_HOME": str(postgres.home), "CONSERVE_STORE": str(postgres.store)}
    with store.write() as tx:
        catalog.lock_job(tx, "job-1")
        thread = threading.Thread(
            target=lambda: codes.append(conserve(*command, "job-2", "job-1", **place).returncode)
        )
        thread.start()
        until(lambda: waits_for_a_lock(tx))
        free = select_free(tx)
    thread.join()
    assert (free, codes) == ({"job-1", "job-2"}, [0])


def select_free(tx: Connection) -> set[str]:
    """Jobs that no other transaction has locked."""
    return set(tx.scalars(text("select id from job for update skip locked")))


UPKEEP: dict[str, Callable[[Store], Any]] = {
    "remove": lambda store: remove(store, "job-1", now=0.0, force=True),
    "mend": lambda store: mend_rows(store, "job-1", now=0.0),
}


@pytest.mark.parametrize("upkeep", UPKEEP)
def test_upkeep_that_meets_a_new_lease_waits_for_it_before_the_job(
    store: Store, upkeep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim commits when the leases are locked and the job is not; its owner's commit waits for the job."""
    add_job(store, rows=4)
    leased(store, limit=1)
    lock_job, errors = catalog.lock_job, list[StoreError]()

    def work() -> None:
        try:
            UPKEEP[upkeep](store)
        except StoreError as error:
            errors.append(error)

    with store.write() as tx:

        def lock(theirs: Connection, job_id: str) -> None:
            monkeypatch.setattr(catalog, "lock_job", lock_job)
            spans.locked(tx, [leased(store, limit=1).epoch])
            lock_job(theirs, job_id)

        monkeypatch.setattr(catalog, "lock_job", lock)
        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: select(store, "select 1 from pg_locks where not granted") != [])
        written = journal.commit(tx, [Finished(2, "job-1", 1, result(1))], now=0.0).written
    thread.join()
    assert errors == []
    assert len(written) == 1


def test_two_first_windows_of_other_jobs_are_remembered(store: Store) -> None:
    def remember(place: str) -> None:
        with store.write() as tx:
            choice.remember(tx, place)

    thread = threading.Thread(target=remember, args=("1 a 2",))
    with store.write() as tx:
        choice.remember(tx, "2 b 3")
        thread.start()
        until(lambda: waits_for_a_lock(tx))
    thread.join()
    with store.read() as tx:
        assert choice.remembered(tx) == "1 a 2"


def test_a_commit_that_waited_for_the_end_of_its_lease_comes_late(store: Store) -> None:
    """Rows that it reads of the span are not older than its lock."""
    add_job(store, rows=2)
    lease = leased(store)
    told: list[Committed] = []
    with store.write() as tx:
        leases.end(tx, list(spans.locked(tx, [lease.epoch])))
        thread = threading.Thread(target=lambda: told.append(finish(store, lease)))
        thread.start()
        until(lambda: tx.scalar(text("select count(*) from pg_locks where not granted")) > 0)
    thread.join()
    assert (len(told[0].written), len(told[0].late)) == (0, 2)
    assert live(store) == {0: None, 1: None}


def test_a_refusal_waits_for_a_commit_of_its_lease(store: Store) -> None:
    """Rows that it puts back are those that the commit left."""
    add_job(store, rows=2)
    ledger = ledger_of(store)
    lease = leased(store, owner=ledger.owner)
    with store.write() as tx:
        journal.commit(tx, [Finished(lease.epoch, "job-1", 0, result(0))], now=0.0)
        thread = threading.Thread(
            target=ledger._turned_away.add, args=("job-1", "its input changed", lease.epoch)
        )
        thread.start()
        until(lambda: waits_for_a_lock(tx))
    thread.join()
    ledger.close()
    assert live(store) == {1: None}


def test_a_row_that_is_in_the_journal_already_is_an_error_of_the_store(store: Store) -> None:
    """COPY, which SQLAlchemy knows nothing of, says so too."""
    rows = [{"job_id": "job-1", "position": 1, "failed": False, "payload": b"", "checksum": 0}] * bulk.FEWEST
    with pytest.raises(StoreError, match="duplicate key"), store.write() as tx:
        bulk.insert_rows(tx, schema.journal, rows)


def sample(column: Column[Any], number: int) -> Any:
    """Value of a column's type; equal numbers refer to each other."""
    if column.nullable and number % 3 == 0:
        return None
    if isinstance(column.type, LargeBinary):
        return bytes([0, 255, number])
    if isinstance(column.type, Boolean):
        return number % 2 == 0
    if isinstance(column.type, Float):
        return number + 0.25
    if isinstance(column.type, BigInteger):
        return 2**40 + number
    return number if isinstance(column.type, Integer) else f"\t{number}\n\\N ü"


@pytest.mark.parametrize("rows", [0, 1, bulk.FEWEST, 40])
def test_rows_of_every_table_arrive_as_they_are(store: Store, rows: int) -> None:
    """By COPY and by single inserts."""
    for table in schema.metadata.sorted_tables:
        if table is schema.meta:
            continue
        values = [{column.name: sample(column, n) for column in table.columns} for n in range(rows)]
        with store.write() as tx:
            bulk.insert_rows(tx, table, values)
        with store.read() as tx:
            found = tx.execute(query(table).order_by(*table.primary_key)).mappings().all()
        assert sorted(map(dict, found), key=repr) == sorted(values, key=repr), table.name


def test_many_rows_are_one_statement_and_few_are_not_copied(store: Store) -> None:
    """The server parses and plans nothing of a COPY."""
    values = [{"slot": n, "tokens": 1.0, "busy_s": 2.0, "busy_until": 3.0} for n in range(bulk.FEWEST)]
    said: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *told: said.append(told[2]))
    with store.write() as tx:
        bulk.insert_rows(tx, schema.harvested, values)
    assert not said
    with store.write() as tx:
        tx.execute(text("delete from harvested"))
        bulk.insert_rows(tx, schema.harvested, values[1:])
    assert [statement.split()[0].lower() for statement in said] == ["delete", "insert"]


def test_rows_are_told_by_one_array_a_column_and_not_cut_into_parts(store: Store) -> None:
    add_job(store, rows=700)
    finish(store, leased(store, limit=700))
    journal = schema.journal
    with store.read() as tx:
        written = tx.execute(query(journal.c.position, journal.c.checksum)).all()
        others = [(row.position, row.checksum + row.position % 2) for row in written]
        both = [journal.c.position, journal.c.checksum]
        (equal,) = bulk.matching(tx, both, [*others, (700, 0)])
        assert [*bulk.matching(tx, both, [])] == []
        found = tx.scalars(query(journal.c.position).where(*equal)).all()
    assert sorted(found) == list(range(0, 700, 2)), "a row has both values of one that was read"
    said = " ".join(str(one.compile(dialect=store.engine.dialect)) for one in equal)
    assert "wanted.position" in said
    assert "ANY" not in said, (
        "once its plan serves all values, each row is compared with each value of an array"
    )


@pytest.mark.parametrize(
    ("look", "index"),
    [
        (lambda tx: queue.having(tx, [SimpleNamespace(seq=1)], queue.returned(), 0.0), "request_by_epoch"),
        (
            lambda tx: tx.execute(
                queue.returned().where(schema.request.c.job_id == "job"), queue.due_at(0.0)
            ),
            "request_by_epoch",
        ),
        (lambda tx: choice.passed_over(tx, "job", start=3, limit=10), "request_passed_over"),
    ],
    ids=["having", "returned", "passed over"],
)
def test_waiting_rows_come_in_the_order_of_the_index(
    store: Store, look: Callable[[Connection], Any], index: str
) -> None:
    said: list[Any] = []
    event.listen(store.engine, "before_cursor_execute", lambda *told: said.append(told[2:4]))
    with store.read() as tx:
        look(tx)
        statement, values = said[-1]
        # Of plans with a sort and without one, that without is chosen, however few the rows are.
        tx.exec_driver_sql("set local enable_sort = off")
        tx.exec_driver_sql("set local enable_seqscan = off")
        plan = tx.exec_driver_sql(f"explain {statement}", values).scalars().all()
    assert any(index in line for line in plan), plan
    assert not any("Sort" in line for line in plan), plan


SNAPSHOTS = text(
    "select count(*) from pg_stat_activity where backend_xmin is not null and pid <> pg_backend_pid()"
)


@pytest.mark.parametrize("wait", [False, True])
def test_a_piece_of_work_that_one_process_does_keeps_no_deleted_row_from_being_cleared(
    store: Store, wait: bool
) -> None:
    for _ in range(12):  # the driver prepares a statement that it sends for the sixth time
        with store.alone("a long piece of work", wait=wait) as alone, store.write() as tx:
            assert alone
            assert not tx.scalar(SNAPSHOTS)


def test_statements_with_arrays_are_planned_for_them(store: Store) -> None:
    """The plan for all values takes each array for one of ten values."""
    add_job(store, rows=40)
    for _ in range(12):
        lease = leased(store, limit=1)
        put_back(store, lease, lease.rows[0].position)
    prepared = text("select statement from pg_prepared_statements")
    with store.read() as tx:
        statements = tx.scalars(prepared).all()
    assert any("request" in statement for statement in statements), "others are prepared"
    assert not any("unnest" in statement for statement in statements)


def test_rows_that_wait_are_copied_with_what_the_schema_would_add(store: Store) -> None:
    add_job(store, rows=40)
    with store.write() as tx:
        bulk.insert_rows(tx, schema.request, [queue.waiting_row("job-1", p, 5.0) for p in range(20)])
    waiting = "select attempts, failures, suspect, available_at, epoch from request"
    assert select(store, waiting) == [(0, 0, False, 5.0, None)] * 20


def test_results_of_all_kinds_are_copied_as_they_are(store: Store) -> None:
    add_job(store, rows=40)
    finish(store, leased(store, limit=40), failed=range(20))
    assert select(store, "select count(*), count(*) filter (where failed), sum(position) from journal") == [
        (40, 20, 780)
    ]
    shards.compact(store, "job-1", now=0.0)
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select count(*), count(error) from results").fetchall() == [(40, 20)]


def test_one_process_at_a_time_compacts_a_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 10)
    finished_job(store)
    with store.alone("compact job-1") as alone:
        assert alone
        assert shards.compact_full(store, "job-1", now=0.0) is None
        with store.alone("compact job-2") as other:
            assert other
    assert shards.compact_full(store, "job-1", now=0.0) == 10


def test_a_harvester_with_leases_waits_for_no_compaction_of_another_process(store: Store) -> None:
    """Its thread renews leases too; what the other one leaves is moved later."""
    add_job(store, rows=4)
    lease = leased(store, limit=4)
    recorder = Recorder(store)
    with store.alone("compact job-1") as alone:
        assert alone
        recorder.write(Outcomes(finished=[Finished(lease.epoch, "job-1", n, result(n)) for n in range(4)]))
        assert not recorder.compact()
        assert recorder.behind
        assert select(store, "select count(*) from journal") == [(4,)]
    assert recorder.compact()
    assert select(store, "select count(*) from journal") == [(0,)]
    assert not recorder.compact(wait=True)
    assert not recorder.behind


@pytest.mark.parametrize(
    "look",
    [
        lambda store, tx: list(shards.by_position(tx, "job-1", failed=False)),
        lambda store, tx: NewResults(store, catalog.get(tx, "job-1"))._journalled(tx),
    ],
    ids=["to move", "that are new"],
)
def test_a_look_for_results_fetches_none_that_were_moved_before(
    store: Store, look: Callable[[Store, Connection], Any]
) -> None:
    """Until a vacuum the table holds them; a job of a million rows ends before the first."""
    rows = 4_000
    add_job(store, rows=rows)
    finish(store, leased(store, limit=rows))
    shards.compact(store, "job-1", now=0.0)
    fetched = text("select pg_stat_get_xact_blocks_fetched('journal'::regclass)")
    blocks = select(store, "select pg_relation_size('journal') / 8192")[0][0]
    looks = []
    for _ in range(3):
        with store.read() as tx:
            before = tx.scalar(fetched)
            assert not look(store, tx)
            looks.append(tx.scalar(fetched) - before)
    assert blocks > 20
    assert looks[2] == 0, "one before found out which rows are deleted"


def test_a_call_is_heard_once_its_rows_are_there(store: Store) -> None:
    listener = Listener.of(store.engine)
    assert listener is not None
    add_job(store)
    assert called(listener)
    assert listener.heard()
    assert not calls_before_now(store, listener)
    lease = leased(store)
    finish(store, lease, of=[0])
    assert not calls_before_now(store, listener), "a claim and a commit wake no harvester"
    with store.write() as tx:
        leases.end(tx, [lease.epoch])
        assert not calls_before_now(store, listener), "not before the commit"
    assert called(listener)
    assert listener.heard()
    finish(store, leased(store), failed=[1])
    assert called(listener), "harvesters that wait for others' rows end with the job"
    assert listener.heard()
    shards.retry_failed(store, "job-1", now=0.0)
    assert called(listener)
    listener.close()


def test_a_job_that_stops_or_may_run_again_wakes_harvesters(store: Store) -> None:
    for job_id in ("job-1", "job-2"):
        add_job(store, job_id)
    add_job(store, "job-3", deadline=5.0)
    listener = Listener.of(store.engine)
    assert listener is not None
    with store.write() as tx:
        catalog.refuse(tx, "job-2", "the record is lost", FailedBy.DAMAGE, now=1.0)
    assert not calls_before_now(store, listener), "no row of it is to be withdrawn"
    for verb in ("pause", "resume", "cancel"):
        with store.write() as tx:
            catalog.move(tx, "job-1", verb, now=2.0)
        assert called(listener), verb
        assert listener.heard()
    with store.write() as tx:
        assert catalog.expire(tx, now=4.0) == []
    assert not calls_before_now(store, listener)
    with store.write() as tx:
        assert catalog.expire(tx, now=5.0) == ["job-3"]
    assert called(listener)
    assert listener.heard()
    remove(store, "job-3", now=5.0, force=True)
    assert called(listener)
    assert listener.heard()
    with store.write() as tx:
        assert catalog.forgive(tx, "job-2", now=2.0)
    assert called(listener)
    listener.close()


def test_all_calls_are_taken_at_once(store: Store) -> None:
    listener = Listener.of(store.engine)
    assert listener is not None
    with store.write() as tx:  # which sends them at once
        for number in range(3):
            tx.execute(text(f"notify {CHANNEL}, 'call {number}'"))
    assert called(listener)
    assert listener.heard()
    assert not calls_before_now(store, listener)
    listener.close()
    assert select(store, LISTENING) == []


LISTENING = "select 1 from pg_stat_activity where datname = current_database() and query like 'listen%'"


def test_a_listener_is_a_connection_of_its_own(store: Store) -> None:
    """The pool, whose connections may be closed, never has it."""
    listener = Listener.of(store.engine)
    assert listener is not None
    store.engine.dispose()
    add_job(store)
    assert called(listener)
    assert listener.heard()
    listener.close()


def test_where_no_server_answers_there_is_no_listener(tmp_path: Path) -> None:
    engine = engine_of(f"postgresql://ann@/store?host={tmp_path}")
    assert Listener.of(engine) is None


def test_connections_end_where_the_server_has_vanished_and_the_url_says_when(store: Store) -> None:
    """The listener's own too, which waits for calls that would never come."""
    usual = {
        "connect_timeout": "10",
        "keepalives_idle": "15",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "30000",
    }
    given = {"connect_timeout": "7", "keepalives_count": "9", "tcp_user_timeout": "0"}
    url = store.engine.url
    for asked, wanted in (({}, usual), (given, usual | given)):
        engine = engine_of(url.update_query_dict(asked).render_as_string(hide_password=False))
        listener = Listener.of(engine)
        assert listener is not None
        with closing(listener), engine.connect() as connection:
            for driver in (listener._driver, connection.connection.driver_connection):
                assert driver.info.get_parameters().items() >= wanted.items()
        engine.dispose()


def called(listener: Listener) -> bool:
    """Wait until a call is there."""
    return bool(select_files([listener], [], [], HANGS_S)[0])


def calls_before_now(store: Store, listener: Listener) -> int:
    """Number of calls that come before one that is sent now; takes them all."""
    with store.engine.begin() as tx:
        tx.execute(text(f"notify {CHANNEL}, 'now'"))
    said: list[bytes] = []
    while b"now" not in said:
        assert called(listener)
        listener._driver.pgconn.consume_input()
        said += [call.extra for call in iter(listener._driver.pgconn.notifies, None)]
    return len(said) - 1


def test_harvesters_add_up_their_tokens_and_note_the_same_server(store: Store) -> None:
    seen = Sighting(
        url="http://gpu:8000", state="serving", model="m", version=None, alive=True, in_flight=1, waiting=0,
        tokens_per_s=9.0, why=None,
    )  # fmt: skip
    for owner, alive in (("ann", False), ("ben", True), ("ann", False)):
        with store.write() as tx:
            servers.note(tx, owner, [replace(seen, alive=alive)], now=10.0)
            harvested.note(tx, 100, since=0.0, now=10.0)
    with store.read() as tx:
        assert harvested.slots(tx) == [HarvestedQuarter(0, 300.0, 10.0)]
        (found,) = servers.everything(tx)
    assert (found.model, found.seen_at, len(found.feedings)) == ("m", 10.0, 2)


def test_a_connection_that_ends_is_noticed(store: Store) -> None:
    listener = Listener.of(store.engine)
    assert listener is not None
    with store.write() as tx:
        tx.execute(text("select pg_terminate_backend(pid) from pg_stat_activity where query like 'listen%'"))
    assert select_files([listener], [], [], 60)[0]
    until(lambda: not listener.heard())
    listener.close()


def test_a_waiting_harvester_is_woken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A harvester would look by itself in an hour."""
    monkeypatch.setattr(harvester, "LISTENING_S", 3600.0)
    store.home.mkdir(exist_ok=True)

    async def run() -> int:
        stop = asyncio.Event()
        working = harvester.Harvester(store, FakeEndpoint(), follow=True)
        running = asyncio.create_task(working.run(stop))
        await asyncio.to_thread(until, lambda: working._calls.listening)
        await asyncio.to_thread(submit_rows, store)
        await asyncio.to_thread(until, lambda: working.tally.succeeded == 3)
        stop.set()
        return (await running).succeeded

    assert asyncio.run(run()) == 3


def submit_rows(store: Store) -> None:
    path = store.home / "input.parquet"
    pq.write_table(pa.table({"q": ["a", "b", "c"]}), path)
    submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}"))
