"""A process that the commands of most tests are forked off."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.acceptance.forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A process that commands are forked off."""
    with closing(Forks()) as opened:
        yield opened
