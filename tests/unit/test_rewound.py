"""A database that went back in time: answers that lie on disk are taken in, and every other row is asked again."""

import json
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from conserve.config import load
from conserve.store.books import leases, shards
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.upkeep import checking
from tests import commands, postgres
from tests.commands import conserve
from tests.postgres_server import USER, PostgresServer, running
from tests.store_rows import finish, leased, select

ROWS = 40


def submit(folder: Path, name: str, rows: int = ROWS) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"q": f"{name} {n}"}) + "\n" for n in range(rows)))
    done = conserve("submit", str(path), "--prompt", "{{ q }}", "--order", "input")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def answered(job_id: str, rows: int, *, failed: Sequence[int] = (), compacted: bool = True) -> int:
    """Finish so many rows of a job; returns the epoch of their lease."""
    with closing(Store.open(load())) as store:
        lease = leased(store, only=[job_id], limit=rows, owner="elsewhere:1:2:3")
        finish(store, lease, failed=failed)
        if compacted:
            shards.compact(store, job_id, now=0.0)
        return lease.epoch


def retried(job_id: str) -> None:
    with closing(Store.open(load())) as store:
        assert shards.retry_failed(store, job_id, now=0.0) > 0


def before(folder: Path) -> dict[str, str]:
    """Four jobs: done, half done, with failed rows, and removed later."""
    jobs = {name: submit(folder, name) for name in ("done", "half", "failed", "removed")}
    answered(jobs["done"], ROWS)
    answered(jobs["half"], 10)
    answered(jobs["half"], 10, compacted=False)
    answered(jobs["failed"], ROWS, failed=(3, 4))
    return jobs


def after(folder: Path, jobs: dict[str, str]) -> int:
    """Go on: more rows are done, a job comes and one goes; returns the last epoch."""
    answered(jobs["half"], 10)  # with the ten rows before, in one shard
    answered(jobs["half"], 2, failed=(30,))
    answered(jobs["half"], 2, compacted=False)
    retried(jobs["failed"])
    answered(jobs["failed"], 2)
    jobs["later"] = submit(folder, "later")
    assert conserve("rm", jobs["removed"], "--yes", "--force").returncode == 0
    return answered(jobs["later"], ROWS)


