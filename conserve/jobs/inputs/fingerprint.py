"""Fingerprints of input files, taken at submit and compared later."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from conserve.store.books.catalog import InputFile, JobRecord, Source
from conserve.store.files import layout
from conserve.store.files.digests import digest_of
from conserve.store.files.objects import FilePath


def fingerprint(path: Path) -> InputFile:
    """Take the fingerprint of a file: its size, time of change and digest."""
    stat = path.stat()
    return InputFile(
        path=str(path.absolute()),
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        digest=digest_of(path),
    )


def together(parts: Sequence[InputFile]) -> tuple[int, int, str]:
    """Combine fingerprints: the total size, the latest time, and a digest of the files' digests in order."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(f"{part.digest}\0".encode())
    size = sum(part.size for part in parts)
    return size, max(part.mtime_ns for part in parts), digest.hexdigest()


def is_other(part: InputFile, path: Path) -> bool:
    """True if the file at this path differs from its fingerprint. A missing file counts as unchanged."""
    try:
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) == (part.size, part.mtime_ns):
            return False
        return stat.st_size != part.size or fingerprint(path).digest != part.digest
    except OSError:
        return False


def changed(data: FilePath, job: JobRecord) -> str | None:
    """First input file of a job that differs from its fingerprint at submit; None if all are the same."""
    return next((part.path for part, path in changeable(data, job) if is_other(part, path)), None)


def bytes_in_doubt(data: FilePath, job: JobRecord) -> int:
    """Number of bytes that `changed` reads at most: those of files whose time of change alone differs."""
    stamps = ((part, stamp(path)) for part, path in changeable(data, job))
    return sum(
        part.size
        for part, found in stamps
        if found is not None and found[0] == part.size and found[1] != part.mtime_ns
    )


def changeable(data: FilePath, job: JobRecord) -> Iterator[tuple[InputFile, Path]]:
    """Yield the input files of a job that may change, and where they are.

    Rows that were copied into the store cannot change. A hard link changes when the file is written into.
    """
    source = job.source
    if source.copied and not source.linked:
        return
    folder = layout.job_folder(data, job.id)
    for part in source.files:
        yield part, Path(str(folder / part.kept)) if part.kept else Path(part.path)


def written_meanwhile(source: Source) -> str | None:
    """First file of an input that was written to since its fingerprint was taken; None if none was.

    An object of a bucket was copied first.
    """
    for part in source.files:
        if "://" in part.path:
            continue
        if stamp(Path(part.path)) != (part.size, part.mtime_ns):
            return part.path
    return None


def stamp(path: Path) -> tuple[int, int] | None:
    """Size and time of change of a file; None if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns
