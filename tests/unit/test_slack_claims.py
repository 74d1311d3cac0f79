"""Deadlines in the harvester's claims, and the rate of harvested tokens that the store keeps."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from sqlalchemy import text

from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.jobs.deadlines.queue import forecast_queue
from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.deadlines.slack import claim_order
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.turns import LOOK_S, Turns, candidate
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog, harvested, queue
from conserve.store.books.harvested import KEPT_S
from conserve.store.books.slots import SLOT_S, HarvestedQuarter
from conserve.store.books.states import JobState, OnLate
from conserve.store.database.store import Store
from tests import virtual_time
from tests.conftest import WriteInput
from tests.store_rows import job
from tests.submitting import submit
from tests.virtual_time import BEGIN_S

DAY_S = 86_400.0
TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
QueueUp = Callable[..., str]


class Asked(FakeEndpoint):
    """Keeps the first letters of the prompts, in the order in which they came."""

    def __init__(self, **script: Any) -> None:
        super().__init__(Script(**{"capacity": 1, "request_ms": 1000.0, **script}))
        self.letters = ""

    async def complete(self, call: Any, on_tokens: Any = None) -> Any:
        self.letters += call.body["messages"][-1]["content"][0]
        return await super().complete(call, on_tokens)


class Pushed(Asked):
    """Keeps which prompts came with a push, and sets `seen` with the first of the letter p."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[tuple[str, bool]] = set()
        self.seen = asyncio.Event()

    async def complete(self, call: Any, on_tokens: Any = None) -> Any:
        letter = call.body["messages"][-1]["content"][0]
        self.said.add((letter, call.pushes))
        if letter == "p":
            self.seen.set()
        return await super().complete(call, on_tokens)


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> QueueUp:
    """Submits a job of so many prompts that begin with a letter."""

    def queue_up(letter: str, rows: int, **named: Any) -> str:
        path = write_input(f"{letter}.parquet", q=[f"{letter}{n} " * 40 for n in range(rows)])
        return submit(store, str(path), TASK, **named).job_id

    return queue_up


def harvest(store: Store, endpoint: FakeEndpoint) -> None:
    async def run() -> None:
        clock = asyncio.get_running_loop().time
        await Harvester(store, endpoint, clock=clock).run(asyncio.Event())

    virtual_time.run(run())


def slots(store: Store) -> list[HarvestedQuarter]:
    with store.read() as tx:
        return harvested.slots(tx)


def test_the_earliest_deadline_goes_first_and_jobs_without_one_keep_their_share(
    store: Store, queue_up: QueueUp
) -> None:
    queue_up("n", 40)
    queue_up("l", 16, deadline=BEGIN_S + 9000.0)
    queue_up("e", 16, deadline=BEGIN_S + 8000.0)
    endpoint = Asked()
    harvest(store, endpoint)
    dated = endpoint.letters.replace("n", "")
    assert dated == "e" * 16 + "l" * 16
    until_done = endpoint.letters[: endpoint.letters.rindex("l") + 1]
    assert until_done.count("n") in (7, 8, 9), "a fifth"


def test_a_higher_priority_goes_before_any_deadline(store: Store, queue_up: QueueUp) -> None:
    queue_up("d", 4, deadline=BEGIN_S + 8000.0)
    queue_up("p", 4, priority=1)
    endpoint = Asked()
    harvest(store, endpoint)
    assert endpoint.letters == "ppppdddd"


def test_a_job_that_missed_its_deadline_and_goes_on_is_not_ahead_any_more(
    store: Store, queue_up: QueueUp
) -> None:
    late = queue_up("b", 30, deadline=BEGIN_S + 10.0, on_late=OnLate.BEST_EFFORT)
    with store.read() as tx:
        (found,) = queue.runnable_jobs(tx, None)
    assert candidate(found, 1.0, BEGIN_S + 9.0).deadline == BEGIN_S + 10.0
    assert candidate(found, 1.0, BEGIN_S + 10.0).deadline is None
    harvest(store, Asked())
    assert job(store, late).state is JobState.COMPLETED


