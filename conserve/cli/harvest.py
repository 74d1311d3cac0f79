"""`conserve harvest`: send queued rows to a server that runs already."""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.api.binding import Binding
from conserve.api.live_endpoint import live_endpoint
from conserve.api.running import harvester_of, outcome, unfinished, unfinished_rows
from conserve.api.shielded import in_thread
from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids
from conserve.cli.idle_jobs import nothing_to_run
from conserve.cli.options import LogFormat, MetricsHost, MetricsPort, OtlpEndpoint, Rebind, Share, Utility
from conserve.cli.progress import RunProgress
from conserve.cli.run import report, say_how_they_stand, supervise
from conserve.cli.telemetry import Telemetry, begin_logging, telemetry
from conserve.config import UNSET, Settings
from conserve.errors import ConserveError, SettingsError, StoreError, StoreMoved, StoreTooNew
from conserve.niceness import wake_quietly
from conserve.store.books.readings import read_jobs

if TYPE_CHECKING:
    from conserve.endpoints.protocol import Endpoint
    from conserve.jobs.harvest.harvester import Harvester
    from conserve.store.database.store import Store

EXAMPLE = """
conserve harvest --endpoint http://localhost:8000
conserve harvest gsm8k-k3f9 --endpoint http://localhost:8000 --until-empty
conserve harvest --endpoint http://gpu-1:8000 --endpoint http://gpu-2:8000
conserve harvest --endpoints dns://vllm:8000
"""

LOOK_S = 0.5  # between two looks for jobs that began or ended