def results(job_id: str) -> dict[int, str]:
    rows = [json.loads(line) for line in conserve("results", job_id).stdout.splitlines()]
    found = {row["row_index"]: row["text"] for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


def check_recovered(jobs: dict[str, str], last_epoch: int) -> None:
    """Repair the store, and let the rows that are lost be asked again: each row is there once."""
    found = conserve("check")
    assert found.returncode == 1
    assert "has 20 answers, and the database does not name it: it went back in time" in found.stdout
    assert "does not name 1 job whose folders are here" in found.stdout
    mended = conserve("check", "--repair")
    assert "Traceback" not in mended.stderr
    assert "21 answers that lay on disk were taken in" in mended.stdout, mended.stdout
    assert f"job {jobs['later']} was taken in from its folder" in mended.stdout
    by_hand = [line for line in mended.stderr.splitlines() if "still damaged" in line]
    assert all(jobs["removed"] in line for line in by_hand), by_hand
    for name, done in (("done", ROWS), ("half", 32), ("failed", ROWS), ("later", ROWS)):
        assert set(results(jobs[name])) == set(range(done)) - ({30} if name == "half" else set()), name
    with closing(Store.open(load())) as store:
        lease = leased(store, only=[jobs["half"]], limit=1)
        assert lease.epoch > last_epoch
        with store.write() as tx:
            leases.end(tx, [lease.epoch])
    conserve("run", jobs["half"], "--endpoint", "fake:")
    answers = results(jobs["half"])
    assert set(answers) == set(range(ROWS))
    assert [row for row, said in sorted(answers.items()) if said != "yes"] == [30, *range(32, ROWS)]
    conserve("rm", jobs["removed"], "--yes", "--force")
    assert conserve("check").returncode == 0


def test_an_older_copy_of_a_sqlite_database(store: Store, tmp_path: Path) -> None:
    jobs = before(tmp_path)
    kept = tmp_path / "kept.db"
    database = store.home / "conserve.db"
    with closing(sqlite3.connect(database)) as now, closing(sqlite3.connect(kept)) as copy:
        now.backup(copy)
    last_epoch = after(tmp_path, jobs)
    store.close()
    for path in store.home.glob("conserve.db*"):
        path.unlink()
    shutil.copyfile(kept, database)
    check_recovered(jobs, last_epoch)


@pytest.fixture
def archiving(tmp_path: Path) -> Iterator[PostgresServer]:
    """A server that archives its log."""
    if reason := postgres.missing():
        pytest.skip(reason)
    archive = {"archive_mode": "on", "archive_command": "cp %p ../archive/%f", "wal_level": "replica"}
    with running({**archive, "full_page_writes": "on"}) as server:
        yield server


@pytest.mark.full
def test_point_in_time_recovery_of_postgresql(
    archiving: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/how-to/recover.md, step by step."""
    server = archiving
    server.run("mkdir", "archive")
    monkeypatch.setenv("CONSERVE_STORE", server.new_database())
    server.run(
        "pg_basebackup",
        "--checkpoint=fast",
        "-h",
        str(server.folder),
        "-U",
        USER,
        "-D",
        str(server.folder / "base"),
    )
    jobs = before(tmp_path)
    ((moment,),) = server.sql("select clock_timestamp()::text")
    last_epoch = after(tmp_path, jobs)
    archived(server)
    server.stop()
    server.data = "base"
    with (server.data_folder / "postgresql.auto.conf").open("a") as conf:
        conf.write(f"restore_command = 'cp ../archive/%f %p'\nrecovery_target_time = '{moment}'\n")
        conf.write("recovery_target_action = 'promote'\n")
    server.run("touch", str(server.data_folder / "recovery.signal"))
    server.start()
    commands.until(lambda: server.sql("select pg_is_in_recovery()") == [(False,)])
    check_recovered(jobs, last_epoch)


def archived(server: PostgresServer) -> None:
    """Wait until the log so far is in the archive."""
    ((name,),) = server.sql("select pg_walfile_name(pg_switch_wal())")
    commands.until(lambda: (server.folder / "archive" / str(name)).exists())


def test_files_that_crashes_leave_are_no_orphans(store: Store, tmp_path: Path) -> None:
    """A shard whose rows are in the journal still, one that was registered under another name, and failed rows."""
    job_id = submit(tmp_path, "one")
    answered(job_id, 10, compacted=False)
    folder = layout.job_folder(store.home, job_id) / layout.RESULTS
    folder.mkdir(exist_ok=True)
    rows = shards.oldest(store, job_id, failed=False, at_least=1)
    shards.write_file(folder, job_id, rows, local=store.local)
    assert checking.check(store).damages == []
    shards.compact(store, job_id, now=0.0)
    assert checking.check(store).damages == []
    answered(job_id, 5, failed=range(10, 15), compacted=False)
    rows = shards.oldest(store, job_id, failed=True, at_least=1)
    shards.write_file(folder, job_id, rows, local=store.local)
    retried(job_id)
    assert checking.check(store).damages == []
    assert conserve("check", "--repair").returncode == 0
    assert select(store, "select count(*) from shard") == [(1,)]


def test_answers_to_other_requests_are_not_taken_in(store: Store, tmp_path: Path) -> None:
    job_id = submit(tmp_path, "one")
    answered(job_id, 10)
    (path,) = (layout.job_folder(store.home, job_id) / layout.RESULTS).iterdir()
    with store.write() as tx:
        for statement in ("delete from shard", "update job set next_position = 0, succeeded = 0"):
            tx.execute(text(statement))
    (found,) = checking.check(store).damages
    assert (found.part, found.file) == ("orphan", str(path.relative_to(store.home)))
    requests = layout.requests_file(store.home, job_id)
    table = pq.read_table(requests)
    turned = pa.array(reversed(table["row_index"].to_pylist()), table.schema.field("row_index").type)
    pq.write_table(table.set_column(table.schema.get_field_index("row_index"), "row_index", turned), requests)
    assert "orphan" not in {damage.part for damage in checking.check(store).damages}


def test_a_shard_that_comes_between_two_looks_is_no_orphan(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are listed before the database is read: what another process finishes meanwhile is not listed."""
    job_id = submit(tmp_path, "one")
    real = checking.audit
    left = iter(range(4))

    def audit(*arguments: Any, **named: Any) -> Any:
        found = real(*arguments, **named)
        for _ in left:
            answered(job_id, 5)
            break
        return found

    monkeypatch.setattr(checking, "audit", audit)
    assert checking.check(store).damages == []
