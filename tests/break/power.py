"""A machine whose power fails: what was not synced may be gone.

A process that `record` was called in notes what it syncs: of a file its contents, of a folder its entries. After
the process has ended, `cut` puts a folder into a state that a power cut may leave. Contents that were not synced
are empty, zero or truncated. An entry that came, changed or went since its folder was synced did so or did not; a
rename happened or did not, in both folders. The files of the database are left to SQLite: it syncs at each commit.

The notes are complete, since only syncs count: what else a process or a library writes needs no noting.
"""

import functools
import json
import os
import random
import shutil
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tests.acceptance.rewiring import rewire

DATABASE = "conserve.db"  # how the names of its files begin
NOTES = "notes.jsonl"


class State(StrEnum):
    """Part of the unsynced data that a power cut leaves."""

    NOTHING = "nothing"
    NAMES = "names without contents"
    SOME = "some of it"


class Entry(NamedTuple):
    """File or folder that a name stands for."""

    inode: int
    is_folder: bool


Entries = dict[str, Entry]


class Notes:
    """Writes what was synced into a folder that no power cut touches."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._copies = count()

    def synced(self, path: Path) -> None:
        """Note that a file or a folder is on the disk as it is now."""
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            self._write(inode=found.st_ino, entries=self._held(path))
        elif stat.S_ISREG(found.st_mode):
            self._keep(found.st_ino, path)
            copy = self._folder / f"synced-{os.getpid()}-{next(self._copies)}"
            shutil.copyfile(path, copy)
            self._write(inode=found.st_ino, content=copy.name)

    def made(self, path: Path) -> None:
        """Note that a folder is new: its number may have been another's."""
        self._write(inode=path.stat().st_ino, entries={})

    def _held(self, folder: Path) -> Entries:
        """The entries of a folder."""
        found = entries_of(folder)
        for name, entry in found.items():
            if not entry.is_folder:
                self._keep(entry.inode, folder / name)
        return found

    def _keep(self, inode: int, path: Path) -> None:
        """Keep a file, so that its number is not given to another one."""
        with suppress(FileExistsError):
            (self._folder / f"held-{inode}").hardlink_to(path)

    def _write(self, **note: Any) -> None:
        """Add a note, whole whatever becomes of the process."""
        file = os.open(self._folder / NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, json.dumps(note).encode() + b"\n")
        os.close(file)


