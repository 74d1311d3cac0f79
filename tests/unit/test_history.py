"""Change points: a level that fell is found where it fell, and chance alone seldom makes one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from conserve.evals import level
from conserve.evals.comparison import Comparison, SuiteMetric, SuiteScores, judge_together
from conserve.evals.history import change_point, lasting_decline
from conserve.evals.plan_file import plan_of
from conserve.evals.records import HISTORY, MeanScore, RunRecord, RunState, SuiteRecord
from conserve.evals.verdict import Verdict
from conserve.nightly.run_comparisons import FAMILIES, LEVEL_NIGHTS, declines, mean

interval = partial(level.interval, confidence=0.95)


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


def run_of(night: int, means: Mapping[str, float]) -> RunRecord:
    """Run whose suites have these mean scores."""
    suites = tuple(
        SuiteRecord(
            name=name, kind="sql", scores=(MeanScore(metric="score", mean=one, low=0, high=1, items=1),)
        )
        for name, one in means.items()
    )
    state = RunState.FINISHED
    return RunRecord(
        id=str(night), evaluation="x", state=state, began_at=night, plan="", folder="", suites=suites
    )


def plan(suites: Sequence[str]) -> str:
    return "".join(f'[suites.{name}]\nkind = "sql"\n' for name in suites)


@pytest.mark.parametrize(("suites", "found"), [(1, True), (3, False)])
def test_all_metrics_share_the_chance_of_a_decline_that_is_none(suites: int, found: bool) -> None:
    """One of 105 orders of ten nights has such a split: less than 0.05 / 2, and not less than 0.05 / 2 / 3."""
    names = [f"s{number}" for number in range(suites)]
    runs = [
        run_of(night, dict.fromkeys(names, 0.5) | {"s0": 0.75 if night < 6 else 0.5}) for night in range(10)
    ]
    assert bool(declines(runs, runs[-1], plan_of(plan(names)).standards())) is found


@pytest.mark.parametrize(("families", "found"), [(1, Verdict.WORSE), (FAMILIES, Verdict.CANNOT_TELL)])
def test_the_night_itself_has_half_of_the_chance(families: int, found: Verdict) -> None:
    """Five items that fell, and none that rose, are one case of 32: less than 0.05, and not less than 0.05 / 2."""
    plans = plan_of(plan(["s0"])).standards()
    items = {item: f"item {item}" for item in range(60)}
    then, now = (
        {"s0": SuiteScores({"score": {item: float(item >= lost) for item in items}}, items)}
        for lost in (0, 5)
    )
    judged, _ = judge_together(then, now, plans, families=families)
    assert judged[SuiteMetric("s0", "score")].verdict is found


def scores_by_item(scores: NDArray[np.float64]) -> SuiteScores:
    """Level of each item over these nights: (nights, items)."""
    items = {item: f"item {item}" for item in range(scores.shape[1])}
    return SuiteScores({"score": {item: mean(scores[:, item].tolist()) for item in items}}, items)


def night_against_history(rng: np.random.Generator, *, suites: int, items: int, nights: int) -> Verdict:
    """Verdict on the last of equal nights of answers that are right by chance."""
    names = [f"s{number}" for number in range(suites)]
    plans = plan_of(plan(names)).standards()
    answers = {
        name: (rng.random((nights, items)) < rng.beta(0.6, 0.4, items)).astype(float) for name in names
    }
    runs = [
        run_of(night, {name: float(one[night].mean()) for name, one in answers.items()})
        for night in range(nights)
    ]
    level, now = {}, {}
    for name, one in answers.items():
        change = change_point(one[:-1].mean(1).tolist())
        level[name] = scores_by_item(one[change.night if change else 0 : -1][-LEVEL_NIGHTS:])
        now[name] = scores_by_item(one[-1:])
    judged, metrics = judge_together(level, now, plans, families=FAMILIES)
    changes = declines(runs, runs[-1], plans)
    return Comparison(
        before=HISTORY, after=runs[-1].id, differences=(), judged=judged, metrics=metrics, changes=changes
    ).verdict


@pytest.mark.full
def test_a_thousand_nights_against_equal_ones_hold_at_most_5_percent_alarms() -> None:
    rng = np.random.default_rng(5)
    found = Counter(night_against_history(rng, suites=3, items=150, nights=30) for _ in range(1000))
    assert found[Verdict.WORSE] <= 50, found


def test_an_interval_of_right_answers_is_wilsons() -> None:
    mean, low, high = interval(np.array([1.0] * 8 + [0.0] * 2), np.arange(10))
    assert (mean, low, high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-3)
    for share in (0.0, 1.0):
        assert share in interval(np.full(12, share), np.arange(12))[1:], "the bounds contain the mean"


def test_items_of_one_source_widen_the_interval() -> None:
    scores = np.repeat([0.1, 0.9, 0.4, 0.6, 0.2], 10)
    alone = interval(scores, np.arange(50))
    together = interval(scores, np.repeat(np.arange(5), 10))
    assert together[0] == alone[0]
    assert together[2] - together[1] > 2 * (alone[2] - alone[1])
    assert interval(np.array([0.3, 0.5]), np.zeros(2, int)) == (0.4, 0.0, 1.0), "one source tells of no other"
    assert interval(np.array([-3.0, 0.0]), np.zeros(2, int)) == (-1.5, -3.0, 1.0)
    assert interval(np.ones(4), np.zeros(4, int)) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_sources_that_do_not_differ_are_an_answer_each(right: float) -> None:
    of_two_epochs = interval(np.full(10, right), np.repeat(np.arange(5), 2))
    assert of_two_epochs == interval(np.full(5, right), np.arange(5))
    assert of_two_epochs[2] - of_two_epochs[1] == pytest.approx(0.434, abs=1e-3)


def test_an_interval_of_right_answers_stays_within_what_they_may_be() -> None:
    scores = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    mean, low, high = interval(scores, np.repeat(np.arange(2), 3))
    assert (mean, low, high) == (5 / 6, 0.0, 1.0)
    graded = interval(scores / 2 + 0.25, np.repeat(np.arange(2), 3))
    assert graded[2] > 1.0, "of grades that may be larger nothing is known"


DECLINED = [0.9, 0.91] * 5 + [0.5, 0.49] * 3


@pytest.mark.parametrize(
    ("later", "night", "since"),
    [
        ([], 10, 0.495),
        ([0.62, 0.61] * 3, 10, 0.555),  # it got half of that back
        ([0.9, 0.89] * 3, None, None),  # all of it
        ([0.88, 0.87] * 3, None, None),  # but for less than what counts
        ([0.3, 0.29] * 3, 16, 0.295),  # it fell again
    ],
)
def test_a_decline_lasts_until_a_later_level_makes_it_good(
    later: list[float], night: int | None, since: float | None
) -> None:
    found = lasting_decline([*DECLINED, *later], 0.05)
    assert (found and found.night) == night
    assert (found and found.since) == pytest.approx(since)
    assert lasting_decline([-score for score in [*DECLINED[:10], *[0.95, 0.96] * 3]], 0.01) is not None
    assert lasting_decline([-score for score in DECLINED], 0.01) is None, "a rise"
