"""Temporary files bear the name of their process, so that a later process removes those of killed ones."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from conserve import owners
from conserve.store.sql import scratch


@pytest.fixture
def dead_process() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path: Path, dead_process: int) -> None:
    with scratch.place(tmp_path) as mine:
        mine.write_text("half a file")
        theirs = tmp_path / mine.name.replace(f":{os.getpid()}:", f":{dead_process}:")
        theirs.mkdir()
        (theirs / "spilled").write_text("half a query")
        elsewhere = tmp_path / mine.name.replace(scratch.socket.gethostname(), "another-machine")
        elsewhere.write_text("")
        with scratch.place(tmp_path) as second:
            assert not second.exists()
            assert not theirs.exists()
            assert mine.exists()
            assert elsewhere.exists(), "nothing is known of other machines"
    assert not mine.exists()


def test_nothing_is_made_and_what_the_process_makes_goes_at_the_end(tmp_path: Path) -> None:
    with scratch.place(tmp_path) as file, scratch.place(tmp_path) as folder, scratch.place(tmp_path) as link:
        assert len({file, folder, link}) == 3
        assert not list(tmp_path.iterdir())
        file.write_text("rows")
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_text("rows")
        kept = tmp_path / "kept"
        kept.mkdir()
        (kept / "file").write_text("not ours")
        link.symlink_to(kept)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()


def test_it_goes_also_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch.place(tmp_path) as path:
            path.write_text("rows")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.iterdir())


def test_only_files_of_a_dead_process_of_this_machine_are_stale(dead_process: int) -> None:
    host = scratch.socket.gethostname()
    stale = f"{scratch.PREFIX}{host}:{dead_process}:12ab"
    assert scratch.is_stale(Path(stale))
    assert scratch.is_stale(Path(f"{stale}-{owners.this_namespace()}"))
    for name in (
        f"{scratch.PREFIX}{host}:{os.getpid()}:12ab",
        f"{scratch.PREFIX}{host}:{10**30}:12ab",
        f"{scratch.PREFIX}{host}:x:12ab",
        f"{scratch.PREFIX}{host}",
        f"{scratch.PREFIX}another{host}:{dead_process}:12ab",
    ):
        assert not scratch.is_stale(Path(name)), name


def test_a_process_of_another_user_lives(monkeypatch: pytest.MonkeyPatch, dead_process: int) -> None:
    def refused(pid: int, number: int) -> None:
        assert (pid, number) == (dead_process, 0), "no signal is sent"
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert not scratch.is_stale(Path(f"{scratch.PREFIX}{scratch.socket.gethostname()}:{dead_process}:12ab"))


def test_what_another_container_with_this_host_name_writes_stays_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_process: int
) -> None:
    with monkeypatch.context() as container:
        container.setattr(scratch, "this_namespace", lambda: "other")
        container.setattr(os, "getpid", lambda: dead_process)
        with scratch.place(tmp_path) as theirs:
            theirs.write_text("half a file")
            container.undo()
            with scratch.place(tmp_path):
                assert theirs.exists()
            day_before = theirs.stat().st_mtime - scratch.FORGOTTEN_S - 1
            os.utime(theirs, (day_before, day_before))
            with scratch.place(tmp_path):
                assert not theirs.exists()


def test_other_files_stay_and_a_folder_that_is_not_there_has_none(tmp_path: Path, dead_process: int) -> None:
    other = tmp_path / f"{scratch.socket.gethostname()}:{dead_process}:12ab"
    other.touch()
    with scratch.place(tmp_path), scratch.place(tmp_path / "nowhere"):
        assert other.exists()


def test_without_a_folder_it_is_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch.place() as path:
        assert path.parent == tmp_path


@pytest.mark.parametrize(("named", "found"), [("/var/other", "/var/other"), ("", "/tmp"), (None, "/tmp")])
def test_a_system_without_a_folder_that_can_be_written_to_has_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch, named: str | None, found: str
) -> None:
    def refused() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refused)
    monkeypatch.delenv("TMPDIR", raising=False)
    if named is not None:
        monkeypatch.setenv("TMPDIR", named)
    assert scratch.system_folder() == Path(found)
