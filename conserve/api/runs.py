"""Runs of this process: jobs drained by harvesters in the portal."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from conserve.api.binding import Binding
from conserve.api.display import SHOW_S, SilentDisplay, display_of, say
from conserve.api.engines import Engine
from conserve.api.idle import idle
from conserve.api.portal import Pending, portal
from conserve.api.progress import Progress
from conserve.api.running import (
    Outcome,
    ProfileFlags,
    check_endpoint,
    harvester_of,
    make_endpoint,
    outcome,
    stoppable,
    unfinished_rows,
)
from conserve.api.shielded import in_thread, outlast
from conserve.config import UNSET, Settings
from conserve.errors import JobRefused, UsageError
from conserve.store.books.readings import JobReading, read_jobs
from conserve.store.books.states import GOING, JobState
from conserve.units import count

if TYPE_CHECKING:
    from conserve.endpoints.protocol import Endpoint
    from conserve.jobs.harvest.harvester import Harvester
    from conserve.store.database.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """Arguments of `Job.run` and `Job.start`."""

    model: str | None = None
    endpoint: str | None = None
    engine: Engine | None = None
    engine_args: Sequence[str] = ()
    api_key: str | None = None
    rebind: bool = False
    progress: bool = True

    def settings(self, store: Settings) -> Settings:
        """Settings of the store with those of this run on top; raises `UsageError` for two engines."""
        if self.engine is not None:
            if self.model or self.endpoint or self.engine_args or self.api_key:
                raise UsageError("an engine has its model, endpoint and flags already; give the engine alone")
            return self.engine.settings(store)
        return replace(
            store,
            model=self.model or store.model,
            endpoint=None if self.endpoint == UNSET else self.endpoint or store.endpoint,
            api_key=self.api_key or store.api_key,
        )

    @property
    def binding(self) -> Binding:
        """Binding to a model that the arguments ask for."""
        return Binding(named=self.model is not None or self.engine is not None, rebind=self.rebind)


Key = tuple[str, str]  # the store's database, and the job
under_way: dict[Key, Pending[Outcome]] = {}
"""Runs that `Job.start` began in this process."""
os.register_at_fork(after_in_child=under_way.clear)  # a child has no thread that would end them


def reading_of(settings: Settings, job_id: str, kept: "Store | None" = None) -> JobReading:
    """Reading of one job, from the store if it is `kept` open; raises `JobNotFound` if it was removed."""
    from conserve.store.books.readings import job_named

    if found := read_jobs(settings, now=time.time(), only=[job_id], kept=kept):
        return found[0]
    every = {reading.id: reading for reading in read_jobs(settings, now=time.time())}
    return every[job_named(settings, list(every.values()), job_id)]


def started(settings: Settings, job_id: str, arguments: RunArguments) -> Pending[Outcome]:
    """Begin a run in the portal; raises `UsageError` if one of this job is under way in this process."""
    key = (settings.store_url, job_id)
    if key in under_way and not under_way[key].done.done():
        raise UsageError(f"job {job_id} is running in this process already; wait for it, or stop it first")
    under_way[key] = portal.submit(drained(settings, job_id, arguments))
    return under_way[key]


class JobWatch:
    """One wait for a job. It raises the error of the background run that it sees end, and of each run once."""

    def __init__(self, settings: Settings, job_id: str) -> None:
        self._key = (settings.store_url, job_id)
        self._run: Pending[Outcome] | None = None

    def look(self) -> None:
        """Raise the error of the background run if it has ended with one; a run that was stopped has none."""
        # Another wait may have taken the run out already, and its error is this one's too.
        self._run = under_way.get(self._key, self._run)
        if self._run is None or not self._run.done.done():
            return
        run, self._run = self._run, None
        drop(self._key, run)
        if not isinstance(run.done.exception(), asyncio.CancelledError):
            run.done.result()


def drop(key: Key, run: Pending[Outcome] | None) -> None:
    """Take a run that has ended out of `under_way`."""
    if run is not None and run.done.done() and under_way.get(key) is run:
        del under_way[key]


async def run_now(settings: Settings, job_id: str, arguments: RunArguments) -> Outcome:
    """Run a job in its caller's sight; the error of an earlier run in the background is of no more interest."""
    key = (settings.store_url, job_id)
    drop(key, under_way.get(key))
    return await drained(settings, job_id, arguments)


async def drained(settings: Settings, job_id: str, arguments: RunArguments) -> Outcome:
    """Run the rows of one job; raises `JobRefused` if it may not run. Cancelled, it saves the rows in flight."""
    return await drained_together(settings, [job_id], arguments)


