"""Coefficients that an engine's own iterations correct: when they are replaced, and what is learned anew then."""

from collections import Counter
from math import log
from pathlib import Path
from random import Random

import numpy as np
import pytest

from conserve.cli.profile_report import correction_lines
from conserve.profiles import refit
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel, Correction
from conserve.profiles.fit import Samples, fit, sums_of
from conserve.profiles.margin import Residual
from conserve.profiles.model import TIMELESS
from conserve.profiles.refit import (
    EVERY,
    KINDS,
    OF_KIND,
    BatchKind,
    FittedReach,
    Refit,
    error,
)

PROFILE = ConServeModel.of(0.1, 1e-4, 0, 0, 0.1, 0.3, 0, 25)  # of short contexts and of few requests
TRUTH = ConServeModel.of(0.1, 1e-4, 0, 2e-3, 0.8, 0.3, 0, 25)  # 120 steps at 400 tokens take 227 ms, not 49


def kind_of(batch: Batch) -> BatchKind:
    return BatchKind.of((*sums_of(batch), 1.0))


def test_batches_are_of_a_kind_whose_numbers_have_as_many_digits() -> None:
    def steps(count: int, context: int) -> Batch:
        return Batch.of([Slice(1, context, True)] * count)

    chunk = kind_of(Batch.of([Slice(1, 300)]))
    assert chunk == BatchKind(prompts=True, requests=1, tokens=1, context=4)  # 300 has nine binary digits
    assert kind_of(steps(1, 300)) == chunk._replace(prompts=False)
    assert kind_of(steps(1, 255)) == kind_of(steps(1, 511)) == kind_of(steps(1, 300))
    assert kind_of(steps(1, 512)).context == 5
    assert kind_of(steps(5, 60)) == BatchKind(prompts=False, requests=3, tokens=3, context=4)


def alone(dice: Random) -> Batch:
    """A live request's step, without rows."""
    return Batch.of([Slice(1, dice.randint(50, 500), True)])


def many(dice: Random) -> Batch:
    """Steps of many rows."""
    return Batch.of([Slice(1, dice.randint(300, 500), True) for _ in range(dice.randint(80, 127))])


def prompts(dice: Random) -> Batch:
    """Chunks of prompts beside a few steps."""
    chunks = [Slice(dice.randint(50, 600), 0) for _ in range(dice.randint(1, 3))]
    return Batch.of([*chunks, *(Slice(1, 300, True) for _ in range(dice.randint(0, 9)))])


def serve(
    model: CorrectedModel, truth: ConServeModel, rounds: int, *, noise: float = 0.1, seed: int = 1
) -> None:
    """Have the model learn: of 24 iterations 20 are live steps, two are of rows and two of prompts."""
    dice = Random(seed)
    for _ in range(rounds):
        for make in [alone] * 20 + [many, prompts] * 2:
            batch = make(dice)
            model.observe(batch, truth.predict(batch) * dice.lognormvariate(0, noise))


def test_a_kind_of_iterations_that_is_far_off_is_predicted_after_a_few_hundred_others() -> None:
    corrected, rows = CorrectedModel(PROFILE), many(Random(9))
    serve(corrected, TRUTH, 16)
    assert corrected.refits >= 1
    assert corrected.predict(rows) == pytest.approx(TRUTH.predict(rows), rel=0.15)
    step = alone(Random(9))
    assert corrected.predict(step) == pytest.approx(TRUTH.predict(step), rel=0.1)


def test_a_scale_alone_would_not_have_told_the_kinds_apart() -> None:
    corrected, rows = CorrectedModel(PROFILE), many(Random(9))
    corrected._refit = None
    serve(corrected, TRUTH, 16)
    assert corrected.predict(rows) < 0.5 * TRUTH.predict(rows)


