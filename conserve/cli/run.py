"""`conserve run`: run queued rows until none is left."""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from conserve.cli import exits, output
from conserve.cli.binding import Binding
from conserve.cli.context import Context, engine_flags, job_ids, split_flags
from conserve.cli.idle_jobs import left_paused, nothing_to_run
from conserve.cli.options import Rebind, Utility
from conserve.cli.progress import RunProgress, first_step
from conserve.config import DEMO_MODEL, Settings
from conserve.errors import SettingsError
from conserve.store.books.readings import JobReading, read_jobs, resolve

if TYPE_CHECKING:
    from conserve.endpoints.protocol import Endpoint
    from conserve.engine.vllm.settings import Pacing
    from conserve.jobs.harvest.harvester import Harvester, Tally

EXAMPLE = """
conserve run
conserve run gsm8k-k3f9 --model Qwen/Qwen2.5-7B-Instruct -- --max-model-len 8192
conserve run --endpoint http://localhost:8000
"""


FAKE = "CONSERVE_FAKE"  # 1 where rows may be answered with made-up words: in tests


class Times(NamedTuple):
    """Seconds until the endpoint was ready, and from there until the last row was durable."""

    start_s: float
    work_s: float


class Pace(NamedTuple):
    """Flags about latency profiles."""

    tbt_ms: float | None = None
    profile: str | None = None
    forget_correction: bool = False

    @property
    def asked_for(self) -> bool:
        return self.tbt_ms is not None or self.profile is not None


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
        typer.Option(metavar="URL", help="OpenAI-compatible server instead of the embedded engine."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token for it (CONSERVE_API_KEY).")] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Seconds of silence after which others may take our rows.")
    ] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Faulty answers that fail a row.")] = None,
    utility: Utility = None,
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
    )
    pace = Pace(tbt_ms, profile, forget_correction)
    binding = Binding(named=model is not None, rebind=rebind)
    code = drain(settings, wanted, flags, pace, binding, dry_run=dry_run, as_json=as_json)
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
    pace: Pace,
    binding: Binding = Binding(),  # noqa: B008  immutable
    *,
    dry_run: bool = False,
    as_json: bool,
) -> int:
    """Run the harvester to its end and report; returns the exit code."""
    readings = read_jobs(settings, now=time.time())
    only = [resolve([reading.id for reading in readings], job) for job in jobs] or None
    waiting = unfinished(settings, only)
    if not waiting:
        return nothing_to_run([r for r in readings if only is None or r.id in only], named=only is not None)
    settings = binding.settled(settings, waiting)
    check_endpoint(settings, flags, pace)
    if dry_run:
        from conserve.cli.dry_run import rehearse_run

        return rehearse_run(settings, waiting, flags, as_json=as_json)
    said = begin(settings)
    from conserve.jobs.harvest.harvester import Harvester
    from conserve.store.database.store import Store

    store = Store.open(settings)
    try:
        endpoint = make_endpoint(settings, flags, pace)
        harvester = Harvester(
            store,
            endpoint,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            only=only,
            utility=settings.utility,
            rebind=binding.rebind,
        )
        begun = time.monotonic()
        progress = RunProgress(harvester, lambda: unfinished_rows(settings, only), sys.stderr, said=said)
        interrupted = asyncio.run(supervise(harvester, progress.show))
        ready_at = harvester.ready_at or time.monotonic()
        ended_at = harvester.ended_at or time.monotonic()
        times = Times(start_s=ready_at - begun, work_s=max(0.0, ended_at - ready_at))
        return report(harvester.tally, settings, interrupted, times, only=only, as_json=as_json)
    finally:
        store.close()


def begin(settings: Settings) -> str | None:
    """Print the first step before slow imports; on a terminal the bar shows it. Returns the printed words."""
    if output.colourful(sys.stderr):
        return None
    step = first_step(settings)
    output.say(step)
    return step


def unfinished(settings: Settings, only: list[str] | None) -> list[JobReading]:
    """Jobs that this run may work on."""
    readings = read_jobs(settings, now=time.time())
    return [r for r in readings if r.state in ("queued", "running") and (only is None or r.id in only)]


def make_pacing(settings: Settings, flags: list[str], pace: Pace) -> "Pacing":
    """Pacing of the embedded engine, from the flags."""
    from conserve.engine.policy.view import Slo
    from conserve.engine.vllm.settings import Pacing

    behind = f" -- {shlex.join(flags)}" if flags else ""
    return Pacing(
        folder=settings.profiles_folder,
        command=f"conserve profile {settings.model}{behind}",
        profile=pace.profile,
        slo=Slo(tbt_ms=inf if pace.tbt_ms is None else pace.tbt_ms),
        keep_correction=not pace.forget_correction,
    )


