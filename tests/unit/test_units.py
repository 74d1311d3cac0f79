"""Units: parsed from texts, and in words."""

from math import inf

import pytest

from conserve.units import MIB, SECONDS, binary_size, decimal_size, parse_length, parse_share, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400.0), (" 1.5 h ", 5400.0), ("8w", 4_838_400.0), ("0s", 0.0)]
)
def test_a_number_with_its_unit_is_a_length(text: str, seconds: float) -> None:
    assert parse_length(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "h", "-1h", "1 y", "1h30m", ".5h"])
def test_other_text_is_no_length(text: str) -> None:
    assert parse_length(text) is None


def test_units_are_of_one_table() -> None:
    assert [parse_length(f"1{unit}") for unit in SECONDS] == [*SECONDS.values()]


@pytest.mark.parametrize(
    ("text", "share"),
    [("10%", 0.1), (" 2.5 % ", 0.025), (".5%", 0.005), ("0%", 0.0), ("10", None), ("", None)],
)
def test_a_share_is_in_percent(text: str, share: float | None) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1GiB", 1 << 30),
        ("1.5 gb", 1.5e9),
        ("4096", 4096),
        ("0", 0),
        ("9" * 400, inf),
        ("-1", None),
        ("1PB", None),
    ],
)
def test_a_size_is_in_powers_of_either_kind(text: str, number: float | None) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (2e9, "2.0 GB"),
     (1.5e15, "1,500.0 TB")],
)  # fmt: skip
def test_sizes_are_powers_of_a_thousand(number: float, shown: str) -> None:
    assert decimal_size(number) == shown


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (512 * MIB, "512 MiB"),
        (1536 * MIB, "1.5 GiB"),
        (1024 * MIB, "1 GiB"),
        (1000 * MIB, "1000 MiB"),
        (1024 * MIB - 1, "1024 MiB"),
        (MIB // 2, "0.5 MiB"),
    ],
)
def test_a_size_is_said_in_its_unit(number: int, text: str) -> None:
    assert binary_size(number) == text
