"""Properties of every latency model, whatever its coefficients and whatever the batch."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.correction import CorrectedModel, Correction
from conserve.profiles.fit import Samples, fit
from conserve.profiles.margin import Residual, margin_near, quantile_margin
from conserve.profiles.model import LinearModel
from conserve.profiles.points import Point
from conserve.profiles.profile import MODELS
from tests.reach import reached

coefficients = st.one_of(st.just(0.0), st.floats(1e-9, 10))
decodes = st.builds(Slice, st.just(1), st.integers(0, 50_000), st.just(True))
prefills = st.builds(Slice, st.integers(1, 8192), st.integers(0, 50_000))
slices = st.lists(st.one_of(decodes, prefills), max_size=20)


@st.composite
def models(draw: st.DrawFn) -> LinearModel:
    kind = draw(st.sampled_from(list(MODELS.values())))
    return kind.of(*[draw(coefficients) for _ in kind.terms])


@given(models(), slices, st.data())
def test_predictions_are_never_negative_and_grow_with_tokens_and_context(
    model: LinearModel, batch: list[Slice], data: st.DataObject
) -> None:
    ms = model.predict(Batch.of(batch))
    assert ms >= 0
    if not reached("a batch with requests", batch):
        return
    n = data.draw(st.integers(0, len(batch) - 1))
    one = batch[n]
    for more in (one._replace(tokens=one.tokens + 1), one._replace(context=one.context + 1)):
        assert model.predict(Batch.of([*batch[:n], more, *batch[n + 1 :]])) >= ms
    assert model.predict(Batch.of([*batch, one])) >= ms


@given(models(), slices, st.one_of(decodes, prefills), st.floats(0, 1e6))
def test_can_schedule_is_the_largest_number_that_fits(
    model: LinearModel, batch: list[Slice], request: Slice, tbt_ms: float
) -> None:
    running = Batch.of(batch)
    tokens = model.can_schedule(running, request, tbt_ms)
    assert running == Batch.of(batch), "the batch was changed"
    assert 0 <= tokens <= request.tokens

    def ms(count: int) -> float:
        return model.predict(Batch.of([*batch, request._replace(tokens=count)]))

    if reached("some tokens fit", tokens):
        assert ms(tokens) <= tbt_ms
    if reached("not all fit", tokens < request.tokens):
        assert ms(tokens + 1) > tbt_ms


@given(models(), slices, slices, st.randoms())
def test_a_batch_built_up_and_taken_down_predicts_like_one_built_at_once(
    model: LinearModel, kept: list[Slice], dropped: list[Slice], dice: random.Random
) -> None:
    moves = [(s, True) for s in kept] + [(s, True) for s in dropped]
    dice.shuffle(moves)
    moves += [(s, False) for s in dropped]
    batch = Batch()
    for piece, joins in moves:
        (batch.add if joins else batch.remove)(*piece)
    assert batch == Batch.of(kept)
    assert model.predict(batch) == model.predict(Batch.of(kept))


@given(models(), st.lists(slices.filter(bool), min_size=1, max_size=5))
def test_scalar_and_vector_predictions_agree(model: LinearModel, batches: list[list[Slice]]) -> None:
    one_by_one = [model.predict(Batch.of(batch)) for batch in batches]
    samples = Samples.of([Batch.of(batch) for batch in batches], [1.0] * len(batches))
    assert samples.predictions(model) == pytest.approx(one_by_one)


@given(slices)
def test_points_are_written_and_read_back(batch: list[Slice]) -> None:
    point = Point("mixed", tuple(batch))
    assert Point.parse(str(point)) == point


@pytest.mark.parametrize("kind", MODELS.values())
def test_a_fit_finds_the_model_that_made_the_samples(kind: type[LinearModel]) -> None:
    dice = random.Random(3)
    truth = kind.of(*[10 ** dice.uniform(-3, 0) for _ in kind.terms])
    batches = [random_batch(dice) for _ in range(500)]
    ms = [truth.predict(batch) * (3 if n % 50 == 0 else 1) for n, batch in enumerate(batches)]  # 2 % outliers
    found = fit(kind, Samples.of(batches, ms))
    test = [random_batch(dice) for _ in range(100)]
    relative = [found.predict(batch) / truth.predict(batch) - 1 for batch in test]
    assert np.mean(np.abs(relative)) < 0.005


def random_batch(dice: random.Random) -> Batch:
    steps = [Slice(1, dice.randrange(1, 4000), True) for _ in range(dice.randrange(40))]
    chunks = [Slice(dice.randrange(1, 800), dice.choice((0, 500, 3000))) for _ in range(dice.randrange(3))]
    return Batch.of(steps + chunks) if steps or chunks else Batch.of([Slice(16, 0)])


@given(st.lists(st.floats(0.5, 2), min_size=99, max_size=300))
def test_at_most_one_in_a_hundred_residuals_exceeds_the_margin(residuals: Sequence[float]) -> None:
    margin = quantile_margin(residuals, 0.01)
    assert sum(residual > margin for residual in residuals) <= 0.01 * len(residuals)
    alike = [Residual(100.0, ratio) for ratio in residuals[:99]]
    shorter = [Residual(10.0, 9.0)] * 99
    assert margin_near([*shorter, *alike], 100.0, 0.01) == quantile_margin(residuals[:99], 0.01)


@given(
    st.lists(st.floats(1e-3, 1e3), max_size=200),
    st.lists(st.builds(Residual, st.floats(1, 1e3), st.floats(0.5, 2)), max_size=50),
)
def test_a_correction_stays_in_bounds_and_survives_a_restart(
    ratios: Sequence[float], residuals: Sequence[Residual]
) -> None:
    model = MODELS["conserve-paper"].of(0.1, 0.0, 0.0, 10.0)
    corrected = CorrectedModel(model, residuals)
    batch = Batch.of([Slice(100, 0)])
    for ratio in ratios:
        lasting, before = corrected.lasting_scale, corrected.scale
        corrected.observe(batch, model.predict(batch) * ratio)
        assert 0.98 < corrected.lasting_scale / lasting < 1.02, "one iteration may not say much"
        assert 0.93 < corrected.scale / before < 1.07, "nor of the next few"
        assert 0.25 <= corrected.scale <= 4
        assert corrected.margin(100.0) > 0
    again = CorrectedModel(model, residuals, correction=corrected.correction)
    assert again.scale == again.lasting_scale == corrected.lasting_scale
    assert again.error == corrected.error
    assert isinstance(corrected.correction, Correction)
