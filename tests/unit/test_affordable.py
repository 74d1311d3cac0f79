"""Longest iteration that a profiling session affords, by sums in the head."""

from math import inf

import numpy as np
import pytest

from conserve.profiles.affordable import LEAST_FITTED, SLACK, Affordable, Costs, iterations_s

assert (LEAST_FITTED, SLACK) == (32, 1.2)
COSTS = Costs.of(np.array([400.0, 100.0, 300.0, 200.0]), np.ones(4), overhead=1.0, noise_s=0.0)


def test_costs_are_sums_by_rising_length_with_the_repeats_of_short_batches_and_the_noise_between() -> None:
    costs = Costs.of(
        np.array([100.0, 20.0, 60.0, 10.0]), np.array([1.0, 0.0, 1.0, 1.0]), overhead=2.0, noise_s=1.2
    )
    assert [*costs.ms] == [10, 20, 60, 100]
    assert [*costs.fitted] == [1, 1, 2, 3]
    assert [*costs.seconds] == pytest.approx([0.18, 0.44, 0.66, 0.96])  # four iterations below 60 ms


@pytest.mark.parametrize(
    ("missing", "left_s", "visits", "fair_ms", "least_ms", "reach_ms", "batches", "seconds"),
    [
        # Two batches of 100 to 300 ms take 0.4 s, and 1.2 times that where they come in an unlucky order.
        (2, 0.481, 1, 0, 0, 300.0, 2, 0.4),
        (2, 0.479, 1, 0, 0, 200.0, 2, 0.3),
        (2, 0.601, 1, 0, 0, inf, 2, 0.5),
        (1, 0.121, 1, 0, 0, 100.0, 1, 0.1),
        # Two of 200 ms at most are the shortest that are enough; `least_ms` asks for more.
        (2, 0.1, 1, 0, 0, 200.0, 2, 0.3),
        (2, 0.1, 1, 0, 300, 300.0, 2, 0.4),
        (2, 0.1, 1, 0, 299, 200.0, 2, 0.3),
        (2, 0.479, 1, 0, 300, 300.0, 2, 0.4),
        (2, 0.479, 1, 300, 200, 200.0, 2, 0.3),
        (2, 0.601, 1, 0, 9000, inf, 2, 0.5),
        # A second visit to 32 batches is given up before the longest iteration is shorter than `fair_ms`.
        (2, 8.161, 2, 300, 0, 300.0, 2, 0.4),
        (2, 8.161, 2, 301, 0, inf, 2, 0.5),
        (2, 8.159, 2, 200, 0, 200.0, 2, 0.3),
        (2, 10.201, 2, 9000, 0, inf, 2, 0.5),
        (2, 15.841, 3, 300, 0, 300.0, 2, 0.4),
        # Where there are enough for a fit, only visits are left.
        (0, 7.681, 2, 300, 0, 300.0, 0, 0.0),
        (0, 7.681, 2, 301, 150, 100.0, 0, 0.0),
        (0, 7.681, 1, 0, 200, 200.0, 0, 0.0),
        # One batch alone takes more than all that is left, though a mean batch does not.
        (1, 0.301, 1, 0, 0, 300.0, 1, 0.2),
        (1, 0.299, 1, 0, 0, 200.0, 1, 0.15),
        # More than the plan has cannot be measured.
        (9, 1.201, 1, 0, 0, inf, 4, 1.0),
    ],
)
def test_the_longest_iteration_leaves_time_for_the_batches_of_a_fit(
    missing: int,
    left_s: float,
    visits: int,
    fair_ms: float,
    least_ms: float,
    reach_ms: float,
    batches: int,
    seconds: float,
) -> None:
    found = COSTS.affordable(
        missing=missing, left_s=left_s, visits=visits, fair_ms=fair_ms, least_ms=least_ms
    )
    assert found == Affordable(reach_ms, batches, pytest.approx(seconds))


def test_batches_that_are_held_out_of_the_fit_take_time_too() -> None:
    costs = Costs.of(COSTS.ms, np.array([1.0, 0.0, 1.0, 0.0]), overhead=1.0, noise_s=0.0)
    found = costs.affordable(missing=2, left_s=0.721, visits=1, fair_ms=0, least_ms=0)
    assert found == Affordable(300.0, 3, pytest.approx(0.6))
    none = Costs.of(COSTS.ms, np.zeros(4), overhead=1.0, noise_s=0.0)
    assert none.affordable(missing=2, left_s=1, visits=1, fair_ms=0, least_ms=300).reach_ms == 300


def test_short_batches_are_repeated_after_one_iteration_that_does_not_count() -> None:
    assert iterations_s("prefill p16@0", [4.0, 2.0, 3.0]) == pytest.approx(0.013)
    assert iterations_s("noise p16@0", [4.0, 2.0, 3.0]) == pytest.approx(0.009)
    assert iterations_s("prefill p16@0", [4.0]) == pytest.approx(0.004)
