"""A file is what was written, or it is not read."""

import hashlib
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.store.files import digests
from conserve.store.files.digests import REMEMBER_S, Seal, fault, memory, seal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Five thousand bytes, an hour old."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 20)
    return path


def flip(path: Path, at: int) -> None:
    """Turn one bit round, and let the file look as it did as far as that can be."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def later(path: Path) -> float:
    """A moment at which the file is old enough to be remembered."""
    return path.stat().st_ctime + 60


def test_a_file_that_is_what_was_written_has_no_fault(file: Path) -> None:
    written = seal(file)
    assert written == Seal(bytes=5000, digest=digests.digest_of(file))
    assert fault(file, written) is None


@pytest.mark.parametrize("at", [0, 1, 2499, 4999])
def test_one_flipped_bit_is_noticed_wherever_it_is(file: Path, at: int) -> None:
    written = seal(file)
    flip(file, at)
    assert fault(file, written) == "is not what was written"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 of its 5,000 bytes"),
        (b"x" * 4999, "has 4,999 of its 5,000 bytes"),
        (b"x" * 5001, "has 5,001 of its 5,000 bytes"),
        (bytes(5000), "is not what was written"),
    ],
)
def test_a_file_of_another_length_or_of_zeros_is_named_so(file: Path, content: bytes, said: str) -> None:
    written = seal(file)
    file.write_bytes(content)
    assert fault(file, written) == said


def test_what_is_missing_or_cannot_be_read_is_named_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    written = seal(file)
    monkeypatch.setattr(digests, "digest_of", refuse)
    assert fault(file, written) == "cannot be read (Permission denied)"
    file.unlink()
    assert fault(file, written) == "is missing"
    assert fault(file, None) == "is missing"


def test_of_a_file_of_an_earlier_version_its_end_is_read(file: Path, tmp_path: Path) -> None:
    said = str(fault(file, None))
    assert said.startswith("is damaged (")
    assert "\n" not in said
    pq.write_table(pa.table({"q": [1]}), tmp_path / "whole")
    assert fault(tmp_path / "whole", None) is None


def test_a_file_that_was_found_whole_and_may_not_be_read_any_more_is_named_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory(tmp_path, now=later(file)) as known:
        assert fault(file, seal(file), known) is None
    monkeypatch.setattr("os.access", lambda path, how: (path, how) != (file, os.R_OK))
    with memory(tmp_path, now=later(file)) as known:
        assert fault(file, seal(file), known) == "cannot be read (no permission)"


def test_an_error_without_words_is_named_by_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> str:
        raise OSError("short read")

    written = seal(file)
    monkeypatch.setattr(digests, "digest_of", broken)
    assert fault(file, written) == "cannot be read (short read)"


def test_a_memory_that_is_kept_forgets_by_the_day_and_keeps_what_others_wrote(
    file: Path, tmp_path: Path
) -> None:
    """A harvester saves its own once a minute."""
    written, now, path = seal(file), later(file), tmp_path / digests.MEMORY
    kept = digests.Memory(path, now=now)
    assert fault(file, written, kept) is None
    kept.save(every_s=60.0)
    assert not path.exists()
    path.write_text(json.dumps({"other": [1, 2, 3, 4, "digest", now]}))
    kept.now += 60.0
    kept.save(every_s=60.0)
    assert list(json.loads(path.read_bytes())) == ["other", str(file)]
    look = digests.FileAttributes.at(file)
    assert kept.knows(file, written, look)
    kept.now = now + REMEMBER_S
    assert not kept.knows(file, written, look)


def test_a_digest_is_of_all_blocks_of_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCK_BYTES", 999)
    assert digests.digest_of(file) == hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest()


def test_a_file_is_read_once_a_day(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, now = seal(file), later(file)
    read: list[Path] = []
    digest_of = digests.digest_of
    monkeypatch.setattr(digests, "digest_of", lambda path: read.append(path) or digest_of(path))
    for moment, times in ((now, 1), (now, 1), (now + REMEMBER_S - 1, 1), (now + REMEMBER_S, 2)):
        with memory(tmp_path, now=moment) as known:
            assert fault(file, written, known) is None
        assert len(read) == times


def test_a_change_is_noticed_although_the_file_was_found_whole(file: Path, tmp_path: Path) -> None:
    """A change may leave the file's length and the time of its last change."""
    written, now = seal(file), later(file)
    with memory(tmp_path, now=now) as known:
        assert fault(file, written, known) is None
    flip(file, 17)
    with memory(tmp_path, now=now) as known:
        assert fault(file, written, known) == "is not what was written"


def test_a_file_with_another_seal_is_read_again(file: Path, tmp_path: Path) -> None:
    with memory(tmp_path, now=later(file)) as known:
        assert fault(file, seal(file), known) is None
        assert fault(file, Seal(bytes=5000, digest="other"), known) == "is not what was written"


def test_a_file_that_changed_just_now_is_not_remembered(file: Path, tmp_path: Path) -> None:
    """A second change within a tick of the file system's clock would not show."""
    for age_s, remembered in ((1.0, False), (1.9, False), (2.1, True)):
        with memory(tmp_path, now=file.stat().st_ctime + age_s) as known:
            assert fault(file, seal(file), known) is None
        assert (tmp_path / digests.MEMORY).exists() is remembered


def test_what_was_remembered_long_ago_or_in_the_future_is_forgotten_with_the_next_file(
    file: Path, tmp_path: Path
) -> None:
    """A clock that is set back makes memories of the future."""
    now = later(file)
    ages = {"young": 1.0, "old": REMEMBER_S, "future": 1.0 - REMEMBER_S, "later": -REMEMBER_S}
    known = {name: [1, 2, 3, 4, "digest", now - age] for name, age in ages.items()}
    (tmp_path / digests.MEMORY).write_text(json.dumps(known))
    with memory(tmp_path, now=now) as found:
        assert fault(file, seal(file), found) is None
    assert list(json.loads((tmp_path / digests.MEMORY).read_bytes())) == ["young", "future", str(file)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_memory_that_learned_nothing_is_not_written(file: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with memory(tmp_path, now=later(file)) as known:
            assert fault(file, seal(file), known) is None
        os.utime(tmp_path / digests.MEMORY, (7, 7))
    with memory(tmp_path, now=later(file)) as known:
        assert fault(file, Seal(bytes=1, digest="d"), known) is not None
    assert (tmp_path / digests.MEMORY).stat().st_mtime == 7


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x": 1}', b'{"x": []}', b'{"x": ["a", "b"]}'])
def test_a_memory_that_is_damaged_is_an_empty_one(file: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / digests.MEMORY).write_bytes(content)
    with memory(tmp_path, now=later(file)) as known:
        assert fault(file, seal(file), known) is None
    assert list(json.loads((tmp_path / digests.MEMORY).read_bytes())) == [str(file)]


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_memory_that_cannot_be_kept_stops_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, step, full)
    with memory(tmp_path, now=later(file)) as known:
        assert fault(file, seal(file), known) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_files_that_are_there_have_seals(file: Path, tmp_path: Path) -> None:
    assert digests.seals([file, tmp_path / "none"]) == {"file": seal(file)}
