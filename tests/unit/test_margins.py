"""Corrections of a latency model and their report: margins, drift, errors, noise, as tables."""

from collections.abc import Callable
from math import exp, log, sqrt

import numpy as np
import pytest

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel, Correction
from conserve.profiles.evaluation import noise_of, overruns, relative_spread
from conserve.profiles.fit import errors
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.margin import (
    NewestResiduals,
    Residual,
    limit_ms_for,
    margin_near,
    planned_ms,
    quantile_margin,
    step_of,
)
from conserve.profiles.record import Header, Record, Visit
from conserve.profiles.worth import Worth

MS_PER_TOKEN = ConServeModel.of(1, 0, 0, 0, 0, 0, 0, 10)  # and 10 ms for each iteration
BATCH = Batch.of([Slice(90, 0)])  # 100 ms


def by_step(margins: dict[int, float]) -> Callable[[float], float]:
    """Margins by quarters of a doubling; those of other lengths are 1."""
    return lambda ms: margins.get(step_of(ms), 1.0)


class TestPlannedLength:
    """The longest iteration that a limit allows with the margin of its own length."""

    def test_a_shorter_iterations_margin_does_not_allow_a_longer_one(self) -> None:
        """Of long iterations one in a hundred took eight times as long, of short ones 2.4 times."""
        margin = by_step({n: 2.4 if n < 17 else 5.5 if n < 24 else 8.3 for n in range(40)})
        assert planned_ms(margin, 121.0) == pytest.approx(121 / 5.5), "not 121 / 2.4 = 50 ms"

    def test_it_is_the_limit_itself_without_any_scatter(self) -> None:
        assert planned_ms(lambda ms: 1.0, 121.0) == 121.0

    def test_it_may_be_beyond_the_limit_where_iterations_are_shorter_than_predicted(self) -> None:
        assert planned_ms(lambda ms: 0.8, 100.0) == pytest.approx(125)

    def test_it_ends_where_longer_iterations_are_no_shorter_than_predicted(self) -> None:
        margin = by_step({n: 0.8 if n < 28 else 3.0 for n in range(60)})  # up to 117 ms
        assert planned_ms(margin, 105.0) == pytest.approx(2 ** (27.5 / 4)), "131 ms may take 394"

    def test_it_ends_where_a_longer_lengths_margin_begins(self) -> None:
        margin = by_step({28: 4.0, 27: 4.0, 26: 1.0})  # 99 to 152 ms, and 83 to 99 ms
        assert planned_ms(margin, 121.0) == pytest.approx(2 ** (26.5 / 4))

    def test_it_has_the_smallest_tried_length_where_none_fits(self) -> None:
        assert planned_ms(lambda ms: 1000.0, 121.0) == pytest.approx(0.121)

    def test_no_length_overruns_by_its_own_margin_and_none_longer_would_do(self) -> None:
        dice = np.random.default_rng(7)
        for _ in range(300):
            margins = {n: float(dice.uniform(0.6, 4)) for n in range(-20, 60)}
            limit_ms = float(dice.uniform(5, 2000))
            found = planned_ms(by_step(margins), limit_ms)
            assert found * by_step(margins)(found * (1 - 1e-9)) <= limit_ms * (1 + 1e-6)
            longer = np.linspace(found * 1.001, 2 * limit_ms, 200) if found < 1.9 * limit_ms else []
            assert all(ms * by_step(margins)(ms) > limit_ms for ms in longer)

    def test_the_limit_for_a_length_plans_none_longer_and_a_larger_limit_would(self) -> None:
        dice = np.random.default_rng(8)
        for _ in range(300):
            margins = by_step({n: float(dice.uniform(0.9, 2.5)) for n in range(-20, 60)})
            wanted_ms = float(dice.uniform(5, 200))
            limit_ms = limit_ms_for(margins, wanted_ms)
            assert planned_ms(margins, limit_ms) <= wanted_ms * (1 + 1e-9)
            assert planned_ms(margins, limit_ms * 1.001) > wanted_ms


