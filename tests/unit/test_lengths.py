"""Lengths of time in texts."""

import pytest

from conserve.lengths import SECONDS, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400.0), (" 1.5 h ", 5400.0), ("8w", 4_838_400.0), ("0s", 0.0)]
)
def test_a_number_with_its_unit_is_a_length(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "h", "-1h", "1 y", "1h30m", ".5h"])
def test_other_text_is_none(text: str) -> None:
    assert seconds_of(text) is None


def test_units_are_of_one_table() -> None:
    assert [seconds_of(f"1{unit}") for unit in SECONDS] == [*SECONDS.values()]