async def drained_together(settings: Settings, job_ids: Sequence[str], arguments: RunArguments) -> Outcome:
    """Run the rows of these jobs together; raises `JobRefused` if one may not run, before the first is asked."""
    wanted = arguments.settings(settings)
    jobs = [await asyncio.to_thread(reading_of, settings, job_id) for job_id in job_ids]
    left = [job for job in jobs if job.state is not JobState.COMPLETED]
    if not left:
        return nothing_left(jobs)
    for job in left:
        if job.state not in GOING:
            raise JobRefused(idle(job))
    chosen = arguments.binding.settled(wanted, left)
    check_endpoint(chosen, arguments.engine_args, ProfileFlags())
    endpoint = await endpoint_of(chosen, arguments)
    display = display_of(progress=arguments.progress)
    store = await asyncio.to_thread(opened, chosen)
    messages = contextlib.ExitStack()
    try:
        messages.enter_context(sending_of(store))
        ids = [job.id for job in left]
        harvester = harvester_of(store, endpoint, chosen, ids, rebind=arguments.rebind)
        done = await shown(harvester, chosen, left, display)
    finally:
        await outlast(asyncio.create_task(asyncio.to_thread(messages.close)))
        store.close()
    for refusal in harvester.tally.refused.values():
        raise refusal
    return done


async def endpoint_of(settings: Settings, arguments: RunArguments) -> "Endpoint":
    """Endpoint of the arguments: borrowed from their engine, or one for this run alone."""
    if arguments.engine is not None:
        return await arguments.engine.borrowed()
    return make_endpoint(settings, arguments.engine_args, ProfileFlags(), say=say)


def opened(settings: Settings) -> "Store":
    """Open store of these settings."""
    from conserve.store.database.store import Store

    return Store.open(settings)


def sending_of(store: "Store") -> contextlib.AbstractContextManager[None]:
    """Messages to hooks, sent beside a run."""
    from conserve.jobs.hooks.courier import sending

    return sending(store)


async def shown(
    harvester: "Harvester", settings: Settings, jobs: Sequence[JobReading], display: SilentDisplay
) -> Outcome:
    """Run a harvester beside its display; `jobs` are as they were before."""
    begun, job_ids = time.monotonic(), [job.id for job in jobs]
    progress = Progress(harvester, lambda: unfinished_rows(harvester.store, job_ids, harvester.model))
    showing = asyncio.create_task(show(display, progress))
    stop = asyncio.Event()
    working = asyncio.create_task(stoppable(harvester, stop))
    try:
        with at_exit(stop, working):
            await saved(working, stop)
    except BaseException:
        display.leave()
        raise
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
    done = outcome(harvester, settings, begun=begun, interrupted=stop.is_set())
    before = sum(job.done for job in jobs)
    display.end(summary(done, [reading_of(settings, job_id) for job_id in job_ids], before))
    return done


async def saved(working: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    """Wait for a harvester; if cancelled, however often, let it save its rows first."""
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await outlast(working)
        working.result()
        raise


@contextlib.contextmanager
def at_exit(stop: asyncio.Event, working: "asyncio.Task[None]") -> Iterator[None]:
    """Save the rows of this run if the interpreter ends before it does."""

    async def end() -> None:
        stop.set()
        await asyncio.wait([working])

    portal.last(end)
    try:
        yield
    finally:
        portal.not_last(end)


async def show(display: SilentDisplay, progress: Progress) -> None:
    """Show the progress until cancelled."""
    while True:
        await display.show(progress)
        await asyncio.sleep(SHOW_S)


def summary(done: Outcome, jobs: Sequence[JobReading], before: int) -> str:
    """Sentence on a run of these jobs that has ended; so many of their rows had a result before it."""
    failures, rows = sum(job.failed for job in jobs), sum(job.rows for job in jobs)
    failed = f", {failures:,} failed" if failures else ""
    subject = f"{jobs[0].id}: {jobs[0].state}" if len(jobs) == 1 else count(len(jobs), "job")
    now = sum(job.done for job in jobs)
    others = now - before - done.done  # less than 0 if failed rows were put back meanwhile
    words = [f"{subject}, {now:,} of {count(rows, 'row')} done{failed}"]
    if others > 0:
        words.append(f"another harvester over this store did {count(others, 'row')}")
    if done.done or others <= 0:
        words.append(done.summary())
    return "; ".join(words)


def nothing_left(jobs: Sequence[JobReading]) -> Outcome:
    """Outcome of a run that found its jobs completed."""
    states = {job.id: job.state.value for job in jobs}
    return Outcome(jobs=states)


async def ended(
    settings: Settings, job_id: str, timeout_s: float | None, *, clock: Callable[[], float] = time.monotonic
) -> JobState:
    """Wait until no row of a job is left to run, whichever process runs it; raises the error of this one's run."""
    until = None if timeout_s is None else clock() + timeout_s
    watch = JobWatch(settings, job_id)
    watch.look()
    kept = await in_thread(lambda: kept_open(settings))
    with contextlib.nullcontext() if kept is None else contextlib.closing(kept):
        while True:
            job = await in_thread(lambda: reading_of(settings, job_id, kept))
            if job.state.final:
                return job.state
            if until is not None and clock() >= until:
                raise TimeoutError(f"job {job_id} is {job.state} after {timeout_s:g} s")
            await asyncio.sleep(SHOW_S)
            watch.look()


def kept_open(settings: Settings) -> "Store | None":
    """The store, open for many looks; None for SQLite, which is opened faster than it is read."""
    if settings.sqlite_file is not None:
        return None
    from conserve.store.database.store import Store

    return Store.open(settings)
