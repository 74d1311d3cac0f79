"""The table at the end of a run: what was tried to break ConServe, how often, and what was lost."""

from collections import Counter
from typing import Any, NamedTuple

import pytest

PROPERTY = "breakage"  # of a test's report: it travels from a worker process to the one that prints


class Attempt(NamedTuple):
    """Tries of one kind, and the number of rows that they cost."""

    what: str
    tried: int
    lost: int
    doubled: int


_attempts: list[Attempt] = []


def report(what: str, *, tried: int, lost: int, doubled: int) -> None:
    """Note tries of a kind; those of all tests are added up, and a test fails if a row was lost or doubled."""
    _attempts.append(Attempt(what, tried, lost, doubled))
    assert (lost, doubled) == (0, 0), f"{what}: {lost} rows lost, {doubled} doubled"


def hand_over(item: pytest.Item) -> None:
    """Put what a test has reported into its report."""
    item.user_properties += [(PROPERTY, list(attempt)) for attempt in _attempts]
    _attempts.clear()


def summarise(terminalreporter: Any) -> None:
    """Print one line for each kind."""
    reports = (report for of in terminalreporter.stats.values() for report in of)
    rows: dict[str, Counter[str]] = {}
    for found in reports:
        for name, value in (
            getattr(found, "user_properties", ()) if getattr(found, "when", "") == "call" else ()
        ):
            if name == PROPERTY:
                attempt = Attempt(*value)
                rows.setdefault(attempt.what, Counter()).update(
                    tried=attempt.tried, lost=attempt.lost, doubled=attempt.doubled
                )
    if rows:
        terminalreporter.section("broken on purpose")
        width = max(map(len, rows))
        terminalreporter.write_line(f"{'what':<{width}} {'tried':>9} {'lost':>6} {'doubled':>8}")
        for what, counted in sorted(rows.items()):
            lost, doubled = counted["lost"], counted["doubled"]
            terminalreporter.write_line(f"{what:<{width}} {counted['tried']:>9,} {lost:>6,} {doubled:>8,}")
