"""Jobs whose input file is overwritten, replaced or deleted, by the way in which the input was kept."""

import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.api.results import Results
from conserve.config import Settings
from conserve.errors import InputError, StoreFull, UsageError
from conserve.jobs.inputs import keeping
from conserve.jobs.inputs import source as sources
from conserve.jobs.inputs.keeping import Keep, keep
from conserve.jobs.inputs.source import Input
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog
from conserve.store.database.store import Store
from conserve.store.files import digests, layout
from conserve.store.files.objects import FilePath
from conserve.store.sql.query import views
from tests.commands import Done, conserve
from tests.conftest import WriteInput
from tests.submitting import submit
from tests.tiers import in_full

PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}")


@pytest.fixture(autouse=True)
def no_reflinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system copies no blocks by sharing them, whatever it is."""
    monkeypatch.setattr(keeping, "cloned", lambda path, target: False)


def queue_up(path: Path, *flags: str) -> Done:
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *flags)
    assert done.returncode == 0, done.stderr
    return done


def overwrite(path: Path, q: list[str]) -> None:
    """Write other rows into the very file."""
    other = path.with_suffix(".other")
    pq.write_table(pa.table({"q": q}), other)
    with path.open("r+b") as file:
        file.write(other.read_bytes())
        file.truncate()
    other.unlink()


def replace(path: Path, q: list[str]) -> None:
    """Put another file in the place of this one."""
    other = path.with_suffix(".other")
    pq.write_table(pa.table({"q": q}), other)
    other.rename(path)


def seen() -> list[str]:
    """The inputs that SQL shows."""
    lines = conserve("sql", "--json", "select q from inputs order by row_index").stdout.splitlines()
    return [json.loads(line)["q"] for line in lines]


def source(store: Store, job_id: str) -> catalog.Source:
    with store.read() as tx:
        return catalog.get(tx, job_id).source


def only_job(store: Store) -> str:
    with store.read() as tx:
        (job_id,) = catalog.ids(tx)
    return job_id


def kept_file(store: Store, job_id: str) -> Path:
    return layout.inputs_file(store.home, job_id)


@pytest.mark.parametrize("change", [overwrite, *in_full(replace, lambda path, q: path.unlink())])
def test_a_copy_is_safe_from_everything(store: Store, write_input: WriteInput, change: Any) -> None:
    path = write_input(q=["today", "tomorrow"])
    job_id = queue_up(path).stdout.strip()
    found = source(store, job_id)
    assert (found.copied, found.linked, found.path) == (True, False, str(path))
    change(path, ["x"])
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    assert seen() == ["today", "tomorrow"]


@pytest.mark.parametrize("change", [replace, *in_full(lambda path, q: path.unlink())])
def test_a_link_is_safe_from_replacement_and_deletion(
    store: Store, write_input: WriteInput, change: Any
) -> None:
    path = write_input(q=["today", "tomorrow"])
    done = queue_up(path, "--keep-input", "link")
    job_id = done.stdout.strip()
    assert kept_file(store, job_id).stat().st_ino == path.stat().st_ino
    assert "do not write into it" in done.stderr
    change(path, ["x"])
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    assert seen() == ["today", "tomorrow"]


def test_a_link_into_which_was_written_is_noticed_by_its_fingerprint(
    store: Store, write_input: WriteInput
) -> None:
    path = write_input(q=["today", "tomorrow"])
    job_id = queue_up(path, "--keep-input", "link").stdout.strip()
    before, times = path.read_bytes(), path.stat()
    overwrite(path, ["x"])
    done = conserve("run", "--endpoint", "fake:")
    assert done.returncode == 1
    assert f"{path} changed after job {job_id} was submitted" in done.stderr
    told = conserve("sql", "select q from inputs")
    assert "changed after submit" in told.stderr
    path.write_bytes(before)
    assert conserve("resume", job_id).returncode == 0
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert seen() == ["today", "tomorrow"]


@pytest.mark.parametrize("keep", [Keep.LINK, Keep.REFERENCE])
def test_a_file_that_was_touched_alone_is_still_the_input(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch, keep: Keep
) -> None:
    path = write_input(q=["today", "tomorrow"])
    submit(store, Input(names=[str(path)], keep=keep), PROMPT)
    looks: list[FilePath] = []

    def counted(of: FilePath) -> str:
        looks.append(of)
        return digest_of(of)

    digest_of = digests.digest_of
    monkeypatch.setattr(digests, "digest_of", counted)

    def joined() -> int:
        looks.clear()
        soon = time.time() + digests.YOUNG_S + 1  # a younger file is not remembered
        with views(store, now=soon) as opened:
            return len(opened.duck.execute("select * from inputs").fetchall())

    lies = path if keep is Keep.REFERENCE else kept_file(store, only_job(store))
    assert joined() == 2
    assert lies not in looks
    os.utime(path, ns=(1, 1))
    assert joined() == 2
    assert lies in looks
    assert joined() == 2
    assert not looks, "each file is remembered"
    other = bytes(reversed(path.read_bytes()))
    path.write_bytes(other)
    assert joined() == 0
    assert lies in looks, "its size is the same"


@pytest.mark.parametrize("change", [overwrite, replace])
def test_a_reference_is_refused_once_its_file_is_another(
    store: Store, write_input: WriteInput, change: Any
) -> None:
    path = write_input(q=["today", "tomorrow"])
    done = queue_up(path, "--keep-input", "reference")
    assert "leave it as it is" in done.stderr
    assert not kept_file(store, done.stdout.strip()).exists()
    assert seen() == ["today", "tomorrow"]
    change(path, ["x"])
    assert conserve("run", "--endpoint", "fake:").returncode == 1


def test_large_files_are_linked_and_small_ones_copied(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input(q=["today"])
    gib = path.stat().st_size / 2**30
    for limit, linked in ((gib, False), (gib * 0.99, True), (0.0, True)):
        monkeypatch.setenv("CONSERVE_INPUT_COPY_GIB", repr(limit))
        assert source(store, queue_up(path).stdout.strip()).linked is linked
    assert source(store, queue_up(path, "--keep-input", "copy").stdout.strip()).linked is False
    monkeypatch.setenv("CONSERVE_INPUT_COPY_GIB", "-1")
    done = conserve("submit", str(path), "--prompt", "{{ q }}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "input_copy_gib must be 0 or more" in done.stderr


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_a_file_that_cannot_be_linked_is_referred_to(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def denied(path: Path, target: Path) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr("os.link", denied)
    done = queue_up(write_input(q=["today"]), "--keep-input", "link")
    found = source(store, done.stdout.strip())
    assert (found.copied, found.linked, found.parts) == (False, False, ())
    assert "leave it as it is" in done.stderr
    assert conserve("run", "--endpoint", "fake:").returncode == 0


def test_a_link_to_a_link_is_of_the_file(store: Store, write_input: WriteInput, tmp_path: Path) -> None:
    path = write_input(q=["today"])
    (tmp_path / "latest.parquet").symlink_to(path)
    job_id = queue_up(tmp_path / "latest.parquet", "--keep-input", "link").stdout.strip()
    assert kept_file(store, job_id).stat().st_ino == path.stat().st_ino
    assert not kept_file(store, job_id).is_symlink()


@pytest.mark.parametrize("how", [Keep.LINK, Keep.REFERENCE])
def test_several_files_are_kept_one_by_one(
    store: Store, write_input: WriteInput, tmp_path: Path, how: Keep
) -> None:
    paths = [write_input(f"{n}.parquet", q=[f"{n}a", f"{n}b"]) for n in range(3)]
    done = submit(store, Input(names=[str(path) for path in paths], keep=how), PROMPT)
    assert done.kept is how
    links = [part.kept for part in source(store, done.job_id).parts]
    assert links == ([f"inputs/{n:05}.parquet" for n in range(3)] if how is Keep.LINK else [None] * 3)
    assert seen() == ["0a", "0b", "1a", "1b", "2a", "2b"]
    overwrite(paths[1], ["x"])
    assert conserve("run", "--endpoint", "fake:").returncode == 1
    with views(store, now=0.0) as opened:
        assert [left_out.job_id for left_out in opened.left_out] == [done.job_id]


def test_several_large_files_are_linked_unless_they_are_small_together(
    store: Store, write_input: WriteInput
) -> None:
    paths = [write_input(f"{n}.parquet", q=[f"{n}"]) for n in range(3)]
    size = sum(path.stat().st_size for path in paths)
    names = [str(path) for path in paths]
    assert submit(store, Input(names=names, copy_gib=size / 2**30), PROMPT).kept is Keep.COPY
    assert submit(store, Input(names=names, copy_gib=(size - 1) / 2**30), PROMPT).kept is Keep.LINK


def test_a_reflink_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path, target = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"rows")

    def clone(copy: int, request: int, original: int) -> None:
        assert request == keeping.FICLONE
        os.write(copy, os.pread(original, 100, 0))

    monkeypatch.setattr(fcntl, "ioctl", clone)
    for how in (Keep.COPY, Keep.LINK):
        assert keep(path, target, how) is Keep.COPY
        assert (target.read_bytes(), target.stat().st_ino != path.stat().st_ino) == (b"rows", True)
        target.unlink()
    assert keep(path, target, Keep.REFERENCE) is Keep.REFERENCE
    assert not target.exists()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_without_reflinks_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.undo()

    def refuse(copy: int, request: int, original: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    (tmp_path / "a").write_bytes(b"rows")
    assert not keeping.cloned(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    assert keep(tmp_path / "a", tmp_path / "b", Keep.LINK) is Keep.LINK
    assert keep(tmp_path / "a", tmp_path / "c", Keep.COPY) is Keep.COPY


def test_a_full_disk_leaves_nothing(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(StoreFull, match="no space left"):
        submit(store, str(write_input(q=["today"])), PROMPT)
    assert list(layout.jobs_folder(store.home).iterdir()) == []


def test_a_file_written_to_while_it_is_read_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.jobs.requests import submit as submitting

    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "a"}\n')
    write_requests = submitting.write_requests

    def meanwhile(*arguments: Any) -> Any:
        with path.open("a") as file:
            file.write('{"q": "b"}\n')
        return write_requests(*arguments)

    monkeypatch.setattr(submitting, "write_requests", meanwhile)
    with pytest.raises(InputError, match=r"rows\.jsonl was written to while it was read"):
        submit(store, str(path), PROMPT)
    assert list(layout.jobs_folder(store.home).iterdir()) == []


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("how", list(Keep))
def test_a_parquet_file_written_to_while_it_is_kept_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Keep, files: int
) -> None:
    """In place and with the same layout, so that the copy has rows of both, and can be read."""
    paths = [tmp_path / f"{number}.parquet" for number in range(files)]
    for path in paths:
        pq.write_table(pa.table({"q": ["old"]}), path)
    mark = sources.fingerprint

    def meanwhile(path: Path) -> catalog.InputFile:
        found = mark(path)
        stat = paths[0].stat()
        os.utime(paths[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        return found

    monkeypatch.setattr(sources, "fingerprint", meanwhile)
    with pytest.raises(InputError, match=r"0\.parquet was written to while it was read; submit it again"):
        submit(store, Input(names=[*map(str, paths)], keep=how), PROMPT)
    assert list(layout.jobs_folder(store.home).iterdir()) == []


@pytest.mark.parametrize("several", [False, True])
def test_results_take_the_place_of_no_file_that_their_job_reads(
    store: Store, settings: Settings, tmp_path: Path, several: bool
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path, link = folder / "rows.parquet", tmp_path / "link.parquet"
    pq.write_table(pa.table({"q": ["today"]}), path)
    link.symlink_to(path)
    content = path.read_bytes()
    names = [str(folder if several else path)]
    how = {kept: submit(store, Input(names=names, keep=kept), PROMPT).job_id for kept in Keep}
    for out in (path, link):
        done = conserve("results", how[Keep.REFERENCE], "-o", str(out))
        said = f"job {how[Keep.REFERENCE]} reads its input from {out}; name another file"
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        with pytest.raises(UsageError, match="reads its input from"):
            Results(settings, how[Keep.REFERENCE]).write(out)
    assert path.read_bytes() == content
    assert conserve("results", how[Keep.REFERENCE], "-o", str(tmp_path / "out.parquet")).returncode == 0
    for safe in (Keep.COPY, Keep.LINK):
        assert conserve("results", how[safe], "-o", str(path)).returncode == 0
        path.write_bytes(content)
