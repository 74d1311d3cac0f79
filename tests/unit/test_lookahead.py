"""Rows of several jobs through the waiting window, end to end: each once, and in the order it says."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from conserve.config import load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.endpoints.protocol import KvCache
from conserve.jobs.deadlines.slack import SlackOrder
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.jobs.window import lookahead
from conserve.jobs.window.lookahead import WindowPlace
from conserve.jobs.window.prompt_key import prompt_key
from conserve.store.books import catalog, choice, queue, shards
from conserve.store.books.leases import Terms
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql.query import views
from tests import virtual_time
from tests.conftest import WriteInput
from tests.submitting import submit
from tests.tiers import in_full

CHAT = "/v1/chat/completions"
SUBJECTS = {name: name * 70 for name in "abcdefgh"}  # a block and more of text
TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
QueueUp = Callable[..., str]


class Recording(FakeEndpoint):
    """Keeps what it was asked, in order: the letter that a prompt begins with and what stands behind it."""

    def __init__(self, **script: Any) -> None:
        super().__init__(Script(**{"capacity": 4, "request_ms": 1, **script}))
        self.asked: list[str] = []

    async def complete(self, call: Any, on_tokens: Any = None) -> Any:
        prompt = call.body["messages"][-1]["content"]
        self.asked.append(f"{prompt[0]}{prompt.lstrip(prompt[0])}")
        return await super().complete(call, on_tokens)


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> QueueUp:
    """Submits a job of prompts like "a1": subject a, question 1."""

    def queue_up(rows: str, *, priority: int = 0, task: Task = TASK) -> str:
        prompts = [SUBJECTS[row[0]] + row[1:] for row in rows.split()]
        path = write_input(f"input-{abs(hash(rows))}.parquet", q=prompts)
        return submit(store, str(path), task, priority=priority).job_id

    return queue_up


def harvester(store: Store, endpoint: FakeEndpoint, **named: Any) -> Harvester:
    """A harvester that goes by the clock of the running loop."""
    return Harvester(store, endpoint, clock=asyncio.get_running_loop().time, **named)


def harvest(store: Store, endpoint: FakeEndpoint, *, stop_after: int | None = None, **named: Any) -> Tally:
    """Drain the store, or stop once so many rows were sent."""

    async def run() -> Tally:
        stop = asyncio.Event()
        running = asyncio.create_task(harvester(store, endpoint, **named).run(stop))
        while stop_after is not None and endpoint.calls < stop_after and not running.done():
            await asyncio.sleep(0)
        if stop_after is not None:
            stop.set()
        return await running

    return virtual_time.run(run())


def rows_of(store: Store, *job_ids: str) -> list[tuple[str, int, int]]:
    with views(store, now=0.0) as opened:
        found = opened.duck.execute(
            "select job_id, row_index, attempts from results order by 1, 2"
        ).fetchall()
    return [row for row in found if row[0] in job_ids]


def state(store: Store, job_id: str) -> JobState:
    with store.read() as tx:
        return catalog.get(tx, job_id).state


def live(store: Store) -> int:
    with store.read() as tx:
        records = "select (select count(*) from request) + (select coalesce(sum(held), 0) from span)"
        return int(tx.scalar(text(records)) or 0)


def test_rows_of_two_jobs_that_share_a_prefix_go_together(store: Store, queue_up: QueueUp) -> None:
    """The largest group first, whole; then the next; what shares nothing last, the oldest first."""
    first, second = queue_up("a1 b1 b2 c1 d1"), queue_up("b3 e1 a2 b4 b5 a3")
    endpoint = Recording()
    harvest(store, endpoint, utility=1.0)
    assert endpoint.asked == ["b1", "b2", "b3", "b4", "b5", "a1", "a2", "a3", "c1", "d1", "e1"]
    expected = [(first, n, 1) for n in range(5)] + [(second, n, 1) for n in range(6)]
    assert rows_of(store, first, second) == sorted(expected)
    assert live(store) == 0


def test_at_utility_0_the_first_job_goes_first(store: Store, queue_up: QueueUp) -> None:
    queue_up("a1 b1 b2 c1 d1")
    queue_up("b3 e1 a2 b4 b5 a3")
    endpoint = Recording()
    harvest(store, endpoint, utility=0.0)
    assert endpoint.asked == ["a1", "b1", "b2", "c1", "d1", "b3", "e1", "a2", "b4", "b5", "a3"]


def test_one_job_alone_goes_in_its_own_order_and_passes_nothing_over(
    store: Store, queue_up: QueueUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conserve.jobs.harvest.ledger.Lookahead", None)
    queue_up("a1 b1 a2 b2 a3")
    endpoint = Recording()
    harvest(store, endpoint)
    assert endpoint.asked == ["a1", "b1", "a2", "b2", "a3"]


def test_priority_comes_before_sharing(store: Store, queue_up: QueueUp) -> None:
    queue_up("a1 b1 b2")
    queue_up("b3 a2")
    queue_up("c1 d1 c2", priority=5)
    queue_up("d2 c3", priority=5)
    queue_up("b4", priority=-1)
    endpoint = Recording()
    harvest(store, endpoint, utility=1.0)
    assert endpoint.asked[:5] == ["c1", "c2", "c3", "d1", "d2"]
    assert endpoint.asked[5:] == ["b1", "b2", "b3", "a1", "a2", "b4"]


def test_a_job_that_comes_later_is_woven_in(store: Store, queue_up: QueueUp) -> None:
    """Alone the first goes in its order; with the second, subject by subject."""
    queue_up(" ".join(f"{letter}{n}" for n in range(8) for letter in "abc"))

    class Submits(Recording):
        async def complete(self, call: Any, on_tokens: Any = None) -> Any:
            if self.calls == 6:
                queue_up("a8 a9 b8 b9 d1 d2")
            return await super().complete(call, on_tokens)

    endpoint = Submits(capacity=1)
    harvest(store, endpoint, utility=1.0)
    letters = [row[0] for row in endpoint.asked]
    assert letters[:7] == [*"abcabca"]
    assert "".join(letters[7:]) == "bbbbbbbb" + "aaaaaaa" + "cccccc" + "dd", "most to share first"
    assert len(set(endpoint.asked)) == 30


def test_a_job_left_alone_ends_what_was_passed_over_and_goes_on_in_its_order(
    store: Store, queue_up: QueueUp
) -> None:
    queue_up("a1 b1 c1 b2 a2 b3 d1 b5 d2 b6 e1 f1 e2")
    queue_up("b4")
    endpoint = Recording(capacity=1)
    harvest(store, endpoint, utility=1.0)
    chosen, passed_over, rest = endpoint.asked[:6], endpoint.asked[6:11], endpoint.asked[11:]
    assert chosen == ["b1", "b2", "b3", "b5", "b6", "b4"]
    assert passed_over == ["a1", "a2", "d1", "d2", "c1"]
    assert rest == ["e1", "f1", "e2"]


def test_rows_passed_over_while_another_job_came_and_went_are_not_forgotten(
    store: Store, queue_up: QueueUp
) -> None:
    """The first job is alone, then has its rows chosen with those of a second one, and is alone again."""
    first = queue_up("a1 b1 a2 c1 b2 a3 d1")

    class Submits(Recording):
        async def complete(self, call: Any, on_tokens: Any = None) -> Any:
            if self.calls == 1:
                queue_up("b3 b4")
            return await super().complete(call, on_tokens)

    endpoint = Submits(capacity=1)
    harvest(store, endpoint, utility=1.0)
    assert endpoint.asked[0] == "a1"
    assert sorted(endpoint.asked) == ["a1", "a2", "a3", "b1", "b2", "b3", "b4", "c1", "d1"]
    assert endpoint.asked.index("b4") < endpoint.asked.index("c1")
    assert state(store, first) is JobState.COMPLETED


def test_a_window_lets_go_of_jobs_that_are_gone_and_takes_them_up_again(
    store: Store, queue_up: QueueUp
) -> None:
    for rows in ("a1 b1 b2", "b3 b4 b5", "a2 c1"):
        queue_up(rows)
    with store.read() as tx:
        jobs = choice.contenders(tx, queue.runnable_jobs(tx, None))
    names = [job.id for job in jobs]
    window = lookahead.Lookahead(store, utility=1.0, cache=KvCache())
    for followed in (jobs, [jobs[0], jobs[2]]):
        window.follow(followed, lambda _: False)
    assert {job_id for job_id, _ in window.take(9)} == {names[0], names[2]}
    window.follow(jobs, lambda _: False)
    assert window.take(9) == [(names[1], position) for position in range(3)]
    window.close()


def test_rows_of_a_job_that_were_leased_elsewhere_are_read_anew(store: Store, queue_up: QueueUp) -> None:
    first, second = queue_up("a1 b1 a2"), queue_up("b2 c1")
    with store.read() as tx:
        jobs = choice.contenders(tx, queue.runnable_jobs(tx, None))
    window = lookahead.Lookahead(store, utility=0.0, cache=KvCache())
    window.follow(jobs, lambda _: False)
    with store.write() as tx:
        queue.claim(tx, Terms("me", 0.0, 60.0, None), [jobs[0]], limit=2)
    window.forget(first)
    window.follow(jobs, lambda _: False)
    assert window.take(9) == [(first, 2), (second, 0), (second, 1)]
    window.close()


@pytest.mark.parametrize(
    ("rows", "stop_after"), [(8, 9), (8192, 30), *in_full((8, 1), (8, 30), (8192, 1), (8192, 9))]
)
def test_the_order_survives_a_restart(
    store: Store,
    queue_up: QueueUp,
    tmp_path: Path,
    stop_after: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows claimed before the stop come back first; from then on it is as if nothing had happened."""
    monkeypatch.setattr(lookahead, "ROWS", rows)
    letters = "abcdefgh"
    for job in range(3):
        queue_up(" ".join(f"{letters[(n * (3 + job)) % 8]}{job}.{n}" for n in range(14)))
    store.close()
    shutil.copytree(store.home, tmp_path / "copy")
    whole = Recording(capacity=1)
    harvest(Store.open(load({"home": tmp_path / "copy"})), whole, utility=0.7)
    assert len(set(whole.asked)) == 42
    first, second = Recording(capacity=1), Recording(capacity=1)
    harvest(store, first, utility=0.7, stop_after=stop_after)
    harvest(store, second, utility=0.7)
    repeated = [row for row in second.asked if row in first.asked]
    assert len(repeated) <= 1, "only what was in flight"
    assert [*first.asked, *(row for row in second.asked if row not in repeated)] == whole.asked


