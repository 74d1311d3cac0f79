"""Change points: a level that fell is found where it fell, and chance alone seldom makes one."""

import numpy as np
import pytest

from conserve.evals.history import change_point
from conserve.evals.level import interval


def noisy(rng: np.random.Generator, *levels: float) -> list[float]:
    return [level + 0.01 * rng.standard_normal() for level in levels]


def test_a_fall_is_found_at_its_night() -> None:
    scores = noisy(np.random.default_rng(1), *[0.6] * 20, *[0.55] * 6)
    found = change_point(scores)
    assert found is not None
    assert found.night == 20
    assert found.before - found.since == pytest.approx(0.05, abs=0.01)


def test_of_two_changes_the_later_counts() -> None:
    scores = noisy(np.random.default_rng(2), *[0.6] * 15, *[0.7] * 15, *[0.65] * 15)
    found = change_point(scores)
    assert found is not None
    assert found.night == 30
    assert found.since < found.before


def test_equal_or_few_nights_have_no_change() -> None:
    assert change_point([0.5] * 30) is None
    assert change_point([0.9, 0.9, 0.9, 0.1, 0.1]) is None
    assert change_point([]) is None


def test_the_same_nights_have_the_same_answer() -> None:
    scores = noisy(np.random.default_rng(3), *[0.6] * 12, *[0.58] * 12)
    assert change_point(scores) == change_point(scores)


@pytest.mark.full
def test_chance_makes_a_change_in_at_most_one_of_twenty_histories() -> None:
    rng = np.random.default_rng(4)
    found = sum(change_point(list(rng.normal(0.6, 0.01, 30))) is not None for _ in range(400))
    assert found <= 400 * 0.05 + 3 * (400 * 0.05 * 0.95) ** 0.5


def test_an_interval_of_right_answers_is_wilsons() -> None:
    mean, low, high = interval(np.array([1.0] * 8 + [0.0] * 2), np.arange(10))
    assert (mean, low, high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-3)


def test_items_of_one_source_widen_the_interval() -> None:
    scores = np.repeat([0.1, 0.9, 0.4, 0.6, 0.2], 10)
    alone = interval(scores, np.arange(50))
    together = interval(scores, np.repeat(np.arange(5), 10))
    assert together[0] == alone[0]
    assert together[2] - together[1] > 2 * (alone[2] - alone[1])
    assert interval(np.array([0.3, 0.5]), np.zeros(2, int)) == (0.4, 0.4, 0.4)
