"""Jobs are removed as a whole, when they are finished, and after it was said what that deletes."""

import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import Connection

from conserve.cli.rm import seconds
from conserve.config import Settings
from conserve.errors import JobRefused, StoreError, UsageError
from conserve.owners import this_process
from conserve.store.books import catalog, shards
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.states import FailedBy
from conserve.store.database.store import Store
from conserve.store.files import layout, marks, trash
from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.place import place_of
from conserve.store.upkeep import removal
from conserve.store.upkeep.sweep import sweep
from tests.commands import Done, conserve
from tests.conftest import WriteInput
from tests.store_rows import claim, finish, leased, select

TABLES = ("job", "request", "journal", "shard", "span", "lease")


@pytest.fixture
def submit(write_input: WriteInput) -> Callable[..., str]:
    numbers = itertools.count()

    def submit(*rows: str) -> str:
        path = write_input(f"input-{next(numbers)}.parquet", q=list(rows or "abc"))
        done = conserve("submit", str(path), "--prompt", "{{ q }}")
        return done.stdout.strip()

    return submit


def run(*jobs: str) -> Done:
    return conserve("run", *jobs, "--endpoint", "fake:")


def compute(store: Store, *jobs: str) -> None:
    """Finish all rows of these jobs, or of all, as a run would."""
    only = list(jobs) or None
    while (lease := claim(store, limit=100, only=only, now=time.time())) is not None:
        finish(store, lease, now=time.time())
    for job_id in jobs or ids(store):
        shards.compact(store, job_id, now=time.time())


def ids(store: Store) -> list[str]:
    return [job_id for (job_id,) in select(store, "select id from job order by seq")]


def rows_of(store: Store, job_id: str) -> int:
    """Rows in all tables that name a job."""
    columns = {table: "id" if table == "job" else "job_id" for table in TABLES}
    return sum(
        select(store, f"select count(*) from {table} where {column} = '{job_id}'")[0][0]
        for table, column in columns.items()
    )


def folders(store: Store) -> set[str]:
    return {path.name for path in layout.jobs_folder(store.home).iterdir()}


def test_a_finished_job_goes_with_its_files_and_others_stay(store: Store, submit: Callable[..., str]) -> None:
    gone, kept = submit(), submit("d")
    run()
    done = conserve("rm", gone, "--yes")
    assert done.returncode == 0
    assert done.stdout.startswith(f"{gone}: removed, ")
    assert gone in done.stderr
    assert (ids(store), folders(store)) == ([kept], {kept})
    assert rows_of(store, gone) == 0
    assert trash.contents(store.home) == []
    assert len(conserve("results", kept).stdout.splitlines()) == 1
    assert conserve("check").returncode == 0
    assert conserve("status", gone).returncode == 2


