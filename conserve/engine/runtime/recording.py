"""A file of lines that grows while the engine serves: of bounded size, and never in the way of serving.

A thread of its own writes. What the disk does (full, gone, slow) costs lines, and one sentence in the log.
"""

import logging
import os
import queue
import threading
from pathlib import Path
from typing import IO

log = logging.getLogger("vllm.conserve")
MOST_BYTES = 1 << 30  # of the file
MOST_QUEUED = 256  # lines that wait for the disk; further ones are left out
CLOSE_S = 2.0  # that the last lines may take when the engine ends


class Recording:
    """Appends lines to a file, which is made if need be and is its owner's alone (mode 0600)."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path, self._most_bytes = path, most_bytes
        self.on = True  # until the file is full or fails
        self._left_out = False  # a line, for a slow disk
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_QUEUED)
        self._thread = threading.Thread(target=self._run, daemon=True, name="conserve-recording")
        self._thread.start()

    def add(self, line: bytes) -> None:
        """Write a line soon; never waits and never raises."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            if self.on and not self._left_out:
                self._left_out = True
                log.warning("%s is written too slowly: some views are left out", self.path)

    def close(self) -> None:
        """Write what is left, as far as the disk is fast enough."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            with open(self.path, "a+b", opener=_private) as file:
                self._write(file)
        except OSError as error:
            log.warning("views are not recorded any more: %s", error)
        self.on = False

    def _write(self, file: IO[bytes]) -> None:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash has cut the last line short
                size += file.write(b"\n")
        while (line := self._lines.get()) is not None:
            if size + len(line) + 1 > self._most_bytes:
                has, most = f"{size:,}", f"{self._most_bytes:,}"
                log.warning(
                    "views are not recorded any more: %s has %s bytes, and %s are the most",
                    self.path,
                    has,
                    most,
                )
                return
            size += file.write(line + b"\n")
            if self._lines.empty():
                file.flush()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def recording_at(path: Path | None, number: int) -> Recording | None:
    """Recording of an engine, if there is to be one; data parallel engines behind the first add their number."""
    if path is None:
        return None
    return Recording(path.with_name(f"{path.name}.{number}") if number else path)