@pytest.mark.parametrize("speed", [1.0, 1.6])
def test_a_model_that_is_right_but_for_its_scale_keeps_its_coefficients(speed: float) -> None:
    corrected = CorrectedModel(TRUTH)
    slower = ConServeModel.of(*(speed * weight for weight in TRUTH.coefficients.values()))
    serve(corrected, slower, 40)
    assert corrected.refits == 0
    assert corrected.model is TRUTH
    assert corrected.scale == pytest.approx(speed, rel=0.1)


def test_no_candidate_is_used_before_it_has_predicted_iterations_that_it_had_not_seen() -> None:
    known, dice = Refit(PROFILE), Random(1)
    batches = [make(dice) for _ in range(EVERY) for make in (alone, many)]
    found = [known.observe(batch, TRUTH.predict(batch), PROFILE) for batch in batches]
    assert found[:-1] == [None] * (2 * EVERY - 1)
    assert found[-1] is not None


def test_a_candidate_that_new_iterations_refute_is_not_used() -> None:
    known, dice = Refit(PROFILE), Random(1)
    batches = [alone(dice) if n % 2 else many(dice) for n in range(EVERY)]
    late = [known.observe(batch, TRUTH.predict(batch), PROFILE) for batch in batches]  # a neighbour's time
    usual = [known.observe(batch, PROFILE.predict(batch), PROFILE) for batch in batches]
    assert [*late, *usual] == [None] * 2 * EVERY


def test_rare_kinds_stay_known_and_only_the_newest_of_each_count() -> None:
    known, dice = Refit(PROFILE), Random(1)
    rare = many(dice)
    known.observe(rare, 200.0, PROFILE)
    for n in range(5000):
        known.observe(alone(dice), 25.0 + n, PROFILE)
    kept = Samples.of_sums(known.rows)
    assert 200.0 in kept.ms
    assert max(Counter(map(BatchKind.of, known.rows)).values()) == OF_KIND
    assert 25.0 + 4999 in kept.ms


def test_kinds_are_bounded_and_the_one_not_seen_for_longest_goes() -> None:
    known, dice = Refit(PROFILE), Random(1)
    shapes = [Batch.of([Slice(1 << n, 1 << m)]) for n in range(11) for m in range(0, 12, 2)]
    batches = list({kind_of(one): one for one in shapes}.values())
    dice.shuffle(batches)
    for number, batch in enumerate(batches):
        known.observe(batch, 30.0 + number, PROFILE)
    assert len(batches) > KINDS
    assert (
        Samples.of_sums(known.rows).ms.tolist() == [30.0 + number for number in range(len(batches))][-KINDS:]
    )


def test_an_error_counts_each_kind_alike_and_no_scale() -> None:
    dice = Random(3)
    batches = [alone(dice) for _ in range(990)] + [many(dice) for _ in range(10)]
    rows = [(*sums_of(batch), 2 * TRUTH.predict(batch)) for batch in batches]
    assert error(TRUTH, rows) == pytest.approx(0, abs=1e-9)
    assert error(PROFILE, rows) > 0.3  # nearly all are steps of one request, and right


def test_what_was_learned_about_the_earlier_coefficients_is_learned_anew() -> None:
    corrected = CorrectedModel(PROFILE, [Residual(30.0, 9.0)] * 200)
    serve(corrected, TRUTH, 16, noise=0.05)
    assert corrected.margin(220.0) < 1.3
    assert corrected.scale == pytest.approx(1, rel=0.15)
    assert corrected.error < 0.1


def test_refitted_coefficients_are_kept_over_a_restart(tmp_path: Path) -> None:
    corrected = CorrectedModel(PROFILE, correction=Correction(of="a profile"))
    serve(corrected, TRUTH, 16)
    corrected.correction.save(tmp_path / "file")
    again = CorrectedModel(PROFILE, correction=Correction.load(tmp_path / "file", of="a profile"))
    rows = many(Random(9))
    lasting = corrected.lasting_scale / corrected.scale
    assert again.predict(rows) == pytest.approx(corrected.predict(rows) * lasting)
    assert again.correction.coefficients == corrected.correction.coefficients is not None


