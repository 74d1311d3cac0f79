"""The progress of a run: a bar on a terminal, a line now and then elsewhere."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from conserve.cli import output

if TYPE_CHECKING:
    from conserve.jobs.harvest import Harvester, Tally

BAR_S = 0.25
LINE_S = 10.0


class Progress:
    """Shows a harvester's tally until it is cancelled."""

    def __init__(self, harvester: "Harvester", rows_left: Callable[[], int], stream: TextIO) -> None:
        self._harvester, self._rows_left, self._stream = harvester, rows_left, stream
        self._begun = time.monotonic()

    @property
    def _tally(self) -> "Tally":
        return self._harvester.tally

    async def show(self) -> None:
        """Keep showing; ends by cancellation."""
        if output.colourful(self._stream):
            await self._bar()
        else:
            await self._lines()

    async def _lines(self) -> None:
        while True:
            await asyncio.sleep(LINE_S if self._harvester.ready_at else LINE_S / 2)
            if self._harvester.ready_at is None:
                output.say(f"starting the engine ({time.monotonic() - self._begun:.0f} s)")
                continue
            done, left = self._tally.done, self._rows_left()
            output.say(f"{done:,}/{done + left:,} rows, {self._rate()}{self._trouble()}")

    async def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(file=self._stream), transient=True) as bar:
            shown = bar.add_task("starting the engine", total=None, rate="")
            while True:
                await asyncio.sleep(BAR_S)
                if self._harvester.ready_at is not None:
                    done, left = self._tally.done, self._rows_left()
                    title = f"{done:,}/{done + left:,} rows"
                    rate = self._rate() + self._trouble()
                    bar.update(shown, description=title, completed=done, total=done + left, rate=rate)

    def _rate(self) -> str:
        """Tokens a second since the endpoint was ready, and rows in flight."""
        tokens = self._tally.prompt_tokens + self._tally.completion_tokens
        elapsed_s = time.monotonic() - (self._harvester.ready_at or time.monotonic())
        speed = f"{tokens / elapsed_s:,.0f} tokens/s, " if elapsed_s > 1 else ""
        return f"{speed}{self._tally.in_flight} running"

    def _trouble(self) -> str:
        """Failures, and why nothing moves, if so."""
        failed = f", {self._tally.failed:,} failed" if self._tally.failed else ""
        return failed + (f" ({self._tally.waiting_for})" if self._tally.waiting_for else "")
