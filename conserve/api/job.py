"""Handle of a job: run it, wait for it, read it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from conserve.api import display
from conserve.api.deadlines import to_datetime
from conserve.api.display import SHOW_S
from conserve.api.engines import Engine
from conserve.api.results import Results
from conserve.api.running import Outcome
from conserve.api.runs import JobWatch, RunArguments, ended, reading_of, run_now, started, under_way
from conserve.api.shielded import in_thread
from conserve.api.twins import awaited, blocking
from conserve.config import Settings
from conserve.store.books.readings import JobReading, read_jobs
from conserve.store.books.states import JobState

if TYPE_CHECKING:
    from conserve.jobs.deadlines.forecast import Forecast
    from conserve.store.books.results import Result

Verb = Literal["pause", "resume", "cancel"]


class Job:
    """Handle of a job in a store. It holds no connection, may be pickled, and reads the store when it is asked."""

    def __init__(self, settings: Settings, job_id: str) -> None:
        self._settings, self.id = settings, job_id

    def __repr__(self) -> str:
        return f"<conserve.Job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and (self._settings.store_url, self.id) == (
            other._settings.store_url,
            other.id,
        )

    def __hash__(self) -> int:
        return hash((self._settings.store_url, self.id))

    @property
    def status(self) -> JobState:
        """State of the job now: queued, running, paused, completed, failed, cancelled or expired.

        Each access reads the store, and blocks meanwhile; in an event loop, await `progress.aio()` for its `state`.
        """
        return self.progress().state

    @property
    def deadline(self) -> datetime | None:
        """Moment by which the job is to be done, in UTC; None without a deadline.

        Each access reads the store, and blocks meanwhile.
        """
        return to_datetime(self.progress().deadline)

    @blocking
    def forecast(self) -> "Forecast | None":
        """Moments at which the job is done with 50 and 90 %; None if no row waits or hardly any was answered."""
        from conserve.jobs.deadlines.queue import forecast_queue
        from conserve.store.books.readings import read_harvested

        now, known = time.time(), self.progress().id
        readings = read_jobs(self._settings, now=now)
        return forecast_queue(readings, read_harvested(self._settings), now=now).get(known)

    @blocking
    def progress(self) -> JobReading:
        """Counters of the job at one moment: rows done, failed and waiting, tokens, its model and its tags."""
        return reading_of(self._settings, self.id)

    @awaited
    async def run(
        self,
        *,
        model: str | None = None,
        endpoint: str | None = None,
        engine: Engine | None = None,
        engine_args: Sequence[str] = (),
        api_key: str | None = None,
        rebind: bool = False,
        progress: bool = True,
    ) -> Outcome:
        """Run the job's rows until none is left, and return what this run did.

        `endpoint` names an OpenAI-compatible server, `engine` is an `Engine` that stays up. `model` is the one to
        ask the server for; without a server an engine is started for it, for this run. What is not given is as in
        the settings: `endpoint="none"` starts an engine although they name a server. Failed rows raise nothing; a
        job that is paused, cancelled or refused raises `JobRefused`. Ctrl-C, or cancelling, saves the rows in
        flight first; the next run, in this process or another, goes on from there.
        """
        arguments = RunArguments(
            model=model,
            endpoint=endpoint,
            engine=engine,
            engine_args=engine_args,
            api_key=api_key,
            rebind=rebind,
            progress=progress,
        )
        return await run_now(self._settings, self.id, arguments)

    def start(
        self,
        *,
        model: str | None = None,
        endpoint: str | None = None,
        engine: Engine | None = None,
        engine_args: Sequence[str] = (),
        api_key: str | None = None,
        rebind: bool = False,
        progress: bool = False,
    ) -> Self:
        """Begin `run` in the background; `wait` waits for it, and `stop` ends it."""
        arguments = RunArguments(
            model=model,
            endpoint=endpoint,
            engine=engine,
            engine_args=engine_args,
            api_key=api_key,
            rebind=rebind,
            progress=progress,
        )
        started(self._settings, self.id, arguments)
        return self

    @awaited
    async def wait(self, *, timeout_s: float | None = None) -> JobState:
        """Wait until the job has ended, whichever process runs it; raises the error of a run that `start` began.

        An error is raised once: the next call waits for the next run. Raises `TimeoutError` after `timeout_s`.
        A paused job has not ended.
        """
        return await ended(self._settings, self.id, timeout_s)

    @awaited
    async def stop(self) -> None:
        """End the run that `start` began in this process; its rows in flight are saved."""
        run = under_way.get((self._settings.store_url, self.id))
        if run is not None:
            run.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                # Shielded, since cancelling a wrapped future cancels the run's own, which then takes no result.
                await asyncio.shield(asyncio.wrap_future(run.done))

    @blocking
    def pause(self) -> None:
        """Stop taking rows; rows in flight go back with the tokens they have."""
        self._move("pause")

    @blocking
    def resume(self) -> None:
        """Let a paused job go on, or a refused one try again."""
        self._move("resume")

    @blocking
    def cancel(self) -> None:
        """Stop the job for good; the results it has are kept."""
        self._move("cancel")

    @blocking
    def retry(self) -> int:
        """Put the failed rows back into the queue; returns how many."""
        from conserve.store.books.shards import retry_failed
        from conserve.store.database.store import Store

        with closing(Store.open(self._settings)) as store:
            return retry_failed(store, self.id, now=time.time())

    def results(self, *, with_inputs: bool = False, with_prompts: bool = False) -> Results:
        """Results so far, in the order of the input; read when they are converted."""
        return Results(self._settings, self.id, with_inputs=with_inputs, with_prompts=with_prompts)

    async def __aiter__(self) -> "AsyncIterator[Result]":
        """Yield each row's result once it is durable, until the job has ended. Another task or process runs it."""
        looks = self._looks()
        with closing(looks):
            while (found := await next_look(looks)) is not None:
                for result in found:
                    yield result
                if not found:
                    await asyncio.sleep(SHOW_S)

    def __iter__(self) -> "Iterator[Result]":
        """Yield each row's result once it is durable, until the job has ended; `start` it before."""
        for found in self._looks():
            yield from found
            if not found:
                time.sleep(SHOW_S)

    def _looks(self) -> "Generator[list[Result], None, None]":
        """Yield the results that are new at each look, until the job has ended."""
        watch = JobWatch(self._settings, self.id)
        with closing(self.new_results()) as new:
            ended = False
            while not ended:
                watch.look()
                ended = self.status.final
                yield next(new)

    def new_results(self) -> "Generator[list[Result], None, None]":
        """Yield the results that became durable since the last look, at each `next`; never ends by itself."""
        from conserve.store.books import catalog
        from conserve.store.books.new_results import NewResults
        from conserve.store.database.store import Store

        with closing(Store.open_to_read(self._settings)) as store:
            with store.read() as tx:
                new = NewResults(store, catalog.get(tx, self.id))
            while True:
                yield new.look()

    def _move(self, verb: Verb) -> None:
        from conserve.store.books import catalog
        from conserve.store.database.store import Store

        with closing(Store.open(self._settings)) as store, store.write() as tx:
            catalog.move(tx, self.id, verb, now=time.time())

    def _repr_html_(self) -> str:
        return display.job_html(self.progress())

    def _repr_mimebundle_(self, **kwargs: Any) -> Mapping[str, str]:
        job = self.progress()
        words = f"{job.id}: {job.state}, {job.done:,} of {job.rows:,} rows done"
        return {"text/plain": words, "text/html": display.job_html(job)}


async def next_look(looks: "Iterator[list[Result]]") -> "list[Result] | None":
    """Make the next item in a thread; None at the end."""
    return await in_thread(lambda: next(looks, None))
