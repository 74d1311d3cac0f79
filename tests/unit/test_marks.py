"""Marks of folders and the locks on them: who works in a folder, whose it is, and what becomes of it."""

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from conserve.store.files import job_folders, locks
from conserve.store.files.marks import MARK, Mark
from conserve.store.files.place import place_of

OURS = Mark(store_id="ours")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job-1"
    folder.mkdir()
    return folder


def is_free(path: Path, how: int) -> bool:
    """True if another process would get this lock on a file or folder now."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("alone", "shared"), [(True, False), (False, True)])
def test_a_folder_is_held_alone_or_beside_others_as_long_as_the_work_takes(
    folder: Path, alone: bool, shared: bool
) -> None:
    with place_of(folder).held(OURS, alone=alone):
        assert is_free(folder / MARK, fcntl.LOCK_SH) is shared
        assert not is_free(folder / MARK, fcntl.LOCK_EX)
        with place_of(folder).seized("ours") as seized:
            assert seized is None, "a process works there"
    assert is_free(folder / MARK, fcntl.LOCK_EX)


def test_who_holds_a_folder_marks_it_unless_it_has_a_mark(folder: Path) -> None:
    assert place_of(folder).mark() is None
    with place_of(folder).held(OURS, alone=True):
        assert place_of(folder).mark() == OURS
    with place_of(folder).held(Mark(store_id="theirs"), alone=False):
        assert place_of(folder).mark() == OURS
    assert not (folder / MARK).stat().st_mode & 0o111, "it is no program"


def test_a_folder_is_seized_by_one_process_and_only_by_its_store(folder: Path) -> None:
    place_of(folder).set_mark(OURS)
    before = open_files()
    with place_of(folder).seized("ours") as seized, place_of(folder).seized("ours") as again:
        assert (seized, again) == (OURS, None)
    for store_id in ("theirs", ""):
        with place_of(folder).seized(store_id) as seized:
            assert seized is None
    with place_of(folder / "none").seized("ours") as seized:
        assert seized is None
    place_of(folder).set_mark(Mark(store_id=""))
    with place_of(folder).seized("") as seized:
        assert seized is None, "the mark of a store without an id belongs to no store"
    assert open_files() == before


@pytest.mark.usefixtures("without_locks")
def test_without_locks_work_goes_on_and_nothing_is_seized(folder: Path) -> None:
    with place_of(folder).held(OURS, alone=True), place_of(folder).free(), locks.alone(folder):
        assert place_of(folder).mark() == OURS
    with place_of(folder).seized("ours") as seized:
        assert seized is None


def test_a_free_folder_is_held_and_one_without_a_mark_is_free(folder: Path) -> None:
    with place_of(folder).free():
        assert list(folder.iterdir()) == []
    place_of(folder).set_mark(OURS)
    before = open_files()
    with place_of(folder).free():
        assert not is_free(folder / MARK, fcntl.LOCK_SH)
    assert is_free(folder / MARK, fcntl.LOCK_EX)
    assert open_files() == before


def test_what_is_held_against_others_is_free_afterwards(folder: Path) -> None:
    before = open_files()
    with locks.alone(folder):
        assert not is_free(folder, fcntl.LOCK_SH)
    assert is_free(folder, fcntl.LOCK_EX)
    assert open_files() == before


def test_a_folder_goes_with_its_mark_alone(folder: Path) -> None:
    place_of(folder / "none").drop_bare()
    place_of(folder).drop_bare()
    assert folder.is_dir(), "it has no mark"
    place_of(folder).set_mark(OURS)
    (folder / "results").mkdir()
    place_of(folder).drop_bare()
    assert place_of(folder).mark() == OURS
    (folder / "results").rmdir()
    place_of(folder).drop_bare()
    assert not folder.exists()


def test_a_mark_is_rewritten_in_its_file_however_long_it_was(folder: Path) -> None:
    job_folders.register(folder, "ours", {"id": "job-1", "task": "x" * 500})
    inode = (folder / MARK).stat().st_ino
    assert not (folder / MARK).stat().st_mode & 0o111
    assert place_of(folder).mark() == Mark(
        store_id="ours", registered=True, record={"id": "job-1", "task": "x" * 500}
    )
    place_of(folder).set_mark(OURS)
    assert (place_of(folder).mark(), (folder / MARK).stat().st_ino) == (OURS, inode)


def test_a_registration_that_fails_is_no_error_and_a_change_that_fails_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_folders.register(folder / "none", "ours", {})
    with pytest.raises(FileNotFoundError):
        place_of(folder / "none").set_mark(OURS)
    flushed: list[int] = []
    monkeypatch.setattr("os.fsync", flushed.append)
    place_of(folder).set_mark(OURS)
    assert len(flushed) == 1


def outer(mark: Any, checksum: int | None = None) -> bytes:
    """A file of a mark with the right checksum, unless another is given."""
    body = mark if isinstance(mark, str) else json.dumps(mark)
    return json.dumps(
        {"mark": body, "checksum": zlib.crc32(body.encode()) if checksum is None else checksum}
    ).encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (outer({"store_id": "ours"}), OURS),
        (outer({"store_id": "ours"}, checksum=1), None),
        (outer({"store_id": "ours", "later": 1}), None),
        (outer({}), None),
        (outer("{"), None),
        (outer("[]"), None),
        *[(content, None) for content in (b"", b"{", b"[]", b"{}", b'{"mark": 3, "checksum": 3}', b"\xff")],
    ],
)
def test_a_mark_that_does_not_fit_is_none(folder: Path, content: bytes, found: Mark | None) -> None:
    (folder / MARK).write_bytes(content)
    assert place_of(folder).mark() == found
    with place_of(folder).seized("ours") as seized:
        assert seized == found


def test_a_mark_that_cannot_be_read_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    place_of(folder).set_mark(OURS)
    monkeypatch.setattr("os.pread", broken)
    assert place_of(folder).mark() is None


def test_no_file_stays_open(folder: Path) -> None:
    before = open_files()
    with place_of(folder).held(OURS, alone=True):
        assert place_of(folder).mark() == OURS
    place_of(folder).set_mark(OURS)
    assert open_files() == before