def test_two_harvesters_on_one_store_need_not_agree(store: Store, queue_up: QueueUp) -> None:
    jobs = [
        queue_up(" ".join(f"{'abcdefgh'[(n + job) % 8]}{job}.{n}" for n in range(60))) for job in range(3)
    ]
    begun, both_have = set(), asyncio.Event()

    class Together(Recording):
        async def complete(self, call: Any, on_tokens: Any = None) -> Any:
            begun.add(id(self))
            if len(begun) == 2:
                both_have.set()
            await both_have.wait()
            return await super().complete(call, on_tokens)

    endpoints = [Together(capacity=16), Together(capacity=16)]

    async def both() -> list[Tally]:
        return await asyncio.gather(
            *(
                harvester(store, endpoint, utility=utility).run(asyncio.Event())
                for endpoint, utility in zip(endpoints, (0.9, 0.5), strict=True)
            )
        )

    tallies = virtual_time.run(both())
    assert sum(tally.done for tally in tallies) == 180
    assert all(tally.done and not tally.late for tally in tallies)
    assert rows_of(store, *jobs) == sorted((job, n, 1) for job in jobs for n in range(60))
    assert live(store) == 0


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_a_job_told_to_stop_leaves_the_window(store: Store, queue_up: QueueUp, verb: str) -> None:
    first = queue_up(" ".join(f"{letter}1.{n}" for n in range(10) for letter in "abc"))
    second = queue_up(" ".join(f"{letter}2.{n}" for n in range(10) for letter in "abc"))

    class Tells(Recording):
        told_at = 10_000

        async def complete(self, call: Any, on_tokens: Any = None) -> Any:
            if self.calls == 9:
                await asyncio.to_thread(self.tell)
                self.told_at = len(self.asked)
            return await super().complete(call, on_tokens)

        def tell(self) -> None:
            with store.write() as tx:
                catalog.move(tx, second, verb, now=0.0)

    endpoint = Tells()
    harvest(store, endpoint, utility=1.0)
    late = [row for row in endpoint.asked[endpoint.told_at :] if row[1] == "2"]
    assert len(late) <= 8, "what was claimed by then"
    assert state(store, first) is JobState.COMPLETED
    assert state(store, second) is (JobState.PAUSED if verb == "pause" else JobState.CANCELLED)
    if verb == "pause":
        with store.write() as tx:
            catalog.move(tx, second, "resume", now=0.0)
        queue_up("a3 b3")
        harvest(store, Recording(), utility=1.0)
        assert [row[:2] for row in rows_of(store, second)] == [(second, n) for n in range(30)]
        assert live(store) == 0


