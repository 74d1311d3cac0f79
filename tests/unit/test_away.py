"""Storage that is away for a while: files out of reach are no damage, and nothing is made in their place."""

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conserve.config import Settings, load
from conserve.errors import StoreError, StoreForbidden
from conserve.store.books import catalog, shards, uploads
from conserve.store.books.mounted import require_folders
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from conserve.store.files import digests, job_folders, layout, marks
from conserve.store.upkeep import checking, mending, rebuild, records
from conserve.store.upkeep.damage import StorePart, unreadable
from conserve.store.upkeep.rebuild import Stranger
from tests.commands import conserve
from tests.store_rows import add_job, finish, job, leased, select

AWAY = [errno.EACCES, errno.EPERM, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Mount point of the disk with the files of the store."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv("CONSERVE_DATA", str(folder / "team"))
    return folder


def submitted(folder: Path, name: str) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text('{"q": "yes"}\n{"q": "REJECT"}\n')
    done = conserve("submit", str(path), "--prompt", "{{ q }}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("emptied", ["the disk", "jobs"])
def test_a_disk_that_is_not_mounted_has_lost_nothing(
    disk: Path, tmp_path: Path, database: str, emptied: str
) -> None:
    """Nothing is made in its place, and the store is whole once it is back."""
    done, queued = submitted(tmp_path, "done"), submitted(tmp_path, "queued")
    conserve("run", done, "--endpoint", "fake:")
    point = disk if emptied == "the disk" else disk / "team" / "jobs"
    point.rename(tmp_path / "mounted")
    point.mkdir()
    for words in (
        ("check",),
        ("check", "--repair"),
        ("check", "--repair", done),
        ("retry", done),
        ("submit", str(tmp_path / "done.jsonl"), "--prompt", "{{ q }}"),
        ("run", "--endpoint", "fake:"),
    ):
        found = conserve(*words)
        assert found.returncode != 0, words
        assert f"{disk}/team/jobs is missing or empty; mount its disk" in found.stderr, words
        assert list(point.iterdir()) == [], words
    with closing(Store.open(load())) as store:
        with pytest.raises(StoreError, match="mount its disk"):
            uploads.make_folder(store)
        assert (job(store, done).state, job(store, queued).state) == (JobState.COMPLETED, JobState.QUEUED)
    point.rmdir()
    (tmp_path / "mounted").rename(point)
    assert conserve("check").returncode == 0
    assert conserve("run", "--endpoint", "fake:").returncode == 5


def test_files_of_all_jobs_may_be_said_to_be_lost(store: Store) -> None:
    add_job(store)
    layout.job_folder(store.home, "job-1").rmdir()
    with store.read() as tx:
        with pytest.raises(StoreError, match=f"mkdir -p {store.home}/jobs/job-1"):
            require_folders(tx, store.data)
        layout.job_folder(store.home, "job-1").mkdir()
        require_folders(tx, store.data)


def test_folders_of_another_stores_jobs_are_not_this_stores(store: Store) -> None:
    """A machine that had a store of its own before joins the queue of others, and has none of its files."""
    add_job(store)
    layout.job_folder(store.home, "job-1").rmdir()
    others = layout.job_folder(store.home, "theirs")
    others.mkdir()
    job_folders.register(others, "another", {})
    with store.read() as tx:
        with pytest.raises(StoreError, match="jobs has folders of other stores' jobs alone; mount its disk"):
            require_folders(tx, store.data)
        job_folders.register(others, store.id, {})
        require_folders(tx, store.data)


def test_a_store_without_jobs_has_no_folder_yet(store: Store) -> None:
    with store.read() as tx:
        require_folders(tx, store.data)
    assert checking.check(store).damages == []


@pytest.fixture
def shard(store: Store) -> Path:
    """The shard of the failed rows of a job that is done."""
    add_job(store, rows=4)
    finish(store, leased(store, limit=4), failed=[1, 2])
    shards.compact(store, "job-1", now=0.0)
    ((file,),) = select(store, "select file from shard where failed")
    return store.home / str(file)


def refuse(
    patch: pytest.MonkeyPatch, path: Path, number: int, owner: Any = digests, name: str = "digest_of"
) -> None:
    """Have this function of a path, by default the reading of its contents, end with an error of the system."""
    real = getattr(owner, name)

    def refused(one: Path) -> Any:
        if one == path:
            raise OSError(number, os.strerror(number), str(one))
        return real(one)

    patch.setattr(owner, name, refused)


@pytest.mark.parametrize("number", AWAY)
def test_a_shard_that_cannot_be_reached_is_not_taken_out(
    store: Store, shard: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """`retry` does not ask its rows again, and a query leaves it out."""
    named = select(store, "select * from shard order by id")
    refuse(monkeypatch, shard, number)
    for changing in (
        lambda: mending.mend_rows(store, "job-1", now=1.0),
        lambda: shards.retry_failed(store, "job-1", now=1.0),
        lambda: records.mend(store, "job-1", now=1.0),
    ):
        with pytest.raises(StoreForbidden, match="says nothing about what is in it") as refused:
            changing()
        assert refused.value.job_id == "job-1"
    (found,) = checking.check(store).damages
    allowed = number not in (errno.EACCES, errno.EPERM)
    fix = "bring its storage back, or delete the file if it is lost" if allowed else "let this user read it"
    assert (found.part, store.data / found.file) == (StorePart.SHARD, shard)
    assert found.sentence.endswith(f"({os.strerror(number)}); {fix}, and run: conserve check job-1")
    with store.read() as tx:
        (left_out,) = unreadable(store.data, [], shards.files(tx, ["job-1"]), now=1.0)
    assert left_out.what == f"cannot be read ({os.strerror(number)})"
    assert (select(store, "select * from shard order by id"), job(store).failed) == (named, 2)
    monkeypatch.undo()
    assert shards.retry_failed(store, "job-1", now=1.0) == 2


def test_a_repair_leaves_a_job_with_a_file_out_of_reach_and_mends_the_others(
    store: Store, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store, "job-2")
    with store.write() as tx:
        for job_id in ("job-1", "job-2"):
            tx.exec_driver_sql(f"update job set succeeded = 3, files = '{{}}' where id = '{job_id}'")
            job_folders.register(layout.job_folder(store.data, job_id), store.id, catalog.record(tx, job_id))
    for job_id in ("job-1", "job-2"):
        layout.requests_file(store.data, job_id).write_bytes(b"")
    refuse(monkeypatch, shard, errno.EIO)
    done = conserve("check", "--repair")
    assert done.returncode == 1
    assert "repaired: the counters were counted again" in done.stdout
    said = f"still damaged: job job-1: {shard.relative_to(store.home)} cannot be read (Input/output error)"
    assert said in done.stderr
    assert (job(store, "job-1").succeeded, job(store, "job-2").succeeded) == (3, 0)


def test_a_mark_that_cannot_be_reached_is_no_missing_record(
    store: Store, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = layout.job_folder(store.data, "job-1") / marks.MARK
    refuse(monkeypatch, mark, errno.EIO, Path, "read_bytes")
    (found,) = checking.check(store).damages
    assert (found.part, found.what) == (StorePart.MARK, "cannot be read (Input/output error)")
    with pytest.raises(StoreForbidden):
        records.mend(store, "job-1", now=1.0)


def test_a_folder_that_cannot_be_reached_is_no_missing_file(
    store: Store, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, shard, errno.ETIMEDOUT, Path, "is_file")
    (found,) = checking.check(store).damages
    assert found.what == "cannot be read (Connection timed out)"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EISDIR, errno.ELOOP])
def test_a_file_that_is_another_kind_of_thing_is_damaged(
    store: Store, shard: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, shard, number)
    assert mending.mend_rows(store, "job-1", now=1.0)[0].endswith("was taken out of the store")


def test_a_job_whose_files_cannot_be_reached_is_taken_in_later(
    store: Store, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.write() as tx:
        record = catalog.record(tx, "job-1")
        for table in ("shard", "batch", "job"):
            tx.exec_driver_sql(f"delete from {table}")
    folder = layout.job_folder(store.data, "job-1")
    stranger = Stranger("job-1", marks.Mark(store_id=store.id, registered=True, record=record))
    read = pq.read_table

    def refused(path: object, **options: Any) -> Any:
        if str(path) == str(shard):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, **options)

    with monkeypatch.context() as away:
        away.setattr(pq, "read_table", refused)
        (said,) = rebuild.adopt(store, [stranger], now=1.0)
    assert said.startswith(f"job job-1 is yet to be taken in from its folder: {shard} cannot be read")
    assert select(store, "select id from job") == []
    assert rebuild.adopt(store, [stranger], now=1.0) == ["job job-1 was taken in from its folder"]
    assert (job(store).failed, folder.is_dir()) == (2, True)


@pytest.mark.sqlite
def test_a_database_that_is_made_anew_without_its_files_waits_for_them(
    store: Store, shard: Path, settings: Settings, tmp_path: Path
) -> None:
    store.close()
    (store.home / "jobs").rename(tmp_path / "jobs")
    with pytest.raises(StoreError, match="mount its disk"):
        rebuild.rebuild(settings, now=1.0)
    (tmp_path / "jobs").rename(store.home / "jobs")
    rebuild.rebuild(settings, now=2.0)
    with closing(Store.open(settings)) as again:
        assert len(select(again, "select * from shard")) == 2


@pytest.mark.sqlite
def test_a_database_is_made_anew_beside_a_file_out_of_reach(
    store: Store, shard: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    with monkeypatch.context() as away:
        refuse(away, shard, errno.EIO)
        rebuild.rebuild(settings, now=1.0)
    with closing(Store.open(settings)) as again:
        assert len(select(again, "select * from shard")) == 2
        assert job(again).failed == 2