def record(folder: str) -> None:
    """Have this process note what it syncs; call it before anything is synced."""
    notes = Notes(Path(folder))

    def noting_sync(sync: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(sync)
        def calling(file: Any) -> None:
            sync(file)
            number = file if isinstance(file, int) else file.fileno()
            with suppress(FileNotFoundError):  # a file without a name
                notes.synced(Path(f"/proc/self/fd/{number}").readlink())

        return calling

    def noting_folder(make: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(make)
        def calling(path: Any, *arguments: Any, **named: Any) -> None:
            make(path, *arguments, **named)
            notes.made(Path(path))

        return calling

    rewire("os:fsync", noting_sync)
    rewire("os:fdatasync", noting_sync)
    rewire("os:mkdir", noting_folder)


def on_disk(root: Path, folder: Path) -> None:
    """Note that everything below a root is on the disk."""
    notes = Notes(folder)
    for path in (root, *root.rglob("*")):
        if not path.name.startswith(DATABASE):
            notes.synced(path)


def entries_of(folder: Path) -> Entries:
    """The entries of a folder; those of the database are none of ours."""
    found = (entry for entry in os.scandir(folder) if not entry.name.startswith(DATABASE))
    return {entry.name: Entry(entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in found}


@dataclass(slots=True)
class Disk:
    """Data that is on the disk for certain, and data that the system has in memory only."""

    notes: Path
    synced: dict[int, Entries] = field(default_factory=dict)  # of folders
    contents: dict[int, Path] = field(default_factory=dict)  # of files, as they were synced last
    in_memory: dict[int, Entries] = field(default_factory=dict)
    written: dict[int, Path] = field(default_factory=dict)  # files as they are

    @classmethod
    def after(cls, root: Path, notes: Path) -> "Disk":
        """The disk under a root on which no process works any more."""
        disk = cls(notes)
        for line in (notes / NOTES).read_bytes().splitlines():
            note = json.loads(line)
            if "content" in note:
                disk.contents[note["inode"]] = notes / note["content"]
            else:
                disk.synced[note["inode"]] = {name: Entry(*entry) for name, entry in note["entries"].items()}
        for path in (root, *root.rglob("*")):
            if path.is_dir():
                disk.in_memory[path.stat().st_ino] = entries_of(path)
            else:
                disk.written[path.stat().st_ino] = path
        return disk

    def names(self, state: State, dice: random.Random) -> dict[int, Entries]:
        """The entries of each folder after the cut."""
        if state is State.NOTHING:
            return self.synced
        if state is State.NAMES:
            return self.synced | self.in_memory
        arrived = {change: dice.random() < 0.5 for change in set(self.changes().values())}
        return {inode: self.mixed(inode, arrived) for inode in self.synced.keys() | self.in_memory.keys()}

    def mixed(self, folder: int, arrived: Mapping[int, bool]) -> Entries:
        """The entries of a folder of which some changes have arrived."""
        before, after, changes = self.before(folder), self.after_all(folder), self.changes()
        found: Entries = {}
        for name in before.keys() | after.keys():
            change = changes.get((folder, name))
            entry = (after if change is not None and arrived[change] else before).get(name)
            if entry is not None:
                found[name] = entry
        return found

    def before(self, folder: int) -> Entries:
        """The entries of a folder that are on the disk for certain."""
        return self.synced.get(folder, {})

    def after_all(self, folder: int) -> Entries:
        """The entries of a folder as the processes saw them; those of one that is gone stay as they were."""
        return self.in_memory.get(folder, self.before(folder))

    def changes(self) -> dict[tuple[int, str], int]:
        """The number of the change that each changed name belongs to.

        Names that stand for one file before and after belong to one change, which is a rename: it happens or not.
        """
        changed: dict[tuple[int, str], set[int]] = {}
        for folder in self.synced.keys() | self.in_memory.keys():
            before, after = self.before(folder), self.after_all(folder)
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    entries = (before.get(name), after.get(name))
                    changed[folder, name] = {entry.inode for entry in entries if entry is not None}
        return connected(changed)

    def content(self, inode: int, state: State, dice: random.Random) -> bytes:
        """The contents of a file after the cut."""
        synced = self.contents[inode].read_bytes() if inode in self.contents else b""
        written = self.written[inode].read_bytes() if inode in self.written else synced
        if written == synced or state is State.NOTHING:
            return synced
        cut_short = written[: dice.randrange(len(written))] if written else b""
        left = [synced, bytes(len(written)), cut_short]
        return dice.choice(left if state is State.NAMES else [*left, written])


def connected(of: Mapping[tuple[int, str], Iterable[int]]) -> dict[tuple[int, str], int]:
    """The same number for keys that share a value, whether at first hand or through others."""
    by_value: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for key, values in of.items():
        for value in values:
            by_value[value].add(key)
    numbers: dict[tuple[int, str], int] = {}
    for number, start in enumerate(sorted(of)):
        reached = [start]
        while reached:
            key = reached.pop()
            if key not in numbers:
                numbers[key] = number
                reached += [other for value in of[key] for other in by_value[value]]
    return numbers


def cut(root: Path, home: Path, notes: Path, state: State, dice: random.Random) -> None:
    """Have the power fail for everything below a root, where no process works any more."""
    disk = Disk.after(root, notes)
    names = disk.names(state, dice)
    aside = root.with_name(f"{root.name}.before")
    inode = root.stat().st_ino
    root.rename(aside)
    disk.written = {number: aside / path.relative_to(root) for number, path in disk.written.items()}
    root.mkdir()
    restore(disk, inode, root, names, state, dice)
    for path in (aside / home.relative_to(root)).glob(f"{DATABASE}*"):
        if home.is_dir() and not path.name.endswith("-shm"):  # which is memory
            shutil.copyfile(path, home / path.name)
    shutil.rmtree(aside)
    shutil.rmtree(notes)


def restore(
    disk: Disk, folder: int, path: Path, names: Mapping[int, Entries], state: State, dice: random.Random
) -> None:
    """Make the files and folders that are left in a folder."""
    for name, entry in sorted(names.get(folder, {}).items()):
        if entry.is_folder:
            (path / name).mkdir()
            restore(disk, entry.inode, path / name, names, state, dice)
        else:
            (path / name).write_bytes(disk.content(entry.inode, state, dice))