def test_a_correction_without_coefficients_keeps_those_of_the_profile(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"of":"a profile","log_scale":0.5,"residuals":[[30,1.1]]}')
    again = CorrectedModel(PROFILE, correction=Correction.load(tmp_path / "file", of="a profile"))
    assert again.model is PROFILE
    assert again.correction.coefficients is None


def test_a_model_without_coefficients_is_not_fitted() -> None:
    timeless = CorrectedModel(TIMELESS)
    serve(timeless, TRUTH, 16)
    assert timeless.refits == 0


def test_terms_that_the_iterations_do_not_tell_apart_keep_the_first_models_word() -> None:
    known, dice = Refit(PROFILE), Random(3)
    batches = [make(dice) for _ in range(EVERY) for make in (alone, many)]
    found = [known.observe(one, TRUTH.predict(one), PROFILE) for one in batches][-1]
    assert found is not None
    rows, prompt = many(dice), Batch.of([Slice(2000, 0)])  # of which no iteration was seen
    assert found.predict(rows) == pytest.approx(TRUTH.predict(rows), rel=0.05)
    assert found.predict(prompt) == pytest.approx(PROFILE.predict(prompt), rel=0.3)
    free = fit(ConServeModel, Samples.of_sums(known.rows))
    assert free.predict(prompt) > 1000 * PROFILE.predict(prompt)


def test_two_steps_say_nothing_of_one_alone() -> None:
    """An engine that speculates has no iteration of one token, and its fits go on by the first model's word."""
    known, dice = Refit(PROFILE), Random(3)
    for _ in range(OF_KIND):
        known.observe(Batch.of([Slice(1, dice.randint(50, 500), True)] * 2), 30.0, PROFILE)
    assert 1 in known._to_fit().tokens
    for context in (60, 100, 500, 1100):
        known.observe(Batch.of([Slice(1, context, True)]), 30.0, PROFILE)
    lone = known._to_fit()
    assert sorted(lone.context[lone.tokens == 1].tolist()) == [60, 100, 500, 1100], "as they were measured"


def test_the_profiles_report_says_what_was_corrected() -> None:
    assert correction_lines(None) == []
    scaled = Correction(log_scale=0.1, seen=3000, error=0.04)
    assert correction_lines(scaled)[0].startswith(
        "corrected since over 3,000 iterations: times are 1.105 of these"
    )
    fitted = Correction(log_scale=0.1, seen=3000, error=0.04, coefficients=TRUTH.coefficients)
    [line] = correction_lines(fitted)
    assert line.startswith("corrected since over 3,000 iterations: the model was fitted to them anew")


LONG = FittedReach(tokens=8192, requests=128, context=32_768)  # of a profile
FAR = [Batch.of([Slice(1, 16_000, True)] * 8), Batch.of([Slice(2048, 30_000)]), Batch.of([Slice(512, 0)])]


@pytest.mark.parametrize("seed", range(4))
def test_what_a_profile_knows_and_the_engine_has_not_seen_stays_known(seed: int) -> None:
    """All that the profile lacks is what a request takes; its long contexts are right."""
    profile = ConServeModel.of(0.1, 1e-4, 1e-5, 5e-4, 0.1, 0.3, 0, 25)
    truth = ConServeModel.of(0.1, 1e-4, 1e-5, 5e-4, 0.8, 0.3, 0, 25)
    corrected = CorrectedModel(profile, reach=LONG)
    serve(corrected, truth, 40, seed=seed)
    assert corrected.refits >= 1
    rows = many(Random(9))
    assert corrected.predict(rows) == pytest.approx(truth.predict(rows), rel=0.15)
    for batch in FAR:
        assert corrected.predict(batch) == pytest.approx(truth.predict(batch), rel=0.25)


