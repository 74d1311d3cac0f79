"""The sweep takes what is provably this store's own orphan, and takes it to the trash."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

from conserve.config import Settings, load
from conserve.errors import StoreFull
from conserve.jobs.inputs.source import open_input
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog, shards
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.uploads import make_folder
from conserve.store.database.store import Store
from conserve.store.files import job_folders, layout, trash
from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.marks import MARK, Mark
from conserve.store.files.place import place_of
from conserve.store.upkeep.sweep import STALE_AFTER_S, SWEPT, claim_turn, modified_at, sweep
from tests.commands import REPOSITORY
from tests.conftest import WriteInput
from tests.store_rows import add_job, finish, leased, select, while_writing
from tests.submitting import submit

HOUR_S = 3600.0
LATER = 4e9  # years after everything that a test writes
TASK = Task(kind=Kind.PROMPT, template="{{ q }}")


def everything(store: Store) -> set[Path]:
    """All files and folders of jobs but the marks."""
    return {path for path in layout.jobs_folder(store.home).rglob("*") if path.name != MARK}


def orphan(store: Store, name: str = "orphan", store_id: str | None = None, **mark: Any) -> Path:
    """A folder that no database names, of this store unless said otherwise."""
    folder = layout.job_folder(store.home, name)
    folder.mkdir(parents=True)
    (folder / layout.REQUESTS).write_bytes(b"of a job that never came to be")
    place_of(folder).set_mark(Mark(store_id=store.id if store_id is None else store_id, **mark))
    return folder


def aged(path: Path, at: float) -> None:
    """Let a folder and all in it be as old as this."""
    for each in (path, *path.rglob("*")):
        os.utime(each, (at, at))


def compacted_job(store: Store, rows: int = 2) -> str:
    """A finished job, its results in a shard."""
    add_job(store, rows=rows)
    finish(store, leased(store, limit=rows))
    assert shards.compact(store, "job-1", now=0.0) == rows
    return "job-1"


@pytest.fixture
def other(settings: Settings, tmp_path: Path) -> Iterator[Store]:
    """Another database over the same home."""
    elsewhere = load({"home": settings.home, "store": f"sqlite:///{tmp_path / 'other.db'}"}, environ={})
    opened = Store.open(elsewhere)
    yield opened
    opened.close()


def test_each_store_has_an_id_of_its_own_that_stays(store: Store, other: Store, settings: Settings) -> None:
    again = Store.open(settings)
    assert store.id == again.id != other.id
    assert store.id
    again.close()


def test_jobs_of_another_database_over_the_same_home_are_left_alone(
    store: Store, other: Store, write_input: WriteInput
) -> None:
    """Finished results and queued requests, however old."""
    path = write_input(q=["a", "b"])
    queued = submit(other, str(path), TASK).job_id
    done = submit(other, str(path), TASK).job_id
    finish(other, leased(other, only=[done]))
    shards.compact(other, done, now=0.0)
    before = everything(store)
    assert {path.name for path in layout.jobs_folder(store.home).iterdir()} == {queued, done}
    assert sweep(store, now=LATER) == 0
    assert everything(store) == before


def test_jobs_of_a_database_that_was_moved_aside_are_left_alone(
    store: Store, settings: Settings, write_input: WriteInput
) -> None:
    submit(store, str(write_input(q=["a"])), TASK)
    store.close()
    (settings.home / "conserve.db").rename(settings.home / "conserve.db.damaged")
    before = everything(store)
    fresh = Store.open(settings)
    assert fresh.id != store.id
    assert sweep(fresh, now=LATER) == 0
    fresh.close()
    assert everything(store) == before


def test_jobs_submitted_since_a_copy_of_the_database_was_made_are_left_alone(
    store: Store, settings: Settings, write_input: WriteInput, tmp_path: Path
) -> None:
    """The copy has the same id, and does not know them."""
    with sqlite3.connect(settings.home / "conserve.db") as database:
        database.execute("vacuum into ?", [str(tmp_path / "copy.db")])
    database.close()
    submit(store, str(write_input(q=["a"])), TASK)
    before = everything(store)
    copy = Store.open(load({"home": settings.home, "store": f"sqlite:///{tmp_path / 'copy.db'}"}, environ={}))
    assert copy.id == store.id
    assert sweep(copy, now=LATER) == 0
    copy.close()
    assert everything(store) == before


def test_a_folder_without_a_mark_or_with_half_of_one_stays(store: Store) -> None:
    """Earlier versions made none."""
    for name, content in (("none", None), ("half", '{"store_id": "'), ("empty", ""), ("list", "[]")):
        folder = orphan(store, name)
        (folder / MARK).unlink()
        if content is not None:
            (folder / MARK).write_text(content)
    (layout.jobs_folder(store.home) / "file").write_bytes(b"")
    orphan(store, "nameless", store_id="")
    before = everything(store)
    assert sweep(store, now=LATER) == 0
    assert everything(store) == before


def test_an_orphan_goes_to_the_trash_after_an_hour(store: Store) -> None:
    compacted_job(store)
    kept = everything(store)
    folder = orphan(store)
    results = layout.job_folder(store.home, "job-1") / layout.RESULTS
    (results / "crashed.parquet").write_bytes(b"no transaction names it")
    (results / "crashed.tmp").write_bytes(b"nor this")
    for path in everything(store) - kept:
        os.utime(path, (1000.0, 1000.0))
    aged(folder, 1000.0)
    assert sweep(store, now=1000.0 + HOUR_S) == 0
    assert sweep(store, now=1000.5 + HOUR_S) == 3
    assert everything(store) == kept
    assert sweep(store, now=1000.5 + HOUR_S) == 0
    thrown = {
        str(path.relative_to(bin)): path.read_bytes()
        for bin in trash.contents(store.home)
        for path in bin.rglob("*")
        if path.is_file() and path.name != MARK
    }
    assert thrown == {
        "jobs/orphan/requests.parquet": b"of a job that never came to be",
        "jobs/job-1/results/crashed.parquet": b"no transaction names it",
        "jobs/job-1/results/crashed.tmp": b"nor this",
    }


def test_the_trash_is_kept_for_a_week(store: Store) -> None:
    folder = orphan(store)
    aged(folder, 0.0)
    assert sweep(store, now=1e6) == 1
    sweep(store, now=1e6 + trash.KEEP_S - 1)
    (bin,) = trash.contents(store.home)
    foreign = trash.folder(store.home) / "not-ours"
    foreign.mkdir()
    assert list(trash.found(store.home, "jobs/orphan/requests.parquet")) == [
        bin / "jobs" / "orphan" / "requests.parquet"
    ]
    sweep(store, now=1e6 + trash.KEEP_S)
    assert trash.contents(store.home) == []
    assert foreign.is_dir()


HOLD = """
import sys
from pathlib import Path
from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.marks import Mark
with FolderPlace(Path(sys.argv[1])).held(Mark(store_id="unused"), alone=True):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def process_in(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that works in a folder until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_folder_in_which_a_process_works_stays_however_long_that_takes(store: Store) -> None:
    """A submit that waits for its standard input for hours, say; once the process has ended it goes."""
    folder = orphan(store)
    with process_in(folder) as process:
        assert sweep(store, now=LATER) == 0
        assert folder.is_dir()
        process.kill()
        process.wait()
        assert sweep(store, now=LATER) == 1
    assert not folder.exists()


def test_a_submit_holds_its_folder_until_the_job_is_registered(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[int] = []

    def then_sweep(function: Callable[..., Any]) -> Callable[..., Any]:
        def after(*arguments: Any, **named: Any) -> Any:
            found = function(*arguments, **named)
            swept.append(sweep(store, now=LATER))
            return found

        return after

    monkeypatch.setattr(job_folders, "adopt", then_sweep(job_folders.adopt))
    monkeypatch.setattr("conserve.jobs.requests.submit.open_input", then_sweep(open_input))
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    assert swept == [0, 0]
    assert layout.requests_file(store.home, job_id).is_file()
    mark = place_of(layout.job_folder(store.home, job_id)).mark()
    assert mark is not None
    assert mark.registered
    assert not trash.folder(store.home).exists()


def test_a_submit_that_a_crash_ended_is_swept_up(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the folder's name and the job's record."""

    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    monkeypatch.setattr(catalog, "add", crash)
    monkeypatch.setattr("conserve.jobs.requests.submit.discard_unregistered", crash)
    with pytest.raises(Crash):
        submit(store, str(write_input(q=["a"])), TASK)
    assert len(list(layout.jobs_folder(store.home).iterdir())) == 1
    assert sweep(store, now=LATER) == 1
    assert list(layout.jobs_folder(store.home).iterdir()) == []


def test_a_record_that_may_have_been_written_keeps_its_folder(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke after the commit, before its answer arrived."""
    add = catalog.add

    def lost_answer(*arguments: Any, **named: Any) -> None:
        add(*arguments, **named)
        arguments[0].commit()
        raise StoreFull("the answer was lost")

    monkeypatch.setattr(catalog, "add", lost_answer)
    with pytest.raises(StoreFull):
        submit(store, str(write_input(q=["a"])), TASK)
    ((job_id,),) = select(store, "select id from job")
    assert layout.requests_file(store.home, job_id).is_file()


def test_a_shard_that_waits_to_be_registered_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was suspended for two hours after the file got its name; then the rows move."""
    add_job(store, rows=100)
    finish(store, leased(store, limit=100))
    write = FolderPlace.write

    def then_sleep(place: FolderPlace, scratch: Path) -> None:
        write(place, scratch)
        assert sweep(store, now=place.path.stat().st_mtime + 2 * HOUR_S) == 0

    monkeypatch.setattr(FolderPlace, "write", then_sleep)
    assert shards.compact(store, "job-1", now=0.0) == 100
    ((file,),) = select(store, "select file from shard")
    assert pq.read_metadata(store.home / file).num_rows == 100


def test_a_shard_swept_up_on_a_file_system_without_locks_leaves_its_rows_in_the_journal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store, rows=2)
    finish(store, leased(store))
    write = FolderPlace.write

    def then_lose_it(place: FolderPlace, scratch: Path) -> None:
        write(place, scratch)
        trash.throw_away(store.home, place.path, now=0.0)

    with monkeypatch.context() as patch:
        patch.setattr(FolderPlace, "write", then_lose_it)
        assert shards.compact(store, "job-1", now=0.0) == 0
    assert select(store, "select position from journal order by 1") == [(0,), (1,)]
    assert shards.compact(store, "job-1", now=0.0) == 2


def test_a_shard_registered_while_the_sweep_looked_is_not_swept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep looks again under the lock that registering takes."""
    compacted_job(store)
    (file,) = (layout.job_folder(store.home, "job-1") / layout.RESULTS).glob("*")
    monkeypatch.setattr("conserve.store.upkeep.sweep.unregistered", lambda *_: [file])
    assert sweep(store, now=LATER) == 0
    assert file.is_file()


def test_without_locks_nothing_is_swept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = orphan(store)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with place_of(folder).held(Mark(store_id=store.id), alone=True):
        pass
    assert sweep(store, now=LATER) == 0


def test_a_job_of_an_earlier_version_gets_its_mark_with_its_next_shard(store: Store) -> None:
    """Before that nothing of it is swept: a process of that version would hold no lock."""
    add_job(store, rows=2)
    folder = layout.job_folder(store.home, "job-1")
    (folder / layout.RESULTS).mkdir()
    left = folder / layout.RESULTS / "crashed.parquet"
    left.write_bytes(b"")
    assert place_of(folder).mark() is None
    assert sweep(store, now=LATER) == 0
    finish(store, leased(store))
    shards.compact(store, "job-1", now=0.0)
    assert place_of(folder).mark() == Mark(store_id=store.id, registered=True)
    assert sweep(store, now=LATER) == 1
    assert not left.exists()


def test_a_sweep_leaves_a_submit_alone_that_has_been_at_it_for_hours_on_another_machine(store: Store) -> None:
    """The folder of a submit is as old as its first file; what is being written to is young."""
    folder = orphan(store, ".new-1")
    nested = folder / "sort-1"
    nested.mkdir()
    young = nested / "run.arrow"
    young.write_bytes(b"being written")
    now = young.stat().st_mtime
    for path in (folder, nested):
        os.utime(path, (now - 9 * HOUR_S,) * 2)
    assert sweep(store, now=now) == 0
    aged(folder, now - 9 * HOUR_S)
    assert sweep(store, now=now) == 1
    assert not folder.exists()


def test_what_cannot_be_moved_stays_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is swept, and nothing empty is left in the trash."""
    move = shutil.move

    def refuses(path: Path, to: Path) -> Any:
        if "stays" in path.name:
            raise PermissionError(1, "Operation not permitted", str(path))
        return move(path, to)

    job_id = compacted_job(store)
    results = layout.job_folder(store.home, job_id) / layout.RESULTS
    sent = store.home / layout.SENDING / "left"
    for path in (results / "stays.parquet", sent):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    folders = [orphan(store, name) for name in ("stays-1", "goes", "stays-2")]
    old = trash.folder(store.home) / "1000000000-old"
    old.mkdir(parents=True)
    monkeypatch.setattr(shutil, "move", refuses)
    assert sweep(store, now=LATER) == 1
    assert [folder.is_dir() for folder in folders] == [True, False, True]
    assert (old.exists(), sent.exists()) == (False, False)
    (thrown,) = trash.contents(store.home)
    assert (thrown / "jobs" / "goes").is_dir()


def test_a_folder_is_moved_while_nobody_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trash may be on another disk, to which files are copied."""
    orphan(store)
    moved = while_writing(monkeypatch, (shutil, "move"))
    assert sweep(store, now=LATER) == 1
    assert (moved, everything(store)) == ([], set())
    (thrown,) = trash.contents(store.home)
    assert (thrown / "jobs" / "orphan").is_dir()


def test_a_folder_whose_move_was_killed_is_swept_by_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged(orphan(store), 1000.0)
    with monkeypatch.context() as kill:
        kill.setattr(shutil, "move", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sweep(store, now=LATER)
    assert sweep(store, now=LATER) == 1
    assert everything(store) == set()


def test_a_folder_that_may_not_be_entered_is_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sweep is a part of each start: a job of another user must hold no run up."""
    folder = layout.job_folder(store.home, compacted_job(store))
    scan = os.scandir

    def refuses(path: Any) -> Any:
        if str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuses)
    monkeypatch.setattr(os, "listdir", lambda path: [entry.name for entry in refuses(path)])
    assert sweep(store, now=LATER) == 0
    assert place_of(folder).size() == 0


def test_what_is_gone_already_is_as_young_as_can_be(tmp_path: Path) -> None:
    assert modified_at(tmp_path / "gone") == float("inf")


def test_a_sweep_of_a_store_without_jobs_finds_nothing(store: Store) -> None:
    assert sweep(store, now=LATER) == 0


def test_a_home_that_was_copied_is_swept_like_the_first(store: Store, tmp_path: Path) -> None:
    folder = orphan(store)
    store.close()
    shutil.copytree(store.home, tmp_path / "copy")
    copy = Store.open(load({"home": tmp_path / "copy"}, environ={}))
    assert sweep(copy, now=LATER) == 1
    copy.close()
    assert folder.is_dir()


def test_what_was_to_be_uploaded_and_was_left_goes_after_an_hour(store: Store) -> None:
    sending = store.home / layout.SENDING
    sending.mkdir()
    for name, at in (("left", 999.0), ("young", 1000.0)):
        (sending / name).write_bytes(b"part of an object")
        os.utime(sending / name, (at, at))
    assert sweep(store, now=1000.0 + HOUR_S) == 0
    assert [path.name for path in sending.iterdir()] == ["young"]
    assert not trash.folder(store.home).exists()


def test_a_part_of_an_upload_that_was_cut_off_goes_after_an_hour(store: Store) -> None:
    uploaded = make_folder(store)
    for name, at in (("cut.tmp", 999.0), ("whole.jsonl", 999.0), ("coming.tmp", 1000.0)):
        (uploaded / name).write_bytes(b"part of a file")
        os.utime(uploaded / name, (at, at))
    sweep(store, now=1000.0 + HOUR_S)
    assert {path.name for path in uploaded.iterdir()} == {"whole.jsonl", "coming.tmp"}


def test_a_bucket_is_swept_once_an_hour_by_each_machine(tmp_path: Path) -> None:
    """A clock that was turned back by hours does not put the next sweep off."""
    begun = tmp_path.stat().st_mtime
    assert claim_turn(tmp_path, now=begun)
    noted = (tmp_path / SWEPT).stat().st_mtime
    assert noted >= begun - 1
    assert not claim_turn(tmp_path, now=noted + HOUR_S - 1)
    assert not claim_turn(tmp_path, now=noted - HOUR_S + 1)
    assert claim_turn(tmp_path, now=noted + HOUR_S)
    os.utime(tmp_path / SWEPT, (9e9, 9e9))
    assert claim_turn(tmp_path, now=noted)
    assert (tmp_path / SWEPT).stat().st_mtime < 9e9
    assert claim_turn(tmp_path / "gone", now=noted), "what cannot be noted is no reason to wait"


def test_a_folder_that_is_registered_while_the_sweep_looks_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep looks again under the lock that registering takes; the mark is changed only after that."""
    folder = orphan(store)
    real = catalog.ids
    monkeypatch.setattr(catalog, "ids", lambda tx: [])
    with store.write() as tx:
        source = catalog.Source(path=None, format="jsonl")
        catalog.add(tx, folder.name, JobTerms(), source=source, task="{}", num_rows=1, now=0.0)
        assert real(tx) == [folder.name]
    assert sweep(store, now=LATER) == 0
    assert folder.is_dir()


def test_files_of_a_folder_of_another_store_stay(store: Store) -> None:
    """The database names a job of the same id, say one that was copied by hand."""
    job_id = compacted_job(store)
    place_of(layout.job_folder(store.home, job_id)).set_mark(Mark(store_id="another", registered=True))
    left = layout.job_folder(store.home, job_id) / layout.RESULTS / "crashed.parquet"
    left.write_bytes(b"of whom?")
    assert sweep(store, now=LATER) == 0
    assert left.is_file()


def test_a_mark_says_which_store_the_job_is_of_and_what_was_submitted(
    store: Store, write_input: WriteInput
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    mark = place_of(layout.job_folder(store.home, job_id)).mark()
    assert mark is not None
    assert (mark.store_id, mark.registered) == (store.id, True)
    with store.read() as tx:
        assert mark.record == catalog.record(tx, job_id)
    assert STALE_AFTER_S == HOUR_S


def test_a_mark_that_is_not_what_was_written_is_none(store: Store, write_input: WriteInput) -> None:
    folder = layout.job_folder(store.home, submit(store, str(write_input(q=["a"])), TASK).job_id)
    content = (folder / MARK).read_bytes()
    for flipped in range(0, len(content), 7):
        (folder / MARK).write_bytes(
            content[:flipped] + bytes([content[flipped] ^ 1]) + content[flipped + 1 :]
        )
        assert place_of(folder).mark() is None
    assert place_of(folder / "nowhere").mark() is None
