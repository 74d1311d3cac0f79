"""Inputs in buckets: objects are copied to this machine, and their rows into the store."""

import errno
import fnmatch
import glob
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from conserve.errors import InputError, UsageError
from conserve.jobs.inputs.files import SUFFIXES, form_of_name
from conserve.store.files.bucket import SCHEMES, Bucket
from conserve.store.files.objects import ObjectPath

FETCHED = "fetched"  # folder within that of the new job, until its rows are copied
NAMELESS = (errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # a name too long, or taken


class NamedObjects(NamedTuple):
    """The objects that a URL names; `several` where it is that of a folder or a pattern."""

    objects: list[ObjectPath]
    several: bool


class Fetched(NamedTuple):
    """Copies of objects: their paths on this machine, and the URL of each; `several` as of the URLs."""

    paths: list[Path]
    urls: dict[str, str]  # by absolute path
    several: bool

    def by_url(self, said: str) -> str:
        """A sentence with the URLs of the objects in place of their copies' paths."""
        for path, url in self.urls.items():
            said = said.replace(path, url)
        return said


def is_url(name: str) -> bool:
    """True for the URL of an object, a folder or a pattern in a bucket."""
    return name.partition("://")[0] in SCHEMES and "://" in name


def fetch(names: Sequence[str], folder: Path) -> Fetched:
    """Copy the objects that URLs name into a folder; raises `InputError` for a URL that names none."""
    if not all(map(is_url, names)):
        raise UsageError("give files or URLs of objects, not both")
    named = [objects_of(name) for name in names]
    found = [one for objects, _ in named for one in objects]
    if len(set(found)) < len(found):
        raise InputError("an object is named twice; name each once")
    odd = next((one for one in found if {"", ".", ".."} & set(one.key.split("/"))), None)
    if odd is not None:
        raise no_file_name(odd)
    paths, urls = [], {}
    for one in found:
        path = folder / FETCHED / one.bucket.root / one.key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_unchanged(one, path)
        except OSError as error:
            if error.errno in NAMELESS:
                raise no_file_name(one) from error
            raise
        paths.append(path)
        urls[str(path.absolute())] = str(one)
    return Fetched(paths, urls, len(named) > 1 or named[0].several)


def no_file_name(one: ObjectPath) -> InputError:
    """The error for an object that cannot be copied under its name, as `a` beside `a/b`."""
    return InputError(
        f"{one} has a name that no file can have below a folder beside the others; rename the object"
    )


def copy_unchanged(one: ObjectPath, path: Path) -> None:
    """Copy an object; raises `InputError` if it was replaced or deleted meanwhile."""
    try:
        begun = one.download(path)
        with one.open() as file:
            unchanged = file.version() == begun
    except FileNotFoundError:
        unchanged = False
    if not unchanged:
        raise InputError(f"{one} was replaced or deleted while it was copied; submit it again")


def drop(folder: Path) -> None:
    """Delete the copies."""
    shutil.rmtree(folder / FETCHED, ignore_errors=True)


def objects_of(url: str) -> NamedObjects:
    """The objects that a URL names: one, those below it, or those that match its pattern."""
    scheme, _, rest = url.partition("://")
    place, mark, options = (
        rest.rpartition("?") if "?endpoint=" in rest or "?region=" in rest else (rest, "", "")
    )
    name, _, key = place.partition("/")
    bucket = Bucket.parse(f"{scheme}://{name}{mark}{options}")
    one = ObjectPath(bucket, key.strip("/"))
    if key and one.is_file():  # also of a name like a[1].jsonl
        return NamedObjects([one], several=False)
    found = matching(ObjectPath(bucket), key, url) if glob.has_magic(key) else below(one, url)
    return NamedObjects(found, several=True)


def matching(root: ObjectPath, pattern: str, url: str) -> list[ObjectPath]:
    """The objects that match a pattern, in which * also stands for /; hidden ones only if no other does."""
    fixed = pattern[: min(pattern.index(mark) for mark in "*?[" if mark in pattern)].rpartition("/")[0]
    start = root / fixed
    found = [entry.path for entry in start.entries() if fnmatch.fnmatchcase(entry.path.key, pattern)]
    if not found:
        raise InputError(f"no object matches {url}; check the pattern")
    return sorted([path for path in found if not is_hidden(path, start)] or found)


def below(folder: ObjectPath, url: str) -> list[ObjectPath]:
    """The objects with rows below a path; names that begin with _ or . are not data."""
    found = [entry.path for entry in folder.entries() if is_data(entry.path, folder)]
    if not found:
        kinds = ", ".join(SUFFIXES)
        raise InputError(f"there is no object {url}, nor objects of rows below it ({kinds}); check the URL")
    return sorted(found)


def is_data(path: ObjectPath, folder: ObjectPath) -> bool:
    """True for an object of rows that is not hidden."""
    return not is_hidden(path, folder) and form_of_name(Path(path.key)) is not None


def is_hidden(path: ObjectPath, folder: ObjectPath) -> bool:
    """True for an object whose path below the folder has a part that begins with _ or ."""
    return any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts)