class TestMargin:
    """The factor that all but a share of the iterations stay under."""

    @pytest.mark.parametrize(
        ("ratios", "share", "margin"),
        [
            ([], 0.01, 2.0),
            ([3.0], 0.01, 3.0),
            ([float(n) for n in range(199, 0, -1)], 0.01, 198.0),
            ([float(n) for n in range(1, 100)], 0.01, 99.0),
            ([1.0, 2.0, 3.0], 0.5, 2.0),
            (
                [1.0, 2.0, 1.0],
                1 / 16,
                2.5,
            ),  # two halvings are missing: twice a quarter of the way from the median
            ([1.0, 5.0, 1.0, 1.0, 1.0], 1 / 12, 6.0),  # one
            ([1.0, 2.0, 3.0, 4.0, 5.0], 1 / 12, 5.5),
        ],
    )
    def test_is_a_residual_or_a_bit_more_than_the_largest(
        self, ratios: list[float], share: float, margin: float
    ) -> None:
        assert quantile_margin(ratios, share) == pytest.approx(margin)

    def test_comes_from_the_nearest_quarter_of_the_iterations(self) -> None:
        near = [Residual(100.0, 1.0)] * 100 + [Residual(101.0, 1.5)] * 100
        far = [Residual(50.0, 9.0)] * 300 + [Residual(200.0, 9.0)] * 300
        assert margin_near([*far, *near], 100.0, 0.01) == 1.5
        assert margin_near([*far, *near], 50.0, 0.01) == 9.0

    def test_is_that_of_the_last_thousand_iterations_nearest_first_and_then_oldest_first(self) -> None:
        dice = np.random.default_rng(5)
        seen = [
            Residual(*pair)
            for pair in zip(
                dice.choice([50.0, 80.0, 100.0, 130.0], 3500), dice.gamma(9, 0.1, 3500), strict=True
            )
        ]
        newest, share = NewestResiduals(seen), 0.01
        assert newest.table.tolist() == [[*one] for one in seen[-1000:]]
        for at_ms in (40.0, 90.0, 100.0, 500.0):
            apart = [max(one.predicted_ms, at_ms) / min(one.predicted_ms, at_ms) for one in seen[-1000:]]
            nearest = sorted(range(1000), key=apart.__getitem__)[:250]
            expected = quantile_margin([seen[-1000:][place].ratio for place in nearest], share)
            assert margin_near(newest.table, at_ms, share) == expected

    def test_comes_from_no_more_than_the_nearest_quarter(self) -> None:
        further = [Residual(100.0 + n, 1 + n / 1000) for n in range(1, 801)]
        assert margin_near(further, 100.0, 0.01) == 1.199  # the 199th of 200

    def test_stays_where_longer_iterations_were_measured_than_the_last(self) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN, iter([Residual(64.0, 1.0 + n % 2) for n in range(198)]))
        assert corrected.margin(128.0) == 3.0, "twice as long as any"
        long, short = Batch.of([Slice(190, 0)]), Batch.of([Slice(10, 0)])
        for batch in (long, *[short] * 31):
            corrected.observe(batch, corrected.predict(batch))
        assert corrected.margin(128.0) == 2.0

    def test_comes_from_99_iterations_at_least(self) -> None:
        short, long = [Residual(50.0, 9.0)] * 99, [Residual(200.0, 1.5)] * 99
        for residuals in ([*short, *long], [*long, *short]):
            assert margin_near(residuals, 99.0, 0.01) == 9.0
            assert margin_near(residuals, 101.0, 0.01) == 1.5

    def test_is_taken_anew_every_16_iterations(self) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN)
        for _ in range(15):
            assert corrected.margin(100.0) == 2.0
            corrected.observe(BATCH, corrected.predict(BATCH))
        assert corrected.margin(100.0) == 2.0
        corrected.observe(BATCH, corrected.predict(BATCH))
        assert corrected.margin(100.0) == pytest.approx(1.0)

    def test_each_of_forty_is_taken_anew_every_16_iterations(self) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN)
        lengths = [2.0 ** (step / 4) for step in range(40)]
        assert {corrected.margin(ms) for ms in lengths} == {2.0}
        for _ in range(32):
            corrected.observe(BATCH, corrected.predict(BATCH))
        assert all(corrected.margin(ms) == pytest.approx(1.0) for ms in lengths if ms < 100)


