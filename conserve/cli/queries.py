"""Queries over a store: their rows, warnings of rows left out, and a sign of life."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from conserve.cli import output

if TYPE_CHECKING:
    from conserve.store.sql.answer import SnapshotQuery
    from conserve.store.sql.batches import RowBatches
    from conserve.store.sql.readable import LeftOut

SPINNER_AFTER_S = 1.0


@contextmanager
def answer(
    question: "SnapshotQuery", warn: "Callable[[LeftOut], None] | None" = None
) -> Iterator["RowBatches"]:
    """Yield the rows of an answer; `warn` is called with rows that a view cannot show."""
    from conserve.store.sql.answer import answered

    spinner = Spinner()
    try:
        with answered(question, warn=warn or say_left_out, on_wait=spinner.waited) as rows:
            yield rows
    finally:
        spinner.waited(None)


def say_left_out(found: "LeftOut") -> None:
    """Warn of rows that a view cannot show."""
    output.warn(found.sentence)


class Spinner:
    """A line on a terminal that says that a query is at work, from its first second on."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None

    def waited(self, waited_s: float | None) -> None:
        """Show for how long the query has computed, in s; None clears the line."""
        if waited_s is None:
            if self._stop is not None:
                self._stop()
                self._stop = None
        elif self._stop is None and waited_s >= SPINNER_AFTER_S and output.colourful(sys.stderr):
            from rich.console import Console

            status = Console(stderr=True).status("the query is at work (Ctrl-C ends it)")
            status.start()
            self._stop = status.stop
