"""Drift of times from the predicted ones: slow, in spells, and none."""

import gzip
from collections.abc import Iterable
from math import exp, log
from pathlib import Path
from random import Random
from statistics import pstdev

import pytest

from conserve.profiles.drift import LARGEST_SCALE, LARGEST_STEP, LASTING_WEIGHT, PASSING_WEIGHT, Drift

RECORDED = Path("docs/benchmarks/raw/iteration-factors.csv.gz")


def errors(factors: Iterable[float], drift: Drift) -> tuple[list[float], list[float]]:
    """Logarithms of measured / foretold: by the drift that is known by then, and by its lasting part alone."""
    whole, lasting = [], []
    for factor in factors:
        whole.append(log(factor / drift.factor))
        lasting.append(log(factor / drift.lasting))
        drift.observe(factor)
    return whole, lasting


def spells(num: int, *, every: int = 60, long: int = 12, factor: float = 1.25) -> list[float]:
    """Factors of iterations of which `long` in `every` take `factor` times as long, with a scatter of 2 %."""
    dice = Random(1)
    return [(factor if n % every < long else 1.0) * exp(dice.gauss(0, 0.02)) for n in range(num)]


def scattered(num: int, scatter: float) -> list[float]:
    """Factors of iterations whose errors are independent."""
    dice = Random(2)
    return [exp(dice.gauss(0, scatter)) for _ in range(num)]


def test_one_iteration_counts_little() -> None:
    drift = Drift()
    drift.observe(1.1)
    assert drift.factor == drift.lasting == pytest.approx(1.1**LASTING_WEIGHT)


def test_a_lasting_drift_is_followed_whole() -> None:
    drift = Drift()
    for _ in range(400):
        drift.observe(1.5)
    assert drift.lasting == pytest.approx(1.5, rel=0.01)
    assert drift.factor == pytest.approx(1.5, rel=0.01)


def test_of_a_spell_the_next_iterations_are_foretold() -> None:
    drift = Drift()
    whole, lasting = errors(spells(3000), drift)
    assert drift.share > 0.5
    assert pstdev(whole[600:]) < 0.8 * pstdev(lasting[600:])


@pytest.mark.parametrize("scatter", [0.01, 0.1])
def test_independent_errors_foretell_nothing(scatter: float) -> None:
    drift = Drift()
    whole, lasting = errors(scattered(3000, scatter), drift)
    assert drift.share < 0.3
    assert pstdev(whole) < 1.01 * pstdev(lasting)


def test_errors_that_alternate_foretell_nothing() -> None:
    """Iterations of two kinds in turns, of which the model takes one for too short and one for too long."""
    drift = Drift()
    errors([1.2 if n % 2 else 1 / 1.2 for n in range(1000)], drift)
    assert drift.share == 0.0
    assert drift.factor == drift.lasting


def test_iterations_of_a_real_engine_are_foretold_better() -> None:
    """1,843 iterations of two cores that an engine shares with its server, in order."""
    factors = [float(line) for line in gzip.decompress(RECORDED.read_bytes()).decode().splitlines()[1:]]
    whole, lasting = errors(factors, Drift())
    assert len(factors) == 1843
    assert pstdev(whole) < 0.9 * pstdev(lasting)


def test_an_outlier_moves_the_next_prediction_by_a_few_percent() -> None:
    drift = Drift()
    errors(spells(3000), drift)
    before = log(drift.factor)
    drift.observe(50.0)
    assert 0 < log(drift.factor) - before < (PASSING_WEIGHT + LASTING_WEIGHT) * 2 * LARGEST_STEP


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
def test_the_factor_is_bounded(factor: float) -> None:
    drift = Drift()
    for _ in range(2000):
        drift.observe(factor)
    assert abs(drift.log_lasting) == abs(log(drift.factor)) == pytest.approx(log(LARGEST_SCALE))


def test_another_model_begins_without_a_passing_part_and_keeps_the_share() -> None:
    drift = Drift()
    errors(spells(3007), drift)
    share = drift.share
    assert drift.factor != drift.lasting
    drift.restart(log(2))
    assert drift.factor == drift.lasting == pytest.approx(2.0)
    assert drift.share == share