class TestDrift:
    """A scale that follows the machine."""

    @pytest.mark.parametrize("drift", [1.2, 1 / 1.2])
    def test_half_of_it_is_followed_in_48_iterations(self, drift: float) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN)
        for _ in range(48):
            corrected.observe(BATCH, 100.0 * drift)
        assert corrected.lasting_scale == pytest.approx(drift**0.5)
        for _ in range(48):
            corrected.observe(BATCH, 100.0 * drift)
        assert corrected.lasting_scale == pytest.approx(drift**0.75)

    @pytest.mark.parametrize("drift", [1.2, 1 / 1.2])
    def test_the_next_iteration_is_foretold_sooner(self, drift: float) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN)
        for _ in range(48):
            corrected.observe(BATCH, 100.0 * drift)
        assert abs(corrected.predict(BATCH) / (100 * drift) - 1) < 0.06, "0.09 by what lasts alone"
        assert corrected.correction.scale == corrected.lasting_scale, "a restart takes what lasts"

    @pytest.mark.parametrize(("ms", "said"), [(1e4, 1.25), (1.0, 1 / 1.25), (100.0, 1.0)])
    def test_one_iteration_says_a_quarter_at_most(self, ms: float, said: float) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN)
        corrected.observe(BATCH, ms)
        assert corrected.scale == pytest.approx(said ** (1 - 0.5 ** (1 / 48)))

    def test_an_iteration_without_time_says_nothing(self) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN)
        corrected.observe(BATCH, 0.0)
        assert corrected.correction == Correction()
        nothing = CorrectedModel(ConServeModel.of(*[0.0] * 8))
        nothing.observe(BATCH, 5.0)
        assert nothing.correction == Correction()

    def test_beyond_a_factor_of_four_the_profile_is_wrong(self) -> None:
        for scale, beyond in ((4.0, True), (0.25, True), (3.9, False), (0.26, False), (1.0, False)):
            assert Correction(log_scale=log(scale)).out_of_bounds == beyond
            assert Correction(log_scale=log(scale)).scale == pytest.approx(scale)

    def test_the_error_is_a_mean_of_the_first_iterations_and_forgets_later(self) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN)
        corrected.observe(BATCH, 200.0)  # half of it was predicted
        assert corrected.error == 0.5
        corrected.observe(BATCH, corrected.predict(BATCH))
        assert corrected.error == pytest.approx(0.25)
        for _ in range(200):
            corrected.observe(BATCH, corrected.predict(BATCH))
        assert corrected.error < 0.005
        before = corrected.error
        corrected.observe(BATCH, 2 * corrected.predict(BATCH))
        assert corrected.error - before == pytest.approx((0.5 - before) * (1 - 0.5 ** (1 / 48)))

    def test_the_last_thousand_iterations_are_kept(self) -> None:
        corrected = CorrectedModel(MS_PER_TOKEN, [Residual(1.0, 7.0)])
        for _ in range(1000):
            corrected.observe(BATCH, corrected.predict(BATCH))
        assert corrected.correction.seen == 1000
        assert len(corrected.correction.residuals) == 1000
        assert max(residual.ratio for residual in corrected.correction.residuals) == pytest.approx(1.0)
        corrected.observe(BATCH, 2 * corrected.predict(BATCH))
        assert corrected.off == [*[pytest.approx(0.0)] * 999, 0.5]
        corrected.off.clear()
        assert len(corrected.off) == 1000, "a copy was cleared"

    def test_iterations_of_a_part_of_a_millisecond_are_planned_and_learned_from(self) -> None:
        corrected = CorrectedModel(ConServeModel.of(0.01, 0, 0, 0, 0, 0, 0, 0))
        assert corrected.can_schedule(Batch(), Slice(500, 0), 1.0) == 50
        corrected.observe(Batch.of([Slice(100, 0)]), 1.1)
        assert corrected.scale > 1

    def test_what_is_planned_leaves_the_margin(self) -> None:
        for scale, tbt_ms, tokens in ((1.0, 100.0, 40), (2.0, 100.0, 15), (1.0, 0.0, 0), (1.0, -5.0, 0)):
            corrected = CorrectedModel(MS_PER_TOKEN, correction=Correction(log_scale=log(scale)))
            assert corrected.can_schedule(Batch(), Slice(500, 0), tbt_ms) == tokens  # a margin of two

    def test_the_margin_is_that_of_iterations_as_long_as_the_planned_one(self) -> None:
        residuals = [Residual(100.0, 1.0)] * 99 + [Residual(50.0, 2.0)] * 99
        corrected = CorrectedModel(MS_PER_TOKEN, residuals)
        assert corrected.can_schedule(Batch(), Slice(500, 0), 100.0) == 90
        assert corrected.can_schedule(Batch(), Slice(500, 0), 50.0) == 15


