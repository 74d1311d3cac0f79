"""Kills of the real commands, at random instants and at chosen functions: no row is lost or doubled."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.acceptance.forks import Forks

from .mix import Mix, Server, server

KILLS = 25  # a round of each of these, which two processes can play at a time
COMMANDS = (("run", "submit -", "a migration"), ("submit FILE", "harvest", "retry", "cancel", "results -o"))

pytestmark = [pytest.mark.breakage, pytest.mark.full, pytest.mark.timeout(7_200)]


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """A server that harvests use."""
    with server() as running:
        yield running


@pytest.mark.parametrize("commands", COMMANDS, ids=lambda commands: commands[0])
def test_no_kill_of_any_command_loses_or_doubles_a_row(
    tmp_path: Path, forks: Forks, served: Server, commands: Sequence[str], rounds: int, seed: int
) -> None:
    for number in range(seed, seed + rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        mix = Mix(folder, forks, served, random.Random(f"{number} {commands}"))
        mix.play(commands, KILLS)
        mix.finish()
        assert not mix.missed, f"no kill came where it was aimed: {mix.missed}"
