"""Harvesting over HTTP on a real server that misbehaves: no row is lost, doubled or blamed for it."""

import asyncio
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

from conserve.endpoints import considerate
from conserve.endpoints.fake import WORDS, answer_tokens, request_text
from conserve.endpoints.http import HttpEndpoint
from conserve.errors import EndpointUnusable
from conserve.jobs.harvest import harvester, retry
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from conserve.store.sql.query import views
from tests.acceptance.scripted_server import ScriptedServer
from tests.commands import HANGS_S
from tests.conftest import WriteInput
from tests.submitting import submit

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
audit = importlib.import_module("tests.break.audit").audit  # `break` is a keyword
QueueUp = Callable[..., str]
CALM = 'vllm:num_requests_waiting{engine="0"} 0.0\n'


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(harvester, "IDLE_S", 0.02)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> QueueUp:
    numbers = itertools.count()

    def queue_up(prompts: Sequence[str], **params: object) -> str:
        path = write_input(f"input-{next(numbers)}.parquet", q=list(prompts))
        return submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}", params=params)).job_id

    return queue_up


class Harvest:
    """A harvester in the background of an event loop; `said` is what it has told the user."""

    def __init__(
        self, store: Store, server: ScriptedServer, *, most_rows: int | None = None, **named: object
    ) -> None:
        self.said: list[str] = []
        self.endpoint = HttpEndpoint(server.url, considerate=True, most_rows=most_rows)
        self.harvester = Harvester(store, self.endpoint, say=self.said.append, **named)  # type: ignore[arg-type]
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.harvester.run(self.stop))

    @property
    def tokens(self) -> list[int]:
        """Number of tokens of each row in flight that have arrived."""
        return [len(flight.tokens) for flight in self.harvester._flights]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; only a harvester that hangs takes as long as is allowed."""
        async with asyncio.timeout(HANGS_S):
            while not condition():
                assert not self.task.done() or condition(), (self.task, self.harvester.tally, self.said)
                await asyncio.sleep(0.01)

    async def end(self) -> Tally:
        self.stop.set()
        return await asyncio.wait_for(self.task, HANGS_S)


def drain(store: Store, server: ScriptedServer, **named: object) -> Tally:
    async def run() -> Tally:
        return await asyncio.wait_for(Harvest(store, server, **named).task, HANGS_S)  # type: ignore[arg-type]

    return asyncio.run(run())


def check(store: Store, job_id: str, prompts: Sequence[str], *, tokens: int = 8, **params: object) -> None:
    """Every row exactly once, with the answer of an undisturbed generation."""
    task = Task(kind=Kind.PROMPT, template="{{ q }}", params=params)
    ids = [answer_tokens(request_text(task.body(prompt)), tokens) for prompt in prompts]
    answers = {n: (" ".join(WORDS[t] for t in found), None) for n, found in enumerate(ids)}
    assert audit(store.home)[job_id].by_row() == answers


def test_a_coserving_server_gets_streams_with_its_priority(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.pause_at = 1
    prompts = [f"row {n}" for n in range(40)]
    job_id = queue_up(prompts)

    async def fill() -> Tally:
        harvest = Harvest(store, server)
        await harvest.until(lambda: server.paused == 16)
        server.script.pause_at = None
        return await asyncio.wait_for(harvest.task, HANGS_S)

    tally = asyncio.run(fill())
    check(store, job_id, prompts)
    assert all(r.body["stream"] and r.body["priority"] == 1000 for r in server.requests)
    assert server.most_in_flight == 16, "twice max_num_seqs keep it busy"
    assert (tally.prompt_tokens, tally.completion_tokens) == (120, 320)


def test_rows_that_cannot_be_continued_are_sent_in_one_piece(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    job_id = queue_up(["a"], tools=[])
    drain(store, server)
    check(store, job_id, ["a"], tools=[])
    assert [r.body["stream"] for r in server.requests] == [False]


def test_answers_with_reasoning_are_read_in_one_piece(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.reasons = True
    job_id = queue_up(["a", "b"])
    drain(store, server)
    check(store, job_id, ["a", "b"])
    assert sum(not r.body["stream"] for r in server.requests) == 2


def test_tokens_are_saved_at_a_stop_and_continued(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.tokens, server.script.pause_at = 100, 40
    prompts = ["one", "two"]
    job_id = queue_up(prompts)

    async def cut() -> None:
        harvest = Harvest(store, server)
        await harvest.until(lambda: harvest.tokens == [40, 40])
        await harvest.end()

    asyncio.run(cut())
    server.script.pause_at = None
    tally = drain(store, server)
    check(store, job_id, prompts, tokens=100)
    assert server.continued == [40, 40]
    assert tally.resumed_tokens == 80


def test_a_server_that_dies_and_comes_back_keeps_the_tokens(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.tokens = 60
    prompts = [f"row {n}" for n in range(12)]
    job_id = queue_up(prompts)

    async def flap() -> Harvest:
        harvest = Harvest(store, server, max_attempts=1)
        for count in (10, 20, 30):
            server.script.pause_at = count
            await harvest.until(lambda: harvest.tokens == [server.script.pause_at] * 12)
            await asyncio.to_thread(server.down)
            await harvest.until(lambda: harvest.harvester.tally.in_flight == 0)
            await asyncio.to_thread(server.up)
        server.script.pause_at = None
        await asyncio.wait_for(harvest.task, HANGS_S)
        return harvest

    harvest = asyncio.run(flap())
    check(store, job_id, prompts, tokens=60)
    assert sorted(server.continued) == [10] * 12 + [20] * 12 + [30] * 12
    assert harvest.harvester.tally.resumed_tokens == 12 * 30
    assert any("harvesting waits" in line for line in harvest.said)
    assert "the endpoint answers again; harvesting goes on" in harvest.said


def test_tokens_of_a_server_that_came_back_as_another_are_not_continued(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.tokens, server.script.pause_at = 80, 30
    job_id = queue_up(["a", "b"])

    async def swap() -> None:
        harvest = Harvest(store, server)
        await harvest.until(lambda: harvest.tokens == [30, 30])
        await asyncio.to_thread(server.down)
        server.script.identity, server.script.pause_at = "another model", None
        await asyncio.to_thread(server.up)
        await asyncio.wait_for(harvest.task, HANGS_S)

    asyncio.run(swap())
    check(store, job_id, ["a", "b"], tokens=80)
    assert server.continued == []


@pytest.mark.parametrize("coserves", [True, False])
@pytest.mark.parametrize("word", ["BUSY", "FAULT", "GARBAGE", "BREAK", "ABORT"])
def test_misbehaviour_costs_no_row(
    store: Store, server: ScriptedServer, queue_up: QueueUp, word: str, coserves: bool
) -> None:
    server.script.coserves = coserves
    server.script.metrics = None if coserves else CALM
    prompts = [f"{word} {n}" if n % 3 == 0 else f"row {n}" for n in range(10)]
    job_id = queue_up(prompts)
    tally = drain(store, server, max_attempts=3)
    check(store, job_id, prompts)
    assert tally.failed == tally.late == 0


def test_a_row_whose_answers_are_always_faulty_fails_in_the_end(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.excuses = False
    job_id = queue_up(["FAULT"])
    tally = drain(store, server, max_attempts=2)
    assert tally.failed == 1
    with views(store, now=0.0, only=[job_id]) as opened:
        assert opened.duck.execute("select error_type from results").fetchall() == [("endpoint_fault",)]


def test_a_dead_engine_blames_no_row(store: Store, server: ScriptedServer, queue_up: QueueUp) -> None:
    server.script.tokens = 20
    prompts = ["DIED", *(f"row {n}" for n in range(20))]
    job_id = queue_up(prompts)

    async def run() -> Harvest:
        harvest = Harvest(store, server, max_attempts=1)
        await harvest.until(lambda: not server.script.healthy)
        server.gets.clear()
        await harvest.until(lambda: "/health" in server.gets)
        server.script.healthy = True
        await asyncio.wait_for(harvest.task, HANGS_S)
        return harvest

    harvest = asyncio.run(run())
    check(store, job_id, prompts, tokens=20)
    assert harvest.harvester.tally.failed == 0


@pytest.mark.parametrize("coserves", [True, False])
def test_a_row_that_takes_its_server_down_fails_alone(
    store: Store, server: ScriptedServer, queue_up: QueueUp, coserves: bool
) -> None:
    server.script.coserves, server.script.token_s = coserves, 0.001
    job_id = queue_up([*(f"row {n}" for n in range(12)), "FELLS", *(f"row {n}" for n in range(12, 24))])
    falls = 0

    async def run() -> Harvest:
        nonlocal falls
        harvest = Harvest(store, server, max_deaths=2)
        while not harvest.task.done():
            if not server.is_up and harvest.harvester.tally.waiting_for:
                falls += 1
                server.up()
            await asyncio.sleep(0.01)
        return harvest

    tally = asyncio.run(run()).harvester.tally
    assert (tally.succeeded, tally.failed) == (24, 1)
    assert falls <= 6
    with views(store, now=0.0, only=[job_id]) as opened:
        failed = opened.duck.execute("select row_index, error_type from results where error_type is not null")
        assert failed.fetchall() == [(12, "engine_died")]


def test_an_engine_killed_again_and_again_blames_no_row(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.tokens, server.script.pause_at = 20, 10
    prompts = [f"row {n}" for n in range(20)]
    job_id = queue_up(prompts)

    async def run() -> Harvest:
        harvest = Harvest(store, server, max_attempts=1, max_deaths=5)
        for _ in range(4):
            await harvest.until(lambda: server.paused > 0)
            server.script.healthy = False
            await harvest.until(lambda: server.in_flight == 0)
            server.script.healthy = True
        server.script.pause_at = None
        await asyncio.wait_for(harvest.task, HANGS_S)
        return harvest

    assert asyncio.run(run()).harvester.tally.failed == 0
    check(store, job_id, prompts, tokens=20)


def test_vllm_that_takes_priorities_gets_them_and_no_tokens_are_resumed(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.coserves, server.script.metrics = False, CALM
    prompts = [f"row {n}" for n in range(5)]
    job_id = queue_up(prompts)

    async def run() -> Harvest:
        harvest = Harvest(store, server, most_rows=4)
        await harvest.task
        return harvest

    notice = asyncio.run(run()).endpoint.notice
    check(store, job_id, prompts)
    rows = [r.body for r in server.requests if r.path == "/v1/chat/completions"]
    assert all(body["priority"] == 1000 and not body["stream"] for body in rows)
    assert notice is not None
    assert "stock vLLM" in notice
    assert "at most 4 rows" in notice


def test_vllm_that_rejects_priorities_gets_none(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    server.script.coserves, server.script.metrics, server.script.priorities = False, CALM, False
    job_id = queue_up(["a", "b"])
    drain(store, server)
    check(store, job_id, ["a", "b"])
    assert all("priority" not in r.body for r in server.requests[1:])


def test_any_other_server_is_harvested_too(store: Store, server: ScriptedServer, queue_up: QueueUp) -> None:
    server.script.coserves = False
    job_id = queue_up(["a", "b"])
    drain(store, server)
    check(store, job_id, ["a", "b"])
    assert all("priority" not in r.body for r in server.requests)


def test_the_window_opens_while_calm_and_closes_under_pressure(
    store: Store, server: ScriptedServer, queue_up: QueueUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(considerate, "LOOK_EVERY_S", 0.02)
    server.script.coserves, server.script.metrics, server.script.pause_at = False, CALM, 0
    prompts = [f"row {n}" for n in range(40)]
    job_id = queue_up(prompts)

    async def run() -> None:
        harvest = Harvest(store, server)
        await harvest.until(lambda: server.paused >= 6)
        server.script.metrics = None  # it is too busy to tell
        await harvest.until(lambda: harvest.endpoint.capacity == 1)
        sent = len(server.requests)
        server.script.pause_at = None
        await harvest.until(lambda: server.in_flight <= 1)
        server.most_in_flight = 0
        await harvest.until(lambda: len(server.requests) >= sent + 5)
        assert server.most_in_flight == 1
        server.script.metrics = CALM
        await asyncio.wait_for(harvest.task, HANGS_S)

    asyncio.run(run())
    check(store, job_id, prompts)


def test_a_harvester_that_follows_takes_later_jobs(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    async def run() -> None:
        harvest = Harvest(store, server, follow=True)
        await harvest.until(lambda: harvest.harvester.ready_at is not None)
        job_id = await asyncio.to_thread(queue_up, ["a", "b"])
        await harvest.until(lambda: [*harvest.harvester.tally.completed] == [job_id])
        later = await asyncio.to_thread(queue_up, ["c"])
        await harvest.until(lambda: [*harvest.harvester.tally.completed] == [job_id, later])
        tally = await harvest.end()
        assert tally.done == 3

    asyncio.run(run())


def test_a_harvester_that_follows_waits_for_a_server_that_is_not_there_yet(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    job_id = queue_up(["a"])
    server.down()

    async def run() -> Harvest:
        harvest = Harvest(store, server, follow=True)
        await harvest.until(lambda: bool(harvest.said))
        await asyncio.to_thread(server.up)
        await harvest.until(lambda: [*harvest.harvester.tally.completed] == [job_id])
        await harvest.end()
        return harvest

    harvest = asyncio.run(run())
    assert [line.partition(" (")[0] for line in harvest.said] == [
        "the endpoint cannot be reached",
        "the endpoint is back; harvesting goes on",
    ]


def test_a_key_that_is_refused_ends_a_run_but_not_one_that_follows(
    store: Store, server: ScriptedServer, queue_up: QueueUp
) -> None:
    job_id = queue_up(["a"])
    server.script.status = 401
    with pytest.raises(EndpointUnusable, match="CONSERVE_API_KEY"):
        drain(store, server)

    async def run() -> Harvest:
        harvest = Harvest(store, server, follow=True)
        await harvest.until(lambda: bool(harvest.said))
        server.script.status = None
        await harvest.until(lambda: [*harvest.harvester.tally.completed] == [job_id])
        await harvest.end()
        return harvest

    said = asyncio.run(run()).said[0]
    assert said.startswith("the endpoint refuses requests (")
    assert "401" in said
