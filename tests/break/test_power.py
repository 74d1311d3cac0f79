"""The power fails in the middle of a command, or right after it: what was durable is there, the rest goes on."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.config import load
from conserve.store.books import shards
from conserve.store.database.store import Store
from conserve.whole import write_whole
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forks
from tests.commands import conserve

from .audit import Audited, audit
from .killing import DONE, Killer, Way
from .mix import FAKE, Job, exported
from .power import NOTES, State, cut, on_disk, record
from .table import report

SHARD_ROWS = 24
CONSTANTS = {"conserve__store__books__shards__SHARD_ROWS": SHARD_ROWS}
JOB = Job(prompts=[f"q{n}" + (" REJECT" if n % 24 == 7 else "") for n in range(60)], tokens=4, served=False)
SYNCED, RENAMED = "os:fsync", "os:rename"
CUTS = 6  # at random points, a round; each command is also followed by one

pytestmark = [pytest.mark.breakage, pytest.mark.timeout(7_200)]


@dataclass(slots=True)
class Machine:
    """A disk with a store on it, in a folder that was not there before, and commands that work on it."""

    folder: Path
    forks: Forks
    dice: random.Random
    killer: Killer = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.answers.mkdir(parents=True, exist_ok=True)
        self.killer = Killer(self.home, self.folder, self.forks, self.dice, CONSTANTS, fresh=0.0)
        for name, rows in (("rows", slice(None)), ("part-1", slice(30)), ("part-2", slice(30, None))):
            pq.write_table(pa.table({"q": list(JOB.prompts[rows])}), self.folder / f"{name}.parquet")
        lines = b"".join(msgspec.json.encode({"q": prompt}) + b"\n" for prompt in JOB.prompts)
        (self.folder / "rows.jsonl").write_bytes(lines)

    @property
    def root(self) -> Path:
        """Everything that a cut concerns."""
        return self.folder / "disk"

    @property
    def home(self) -> Path:
        return self.root / "data" / "conserve" / "home"

    @property
    def answers(self) -> Path:
        return self.root / "answers"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def copy(self, folder: Path) -> "Machine":
        """Another machine with the same on its disk."""
        folder.mkdir()
        shutil.copytree(self.root, folder / "disk")
        return Machine(folder, self.forks, self.dice)

    def words(self, name: str) -> tuple[list[str], Path | None]:
        """A command, and what it reads."""
        task = ["--prompt", "{{ q }}", "--max-tokens", str(JOB.tokens)]
        if name == "submit FILE":
            return ["submit", str(self.folder / "rows.parquet"), *task], None
        if name == "submit FILES":
            parts = [str(self.folder / f"part-{number}.parquet") for number in (1, 2)]
            return ["submit", *parts, "--keep-input", "link", *task], None
        if name == "submit -":
            return ["submit", "-", *task], self.folder / "rows.jsonl"
        if name == "run":
            return ["run", "--endpoint", FAKE], None
        if name == "retry":
            return ["retry", "last"], None
        return ["results", "last", "-o", str(self.answers / "answers.jsonl")], None

    def do(self, name: str) -> str:
        """Run a command to its end, in this process; returns what it printed."""
        words, _ = self.words(name)
        with mock.patch.object(shards, "SHARD_ROWS", SHARD_ROWS):
            done = conserve(*words, **self.killer.env)
        assert done.returncode in DONE, done
        assert "Traceback" not in done.stderr, done
        return done.stdout

    # The power cut.

    def fail(self, name: str, shot: Shot | None, state: State) -> int:
        """Have the power fail at the shot, or once the command has ended; returns how often it synced."""
        on_disk(self.root, self.notes)
        known = len((self.notes / NOTES).read_bytes().splitlines())
        words, source = self.words(name)
        also = {"tests.break.power:record": str(self.notes)}
        running = self.killer.start(name, words, *([shot] if shot else []), source=source, also=also)
        self.killer.kill(running, Way.KILL, aimed_at=True)
        before = audit(self.home) if self.home.exists() else {}
        synced = len((self.notes / NOTES).read_bytes().splitlines()) - known
        cut(self.root, self.home, self.notes, state, self.dice)
        said = running.output.read_text() + running.errors.read_text()
        self.check(before, wrote="wrote" in said)
        self.recover()
        return synced

    def check(self, before: dict[str, Audited], *, wrote: bool) -> None:
        """Every job and every result that a transaction had committed is there, and an export that was reported."""
        after = audit(self.home) if self.home.exists() else {}
        assert before.keys() == after.keys()
        for job_id, job in before.items():
            assert job.by_row() == after[job_id].by_row()
        rows = [row for path in self.answers.glob("*.jsonl") for row in exported(path)]
        assert all((row["text"], row["error_type"]) == JOB.expected(row["row_index"]) for row in rows)
        assert not wrote or len(rows) == len(JOB.prompts)

    def recover(self) -> None:
        """Go on after the cut: each row is there once, with its own answer."""
        if not self.home.exists() or not audit(self.home):
            self.do("submit FILE")
        self.do("run")
        for job in audit(self.home).values():
            assert (job.lost, job.doubled) == (0, 0)
            assert job.by_row() == {row: JOB.expected(row) for row in range(len(JOB.prompts))}


@dataclass(frozen=True, slots=True)
class Case:
    """A command, and what came before it."""

    command: str
    before: str


CASES = (
    Case("submit FILE", "nothing"),
    Case("submit -", "nothing"),
    Case("submit -", "a job"),
    Case("submit FILES", "a job"),
    Case("run", "a job"),
    Case("run", "a part"),
    Case("retry", "everything"),
    Case("run", "failed rows"),
    Case("results -o", "everything"),
)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, forks: Forks, pytestconfig: pytest.Config) -> Any:
    """Machines by what has been done on them."""
    folder = tmp_path_factory.mktemp("stages")
    dice = random.Random(int(pytestconfig.getoption("--break-seed")))
    stages = {"nothing": Machine(folder / "nothing", forks, dice)}

    def after(stage: str, name: str, do: Callable[[Machine], object]) -> None:
        machine = stages[stage].copy(folder / name)
        do(machine)
        stages[name.replace("-", " ")] = machine

    after("nothing", "a-job", lambda machine: machine.do("submit FILE"))
    after("a job", "a-part", half_done)
    after("a part", "everything", lambda machine: (machine.do("results -o"), machine.do("run")))
    after("everything", "failed-rows", lambda machine: machine.do("retry"))
    return stages


def half_done(machine: Machine) -> None:
    """Run a job until a second part of it is to be moved into a shard."""
    shot = Shot(at="conserve.store.books.shards:register", call=2)
    words, _ = machine.words("run")
    assert machine.killer.kill(machine.killer.start("run", words, shot), Way.KILL, aimed_at=True)


def test_nothing_durable_is_lost_when_the_power_fails(
    tmp_path: Path, stages: dict[str, Machine], rounds: int, seed: int
) -> None:
    dice = random.Random(seed)
    syncs: dict[Case, int] = {}
    for case in CASES:
        others = [dice.choice((State.NAMES, State.SOME))] if rounds > 1 else []
        for state in (State.NOTHING, *others):
            folder = tmp_path / f"{CASES.index(case)}-{state.name}"
            syncs[case] = tried(stages[case.before].copy(folder), case, None, state)
    for number in range(CUTS * rounds):
        case = dice.choice(CASES)
        at, after = dice.choice((SYNCED, SYNCED, RENAMED)), dice.random() < 0.5
        shot = Shot(at=at, call=dice.randint(1, max(1, syncs[case])), after=after)
        tried(stages[case.before].copy(tmp_path / str(number)), case, shot, dice.choice(tuple(State)))


def tried(machine: Machine, case: Case, shot: Shot | None, state: State) -> int:
    """Have the power fail once, and count it."""
    try:
        synced = machine.fail(case.command, shot, state)
    except Exception as error:
        error.add_note(f"the power failed during {case}, at {shot}; of what was not synced there is {state}")
        raise
    report(f"power cut: {case.command}", tried=1, lost=0, doubled=0)
    shutil.rmtree(machine.folder)
    return synced


def test_a_profile_that_was_written_outlives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    profiles, notes = tmp_path / "disk" / "home" / "profiles", tmp_path / "notes"
    dice = random.Random(seed)
    for name in ("fsync", "fdatasync", "mkdir"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    record(str(notes))
    (tmp_path / "disk").mkdir()
    for state in State:
        for content in (b"an old profile", b"a new profile"):
            on_disk(tmp_path / "disk", notes)
            write_whole(profiles / "profile.json", content, durable=True)
            cut(tmp_path / "disk", profiles.parent, notes, state, dice)
            assert (profiles / "profile.json").read_bytes() == content
            report("power cut: a profile", tried=1, lost=0, doubled=0)


def test_sqlite_syncs_at_every_commit(store: Store) -> None:
    with store.read() as tx:
        assert tx.exec_driver_sql("pragma synchronous").scalar_one() >= 2
        assert tx.exec_driver_sql("pragma journal_mode").scalar_one() == "wal"
    settings = load({"home": store.home}, environ={})
    assert settings.store_url == f"sqlite:///{store.home / 'conserve.db'}"
