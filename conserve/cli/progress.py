"""Progress of a run: a bar on a terminal, elsewhere a line at each new step and every 30 s."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from conserve.api.progress import Progress
from conserve.cli import output
from conserve.errors import one_line

if TYPE_CHECKING:
    from conserve.jobs.harvest.harvester import Harvester

BAR_S = 0.25
LOOK_S = 0.5  # between two looks for a new step


class RunProgress(Progress):
    """Progress of a harvester on a stream; `said` is the step that was printed last.

    `server` is the address of a server whose model is to be told.
    """

    def __init__(
        self,
        harvester: "Harvester",
        rows_left: Callable[[], int],
        stream: TextIO,
        *,
        said: str | None = None,
        server: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(harvester, rows_left, said=said, clock=clock)
        self._stream, self._server = stream, server

    def tell_model(self) -> None:
        """Say once which model answers, as soon as its server has told."""
        if self._server is not None and (model := self._harvester.model) is not None:
            output.say(f"{one_line(model)} at {self._server} answers the rows")
            self._server = None

    async def show(self) -> None:
        """Show the progress until cancelled."""
        if output.colourful(self._stream):
            await self._bar()
        while True:
            self.tell_model()
            line = await self.line()
            if line is not None:
                output.say(line)
            await asyncio.sleep(LOOK_S)

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
                self.tell_model()
                step, done, total, pace = await self.standing()
                if step is not None:
                    bar.update(shown, description=step, total=None, pace="")
                else:
                    title = f"{done:,}/{total:,} rows"
                    bar.update(shown, description=title, completed=done, total=total, pace=pace)
                await asyncio.sleep(BAR_S)
