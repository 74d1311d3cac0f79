"""`conserve top`: the queue and its servers, live."""

import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.cli.control import move_all
from conserve.cli.signals import ended_in_order
from conserve.endpoints.roster import server_url
from conserve.errors import ConserveError, SettingsError

if TYPE_CHECKING:
    from rich.text import Text

    from conserve.api.overview import Overview, StoreWatch
    from conserve.cli.top_frame import ScreenState
    from conserve.cli.top_keys import Screen

EXAMPLE = """
conserve top
conserve top --endpoint http://gpu1:8000 --endpoint http://gpu2:8000
conserve top --once --json
"""
ANSWER_S = 2.5  # for servers, with --once
WAIT_S = 1.0  # between two frames at most
STEERING = {"p": "pause", "r": "resume"}


def top(
    ctx: typer.Context,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Show this server too; may be repeated (CONSERVE_ENDPOINT)."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token for them (CONSERVE_API_KEY).")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print what there is to see once, as text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --once.")] = False,
) -> None:
    """Show jobs with forecasts, and servers with the latency of live requests, until q is pressed.

    Keys: arrows choose a job, p pauses it, r resumes it, a shows finished jobs too, ? explains the figures.
    """
    context: Context = ctx.obj
    settings = context.settings(api_key=api_key)
    for url in endpoint or ():
        server_url(url)
    if as_json and not once:
        raise SettingsError("--json prints one frame; run: conserve top --once --json")
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingsError("the live screen needs a terminal; run: conserve top --once")
    from conserve.api.overview import StoreWatch
    from conserve.store.files.os_errors import refuse_no_folder

    refuse_no_folder(settings.home)
    with closing(StoreWatch(settings, endpoint or ())) as watch:
        if not once:
            follow(watch, context)
            return
        seen = watch.look(wait_s=ANSWER_S)
    if as_json:
        output.data_json(document(seen))
    else:
        print_once(seen)
    raise typer.Exit(exits.DONE if seen.error is None else exits.FAILED)


def print_once(seen: "Overview") -> None:
    """Print a frame as plain text, or in colours on a terminal."""
    from conserve.cli.top_frame import WIDTH, report

    colours = output.colourful(sys.stdout)
    for line in coloured_lines(report(seen, width=WIDTH), WIDTH, colours=colours):
        output.data(line.rstrip())


def document(seen: "Overview") -> dict[str, Any]:
    """The overview as JSON (docs/reference/json.md)."""
    from conserve.cli import forecast_report, status_report

    jobs = [
        {**status_report.document(job), "forecast": forecast_report.document(job, seen.forecasts.get(job.id))}
        for job in seen.jobs
    ]
    return {
        "at": output.iso(seen.at),
        "store": seen.store,
        "error": seen.error,
        "rows_left": seen.rows_left if seen.read else None,
        "tokens_per_s": seen.tokens_per_s,
        "tokens_per_s_by_quarter_hour": [round(rate, 1) for rate in seen.quarters] or None,
        "jobs": jobs if seen.read else None,
        "servers": [server.document() for server in seen.servers],
    }


def coloured_lines(lines: Sequence["Text"], width: int, *, colours: bool) -> list[str]:
    """Lines with a terminal's colour codes, none longer than the screen."""
    from rich.console import Console

    if not colours:
        return [line.plain for line in lines]
    console = Console(force_terminal=True, width=width, highlight=False, soft_wrap=False)
    with console.capture() as captured:
        for line in lines:
            console.print(line, no_wrap=True, overflow="crop", crop=True)
    return captured.get().splitlines()


class Looking(threading.Thread):
    """Looks again and again in a thread of its own, and wakes the screen."""

    def __init__(self, watch: "StoreWatch", screen: "Screen") -> None:
        super().__init__(name="look", daemon=True)
        self.seen: Overview | None = None
        self.failed: BaseException | None = None
        self._watch, self._screen = watch, screen
        self._again, self._over = threading.Event(), False

    def run(self) -> None:
        """Look until the end."""
        from conserve.api.overview import LOOK_S

        try:
            while not self._over:
                self.seen = self._watch.look()
                self._screen.wake()
                self._again.wait(LOOK_S)
                self._again.clear()
        except BaseException as error:
            self.failed = error
            self._screen.wake()

    def soon(self) -> None:
        """Look now."""
        self._again.set()

    def stop(self) -> None:
        """End after the look under way."""
        self._over = True
        self._again.set()
        self.join(2.0)  # a database that is silent may hold it up for minutes


def follow(watch: "StoreWatch", context: Context) -> None:
    """Draw frames until the user quits."""
    from conserve.cli.top_frame import ScreenState, frame
    from conserve.cli.top_keys import screen

    choice = ScreenState()
    with ended_in_order(), screen() as shown:
        looking = Looking(watch, shown)
        looking.start()
        try:
            while looking.failed is None:
                if (seen := looking.seen) is not None:
                    choice = with_shown_job(choice, seen)
                    width, height = shown.size()
                    lines = frame(seen, choice, width=width, height=height)
                    shown.draw(coloured_lines(lines, width, colours=True))
                for key in shown.keys(WAIT_S):
                    if key == "q":
                        return
                    choice = after_key(key, choice, looking.seen, context)
                    looking.soon()
            raise looking.failed
        finally:
            looking.stop()


def with_shown_job(choice: "ScreenState", seen: "Overview") -> "ScreenState":
    """The choice with a job that is shown: the first one if the last is gone."""
    from conserve.cli.top_frame import shown_jobs

    ids = [job.id for job in shown_jobs(seen.jobs, everything=choice.everything)]
    return choice if choice.job in ids else replace(choice, job=ids[0] if ids else None)


def after_key(key: str, choice: "ScreenState", seen: "Overview | None", context: Context) -> "ScreenState":
    """The choice after a key, which may pause or resume the chosen job."""
    from conserve.cli.top_frame import shown_jobs

    choice = replace(choice, message="", failed=False)
    if key in ("?", "h"):
        return replace(choice, help=not choice.help)
    if seen is None:
        return choice
    if key == "a":
        return replace(choice, everything=not choice.everything)
    ids = [job.id for job in shown_jobs(seen.jobs, everything=choice.everything)]
    if step := {"up": -1, "k": -1, "down": 1, "j": 1}.get(key):
        index = ids.index(choice.job) + step if choice.job in ids else 0
        return replace(choice, job=ids[max(0, min(index, len(ids) - 1))] if ids else None)
    if key in STEERING and choice.job is not None:
        return after_verb(choice, choice.job, STEERING[key], context)
    return choice


def after_verb(choice: "ScreenState", job_id: str, verb: str, context: Context) -> "ScreenState":
    """Pause or resume a job as the command of that name does; an error is shown, and the screen goes on."""
    try:
        ((_, job),) = move_all(context, [job_id], verb)
    except ConserveError as error:
        return replace(choice, message=str(error), failed=True)
    return replace(choice, message=f"{job.id}: {job.state}")
