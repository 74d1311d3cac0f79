"""Standard streams that cannot be written: closed by their reader, or on a full disk.

Every command prints, some of it by libraries, so the streams themselves are replaced: standard output says in
one way what is wrong, standard error falls silent. Imports nothing that takes time.
"""

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from conserve.cli import exits
from conserve.errors import ConserveError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputClosed(SystemExit):
    """Raised if the reader of a pipe has gone: the command ends quietly, as by `SIGPIPE`."""


class OutputLost(ConserveError):
    """Raised if standard output cannot be written, for this `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"standard output cannot be written ({reason}); send it elsewhere and run the command again"
        )
        self.reason = reason


class Stdout(io.FileIO):
    """File descriptor 1. After the first error, later writes are dropped while the command ends."""

    lost = False

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write some of the data; returns the number of bytes."""
        if self.lost:
            return len(memoryview(data).cast("B"))
        try:
            while (written := super().write(data)) is None:  # the other end made it non-blocking
                wait_until_writable(self.fileno())
        except BrokenPipeError:
            self.lost = True
            raise OutputClosed(exits.CLOSED) from None
        except OSError as error:
            self.lost = True
            raise OutputLost(error.strerror or str(error)) from error
        return written


class Stderr(io.FileIO):
    """File descriptor 2. Data that cannot be written is dropped: no stream is left to report it on."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the data or drop it; returns its length."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(memoryview(data).cast("B"))


def guard() -> None:
    """Replace the standard streams, and open 0, 1 and 2 where they are closed.

    A file opened while one of them is closed would get its number, and with it the printed text.
    """
    for number in (0, 1, 2):
        if not is_open(number):  # opened for reading, so that writing to it is an error
            os.open(os.devnull, os.O_RDONLY)
    if sys.stdin is None:  # Python found 0 closed; now it is an empty file
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = text_stream(Stdout(1, "w", closefd=False), sys.stdout, line_buffering=os.isatty(1))
    sys.stderr = text_stream(Stderr(2, "w", closefd=False), sys.stderr, line_buffering=True)


def text_stream(raw: io.FileIO, old: TextIO | None, *, line_buffering: bool) -> TextIO:
    """Text stream with the encoding of the old one, if there was one; it spells out what that does not have."""
    encoding = old.encoding if old is not None else "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=line_buffering
    )


def is_open(number: int) -> bool:
    """True if this file descriptor is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def wait_until_writable(number: int) -> None:
    """Wait until a file descriptor accepts data."""
    import select

    select.select([], [number], [])


def run_flushed(run: Callable[[], int]) -> int:
    """Run a command and flush its output; returns the exit code."""
    try:
        code = run()
        sys.stdout.flush()
    except OutputClosed:
        return exits.CLOSED
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except OutputLost as error:
        from conserve.cli import output

        return output.say_error(error)
    return code