def test_what_is_to_be_deleted_is_shown_and_nothing_is_without_an_answer(
    store: Store, submit: Callable[..., str]
) -> None:
    """Off a terminal there is no one to ask."""
    job_id = submit()
    compute(store)
    for words in (["rm", job_id], ["prune", "--older-than", "0s"]):
        done = conserve(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert job_id in done.stderr.splitlines()[1]
        assert "nothing was removed, add --yes" in done.stderr
    assert ids(store) == [job_id]


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_on_a_terminal_it_is_asked(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    job_id = submit()
    compute(store)
    monkeypatch.setattr("conserve.cli.rm.is_terminal", lambda: True)
    done = conserve("rm", job_id, stdin=answer)
    assert done.returncode == 0
    assert "remove 1 job, " in done.stderr
    assert len(ids(store)) == left
    assert ("nothing was removed" in done.stderr) == bool(left)


@pytest.mark.parametrize("state", ["queued", "paused", "failed"])
def test_a_job_that_is_not_finished_is_removed_by_force_only(
    store: Store, submit: Callable[..., str], state: str
) -> None:
    job_id, other = submit(), submit("d")
    with store.write() as tx:
        if state == "paused":
            catalog.move(tx, job_id, "pause", now=0.0)
        if state == "failed":
            catalog.refuse(tx, job_id, "its input changed", FailedBy.INPUT, now=0.0)
    done = conserve("rm", job_id, other, "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"job {job_id} is {state} and not finished; nothing was removed, add --force" in done.stderr
    with pytest.raises(JobRefused):
        removal.remove(store, job_id, now=0.0)
    assert ids(store) == [job_id, other]
    assert conserve("rm", job_id, "--yes", "--force").returncode == 0
    assert (ids(store), folders(store)) == ([other], {other})


def test_a_cancelled_job_is_finished(store: Store, submit: Callable[..., str]) -> None:
    job_id = submit()
    conserve("cancel", job_id)
    assert conserve("rm", "last", "--yes", "--json").returncode == 0
    assert ids(store) == []
    assert job_id


def test_a_job_that_is_not_there_removes_nothing(store: Store, submit: Callable[..., str]) -> None:
    job_id = submit()
    compute(store)
    assert conserve("rm", job_id, "nope", "--yes").returncode == 2
    assert ids(store) == [job_id]


def test_prune_takes_what_ended_long_ago(store: Store, submit: Callable[..., str]) -> None:
    old, young, running = submit(), submit("d"), submit("e")
    compute(store, old)
    compute(store, young)
    with store.write() as tx:
        tx.exec_driver_sql(f"update job set finished_at = finished_at - 864000 where id = '{old}'")
        tx.exec_driver_sql(f"update job set submitted_at = submitted_at - 864000 where id = '{running}'")
    done = conserve("prune", "--older-than", "9d", "--yes", "--json")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert [job["job_id"] for job in said["jobs"]] == [old]
    assert said["freed_bytes"] == said["jobs"][0]["bytes"] > 0
    assert ids(store) == [young, running]
    assert conserve("prune", "--older-than", "9d", "--yes").stderr == "nothing to remove\n"


@pytest.mark.parametrize("words", [["rm"], ["prune", "--older-than", "0s"]], ids=["rm", "prune"])
def test_jobs_that_another_process_removes_or_retries_meanwhile_hold_up_no_others(
    store: Store, submit: Callable[..., str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, retried, last = submit(), submit("REJECT"), submit("d")
    run()
    usage = removal.usage

    def meanwhile(asked: Store, wanted: Any) -> list[removal.DiskUsage]:
        found = usage(asked, wanted)
        assert removal.remove(store, gone, now=0.0) is not None
        if words != ["rm"]:
            assert conserve("retry", retried).returncode == 0
        return found

    monkeypatch.setattr(removal, "usage", meanwhile)
    named = [gone, last] if words == ["rm"] else []
    done = conserve(*words, *named, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert [job["job_id"] for job in json.loads(done.stdout)["jobs"]] == [last]
    assert ids(store) == [retried]
    assert removal.remove(store, last, now=0.0) is None


def test_prune_leaves_answers_that_are_newer_than_it_was_asked_for(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was shown may be retried, and end again, before the answer to the question."""
    job_id = submit("REJECT")
    run()
    usage = removal.usage

    def meanwhile(asked: Store, wanted: Any) -> list[removal.DiskUsage]:
        found = usage(asked, wanted)
        assert conserve("retry", job_id).returncode == 0
        compute(store, job_id)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(removal, "usage", meanwhile)
        done = conserve("prune", "--older-than", "0s", "--yes", "--json")
    assert (done.returncode, json.loads(done.stdout)["jobs"]) == (0, [])
    assert ids(store) == [job_id]
    assert conserve("prune", "--older-than", "0s", "--yes").returncode == 0
    assert ids(store) == []


def test_prune_empties_the_trash(store: Store, submit: Callable[..., str]) -> None:
    """The folders that the sweep puts there just before go too."""
    job_id = submit()
    orphan = layout.job_folder(store.home, "orphan")
    orphan.mkdir()
    (orphan / "file").write_bytes(bytes(1000))
    place_of(orphan).set_mark(marks.Mark(store_id=store.id))
    for path in (orphan, *orphan.iterdir()):
        os.utime(path, (0, 0))
    assert sweep(store, now=time.time()) == 1
    done = conserve("prune", "--yes")
    assert done.returncode == 0
    assert done.stdout.startswith("trash: emptied, 1.")
    assert trash.contents(store.home) == []
    assert ids(store) == [job_id]
    assert json.loads(conserve("prune", "--json").stdout) == {"jobs": [], "trash_bytes": 0, "freed_bytes": 0}


def test_prune_empties_the_trash_of_what_a_clock_that_was_ahead_dated(
    store: Store, submit: Callable[..., str]
) -> None:
    submit()
    path = store.home / "leftover"
    path.write_bytes(bytes(1000))
    trash.throw_away(store.home, path, now=time.time() + 86_400.0)
    done = conserve("prune", "--yes")
    assert (done.returncode, done.stdout) == (0, "trash: emptied, 1.0 kB\n")
    assert trash.contents(store.home) == []


def test_prune_names_what_stays_in_the_trash_and_counts_what_went(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit()
    thrown = []
    for name in ("theirs", "ours"):
        (store.home / name).write_bytes(bytes(1000))
        thrown.append(trash.throw_away(store.home, store.home / name, now=time.time()).parent)
    theirs, rmtree = thrown[0], shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **named: None if path == theirs else rmtree(path, **named)
    )
    done = conserve("prune", "--yes", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"jobs": [], "trash_bytes": 1000, "freed_bytes": 1000}
    assert f"{theirs} cannot be deleted by this user; run: sudo rm -r {theirs}" in done.stderr
    assert trash.contents(store.home) == [theirs]


@pytest.mark.parametrize(
    ("age", "found"),
    [("30d", 2_592_000.0), ("12h", 43_200.0), ("1.5m", 90.0), ("8w", 4_838_400.0), (" 7 s ", 7.0)],
)
def test_ages_have_units(age: str, found: float) -> None:
    assert seconds(age) == found


@pytest.mark.parametrize("age", ["30", "d", "", "-1d", "1y", "1 d d"])
def test_what_is_no_age_is_said(age: str) -> None:
    with pytest.raises(UsageError, match="write a number with s, m, h, d or w"):
        seconds(age)


class Crash(BaseException):
    pass


def crash(*_: Any, **__: Any) -> None:
    raise Crash


def test_a_crash_before_the_files_go_leaves_what_the_sweep_takes(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit()
    compute(store)
    monkeypatch.setattr(removal, "delete_files", crash)
    with pytest.raises(Crash):
        removal.remove(store, job_id, now=0.0)
    assert (ids(store), folders(store)) == ([], {job_id})
    assert sweep(store, now=4e9) == 1
    assert folders(store) == set()


def test_a_crash_before_the_record_is_gone_leaves_the_job_whole(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit()
    compute(store)
    with monkeypatch.context() as patch:
        patch.setattr(removal, "delete", crash)
        with pytest.raises(Crash):
            removal.remove(store, job_id, now=0.0)
    assert sweep(store, now=4e9) == 0
    assert len(conserve("results", job_id).stdout.splitlines()) == 3
    assert conserve("check").returncode == 0


def test_a_removal_that_fails_leaves_the_folder_marked_as_the_jobs(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is rebuilt from the folders would lack the job otherwise."""
    job_id = submit()
    folder = layout.job_folder(store.home, job_id)
    before = place_of(folder).mark()
    with monkeypatch.context() as patch:
        patch.setattr(removal, "wake", crash)
        with pytest.raises(Crash):
            removal.remove(store, job_id, now=0.0, force=True)
    assert ids(store) == [job_id]
    assert place_of(folder).mark() == before
    assert before is not None
    assert before.registered


def test_a_removal_whose_answer_was_lost_goes_on(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke after the commit; else `check --repair` would take the folder for a lost job."""
    job_id = submit()

    def lost_answer(tx: Connection) -> None:
        tx.commit()
        raise StoreError("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(removal, "wake", lost_answer)
        done = conserve("rm", job_id, "--force", "--yes")
    assert (done.returncode, ids(store), folders(store)) == (0, [], set())


def test_a_removal_of_which_nothing_can_be_known_leaves_the_folder_to_the_sweep(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit()
    with monkeypatch.context() as patch:
        patch.setattr(removal, "wake", crash)
        patch.setattr(removal, "is_there", Mock(side_effect=StoreError("the database is away")))
        with pytest.raises(Crash):
            removal.remove(store, job_id, now=0.0, force=True)
    mark = place_of(layout.job_folder(store.home, job_id)).mark()
    assert mark is not None
    assert not mark.registered


@pytest.mark.parametrize("words", [["rm"], ["prune", "--older-than", "0s"]], ids=["rm", "prune"])
def test_a_job_whose_folder_is_another_users_stays_whole_and_the_others_go(
    store: Store, submit: Callable[..., str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder would stay otherwise, and `check --repair` would take it for a lost job."""
    theirs, ours = submit(), submit("d")
    compute(store)
    change, folder = FolderPlace.set_mark, layout.job_folder(store.home, theirs)

    def closed(where: FolderPlace, mark: marks.Mark) -> None:
        if where.path == folder:
            raise PermissionError(13, "Permission denied", str(folder))
        change(where, mark)

    monkeypatch.setattr(FolderPlace, "set_mark", closed)
    done = conserve(*words, *([theirs, ours] if words == ["rm"] else []), "--yes")
    assert done.returncode == 1
    assert done.stdout.startswith(f"{ours}: removed, ")
    assert theirs not in done.stdout
    assert f"{folder} cannot be written by this user; run: sudo chown -R " in done.stderr
    assert (ids(store), folders(store)) == ([theirs], {theirs})
    assert len(conserve("results", theirs).stdout.splitlines()) == 3
    assert conserve("check").returncode == 0


def test_files_that_cannot_be_deleted_are_named_and_their_bytes_are_not_free(
    store: Store,
    submit: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def closed(*_: object, **__: object) -> Path:
        raise PermissionError(13, "Permission denied")

    job_id = submit()
    monkeypatch.setattr(trash, "throw_away", closed)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert removal.remove(store, job_id, now=0.0, force=True) == 0
    assert f"sudo rm -r {layout.job_folder(store.home, job_id)}" in caplog.text


def test_where_the_trash_takes_nothing_the_files_go_at_once(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise OSError(28, "No space left on device")

    job_id = submit()
    compute(store)
    monkeypatch.setattr(trash, "throw_away", full)
    assert (removal.remove(store, job_id, now=0.0) or 0) > 0
    assert folders(store) == set()


def test_a_job_removed_under_a_run_ends_for_it(store: Store, submit: Callable[..., str]) -> None:
    """Rows of the others are done; late results of the removed one are nowhere."""
    gone, kept = submit(), submit("d")
    dead = this_process().rsplit(":", 2)[0] + ":0:abcdef"
    lease = leased(store, only=[gone], limit=2, owner=dead)
    removal.remove(store, gone, now=0.0, force=True)
    assert len(finish(store, lease).late) == 2
    assert shards.compact(store, gone, now=0.0) == 0
    assert run().returncode == 0
    assert (ids(store), rows_of(store, gone)) == ([kept], 0)


def test_the_store_says_what_it_takes(store: Store, submit: Callable[..., str]) -> None:
    small, large = submit("a"), submit(*(f"{n} " * 50 for n in range(300)))
    compute(store)
    trash.throw_away(store.home, layout.requests_file(store.home, small), now=1e9)
    said = json.loads(conserve("store", "size", "--json").stdout)
    assert [job["job_id"] for job in said["jobs"]] == [large, small]
    assert said["jobs"][1]["requests_bytes"] == 0 < said["jobs"][0]["requests_bytes"]
    assert said["jobs"][0]["bytes"] >= said["jobs"][0]["requests_bytes"] + said["jobs"][0]["results_bytes"]
    assert said["trash_bytes"] > 0
    assert said["unknown_bytes"] == 0
    parts = said["database_bytes"] + said["trash_bytes"] + sum(job["bytes"] for job in said["jobs"])
    assert parts <= said["total_bytes"]
    shown = conserve("store", "size").stdout.splitlines()
    assert shown[1].startswith(large)
    assert shown[-1].startswith("total")


def test_folders_of_another_database_are_counted_as_unknown(store: Store, submit: Callable[..., str]) -> None:
    submit()
    other = layout.job_folder(store.home, "other")
    other.mkdir()
    (other / "file").write_bytes(bytes(5000))
    assert json.loads(conserve("store", "size", "--json").stdout)["unknown_bytes"] == 5000


@pytest.mark.parametrize("elsewhere", [None, "data", "home/data", "a link"])
def test_each_part_of_a_store_is_measured(
    store: Store, settings: Settings, tmp_path: Path, elsewhere: str | None
) -> None:
    """Files of each job, oldest first; the database, the trash, and folders that no job has. All count once."""
    if elsewhere == "a link":
        (tmp_path / "disk").mkdir()
        layout.jobs_folder(store.home).symlink_to(tmp_path / "disk")
    elif elsewhere:
        store.keep_place(str(tmp_path / elsewhere))
        store = Store.open(settings)
    for job_id in ("b", "a"):
        (layout.job_folder(store.local, job_id) / layout.RESULTS).mkdir(parents=True)
        with store.write() as tx:
            source = catalog.Source(path=None, format="jsonl")
            catalog.add(tx, job_id, JobTerms(), source=source, task="{}", num_rows=7, now=0.0)
    folder = layout.job_folder(store.local, "b")
    sizes = {"requests.parquet": 300, "inputs.parquet": 20, "results/x": 1, "results/y": 1, "job.json": 5000}
    for name, length in sizes.items():
        (folder / name).write_bytes(bytes(length))
    (layout.jobs_folder(store.local) / "other").mkdir()
    (layout.jobs_folder(store.local) / "other" / "file").write_bytes(bytes(7))
    (store.local / "thrown").write_bytes(bytes(40))
    trash.throw_away(store.local, store.local / "thrown", now=1e9)
    with store.write() as tx:
        catalog.move(tx, "a", "cancel", now=8.0)
    found = removal.room(store)
    used = [(job.job_id, job.requests_bytes, job.inputs_bytes, job.results_bytes) for job in found.jobs]
    assert used == [("b", 300, 20, 2), ("a", 0, 0, 0)]
    assert [(job.bytes, job.rows, job.finished_at, job.finished) for job in found.jobs] == [
        (5322, 7, None, False),
        (0, 7, 8.0, True),
    ]
    assert (found.trash_bytes, found.unknown_bytes) == (40, 7)
    databases = [path for path in store.home.iterdir() if path.name.startswith("conserve.db")]
    assert found.database_bytes == sum(path.stat().st_size for path in databases)
    places = (store.home, store.local, layout.jobs_folder(store.local).resolve())
    files = {path for place in places for path in place.rglob("*") if path.is_file()}
    assert found.total_bytes == sum(path.stat().st_size for path in files)
    if elsewhere:
        store.close()


def test_jobs_that_ended_by_a_moment_are_those_that_are_finished(
    store: Store, submit: Callable[..., str]
) -> None:
    ended = [
        ("completed", 9.0),
        ("cancelled", 10.0),
        ("completed", 10.5),
        ("failed", 1.0),
        ("completed", None),
    ]
    jobs = [submit() for _ in ended]
    with store.write() as tx:
        for job_id, (state, finished_at) in zip(jobs, ended, strict=True):
            tx.exec_driver_sql(
                f"update job set state = '{state}', finished_at = {finished_at or 'null'} where id = '{job_id}'"
            )
    for moment, found in ((10.0, [jobs[0], jobs[1], jobs[4]]), (0.0, [jobs[4]])):
        assert [each.job_id for each in removal.usage(store, removal.ended_by(moment))] == found


def test_jobs_of_many_ids_are_measured_the_oldest_first(store: Store, submit: Callable[..., str]) -> None:
    """SQLite takes 32,766 parameters."""
    first, _, last = submit(), submit(), submit()
    named = [last, *(f"gone-{n}" for n in range(33_000)), first]
    assert [each.job_id for each in removal.usage(store, removal.among(named))] == [first, last]
    assert removal.usage(store, removal.among([])) == []


@pytest.mark.parametrize("words", [["rm"], ["prune", "--older-than", "9d"]], ids=["rm", "prune"])
def test_only_the_jobs_that_go_are_measured(
    store: Store, submit: Callable[..., str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at all files takes minutes in a store with thousands of jobs on a slow disk."""
    old, _ = submit(), submit("d")
    compute(store)
    with store.write() as tx:
        tx.exec_driver_sql(f"update job set finished_at = finished_at - 864000 where id = '{old}'")
    measured: list[str] = []
    job_bytes = removal.job_bytes

    def noted(data: Path, job_id: str) -> removal.JobBytes:
        measured.append(job_id)
        return job_bytes(data, job_id)

    monkeypatch.setattr(removal, "job_bytes", noted)
    assert conserve(*words, *([old] if words == ["rm"] else []), "--yes").returncode == 0
    assert measured == [old]


@pytest.mark.parametrize("words", [["rm"], ["prune", "--older-than", "0s"]], ids=["rm", "prune"])
def test_where_the_disk_of_the_files_is_away_no_job_is_removed(
    store: Store, submit: Callable[..., str], words: list[str]
) -> None:
    """Folders would stay on that disk, and no record would name them."""
    job_id = submit()
    compute(store)
    jobs = layout.jobs_folder(store.home)
    jobs.rename(store.home / "away")
    for mounted in (False, True):
        done = conserve(*words, *([job_id] if words == ["rm"] else []), "--yes")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{jobs} is missing or empty; mount its disk" in done.stderr
        assert ids(store) == [job_id]
        if not mounted:
            jobs.mkdir(exist_ok=True)
    jobs.rmdir()
    (store.home / "away").rename(jobs)
    assert conserve("rm", job_id, "--yes").returncode == 0
    assert folders(store) == set()


def test_a_job_whose_folder_is_gone_is_removed_all_the_same(store: Store, submit: Callable[..., str]) -> None:
    job_id, other = submit(), submit("d")
    held = leased(store, limit=2, only=[job_id])
    shutil.rmtree(layout.job_folder(store.home, job_id))
    with pytest.raises(
        JobRefused, match=f"job {job_id} is queued and not finished; add --force to remove it"
    ):
        removal.remove(store, job_id, now=0.0)
    assert removal.remove(store, job_id, now=0.0, force=True) == 0
    assert (rows_of(store, job_id), finish(store, held).written) == (0, [])
    assert (ids(store), folders(store)) == ([other], {other})


def test_the_bytes_that_a_removal_frees_are_those_of_the_folder(
    store: Store, submit: Callable[..., str]
) -> None:
    job_id = submit()
    compute(store)
    (used,) = removal.usage(store)
    assert 0 <= (removal.remove(store, job_id, now=0.0) or 0) - used.bytes < 100, (
        "its mark tells of the removal"
    )
    assert list(trash.folder(store.home).iterdir()) == []


def finished_in_journal(store: Store, submit: Callable[..., str]) -> str:
    """A job of which a result lies in the journal."""
    job_id = submit()
    finish(store, leased(store), of=[0])
    return job_id


def test_a_compaction_that_comes_after_a_removal_leaves_no_folder(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, read = finished_in_journal(store, submit), shards.oldest

    def removed_meanwhile(*given: Any, **named: Any) -> Any:
        if rows := read(*given, **named):
            removal.remove(store, job_id, now=0.0, force=True)
        return rows

    monkeypatch.setattr(shards, "oldest", removed_meanwhile)
    assert shards.compact(store, job_id, now=0.0) == 0
    assert folders(store) == set()
    assert trash.contents(store.home) == []


def test_a_removal_waits_for_a_compaction_and_takes_its_file_too(
    store: Store, settings: Settings, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, write = finished_in_journal(store, submit), shards.write_file
    other = Store.open(settings)
    removing = threading.Thread(
        target=removal.remove, args=(other, job_id), kwargs={"now": 0.0, "force": True}
    )

    def removed_meanwhile(*given: Any, **named: Any) -> Any:
        removing.start()
        while ids(store):
            time.sleep(0.001)
        return write(*given, **named)

    monkeypatch.setattr(shards, "write_file", removed_meanwhile)
    assert shards.compact(store, job_id, now=0.0) == 0
    removing.join()
    other.close()
    assert folders(store) == set()
    assert trash.contents(store.home) == []
