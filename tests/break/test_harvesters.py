"""Many harvesters on one store, some frozen past their leases, some with clocks that are set: every row once."""

import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import commands
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forks

from .audit import audit
from .clocks import HOUR_S, Clock
from .killing import DONE, Killer, Running, state
from .mix import Job
from .table import report

CONSTANTS = {
    "conserve__jobs__harvest__harvester__WATCH_S": 0.05,
    "conserve__jobs__harvest__ledger__RECOVER_S": 0.1,
    "conserve__store__books__shards__SHARD_ROWS": 100,
}
IN_FLIGHT = 16  # rows of a harvester
FAKE = f"fake:?token_ms=5&capacity={IN_FLIGHT}"
LEASE_S = 1.0  # the shortest there is
TICK_S = 0.02
ACTS = 0.2  # share of the ticks at which something is done to a harvester
LONGEST_TICKS = 150  # that a harvester is frozen for: up to three leases
WRITE = Shot(at="conserve.jobs.harvest.recorder:Recorder.write", number=signal.SIGSTOP, holds=True)
"""Before it writes what its first rows were answered."""

pytestmark = [pytest.mark.breakage, pytest.mark.timeout(7_200)]


@dataclass(slots=True)
class Harvester:
    """A `conserve run` under way."""

    running: Running
    clock: Clock
    frozen_first: bool  # until all others have ended
    thaws_in: int = 0  # ticks

    @property
    def has_ended(self) -> bool:
        return self.running.process.poll() is not None

    def freeze(self, ticks: int) -> None:
        """Stop it for so many ticks."""
        os.kill(self.running.pid, signal.SIGSTOP)
        self.thaws_in = ticks

    def thaw(self) -> None:
        """Let it go on."""
        self.thaws_in = 0
        self.running.process.send_signal(signal.SIGCONT)


@dataclass(slots=True)
class Fleet:
    """Harvesters on one store; the first of those that work is never frozen, and its clock is right."""

    folder: Path
    forks: Forks
    dice: random.Random
    number: int
    harvesters: list[Harvester] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    killer: Killer = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.killer = Killer(self.folder / "home", self.folder, self.forks, self.dice, CONSTANTS)

    @property
    def late(self) -> Path:
        """A file with a byte for each result that came late."""
        return self.folder / "late"

    def submit(self, rows: int) -> None:
        """Queue a job of so many rows."""
        job = Job(prompts=[f"{len(self.jobs)} {n}" for n in range(rows)], tokens=8, served=False)
        path = self.folder / f"rows-{len(self.jobs)}.parquet"
        pq.write_table(pa.table({"q": list(job.prompts)}), path)
        words = ["submit", str(path), "--prompt", "{{ q }}", "--max-tokens", str(job.tokens)]
        self.jobs[self.killer.done("submit", words).stdout.strip()] = job

    def start(self) -> None:
        """Start all harvesters, and first one in four that stands still before it writes its first results."""
        self.late.touch()
        for number in sorted(range(self.number), key=lambda number: number % 4 != 1):
            self.harvesters.append(self.started(number, frozen=number % 4 == 1))

    def started(self, number: int, *, frozen: bool) -> Harvester:
        """Start one; if it is to stand still, wait until it does."""
        clock = Clock(self.folder / f"clock-{number}")
        also = {"tests.break.clocks:follow": str(clock.path), "tests.break.clocks:note_late": str(self.late)}
        words = ["run", "--endpoint", FAKE, "--lease-s", f"{LEASE_S:g}"]
        running = self.killer.start("run", words, *([WRITE] if frozen else []), also=also)
        commands.until(lambda: not frozen or state(running.pid) == "T")
        self.tried["frozen"] += frozen
        return Harvester(running, clock, frozen)

    def disturb(self) -> None:
        """Freeze, thaw and set clocks at random until all harvesters have ended but those frozen at the start."""
        restless = [harvester for harvester in self.harvesters if not harvester.frozen_first]
        while not all(harvester.has_ended for harvester in restless):
            sleep(TICK_S)
            for harvester in restless:
                if harvester.thaws_in:
                    harvester.thaws_in -= 1
                    if not harvester.thaws_in:
                        harvester.thaw()
            if len(restless) > 1 and self.dice.random() < ACTS:
                self.act(self.dice.choice(restless[1:]))

    def act(self, harvester: Harvester) -> None:
        """Set the clock of a harvester, or freeze it."""
        if harvester.has_ended or harvester.thaws_in:
            return
        if self.dice.random() < 0.5:
            harvester.clock.set(self.dice.choice((-HOUR_S, 0.0, HOUR_S)))
        else:
            self.tried["frozen"] += 1
            harvester.freeze(self.dice.randint(1, LONGEST_TICKS))

    def end(self) -> None:
        """Let those go on that stood still all the time: others have done their rows meanwhile."""
        for harvester in self.harvesters:
            if harvester.frozen_first:
                harvester.thaw()
        for harvester in self.harvesters:
            assert harvester.running.ended().returncode in DONE
        self.tried["clocks set"] += sum(harvester.clock.settings for harvester in self.harvesters)
        self.tried["late results refused"] += self.late.stat().st_size

    def check(self) -> None:
        """Every row is there once, with its own answer."""
        found = audit(self.killer.home)
        lost, doubled = sum(job.lost for job in found.values()), sum(job.doubled for job in found.values())
        for what, tried in self.tried.items():
            report(f"{self.number} harvesters: {what}", tried=tried, lost=lost, doubled=doubled)
        assert found.keys() == self.jobs.keys()
        for job_id, job in self.jobs.items():
            assert found[job_id].by_row() == {row: job.expected(row) for row in range(len(job.prompts))}


@pytest.mark.parametrize(
    ("number", "jobs"),
    [
        (2, (200,)),
        pytest.param(5, (300, 200), marks=pytest.mark.full),
        pytest.param(20, (500, 300, 200), marks=pytest.mark.full),
    ],
)
def test_harvesters_that_freeze_and_clocks_that_are_set_lose_and_double_no_row(
    tmp_path: Path, forks: Forks, number: int, jobs: Sequence[int], rounds: int, seed: int
) -> None:
    for one in range(seed, seed + rounds):
        fleet = Fleet(tmp_path / str(one), forks, random.Random(one), number)
        for rows in jobs:
            fleet.submit(rows)
        fleet.start()
        fleet.disturb()
        fleet.end()
        fleet.check()
        stood_still = sum(harvester.frozen_first for harvester in fleet.harvesters)
        assert fleet.tried["late results refused"] >= stood_still * IN_FLIGHT
