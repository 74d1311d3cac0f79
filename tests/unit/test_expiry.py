"""Leases are judged by how long their owners are silent, whatever the wall clocks say."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from conserve import owners
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.errors import StoreInUse
from conserve.jobs.harvest.expiry import JUMP_S, Expiry, WallClock
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.release import LOOK_S, Release, waited
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.harvest.write_behind import Outcomes
from conserve.jobs.task import Kind, Task
from conserve.store.books import leases
from conserve.store.books.journal import Finished
from conserve.store.books.leases import Sign
from conserve.store.database.store import Store
from tests import virtual_time
from tests.conftest import WriteInput
from tests.ledgers import ledger_of
from tests.store_rows import job, leased, put_back, result, select
from tests.submitting import submit

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
LEASE_S = 60.0
HOUR_S = 3600.0


@dataclass
class World:
    """Time as it passes; each machine's clock is ahead of it by some seconds."""

    passed: float = 0.0


class Machine:
    """A harvester's half that deals with the store, on a machine whose clock may be set."""

    def __init__(self, store: Store, world: World, ahead_s: float = 0.0) -> None:
        self.store, self.world, self.ahead_s = store, world, ahead_s
        self.tally = Tally()
        self.held: list[ReadyRow] = []
        self.ledger = ledger_of(
            store,
            self.tally,
            lease_s=LEASE_S,
            clock=lambda: 1e9 + world.passed + self.ahead_s,
            monotonic=lambda: 500.0 + world.passed,
        )

    def claim(self, limit: int = 8) -> list[int]:
        works = self.ledger.claim(limit, False, "model")
        self.held += works
        return [work.row.position for work in works]

    def renew(self) -> None:
        """Renew, as a harvester does every third of a lease, and drop rows whose lease has gone."""
        alive = self.ledger.renew({work.epoch for work in self.held})
        self.held = [work for work in self.held if work.epoch in alive]

    def finish(self) -> None:
        self.ledger.write(
            Outcomes(finished=[Finished(w.epoch, *w.key, result(w.row.position)) for w in self.held])
        )


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def machine(store: Store, world: World) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(ahead_s: float = 0.0) -> Machine:
        made.append(Machine(store, world, ahead_s))
        return made[-1]

    yield make
    for each in made:
        each.ledger.close()


@pytest.fixture
def job_id(store: Store, write_input: WriteInput) -> str:
    return submit(store, str(write_input(q=["a", "b", "c", "d"])), TASK).job_id


def pass_time(world: World, seconds: float, *machines: Machine) -> None:
    """Let time pass, while these machines live: they renew every third of a lease."""
    for _ in range(int(seconds // (LEASE_S / 3))):
        world.passed += LEASE_S / 3
        for each in machines:
            each.renew()


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, 30 * 86_400.0, -0.5])
def test_a_clock_that_is_set_takes_no_row_from_a_harvester_that_lives(
    store: Store, world: World, machine: Callable[..., Machine], job_id: str, jump_s: float
) -> None:
    """On its own machine and on others; the one that looks first has not renewed anything yet."""
    working, idle = machine(), machine()
    assert working.claim(4) == [0, 1, 2, 3]
    assert not idle.ledger.nothing_left()
    for each in (working, idle):
        each.ahead_s += jump_s
    assert not idle.ledger.nothing_left()
    assert idle.claim() == []
    for _ in range(10):
        pass_time(world, LEASE_S, working)
        assert not idle.ledger.nothing_left()
        assert idle.claim() == []
    working.finish()
    assert (working.tally.succeeded, working.tally.late) == (4, 0)
    assert job(store, job_id).succeeded == 4


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_process_that_starts_after_the_clock_was_set_takes_nothing_either(
    world: World, machine: Callable[..., Machine], job_id: str, ahead_s: float
) -> None:
    """The clock of the second machine is an hour ahead or behind."""
    working = machine()
    assert working.claim(2) == [0, 1]
    late = machine(ahead_s)
    late.ledger.recover()
    assert late.claim() == [2, 3]
    for _ in range(5):
        pass_time(world, LEASE_S, working, late)
    working.finish()
    late.finish()
    assert (working.tally.late, late.tally.late) == (0, 0)


@pytest.mark.parametrize("jump_s", [0.0, HOUR_S, -HOUR_S])
def test_rows_of_a_machine_that_is_gone_come_back_after_the_length_of_a_lease(
    store: Store, world: World, machine: Callable[..., Machine], job_id: str, jump_s: float
) -> None:
    """Whichever way the clock was set meanwhile; and its late answers do not count."""
    gone, other = machine(), machine()
    assert gone.claim(2) == [0, 1]
    assert other.claim(2) == [2, 3]
    other.ahead_s += jump_s
    pass_time(world, LEASE_S, other)
    assert other.claim() == []
    pass_time(world, LEASE_S / 3, other)
    assert other.claim() == [0, 1]
    gone.finish()
    other.finish()
    assert (gone.tally.succeeded, gone.tally.late) == (0, 2)
    assert (other.tally.succeeded, other.tally.late) == (4, 0)
    assert job(store, job_id).succeeded == 4
    assert select(store, "select count(*), count(distinct position) from journal") == [(0, 0)]