def test_a_decode_step_is_worth_what_it_costs_in_tokens_of_a_prompt() -> None:
    assert Worth(2.0, 0.5).of(3, 10) == 11.0
    by_context = Worth.by(ConServeModel.of(1, 0, 0, 0.01, 0.5, 7, 0, 10))
    assert by_context == pytest.approx((1.51 / 1.01, 0.01 / 1.01))
    assert Worth.by(MS_PER_TOKEN) == pytest.approx((1, 0))
    assert Worth.by(ConServeModel.of(*[0.0] * 8)) == Worth()
    assert Worth.by(HyGenModel.of(1, 0, 0, 0, 0, 0, 0)) == Worth(), "steps that cost nothing are not believed"
    assert Worth.by(HyGenModel.of(0, 1, 0, 0, 0, 0, 0)) == Worth()


def test_errors_are_shares_of_what_was_measured() -> None:
    found = errors(
        np.array([1.0, 1.5, 0.5, 3.0]), np.array([1.0, 1.0, 1.0, 2.0]), margin=1.5, overrun_share=0.2
    )
    assert (found.mape, found.bias, found.batches) == (0.375, 0.125, 4)
    assert (found.p50_error, found.p90_error, found.p99_error) == (0.5, 0.5, 0.5)
    assert (found.margin, found.overrun_share) == (1.5, 0.2)
    spread = errors(np.arange(1.0, 102), np.ones(101), margin=1, overrun_share=0)
    assert (spread.p50_error, spread.p90_error, spread.p99_error) == (50, 90, 99)


def test_overruns_are_judged_by_batches_that_the_margin_did_not_know() -> None:
    quick, slow = [[Residual(100.0, 1.0)] * 99], [[Residual(100.0, 2.0)] * 33]
    assert overruns(quick, quick) == 0
    assert overruns(quick, slow) == overruns(slow, quick) == 33 / 132
    assert overruns([], []) == 0


def test_noise_is_that_of_equal_batches() -> None:
    assert relative_spread([1.0, 3.0]) == pytest.approx(sqrt(2) / 2)
    record = Record(None, Header("key", "plan"))
    for point, ms in (
        ("prefill p16@0", [1.0, 3.0]),
        ("prefill p16@0", [50.0]),
        ("decode d@256", [2.0, 2.0]),
        ("decode d@256", [9.0, 27.0]),
        ("noise p16@0", [4.0]),
        ("noise p16@0", [12.0]),
    ):
        record.add(Visit(point, ms, 0.5))
    assert record.seconds == 3.0
    assert noise_of(record).back_to_back == pytest.approx(sqrt(2) / 2)
    assert noise_of(record).over_time == pytest.approx(sqrt(32) / 8)
    once = Record(None, Header("key", "plan"))
    once.add(Visit("noise p16@0", [4.0], 0.5))
    assert noise_of(once).over_time == 0, "one iteration scatters round nothing"
    empty = noise_of(Record(None, Header("key", "plan")))
    assert (empty.back_to_back, empty.over_time) == (0, 0)


def test_a_correction_begins_where_it_is_told() -> None:
    begun = Correction(of="p", log_scale=0.5, error=0.1, seen=7, residuals=[Residual(1.0, 2.0)])
    corrected = CorrectedModel(MS_PER_TOKEN, [Residual(5.0, 6.0)], correction=begun)
    assert corrected.correction == begun
    assert (corrected.scale, corrected.error) == (exp(0.5), 0.1)
    fresh = CorrectedModel(MS_PER_TOKEN, [Residual(5.0, 6.0)], correction=Correction(of="p"))
    assert fresh.correction.residuals == [Residual(5.0, 6.0)]
