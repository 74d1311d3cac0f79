"""Sees files of some folders being opened or changed, by any process, through Linux's inotify."""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

OPENED, READ, CHANGED = 0x20, 0x1, 0x2 | 0x4 | 0x100 | 0x200 | 0xC0
NONBLOCKING = 0o4000
EVENT = struct.Struct("iIII")


class Seen(NamedTuple):
    """One event."""

    path: Path
    changed: bool


class Watch:
    """Changes in some folders, not below them."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(NONBLOCKING)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        self._folders: dict[int, Path] = {}
        for folder in folders:
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), OPENED | READ | CHANGED)
            assert number >= 0, (folder, os.strerror(ctypes.get_errno()))
            self._folders[number] = folder

    def seen(self) -> list[Seen]:
        """Events since the last call; those without a name are of the folder itself."""
        found = []
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return found
            while data:
                number, mask, _, length = EVENT.unpack_from(data)
                name = data[EVENT.size : EVENT.size + length].rstrip(b"\0")
                found.append(Seen(self._folders[number] / os.fsdecode(name), bool(mask & CHANGED)))
                data = data[EVENT.size + length :]

    def close(self) -> None:
        """End the watch."""
        os.close(self._fd)