def test_rows_that_came_back_go_before_the_window(store: Store, queue_up: QueueUp) -> None:
    queue_up("a1 b1 b2 c1")
    queue_up("b3 d1 a2")
    first = Recording(capacity=2, request_ms=60_000)
    harvest(store, first, stop_after=2, utility=1.0)
    assert first.asked == ["b1", "b2"]
    second = Recording()
    harvest(store, second, utility=1.0)
    assert second.asked == ["b1", "b2", "b3", "a1", "a2", "c1", "d1"]


def test_failed_rows_put_back_by_retry_go_before_the_window(store: Store, queue_up: QueueUp) -> None:
    failed = queue_up("aREJECT bREJECT")
    harvest(store, Recording())
    queue_up("c1 c2 d1")
    queue_up("c3 d2")
    assert shards.retry_failed(store, failed, now=1.0) == 2
    endpoint = Recording(reject="NEVER")
    harvest(store, endpoint, utility=1.0)
    assert endpoint.asked == ["aREJECT", "bREJECT", "c1", "c2", "c3", "d1", "d2"]


def test_a_job_that_must_not_run_does_not_hold_up_the_others(store: Store, queue_up: QueueUp) -> None:
    broken, one, two = queue_up("a1 a2"), queue_up("a3 b1"), queue_up("b2 a4")
    layout.requests_file(store.home, broken).unlink()
    endpoint = Recording()
    tally = harvest(store, endpoint, utility=1.0)
    assert "cannot be read" in str(tally.refused[broken])
    assert state(store, broken) is JobState.FAILED
    assert endpoint.asked == ["a3", "a4", "b1", "b2"]
    assert sorted(tally.completed) == sorted([one, two])


