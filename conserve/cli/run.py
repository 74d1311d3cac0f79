"""`conserve run`: run queued rows until none is left."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.api.binding import Binding
from conserve.api.progress import first_step
from conserve.api.running import (
    REMOVED,
    Outcome,
    ProfileFlags,
    check_endpoint,
    harvester_of,
    make_endpoint,
    outcome,
    stoppable,
    unfinished,
    unfinished_rows,
)
from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids, split_flags
from conserve.cli.idle_jobs import left_paused, nothing_to_run
from conserve.cli.options import LogFormat, MetricsHost, MetricsPort, OtlpEndpoint, Rebind, Share, Utility
from conserve.cli.progress import RunProgress
from conserve.cli.signals import told_to_stop
from conserve.cli.status_report import retriable
from conserve.cli.suggestions import again
from conserve.cli.telemetry import begin_logging, telemetry
from conserve.config import Settings
from conserve.errors import SettingsError
from conserve.store.books.readings import JobReading, job_named, read_jobs
from conserve.store.books.states import ENDED_EARLY, GOING, JobState

if TYPE_CHECKING:
    from conserve.endpoints.protocol import Endpoint
    from conserve.jobs.harvest.first_rows import FirstRowsEndpoint
    from conserve.jobs.harvest.harvester import Harvester
    from conserve.store.database.store import Store

BATCH = "batch"  # tag of a job of the Batch API
EXAMPLE = """
conserve run
conserve run gsm8k-k3f9 --model Qwen/Qwen2.5-7B-Instruct -- --max-model-len 8192
conserve run --endpoint http://localhost:8000
"""


def run(
    ctx: typer.Context,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB... [-- VLLM FLAGS]",
            help="Only these jobs; what follows -- goes to vLLM as it is.",
            autocompletion=job_ids,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Local folder, hub id or smollm2-demo (CONSERVE_MODEL).")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="OpenAI-compatible server instead of the engine; none for the engine.",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token for it (CONSERVE_API_KEY).")] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most rows in flight at it; 64, or what it says, by default."),
    ] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Seconds of silence after which others may take our rows.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(help="Faulty answers without new tokens that fail a row.")
    ] = None,
    utility: Utility = None,
    share: Share = None,
    rebind: Rebind = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Send nothing: say how many rows there are and whether they fit."),
    ] = False,
    tbt_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="Most that an iteration of the embedded engine may take, by its profile."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="auto|FILE",
            help="Latency profile; the one of this engine by default, auto learns one first.",
        ),
    ] = None,
    forget_correction: Annotated[
        bool,
        typer.Option("--forget-correction", help="Begin without what the profile learned in earlier runs."),
    ] = False,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    otlp_endpoint: OtlpEndpoint = None,
    log_format: LogFormat = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON at the end.")] = False,
) -> None:
    """Run queued rows until none is left. Ctrl-C saves progress and stops; a second one stops at once."""
    wanted, flags = split_flags(jobs or [])
    context: Context = ctx.obj
    settings = context.settings(
        model=model,
        endpoint=endpoint,
        api_key=api_key,
        lease_s=lease_s,
        max_attempts=max_attempts,
        utility=utility,
        share=share,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        otlp_endpoint=otlp_endpoint,
        log_format=log_format,
    )
    begin_logging(settings)
    pace = ProfileFlags(tbt_ms, profile, forget_correction)
    binding = Binding(named=model is not None, rebind=rebind)
    code = drain(settings, wanted, flags, pace, binding, window=window, dry_run=dry_run, as_json=as_json)
    if code == exits.INTERRUPTED:
        leave_import(code)
    raise typer.Exit(code)


def leave_import(code: int) -> None:
    """End the process if a thread still imports vLLM, which cannot be interrupted; all else is done by now."""
    launch = sys.modules.get("conserve.engine.vllm.launching.launch")
    if launch is not None and launch.at_work():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def drain(
    settings: Settings,
    jobs: list[str],
    flags: list[str],
    pace: ProfileFlags,
    binding: Binding = Binding(),  # noqa: B008  immutable
    *,
    window: int | None = None,
    dry_run: bool = False,
    as_json: bool,
) -> int:
    """Run the harvester to its end and report; returns the exit code."""
    readings = read_jobs(settings, now=time.time())
    only = [job_named(settings, readings, job) for job in jobs] or None
    waiting = unfinished(settings, only)
    if not waiting:
        idle = [r for r in readings if only is None or r.id in only]
        if dry_run and as_json:
            output.data_json({"jobs": {}})
        return nothing_to_run(idle, named=only is not None, as_json=as_json and not dry_run)
    settings = binding.settled(settings, waiting)
    check_endpoint(settings, flags, pace)
    if window is not None and settings.endpoint is None:
        raise SettingsError("--window is for a server; for the engine: conserve run -- --max-num-seqs N")
    if dry_run:
        from conserve.cli.dry_run import show_dry_run

        return show_dry_run(settings, waiting, flags, rebind=binding.rebind, as_json=as_json)
    said = begin(settings)
    import uvloop

    from conserve.jobs.hooks.courier import sending
    from conserve.store.database.store import Store

    with telemetry(settings, "run") as watching, contextlib.closing(Store.open(settings)) as store:
        endpoint = make_endpoint(settings, flags, pace, most_rows=window, say=output.say)
        watched = of_first_rows(endpoint, store, settings, waiting)
        harvester = harvester_of(
            store,
            watched or endpoint,
            settings,
            only,
            rebind=binding.rebind,
            observer=watching.observer,
        )
        watching.watch(harvester)
        begun = time.monotonic()
        progress = RunProgress(
            harvester,
            lambda: unfinished_rows(store, only, harvester.model),
            sys.stderr,
            said=said,
            server=server_of(settings),
        )
        with sending(store):
            interrupted = uvloop.run(supervise(harvester, progress.show))
        progress.tell_model()
        done = outcome(harvester, settings, begun=begun, interrupted=interrupted)
        if watched is not None:
            paused = {job for job, state in done.jobs.items() if state == JobState.PAUSED}
            why = {job: why for job, why in watched.paused.items() if job in paused}
            done = replace(done, refused=done.refused | why)
        return report(done, settings, only=only, as_json=as_json)


def of_first_rows(
    endpoint: "Endpoint", store: "Store", settings: Settings, waiting: list[JobReading]
) -> "FirstRowsEndpoint | None":
    """Endpoint of a server, around the given one, that pauses a new job whose first rows are all refused alike."""
    # Clients of the Batch API see no pause: the rows of a batch fail, each with its error.
    new = [reading.id for reading in waiting if not reading.done and BATCH not in reading.tags]
    if server_of(settings) is None or not new:
        return None
    from conserve.jobs.harvest.first_rows import FirstRowsEndpoint

    return FirstRowsEndpoint(endpoint, store, new)


def server_of(settings: Settings) -> str | None:
    """Address of the server that is to answer, as messages show it; None for an engine."""
    if settings.endpoint is None or not settings.endpoint.startswith("http"):
        return None
    from conserve.hosts import server_root, without_login

    return server_root(without_login(settings.endpoint))


def begin(settings: Settings) -> str | None:
    """Print the first step before slow imports; on a terminal the bar shows it. Returns the printed words."""
    if output.colourful(sys.stderr):
        return None
    step = first_step(settings)
    output.say(step)
    return step


async def supervise(harvester: "Harvester", show: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run the harvester beside its display until it ends or a signal comes; True if it was interrupted."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(exits.INTERRUPTED)
        output.say("stopping: saving progress (once more to stop at once)")
        stop.set()

    with told_to_stop(on_signal):
        shown = asyncio.create_task(show())
        try:
            await stoppable(harvester, stop)
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)
    return stop.is_set()


def report(
    done: Outcome,
    settings: Settings,
    *,
    only: list[str] | None = None,
    announced: Collection[str] = (),
    as_json: bool,
) -> int:
    """Print the outcome; returns the exit code.

    `only` are the jobs that the command line names, `announced` those of which it was said how they ended.
    """
    readings = {reading.id: reading for reading in read_jobs(settings, now=time.time())}
    ours = [readings[job_id] for job_id in done.jobs if job_id in readings]
    for job_id, reason in done.refused.items():
        output.say(f"refused: {reason}", job=job_id)
    for job_id, state in done.jobs.items():
        if state == REMOVED:
            output.say(f"{job_id}: removed meanwhile, with its answers", job=job_id)
    say_how_they_stand(settings, [reading for reading in ours if reading.id not in announced])
    if done.no_json:
        output.say(
            f"{done.no_json:,} of {output.count(done.succeeded, 'answer')} are not the JSON that was asked for, "
            "and their column json is null: the server may not support response_format"
        )
    going = any(reading.state in GOING for reading in ours)
    if done.interrupted and (going or not done.ready):
        output.say(f"go on with: {again()}")
    output.say(done.summary())
    meant = [reading for job_id, reading in readings.items() if reading in ours or job_id in (only or ())]
    paused = left_paused(meant)
    if as_json:
        output.data_json(done.document())
    return exit_code(done, ours, paused=paused)


def say_how_they_stand(settings: Settings, readings: list[JobReading]) -> None:
    """Print a line on each job, then what to do about those that did not end well."""
    for reading in readings:
        failed = f", {reading.failed:,} failed" if reading.failed else ""
        said = f"{reading.id}: {reading.state}, {reading.done:,} of {reading.rows:,} rows done{failed}"
        output.say(said, job=reading.id)
    with_failed = [reading.id for reading in readings if reading.failed]
    if with_failed:
        jobs = " ".join(f"--job {job_id}" for job_id in with_failed)
        query = "select error, count(*) as rows, min(row_index) as first from results where error is not null"
        output.say(f'why rows failed: conserve sql {jobs} "{query} group by all"')
        again = [r.id for r in readings if retriable(settings, r) == "failed rows"]
        unanswered = [r.id for r in readings if r.id in again and r.failed == r.rows]
        if unanswered and server_of(settings) is not None:
            output.say(
                f"no row of {' '.join(unanswered)} was answered; where a parameter is refused, submit the rows "
                "with another one (as --param max_completion_tokens=N in place of --max-tokens N)"
            )
        if again:
            output.say(f"then try them again with: conserve retry {' '.join(again)}")
    expired = " ".join(reading.id for reading in readings if reading.state == JobState.EXPIRED)
    if expired:
        output.say(f"put the rows that are left back with: conserve retry {expired}")


def exit_code(done: Outcome, ours: list[JobReading], *, paused: bool) -> int:
    """Exit code of the worst outcome (docs/reference/exit-codes.md)."""
    happened = {
        exits.INTERRUPTED: done.interrupted,
        exits.FAILED: bool(done.refused),
        exits.CANCELLED: not {*ENDED_EARLY, REMOVED}.isdisjoint(done.jobs.values()),
        exits.PAUSED: paused,
        exits.FAILED_ROWS: any(reading.failed for reading in ours),
    }
    return next((code for code in exits.WORST_FIRST if happened.get(code)), exits.DONE)
