"""The harvester against a scripted endpoint: what fails, what waits, what goes on where it stopped.

All of it runs in virtual time: seconds are the harvester's and the endpoint's, never the machine's.
"""

import asyncio
import contextlib
import errno
import gc
import resource
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from conserve import owners
from conserve.endpoints.fake import WORDS, FakeEndpoint, Script, answer_tokens, request_text
from conserve.endpoints.protocol import Call, Completion, KvCache, OnTokens
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from conserve.jobs.harvest import comparing, flights, retry, sweeps
from conserve.jobs.harvest.calls import Calls
from conserve.jobs.harvest.harvester import IDLE_S, Harvester
from conserve.jobs.harvest.ledger import Ledger
from conserve.jobs.harvest.suspects import SuspectTurns
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.harvest.write_behind import Outcomes, WriteBehind
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.source import Input
from conserve.jobs.task import Kind, Task
from conserve.jobs.window.lookahead import Lookahead
from conserve.store.books import catalog, journal, leases, queue, saved_tokens, shards
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from conserve.store.files import digests, layout
from conserve.store.sql.query import views
from tests import virtual_time
from tests.commands import HANGS_S
from tests.conftest import COUNT_FROZEN, WriteInput
from tests.store_rows import add_job, leased
from tests.submitting import submit

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
Row = tuple[int, str | None, str | None, int, int]


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> Callable[..., str]:
    """Submits prompts; returns the job's id."""

    def queue_up(*prompts: str, task: Task = TASK) -> str:
        path = write_input(f"input-{len(prompts)}-{abs(hash(prompts))}.parquet", q=list(prompts))
        return submit(store, str(path), task).job_id

    return queue_up


def harvester(store: Store, endpoint: FakeEndpoint, **named: Any) -> Harvester:
    """A harvester that goes by the clock of the running loop."""
    return Harvester(store, endpoint, clock=asyncio.get_running_loop().time, **named)


def harvest(
    store: Store, endpoint: FakeEndpoint, *, stop_after_s: float | None = None, **named: object
) -> Tally:
    async def run() -> Tally:
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        return await harvester(store, endpoint, **named).run(stop)

    return virtual_time.run(run())


def results(store: Store, job_id: str) -> list[Row]:
    with views(store, now=0.0, only=[job_id], sealed=False, uses=lambda empty: {"results"}) as opened:
        return opened.duck.execute(
            "select row_index, text, error_type, attempts, resumed_tokens from results order by 1"
        ).fetchall()


def answer(prompt: str, count: int = 8) -> str:
    return " ".join(WORDS[t] for t in answer_tokens(request_text(TASK.body(prompt)), count))


def job(store: Store, job_id: str) -> catalog.JobRecord:
    with store.read() as tx:
        return catalog.get(tx, job_id)