def test_rows_that_could_not_be_rendered_fail_without_a_call(store: Store, queue_up: QueueUp) -> None:
    task = Task(kind=Kind.PROMPT, template="{{ q }}{{ 1 / (q | length - 70) }}")
    job_id = queue_up("a a1.23 a2.34", task=task)
    other = queue_up("a3.45 a")
    tally = harvest(store, Recording())
    assert (tally.succeeded, tally.failed) == (4, 1)
    assert len(rows_of(store, job_id, other)) == 5


def test_different_system_prompts_share_nothing(store: Store, queue_up: QueueUp) -> None:
    polite = Task(kind=Kind.PROMPT, template="{{ q }}", system="Be polite.")
    queue_up("a1 b1", task=polite)
    queue_up("a2 b2 b3")
    queue_up("a3 b4", task=polite)
    endpoint = Recording()
    harvest(store, endpoint, utility=1.0)
    assert endpoint.asked == ["a1", "a3", "b1", "b4", "a2", "b2", "b3"], "a job left alone in its order"


def test_a_window_of_few_rows_holds_the_first_ones_never_leased(store: Store, queue_up: QueueUp) -> None:
    queue_up("a1 b1 c1 d1 e1 f1 b2 b3")
    queue_up("g1 h1 b4 b5")
    with store.read() as tx:
        jobs = choice.contenders(tx, queue.runnable_jobs(tx, None))
    window = lookahead.Lookahead(store, utility=1.0, cache=KvCache(), rows=6)
    window.follow(jobs, lambda _: False)
    names = [jobs[0].id, jobs[1].id]
    taken = [(names.index(job_id), position) for job_id, position in window.take(12)]
    window.close()
    # Three of each job: b4 comes into sight with the first, and finds b1 waiting.
    assert taken[:2] == [(0, 1), (1, 2)]
    assert sorted(taken) == [(0, n) for n in range(8)] + [(1, n) for n in range(4)]


def test_long_prompts_make_a_window_shorter(
    store: Store, queue_up: QueueUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "BLOCKS", 6)  # each prompt has one
    jobs = [queue_up(" ".join(f"{letter}{n}" for n in range(20) for letter in "ab")) for _ in range(2)]
    with store.read() as tx:
        contenders = choice.contenders(tx, queue.runnable_jobs(tx, None))
    window = lookahead.Lookahead(store, utility=0.0, cache=KvCache())
    window.follow(contenders, lambda _: False)
    assert [window._window.waiting(job.seq) for job in contenders] == [3, 3]
    window.close()
    harvest(store, Recording())
    assert [row[:2] for row in rows_of(store, *jobs)] == sorted((job, n) for job in jobs for n in range(40))


def test_more_jobs_than_a_window_looks_at_are_done_too(
    store: Store, queue_up: QueueUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "MOST_JOBS", 3)
    jobs = [queue_up(f"a{n} b{n} c{n}") for n in range(8)]
    endpoint = Recording(capacity=1)
    harvest(store, endpoint, utility=1.0)
    assert endpoint.asked[:3] == ["a0", "a1", "a2"]
    assert len(rows_of(store, *jobs)) == 24
    assert live(store) == 0