def test_the_store_keeps_how_many_tokens_were_harvested(store: Store, queue_up: QueueUp) -> None:
    job_id = queue_up("a", 240)
    harvest(store, Asked(capacity=2))
    done = job(store, job_id)
    (found,) = slots(store)
    assert found.slot == int(BEGIN_S // SLOT_S)
    assert 118.0 <= found.busy_s <= 123.0, "two rows a second, of 240"
    assert found.tokens == pytest.approx(done.prompt_tokens + done.completion_tokens, rel=0.05)
    (rate,) = Rates.of([found]).by_slot.values()
    assert rate == pytest.approx(found.tokens / found.busy_s)


def test_a_server_that_says_no_tokens_has_a_rate_all_the_same(store: Store, queue_up: QueueUp) -> None:
    """`usage` is optional in answers: rows then count as a token each, done and to come."""

    class Silent(Asked):
        async def complete(self, call: Any, on_tokens: Any = None) -> Any:
            answered = await super().complete(call, on_tokens)
            return structs.replace(answered, prompt_tokens=0, completion_tokens=0)

    queue_up("a", 240)
    harvest(store, Silent(capacity=2))
    (found,) = slots(store)
    assert found.tokens / found.busy_s == pytest.approx(2.0, rel=0.05), "two rows a second"
    queue_up("b", 100, deadline=BEGIN_S + 1000.0)
    with store.read() as tx:
        waiting = catalog.everything(tx)
    (foreseen,) = forecast_queue(waiting, slots(store), now=BEGIN_S + 200.0).values()
    assert foreseen.done_90 < BEGIN_S + 300.0


def test_rows_of_a_job_that_would_be_late_push(store: Store, queue_up: QueueUp) -> None:
    """All rows together take hours."""
    note(store, 100 * int(SLOT_S), BEGIN_S - SLOT_S, BEGIN_S)
    near, far = BEGIN_S + 61.0, BEGIN_S + 3e6
    pushed = queue_up("p", 3000, deadline=near, on_late=OnLate.PUSH)
    queue_up("e", 3000, deadline=near)
    queue_up("f", 3000, deadline=far, on_late=OnLate.PUSH)
    turns = Turns(store, begin)
    assert pushing_at(store, turns, BEGIN_S) == {pushed}, "not one that expires, nor one that has time"
    assert pushing_at(store, turns, near) == frozenset(), "its deadline is over"


def test_calls_of_a_pushing_job_say_so(store: Store, queue_up: QueueUp) -> None:
    note(store, 10 * int(SLOT_S), BEGIN_S - SLOT_S, BEGIN_S)
    queue_up("p", 20, deadline=BEGIN_S + 62.0, on_late=OnLate.PUSH)
    queue_up("n", 4)
    endpoint = Pushed()
    harvest(store, endpoint)
    assert ("p", True) in endpoint.said
    assert ("n", True) not in endpoint.said


def test_without_a_known_rate_no_job_pushes(store: Store, queue_up: QueueUp) -> None:
    queue_up("p", 3000, deadline=BEGIN_S + 61.0, on_late=OnLate.PUSH)
    assert pushing_at(store, Turns(store, begin), BEGIN_S) == frozenset()


def test_a_job_that_will_be_in_time_after_all_pushes_no_more(store: Store, queue_up: QueueUp) -> None:
    """3,000 rows of 500 tokens: at 400 a second for an hour, at 4,000 for minutes."""
    note(store, 400 * int(SLOT_S), BEGIN_S - SLOT_S, BEGIN_S)
    pushed, turns = queue_up("p", 3000, deadline=BEGIN_S + 2000.0, on_late=OnLate.PUSH), Turns(store, begin)
    assert pushing_at(store, turns, BEGIN_S) == {pushed}
    note(store, 4000 * 120, BEGIN_S, BEGIN_S + 120.0)
    assert pushing_at(store, turns, BEGIN_S + LOOK_S - 1.0) == {pushed}, "the forecast is of this minute"
    assert pushing_at(store, turns, BEGIN_S + LOOK_S) == frozenset()


@pytest.mark.parametrize(
    ("other", "pushes"),
    [
        ({"deadline": BEGIN_S + 500.0, "on_late": OnLate.BEST_EFFORT}, True),
        ({"deadline": BEGIN_S + 50.0}, False),
        ({"deadline": BEGIN_S + 5000.0}, False),
        ({}, False),
        ({"priority": 1}, True),
    ],
)
def test_a_job_pushes_if_the_rows_before_it_make_it_late(
    store: Store, queue_up: QueueUp, other: dict[str, Any], pushes: bool
) -> None:
    """Its own 100 rows take two minutes of 20, the other's 3,000 an hour; at its deadline that one may leave."""
    note(store, 400 * int(SLOT_S), BEGIN_S - SLOT_S, BEGIN_S)
    queue_up("o", 3000, **other)
    mine = queue_up("p", 100, deadline=BEGIN_S + 1200.0, on_late=OnLate.PUSH)
    assert pushing_at(store, Turns(store, begin), BEGIN_S) == ({mine} if pushes else frozenset())


def test_with_shares_a_forecast_is_of_the_jobs_of_all_groups(store: Store, queue_up: QueueUp) -> None:
    """Its own 100 rows take two minutes; beside the other's 3,000 of an earlier deadline it comes too late."""
    note(store, 400 * int(SLOT_S), BEGIN_S - SLOT_S, BEGIN_S)
    queue_up("o", 3000, deadline=BEGIN_S + 500.0, on_late=OnLate.BEST_EFFORT)
    queue_up("p", 100, deadline=BEGIN_S + 1200.0, on_late=OnLate.PUSH)
    endpoint = Pushed()

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        await Harvester(store, endpoint, clock=clock, share="jobs").run(endpoint.seen)

    virtual_time.run(run())
    assert ("p", True) in endpoint.said


def test_no_transaction_is_open_while_a_forecast_is_made(
    store: Store, queue_up: QueueUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(store, 10 * int(SLOT_S), BEGIN_S - SLOT_S, BEGIN_S)
    job_id = queue_up("p", 20, deadline=BEGIN_S + 62.0, on_late=OnLate.PUSH)
    foresee, foreseen = Turns.foresee, []

    def noted(turns: Turns, *given: Any, **named: Any) -> None:
        with store.write() as tx:  # SQLite has one writer at a time
            foreseen.append(catalog.states(tx, [job_id]))
        foresee(turns, *given, **named)

    monkeypatch.setattr(Turns, "foresee", noted)
    harvest(store, Asked())
    assert foreseen


def test_a_job_that_comes_meanwhile_pushes_from_the_next_forecast_on(store: Store, queue_up: QueueUp) -> None:
    """However many come, there is a minute between the end of one forecast and the next."""
    note(store, 400 * int(SLOT_S), BEGIN_S - SLOT_S, BEGIN_S)
    clock = [BEGIN_S]
    turns = Turns(store, lambda: clock[0])
    late = {"deadline": BEGIN_S + 1000.0, "on_late": OnLate.PUSH}
    first = queue_up("p", 3000, **late)
    clock[0] += 100.0  # that the forecast takes
    assert pushing_at(store, turns, BEGIN_S) == {first}
    second = queue_up("q", 3000, **late)
    for after_s, pushing in ((100.0, {first}), (159.0, {first}), (160.0, {first, second})):
        assert pushing_at(store, turns, BEGIN_S + after_s) == pushing
    clock[0] = BEGIN_S - 1.0
    third = queue_up("r", 3000, **late)
    assert third in pushing_at(store, turns, clock[0]), "the clock was set back"


def begin() -> float:
    return BEGIN_S


def pushing_at(store: Store, turns: Turns, now: float) -> frozenset[str]:
    with store.read() as tx:
        waiting = queue.runnable_jobs(tx, None)
    if turns.is_to_foresee(waiting, now):
        turns.foresee(waiting, now)
    turns.ordered(waiting, now=now)
    return turns.pushing


def note(store: Store, tokens: int, since: float, now: float) -> None:
    with store.write() as tx:
        harvested.note(tx, tokens, since=since, now=now)


def runnable(seq: int, **named: Any) -> SimpleNamespace:
    """A job as the queue lists it."""
    values = {"deadline": None, "on_late": None, "succeeded": 0, "failed": 0, "priority": 0, "num_rows": 10}
    tokens = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "next_position": 0}
    return SimpleNamespace(id=f"job-{seq}", seq=seq, **{**values, **tokens, **named})


def test_failed_rows_are_no_work_that_is_left() -> None:
    job = runnable(1, succeeded=2, failed=3, completion_tokens=60)
    assert candidate(job, usual_tokens=7.0, now=0.0).work.tokens == 5 * 30.0
    assert candidate(runnable(2, failed=4), usual_tokens=7.0, now=0.0).work.tokens == 6 * 7.0


def test_rows_that_came_back_go_by_the_same_turns_as_others(store: Store) -> None:
    turns = Turns(store, lambda: 0.0)
    given = []
    for _ in range(10):
        ordered = turns.ordered([runnable(1), runnable(2, deadline=9e9)], now=0.0)
        given.append([job.seq for job in turns.before(ordered, ordered[0])])
    assert given == [[2], [2], [2], [1], [2]] * 2
    alone = turns.ordered([runnable(1)], now=0.0)
    assert turns.before(alone, alone[0]) == alone


def test_rows_that_came_back_go_before_fresh_ones_of_no_earlier_job(store: Store) -> None:
    """Neither of a higher priority nor of an earlier deadline; those without a deadline are alike."""
    jobs = [
        runnable(1, priority=9),  # of which no row is fresh, nor of the next two
        runnable(2, deadline=1e9),
        runnable(3, deadline=3e9),
        runnable(4, deadline=2e9),
        runnable(5),
        runnable(6),
    ]
    turns = Turns(store, lambda: 0.0)

    def before(first: int, turn: int) -> list[int]:
        ordered = claim_order([candidate(job, 1.0, 0.0) for job in jobs], turn)
        its = next(job for job in ordered if job.seq == first)
        return [job.seq for job in turns.before(ordered, its)]

    assert before(4, turn=0) == [1, 2, 4]
    assert before(5, turn=4) == before(6, turn=4) == [1, 5, 6]


def test_the_pushing_jobs_are_those_of_the_group_that_claims(store: Store) -> None:
    with store.write() as tx:
        harvested.note(tx, 1000, since=0.0, now=100.0)
    turns = Turns(store, lambda: 100.0)
    late = runnable(1, deadline=200.0, on_late=OnLate.PUSH, num_rows=10**6)
    turns.foresee([late, runnable(2)], now=100.0)
    turns.ordered([late], now=100.0, group=1)
    assert turns.pushing == {"job-1"}
    turns.ordered([runnable(2)], now=100.0, group=2)
    assert turns.pushing == frozenset()
    turns.ordered([late], now=100.0, group=1)
    assert turns.pushing == {"job-1"}


def test_the_rate_is_read_once_a_minute_and_again_under_a_clock_that_was_set_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[float] = []
    clock = [1000.0]
    slots_of = harvested.slots

    def noted(tx: Any) -> Any:
        read.append(clock[0])
        return slots_of(tx)

    monkeypatch.setattr(harvested, "slots", noted)
    turns = Turns(store, lambda: clock[0])
    jobs = [candidate(runnable(1, deadline=9e9), 1.0, 0.0)]
    for moment in (1000.0, 1059.9, 1060.0, 1061.0, 900.0, 950.0):
        clock[0] = moment
        turns.order(jobs)
    assert read == [1000.0, 1060.0, 900.0]


def test_tokens_are_spread_over_the_slots_that_they_took(store: Store) -> None:
    note(store, 300, SLOT_S - 100.0, SLOT_S + 200.0)
    assert slots(store) == [
        HarvestedQuarter(0, pytest.approx(100.0), 100.0),
        HarvestedQuarter(1, pytest.approx(200.0), 200.0),
    ]


def test_time_of_two_harvesters_counts_once(store: Store) -> None:
    note(store, 100, 0.0, 10.0)
    note(store, 50, 5.0, 12.0)
    note(store, 50, 6.0, 8.0)
    note(store, 10, 20.0, 21.0)
    assert slots(store) == [HarvestedQuarter(0, 210.0, 13.0)]


def test_an_interval_of_more_than_a_day_counts_for_its_last_day(store: Store) -> None:
    note(store, 2000, 0.0, 2 * DAY_S)
    found = slots(store)
    assert [slot.slot for slot in found] == list(range(96, 192))
    assert {(round(slot.tokens, 6), slot.busy_s) for slot in found} == {(10.416667, SLOT_S)}
    note(store, 5, 7.0, 7.0)
    note(store, 5, 7.0, 6.0)
    assert slots(store) == found, "no time has passed"


def test_old_slots_are_forgotten(store: Store) -> None:
    newest = KEPT_S // SLOT_S + 1
    for slot in (0, 1, 2, newest):
        note(store, 1, slot * SLOT_S, slot * SLOT_S + 10.0)
    for ahead_s in (0.0, 365 * DAY_S):  # as of a machine that has not asked for the time yet
        with store.write() as tx:
            harvested.forget_old(tx, now=KEPT_S + 1.5 * SLOT_S + ahead_s)
        assert [slot.slot for slot in slots(store)] == [1, 2, newest]


def test_a_slot_of_damaged_figures_is_left_out(store: Store) -> None:
    note(store, 1, 0.0, 10.0)
    with store.write() as tx:
        tx.execute(text("insert into harvested values (1, 'x', 2.0, 0.0)"))
    assert [slot.slot for slot in slots(store)] == [0]
