"""The KV spill: kills while it is written and taken in, and damage to its files."""

import json
import random
import signal
from pathlib import Path

import pytest

from conserve.engine.runtime import spill_file
from conserve.errors import SpillRefused
from tests import commands
from tests.commands import conserve

from . import spilling
from .damaging import WAYS, hurt
from .table import report

pytestmark = pytest.mark.breakage

FILE = "conserve.engine.runtime.spill_file"
AIMS = (  # functions, and how often one engine calls them at most
    (f"{FILE}:sync", 3),
    ("os:fsync", 3),
    ("pathlib:Path.replace", 3),
    ("pathlib:Path.unlink", 6),
    (f"{FILE}:write_shard", 2),
    (f"{FILE}:write_index", 1),
    (f"{FILE}:sweep", 2),
)


def test_a_kill_leaves_the_last_spill_or_none_and_never_a_wrong_one(
    tmp_path: Path, rounds: int, seed: int
) -> None:
    folder = tmp_path / "spill"
    kills = wrong = 0
    for number in range(1, 12 * rounds + 1):
        dice = random.Random(f"{seed} {number}")
        at, calls = dice.choice(AIMS)
        shot = {"at": at, "call": dice.randint(1, calls), "after": dice.random() < 0.5}
        words = ["-m", "tests.break.spilling", str(folder), str(number), json.dumps(shot)]
        done = commands.ended(commands.start(words))
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        kills += done.returncode != 0
        left = spilling.found(folder)  # compares the blocks
        wrong += left not in (None, number, number - 1)
        assert conserve("check", "--kv-spill", str(folder)).returncode == 0
    spilling.write(folder, 0)
    assert {path.name for path in folder.iterdir()} == {
        "index.json",
        "lock",
        "00000000-0.kv",
        "00000000-1.kv",
    }
    assert kills > 3 * rounds
    report("kill -9: the KV spill", tried=kills, lost=wrong, doubled=0)


def test_damage_to_a_spill_is_found_and_costs_the_spill_alone(tmp_path: Path, rounds: int, seed: int) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    dice = random.Random(f"{seed} damage")
    tried = 0
    for number in range(6 * rounds):
        spilling.write(folder, number)
        path = dice.choice(sorted(path for path in folder.iterdir() if path.name != spill_file.LOCK))
        where = hurt(path, WAYS[number % len(WAYS)], dice)
        if where == "nowhere":
            continue
        tried += 1
        if not (folder / spill_file.INDEX).exists():
            assert spilling.found(folder) is None
            continue
        with pytest.raises(SpillRefused):
            spilling.found(folder)
        checked = conserve("check", "--kv-spill", str(folder))
        assert (checked.returncode, "Traceback" in checked.stderr) == (1, False), where
        assert str(folder) in checked.stdout
        mended = conserve("check", "--repair", "--kv-spill", str(folder))
        assert mended.returncode == 0, (where, mended)
        assert spilling.found(folder) is None
    report("damaged: the KV spill", tried=tried, lost=0, doubled=0)
