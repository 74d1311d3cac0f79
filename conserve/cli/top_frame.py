"""The screen of `conserve top`: an overview and the user's choice in, lines of text out. Pure.

A frame of 80 columns holds everything; more columns widen the bars, more lines show more jobs.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.text import Text

from conserve import __version__
from conserve.api.overview import P99, Latency, Overview, ServerSeen
from conserve.api.servers import aged
from conserve.cli.bars import bar, course, cut, short
from conserve.cli.forecast_report import IDLE, none_runs, queue_sentence, when
from conserve.cli.output import STATE_COLOURS
from conserve.jobs.deadlines.queue import LIKELY
from conserve.store.books.job_names import FIRST_JOB
from conserve.store.books.readings import JobReading

WIDTH, HEIGHT = 80, 24
NAME, BAR = 16, 8  # cells of a job's id and its progress, in a frame of 80
KEYS = "↑↓ choose   p pause   r resume   a all jobs   ? help   q quit"
DIM, BOLD, LATE = "bright_black", "bold", "red"
SERVER_LINES = 2
UNREAD = "the store has not been read"
HELP = (
    "",
    "  ↑ ↓ or k j     choose a job",
    "  p              pause it: rows in flight go back with their tokens",
    "  r              resume it, or let a refused one try again",
    "  a              show finished jobs too, or unfinished ones alone",
    "  ?              show or leave this help",
    "  q              quit; the queue goes on",
    "",
    "  TTFT, TBT      P99 of live requests over the last minute, beside the promise;",
    "                 red if it is broken; a promise of another quantile by its name",
    "  left           iterations that rows left for live requests, since the start",
    "  redone         tokens that rows computed again after they left",
    "  evicted        tokens of KV restored from copies, and computed again",
    "  DONE BY        forecast with 50 and 90 % probability, and that of being in time;",
    "                 red if the deadline will rather be missed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenState:
    """State of the screen that is the user's."""

    job: str | None = None  # id of the chosen one
    everything: bool = False  # finished jobs too
    help: bool = False
    message: str = ""
    failed: bool = False  # the message is an error


def frame(seen: Overview, choice: ScreenState, *, width: int = WIDTH, height: int = HEIGHT) -> list[Text]:
    """Lines of the screen, as many as it is high."""
    width = max(width, 40)
    head = [title(seen, width), *queue(seen, width)]
    foot = [notice(seen, choice, width), Text(cut(f" {KEYS}", width), style=DIM)]
    room = max(1, height - len(head) - len(foot))
    body = [Text(cut(line, width)) for line in HELP] if choice.help else figures(seen, choice, width, room)
    body = body[:room]
    return [*head, *body, *(Text("") for _ in range(room - len(body))), *foot][:height]


