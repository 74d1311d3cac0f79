"""Marks of folders and the locks on them: who works in a folder, whose it is, and what becomes of it."""

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from conserve.store.files import locks, marks
from conserve.store.files.marks import MARK, Mark

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
    with marks.held(folder, OURS, alone=alone):
        assert is_free(folder / MARK, fcntl.LOCK_SH) is shared
        assert not is_free(folder / MARK, fcntl.LOCK_EX)
        with marks.seized(folder, "ours") as seized:
            assert seized is None, "a process works there"
    assert is_free(folder / MARK, fcntl.LOCK_EX)


def test_who_holds_a_folder_marks_it_unless_it_has_a_mark(folder: Path) -> None:
    assert marks.of(folder) is None
    with marks.held(folder, OURS, alone=True):
        assert marks.of(folder) == OURS
    with marks.held(folder, Mark(store_id="theirs"), alone=False):
        assert marks.of(folder) == OURS
    assert not (folder / MARK).stat().st_mode & 0o111, "it is no program"


def test_a_folder_is_seized_by_one_process_and_only_by_its_store(folder: Path) -> None:
    marks.change(folder, OURS)
    before = open_files()
    with marks.seized(folder, "ours") as seized, marks.seized(folder, "ours") as again:
        assert (seized, again) == (OURS, None)
    for store_id in ("theirs", ""):
        with marks.seized(folder, store_id) as seized:
            assert seized is None
    with marks.seized(folder / "none", "ours") as seized:
        assert seized is None
    marks.change(folder, Mark(store_id=""))
    with marks.seized(folder, "") as seized:
        assert seized is None, "the mark of a store without an id belongs to no store"
    assert open_files() == before


@pytest.mark.usefixtures("without_locks")
def test_without_locks_work_goes_on_and_nothing_is_seized(folder: Path) -> None:
    with marks.held(folder, OURS, alone=True), marks.free(folder), locks.alone(folder):
        assert marks.of(folder) == OURS
    with marks.seized(folder, "ours") as seized:
        assert seized is None


def test_a_free_folder_is_held_and_one_without_a_mark_is_free(folder: Path) -> None:
    with marks.free(folder):
        assert list(folder.iterdir()) == []
    marks.change(folder, OURS)
    before = open_files()
    with marks.free(folder):
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
    marks.drop(folder / "none")
    marks.drop(folder)
    assert folder.is_dir(), "it has no mark"
    marks.change(folder, OURS)
    (folder / "results").mkdir()
    marks.drop(folder)
    assert marks.of(folder) == OURS
    (folder / "results").rmdir()
    marks.drop(folder)
    assert not folder.exists()


def test_a_mark_is_rewritten_in_its_file_however_long_it_was(folder: Path) -> None:
    marks.register(folder, "ours", {"id": "job-1", "task": "x" * 500})
    inode = (folder / MARK).stat().st_ino
    assert not (folder / MARK).stat().st_mode & 0o111
    assert marks.of(folder) == Mark(
        store_id="ours", registered=True, record={"id": "job-1", "task": "x" * 500}
    )
    marks.change(folder, OURS)
    assert (marks.of(folder), (folder / MARK).stat().st_ino) == (OURS, inode)


def test_a_registration_that_fails_is_no_error_and_a_change_that_fails_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks.register(folder / "none", "ours", {})
    with pytest.raises(FileNotFoundError):
        marks.change(folder / "none", OURS)
    flushed: list[int] = []
    monkeypatch.setattr("os.fsync", flushed.append)
    marks.change(folder, OURS)
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
    assert marks.of(folder) == found
    with marks.seized(folder, "ours") as seized:
        assert seized == found


def test_a_mark_that_cannot_be_read_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    marks.change(folder, OURS)
    monkeypatch.setattr("os.pread", broken)
    assert marks.of(folder) is None


def test_no_file_stays_open(folder: Path) -> None:
    before = open_files()
    with marks.held(folder, OURS, alone=True):
        assert marks.of(folder) == OURS
    marks.change(folder, OURS)
    assert open_files() == before
