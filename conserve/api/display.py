"""Progress of a run in a notebook, on a terminal and elsewhere, and HTML of handles."""

import html
import sys
from collections.abc import Sequence
from typing import Any

from conserve.api.progress import Progress
from conserve.store.books.readings import JobReading

BAR = '<progress value="{done}" max="{total}" style="width: 20em"></progress>'


def say(message: str) -> None:
    """Print a message on stderr."""
    print(message, file=sys.stderr, flush=True)


SHOW_S = 0.5  # between two looks at a run


class SilentDisplay:
    """Display of a run that shows nothing."""

    def step(self, words: str) -> None:
        """Show a step of an engine's start."""

    async def show(self, progress: Progress) -> None:
        """Show how the run stands."""

    def end(self, summary: str) -> None:
        """Show the outcome."""

    def leave(self) -> None:
        """Make room for an error."""


class PlainLines(SilentDisplay):
    """Lines on stderr: one at each new step, and every 30 s."""

    def __init__(self) -> None:
        self._step: str | None = None

    def step(self, words: str) -> None:
        if words != self._step:
            self._step = words
            say(words)

    async def show(self, progress: Progress) -> None:
        if (line := await progress.line()) is not None:
            say(line)

    def end(self, summary: str) -> None:
        say(summary)


class Terminal(SilentDisplay):
    """One line of a terminal, written over and over."""

    def step(self, words: str) -> None:
        print(f"\r{words}\x1b[K", end="", file=sys.stderr, flush=True)

    async def show(self, progress: Progress) -> None:
        step, done, total, pace = await progress.standing()
        self.step(step or f"{done:,}/{total:,} rows, {pace}")

    def end(self, summary: str) -> None:
        self.step(summary)
        self.leave()

    def leave(self) -> None:
        say("")


class Notebook(SilentDisplay):
    """A bar below a notebook's cell."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle: Any = display(as_html(""), display_id=True)

    def step(self, words: str) -> None:
        self._update(html.escape(words))

    async def show(self, progress: Progress) -> None:
        step, done, total, pace = await progress.standing()
        self._update(html.escape(step) if step else bar(done, total, pace))

    def end(self, summary: str) -> None:
        self._update(html.escape(summary))

    def _update(self, text: str) -> None:
        self._handle.update(as_html(text))


def display_of(*, progress: bool) -> SilentDisplay:
    """Display that fits where this process runs."""
    if not progress:
        return SilentDisplay()
    if in_notebook():
        return Notebook()
    return Terminal() if sys.stderr.isatty() else PlainLines()


def in_notebook() -> bool:
    """True in a kernel of Jupyter; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def as_html(text: str) -> Any:
    """Object that a notebook shows as this HTML."""
    from IPython.display import HTML

    return HTML(text)


def bar(done: int, total: int, words: str) -> str:
    """Progress bar with its words, as HTML."""
    return f"{BAR.format(done=done, total=max(total, 1))} {done:,}/{total:,} rows {html.escape(words)}"


def job_html(job: JobReading) -> str:
    """One job as HTML: its id, state and progress."""
    failed = f"{job.failed:,} failed" if job.failed else ""
    reason = f"<br>{html.escape(job.error)}" if job.error else ""
    head = f"<b>{html.escape(job.id)}</b> {job.state.value}"
    return f"<div>{head}<br>{bar(job.done, job.rows, failed)}{reason}</div>"


def table_html(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Table as HTML; long values are cut."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cell(value: object, *, most: int = 120) -> str:
    """Value of a table as HTML."""
    text = "" if value is None else str(value)
    return html.escape(text if len(text) <= most else f"{text[: most - 1]}…")