def figures(seen: Overview, choice: ScreenState, width: int, room: int) -> list[Text]:
    """Servers and jobs in so many lines; at least half of them are for jobs."""
    shown = shown_jobs(seen.jobs, everything=choice.everything)
    above = servers(seen.servers, width, max(SERVER_LINES + 1, room // 2)) if seen.servers else []
    return [*above, Text(""), *jobs(seen, shown, choice, width, room - len(above) - 1)]


def report(seen: Overview, *, width: int = WIDTH) -> list[Text]:
    """Lines of the whole screen without keys, for `--once`; the error of a store that cannot be read is in full."""
    shown = shown_jobs(seen.jobs, everything=False)
    above = servers(seen.servers, width, 3 * len(seen.servers) + 1) if seen.servers else []
    why = textwrap.wrap(seen.error or "", width - 1, break_on_hyphens=False)
    below = [Text(f" {line}", style=LATE) for line in why]
    table = jobs(seen, shown, ScreenState(), width, len(shown) + 2)
    return [title(seen, width), *queue(seen, width), *above, Text(""), *table, *below]


def title(seen: Overview, width: int) -> Text:
    """Program, store and time."""
    clock = datetime.fromtimestamp(seen.at).strftime("%H:%M:%S")
    name = f" conserve {__version__}  "
    line = f"{name}{cut(seen.store, width - len(name) - len(clock) - 2)} {clock} "
    return Text(line, style="reverse")


def queue(seen: Overview, width: int) -> list[Text]:
    """Pace of the last minutes and hours; rows left, and when all of them are done."""
    rate = "-" if seen.tokens_per_s is None else short(seen.tokens_per_s)
    first = Text.assemble(
        (f" {rate:>7} tokens/s ", BOLD),
        (course(seen.course, max(8, width - 50)), "cyan"),
        ("   6 h ", DIM),
        (course(seen.quarters, 24), "blue"),
    )
    words = queue_sentence(seen.forecasts, seen.at) if seen.forecasts else "no forecast yet"
    if seen.forecasts and none_runs(seen.jobs):
        words = f"{words}, {IDLE}"
    words = f"{seen.rows_left:,} rows left, {words}" if seen.rows_left else "no row waits"
    if not seen.read:
        words = UNREAD
    doubtful = any(one.in_time is not None and one.in_time < LIKELY for one in seen.forecasts.values())
    return [first, Text(cut(f"         {words}", width), style="yellow" if doubtful else "")]


def servers(found: Sequence[ServerSeen], width: int, room: int) -> list[Text]:
    """Two lines a server, as many servers as there is room for."""
    lines = [
        Text(""),
        Text(cut(" SERVERS: P99 of live requests over the last minute / promise, in ms", width), style=DIM),
    ]
    for number, server in enumerate(found):
        more = server_lines(server, width)
        rest = len(found) - number
        if len(lines) + len(more) + (rest > 1) > room:
            return [*lines, Text(f" … {rest} more; make the window higher", style=DIM)]
        lines += more
    return lines


def server_lines(server: ServerSeen, width: int) -> list[Text]:
    """Latencies against their promises, then tokens, what was left and evicted, and the age of old figures."""
    name = cut(server.url.removeprefix("http://"), max(20, width - 57))
    if server.error is not None:
        return [
            Text.assemble((" ○ ", LATE), (f"{name} ", BOLD), (cut(server.error, width - len(name) - 4), LATE))
        ]
    if server.stock:
        words = "a server without ConServe's scheduler: no figures"
        return [Text.assemble((" ● ", "green"), (f"{name} ", BOLD), cut(words, width - len(name) - 4))]
    kept = server.ttft_ms.kept and server.tbt_ms.kept
    first = Text.assemble(
        (" ● ", "green" if kept else LATE),
        (f"{name} ", BOLD),
        *latency("TTFT", server.ttft_ms, server.harm),
        "  ",
        *latency("TBT", server.tbt_ms, server.harm),
    )
    second = Text.assemble(
        (f"   {short(server.tokens_per_s):>7} tokens/s ", ""),
        (course(server.course, max(10, width - 72)), "cyan"),
        (f"  left {short(server.iterations_left)}, {short(server.tokens_redone)} redone", ""),
        (f"  evicted {short(server.tokens_restored)}+{short(server.tokens_recomputed)}", ""),
    )
    ago = aged(server.age_s)
    return [first, second, *([Text(cut(f"   seen {ago}", width), style=DIM)] if ago is not None else [])]


def latency(name: str, one: Latency, harm: float | None) -> list[tuple[str, str]]:
    """P99, or what else is promised, beside the promise, and the share of the promise as a bar."""
    p99 = "-" if one.p99 is None else f"{one.p99:,.0f}"
    if one.promised is None:
        promise = f"harm ≤{harm:.0%}" if harm is not None else "no promise"
        return [(f"{name} {p99:>6} ms ", ""), (f"{promise:<10}", DIM)]
    share = (one.value or 0.0) / one.promised
    value = "-" if one.value is None else f"{one.value:,.0f}"
    which = "" if one.promise == P99 else f"{one.promise} "
    words = f"{which}{value}/{one.promised:,.0f}".rjust(11)
    colour = LATE if not one.kept else "yellow" if share > 0.9 else "green"
    return [(f"{name} ", ""), (words, "" if one.kept else LATE), (" ", ""),
            (bar(share, max(1, 19 - len(words))), f"{colour} on bright_black")]  # fmt: skip


def shown_jobs(found: Sequence[JobReading], *, everything: bool) -> list[JobReading]:
    """Jobs to show, the newest first: unfinished ones, or the newest one if there is none."""
    newest = list(reversed(found))
    return newest if everything else [job for job in newest if not job.state.final] or newest[:1]


def jobs(
    seen: Overview, found: Sequence[JobReading], choice: ScreenState, width: int, room: int
) -> list[Text]:
    """Table of jobs around the chosen one."""
    if not seen.read:
        return []
    if not found:
        return [Text(f" no jobs yet; {FIRST_JOB}", style=DIM)]
    name_width = NAME + max(0, min(NAME, (width - WIDTH) // 2))
    bar_width = BAR + max(0, width - WIDTH - (name_width - NAME))
    names = f"  {'JOB':<{name_width}} {'STATE':<9} {'PROGRESS':<{bar_width + 5}} {'ROWS':>13} {'FAIL':>5}"
    head = Text(cut(f"{names}  DONE BY", width), style=DIM)
    fitting = room - 1 if len(found) < room else max(1, room - 2)
    begin = first_shown([job.id for job in found], choice.job, fitting)
    some = found[begin : begin + fitting]
    lines = [head, *(job_line(seen, job, choice, name_width, bar_width) for job in some)]
    hidden = len(found) - len(some)
    return [*lines, Text(f"  … {hidden} more", style=DIM)] if hidden else lines


def first_shown(ids: Sequence[str], chosen: str | None, room: int) -> int:
    """Index of the first job to show, by which the chosen one is in the middle where the list is long."""
    index = ids.index(chosen) if chosen in ids else 0
    return max(0, min(index - room // 2, len(ids) - room))


def job_line(seen: Overview, job: JobReading, choice: ScreenState, name_width: int, bar_width: int) -> Text:
    """One job."""
    chosen = job.id == choice.job
    share = job.done / job.rows if job.rows else 0.0
    colour = STATE_COLOURS.get(job.state.value, "white")
    return Text.assemble(
        ("▸ " if chosen else "  ", BOLD),
        (cut(job.id, name_width), "bold reverse" if chosen else ""),
        (f" {job.state.value:<9} ", colour),
        (bar(share, bar_width), f"{colour} on bright_black"),
        f" {int(100 * share):>3}% {short(job.done) + '/' + short(job.rows):>13}",
        (f" {short(job.failed):>5}", LATE if job.failed else ""),
        "  ",
        done_by(seen, job),
    )


def done_by(seen: Overview, job: JobReading) -> Text:
    """Forecast of a job, or its end."""
    found = seen.forecasts.get(job.id)
    if found is None:
        finished = job.finished_at if job.state.final else None
        return Text("-" if finished is None else when(finished, seen.at), style=DIM)
    words = f"{moment(found.done_50, seen.at)}/{moment(found.done_90, seen.at)}"
    if found.in_time is None:
        return Text(words)
    return Text(f"{words} {100 * found.in_time:.0f}%", style=LATE if found.is_late else "")


def moment(at: float | None, now: float) -> str:
    """A moment in few cells: the time today, else the date."""
    if at is None:
        return "far"
    local, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now)
    return local.strftime("%H:%M" if local.date() == today.date() else "%m-%d")


def notice(seen: Overview, choice: ScreenState, width: int) -> Text:
    """Reason why the store cannot be read, or effect of the last key."""
    words = seen.error or choice.message
    return Text(cut(f" {words}", width), style=LATE if seen.error or choice.failed else "green")
