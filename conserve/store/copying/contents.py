"""Contents of a home: the files that a database names, copied or linked into another folder.

Files that the store made never change once the database names them, so a hard link is a copy. Always copied are the
mark of a job's folder, which is rewritten in its place, and inputs that are links to a user's files, which may be
overwritten.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection, select

from conserve.store.books import catalog, shards
from conserve.store.database import schema
from conserve.store.files import layout, marks, nights
from conserve.store.files.place import place_of
from conserve.whole import sync

PROFILES = "profiles"
TUNED = "tuned"
BESIDE = (nights.EVALS, PROFILES, TUNED)
"""Folders of a home that no database names."""


def named(tx: Connection, where: Path) -> Iterator[str]:
    """Yield the files that a database names, relative to the home; of jobs also what their folders hold."""
    jobs = {job.id: job for job in catalog.everything(tx)}
    for job_id in catalog.ids(tx):
        folder = layout.job_folder(where, job_id)
        names = {layout.REQUESTS, *recorded(jobs[job_id])} if job_id in jobs else {layout.REQUESTS}
        names |= {name for name in (marks.MARK, layout.INPUTS) if (folder / name).exists()}
        names |= {f"{layout.PARTS}/{path.name}" for path in (folder / layout.PARTS).glob("*")}
        for name in sorted(names):
            yield str((folder / name).relative_to(where))
    for shard in shards.files(tx):
        yield shard.file
    yield from tx.scalars(select(schema.file.c.path))


def recorded(job: catalog.JobRecord) -> Iterator[str]:
    """Yield the mark and the inputs that the folder of a job must have, by its record."""
    if job.files:  # earlier versions made no marks
        yield marks.MARK
    if job.source.copied:
        yield layout.INPUTS
    yield from (part.kept for part in job.source.parts if part.kept)


def linked(tx: Connection, where: Path) -> Iterator[str]:
    """Yield those of the files that are a user's too, by another name."""
    for job in catalog.everything(tx):
        folder = layout.job_folder(where, job.id)
        yield from (str((folder / part.kept).relative_to(where)) for part in job.source.parts if part.kept)


def beside(where: Path) -> Iterator[str]:
    """Yield the files of a home that no database names: evaluations, latency profiles and tuned promises.

    A folder that goes meanwhile, or that this user may not list, has none.
    """
    for name in BESIDE:
        for folder, _, names in os.walk(where / name, onerror=unless_closed):
            for path in (Path(folder, name) for name in names):
                if path.is_file() and path.suffix != ".lock" and not path.name.startswith("."):
                    yield str(path.relative_to(where))


def unless_closed(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, unless it is gone or this user may not."""
    if not isinstance(error, FileNotFoundError | PermissionError):
        raise error


def take(
    names: Iterable[str], source: Path, target: Path, *, copy: bool, users: Collection[str] = ()
) -> list[str]:
    """Copy or link files from one folder to another; returns the names of those that are not there.

    Those that are a user's too (`linked`) are copied. A file that the target has is left alone, because it is whole
    and never changes; a mark is copied again.
    """
    missing = []
    for name in names:
        path = target / name
        if path.exists() and path.name != marks.MARK:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            changes = name in users or name.startswith(f"{PROFILES}/")  # a profile is appended to
            put(source / name, path, copy=copy or changes)
            if path.name == marks.MARK and place_of(path.parent).mark() is None:
                put(source / name, path, copy=copy)  # it was just being rewritten
        except FileNotFoundError:
            missing.append(name)
    return missing


def put(path: Path, to: Path, *, copy: bool) -> None:
    """Link a file, or copy it durably: where that is asked for, of a mark, and to another file system."""
    if not copy and to.name != marks.MARK:
        with suppress(OSError):
            os.link(path, to)
            return
    scratch = to.with_name(f".{to.name}.partial")
    try:
        shutil.copy2(path, scratch)
        sync(scratch)
        scratch.replace(to)
    finally:
        scratch.unlink(missing_ok=True)


def drop_others(folder: Path, names: Collection[str]) -> None:
    """Remove the files of a folder that are not among these."""
    kept = frozenset(names)
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in kept:
            path.unlink()


def sync_all(folder: Path) -> None:
    """Flush a folder and all folders within it to disk; their files are flushed already."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync(path)


def size_of(folder: Path, names: Iterable[str]) -> int:
    """Bytes of these files."""
    return sum((folder / name).stat().st_size for name in names)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file durably."""
    path.write_text(json.dumps(content, indent=1))
    sync(path)