def test_poison_rows_fail_alone_and_the_job_completes(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("a", "REJECT", "b", "FAULT")
    tally = harvest(store, FakeEndpoint(), max_attempts=3)
    assert [(row[1], row[2]) for row in results(store, job_id)] == [
        (answer("a"), None),
        (None, "invalid_request"),
        (answer("b"), None),
        (None, "endpoint_fault"),
    ]
    assert job(store, job_id).state is JobState.COMPLETED
    assert (tally.succeeded, tally.failed) == (2, 2)


def test_a_run_ends_once_all_results_are_in_shards(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    queue_up(*"abcdef", "REJECT")
    assert harvest(store, FakeEndpoint()).done == 7
    assert in_journal(store) == 0


def test_ended_jobs_are_compacted_beside_the_rows_that_wait_and_until_a_stop(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start may find thousands of them."""
    for prompt in ("a", "b", "c"):
        queue_up(prompt)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "compact", lambda *_, **__: 0)
        harvest(store, FakeEndpoint())
    assert in_journal(store) == 3
    job_id, compact, answered = queue_up("d"), shards.compact, []

    async def run() -> None:
        stop = asyncio.Event()

        def stopped(*given: Any, **named: Any) -> int | None:
            moved = compact(*given, **named)
            answered.append(job(store, job_id).state is JobState.COMPLETED)
            loop.call_soon_threadsafe(stop.set)
            return moved

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(shards, "compact", stopped)
        harvesting = harvester(store, FakeEndpoint())
        await harvesting.run(stop)

    virtual_time.run(run())
    assert answered[0]
    assert len(answered) < 4
    assert in_journal(store) > 0


def in_journal(store: Store) -> int:
    with store.read() as tx:
        return int(tx.execute(text("select count(*) from journal")).scalar_one())


def test_a_long_comparison_holds_up_no_renewal_no_result_and_no_stop(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row takes three times as long as a lease lasts; the other job's files are compared all the time."""
    small, large = queue_up("a"), queue_up("b", "c")
    go, digest = threading.Event(), digests.digest_of

    def slow(path: Path) -> str:
        assert large not in str(path) or go.wait(HANGS_S)
        return digest(path)

    monkeypatch.setattr(comparing, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(digests, "digest_of", slow)
    tally = harvest(store, FakeEndpoint(Script(token_ms=1000, tokens=27)), lease_s=9.0, stop_after_s=60.0)
    assert (tally.succeeded, tally.leases_lost, tally.late) == (1, 0, 0)
    assert (job(store, small).state, job(store, large).state) == (JobState.COMPLETED, JobState.QUEUED)
    go.set()


def test_a_faulty_answer_is_tried_as_often_as_allowed(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("FAULT")
    harvest(store, FakeEndpoint(), max_attempts=4)
    assert results(store, job_id)[0][3] == 4
    assert job(store, job_id).retries == 3


def test_a_rejected_row_is_not_tried_again(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("REJECT")
    endpoint = FakeEndpoint()
    harvest(store, endpoint)
    assert endpoint.calls == 1
    assert results(store, job_id)[0][3] == 1


def test_busy_and_unreachable_endpoints_cost_a_row_nothing(
    store: Store, queue_up: Callable[..., str]
) -> None:
    job_id = queue_up("BUSY", "UNAVAILABLE", "c")
    harvest(store, FakeEndpoint(), max_attempts=1)
    assert [row[2] for row in results(store, job_id)] == [None, None, None]


@pytest.mark.parametrize("before", [False, True])
def test_garbage_is_collected_apart_from_older_objects_while_rows_run(
    store: Store, queue_up: Callable[..., str], before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that had left them out before the run leaves them out after it."""

    class Looking(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            frozen.append(gc.get_freeze_count() > 0)
            return await super().complete(call, on_tokens)

    frozen: list[bool] = []
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)
    queue_up("a")
    gc.unfreeze()
    if before:
        gc.freeze()
    try:
        harvest(store, Looking())
        assert frozen == [True]
        assert (gc.get_freeze_count() > 0) is before
    finally:
        gc.freeze()  # as the other tests run


@pytest.mark.parametrize(("usual", "meanwhile"), [(700, 50_000), (90_000, 90_000), (0, 0)])
def test_garbage_is_collected_rarely_while_rows_run_and_as_before_after_them(
    store: Store, queue_up: Callable[..., str], usual: int, meanwhile: int
) -> None:
    class Looking(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            seen.append(gc.get_threshold())
            return await super().complete(call, on_tokens)

    seen: list[tuple[int, int, int]] = []
    queue_up("a")
    before = gc.get_threshold()
    gc.set_threshold(usual, 11, 12)
    try:
        harvest(store, Looking())
        assert seen == [(meanwhile, 11, 12)]
        assert gc.get_threshold() == (usual, 11, 12)
    finally:
        gc.set_threshold(*before)


class Scripted(FakeEndpoint):
    """Fails one call after the other with these errors, then answers."""

    def __init__(self, *errors: EndpointError) -> None:
        super().__init__()
        self._errors = list(errors)

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        if self._errors:
            raise self._errors.pop(0)
        return await super().complete(call, on_tokens)


def test_a_faulty_answer_is_no_death_of_an_engine(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("a")
    fault, death = EndpointFault("garbage"), EngineDied("gone")
    harvest(store, Scripted(fault, fault, death, fault), max_attempts=5)
    assert [(row[2], row[3]) for row in results(store, job_id)] == [(None, 5)]


def test_a_death_of_an_engine_is_no_faulty_answer(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("a")
    harvest(store, Scripted(EngineDied("gone"), EndpointFault("garbage")), max_attempts=2)
    assert [(row[2], row[3]) for row in results(store, job_id)] == [(None, 3)]


def test_only_the_row_that_kills_the_engine_fails(store: Store, queue_up: Callable[..., str]) -> None:
    prompts = [*(f"innocent {n}" for n in range(20)), "KILL"]
    job_id = queue_up(*prompts)
    endpoint = FakeEndpoint(Script(request_ms=5, token_ms=2, capacity=32))
    harvest(store, endpoint)
    rows = results(store, job_id)
    assert [row[2] for row in rows] == [None] * 20 + ["engine_died"]
    assert endpoint.deaths == 1 + retry.SUSPECT_FAILURES


class Fatal(FakeEndpoint):
    """Has the whole harvester die, with all that it has in flight, once it gets the row that kills."""

    def __init__(self) -> None:
        super().__init__(Script(request_ms=5, token_ms=2, capacity=8))
        self.died = asyncio.Event()

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        if "KILL" in request_text(call.body):
            self.died.set()
        if self.died.is_set():
            await asyncio.Event().wait()  # for ever
        return await super().complete(call, on_tokens)


class Mortal(Harvester):
    """Gives nothing back when it dies, and is known to be dead."""

    def __init__(self, *given: Any, **named: Any) -> None:
        host, pid, _, nonce = owners.this_process().rsplit(":", 3)
        with mock.patch.object(owners, "this_process", return_value=f"{host}:{pid}:0.00:{nonce}"):
            super().__init__(*given, **named)

    async def _end_session(self, failed: BaseException | None) -> None:
        await self._flights.withdraw_all()


def deaths_until_drained(store: Store, **named: Any) -> int:
    """Start harvesters, each after the last one died, until one drains the queue; returns how many died."""

    async def is_killed() -> bool:
        endpoint, clock = Fatal(), asyncio.get_running_loop().time
        running = asyncio.create_task(Mortal(store, endpoint, clock=clock, **named).run(asyncio.Event()))
        dying = asyncio.create_task(endpoint.died.wait())
        await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not endpoint.died.is_set():
            await running
        running.cancel()
        dying.cancel()
        await asyncio.gather(running, dying, return_exceptions=True)
        return endpoint.died.is_set()

    return next(deaths for deaths in range(20) if not virtual_time.run(is_killed()))


@pytest.mark.parametrize("max_deaths", [1, 2, 5])
def test_only_the_row_that_kills_the_whole_harvester_fails(
    store: Store, queue_up: Callable[..., str], max_deaths: int
) -> None:
    """It is lost three times with others, and then so often alone; rows behind it do not wait for that."""
    prompts = ["innocent 0", "KILL", *(f"innocent {n}" for n in range(1, 30))]
    job_id = queue_up(*prompts)
    assert deaths_until_drained(store, max_deaths=max_deaths) == 3 + max_deaths
    rows = results(store, job_id)
    assert [row[2] for row in rows] == [None, "engine_died", *[None] * 29]
    assert job(store, job_id).state is JobState.COMPLETED


@pytest.mark.parametrize("max_deaths", [1, 3])
def test_a_row_that_kills_engines_fails_after_as_many_as_were_allowed(
    store: Store, queue_up: Callable[..., str], max_deaths: int
) -> None:
    job_id = queue_up("innocent", "KILL")
    endpoint = FakeEndpoint(Script(request_ms=5, capacity=2))
    harvest(store, endpoint, max_deaths=max_deaths)
    assert [row[2] for row in results(store, job_id)] == [None, "engine_died"]
    assert endpoint.deaths == 1 + max_deaths


def test_answers_that_break_the_harvesters_code_are_warned_of_once_a_kind(
    store: Store, queue_up: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    job_id = queue_up("a", "b", "c")

    class Odd(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            if "c" in call.body["messages"][-1]["content"]:
                raise KeyError("choices")
            raise ZeroDivisionError("no tokens")

    harvest(store, Odd(), max_attempts=2)
    assert [row[2] for row in results(store, job_id)] == ["endpoint_fault"] * 3
    warned = [record for record in caplog.records if "has no usable answer" in record.getMessage()]
    assert sorted((record.job, record.row) for record in warned) in (  # type: ignore[attr-defined]
        [(job_id, 0), (job_id, 2)],
        [(job_id, 1), (job_id, 2)],
    )
    assert f"row 2 of {job_id} has no usable answer (KeyError: 'choices')" in warned[1].getMessage()


def test_an_endpoint_that_is_unusable_is_not_waited_for(store: Store, queue_up: Callable[..., str]) -> None:
    """Another row was asked to wait half a minute."""
    queue_up("a", "b")

    class Fading(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            self.calls += 1
            if self.calls == 1:
                raise EndpointBusy("slow down", retry_after_s=30.0)
            await asyncio.sleep(1.0)
            raise EndpointUnusable("no GPU left")

    async def run() -> float:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(EndpointUnusable, match="no GPU"):
            await harvester(store, Fading()).run(asyncio.Event())
        return asyncio.get_running_loop().time() - begun

    assert 1.0 <= virtual_time.run(run()) < 2.0


def test_refusals_of_rows_that_never_come_back_are_forgotten(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other harvesters may finish them; the rows that were refused last are remembered."""
    monkeypatch.setattr(flights, "MOST_REFUSED", 2)
    queue_up("a", "b", "c")

    async def run() -> list[int]:
        works = await (asked := Harvester(store, FakeEndpoint()))._next_works()
        counted = asked._flights
        times = []
        for number in (0, 1, 0, 2, 0, 1):
            times.append(counted._refusals_of(works[number]))
            counted._answers += 1
        assert [*counted._refused] == [works[0].key, works[1].key]
        return times

    assert asyncio.run(run()) == [1, 1, 2, 1, 3, 1]


@pytest.mark.parametrize("prompt", ["fine", "REJECT"])
def test_a_row_that_ends_leaves_no_refusal_behind(
    store: Store, queue_up: Callable[..., str], prompt: str
) -> None:
    queue_up(prompt)

    class BusyOnce(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            if not self.calls:
                self.calls += 1
                raise EndpointBusy("slow down")
            return await super().complete(call, on_tokens)

    async def run() -> None:
        asked = harvester(store, BusyOnce())
        tally = await asked.run(asyncio.Event())
        assert (tally.done, tally.retried, asked._flights._refused) == (1, 1, {})

    virtual_time.run(run())


def test_why_rows_wait_is_told_as_long_as_they_do(store: Store, queue_up: Callable[..., str]) -> None:
    """Rows that fail for the same reason meanwhile begin no wait of their own."""
    queue_up(*(f"q{number}" for number in range(4)))
    told: list[str | None] = []

    class Busy(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            self.calls += 1
            calls = self.calls
            await asyncio.sleep(0.1 * calls)
            raise EndpointBusy(f"refusal {calls}", retry_after_s=5.0)

    async def run() -> None:
        following = Following(store, Busy())
        for seconds in (0.15, 0.1, 0.1, 0.1, 3.0):
            await asyncio.sleep(seconds)
            told.append(following.harvester.tally.waiting_for)
        await following.end()

    virtual_time.run(run())
    assert told == ["refusal 1; trying again in 5 s"] * 5


def test_a_stop_saves_tokens_and_the_next_run_continues_from_them(
    store: Store, queue_up: Callable[..., str]
) -> None:
    job_id = queue_up("long one", "long two")
    script = Script(token_ms=5, tokens=100)
    harvest(store, FakeEndpoint(script), stop_after_s=0.25)
    second = FakeEndpoint(script)
    tally = harvest(store, second)
    assert len(second.continued) == 2
    assert all(0 < count < 100 for count in second.continued)
    rows = results(store, job_id)
    assert [row[1] for row in rows] == [answer("long one", 100), answer("long two", 100)]
    assert [row[4] for row in rows] == second.continued
    assert tally.resumed_tokens == sum(second.continued)


class Proxied(FakeEndpoint):
    """A proxy in front of it cuts each answer off after so many tokens."""

    def __init__(self, script: Script, *lets_through: int) -> None:
        super().__init__(script)
        self._lets_through = iter(lets_through)

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        assert on_tokens is not None
        most = len(call.resume_from) + next(self._lets_through)

        def cut(tokens: Sequence[int]) -> None:
            if len(tokens) > most:
                raise EndpointFault("the connection broke")
            on_tokens(tokens)

        return await super().complete(call, cut)


def test_a_row_that_is_cut_off_every_few_tokens_gets_done(
    store: Store, queue_up: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    job_id = queue_up("long one")
    endpoint = Proxied(Script(token_ms=5, tokens=20), *[3] * 7)
    harvest(store, endpoint, max_attempts=2)
    assert endpoint.continued == [3, 6, 9, 12, 15, 18]
    assert results(store, job_id) == [(0, answer("long one", 20), None, 7, 18)]
    assert caplog.text.count("the connection broke") == 1


def test_an_attempt_that_gets_no_further_counts_against_the_row(
    store: Store, queue_up: Callable[..., str]
) -> None:
    job_id = queue_up("long one")
    endpoint = Proxied(Script(token_ms=5, tokens=20), 3, 0, 0)
    harvest(store, endpoint, max_attempts=2)
    assert endpoint.continued == [3, 3]
    assert [row[2:4] for row in results(store, job_id)] == [("endpoint_fault", 3)]


def test_servers_that_throw_away_each_others_tokens_fail_a_row_in_the_end(
    store: Store, queue_up: Callable[..., str]
) -> None:
    """Each begins anew, since the saved tokens are the other's, and gets no further than the other did."""
    job_id = queue_up("long one")

    class InTurns(Proxied):
        @property
        def identity(self) -> str:
            return f"server {self.calls % 2}"

    endpoint = InTurns(Script(token_ms=5, tokens=20), 3, 3, 3)
    harvest(store, endpoint, max_attempts=2)
    assert not endpoint.continued
    assert [row[2:4] for row in results(store, job_id)] == [("endpoint_fault", 3)]


@pytest.mark.parametrize("steps", range(8))
def test_a_stop_in_the_moment_in_which_a_row_lands_is_a_stop(
    store: Store, queue_up: Callable[..., str], steps: int
) -> None:
    """The stop comes a few steps of the event loop after an answer."""
    queue_up(*(f"q{number}" for number in range(40)))
    stop = asyncio.Event()

    class Endpoint(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            completion = await super().complete(call, on_tokens)
            self.after(steps)
            return completion

        def after(self, steps: int) -> None:
            if steps:
                asyncio.get_running_loop().call_soon(self.after, steps - 1)
            else:
                stop.set()

    async def run() -> Tally:
        async with asyncio.timeout(600):
            return await harvester(store, Endpoint(Script(capacity=4)), follow=True).run(stop)

    assert virtual_time.run(run()).succeeded < 40


async def last_write_waits(harvesting: Harvester, rows: int, idle: threading.Event) -> None:
    """Return once the write of so many rows waits for the store's thread, which is busy until `idle`."""
    while len(harvesting._recording.outcomes.finished) < rows:
        await asyncio.sleep(0)
    harvesting._thread.submit(idle.wait)
    harvesting._recording.full.set()
    while harvesting._recording.outcomes:
        await asyncio.sleep(0)


def test_a_lease_that_ends_with_its_last_row_while_it_is_renewed_was_not_lost(
    store: Store, queue_up: Callable[..., str]
) -> None:
    queue_up("a", "b", "c")

    async def run() -> Tally:
        idle = threading.Event()
        harvesting = harvester(store, FakeEndpoint(), lease_s=1.5)
        running = asyncio.create_task(harvesting.run(asyncio.Event()))
        await last_write_waits(harvesting, 3, idle)
        asyncio.get_running_loop().jump(1.0)  # type: ignore[attr-defined]
        for _ in range(100):  # turns of the loop, of which the renewal takes a few
            await asyncio.sleep(0)
        idle.set()
        return await running

    tally = virtual_time.run(run())
    assert (tally.succeeded, tally.late, tally.leases_lost) == (3, 0, 0)


def test_a_stop_writes_what_waits_for_the_stores_thread(store: Store, queue_up: Callable[..., str]) -> None:
    queue_up("a", "b", "c")

    async def run() -> Tally:
        stop, idle = asyncio.Event(), threading.Event()
        harvesting = harvester(store, FakeEndpoint())
        running = asyncio.create_task(harvesting.run(stop))
        await last_write_waits(harvesting, 3, idle)
        stop.set()
        for _ in range(100):  # turns of the loop, of which the stop takes a few
            await asyncio.sleep(0)
        idle.set()
        return await running

    assert virtual_time.run(run()).succeeded == 3
    again = FakeEndpoint()
    harvest(store, again)
    assert again.calls == 0


def test_tokens_are_saved_every_64_without_a_stop(store: Store, queue_up: Callable[..., str]) -> None:
    queue_up("long")
    saved: list[int] = []

    async def crash() -> None:
        running = asyncio.create_task(
            harvester(store, FakeEndpoint(Script(token_ms=2, tokens=400))).run(asyncio.Event())
        )
        while not saved:
            await asyncio.sleep(0.02)
            with store.read() as tx:
                tokens = tx.scalar(text("select tokens from request"))
            if tokens is not None:
                saved.append(len(saved_tokens.unpack_tokens(tokens)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtual_time.run(crash())
    assert saved[0] % 64 == 0


def test_a_long_answer_is_saved_ever_more_rarely(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save writes all tokens: every 64 of them, these would be half a million."""
    queue_up("long")
    saved, save = list[int](), WriteBehind.save

    def noted(self: WriteBehind, work: ReadyRow, tokens: Sequence[int]) -> None:
        saved.append(len(tokens))
        save(self, work, tokens)

    monkeypatch.setattr(WriteBehind, "save", noted)
    harvest(store, FakeEndpoint(Script(token_ms=2, tokens=8192)))
    assert saved[:9] == [*range(64, 577, 64)]
    assert all(64 < later - earlier <= earlier / 8 for earlier, later in pairwise(saved[8:]))
    assert sum(saved) < 9 * 8192


def test_tokens_of_another_model_are_not_continued(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("long")
    harvest(store, FakeEndpoint(Script(token_ms=5, tokens=100)), stop_after_s=0.2)
    other = FakeEndpoint(Script(tokens=100, identity="another model"))
    harvest(store, other)
    assert other.continued == []
    assert results(store, job_id)[0][1] == answer("long", 100)


def test_rows_that_cannot_be_continued_exactly_start_over(store: Store, queue_up: Callable[..., str]) -> None:
    task = Task(kind=Kind.PROMPT, template="{{ q }}", params={"logprobs": True})
    job_id = queue_up("long", task=task)
    harvest(store, FakeEndpoint(Script(token_ms=5, tokens=100)), stop_after_s=0.2)
    second = FakeEndpoint(Script(tokens=100))
    harvest(store, second)
    assert second.continued == []
    assert results(store, job_id)[0][1] == answer("long", 100)


@pytest.mark.parametrize(("verb", "state"), [("pause", JobState.PAUSED), ("cancel", JobState.CANCELLED)])
def test_a_job_told_to_stop_gives_its_rows_back(
    store: Store, queue_up: Callable[..., str], verb: str, state: JobState
) -> None:
    job_id = queue_up(*(f"row {n}" for n in range(8)))

    async def run() -> Tally:
        running = asyncio.create_task(
            harvester(store, FakeEndpoint(Script(token_ms=20, tokens=1000))).run(asyncio.Event())
        )
        await asyncio.sleep(0.2)
        with store.write() as tx:
            catalog.move(tx, job_id, verb, now=0.0)
        return await asyncio.wait_for(running, 20)

    tally = virtual_time.run(run())
    assert job(store, job_id).state is state
    assert [*tally.cancelled] == ([job_id] if verb == "cancel" else [])
    with store.read() as tx:
        assert tx.execute(text("select count(*), count(epoch), count(tokens) from request")).one() == (
            8,
            0,
            8,
        )
        assert tx.scalar(text("select count(*) from lease")) == 0


def test_a_row_whose_lease_was_lost_is_not_written_twice(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("a", "b", "c")

    class Gated(FakeEndpoint):
        """Holds every answer back until it is opened."""

        def __init__(self) -> None:
            super().__init__()
            self.opened = asyncio.Event()

        async def complete(self, *arguments: Any) -> Any:
            done = await super().complete(*arguments)
            await self.opened.wait()
            return done

    async def race() -> tuple[Tally, Tally]:
        endpoint = Gated()
        slow = harvester(store, endpoint)
        first = asyncio.create_task(slow.run(asyncio.Event()))
        while endpoint.calls < 3:
            await asyncio.sleep(0.01)
        with store.write() as tx:
            leases.abandon(tx, [slow.owner])
        quick = await harvester(store, FakeEndpoint()).run(asyncio.Event())
        endpoint.opened.set()
        return await first, quick

    late, quick = virtual_time.run(race())
    assert (quick.done, late.done, late.late) == (3, 0, 3)
    assert len(results(store, job_id)) == 3


def test_a_lease_that_others_ended_is_noticed_and_its_rows_begin_anew(
    store: Store, queue_up: Callable[..., str]
) -> None:
    job_id = queue_up("a", "b")
    endpoint = FakeEndpoint(Script(request_ms=4000, capacity=4))

    async def run() -> Tally:
        following = Following(store, endpoint, lease_s=3.0)
        working = following.harvester
        await following.until(lambda: working.tally.in_flight == 2)
        with store.write() as tx:
            assert leases.abandon(tx, [working.owner]) == 1
        await following.until(lambda: working.tally.leases_lost == 1, seconds=1.6)
        await following.until(lambda: endpoint.calls == 4, seconds=0.5)
        await following.until(lambda: [*working.tally.completed] == [job_id], seconds=5.0)
        return await following.end()

    tally = virtual_time.run(run())
    assert (tally.succeeded, tally.late, tally.leases_lost) == (2, 0, 1)


def test_leases_are_renewed_long_before_they_end(store: Store, queue_up: Callable[..., str]) -> None:
    queue_up("a", "b")
    left: list[float] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        following = Following(store, FakeEndpoint(Script(request_ms=10_000)), lease_s=6.0)
        await following.until(lambda: following.harvester.tally.in_flight == 2)
        while following.harvester.tally.in_flight:
            with store.read() as tx:
                left.extend(end - loop.time() for end in tx.scalars(text("select expires_at from lease")))
            await asyncio.sleep(0.25)
        await following.end()

    virtual_time.run(run())
    assert min(left) > 3.0
    assert max(left) <= 6.0


def test_an_idle_harvester_asks_once_at_each_look_whether_a_row_may_be_claimed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its suspects it asked a second time, before anything could have changed."""
    asked: list[bool] = []
    claimable = Ledger.claimable

    def counted(ledger: Ledger) -> bool:
        asked.append(claimable(ledger))
        return asked[-1]

    monkeypatch.setattr(Ledger, "claimable", counted)
    harvest(store, FakeEndpoint(), follow=True, stop_after_s=20.0)
    assert 90 <= len(asked) <= 20 / IDLE_S


def test_a_pause_is_noticed_within_a_second_and_its_end_too(
    store: Store, queue_up: Callable[..., str]
) -> None:
    job_id = queue_up("a", "b", "c")
    endpoint = FakeEndpoint(Script(token_ms=100, tokens=100))

    async def run() -> Tally:
        following = Following(store, endpoint)
        tally = following.harvester.tally
        await following.until(lambda: tally.in_flight == 3)
        for verb, in_flight in (("pause", 0), ("resume", 3)):
            await asyncio.sleep(3.0)
            with store.write() as tx:
                catalog.move(tx, job_id, verb, now=0.0)
            await following.until(lambda in_flight=in_flight: tally.in_flight == in_flight, seconds=1.0)
        await following.until(lambda: tally.done == 3)
        assert [*tally.cancelled] == []
        return await following.end()

    assert virtual_time.run(run()).succeeded == 3
    assert len(endpoint.continued) == 3


def test_two_harvesters_on_one_store_share_the_rows(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up(*(f"row {n}" for n in range(400)))

    async def both() -> list[Tally]:
        script = Script(request_ms=5, capacity=32)
        return await asyncio.gather(
            *(harvester(store, FakeEndpoint(script)).run(asyncio.Event()) for _ in range(2))
        )

    tallies = virtual_time.run(both())
    assert sum(tally.done for tally in tallies) == 400
    assert all(tally.done and not tally.late for tally in tallies)
    assert [row[0] for row in results(store, job_id)] == list(range(400))


def test_a_job_whose_input_changed_is_refused_and_can_be_resumed(
    store: Store, write_input: WriteInput, tmp_path: Path
) -> None:
    path = write_input(q=["a"])
    job_id = submit(store, Input(names=[str(path)], keep=Keep.REFERENCE), TASK).job_id
    original = path.read_bytes()
    write_input(q=["something else"])
    tally = harvest(store, FakeEndpoint())
    assert "changed after" in str(tally.refused[job_id])
    assert job(store, job_id).state is JobState.FAILED
    path.write_bytes(original)
    with store.write() as tx:
        catalog.move(tx, job_id, "resume", now=0.0)
    harvest(store, FakeEndpoint())
    assert results(store, job_id)[0][1] == answer("a")


def test_a_full_disk_stops_the_run_and_loses_nothing(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up(*(f"row {n}" for n in range(400)))
    with store.engine.connect() as connection:
        pages = connection.exec_driver_sql("pragma page_count").scalar()
    limit = f"pragma max_page_count = {pages + 7}"

    def small_disk(connection: object, _: object) -> None:
        connection.execute(limit)  # type: ignore[attr-defined]

    store.engine.dispose()
    event.listen(store.engine, "connect", small_disk)
    with pytest.raises(StoreFull, match="no space left"):
        harvest(store, FakeEndpoint())
    event.remove(store.engine, "connect", small_disk)
    store.engine.dispose()
    harvest(store, FakeEndpoint())
    assert [row[0] for row in results(store, job_id)] == list(range(400))


def test_an_endpoint_that_cannot_serve_ends_the_run_and_blames_no_row(
    store: Store, queue_up: Callable[..., str]
) -> None:
    job_id = queue_up("a")

    class Broken(FakeEndpoint):
        async def complete(self, *_: object) -> object:  # type: ignore[override]
            raise EndpointUnusable("no GPU left")

    with pytest.raises(EndpointUnusable, match="no GPU left"):
        harvest(store, Broken())
    assert job(store, job_id).failed == 0
    harvest(store, FakeEndpoint())
    assert len(results(store, job_id)) == 1


def test_tokens_of_rows_at_an_endpoint_that_becomes_unusable_are_kept(
    store: Store, queue_up: Callable[..., str]
) -> None:
    queue_up("long")
    script = Script(token_ms=5, tokens=100)

    class Fading(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await super().complete(call, on_tokens)
            raise EndpointUnusable("no GPU left")

    with pytest.raises(EndpointUnusable, match="no GPU left"):
        harvest(store, Fading(script))
    second = FakeEndpoint(script)
    harvest(store, second)
    assert second.continued == [39]


def test_a_server_that_starts_and_refuses_rows_is_back_once_it_answers_one(
    store: Store, queue_up: Callable[..., str]
) -> None:
    queue_up("a")

    class Refusing(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            completion = await super().complete(call, on_tokens)
            if self.calls <= 3:
                raise EndpointUnusable("the key is not valid")
            return completion

    async def run() -> Following:
        following = Following(store, Refusing())
        begun = asyncio.get_running_loop().time()
        await following.until(lambda: following.harvester.tally.succeeded == 1)
        assert 7.0 <= asyncio.get_running_loop().time() - begun < 8.0, "1, 2 and 4 s"
        await following.end()
        return following

    following = virtual_time.run(run())
    assert following.headlines == [
        "the endpoint cannot be reached",
        "the endpoint is back; harvesting goes on",
    ]
    assert following.harvester.tally.outages == {"endpoint": 1}


def test_a_row_that_another_joined_is_not_to_blame_for_the_engines_death(
    store: Store, queue_up: Callable[..., str]
) -> None:
    """Each of the two was the first, or the last, in flight."""

    class Dying(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            completion = await super().complete(call, on_tokens)
            if self.calls <= 2:
                await asyncio.sleep(2.0 if self.calls == 1 else 1.0)
                raise EngineDied("gone")
            return completion

    async def run() -> Tally:
        following = Following(store, Dying(Script(request_ms=500)), max_deaths=1)
        queue_up("first")
        await following.until(lambda: following.harvester.tally.in_flight == 1)
        queue_up("second")
        await following.until(lambda: following.harvester.tally.in_flight == 2)
        await following.until(lambda: following.harvester.tally.done == 2)
        return await following.end()

    tally = virtual_time.run(run())
    assert (tally.succeeded, tally.failed) == (2, 0)


def test_no_row_is_sent_while_the_endpoint_asks_to_wait(store: Store, queue_up: Callable[..., str]) -> None:
    queue_up("a", "b")
    sent_at: list[float] = []

    class Busy(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            sent_at.append(asyncio.get_running_loop().time())
            if len(sent_at) == 1:
                raise EndpointBusy("too many requests", retry_after_s=7.0)
            return await super().complete(call, on_tokens)

    waits: list[str | None] = []

    async def run() -> None:
        working = harvester(store, Busy(Script(capacity=1, request_ms=1000)))
        for seconds in (3.0, 7.5):
            asyncio.get_running_loop().call_later(seconds, lambda: waits.append(working.tally.waiting_for))
        await working.run(asyncio.Event())

    virtual_time.run(run())
    assert len(sent_at) == 3
    assert sent_at[1] - sent_at[0] == pytest.approx(7.0, abs=0.1)
    assert waits == ["too many requests; trying again in 7 s", None]


@pytest.mark.parametrize(("params", "watched"), [({}, True), ({"logprobs": True}, False)])
def test_tokens_are_asked_for_where_a_row_can_continue_from_them(
    store: Store, queue_up: Callable[..., str], params: dict[str, bool], watched: bool
) -> None:
    queue_up("a", task=Task(kind=Kind.PROMPT, template="{{ q }}", params=params))
    seen: list[bool] = []

    class Watched(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            seen.append(on_tokens is not None)
            return await super().complete(call)

    harvest(store, Watched())
    assert seen == [watched]


def test_rows_of_several_jobs_are_chosen_by_the_blocks_of_the_endpoints_cache(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue_up("a")
    queue_up("b", "c")
    caches: list[KvCache] = []

    class Noted(Lookahead):
        def __init__(self, *arguments: Any, cache: KvCache, **named: Any) -> None:
            caches.append(cache)
            super().__init__(*arguments, cache=cache, **named)

    class Cached(FakeEndpoint):
        kv_cache = KvCache(block_tokens=32, num_blocks=77)

    monkeypatch.setattr("conserve.jobs.harvest.ledger.Lookahead", Noted)
    harvest(store, Cached())
    assert set(caches) == {Cached.kv_cache}


def test_a_harvester_tells_how_far_its_rows_are(store: Store, queue_up: Callable[..., str]) -> None:
    queue_up("a", "b", "c")

    async def run() -> Harvester:
        working = harvester(store, FakeEndpoint(Script(request_ms=100, capacity=2)))
        assert working.ready_at is None
        running = asyncio.create_task(working.run(asyncio.Event()))
        while working.tally.answered < 2:
            await asyncio.sleep(0.001)
        assert working.tally.succeeded == 0, "none is durable yet"
        while not working.tally.in_flight:
            await asyncio.sleep(0.001)
        seen = working.progress(rows_left=3)
        assert (seen.rows_done, seen.rows_in_flight, seen.rows_waiting) == (2, 1, 0)
        assert working.progress(rows_left=9).rows_waiting == 6
        assert seen.tokens_done == working.tally.answered_tokens > 0
        await running
        return working

    working = virtual_time.run(run())
    assert working.ready_at is not None
    assert working.ended_at is not None
    assert working.ready_at <= working.ended_at
    assert working.progress(rows_left=0).rows_waiting == 0


def test_a_row_that_cannot_be_rendered_fails_without_a_call(
    store: Store, queue_up: Callable[..., str]
) -> None:
    task = Task(kind=Kind.PROMPT, template="{{ 1 / (q | length - 1) }}")
    job_id = queue_up("x", "xyz", task=task)
    endpoint = FakeEndpoint()
    harvest(store, endpoint)
    assert endpoint.calls == 1
    assert [row[2] for row in results(store, job_id)] == ["template", None]


def test_large_answers_fill_a_shard_by_their_bytes(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 2_000)
    job_id = queue_up(*(f"row {n}" for n in range(50)))
    harvest(store, FakeEndpoint())
    with store.read() as tx:
        files = tx.scalar(text("select count(*) from shard"))
    assert files >= 5
    assert [row[0] for row in results(store, job_id)] == list(range(50))


class Following:
    """A harvester that follows, in the background of an event loop."""

    def __init__(self, store: Store, endpoint: FakeEndpoint, **named: object) -> None:
        self.said: list[str] = []
        self.harvester = harvester(store, endpoint, follow=True, say=self.said.append, **named)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.harvester.run(self.stop))

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Return once the condition holds, within so many virtual seconds."""
        async with asyncio.timeout(seconds):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def end(self) -> Tally:
        self.stop.set()
        return await asyncio.wait_for(self.task, 60)

    @property
    def headlines(self) -> list[str]:
        """Warnings without their reasons."""
        return [line.partition(" (")[0] for line in self.said]


def test_rows_that_are_called_out_during_a_look_for_rows_are_not_slept_through(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the call the harvester would look again in an hour."""
    monkeypatch.setattr("conserve.jobs.harvest.harvester.LISTENING_S", 3600.0)
    monkeypatch.setattr(Calls, "listening", True)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        following = Following(store, FakeEndpoint())
        working = following.harvester
        nothing_left = working._ledger.nothing_left

        queued: list[str] = []

        def queued_meanwhile() -> bool:
            found = nothing_left()
            if not queued:
                queued.append(queue_up("a", "b", "c"))
                loop.call_soon_threadsafe(working._look_again)
            return found

        monkeypatch.setattr(working._ledger, "nothing_left", queued_meanwhile)
        await following.until(lambda: working.tally.succeeded == 3)
        await following.end()

    virtual_time.run(run())


def test_a_harvester_that_stays_up_sweeps_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that cannot be swept right then is swept the next time."""
    monkeypatch.setattr(sweeps, "EVERY_S", 1.0)
    swept: list[Store] = []

    def sweep(store: Store, *, now: float) -> int:
        swept.append(store)
        raise StoreUnreachable("the bucket is away")

    monkeypatch.setattr(sweeps.sweep, "sweep", sweep)

    async def run() -> None:
        following = Following(store, FakeEndpoint())
        await following.until(lambda: len(swept) == 2)
        await following.end()

    virtual_time.run(run())
    assert swept[:2] == [store, store]


def test_results_of_a_job_that_ends_early_go_to_a_file_while_the_harvester_stays_up(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "EVERY_S", 1.0)
    job_id = queue_up("a", "b")

    def journalled() -> int:
        with store.read() as tx:
            return int(tx.scalar(text("select count(*) from journal")) or 0)

    async def run() -> None:
        following = Following(store, FakeEndpoint(Script(request_ms=2000, capacity=1)))
        await following.until(lambda: journalled() == 1)
        with store.write() as tx:
            catalog.move(tx, job_id, "cancel", now=0.0)
        await following.until(lambda: journalled() == 0)
        await following.end()

    virtual_time.run(run())
    assert len(results(store, job_id)) == 1


def test_sweeps_begin_an_hour_after_the_last_one_has_begun(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes longer is waited for."""
    swept: list[float] = []
    goes_on = threading.Event()

    def sweep(_: Store, *, now: float) -> int:
        swept.append(now)
        goes_on.wait()
        return 0

    monkeypatch.setattr(sweeps.sweep, "sweep", sweep)
    moments = iter([1.0, 2.0, 3.0])
    hourly = sweeps.Sweeps(store, clock=lambda: next(moments))
    hour = sweeps.EVERY_S
    for now in (5.0, 4.9 + hour, 5.0 + hour, 5.0 + 2 * hour):
        hourly.look(now)
    goes_on.set()
    for now in (4.9 + 3 * hour, 5.0 + 3 * hour):
        assert hourly._thread is not None
        hourly._thread.join()
        hourly.look(now)
    hourly._thread.join()
    assert swept == [1.0, 2.0]


class SocketListener:
    """Calls of a database that come as bytes; the connection ends where its other end is closed."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.closed = False

    def fileno(self) -> int:
        return self.near.fileno()

    def heard(self) -> bool:
        return bool(self.near.recv(100))

    def close(self) -> None:
        self.near.close()
        self.closed = True


def test_calls_are_heard_until_the_connection_ends_or_another_takes_its_place() -> None:
    """The end of a connection is heard too: a call may have been lost with it."""

    async def run() -> None:
        heard: asyncio.Queue[bool] = asyncio.Queue()
        calls = Calls(lambda: heard.put_nowait(calls.listening))
        assert not calls.listening
        first, second = SocketListener(), SocketListener()
        calls.begin(first)  # type: ignore[arg-type]
        first.far.send(b"call")
        assert await asyncio.wait_for(heard.get(), 60)
        calls.begin(second)  # type: ignore[arg-type]
        assert first.closed
        second.far.close()
        assert not await asyncio.wait_for(heard.get(), 60), "it listens no longer"
        assert second.closed
        calls.begin(None)
        assert not calls.listening
        first.far.close()

    asyncio.run(run())


def test_rows_that_are_called_out_during_a_claim_do_not_wait_for_the_next_look(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is in flight for hours, and without the call the harvester would look again in an hour."""
    monkeypatch.setattr("conserve.jobs.harvest.harvester.LISTENING_S", 3600.0)
    monkeypatch.setattr(Calls, "listening", True)
    queue_up("long")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        following = Following(store, FakeEndpoint(Script(request_ms=1e7, capacity=8)))
        working = following.harvester
        claim = working._ledger.claim
        queued: list[str] = []

        def called_meanwhile(*arguments: Any) -> Any:
            works = claim(*arguments)
            if not works and not queued:
                queued.append(queue_up("a", "b", "c"))
                loop.call_soon_threadsafe(working._look_again)
            return works

        monkeypatch.setattr(working._ledger, "claim", called_meanwhile)
        await following.until(lambda: working.tally.in_flight == 4)
        await following.end()

    virtual_time.run(run())


def test_a_pause_that_is_called_out_is_noticed_and_otherwise_jobs_are_looked_at_rarely(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conserve.jobs.harvest.harvester.LISTENING_S", 100.0)
    monkeypatch.setattr(Calls, "listening", True)
    job_id = queue_up("long")

    async def run() -> None:
        following = Following(store, FakeEndpoint(Script(request_ms=1e7)))
        working = following.harvester
        await following.until(lambda: working.tally.in_flight == 1)
        stopped_jobs = working._ledger.stopped_jobs
        looks: list[set[str]] = []

        def look() -> set[str]:
            looks.append(stopped_jobs())
            return looks[-1]

        monkeypatch.setattr(working._ledger, "stopped_jobs", look)
        await asyncio.sleep(950.0)
        assert len(looks) in (9, 10)
        with store.write() as tx:
            catalog.move(tx, job_id, "pause", now=0.0)
        working._look_again()
        await following.until(lambda: working.tally.in_flight == 0, seconds=1.0)
        assert looks[-1] == {job_id}
        await asyncio.sleep(50.0)
        assert len(looks) in (10, 11), "one call is one look"
        await following.end()

    virtual_time.run(run())


class Timed(FakeEndpoint):
    """Takes as many milliseconds for a row as its prompt says, and notes how many rows it has at a time."""

    def __init__(self, capacity: int) -> None:
        super().__init__(Script(capacity=capacity))
        self.running = 0
        self.loads: list[int] = []

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        self.running += 1
        self.loads.append(self.running)
        try:
            await asyncio.sleep(int(call.body["messages"][-1]["content"].split()[-1]) / 1e3)
            return await super().complete(call, on_tokens)
        finally:
            self.running -= 1


def timed(store: Store, endpoint: FakeEndpoint, **named: Any) -> tuple[float, list[int]]:
    """Seconds that a harvest takes, and the numbers of rows that it asked the store for."""
    asked: list[int] = []

    async def run() -> float:
        working = harvester(store, endpoint, **named)
        claim = working._ledger.claim

        def noted(limit: int, suspect: bool, identity: str) -> Any:
            if not suspect:
                asked.append(limit)
            return claim(limit, suspect, identity)

        working._ledger.claim = noted  # type: ignore[method-assign]
        begun = asyncio.get_running_loop().time()
        await working.run(asyncio.Event())
        return asyncio.get_running_loop().time() - begun

    return virtual_time.run(run()), asked


def test_an_endpoint_stays_full_while_there_are_rows(store: Store, queue_up: Callable[..., str]) -> None:
    """Short rows wait neither for a long one nor for the time of a look."""
    queue_up("x 1000", *(f"{n} x 10" for n in range(80)))
    seconds, asked = timed(store, Timed(8))
    assert seconds < 1.3
    assert min(asked) >= 2, "rows are claimed once a quarter of the endpoint is free"


def test_rows_that_land_one_by_one_do_not_each_ask_an_empty_queue(
    store: Store, queue_up: Callable[..., str]
) -> None:
    queue_up(*(f"{n} x {10 * n}" for n in range(1, 101)))
    endpoint = Timed(200)
    seconds, asked = timed(store, endpoint)
    assert seconds == pytest.approx(1.0, abs=0.3)
    assert len(asked) < 10
    assert max(endpoint.loads) == 100


def test_rows_that_end_within_a_quarter_of_a_second_are_written_together(
    store: Store, queue_up: Callable[..., str]
) -> None:
    queue_up(*(f"{n} x {4 * n}" for n in range(50)))
    written: list[int] = []

    async def run() -> None:
        working = harvester(store, Timed(64))
        write = working._ledger.write

        def noted(outcomes: Outcomes) -> None:
            written.append(len(outcomes.finished))
            write(outcomes)

        working._ledger.write = noted  # type: ignore[method-assign]
        await working.run(asyncio.Event())

    virtual_time.run(run())
    assert sum(written) == 50
    assert len(written) <= 2


def test_a_suspect_runs_alone_from_begin_to_end(store: Store, queue_up: Callable[..., str]) -> None:
    """Rows take longer than the time until the harvester looks for more."""
    queue_up("a 900", "b 900", "c 900")

    class Dying(Timed):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            completion = await super().complete(call, on_tokens)
            if self.calls <= 3:
                raise EngineDied("gone")
            return completion

    endpoint = Dying(8)
    timed(store, endpoint)
    assert endpoint.loads == [1, 2, 3, 1, 1, 1]


@pytest.mark.parametrize("down_s", [0.0, 30.0, 120.0])
def test_a_row_that_kills_its_server_fails_however_long_that_takes_to_come_back(
    store: Store, queue_up: Callable[..., str], down_s: float
) -> None:
    """The suspects are refused meanwhile, and stay suspects: else all run beside it again, and it dies again."""

    class Killed(FakeEndpoint):
        deaths, back_at = 0, 0.0

        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            loop = asyncio.get_running_loop()
            if loop.time() < self.back_at:
                raise EndpointUnavailable("connection refused")
            deaths = self.deaths
            if "kill" in str(call.body):
                await asyncio.sleep(1.0)
                self.deaths, self.back_at = self.deaths + 1, loop.time() + down_s
            else:
                await asyncio.sleep(3.0)
            if self.deaths > deaths:
                raise EngineDied("gone")
            return await super().complete(call, on_tokens)

    job_id = queue_up(*[f"row {n}" for n in range(20)], "kill", *[f"row {n}" for n in range(20, 39)])
    endpoint = Killed(Script(capacity=16))

    async def run() -> Tally:
        return await harvester(store, endpoint).run(asyncio.Event())

    tally = virtual_time.run(run())
    assert (tally.succeeded, tally.failed) == (39, 1), job_id
    assert endpoint.deaths <= 4


@pytest.mark.parametrize(
    ("priority", "deadline"),
    [(5, None), (0, 6.0)],
)
def test_suspects_of_a_job_that_goes_first_run_alone_before_other_rows_are_done(
    store: Store,
    queue_up: Callable[..., str],
    write_input: WriteInput,
    priority: int,
    deadline: float | None,
) -> None:
    due = None if deadline is None else virtual_time.BEGIN_S + deadline
    path = write_input("urgent.parquet", q=[f"suspect {n} x 300" for n in range(4)])
    urgent = submit(store, str(path), TASK, priority=priority, deadline=due).job_id
    lease = leased(store, only=[urgent], limit=4, now=virtual_time.BEGIN_S, owner=owners.this_process())
    with store.write() as tx:
        for row in lease.rows:
            queue.put_rows_back(
                tx,
                [
                    queue.Returned(
                        epoch=lease.epoch, job_id=urgent, position=row.position, failed=True, suspect=True
                    )
                ],
            )
    other = queue_up(*(f"{n} x 300" for n in range(400)))
    beside: list[int] = []

    class Watched(Timed):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            if "suspect" in str(call.body):
                beside.append(self.running)
            else:
                assert not self.suspect_runs
            self.suspect_runs = "suspect" in str(call.body)
            try:
                return await super().complete(call, on_tokens)
            finally:
                self.suspect_runs = False

        suspect_runs = False

    timed(store, Watched(16))
    found = job(store, urgent)
    assert (found.state, found.succeeded, beside) == (JobState.COMPLETED, 4, [0, 0, 0, 0])
    ended = [job(store, job_id).finished_at or 0.0 for job_id in (urgent, other)]
    assert ended[0] < ended[1] - 2.0


def test_suspects_beside_other_rows_have_a_tenth_of_the_time(store: Store) -> None:
    now = 0.0
    turns = SuspectTurns(store, only=None, clock=lambda: now, monotonic=lambda: now)
    found: list[bool] = []
    for name in ("job-1", "job-2"):
        add_job(store, name, rows=9)
    turns.look(None)
    assert not turns.are_next(others_fly=False), "without a suspect"
    lease = leased(store, limit=1, only=["job-2"])
    with store.write() as tx:
        queue.put_rows_back(tx, [queue.Returned(epoch=lease.epoch, job_id="job-2", position=0, suspect=True)])
    turns.look(None)
    looks = [(299.0, True), (300.0, True), (330.0, True), (340.0, False), (369.0, False), (370.0, False)]
    for at, others_fly in [*looks, (999.0, True), (1000.0, True)]:
        now = at
        found.append(turns.are_next(others_fly=others_fly))
    assert found == [False, True, True, True, True, False, False, True]
    turns.none_left()
    assert not turns.are_next(others_fly=False)
    with store.write() as tx:
        tx.execute(text("update job set priority = 1 where id = 'job-2'"))
    turns.look(None)
    assert not turns.are_next(others_fly=True), "its own other rows go first"
    with store.write() as tx:
        tx.execute(text("update job set next_position = 9 where id = 'job-2'"))
    turns.look(None)
    assert turns.are_next(others_fly=True)


OUTAGE = ["the store cannot be reached", "the store is back; harvesting goes on"]


def test_a_harvester_that_follows_works_on_what_comes_later(
    store: Store, queue_up: Callable[..., str]
) -> None:
    async def run() -> None:
        following = Following(store, FakeEndpoint())
        await asyncio.sleep(0.3)
        first = await asyncio.to_thread(queue_up, "a", "b")
        await following.until(lambda: [*following.harvester.tally.completed] == [first], 1.0)
        second = await asyncio.to_thread(queue_up, "c")
        await following.until(lambda: [*following.harvester.tally.completed] == [first, second], 1.0)
        assert (await following.end()).done == 3
        assert following.said == []

    virtual_time.run(run())


def test_a_harvester_that_follows_writes_the_last_shards_without_new_results(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    queue_up(*"abcdef", "REJECT")

    async def run() -> None:
        following = Following(store, FakeEndpoint())
        await following.until(lambda: bool(following.harvester.tally.completed))
        assert in_journal(store)
        await following.until(lambda: not in_journal(store))
        await following.end()

    virtual_time.run(run())


def test_idling_writes_nothing(store: Store, queue_up: Callable[..., str]) -> None:
    queue_up("a")
    begun: list[str] = []

    async def run() -> None:
        following = Following(store, FakeEndpoint())
        await following.until(lambda: bool(following.harvester.tally.completed))
        await asyncio.sleep(0.5)
        event.listen(
            store.engine, "begin", lambda connection: begun.append(str(connection.get_execution_options()))
        )
        await asyncio.sleep(1.0)
        await following.end()

    virtual_time.run(run())
    idle, last = begun[:-3], begun[-3:]
    assert len(idle) > 5
    assert all("read_only" in options for options in idle)
    assert ["read_only" in options for options in last] == [False, False, True], (
        "the stop gives rows and jobs back"
    )


def test_a_harvester_raises_its_limit_of_open_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    harvest(store, FakeEndpoint())
    assert raised == [(4096, 4096)]


def test_a_harvester_that_follows_closes_jobs_that_have_ended(
    store: Store, queue_up: Callable[..., str]
) -> None:
    async def run() -> None:
        following = Following(store, FakeEndpoint())
        for n in range(3):
            await asyncio.to_thread(queue_up, f"row {n}")
        await following.until(lambda: len(following.harvester.tally.completed) == 3)
        await following.until(lambda: not following.harvester._ledger._workload.seen())
        await following.end()

    virtual_time.run(run())


def test_a_retried_job_is_opened_again(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("a", "REJECT")

    async def run() -> None:
        following = Following(store, FakeEndpoint())
        await following.until(lambda: following.harvester.tally.done == 2)
        await following.until(lambda: not following.harvester._ledger._workload.seen())
        await asyncio.to_thread(shards.retry_failed, store, job_id, now=0.0)
        await following.until(lambda: following.harvester.tally.done == 3)
        await following.end()

    virtual_time.run(run())


def test_rows_withdrawn_before_they_were_sent_go_back(store: Store, queue_up: Callable[..., str]) -> None:
    """A pause may be noticed in the instant in which rows were claimed, before their tasks have begun."""
    job_id = queue_up("a", "b")
    endpoint = FakeEndpoint()

    async def run() -> None:
        harvester = Harvester(store, endpoint)
        for work in await harvester._next_works():
            harvester._flights.launch(work)
        assert harvester.tally.in_flight == 2
        harvester._flights.withdraw(jobs=[job_id], lost=False)
        while harvester.tally.in_flight:
            await asyncio.sleep(0)
        await harvester._recording.flush()
        assert not harvester._recording.unwritten_rows

    asyncio.run(asyncio.wait_for(run(), 20))
    assert endpoint.calls == 0
    with store.read() as tx:
        assert tx.execute(text("select count(*), count(epoch), count(tokens) from request")).one() == (
            2,
            0,
            0,
        )
        assert tx.scalar(text("select count(*) from lease")) == 0


def test_a_store_that_goes_away_and_comes_back_loses_and_doubles_nothing(
    store: Store, queue_up: Callable[..., str]
) -> None:
    prompts = [f"row {n}" for n in range(60)]
    job_id = queue_up(*prompts)
    away = store.home.with_name("away")

    async def run() -> Following:
        following = Following(store, FakeEndpoint(Script(token_ms=5, tokens=40, capacity=8)))
        await following.until(lambda: following.harvester.tally.done >= 8)
        store.home.rename(away)
        await following.until(lambda: bool(following.said))
        assert following.harvester.tally.in_flight == 0
        await asyncio.sleep(0.1)
        away.rename(store.home)
        await following.until(lambda: [*following.harvester.tally.completed] == [job_id])
        await following.end()
        return following

    following = virtual_time.run(run())
    assert [row[:2] for row in results(store, job_id)] == [(n, answer(p, 40)) for n, p in enumerate(prompts)]
    assert following.headlines == OUTAGE
    assert not store.home.with_name("away").exists()


def test_a_store_that_cannot_be_written_is_waited_for(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up(*(f"row {n}" for n in range(40)))

    async def run() -> Following:
        following = Following(store, FakeEndpoint(Script(token_ms=5, tokens=20, capacity=8)))
        await following.until(lambda: following.harvester.tally.done >= 8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "commit", broken_disk)
            patch.setattr("conserve.jobs.harvest.ledger.reserve_space", broken_disk)
            await following.until(lambda: bool(following.said))
            await asyncio.sleep(0.2)
        await following.until(lambda: [*following.harvester.tally.completed] == [job_id])
        await following.end()
        return following

    following = virtual_time.run(run())
    assert [row[0] for row in results(store, job_id)] == list(range(40))
    assert following.headlines == OUTAGE


def test_answers_that_wait_to_be_written_when_the_store_goes_away_are_not_computed_again(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outage is noticed by another step than the writing of answers."""
    job_id = queue_up(*(f"row {n}" for n in range(40)))
    answered: Counter[str] = Counter()
    away: list[bool] = []

    class Counted(FakeEndpoint):
        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            completion = await super().complete(call, on_tokens)
            answered[request_text(call.body)] += 1
            return completion

    async def run() -> Following:
        following = Following(store, Counted(Script(request_ms=70, capacity=2)))
        working = following.harvester
        stopped_jobs, commit = working._ledger.stopped_jobs, journal.commit

        def look() -> set[str]:
            if working._recording.outcomes.finished and not away:
                away.append(True)
                raise StoreError("the disk is gone")
            return stopped_jobs()

        def write(*arguments: Any, **named: Any) -> Any:
            return broken_disk() if away == [True] else commit(*arguments, **named)

        monkeypatch.setattr(working._ledger, "stopped_jobs", look)
        monkeypatch.setattr(journal, "commit", write)
        await following.until(lambda: bool(following.said))
        away.append(False)
        await following.until(lambda: [*working.tally.completed] == [job_id])
        await following.end()
        return following

    following = virtual_time.run(run())
    assert following.headlines == OUTAGE
    assert set(answered.values()) == {1}


def broken_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("sqlstate", "goes_on"), [("40P01", True), ("40001", True), ("42501", False)])
def test_a_run_goes_on_behind_a_change_that_the_database_undid(
    store: Store,
    queue_up: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    sqlstate: str,
    goes_on: bool,
) -> None:
    """PostgreSQL ends one of two transactions that wait for each other. No answer is computed again for that."""
    job_id = queue_up("a", "b")
    commit, undone = journal.commit, list[bool]()

    def meets_others(*arguments: Any, **named: Any) -> Any:
        if not undone:
            undone.append(True)
            cause = Exception("deadlock detected")
            cause.sqlstate = sqlstate  # type: ignore[attr-defined]
            raise OperationalError("update", {}, cause)
        return commit(*arguments, **named)

    monkeypatch.setattr(journal, "commit", meets_others)
    with contextlib.nullcontext() if goes_on else pytest.raises(StoreError, match="deadlock detected"):
        assert [*harvest(store, endpoint := FakeEndpoint()).completed] == [job_id]
        assert endpoint.calls == 2
    assert undone


def test_answers_are_not_late_whose_commit_had_no_answer(
    store: Store, queue_up: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke behind it; nothing is computed again."""
    job_id = queue_up("a", "b")
    commit, lost = journal.commit, list[bool]()
    endpoint = FakeEndpoint()

    def lost_answer(tx: Any, *arguments: Any, **named: Any) -> Any:
        found = commit(tx, *arguments, **named)
        if not lost:
            lost.append(True)
            tx.commit()
            raise StoreError("the connection broke")
        return found

    async def run() -> Tally:
        following = Following(store, endpoint)
        await following.until(lambda: job(store, job_id).state is JobState.COMPLETED and bool(following.said))
        await following.until(lambda: not following.harvester._recording.is_at_work)
        return await following.end()

    monkeypatch.setattr(journal, "commit", lost_answer)
    assert virtual_time.run(run()).late == 0
    assert endpoint.calls == 2


def test_a_stop_during_an_outage_is_a_stop(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("a")
    away = store.home.with_name("away")

    async def run() -> None:
        following = Following(store, FakeEndpoint(Script(token_ms=50)))
        await following.until(lambda: following.harvester.tally.in_flight == 1)
        store.home.rename(away)
        await following.until(lambda: bool(following.said))
        await following.end()

    virtual_time.run(run())
    assert not store.home.exists(), "no empty store was made in its place"
    away.rename(store.home)
    store.close()
    with store.write() as tx:
        leases.abandon(tx, leases.owners(tx))
    harvest(store, FakeEndpoint())
    assert len(results(store, job_id)) == 1


def test_a_store_that_was_replaced_is_noticed(
    store: Store, queue_up: Callable[..., str], tmp_path: Path
) -> None:
    queue_up("a")

    async def run() -> None:
        following = Following(store, FakeEndpoint())
        await following.until(lambda: bool(following.harvester.tally.completed))
        copy = tmp_path / "copy.db"
        shutil.copy(store.home / "conserve.db", copy)
        copy.replace(store.home / "conserve.db")
        await following.until(lambda: bool(following.said))
        assert "replaced" in following.said[0]
        await following.end()

    virtual_time.run(run())


def test_a_job_whose_requests_are_gone_holds_up_no_other(store: Store, queue_up: Callable[..., str]) -> None:
    broken, whole = queue_up("a"), queue_up("b", "c")
    layout.requests_file(store.home, broken).unlink()
    tally = harvest(store, FakeEndpoint())
    assert "cannot be read" in str(tally.refused[broken])
    assert [*tally.completed] == [whole]


def test_an_endpoint_that_shrinks_is_not_fed_until_rows_have_landed(
    store: Store, queue_up: Callable[..., str]
) -> None:
    job_id = queue_up(*(f"row {n}" for n in range(100)))

    class Shrinking(FakeEndpoint):
        at_once = 0
        most = 0

        @property
        def capacity(self) -> int:
            return 16 if self.calls < 16 else 2

        async def complete(self, *arguments: Any) -> Any:
            self.at_once += 1
            if self.calls >= 18:
                self.most = max(self.most, self.at_once)
            try:
                return await super().complete(*arguments)
            finally:
                self.at_once -= 1

    endpoint = Shrinking(Script(request_ms=5))
    harvest(store, endpoint)
    assert endpoint.most <= 2
    assert len(results(store, job_id)) == 100