def test_both_suspended_neither_loses_its_rows(
    world: World, machine: Callable[..., Machine], job_id: str
) -> None:
    """A lid was shut for a night; the one that wakes first sees a lease that was not renewed for hours."""
    working, idle = machine(), machine()
    working.claim(4)
    idle.ledger.nothing_left()
    world.passed += 9 * HOUR_S
    assert not idle.ledger.nothing_left()
    assert idle.claim() == []
    working.renew()
    assert len(working.held) == 4


@pytest.mark.parametrize("back_s", [HOUR_S, 400.0])
def test_rows_in_backoff_do_not_wait_for_a_clock_that_was_set_back(
    store: Store, world: World, machine: Callable[..., Machine], job_id: str, back_s: float
) -> None:
    waiting = machine()
    put_back(store, leased(store, limit=1), 0, available_at=1e9 + 30.0)
    assert 0 not in waiting.claim()
    waiting.ahead_s -= back_s
    assert waiting.ledger.claimable()
    assert waiting.claim() == [0]


def test_a_lease_of_an_earlier_version_lasts_as_long_as_ours() -> None:
    moments = iter([0.0, 30.0, 59.0, 90.0])
    expiry = Expiry(60.0, lambda: next(moments))
    sign = Sign(1, 5.0, None)
    assert [expiry.over([sign]) for _ in range(4)] == [[], [], [], [sign]]


def test_a_lease_that_is_renewed_begins_anew() -> None:
    now = [0.0]
    expiry = Expiry(60.0, lambda: now[0])
    over: list[Sign] = []
    for second in range(0, 600, 20):
        now[0] = second
        over += expiry.over([Sign(1, second // 40, 60.0)])
    assert over == []


@pytest.mark.parametrize("by", [HOUR_S, -HOUR_S, JUMP_S + 0.1, -JUMP_S - 0.1])
def test_a_clock_that_is_set_is_noticed_once(by: float) -> None:
    now = {"wall": 1e9, "monotonic": 7.0}
    wall = WallClock(lambda: now["wall"], lambda: now["monotonic"])
    assert wall.set_by() is None
    now["wall"] += by + 1
    now["monotonic"] += 1
    assert wall.set_by() == pytest.approx(by)
    assert wall.set_by() is None


def test_a_clock_that_is_slowed_down_or_sped_up_was_not_set() -> None:
    now = {"wall": 1e9, "monotonic": 7.0}
    wall = WallClock(lambda: now["wall"], lambda: now["monotonic"])
    for _ in range(1000):
        now["wall"] += 1.0005
        now["monotonic"] += 1
        assert wall.set_by() is None


@pytest.mark.parametrize(("by", "word"), [(HOUR_S, "forward"), (-HOUR_S, "back")])
def test_a_run_whose_clock_is_set_says_so_and_renews_at_once(
    store: Store, job_id: str, by: float, word: str
) -> None:
    """The ends of its leases are right again; every row is done once."""
    said: list[str] = []
    ends: list[float] = []

    async def run() -> Tally:
        loop = asyncio.get_running_loop()
        ahead = [0.0]

        def jump() -> None:
            ahead[0] = by

        def look() -> None:
            ends.extend(row[0] - loop.time() - by for row in select(store, "select expires_at from lease"))

        loop.call_later(10.1, jump)
        loop.call_later(12.0, look)
        harvester = Harvester(
            store,
            FakeEndpoint(Script(request_ms=30_000)),
            lease_s=LEASE_S,
            say=said.append,
            clock=lambda: loop.time() + ahead[0],
            monotonic=loop.time,
        )
        return await harvester.run(asyncio.Event())

    tally = virtual_time.run(run())
    assert said == [f"the clock was set {word} by 3,600 s"]
    assert all(58 <= end <= 60 for end in ends), ends
    assert (tally.succeeded, tally.late) == (4, 0)


def test_a_store_is_released_once_its_harvesters_are_gone_or_silent(
    store: Store, world: World, machine: Callable[..., Machine], job_id: str
) -> None:
    """Those that died on this machine at once, those of others after the length of their lease."""
    release = Release(lease_s=LEASE_S, monotonic=lambda: world.passed)
    machine().claim(1)
    dead = owners.this_process().rsplit(":", 2)[0] + ":0:abcdef"
    leased(store, owner=dead, limit=1)
    leased(store, owner="elsewhere:1:2:3", limit=1, lease_s=LEASE_S)

    def holders() -> str:
        with store.write() as tx, pytest.raises(StoreInUse) as refused:
            release.require(tx)
        return str(refused.value)

    assert "--wait" in holders()
    with store.write() as tx:
        leases.abandon(tx, [owner for owner in leases.owners(tx) if not owner.startswith("elsewhere")])
    assert "rows are with" in holders()
    for _ in range(4):
        world.passed += LEASE_S / 4
        with store.write() as tx:
            with suppress(StoreInUse):
                release.require(tx)
            left = leases.owners(tx)
        assert bool(left) is (world.passed < LEASE_S)


def test_a_release_that_waits_says_so_once() -> None:
    said: list[str] = []
    slept: list[float] = []
    errors = [
        StoreInUse("rows are with ann", step="stop it"),
        StoreInUse("rows are with ann", step="stop it"),
    ]

    def attempt() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert waited(attempt, said.append, sleep=slept.append) == "done"
    assert said == ["waiting: rows are with ann"]
    assert slept == [LOOK_S, LOOK_S]
