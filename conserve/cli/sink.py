"""Sink of an answer's bytes: standard output, or a file that appears whole or not at all."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from conserve.api.file_sink import file_sink
from conserve.cli import exits, output
from conserve.cli.stdout import OutputClosed
from conserve.errors import StoreError

STANDARD_OUTPUT = Path("-")


class TerminalSink(io.RawIOBase):
    """Standard output that is a terminal: control characters of the lines are spelled out."""

    def writable(self) -> bool:
        return True

    def write(self, line: Any) -> int:
        """Write one line, in UTF-8."""
        text = bytes(line).decode("utf-8", "replace")
        sys.stdout.buffer.write(output.visible(text, sys.stdout).encode())
        return len(line)


@contextmanager
def sink(path: Path | None) -> Iterator[BinaryIO]:
    """Open the file at this path, or standard output; raises `OutputClosed` if a pipe's reader leaves."""
    if path is None:
        yield cast("BinaryIO", TerminalSink()) if sys.stdout.isatty() else sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with file_sink(path) as stream:
            yield stream
    except StoreError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            raise OutputClosed(exits.CLOSED) from None
        raise


def named_file(out: Path | None) -> Path | None:
    """File that `--output` names; None for standard output, which is also called `-`."""
    return None if out == STANDARD_OUTPUT else out
