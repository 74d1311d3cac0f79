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
ARRIVALS_BYTES = 1 << 26  # of a file of arrivals: a million and a half
FULL = ".1"  # ending of the file before
CLOSE_S = 2.0  # that the last lines may take when the engine ends


class LineAppender:
    """Appends lines to a file, which is made if need be and is its owner's alone (mode 0600)."""

    def __init__(
        self, path: Path, *, most_bytes: int = MOST_BYTES, what: str = "views", turns: bool = False
    ) -> None:
        """`what` the lines are, for the log. A file that `turns` begins anew when full, beside the full one."""
        self.path, self._most_bytes = path, most_bytes
        self._what, self._turns = what, turns
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
                log.warning("%s is written too slowly: some %s are left out", self.path, self._what)

    def close(self) -> None:
        """Write what is left, as far as the disk is fast enough."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while self._fills() and self._turns:
                self.path.replace(self.path.with_name(f"{self.path.name}{FULL}"))
        except OSError as error:
            log.warning("%s are not recorded any more: %s", self._what, error)
        self.on = False

    def _fills(self) -> bool:
        """Write lines until the end; True if the file is full before."""
        with open(self.path, "a+b", opener=_private) as file:
            return self._write(file)

    def _write(self, file: IO[bytes]) -> bool:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash has cut the last line short
                size += file.write(b"\n")
        while (line := self._lines.get()) is not None:
            if size + len(line) + 1 > self._most_bytes:
                if self._turns:
                    return True  # without this line: one of a million
                has, most = f"{size:,}", f"{self._most_bytes:,}"
                log.warning(
                    "%s are not recorded any more: %s has %s bytes, and %s are the most",
                    self._what,
                    self.path,
                    has,
                    most,
                )
                return True
            size += file.write(line + b"\n")
            if self._lines.empty():
                file.flush()
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def recording_at(path: Path | None, number: int) -> LineAppender | None:
    """Recording of an engine, if there is to be one; data parallel engines behind the first add their number."""
    if path is None:
        return None
    return LineAppender(path.with_name(f"{path.name}.{number}") if number else path)


def arrivals_at(path: Path | None, number: int) -> LineAppender | None:
    """Recording of an engine's live requests, if there is to be one: times and lengths, never a token."""
    if path is None:
        return None
    own = path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
    return LineAppender(own, most_bytes=ARRIVALS_BYTES, what="arrivals", turns=True)


def arrival_line(at: float, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0) -> bytes:
    """A live request as a line: its arrival in s since 1970, the lengths of its prompt and answer, tokens found.

    `cached_tokens` of the prompt were found in the prefix cache.
    """
    return b"%.3f,%d,%d,%d" % (at, prompt_tokens, answer_tokens, cached_tokens)
