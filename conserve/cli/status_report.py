"""Rendering of `conserve status` and `conserve jobs`. Imports no typer: see shortcuts."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from conserve.cli import output, server_status
from conserve.cli.server_status import AskedServer
from conserve.cli.suggestions import command
from conserve.config import Settings
from conserve.jobs.harvest.services import running
from conserve.store.books.job_names import FIRST_JOB
from conserve.store.books.readings import JobReading, job_named, read_harvested, read_jobs
from conserve.store.books.states import ENDED_EARLY, GOING, JobState

WATCH_S = 1.0
COURSES = 60  # of a forecast: status answers at once
TIMES = ("submitted_at", "started_at", "finished_at", "deadline")


class StatusArguments(NamedTuple):
    """Arguments of `conserve status`."""

    job: str | None = None
    watch: bool = False
    as_json: bool = False


def answer(settings: Settings, question: StatusArguments) -> None:
    """Print the jobs' progress, once, or until no job has rows left and no server runs."""
    job, as_json = question.job, question.as_json
    if not question.watch:
        servers = [] if as_json else server_status.read_servers(settings)
        show(settings, select_jobs(settings, job, as_json), servers, job, as_json)
        return
    job = job_named(settings, read_jobs(settings, now=time.time()), job) if job else None
    repaint = Repaint(enabled=not as_json and output.colourful(sys.stdout))
    while True:
        seen = select_jobs(settings, job, as_json)
        servers = [] if as_json else server_status.read_servers(settings)
        repaint.before([*server_status.lines(servers), *lines(seen, job)] if not as_json else [])
        show(settings, seen, servers, job, as_json)
        over = all(reading.state.final or reading.state == "paused" for reading in seen.readings)
        if over and (job is not None or not running(settings)):
            return
        time.sleep(WATCH_S)


class Oldest(NamedTuple):
    """First waiting row of a job's input, and the seconds it has waited."""

    row_index: int
    waited_s: float


class ShownJobs(NamedTuple):
    """Jobs to show; `oldest` is set if the command line names one job. JSON has no `forecast` or `retriable`."""

    readings: list[JobReading]
    oldest: Oldest | None = None
    forecast: str | None = None  # in words
    retriable: str | None = None  # what `conserve retry` would take up of the one job


def select_jobs(settings: Settings, job: str | None, as_json: bool) -> ShownJobs:
    """The named job, else all unfinished jobs, else the newest."""
    now = time.time()
    readings = read_jobs(settings, now=now)
    if job is None:
        shown = [reading for reading in readings if not reading.state.final] or readings[-1:]
        return ShownJobs(shown, forecast=None if as_json else forecast_words(settings, readings, None, now))
    wanted = job_named(settings, readings, job)
    (reading,) = [reading for reading in readings if reading.id == wanted]
    found = ShownJobs([reading], oldest(settings, reading, now))
    if as_json:
        return found
    words = forecast_words(settings, readings, reading, now)
    return found._replace(forecast=words, retriable=retriable(settings, reading))


def forecast_words(
    settings: Settings, readings: Sequence[JobReading], job: JobReading | None, now: float
) -> str | None:
    """Forecast of one job or of all in words; None if no row waits, or before any was answered."""
    if not any(one.state in GOING and one.unanswered for one in ([job] if job else readings)):
        return None
    slots = read_harvested(settings)
    if not slots:
        return None
    from conserve.cli.forecast_report import IDLE, none_runs, queue_sentence, sentence
    from conserve.jobs.deadlines.queue import forecast_queue

    found = forecast_queue(readings, slots, now=now, courses=COURSES)
    if not found or (job is not None and job.id not in found):
        return None
    words = queue_sentence(found, now) if job is None else sentence(found[job.id], job.deadline, now)
    return f"{words}, {IDLE}" if none_runs(readings) else words


def oldest(settings: Settings, reading: JobReading, now: float) -> Oldest | None:
    """Row of the job that has waited longest. All wait since submit, so it is the first of the input."""
    if not reading.waiting or reading.state.final:
        return None
    from conserve.jobs.requests.file import first_waiting

    row_index = first_waiting(settings, reading.id)
    return None if row_index is None else Oldest(row_index, now - reading.submitted_at)


def retriable(settings: Settings, reading: JobReading) -> str | None:
    """Name of the rows that `conserve retry` would take up; None where it would be refused, or find none."""
    if reading.state is JobState.EXPIRED and reading.unanswered:
        return "rows left"
    if not reading.failed or reading.state is JobState.CANCELLED:
        return None
    from conserve.jobs.requests.file import unrendered_so_far

    return "failed rows" if reading.failed > unrendered_so_far(settings, reading.id) else None


def show(
    settings: Settings, seen: ShownJobs, servers: Sequence[AskedServer], job: str | None, as_json: bool
) -> None:
    """Print the servers and the readings."""
    if as_json:
        documents = [document(reading) for reading in seen.readings]
        output.data_json(
            {**documents[0], "oldest_waiting": oldest_document(seen.oldest)} if job else documents
        )
    elif seen.readings or servers:
        output.data("\n".join([*server_status.lines(servers), *lines(seen, job)]))
    else:
        output.say(no_jobs(settings))


