"""Progress of a run: a bar on a terminal, elsewhere a line at each new step and every 30 s."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from conserve.cli import output
from conserve.config import Settings

if TYPE_CHECKING:
    from conserve.jobs.harvest.forecast import QueueProgress
    from conserve.jobs.harvest.harvester import Harvester, Tally

BAR_S = 0.25
LOOK_S = 0.5  # between two looks for a new step
LINE_S = 30.0


def first_step(settings: Settings) -> str:
    """First step of a run, in its endpoint's words; printed before anything slow is imported."""
    address = settings.endpoint
    if address is None:
        return f"starting {settings.model}: importing vLLM"
    if address.startswith("fake:"):
        return "starting the fake endpoint"
    return f"asking {address.rstrip('/').removesuffix('/v1')} what it serves"


class RunProgress:
    """Progress of a harvester; `said` is the step that was printed last."""

    def __init__(
        self,
        harvester: "Harvester",
        rows_left: Callable[[], int],
        stream: TextIO,
        *,
        said: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from conserve.jobs.harvest.forecast import Rate

        self._harvester, self._rows_left, self._stream, self._clock = harvester, rows_left, stream, clock
        self._begun = clock()
        self._rate = Rate()
        self._per_s = 0.0
        self._key: object = said
        self._line_at = self._begun + LINE_S

    @property
    def _tally(self) -> "Tally":
        return self._harvester.tally

    async def show(self) -> None:
        """Show the progress until cancelled."""
        if output.colourful(self._stream):
            await self._bar()
        while True:
            line = self.line()
            if line is not None:
                output.say(line)
            await asyncio.sleep(LOOK_S)

    def line(self) -> str | None:
        """Line that is due: at a new step, or 30 s after the last one; else None."""
        now = self._clock()
        step = self._harvester.doing
        working = step is None and (self._tally.in_flight or self._tally.done)
        if step is None:
            self._per_s = self._rate.look(now, self._harvester.progress(0).tokens)
        key = step or ((self._tally.waiting_for is not None) if working else self._key)
        if key == self._key and now < self._line_at:
            return None
        self._key, self._line_at = key, now + LINE_S
        if step is not None:
            return f"{step} ({now - self._begun:.0f} s)"
        done, rows_left = self._tally.done, self._rows_left()
        return f"{done:,}/{done + rows_left:,} rows, {self._pace(self._harvester.progress(rows_left))}"

    def _pace(self, seen: "QueueProgress") -> str:
        """Tokens/s, rows in flight, time left, and the endpoint's fault if there is one."""
        from conserve.jobs.harvest.forecast import left_s

        per_s = self._per_s
        parts = [] if seen.rows_done or not seen.rows_in_flight else [first_wave(seen)]
        parts += [f"{per_s:,.0f} tokens/s"] if per_s else []
        parts += [f"{seen.rows_in_flight:,} running"] if seen.rows_done or not parts else []
        parts += [time_left(seconds)] if (seconds := left_s(seen, per_s)) is not None else []
        parts += [f"{self._tally.failed:,} failed"] if self._tally.failed else []
        return ", ".join(parts) + (f" ({self._tally.waiting_for})" if self._tally.waiting_for else "")

    async def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[pace]}"),
        )
        with Bar(*columns, console=Console(file=self._stream), transient=True) as bar:
            shown = bar.add_task(self._harvester.doing or "", total=None, pace="")
            while True:
                if (step := self._harvester.doing) is not None:
                    bar.update(shown, description=step, total=None, pace="")
                else:
                    done, rows_left = self._tally.done, self._rows_left()
                    total, seen = done + rows_left, self._harvester.progress(rows_left)
                    self._per_s = self._rate.look(self._clock(), seen.tokens)
                    pace = self._pace(seen)
                    title = f"{done:,}/{total:,} rows"
                    bar.update(shown, description=title, completed=done, total=total, pace=pace)
                await asyncio.sleep(BAR_S)


def first_wave(seen: "QueueProgress") -> str:
    """Words for the time before the first answer: rows in flight, tokens so far."""
    return f"first wave of {seen.rows_in_flight:,}: {output.count(seen.tokens_in_flight, 'token')} so far"


def time_left(seconds: float) -> str:
    """Words for the time left: `about 4 min left`."""
    return f"about {rounded(seconds)} left"


def rounded(seconds: float) -> str:
    """Duration rounded to what an estimate can tell: `20 s`, `4 min`, `2 h 10 min`."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{max(1, minutes)} min"
    tens = round(minutes / 10)
    return f"{tens // 6} h" + (f" {tens % 6 * 10} min" if tens % 6 else "")
