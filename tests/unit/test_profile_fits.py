"""Fits of latency models: what is fitted and what judges it, with few batches and with many."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from conserve.bench.bound import Mix
from conserve.bench.simulate_online import EngineModel
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.evaluation import LEAST_HELD_OUT, fit_models
from conserve.profiles.fit import Samples, cross_predictions, fit
from conserve.profiles.margin import Residual
from conserve.profiles.model import Parabola, added_ms, smallest_ms
from conserve.profiles.points import Point
from conserve.profiles.profile import MODELS
from tests.fake_rig import TRUTH

GRID = [
    Point("mixed", (*[Slice(tokens, context)] * (tokens > 0), *[Slice(1, context + tokens, True)] * rows))
    for tokens, context, rows in product((16, 128, 700, 0), (0, 900, 3000), (1, 3, 9, 40))
]
HELD_OUT = [
    Point("held-out", (Slice(32 + 40 * n, 100 * n), *[Slice(1, 70 * n, True)] * n))
    for n in range(LEAST_HELD_OUT)
]


def times_of(points: Sequence[Point], *ratios: float) -> dict[Point, list[float]]:
    """Times of the points, as multiples of what the true model says."""
    return {point: [TRUTH.predict(point.batch) * ratio for ratio in ratios] for point in points}


@pytest.mark.parametrize("kind", MODELS.values())
def test_the_most_tokens_within_a_budget_are_found_with_a_few_predictions(kind: type) -> None:
    class Counting(kind):  # type: ignore[misc]
        predictions = 0

        def predict(self, batch: Batch) -> float:
            self.predictions += 1
            return float(super().predict(batch))

    model = Counting.of(*[0.3, 1e-4, 2e-4, 0.05, 4.0, 9.0, 0.02, 15.0][: len(kind.terms)])
    batch = Batch.of([Slice(300, 500), *[Slice(1, 700, True)] * 5])
    empty_ms = model.predict(batch)
    for context, more_ms in product((0, 700, 20_000), (30.0, 500.0, 9_000.0)):
        model.predictions = 0
        model.can_schedule(batch, Slice(1_000_000, context), 1.5 * empty_ms + more_ms)
        assert model.predictions <= 6


@pytest.mark.parametrize("kind", MODELS.values())
def test_a_budget_of_just_so_many_tokens_holds_them(kind: type) -> None:
    """The root of the quadratic is as often a hair below the number as above it."""
    model = kind.of(*[0.3, 1e-4, 2e-4, 0.05, 4.0, 9.0, 0.02, 15.0][: len(kind.terms)])  # type: ignore[attr-defined]
    slices = [Slice(300, 500), *[Slice(1, 700, True)] * 5]
    batch = Batch.of(slices)
    for tokens in range(1, 400):
        held_ms = model.predict(Batch.of([*slices, Slice(tokens, 70)]))
        assert model.can_schedule(batch, Slice(1000, 70), held_ms) == tokens
    assert model.can_schedule(batch, Slice(0, 70), 0.0) == 0, "none are wanted, though none fits"


JUMP = ConServeModel.of(0.1, 0, 0, 1e-3, 0.2, 0.5, 0, 12.0, 1.5)  # ms more once there is a second token
LONE = [Slice(1, 200, True)]


def test_a_lone_token_is_quicker_than_the_first_of_several() -> None:
    lone, two, three = (JUMP.predict(Batch.of(LONE * count)) for count in (1, 2, 3))
    assert two - lone == pytest.approx(three - two + 1.5)
    assert JUMP.predict(Batch()) == 12.0
    earlier = ConServeModel(dict(list(JUMP.coefficients.items())[:-1]))
    assert earlier.coefficients == {**JUMP.coefficients, "several": 0.0}
    with pytest.raises(ValueError, match="has the coefficients"):
        ConServeModel({"several": 1.5})


def test_a_part_of_an_iteration_does_not_pay_for_the_second_token() -> None:
    nine, eight = (JUMP.predict(Batch.of(LONE * count)) for count in (9, 8))
    assert added_ms(JUMP, LONE[0]) == pytest.approx(nine - eight)
    engine = EngineModel(model=JUMP, max_tokens=2048, max_requests=64, scale=2.0)
    assert engine.added_ms(Slice(64, 0)) == pytest.approx(2 * added_ms(JUMP, Slice(64, 0)))
    mix = Mix.of([(64, 9)], engine)
    beside_ms = JUMP.predict(Batch.of([*LONE * 2, Slice(64, 0)])) - JUMP.predict(Batch.of(LONE * 2))
    assert mix.prompt * mix.token_ms == pytest.approx(2 * beside_ms)


@pytest.mark.parametrize("before", [[], LONE, LONE * 2])
def test_a_budget_counts_what_a_second_token_costs(before: list[Slice]) -> None:
    for tokens in range(1, 60):
        held_ms = JUMP.predict(Batch.of([*before, Slice(tokens, 70)]))
        assert JUMP.can_schedule(Batch.of(before), Slice(1000, 70), held_ms) == tokens
        assert JUMP.can_schedule(Batch.of(before), Slice(1000, 70), held_ms - 0.01) == tokens - 1


def test_a_fit_tells_the_cost_of_a_second_token_from_the_constant() -> None:
    batches = [Batch.of(LONE * count) for count in (1, 1, 2, 3, 5, 9, 20)]
    batches += [Batch.of([Slice(tokens, context)]) for tokens in (16, 128, 700) for context in (0, 900)]
    batches += [Batch.of([Slice(1, context, True)] * count) for context in (50, 2000) for count in (1, 4)]
    found = fit(ConServeModel, Samples.of(batches, [JUMP.predict(batch) for batch in batches]))
    for batch in batches:
        assert found.predict(batch) == pytest.approx(JUMP.predict(batch), rel=1e-3)
    assert found.coefficients["several"] == pytest.approx(1.5, rel=0.1)


SEVERAL = [point for point in GRID if point.batch.tokens > 1]


def test_without_a_lone_token_the_constant_has_the_time_of_a_second_one_too() -> None:
    """As where an engine speculates: each of its steps has several tokens."""
    batches = [point.batch for point in SEVERAL]
    found = fit(ConServeModel, Samples.of(batches, [JUMP.predict(batch) for batch in batches]))
    assert found.coefficients["several"] == 0
    assert found.coefficients["constant"] == pytest.approx(12.0 + 1.5, rel=0.01)
    assert smallest_ms(found) == pytest.approx(smallest_ms(JUMP) + 1.5, rel=0.01)


def test_the_only_lone_token_is_not_predicted_at_half_by_the_others() -> None:
    batches = [*(point.batch for point in SEVERAL), Batch.of(LONE)]
    samples = Samples.of(batches, [JUMP.predict(batch) for batch in batches])
    predicted = cross_predictions(ConServeModel, samples)
    assert predicted[-1] == pytest.approx(JUMP.predict(batches[-1]) + 1.5, rel=0.01)


def test_a_parabola_reaches_less_than_a_ms_above_its_beginning() -> None:
    assert Parabola(0.0, 2.0, 10.0).reaches(10.5) == pytest.approx(0.25)
    assert Parabola(0.0, 2.0, 10.0).reaches(10.0) == 0
    assert Parabola(0.0, 0.0, 10.0).reaches(10.5) == float("inf")


def test_models_are_judged_by_batches_that_they_were_not_fitted_to() -> None:
    found = fit_models(times_of(GRID, 1.0), times_of(HELD_OUT, 2.0))["conserve"]
    assert found.coefficients == pytest.approx(TRUTH.coefficients, rel=0.01, abs=1e-6)
    assert found.errors is not None
    assert found.errors.batches == LEAST_HELD_OUT
    assert found.errors.mape == pytest.approx(0.5, rel=0.01)
    assert found.errors.margin == pytest.approx(2.0, rel=0.01)


def test_with_one_held_out_batch_less_all_are_fitted_and_judge() -> None:
    found = fit_models(times_of(GRID[:9], 1.0), times_of(HELD_OUT[1:], 2.0))["conserve"]
    assert found.errors is not None
    assert found.errors.batches == 9 + LEAST_HELD_OUT - 1
    assert found.coefficients != pytest.approx(TRUTH.coefficients, rel=0.3)


def test_a_handful_of_batches_that_a_model_suits_does_not_speak_for_it() -> None:
    eight = GRID[3::5]
    assert len(eight) < LEAST_HELD_OUT
    errors = fit_models(times_of(eight, 1.0), {})["conserve-paper"].errors
    assert errors is not None
    model = fit(
        MODELS["conserve-paper"],
        Samples.of([p.batch for p in eight], [TRUTH.predict(p.batch) for p in eight]),
    )
    within = [abs(model.predict(p.batch) / TRUTH.predict(p.batch) - 1) for p in eight]
    assert errors.mape > 1.2 * np.mean(within)


def test_each_run_of_a_batch_that_judges_leaves_a_residual() -> None:
    found = fit_models(times_of(GRID, 1.0), times_of(HELD_OUT, 1.0, 1.25, 1.0))["conserve"]
    assert len(found.residuals) == 3 * LEAST_HELD_OUT
    for point, first in zip(HELD_OUT, range(0, 3 * LEAST_HELD_OUT, 3), strict=True):
        ms, ratio = found.residuals[first]
        assert ms == pytest.approx(TRUTH.predict(point.batch), rel=0.01)
        assert found.residuals[first + 1].ratio == pytest.approx(1.25 * ratio, abs=1e-3)
    for ms, ratio in found.residuals:
        assert Residual(ms, ratio) == (round(ms, 3), round(ratio, 4)), "a file needs no more digits"


def test_every_second_batch_judges_the_margin_of_the_others() -> None:
    held_out = times_of(HELD_OUT[::2], *[1.0] * 10) | times_of(HELD_OUT[1::2], *[2.0] * 10)
    in_turn = {point: held_out[point] for point in HELD_OUT}
    errors = fit_models(times_of(GRID, 1.0), in_turn)["conserve"].errors
    assert errors is not None
    assert errors.overrun_share == 0.5


def test_an_eighth_of_the_samples_is_predicted_from_the_others() -> None:
    points = GRID[:16]
    late = [8.0 if n % 8 == 3 else 1.0 for n in range(16)]  # those of one part
    samples = Samples.of(
        [point.batch for point in points],
        [ratio * TRUTH.predict(point.batch) for ratio, point in zip(late, points, strict=True)],
    )
    predicted = cross_predictions(ConServeModel, samples)
    for n in (3, 11):
        assert predicted[n] == pytest.approx(TRUTH.predict(points[n].batch), rel=0.1)