@pytest.mark.parametrize("seed", range(4))
def test_iterations_of_rows_alone_do_not_make_prompts_longer(seed: int) -> None:
    corrected, dice = CorrectedModel(PROFILE), Random(seed)
    for _ in range(100):
        for context in (100, 300, 500, 900, 1500, 3000, 6000):
            batch = Batch.of([Slice(1, dice.randint(context, 2 * context), True) for _ in range(100)])
            corrected.observe(batch, TRUTH.predict(batch) * dice.lognormvariate(0, 0.05))
        live = alone(dice)
        corrected.observe(live, TRUTH.predict(live) * dice.lognormvariate(0, 0.05))
    for tokens in (512, 2048):
        prompt = Batch.of([Slice(tokens, 0)])
        assert corrected.predict(prompt) == pytest.approx(TRUTH.predict(prompt), rel=0.35)


def test_live_work_alone_after_a_restart_does_not_undo_what_was_learned_of_rows(tmp_path: Path) -> None:
    before = CorrectedModel(PROFILE, correction=Correction(of="a profile"))
    serve(before, TRUTH, 30)
    before.correction.save(tmp_path / "file")
    again = CorrectedModel(PROFILE, correction=Correction.load(tmp_path / "file", of="a profile"))
    slower_alone = ConServeModel.of(0.1, 1e-4, 0, 2e-3, 0.8, 0.3, 0, 18)
    dice, rows = Random(5), many(Random(9))
    for _ in range(1000):
        batch = alone(dice)
        again.observe(batch, slower_alone.predict(batch) * dice.lognormvariate(0, 0.1))
    relative = again.predict(rows) / again.predict(alone(Random(9)))
    assert relative == pytest.approx(TRUTH.predict(rows) / TRUTH.predict(alone(Random(9))), rel=0.2)


def test_kinds_of_many_live_lengths_do_not_drive_out_what_is_known_of_rows() -> None:
    known, dice = Refit(PROFILE), Random(1)
    rows = many(dice)
    known.observe(rows, 200.0, PROFILE)
    for _ in range(3000):
        slices = [Slice(1, dice.randint(0, 16_000), True) for _ in range(dice.randint(0, 15))]
        batch = Batch.of([*slices, Slice(dice.randint(1, 2048), dice.choice([0, 512, 4096]))])
        known.observe(batch, TRUTH.predict(batch), TRUTH)
    assert 200.0 in Samples.of_sums(known.rows).ms
    assert len(known._by_kind) <= KINDS


def test_a_mistaken_clock_keeps_no_fit_away() -> None:
    corrected, dice = CorrectedModel(PROFILE), Random(2)
    for number in range(16):
        serve(corrected, TRUTH, 3, seed=number)
        batch = prompts(dice)
        corrected.observe(batch, TRUTH.predict(batch) / 30)
    assert corrected.refits >= 1
    rows = many(Random(9))
    assert corrected.predict(rows) == pytest.approx(TRUTH.predict(rows), rel=0.2)


def test_a_fit_that_fails_leaves_the_model_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise np.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr(refit, "fit", fails)
    corrected = CorrectedModel(PROFILE)
    serve(corrected, TRUTH, 16)
    assert corrected.model is PROFILE
    assert "a fit of the latency model failed" in caplog.text


def test_what_was_learned_is_applied_to_a_model_of_the_same_terms() -> None:
    rows, learned = many(Random(9)), Correction(log_scale=log(2), coefficients=TRUTH.coefficients)
    for applied in (learned.applied_to(PROFILE), Correction(log_scale=log(2)).applied_to(TRUTH)):
        assert applied.predict(rows) == pytest.approx(2 * TRUTH.predict(rows))
    assert Correction(log_scale=log(2), coefficients={"x": 1.0}).applied_to(PROFILE) is PROFILE


def test_coefficients_of_other_terms_are_not_taken_nor_what_was_learned_with_them() -> None:
    earlier = Correction(
        of="a profile", log_scale=1.0, residuals=[Residual(30.0, 3.0)], coefficients={"x": 1.0}
    )
    again = CorrectedModel(PROFILE, [Residual(30.0, 1.1)] * 99, correction=earlier)
    assert again.model is PROFILE
    assert (again.scale, again.correction.of) == (1.0, "a profile")
    assert again.margin(30.0) == pytest.approx(1.1, rel=0.02)