def no_jobs(settings: Settings) -> str:
    """Sentence on a store without jobs, which names the store: the jobs may be in another one."""
    return f"no jobs yet in {settings.place}; {FIRST_JOB}"


def lines(seen: ShownJobs, job: str | None) -> list[str]:
    """Lines on the jobs for a reader."""
    if job and seen.readings:
        return detail(seen.readings[0], seen)
    return [*table(seen.readings), *([f"forecast: {seen.forecast}"] if seen.forecast else [])]


def table(readings: Sequence[JobReading]) -> list[str]:
    """Table of jobs, a line each."""
    tagged = any(reading.tags for reading in readings)
    rows = [
        [
            reading.id,
            output.state(reading.state),
            f"{reading.done:,}/{reading.rows:,}",
            percent(reading),
            output.coloured(f"{reading.failed:,}", "red" if reading.failed else None),
            f"{reading.running:,}",
            output.moment(reading.submitted_at),
            *([tags(reading)] if tagged else []),
        ]
        for reading in readings
    ]
    header = ("JOB", "STATE", "ROWS", "DONE", "FAILED", "RUNNING", "SUBMITTED")
    if not tagged:
        return output.columns(header, rows, right=(2, 3, 4, 5))
    return output.columns((*header, "TAGS"), rows, right=(2, 3, 4, 5), shorten=(len(header),))


def tags(reading: JobReading) -> str:
    """Tags of a job as `KEY=VALUE`."""
    return " ".join(f"{key}={value}" for key, value in sorted(reading.tags.items()))


def detail(reading: JobReading, seen: ShownJobs) -> list[str]:
    """Lines with every detail of one job."""
    pairs = [
        ("job", reading.id),
        ("state", output.state(reading.state) + (f" ({reading.error})" if reading.error else "")),
        (
            "rows",
            f"{reading.done:,} of {reading.rows:,} done ({percent(reading)}), {reading.failed:,} failed",
        ),
        (
            "left",
            f"{waiting_words(reading)}, {reading.running:,} running, {reading.retries:,} retries so far",
        ),
        ("oldest", oldest_words(seen.oldest)),
        ("order", reading.row_order),
        ("model", reading.model or "-"),
        ("tags", tags(reading) or "-"),
        ("tokens", tokens(reading)),
        ("submitted", output.moment(reading.submitted_at)),
        ("started", output.moment(reading.started_at)),
        ("finished", output.moment(reading.finished_at)),
        ("deadline", output.moment(reading.deadline) + (f", {reading.on_late}" if reading.on_late else "")),
        ("forecast", seen.forecast or "-"),
    ]
    if seen.retriable:
        pairs.append((seen.retriable, command(f"retry {reading.id}")))
    return [f"{output.coloured(f'{name:<11}', 'bright_black')} {value}" for name, value in pairs]


def waiting_words(reading: JobReading) -> str:
    """Rows without a result that none runs: waiting, or cancelled or expired with their job."""
    ended = reading.state in ENDED_EARLY
    return f"{reading.waiting:,} {reading.state if ended else 'waiting'}"


def tokens(reading: JobReading) -> str:
    """Words for a job's token counts."""
    share = "" if reading.hit_rate is None else f", {100 * reading.hit_rate:.1f} %"
    parts = [f"{reading.prompt_tokens:,} prompt ({reading.cached_tokens:,} cached{share})"]
    parts.append(
        f"{reading.completion_tokens:,} completion ({reading.resumed_tokens:,} resumed after a stop)"
    )
    return ", ".join(parts)


def oldest_words(oldest: Oldest | None) -> str:
    """Words for the row that has waited longest."""
    if oldest is None:
        return "-"
    return f"row {oldest.row_index:,} of the input has waited for {output.duration(oldest.waited_s)}"


def oldest_document(oldest: Oldest | None) -> dict[str, Any] | None:
    """Longest waiting row as JSON."""
    return None if oldest is None else oldest._asdict()


def percent(reading: JobReading) -> str:
    """Finished share of the rows, in percent; 100 only if all are finished."""
    return f"{100 * reading.done // reading.rows} %" if reading.rows else "-"


def document(reading: JobReading) -> dict[str, Any]:
    """Job as JSON (docs/reference/json.md)."""
    fields = dataclasses.asdict(reading)
    return {**fields, **{name: output.iso(fields[name]) for name in TIMES}, "hit_rate": reading.hit_rate}


class Repaint:
    """Lines that overwrite the last ones on a terminal, those among them that its width breaks into several."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._height = 0

    def before(self, picture: Sequence[str]) -> None:
        """Clear the last lines, so that the next ones take their place."""
        if self._enabled and self._height:
            sys.stdout.write(f"\x1b[{self._height}F\x1b[J")
        self._height = sum(map(output.height, picture))
