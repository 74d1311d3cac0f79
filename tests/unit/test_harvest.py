"""The harvester against a scripted endpoint: what fails, what waits, what goes on where it stopped."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from conserve.endpoints.fake import WORDS, FakeEndpoint, Script, answer_tokens, request_text
from conserve.errors import EndpointUnusable, StoreFull
from conserve.jobs import retry
from conserve.jobs.harvest import Harvester, Tally
from conserve.jobs.submit import submit
from conserve.jobs.task import Kind, Task
from conserve.store import catalog, queue, shards
from conserve.store.query import views
from conserve.store.states import JobState
from conserve.store.store import Store
from tests.conftest import WriteInput

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
Row = tuple[int, str | None, str | None, int, int]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> Callable[..., str]:
    """Submits prompts; returns the job's id."""

    def queue_up(*prompts: str, task: Task = TASK) -> str:
        path = write_input(f"input-{len(prompts)}-{abs(hash(prompts))}.parquet", q=list(prompts))
        return submit(store, str(path), task).job_id

    return queue_up


def harvest(
    store: Store, endpoint: FakeEndpoint, *, stop_after_s: float | None = None, **named: object
) -> Tally:
    async def run() -> Tally:
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        return await Harvester(store, endpoint, **named).run(stop)  # type: ignore[arg-type]

    return asyncio.run(run())


def results(store: Store, job_id: str) -> list[Row]:
    with views(store, now=0.0, only=[job_id]) as opened:
        return opened.duck.execute(
            "select row_index, text, error_type, attempts, resumed_tokens from results order by 1"
        ).fetchall()


def answer(prompt: str, count: int = 8) -> str:
    return " ".join(WORDS[t] for t in answer_tokens(request_text(TASK.body(prompt)), count))


def job(store: Store, job_id: str) -> catalog.Job:
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


def test_only_the_row_that_kills_the_engine_fails(store: Store, queue_up: Callable[..., str]) -> None:
    prompts = [*(f"innocent {n}" for n in range(20)), "KILL"]
    job_id = queue_up(*prompts)
    endpoint = FakeEndpoint(Script(request_ms=5, token_ms=2, capacity=32))
    harvest(store, endpoint)
    rows = results(store, job_id)
    assert [row[2] for row in rows] == [None] * 20 + ["engine_died"]
    assert endpoint.deaths == 1 + retry.SUSPECT_FAILURES


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


def test_tokens_are_saved_every_64_without_a_stop(store: Store, queue_up: Callable[..., str]) -> None:
    queue_up("long")
    saved: list[int] = []

    async def crash() -> None:
        running = asyncio.create_task(
            Harvester(store, FakeEndpoint(Script(token_ms=2, tokens=400))).run(asyncio.Event())
        )
        while not saved:
            await asyncio.sleep(0.02)
            with store.read() as tx:
                tokens = tx.scalar(text("select tokens from request"))
            if tokens is not None:
                saved.append(len(queue.unpack_tokens(tokens)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(crash())
    assert saved[0] % 64 == 0


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
            Harvester(store, FakeEndpoint(Script(token_ms=20, tokens=1000))).run(asyncio.Event())
        )
        await asyncio.sleep(0.2)
        with store.write() as tx:
            catalog.move(tx, job_id, verb, now=0.0)
        return await asyncio.wait_for(running, 20)

    tally = asyncio.run(run())
    assert job(store, job_id).state is state
    assert tally.cancelled == ([job_id] if verb == "cancel" else [])
    with store.read() as tx:
        assert tx.execute(text("select count(*), count(epoch), count(tokens) from request")).one() == (
            8,
            0,
            8,
        )
        assert tx.scalar(text("select count(*) from lease")) == 0


def test_a_row_whose_lease_was_lost_is_not_written_twice(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("a", "b", "c")

    async def race() -> tuple[Tally, Tally]:
        slow = Harvester(store, FakeEndpoint(Script(request_ms=600)))
        first = asyncio.create_task(slow.run(asyncio.Event()))
        await asyncio.sleep(0.2)
        with store.write() as tx:
            queue.abandon(tx, [slow.owner])
        quick = await Harvester(store, FakeEndpoint()).run(asyncio.Event())
        return await first, quick

    late, quick = asyncio.run(race())
    assert (quick.done, late.done, late.late) == (3, 0, 3)
    assert len(results(store, job_id)) == 3


def test_two_harvesters_on_one_store_share_the_rows(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up(*(f"row {n}" for n in range(400)))

    async def both() -> list[Tally]:
        script = Script(request_ms=5, capacity=32)
        return await asyncio.gather(
            *(Harvester(store, FakeEndpoint(script)).run(asyncio.Event()) for _ in range(2))
        )

    tallies = asyncio.run(both())
    assert sum(tally.done for tally in tallies) == 400
    assert all(tally.done and not tally.late for tally in tallies)
    assert [row[0] for row in results(store, job_id)] == list(range(400))


def test_a_job_whose_input_changed_is_refused_and_can_be_resumed(
    store: Store, write_input: WriteInput, tmp_path: Path
) -> None:
    path = write_input(q=["a"])
    job_id = submit(store, str(path), TASK).job_id
    original = path.read_bytes()
    write_input(q=["something else"])
    tally = harvest(store, FakeEndpoint())
    assert "changed after" in tally.refused[job_id]
    assert job(store, job_id).state is JobState.FAILED
    path.write_bytes(original)
    with store.write() as tx:
        catalog.move(tx, job_id, "resume", now=0.0)
    harvest(store, FakeEndpoint())
    assert results(store, job_id)[0][1] == answer("a")


def test_a_full_disk_stops_the_run_and_loses_nothing(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up(*(f"row {n}" for n in range(3000)))
    with store.engine.connect() as connection:
        pages = connection.exec_driver_sql("pragma page_count").scalar()
    limit = f"pragma max_page_count = {pages + 40}"

    def small_disk(connection: object, _: object) -> None:
        connection.execute(limit)  # type: ignore[attr-defined]

    from sqlalchemy import event

    store.engine.dispose()
    event.listen(store.engine, "connect", small_disk)
    with pytest.raises(StoreFull, match="no space left"):
        harvest(store, FakeEndpoint())
    event.remove(store.engine, "connect", small_disk)
    store.engine.dispose()
    harvest(store, FakeEndpoint())
    assert [row[0] for row in results(store, job_id)] == list(range(3000))


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
