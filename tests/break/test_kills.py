"""Kills of the real commands, at random instants and at chosen functions: no row is lost or doubled."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.acceptance.forks import Forks

from .killing import IMPORTED
from .mix import Mix, Server, server

KILLS = 50  # a round

pytestmark = [pytest.mark.breakage, pytest.mark.timeout(7_200)]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """A process that commands are forked off."""
    with closing(Forks(imported=IMPORTED)) as opened:
        yield opened


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """A server that harvests use."""
    with server() as running:
        yield running


def test_no_kill_of_any_command_loses_or_doubles_a_row(
    tmp_path: Path, forks: Forks, served: Server, rounds: int, seed: int
) -> None:
    for number in range(seed, seed + rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        mix = Mix(folder, forks, served, random.Random(number))
        mix.play(KILLS)
        mix.finish()
        assert not mix.missed, f"no kill came where it was aimed: {mix.missed}"
