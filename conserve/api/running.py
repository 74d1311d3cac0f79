"""Runs: rows of a store drained into an endpoint, for `conserve run`, `conserve harvest` and `Job.run`."""

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from conserve.config import UNSET, Settings, source_of
from conserve.engine.runtime.vllm_flags import spelled_out
from conserve.errors import SettingsError
from conserve.hosts import about_login, without_login
from conserve.names import PACED
from conserve.store.books.readings import JobReading, read_jobs
from conserve.store.books.states import GOING
from conserve.units import count, duration
from conserve.variables import FAKE

if TYPE_CHECKING:
    from conserve.endpoints.protocol import Endpoint
    from conserve.engine.vllm.settings import RequestedSettings
    from conserve.jobs.harvest.harvester import Harvester
    from conserve.jobs.harvest.observer import Observer
    from conserve.store.database.store import Store

REMOVED = "removed"  # in the place of a job's state


class ProfileFlags(NamedTuple):
    """Flags about latency profiles."""

    tbt_ms: float | None = None
    profile: str | None = None
    forget_correction: bool = False

    @property
    def asked_for(self) -> bool:
        return self.tbt_ms is not None or self.profile is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a run: rows and tokens of this run alone, and the state of its jobs at the end of it."""

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    resumed_tokens: int = 0
    no_json: int = 0
    """Answers that ended and are not the JSON that was asked for; their column `json` is null."""
    start_s: float = 0.0
    """Seconds until the endpoint was ready."""
    work_s: float = 0.0
    """Seconds from there until the last row was durable."""
    interrupted: bool = False
    ready: bool = True
    """False if it was stopped before the endpoint was ready."""
    jobs: dict[str, str] = field(default_factory=dict)
    """State of each job that rows were taken of, by its id; `removed` for one that the store has no more."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason of each job that was refused, by its id."""

    @property
    def done(self) -> int:
        """Rows that have a result because of this run."""
        return self.succeeded + self.failed

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and answers per second of work."""
        return (self.prompt_tokens + self.completion_tokens) / max(self.work_s, 1e-9)

    def summary(self) -> str:
        """Rows and tokens per second in a sentence."""
        if not self.ready:
            return "stopped before any row was sent"
        if not self.done:
            return f"this run answered no row (ready after {duration(self.start_s)})"
        return (
            f"{count(self.done, 'row')} in {duration(self.work_s)}, {self.tokens_per_s:,.0f} tokens/s "
            f"(ready after {duration(self.start_s)})"
        )

    def document(self) -> dict[str, Any]:
        """Outcome as JSON (docs/reference/json.md)."""
        return asdict(self) | {"start_s": round(self.start_s, 3), "work_s": round(self.work_s, 3)}


def unfinished(settings: Settings, only: Collection[str] | None) -> list[JobReading]:
    """Jobs with rows to run, of these or of all."""
    readings = read_jobs(settings, now=time.time())
    return [r for r in readings if r.state in GOING and (only is None or r.id in only)]


def unfinished_rows(store: "Store", only: Collection[str] | None, model: str | None = None) -> int:
    """Number of queued rows without a result; with a model, those that it may answer."""
    from conserve.store.books import queue

    with store.read() as tx:
        return queue.rows_left(tx, only, model)


def flags_as_given(settings: Settings, flags: Sequence[str]) -> list[str]:
    """Flags of an engine as they were given: those of the settings, then those of the command line."""
    return [*shlex.split(settings.engine_args), *flags]


def engine_flags(settings: Settings, flags: Sequence[str]) -> list[str]:
    """Flags of an engine, with those of a file (`--config`) spelled out; raises `SettingsError`."""
    return spelled_out(flags_as_given(settings, flags))


def requested_settings(settings: Settings, flags: Sequence[str], pace: ProfileFlags) -> "RequestedSettings":
    """Settings of the embedded engine that the flags ask for."""
    from conserve.engine.section import EngineSection
    from conserve.engine.vllm.settings import RequestedSettings

    behind = f" -- {shlex.join(flags)}" if flags else ""
    section = EngineSection(
        policy=PACED,
        tbt_slo_ms=pace.tbt_ms,
        harm=None,
        receipt=0.0,
        profile=pace.profile,
        profiles=str(settings.profiles_folder),
    )
    return RequestedSettings(
        section=section,
        command=f"conserve profile {settings.engine_model}{behind}",
        keep_correction=not pace.forget_correction,
    )


ADDRESSES = ("fake:", "http://", "https://")
"""Beginnings of the address of an endpoint."""


def check_endpoint(settings: Settings, flags: Sequence[str], pace: ProfileFlags) -> None:
    """Raise `SettingsError` for an address, or for flags beside it, that no endpoint can be made from."""
    address = settings.endpoint
    if pace.tbt_ms is not None and not 0 < pace.tbt_ms < float("inf"):
        raise SettingsError(f"--tbt-ms {pace.tbt_ms:g} leaves no time for an iteration; give milliseconds")
    if address is None:
        return
    if pace.asked_for:
        raise SettingsError(f"--tbt-ms and --profile are for the embedded engine, and {given(address)}")
    if flags:
        raise SettingsError(f"flags for vLLM go to the embedded engine, and {given(address)}")
    if address.startswith("fake:") and os.environ.get(FAKE) != "1":
        raise SettingsError(
            "the fake endpoint answers with made-up words, which would stand in the results; to see what a run "
            f"would meet: conserve run --dry-run (tests set {FAKE}=1)"
        )
    if not address.startswith(ADDRESSES):
        raise SettingsError(
            f"--endpoint takes an http:// or https:// address, or {UNSET} for the embedded engine, "
            f"not {without_login(address)!r}{about_login(address)}"
        )


def given(address: str) -> str:
    """Words on what names the endpoint, and the flag that takes it back where that is no flag."""
    where = source_of("endpoint", address)
    if where.startswith("--"):
        return f"{where} was given"
    back = f"--endpoint {UNSET} (Python: endpoint={UNSET!r})"
    return f"{where} sets an endpoint; use the engine in spite of it: {back}"


def make_endpoint(
    settings: Settings,
    flags: Sequence[str],
    pace: ProfileFlags,
    *,
    most_rows: int | None = None,
    say: Callable[[str], None],
) -> "Endpoint":
    """Make the endpoint of the settings: the fake, an HTTP server or the embedded engine.

    `most_rows` limits the rows in flight at a server. `say` gets sentences on why an engine takes longer to start.
    """
    check_endpoint(settings, flags, pace)
    address = settings.endpoint
    if address is None:
        from conserve.engine.vllm.embedded import EmbeddedEndpoint

        return EmbeddedEndpoint(
            settings.engine_model,
            engine_flags=engine_flags(settings, flags),
            cache_dir=settings.models_folder,
            requested=requested_settings(settings, flags, pace) if pace.asked_for else None,
            say=say,
        )
    if address.startswith("fake:"):
        from conserve.endpoints.fake import FakeEndpoint, Script

        return FakeEndpoint(Script.from_url(address))
    from conserve.endpoints.exchange import AnswerLimits
    from conserve.endpoints.http import HttpEndpoint

    limits = AnswerLimits.of(settings)
    return HttpEndpoint(
        address, api_key=settings.api_key, model=settings.model, most_rows=most_rows, limits=limits
    )


class BesideLive(TypedDict, total=False):
    """Arguments of a harvester whose endpoint answers live requests too; `Harvester` has the defaults."""

    follow: bool
    max_deaths: int
    say: Callable[[str], None]
    warn: Callable[[str], None]


def harvester_of(
    store: "Store",
    endpoint: "Endpoint",
    settings: Settings,
    only: Collection[str] | None,
    *,
    rebind: bool,
    observer: "Observer | None" = None,
    **beside_live: Unpack[BesideLive],
) -> "Harvester":
    """Harvester that drains these jobs, or all, into an endpoint, which is its own or `beside_live`."""
    from conserve.jobs.harvest.harvester import Harvester

    return Harvester(
        store,
        endpoint,
        lease_s=settings.lease_s,
        max_attempts=settings.max_attempts,
        only=only,
        utility=settings.utility,
        share=settings.share,
        rebind=rebind,
        observer=observer,
        **beside_live,
    )


async def stoppable(harvester: "Harvester", stop: asyncio.Event) -> None:
    """Run a harvester until its queue is empty or `stop` is set; an engine that is still starting is given up."""
    working = asyncio.create_task(harvester.run(stop))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and harvester.ready_at is None:
            working.cancel()  # an engine that is still starting has nothing to save
        with contextlib.suppress(asyncio.CancelledError):
            await working
    finally:
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)


def outcome(harvester: "Harvester", settings: Settings, *, begun: float, interrupted: bool) -> Outcome:
    """Outcome of a harvester that has ended; `begun` is the moment of its start on the monotonic clock."""
    tally = harvester.tally
    states = {reading.id: reading.state.value for reading in read_jobs(settings, now=time.time())}
    ready_at = harvester.ready_at or time.monotonic()
    ended_at = harvester.ended_at or time.monotonic()
    return Outcome(
        succeeded=tally.succeeded,
        failed=tally.failed,
        retried=tally.retried,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        resumed_tokens=tally.resumed_tokens,
        no_json=tally.no_json,
        start_s=ready_at - begun,
        work_s=max(0.0, ended_at - ready_at),
        interrupted=interrupted,
        ready=harvester.ready_at is not None,
        jobs={
            job_id: states.get(job_id, REMOVED)
            for job_id in (*tally.jobs, *tally.cancelled)
            if job_id in states or job_id not in tally.completed
        },
        refused={job_id: str(reason) for job_id, reason in tally.refused.items()},
    )
