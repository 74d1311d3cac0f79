"""Sink of an answer's bytes: standard output, or a file that appears whole or not at all."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from conserve.api.file_sink import file_sink


@contextmanager
def sink(path: Path | None) -> Iterator[BinaryIO]:
    """Open the file at this path; standard output without a path."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with file_sink(path) as stream:
        yield stream
