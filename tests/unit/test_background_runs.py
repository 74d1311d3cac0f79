"""Runs that `Job.start` began: how they end, and what later waits learn of them."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import conserve
from conserve.api import runs
from conserve.api.display import SilentDisplay
from conserve.api.portal import portal
from conserve.api.running import Outcome, ProfileFlags, check_endpoint
from conserve.errors import SettingsError

QUESTIONS = [{"q": "a"}, {"q": "b"}]
NOWHERE = "ftp://nowhere"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> conserve.Job:
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?tokens=4")
    return conserve.open().submit(QUESTIONS, prompt="{{ q }}")


def run_of(job: conserve.Job) -> Any:
    return runs.under_way[job._settings.store_url, job.id]


def test_a_run_takes_the_endpoint_of_the_settings_back(job: conserve.Job) -> None:
    flags = ["--max-model-len", "64"]
    with pytest.raises(SettingsError, match=r"CONSERVE_ENDPOINT sets an endpoint; .*endpoint='none'"):
        job.run(engine_args=flags)
    asked = runs.RunArguments(endpoint="none", engine_args=flags).settings(job._settings)
    check_endpoint(asked, flags, ProfileFlags())
    assert asked.endpoint is None
    assert runs.RunArguments(model="one").settings(job._settings).endpoint == "fake:?tokens=4"


def test_a_run_that_was_stopped_leaves_no_error_to_later_waits(job: conserve.Job) -> None:
    job.start(endpoint="fake:?start_ms=600000")
    job.stop()
    job.run(progress=False)
    assert job.wait() == "completed"
    assert len(list(job)) == 2


def test_a_later_run_makes_an_earlier_error_void(job: conserve.Job) -> None:
    job.start(endpoint=NOWHERE)
    assert isinstance(run_of(job).done.exception(), SettingsError)
    job.run(progress=False)
    assert job.wait() == "completed"
    assert len(list(job)) == 2


def test_every_wait_under_way_learns_of_an_error_and_later_ones_do_not(job: conserve.Job) -> None:
    first, second, later = (runs.JobWatch(job._settings, job.id) for _ in range(3))
    job.start(endpoint="fake:?start_ms=600000")
    for watch in (first, second):
        watch.look()
    run = run_of(job)
    job.stop()
    run.done = type(run.done)()
    run.done.set_exception(SettingsError("wrong"))
    for watch in (first, second):
        with pytest.raises(SettingsError, match="wrong"):
            watch.look()
        watch.look()
    later.look()


class Worker:
    """Work that saves for as long as the test says."""

    def __init__(self) -> None:
        self.begun, self.saving, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stop = asyncio.Event()
        self.saved = False

    async def work(self) -> None:
        self.begun.set()
        await self.stop.wait()
        self.saving.set()
        await self.may_end.wait()
        self.saved = True


def test_stopping_again_does_not_cut_the_saving_short() -> None:
    async def go() -> None:
        worker = Worker()
        waiting = asyncio.create_task(runs.saved(asyncio.create_task(worker.work()), worker.stop))
        await worker.begun.wait()
        waiting.cancel()
        await worker.saving.wait()
        for _ in range(3):
            waiting.cancel()
            await asyncio.wait([waiting], timeout=0)
            assert not waiting.done()
        worker.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert worker.saved

    asyncio.run(go())


def test_a_cancelled_stop_leaves_the_run_its_result(
    job: conserve.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    begun, stopping = threading.Event(), threading.Event()

    async def stubborn(*given: object) -> Outcome:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopping.set()
            await asyncio.to_thread(may_end.wait)
        return runs.nothing_left([job.progress()])

    monkeypatch.setattr(runs, "drained", stubborn)
    job.start()
    begun.wait()
    stop = portal.submit(job.stop._work())  # type: ignore[attr-defined]
    stopping.wait()
    stop.cancel()
    stop.done.exception()
    may_end.set()
    assert run_of(job).done.result().jobs == {job.id: "queued"}


def test_iterating_may_be_cancelled_while_a_look_at_the_store_is_under_way(
    job: conserve.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, may_end = threading.Event(), threading.Event()
    left = []

    def looks(job: conserve.Job) -> Iterator[list[Any]]:
        try:
            looking.set()
            may_end.wait()
            yield []
        finally:
            left.append(True)

    async def iterate() -> None:
        async for _ in job:
            pass

    async def go() -> None:
        iterating = asyncio.create_task(iterate())
        await asyncio.to_thread(looking.wait)
        for _ in range(2):
            iterating.cancel()
            await asyncio.wait([iterating], timeout=0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await iterating
        assert left

    monkeypatch.setattr(conserve.Job, "_looks", looks)
    try:
        asyncio.run(go())
    finally:
        may_end.set()


@pytest.mark.parametrize("theirs", [True, False])
def test_rows_that_another_harvester_did_are_told_as_its(
    job: conserve.Job, monkeypatch: pytest.MonkeyPatch, theirs: bool
) -> None:
    class Heard(SilentDisplay):
        """Keeps the last sentence."""

        def end(self, summary: str) -> None:
            said.append(summary)

    async def late(*arguments: Any) -> Any:
        monkeypatch.setattr(runs, "endpoint_of", endpoint_of)
        if theirs:
            await runs.drained(job._settings, job.id, runs.RunArguments(progress=False))
            said.clear()
        return await endpoint_of(*arguments)

    said: list[str] = []
    endpoint_of = runs.endpoint_of
    monkeypatch.setattr(runs, "endpoint_of", late)
    monkeypatch.setattr(runs, "display_of", lambda progress: Heard())
    job.run()
    done = f"{job.id}: completed, 2 of 2 rows done; "
    if theirs:
        assert said == [done + "another harvester over this store did 2 rows"]
    else:
        assert said[0].startswith(done + "2 rows in ")