@pytest.mark.parametrize(
    ("dated", "undated", "held"), [(40, 10, (28, 4)), (40, 2, (30, 2)), (40, 0, (32, 0)), (5, 40, (5, 27))]
)
def test_a_window_holds_the_next_deadlines_and_leaves_places_for_jobs_without_one(
    dated: int, undated: int, held: tuple[int, int]
) -> None:
    jobs = [SimpleNamespace(seq=seq) for seq in range(dated + undated)]
    urgent = tuple(range(dated))[::-1]
    found = [job.seq for job in lookahead.held(jobs, SlackOrder(urgent=(*urgent, 999)))]
    assert found == [*urgent[: held[0]], *range(dated, dated + held[1])]


class OnceThrough(tuple[int, ...]):
    """Jobs in order, of which none is looked up."""

    def __contains__(self, job: object) -> bool:
        raise AssertionError("each look-up goes through all of them")


def test_a_window_orders_the_jobs_alone_that_it_holds(store: Store, queue_up: QueueUp) -> None:
    """Of thousands of jobs with a deadline neither the choice of jobs nor that of a row looks each one up."""
    names = [queue_up(row) for row in ("a1", "a2", "a3")]
    with store.read() as tx:
        jobs = choice.contenders(tx, queue.runnable_jobs(tx, None))
    _, second, third = (job.seq for job in jobs)
    window = lookahead.Lookahead(store, utility=0.0, cache=KvCache())
    urgent = OnceThrough([*range(100, 5000), third, second])
    window.follow(jobs, lambda _: False, SlackOrder(urgent=urgent, share=0.0))
    assert window._window._order.urgent == (third, second)
    assert window.take(9) == [(name, 0) for name in reversed(names)]
    window.close()


def test_the_place_of_a_window_is_kept_in_the_store() -> None:
    for place in (WindowPlace(), WindowPlace(12), WindowPlace(7, "job-k3f9", 1234)):
        assert WindowPlace.from_text(place.to_text()) == place
    for damaged in ("one two", "one", "1 job x", "x job 1", "1 2 3 4", ""):
        assert WindowPlace.from_text(damaged) == WindowPlace()


# Keys.


def body(*contents: str, **more: Any) -> Mapping[str, Any]:
    roles = ["system", *["user"] * len(contents)][-len(contents) :] if len(contents) > 1 else ["user"]
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)], **more}


def common(
    one: Mapping[str, Any], other: Mapping[str, Any], url: str = CHAT, *, block_tokens: int = 16
) -> int:
    cache = KvCache(block_tokens=block_tokens)
    first, second = prompt_key(url, one, cache), prompt_key(url, other, cache)
    return sum(a == b for a, b in zip(first, second, strict=False))


def test_keys_agree_as_far_as_whole_blocks_do() -> None:
    assert common(body("x" * 63), body("x" * 63)) == 1
    assert common(body("x" * 50), body("x" * 50)) == 0, "a beginning shorter than a block is not shared"
    assert common(body("x" * 200 + "a"), body("x" * 200 + "b")) == 3
    assert common(body("y" + "x" * 200), body("x" * 200)) == 0
    assert common(body("x" * 640), body("x" * 640), block_tokens=128) == 1


def test_what_stands_in_front_tells_prompts_apart() -> None:
    long = "x" * 640
    assert common(body("Be brief.", long), body("Be rude.", long)) == 0
    assert common(body(long, temperature=0.1), body(long, temperature=0.9)) == 10
    assert common(body(long, tools=[{"type": "function"}]), body(long)) == 0
    assert common(body(long, cache_salt="mine"), body(long, cache_salt="yours")) == 0
    assert prompt_key(CHAT, {"prompt": long}, KvCache()) != prompt_key(
        "/v1/completions", {"prompt": long}, KvCache()
    )


def test_prompts_of_token_ids_are_cut_as_the_engine_cuts_them() -> None:
    url, ids = "/v1/completions", list(range(40))
    assert len(prompt_key(url, {"prompt": ids}, KvCache())) == 2
    assert common({"prompt": ids}, {"prompt": [*ids[:17], 0, *ids[18:]]}, url) == 1


def test_what_the_cache_cannot_hold_is_not_shared() -> None:
    assert len(prompt_key(CHAT, body("x" * 6400), KvCache(num_blocks=7))) == 7


@pytest.mark.parametrize(
    "odd", [{}, {"messages": None}, {"prompt": ["a", "b"]}, {"messages": [{"content": [1]}, 3]}]
)
def test_odd_bodies_have_a_key_too(odd: dict[str, Any]) -> None:
    prompt_key(CHAT, json.loads(json.dumps(odd)), KvCache())
