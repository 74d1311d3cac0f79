"""A discrete-event simulation of many harvesters on one database: what a billion rows a day ask of it.

    python -m tests.benchmarks fleet

Each harvester has one thread for the store, as the real one has. It writes the rows that have landed every
`flush_s`, and claims when a quarter of its engine is free. A transaction takes processor time of the database, then
the lock on its job's row, more processor time, and a flush of the log, under which it still holds the lock. Times
come from `unit_costs`; the reckoning beside it is arithmetic, and the simulation shows where queues make it wrong.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks fleet"
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Harvesters, their engines and their database."""

    harvesters: int = 1_000
    jobs: int = 1  # that have rows; harvesters spread over them
    rows_per_s: float = 1e9 / DAY_S  # that all engines together answer
    capacity: int = 256  # rows in an engine
    flush_s: float = 0.25  # between two writes of a harvester
    cores: int = 16  # of the database
    before_ms: float = 1.2  # processor time of a transaction before it takes the job's lock
    under_ms: float = 0.5  # and under it
    row_ms: float = 0.022  # more for each row of it, before the lock
    claimed_row_ms: float = 0.0  # for each row of a claim, under the lock: none, as leases are intervals
    log_ms: float = 1.0  # until a commit is durable, under the lock

    @property
    def engine_rows_s(self) -> float:
        """Rows that one engine answers in a second, as long as it has some."""
        return self.rows_per_s / self.harvesters


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Figures of a simulated stretch."""

    rows_per_s: float
    transactions_per_s: float
    cores_busy: float
    lock_busy: float  # of the busiest job
    wait_ms: float  # mean time of a transaction, all waiting included


def reckoned(fleet: Fleet) -> Outcome:
    """The same by arithmetic, as if nothing ever waited."""
    writes = fleet.harvesters / fleet.flush_s * -np.expm1(-fleet.engine_rows_s * fleet.flush_s)
    claims = fleet.rows_per_s / (fleet.capacity / 4)
    transactions = writes + claims
    claimed_ms = fleet.rows_per_s * fleet.claimed_row_ms
    rows_ms = fleet.rows_per_s * fleet.row_ms + claimed_ms
    cpu_s = (transactions * (fleet.before_ms + fleet.under_ms) + rows_ms) / 1e3
    held_ms = fleet.under_ms + fleet.log_ms
    lock_s = (transactions * held_ms + claimed_ms) / 1e3 / fleet.jobs
    alone_ms = fleet.before_ms + held_ms + rows_ms / transactions
    return Outcome(
        rows_per_s=fleet.rows_per_s,
        transactions_per_s=transactions,
        cores_busy=cpu_s,
        lock_busy=lock_s,
        wait_ms=alone_ms,
    )


@dataclass(slots=True)
class Resource:
    """A resource with so many places and a queue; measures how long places are taken."""

    places: int
    now: Callable[[], float]
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    taken: int = 0
    busy_s: float = 0.0
    since: float = 0.0

    def acquire(self, then: Callable[[], None]) -> None:
        """Call `then` once a place is free."""
        self._account()
        if self.taken < self.places:
            self.taken += 1
            then()
        else:
            self.waiting.append(then)

    def release(self) -> None:
        """Free a place, or hand it to the next that waits."""
        self._account()
        if self.waiting:
            self.waiting.popleft()()
        else:
            self.taken -= 1

    def taken_s(self) -> float:
        """Seconds that places were taken so far, all places together."""
        self._account()
        return self.busy_s

    def _account(self) -> None:
        self.busy_s += self.taken * (self.now() - self.since)
        self.since = self.now()


class Simulation:
    """Events in the order of their times."""

    def __init__(self, fleet: Fleet, *, seed: int = 1, warm_s: float = 30.0) -> None:
        self.fleet, self.dice, self.warm_s = fleet, np.random.default_rng(seed), warm_s
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.cpu = Resource(fleet.cores, lambda: self.now)
        self.locks = [Resource(1, lambda: self.now) for _ in range(fleet.jobs)]
        self.rows = self.transactions = 0
        self.waited_s = 0.0

    def at(self, time_s: float, then: Callable[[], None]) -> None:
        """Call `then` at a time."""
        heapq.heappush(self._events, (time_s, next(self._numbers), then))

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` so much later."""
        self.at(self.now + seconds, then)

    def run(self, seconds: float) -> Outcome:
        """Play the start of all harvesters and then so many seconds, of which the figures are."""
        for number in range(self.fleet.harvesters):
            harvester = SimulatedHarvester(self, number % self.fleet.jobs)
            self.at(self.dice.uniform(0, self.fleet.flush_s), harvester.turn)
        self._play(self.warm_s)
        cpu_s, locks_s = self.cpu.taken_s(), [lock.taken_s() for lock in self.locks]
        self.rows = self.transactions = 0
        self.waited_s = 0.0
        self._play(self.warm_s + seconds)
        locks = [lock.taken_s() - before for lock, before in zip(self.locks, locks_s, strict=True)]
        return Outcome(
            rows_per_s=self.rows / seconds,
            transactions_per_s=self.transactions / seconds,
            cores_busy=(self.cpu.taken_s() - cpu_s) / seconds,
            lock_busy=max(locks) / seconds,
            wait_ms=self.waited_s / max(1, self.transactions) * 1e3,
        )

    def _play(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, then = heapq.heappop(self._events)
            then()
        self.now = until

    def write(self, job: int, rows: int, then: Callable[[], None]) -> None:
        """Write rows of a job; `then` is called once they are durable."""
        self.transaction(job, rows * self.fleet.row_ms, 0.0, then)

    def claim(self, job: int, rows: int, then: Callable[[], None]) -> None:
        """Claim rows of a job."""
        self.transaction(job, 0.0, rows * self.fleet.claimed_row_ms, then)

    def transaction(self, job: int, before_ms: float, under_ms: float, then: Callable[[], None]) -> None:
        """Run a transaction that computes longer by these before and under its job's lock."""
        fleet, lock, begun = self.fleet, self.locks[job], self.now

        def locked() -> None:
            lock.acquire(lambda: self.compute(fleet.under_ms + under_ms, flush))

        def flush() -> None:
            self.after(self.dice.exponential(fleet.log_ms / 1e3), ended)

        def ended() -> None:
            lock.release()
            self.transactions += 1
            self.waited_s += self.now - begun
            then()

        self.compute(fleet.before_ms + before_ms, locked)

    def compute(self, ms: float, then: Callable[[], None]) -> None:
        """Take a core of the database for an exponential time with this mean."""

        def computed() -> None:
            self.cpu.release()
            then()

        self.cpu.acquire(lambda: self.after(self.dice.exponential(ms / 1e3), computed))


class SimulatedHarvester:
    """One harvester: rows in its engine, rows that landed, and one transaction at a time."""

    def __init__(self, simulation: Simulation, job: int) -> None:
        self._simulation, self._job = simulation, job
        capacity = simulation.fleet.capacity
        self._in_flight = int(simulation.dice.integers(capacity * 3 // 4, capacity + 1))
        self._landed, self._looked_at = 0, 0.0

    def turn(self) -> None:
        """Write what has landed, claim if a quarter is free, and come again."""
        self._land()
        if self._landed:
            rows, self._landed = self._landed, 0
            self._simulation.write(self._job, rows, lambda: self._written(rows))
        else:
            self._claim()

    def _land(self) -> None:
        """Let rows end since the last look."""
        fleet, now = self._simulation.fleet, self._simulation.now
        due = int(self._simulation.dice.poisson(fleet.engine_rows_s * (now - self._looked_at)))
        ended = min(due, self._in_flight)
        self._in_flight, self._landed, self._looked_at = self._in_flight - ended, self._landed + ended, now

    def _written(self, rows: int) -> None:
        self._simulation.rows += rows
        self._claim()

    def _claim(self) -> None:
        """Claim rows into the free places of the engine."""
        self._land()
        capacity = self._simulation.fleet.capacity
        free = capacity - self._in_flight
        if free < capacity // 4:
            self._rest()
            return

        def claimed() -> None:
            self._land()
            self._in_flight += free
            self._rest()

        self._simulation.claim(self._job, free, claimed)

    def _rest(self) -> None:
        self._simulation.after(self._simulation.fleet.flush_s, self.turn)


def simulated(fleet: Fleet, *, seconds: float = 20.0, seed: int = 1) -> Outcome:
    """Simulate a fleet."""
    return Simulation(fleet, seed=seed).run(seconds)


CASES = {
    "one job": Fleet(),
    "one job, written every second": Fleet(flush_s=1.0),
    "ten jobs": Fleet(jobs=10),
    "ten jobs, written every second": Fleet(jobs=10, flush_s=1.0),
    "100 servers, one job": replace(Fleet(), harvesters=100, rows_per_s=1e8 / DAY_S),
}


def measure() -> list[Figure]:
    """Rows a second, cores and locks of each case, reckoned and simulated."""
    found: list[Figure] = []
    for name, fleet in CASES.items():
        begun = time.monotonic()
        by_hand, played = reckoned(fleet), simulated(fleet)
        note = f"(simulated in {time.monotonic() - begun:.1f} s)"
        found += (figure(f"{name}: {of}", of, played, by_hand, note) for of in Outcome.__slots__)
    return found


def figure(name: str, of: str, played: Outcome, by_hand: Outcome, note: str) -> Figure:
    """A simulated figure, beside the reckoned one."""
    target = f"reckoned {getattr(by_hand, of):,.4g}"
    samples = [getattr(played, of)]
    return Figure(
        name=name, unit="", samples=samples, target=target, reached=True, command=COMMAND, note=note
    )