def harvest(
    ctx: typer.Context,
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="JOB...", help="Only these jobs.", autocompletion=job_ids)
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="A server that rows go to (CONSERVE_ENDPOINT); may be given several times."
        ),
    ] = None,
    endpoints: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="A list of servers that may change: file://, dns:// or k8s:// (CONSERVE_ENDPOINTS).",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="One of its models; the first by default.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token for it (CONSERVE_API_KEY).")] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End with the queue instead of waiting for more rows.")
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Most rows in flight at each server; as many as it bears by default."
        ),
    ] = None,
    steady: Annotated[
        bool, typer.Option("--steady", help="Keep --window rows in flight at each server, whatever its load.")
    ] = False,
    lease_s: Annotated[
        float | None, typer.Option(help="Seconds of silence after which others may take our rows.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(help="Faulty answers without new tokens that fail a row.")
    ] = None,
    utility: Utility = None,
    share: Share = None,
    rebind: Rebind = False,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    otlp_endpoint: OtlpEndpoint = None,
    log_format: LogFormat = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON at the end.")] = False,
) -> None:
    """Send queued rows to a server that serves live requests too, behind them, until it is stopped."""
    context: Context = ctx.obj
    settings = context.settings(
        model=model,
        endpoint=endpoint[0] if endpoint else None,
        endpoints=endpoints[0] if endpoints else None,
        api_key=api_key,
        harvest_key=api_key,  # a flag wins over a variable
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
    wake_quietly()
    urls, lists = targets(settings, endpoint or [], endpoints or [])
    if not urls and not lists:
        raise SettingsError(
            "there is no server to harvest on; run: conserve harvest --endpoint http://localhost:8000"
        )
    if steady and window is None:
        raise SettingsError("--steady keeps as many rows in flight as --window says; give --window N too")
    endpoint_of = partial(
        live_endpoint,
        urls,
        lists,
        window=window,
        steady=steady,
        follow=not until_empty,
        say=output.say,
        warn=output.say_trouble,
    )
    binding = Binding(named=model is not None, rebind=rebind)
    with (
        telemetry(settings, "harvest") as watching,
        closing(open_store(settings, wait=not until_empty)) as store,
    ):
        code = work(
            store,
            settings,
            jobs or [],
            endpoint_of,
            binding,
            watching,
            until_empty=until_empty,
            as_json=as_json,
        )
    raise typer.Exit(code)


def targets(settings: Settings, urls: list[str], lists: list[str]) -> tuple[list[str], list[str]]:
    """URLs and lists of servers: flags of either kind win over the variables of both."""
    urls = [url for url in urls if url != UNSET]
    if urls or lists:
        return urls, lists
    return [settings.endpoint] if settings.endpoint else [], (settings.endpoints or "").split()


def open_store(settings: Settings, *, wait: bool) -> "Store":
    """Open the store; with `wait`, try until it can be reached."""
    from conserve.jobs.harvest.outage import Outage
    from conserve.store.database.store import Store
    from conserve.store.files.os_errors import refuse_no_folder

    refuse_no_folder(settings.home)
    outage = Outage(output.say, warn=output.say_trouble)
    while True:
        try:
            store = Store.open(settings)
        except StoreError as error:
            if not wait or isinstance(error, (StoreTooNew, StoreMoved)):
                raise
            time.sleep(outage.begin(error))
        else:
            outage.end()
            return store


def work(
    store: "Store",
    settings: Settings,
    jobs: list[str],
    endpoint_of: Callable[..., "Endpoint"],
    binding: Binding,
    watching: Telemetry,
    *,
    until_empty: bool,
    as_json: bool,
) -> int:
    """Harvest until the queue is empty or a signal comes, and report; returns the exit code."""
    import uvloop

    from conserve.jobs.harvest.bound import ModelDiffers
    from conserve.jobs.hooks.courier import sending
    from conserve.store.books import catalog

    with store.read() as tx:
        only = [catalog.get(tx, job).id for job in jobs] if jobs else None
    if until_empty and not unfinished(settings, only):
        readings = read_jobs(settings, now=time.time())
        idle = [r for r in readings if only is None or r.id in only]
        return nothing_to_run(idle, named=only is not None, as_json=as_json)
    given = settings
    if only or until_empty:
        settings = binding.settled(settings, unfinished(settings, only))
    harvester = harvester_of(
        store,
        endpoint_of(settings, of_jobs=not only and settings.model != given.model),
        settings,
        only,
        rebind=binding.rebind,
        observer=watching.observer,
        follow=not until_empty,
        max_deaths=settings.max_attempts,  # a row is alone among rows: live requests are in the engine too
        say=output.say,
        warn=output.say_trouble,
    )
    watching.watch(harvester)
    begun = time.monotonic()
    lines = until_empty or output.colourful(sys.stderr)
    with sending(store):
        interrupted = uvloop.run(supervise(harvester, lambda: show(harvester, settings, only, lines=lines)))
    done = outcome(harvester, settings, begun=begun, interrupted=interrupted)
    if not only:  # jobs of other models are left to other harvesters, as was said
        reasons = harvester.tally.refused.items()
        ours = {job: str(reason) for job, reason in reasons if not isinstance(reason, ModelDiffers)}
        done = replace(done, refused=ours)
    announced = () if lines else (*harvester.tally.completed, *harvester.tally.cancelled)  # by the announcer
    code = report(done, settings, only=only, announced=announced, as_json=as_json)
    return code if until_empty else exits.DONE  # a harvester that follows the queue ends by a signal only


async def show(harvester: "Harvester", settings: Settings, only: list[str] | None, *, lines: bool) -> None:
    """Print what kind of server it is; then a run's progress, or a line when a job begins or ends.

    Off a terminal the latter is for a harvester that follows the queue: for days, and idle for most of them.
    """
    if not lines:
        await Announcer(harvester, settings).announce()
    progress = RunProgress(
        harvester, lambda: unfinished_rows(harvester.store, only, harvester.model), sys.stderr
    )
    await asyncio.gather(progress.show(), Announcer(harvester, settings, jobs=False).announce())


class Announcer:
    """A line for each job that began or ended since the last look."""

    def __init__(self, harvester: "Harvester", settings: Settings, *, jobs: bool = True) -> None:
        self._harvester, self._settings, self._jobs = harvester, settings, jobs
        self._notice: str | None = None
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self._refused: set[str] = set()

    async def announce(self) -> None:
        """Look every `LOOK_S`; ends by cancellation, with a last look."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            await self._look()

    async def _look(self) -> None:
        notice = self._harvester.endpoint.notice
        if notice is not None and notice != self._notice:
            self._notice = notice
            output.say(notice)
        tally = self._harvester.tally
        for job_id in tally.refused.keys() - self._refused:
            output.say(f"left alone: {tally.refused[job_id]}", job=job_id)
        self._refused = set(tally.refused)
        if self._jobs:
            await self._look_at_jobs()

    async def _look_at_jobs(self) -> None:
        tally = self._harvester.tally
        ended = {*tally.completed, *tally.cancelled}
        running = set(tally.jobs) - ended
        for job_id in sorted(running - self._running):
            output.say(f"{job_id}: harvesting", job=job_id)
        if news := ended - self._ended:
            await self._say_how_they_ended(news)
        self._running, self._ended = running, ended

    async def _say_how_they_ended(self, job_ids: set[str]) -> None:
        try:
            readings = await in_thread(
                partial(read_jobs, self._settings, now=time.time(), only=sorted(job_ids))
            )
        except ConserveError:
            return  # the harvester says that the store is out of reach
        await in_thread(partial(say_how_they_stand, self._settings, readings))