def check_endpoint(settings: Settings, flags: list[str], pace: Pace) -> None:
    """Raise `SettingsError` for an address, or for flags beside it, that no endpoint can be made from."""
    address = settings.endpoint
    if pace.tbt_ms is not None and not 0 < pace.tbt_ms < float("inf"):
        raise SettingsError(f"--tbt-ms {pace.tbt_ms:g} leaves no time for an iteration; give milliseconds")
    if address is None:
        return
    if pace.asked_for:
        raise SettingsError("--tbt-ms and --profile are for the embedded engine, and --endpoint was given")
    if flags:
        raise SettingsError("flags for vLLM go to the embedded engine, and --endpoint was given")
    if address.startswith("fake:") and os.environ.get(FAKE) != "1":
        raise SettingsError(
            "the fake endpoint answers with made-up words, which would stand in the results; to see what a run "
            f"would meet: conserve run --dry-run (tests set {FAKE}=1)"
        )
    if not address.startswith(("fake:", "http://", "https://")):
        raise SettingsError(f"--endpoint takes an http:// or https:// address, not {address!r}")


def make_endpoint(settings: Settings, flags: list[str], pace: Pace) -> "Endpoint":
    """Make the endpoint of the settings: the fake, an HTTP server or the embedded engine."""
    check_endpoint(settings, flags, pace)
    address = settings.endpoint
    if address is None:
        from conserve.engine.vllm.embedded import EmbeddedEndpoint

        return EmbeddedEndpoint(
            settings.model,
            engine_flags=engine_flags(settings, flags),
            cache_dir=settings.models_folder,
            pacing=make_pacing(settings, flags, pace) if pace.asked_for else None,
            say=output.say,
        )
    if address.startswith("fake:"):
        from conserve.endpoints.fake import FakeEndpoint, Script

        return FakeEndpoint(Script.from_url(address))
    from conserve.endpoints.exchange import AnswerLimits
    from conserve.endpoints.http import HttpEndpoint

    model = None if settings.model == DEMO_MODEL else settings.model
    return HttpEndpoint(address, api_key=settings.api_key, model=model, limits=AnswerLimits.of(settings))


async def supervise(harvester: "Harvester", show: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run the harvester beside its display; True if it was interrupted."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(exits.INTERRUPTED)
        output.say("stopping: saving progress (once more to stop at once)")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    shown = asyncio.create_task(show())
    working = asyncio.create_task(harvester.run(stop))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and harvester.ready_at is None:
            working.cancel()  # an engine that is still starting has nothing to save
        with contextlib.suppress(asyncio.CancelledError):
            await working
    finally:
        for task in (shown, stopped):
            task.cancel()
        await asyncio.gather(shown, stopped, return_exceptions=True)
    return stop.is_set()


def unfinished_rows(settings: Settings, only: list[str] | None) -> int:
    """Number of queued rows without a result."""
    return sum(reading.rows - reading.done for reading in unfinished(settings, only))


def report(
    tally: "Tally",
    settings: Settings,
    interrupted: bool,
    times: Times,
    *,
    only: list[str] | None = None,
    as_json: bool,
) -> int:
    """Print the outcome; returns the exit code. `only` are the jobs that the command line names."""
    readings = {reading.id: reading for reading in read_jobs(settings, now=time.time())}
    ours = [readings[job_id] for job_id in tally.jobs if job_id in readings]
    for reason in tally.refused.values():
        output.say(f"refused: {reason}")
    for reading in ours:
        failed = f", {reading.failed:,} failed" if reading.failed else ""
        output.say(f"{reading.id}: {reading.state}, {reading.done:,} of {reading.rows:,} rows done{failed}")
    if any(reading.failed for reading in ours):
        output.say(
            'why rows failed: conserve sql "select error_type, error from results where error is not null"'
        )
    tokens = tally.prompt_tokens + tally.completion_tokens
    output.say(
        f"{output.count(tally.done, 'row')} in {output.duration(times.work_s)}, "
        f"{tokens / max(times.work_s, 1e-9):,.0f} tokens/s (ready after {output.duration(times.start_s)})"
    )
    meant = [reading for job_id, reading in readings.items() if reading in ours or job_id in (only or ())]
    paused = left_paused(meant)
    if as_json:
        output.data_json(document(tally, ours, times, interrupted))
    return exit_code(tally, ours, interrupted=interrupted, paused=paused)


def exit_code(tally: "Tally", ours: list[JobReading], *, interrupted: bool, paused: bool) -> int:
    """Exit code of the worst outcome (docs/reference/exit-codes.md)."""
    happened = {
        exits.INTERRUPTED: interrupted,
        exits.FAILED: bool(tally.refused),
        exits.CANCELLED: bool(tally.cancelled),
        exits.PAUSED: paused,
        exits.FAILED_ROWS: any(reading.failed for reading in ours),
    }
    return next((code for code in exits.WORST_FIRST if happened.get(code)), exits.DONE)


def document(tally: "Tally", ours: list[JobReading], times: Times, interrupted: bool) -> dict[str, object]:
    """Report as JSON (docs/reference/json.md)."""
    return {
        "succeeded": tally.succeeded,
        "failed": tally.failed,
        "retried": tally.retried,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "resumed_tokens": tally.resumed_tokens,
        "start_s": round(times.start_s, 3),
        "work_s": round(times.work_s, 3),
        "interrupted": interrupted,
        "jobs": {reading.id: reading.state for reading in ours},
        "refused": tally.refused,
    }
