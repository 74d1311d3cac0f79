"""Starts a command, kills it at a random instant or at a chosen function, and says how it ended."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from tests import commands
from tests.acceptance import aimed
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forked, Forks
from tests.commands import Done

HANGS_S = 120.0  # only a command that hangs takes as long
LATE = 1.15  # a kill comes within so many times what the command took last
FRESH = 0.03  # share of the commands whose imports may be hit too
PAUSED_S = 0.05  # most that a command stands still before it is killed
ENDED_BY_TERM = frozenset({-signal.SIGTERM, 130, 128 + signal.SIGTERM})


DONE = (0, 5)  # without an error, or with failed rows


class Way(StrEnum):
    """Way in which a command is ended."""

    KILL = "-9"
    TERM = "-15"
    STOP = "-STOP, -9"


@dataclass(slots=True)
class Running:
    """A command under way, and where it writes."""

    name: str
    words: Sequence[str]
    process: "Forked | subprocess.Popen[str]"
    output: Path
    errors: Path
    begun: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended_within(self, seconds: float) -> bool:
        """Wait for so long; True if it has ended by then."""
        try:
            self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> Done:
        """Wait for the end; fails if it hangs, shows a traceback or leaves a process behind."""
        assert self.ended_within(HANGS_S), f"{self.words} hangs: {self.errors.read_text()}"
        assert self.process.returncode is not None
        done = Done(self.process.returncode, self.output.read_text(), self.errors.read_text())
        assert "Traceback" not in done.stderr, done
        commands.until(lambda: not has_group(self.pid))
        return done


def has_group(pid: int) -> bool:
    """True while any process of this process group is there."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(slots=True)
class Killer:
    """Starts commands on one store and kills them; the same seed makes the same choices."""

    home: Path
    folder: Path  # for what the commands write
    forks: Forks
    dice: random.Random
    constants: Mapping[str, float]
    fresh: float = FRESH
    number: int = 0
    lasts_s: dict[str, float] = field(default_factory=dict)  # what each command took last, unhindered

    def start(
        self,
        name: str,
        words: Sequence[str],
        *shots: Shot,
        source: Path | None = None,
        also: Mapping[str, str] | None = None,
    ) -> Running:
        """Start a command: a fork, now and then an interpreter of its own."""
        self.number += 1
        fresh = source is None and not shots and self.dice.random() < self.fresh
        output, errors = (self.folder / f"{self.number}.{ending}" for ending in ("stdout", "stderr"))
        aim = aimed.command(shots, *words, also=also, **self.constants)
        if fresh:
            process: Forked | subprocess.Popen[str] = self.interpreter(aim, output, errors)
        else:
            process = self.forks.start(aim, env=self.env, errors=errors, output=output, source=source)
        return Running(name, words, process, output, errors, time.monotonic())

    @property
    def env(self) -> dict[str, str]:
        """The variables that lead a command to the store, and what it leaves to where it is looked for."""
        folders = {"CONSERVE_HOME": self.home, "TMPDIR": self.temporary, "XDG_CONFIG_HOME": self.folder}
        return {**{name: str(path) for name, path in folders.items()}, "CONSERVE_FAKE": "1"}

    @property
    def temporary(self) -> Path:
        """The folder for temporary files."""
        path = self.folder / "tmp"
        path.mkdir(exist_ok=True)
        return path

    def interpreter(self, aim: Sequence[str], output: Path, errors: Path) -> "subprocess.Popen[str]":
        """Start a command as a user would, imports and all."""
        with output.open("w") as out, errors.open("w") as err:
            return commands.start(["-m", "tests.acceptance.aimed", *aim], self.env, stdout=out, stderr=err)

    def done(self, name: str, words: Sequence[str], source: Path | None = None) -> Done:
        """Run a command to its end."""
        running = self.start(name, words, source=source)
        done = running.ended()
        self.lasts_s[name] = time.monotonic() - running.begun
        return done

    def kill(self, running: Running, way: Way, *, aimed_at: bool = False) -> bool:
        """End a command this way, unless it ends before; True if it was killed.

        One that was aimed at has sent itself the signal; a random instant lies within the time that the command
        took last.
        """
        if not aimed_at:
            seconds = self.dice.uniform(0, LATE * self.lasts_s.get(running.name, 0.3))
            if running.ended_within(seconds):
                self.lasts_s[running.name] = time.monotonic() - running.begun
                return False
            running.process.send_signal(FIRST[way])
        if way is Way.STOP:
            commands.until(lambda: running.process.poll() is not None or state(running.pid) == "T")
            running.ended_within(self.dice.uniform(0, PAUSED_S))
            running.process.send_signal(signal.SIGKILL)
        code = running.ended().returncode
        killed = code in ENDED_BY_TERM if way is Way.TERM else code == -signal.SIGKILL
        assert killed or code in DONE, (running.words, running.errors.read_text())
        return killed

    def aim(self, shot: Shot, way: Way) -> Shot:
        """The shot, with the signal that this way begins with."""
        return replace(shot, number=FIRST[way], holds=way is Way.STOP)


FIRST = {Way.KILL: signal.SIGKILL, Way.TERM: signal.SIGTERM, Way.STOP: signal.SIGSTOP}


def state(pid: int) -> str:
    """The letter that the kernel gives for a process's state; Z for one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def feed(pipe: Path, running: Running, lines: Sequence[str]) -> int | None:
    """Write lines into the named pipe that a command reads; returns its open end, None if it has ended."""
    opened: list[int] = []

    def has_reader() -> bool:
        with contextlib.suppress(OSError):  # until the command has opened its end
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened) or running.process.poll() is not None

    commands.until(has_reader)
    for end in opened:
        with contextlib.suppress(BrokenPipeError):
            os.write(end, "".join(lines).encode())
    return opened[0] if opened else None
