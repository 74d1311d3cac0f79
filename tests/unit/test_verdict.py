"""Verdicts on two nights: what a statistician would sign, and how often they err in simulated nights."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from conserve.errors import UsageError
from conserve.evals.paired import (
    Pairs,
    Standard,
    clustered_error,
    evidence,
    mcnemar_power,
    needed_answers,
    tango,
    tango_bound,
)
from conserve.evals.verdict import SuiteVerdict, Verdict, judge, worst

POINTS = Standard(effect=0.05)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def answers(lost: int, gained: int, same: int) -> Pairs:
    """Items that were right and are wrong, were wrong and are right, and stayed right."""
    before = np.array([1.0] * lost + [0.0] * gained + [1.0] * same)
    after = np.array([0.0] * lost + [1.0] * gained + [1.0] * same)
    return Pairs(before, after, np.arange(len(before)))


def scores(differences: Any, clusters: Any = None) -> Pairs:
    after = np.asarray(differences, float)
    numbered = np.arange(len(after)) if clusters is None else np.asarray(clusters)
    return Pairs(np.full(len(after), 0.5), 0.5 + after, numbered)


def verdict(pairs: Pairs, standard: Standard = POINTS) -> SuiteVerdict:
    return judge({"suite": pairs}, {"suite": standard}, rng())["suite"]


def test_a_clear_decline_is_worse_and_says_by_how_much() -> None:
    found = verdict(answers(lost=60, gained=10, same=430))
    assert found.verdict is Verdict.WORSE
    assert found.evidence.difference == pytest.approx(-0.1)
    assert found.sentence.startswith("worse: -0.1 (-0.1")
    assert found.sentence.endswith("60 items fell and 10 rose")


def test_the_same_answers_are_no_worse_only_if_there_are_enough_of_them() -> None:
    assert verdict(answers(0, 0, 500)).verdict is Verdict.NO_WORSE
    few = verdict(answers(0, 0, 20))
    assert few.verdict is Verdict.CANNOT_TELL
    assert few.evidence.p_decline == 1.0


def test_too_few_items_are_no_all_clear_and_the_number_that_could_tell_is_named() -> None:
    found = verdict(answers(lost=8, gained=5, same=87))
    assert found.verdict is Verdict.CANNOT_TELL
    assert found.evidence.needed is not None
    assert found.evidence.needed > 100
    assert found.sentence == f"cannot tell: n = {found.evidence.needed:,} needed for this effect"


def test_a_decline_that_is_certainly_smaller_than_what_counts_is_no_worse() -> None:
    found = verdict(answers(lost=160, gained=80, same=19_760))
    assert found.evidence.p_decline < 0.001
    assert found.verdict is Verdict.NO_WORSE


def test_right_or_wrong_answers_have_mcnemars_exact_test() -> None:
    found = evidence(answers(lost=15, gained=5, same=180), POINTS, rng())
    assert found.test == "McNemar"
    assert found.p_decline == pytest.approx(binomtest(15, 20, alternative="greater").pvalue)


def test_tangos_interval_is_that_of_his_paper() -> None:
    # Table of 44 patients, each measured by two methods: 43 agree, 0 and 1 differ (Tango 1998, section 5).
    low, high = -tango_bound(1, 0, 44, 0.025), tango_bound(0, 1, 44, 0.025)
    assert (low, high) == pytest.approx((-0.118, 0.061), abs=0.002)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 200), st.floats(0.01, 0.5))
def test_a_larger_fall_is_always_further_from_what_was_seen(
    lost: int, gained: int, same: int, fall: float
) -> None:
    n = lost + gained + same
    assert tango(lost, gained, n, fall + 0.01) <= tango(lost, gained, n, fall) + 1e-9
    bound = tango_bound(lost, gained, n, 0.05)
    assert (lost - gained) / n <= bound <= 1


def test_errors_of_items_of_one_source_are_those_of_the_source() -> None:
    differences, clusters = np.repeat([0.2, -0.1, 0.0, 0.3], 25), np.repeat(range(4), 25)
    alone = clustered_error(differences, np.ones(100))
    together = clustered_error(np.bincount(clusters, differences), np.bincount(clusters).astype(float))
    assert alone == pytest.approx(differences.std(ddof=1) / 10)
    assert together == pytest.approx(np.std([0.2, -0.1, 0.0, 0.3], ddof=1) / 2)


def test_answers_of_few_sources_prove_less_than_as_many_of_their_own() -> None:
    before = dict.fromkeys(range(200), 1.0)
    after = {item: float(item % 20 >= 3) for item in before}
    alone = Pairs.of(before, after)
    shared = Pairs.of(before, after, {item: item % 20 for item in before})
    assert verdict(alone).verdict is Verdict.WORSE
    found = verdict(shared)
    assert found.evidence.test == "exact", "three of twenty sources differ"
    assert found.evidence.p_decline > verdict(alone).evidence.p_decline
    one = verdict(Pairs.of(before, after, dict.fromkeys(before, "book")))
    assert one.sentence == "cannot tell, and no number of items of these sources would"


def test_one_score_that_differs_a_little_is_no_reason_to_doubt() -> None:
    """Two nights of the same weights: one answer of a hundred took another turn."""
    before = {item: 0.3 + 0.001 * item for item in range(100)}
    found = judge({"f1": Pairs.of(before, before | {7: 0.2})}, {"f1": Standard(effect=0.1)}, rng())["f1"]
    assert (found.verdict, found.evidence.test) == (Verdict.NO_WORSE, "exact")
    assert -0.05 < found.evidence.low < found.evidence.difference < found.evidence.high < 0.05
    few = {item: before[item] for item in range(20)}
    found = judge({"f1": Pairs.of(few, few | {7: 0.2})}, {"f1": Standard(effect=0.1)}, rng())["f1"]
    assert found.verdict is Verdict.CANNOT_TELL
    assert 100 < (found.evidence.needed or 0) <= 150, "as many as clear one of twenty"


@pytest.mark.full
def test_rare_falls_get_no_all_clear_more_often_than_stated() -> None:
    dice, cleared = rng(5), 0
    before = {item: 0.01 * (item % 90) for item in range(45)}
    for _ in range(2000):
        fell = dice.random(45) < 0.1
        after = {item: score - 1.0 * fell[item] for item, score in before.items()}
        found = evidence(Pairs.of(before, after), Standard(effect=0.1), dice)
        cleared += found.p_effect <= 0.05 and found.test != "bootstrap"
    assert cleared / 2000 <= 0.06


@pytest.mark.parametrize(("items", "found"), [(148, Verdict.CANNOT_TELL), (149, Verdict.NO_WORSE)])
def test_items_that_all_change_a_little_clear_no_fall_that_they_may_have_missed(
    items: int, found: Verdict
) -> None:
    """If one of 50 answers becomes wrong, 148 show none of these in 5 nights of 100."""
    dice = rng(5)
    before, after = (1.0 - 0.0005 * dice.random(items) for _ in range(2))
    graded = verdict(Pairs(before, after, np.arange(items)), Standard(effect=0.02))
    beyond = verdict(Pairs(before + 0.01, after + 0.01, np.arange(items)), Standard(effect=0.02))
    assert beyond.verdict is Verdict.NO_WORSE, "scores without a lowest one"
    negated = verdict(Pairs(before - 1, after - 1, np.arange(items)), Standard(effect=0.02))
    assert negated.verdict is graded.verdict, "as of a metric of which less is better"
    assert (graded.verdict, graded.evidence.test) == (found, "bootstrap")
    right = verdict(answers(0, 0, items), Standard(effect=0.02))
    assert (right.verdict, right.evidence.test) == (found, "McNemar")
    for one in (graded, right):
        assert one.evidence.needed is not None
        assert one.evidence.needed >= 149


def test_a_few_that_fall_far_are_a_decline_and_as_many_either_way_are_none() -> None:
    before = {item: 0.5 + 0.002 * item for item in range(80)}
    fallen = evidence(Pairs.of(before, before | dict.fromkeys(range(6), 0.0)), POINTS, rng())
    assert fallen.test == "exact"
    assert fallen.p_decline == pytest.approx(1 / 64)
    even = before | dict.fromkeys(range(3), 0.0) | dict.fromkeys(range(3, 6), 1.2)
    assert evidence(Pairs.of(before, even), POINTS, rng()).p_decline > 0.1


def test_items_are_paired_by_name_and_others_are_left_out() -> None:
    pairs = Pairs.of({"a": 1, "b": 0, "c": 1}, {"c": 0, "b": 1, "d": 1})
    assert pairs.before.tolist() == [0, 1]
    assert pairs.differences.tolist() == [1, -1]
    with pytest.raises(UsageError, match="no item in common"):
        Pairs.of({"a": 1}, {"b": 1})


@pytest.mark.parametrize(
    "wrong",
    [{"effect": 0}, {"effect": math.nan}, {"effect": 0.1, "confidence": 1}, {"effect": 0.1, "power": 0.2}],
)
def test_standards_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Standard(**wrong)


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="no number"):
        verdict(scores([math.nan, 0.1]))


def test_several_suites_share_one_chance_of_a_false_alarm() -> None:
    faint = answers(lost=12, gained=3, same=285)  # p = 0.018
    assert verdict(faint).verdict is Verdict.WORSE
    suites = {"faint": faint} | {f"same {n}": answers(10, 10, 280) for n in range(4)}
    night = judge(suites, dict.fromkeys(suites, POINTS), rng())
    assert night["faint"].p_decline == pytest.approx(5 * night["faint"].evidence.p_decline)
    assert night["faint"].verdict is Verdict.CANNOT_TELL
    assert judge({}, {}, rng()) == {}


def of_night(judged: Mapping[str, SuiteVerdict]) -> Verdict:
    return worst(one.verdict for one in judged.values())


def test_a_night_is_as_bad_as_its_worst_suite() -> None:
    suites = {"bad": answers(60, 10, 430), "good": answers(0, 0, 500), "few": answers(1, 1, 3)}
    assert of_night(judge(suites, dict.fromkeys(suites, POINTS), rng())) is Verdict.WORSE
    del suites["bad"]
    assert of_night(judge(suites, dict.fromkeys(suites, POINTS), rng())) is Verdict.CANNOT_TELL


def test_equal_differences_are_certain_only_in_number() -> None:
    assert verdict(scores([0.0] * 100)).verdict is Verdict.NO_WORSE
    assert verdict(scores([0.0] * 5)).sentence == "cannot tell: n = 59 needed for this effect"
    assert verdict(scores([-0.2] * 100)).verdict is Verdict.WORSE


@pytest.mark.parametrize("effect", [1.0, 3.0])
def test_answers_cannot_fall_by_more_than_all_of_them(effect: float) -> None:
    assert verdict(answers(5, 3, 100), Standard(effect=effect)).verdict is Verdict.NO_WORSE


def test_very_many_items_have_students_t() -> None:
    found = evidence(scores(rng().normal(-0.1, 0.3, 20_000)), POINTS, rng())
    assert found.test == "t"
    assert found.p_decline < 1e-6


@given(st.integers(30, 400), st.floats(0.02, 0.3), st.floats(0.0, 0.3))
def test_the_number_that_is_needed_has_the_power(n: int, effect: float, flips: float) -> None:
    standard = Standard(effect=effect)
    flips = max(flips, effect)
    needed = int(needed_answers(flips, standard, 1))
    assert mcnemar_power(needed, flips, effect, standard.alpha) >= standard.power
    assert mcnemar_power(needed * 9 // 10, flips, effect, standard.alpha) < standard.power + 0.02


def night_of_answers(random: np.random.Generator, n: int, fall: float) -> Pairs:
    """Items that a share of 10 % flips by chance, and a fall of the share that is right."""
    before = (random.random(n) < 0.6).astype(float)
    chance = random.random(n)
    lost = (before == 1) & (chance < (0.05 + fall / 2) / 0.6)
    gained = (before == 0) & (chance < (0.05 - fall / 2) / 0.4)
    return Pairs(before, before - lost + gained, np.arange(n))


def night_of_scores(random: np.random.Generator, n: int, fall: float) -> Pairs:
    """Scores of items, five from each source, that share a part of their change."""
    sources = np.repeat(np.arange(n // 5), 5)
    shared = random.normal(0, 0.1, n // 5)[sources]
    return scores(np.round(shared + random.standard_t(5, n) * 0.2 - fall, 2), sources)


def alarms(nights: int, seed: int = 7) -> Counter[Verdict]:
    """Verdicts of nights without a change, of three suites each."""
    random = rng(seed)
    standards = dict.fromkeys(("answers", "scores", "few"), POINTS)
    return Counter(
        of_night(
            judge(
                {
                    "answers": night_of_answers(random, 400, 0.0),
                    "scores": night_of_scores(random, 250, 0.0),
                    "few": night_of_answers(random, 60, 0.0),
                },
                standards,
                random,
            )
        )
        for _ in range(nights)
    )


@pytest.mark.full
def test_a_thousand_nights_without_a_change_hold_at_most_5_percent_alarms() -> None:
    assert alarms(1000)[Verdict.WORSE] <= 50


def test_nights_without_a_change_hold_few_alarms() -> None:
    assert (
        alarms(100)[Verdict.WORSE] <= 9
    )  # as 1 of 30 series with a chance of 5 % in each night would exceed


@pytest.mark.parametrize(("nights", "make"), [(80, night_of_answers), (80, night_of_scores)])
def test_the_effect_is_found_in_most_nights(nights: int, make: Any) -> None:
    random = rng(3)
    standard = Standard(effect=0.05)
    needed = evidence(make(random, 2000, 0.0), standard, random).needed
    assert needed is not None
    n = -(-needed // 5) * 5
    found = Counter(verdict(make(random, n, standard.effect), standard).verdict for _ in range(nights))
    assert found[Verdict.WORSE] >= 0.7 * nights, found
    assert n < 1500


@pytest.mark.full
@pytest.mark.parametrize("make", [night_of_answers, night_of_scores])
def test_the_effect_is_found_in_80_percent_of_a_thousand_nights(make: Any) -> None:
    random = rng(5)
    needed = evidence(make(random, 20_000, 0.0), POINTS, random).needed
    assert needed is not None
    n = -(-needed // 5) * 5
    found = Counter(verdict(make(random, n, POINTS.effect)).verdict for _ in range(1000))
    assert found[Verdict.WORSE] >= 800, found
