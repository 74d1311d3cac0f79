"""Common parts of this folder's tests: their length, and the table that they print together."""

from collections.abc import Generator

import pytest

from . import table


@pytest.fixture
def rounds(pytestconfig: pytest.Config) -> int:
    """Rounds of bounded length: one in `make test`, as many as `--break-rounds` or BREAK_ROUNDS says."""
    return int(pytestconfig.getoption("--break-rounds"))


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """Seed of all choices."""
    return int(pytestconfig.getoption("--break-seed"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Have what a test reported printed at the end."""
    try:
        return (yield)
    finally:
        table.hand_over(item)
