"""Models fitted to measured batches, and judged by batches that were held out of the fit."""

import statistics
from collections.abc import Sequence

from conserve.profiles.correction import CorrectedModel
from conserve.profiles.fit import Samples, cross_predictions, errors, fit
from conserve.profiles.margin import Residual, quantile_margin
from conserve.profiles.model import TIMELESS
from conserve.profiles.points import Point
from conserve.profiles.profile import MODELS, FittedModel, Noise
from conserve.profiles.record import Record

OVERRUN_SHARE = 0.01
LEAST_HELD_OUT = 20  # batches that judge models which were not fitted to them


def samples_of(points: dict[Point, list[float]]) -> Samples:
    """Batches of the points, each with the median of its times in ms."""
    return Samples.of([point.batch for point in points], [statistics.median(ms) for ms in points.values()])


def fit_models(
    fitted_points: dict[Point, list[float]], held_out: dict[Point, list[float]]
) -> dict[str, FittedModel]:
    """Fit every model to `fitted_points` and judge it by `held_out`; times in ms.

    With fewer than `LEAST_HELD_OUT` batches held out, all points are fitted, and each is judged by a model that
    was not fitted to it: a handful of batches may suit a model that is wrong elsewhere.
    """
    few = len(held_out) < LEAST_HELD_OUT
    known = fitted_points | held_out if few else fitted_points
    judged_by = known if few else held_out
    train, test = samples_of(known), samples_of(judged_by)
    models = {}
    for name, kind in MODELS.items():
        model = fit(kind, train)
        predicted = cross_predictions(kind, test) if few else test.predictions(model)
        single = [
            [Residual(float(p), float(ms / p)) for ms in times]
            for times, p in zip(judged_by.values(), predicted, strict=True)
        ]
        flat = [residual for times in single for residual in times]
        models[name] = FittedModel(
            coefficients=model.coefficients,
            errors=errors(
                predicted,
                test.ms,
                margin=quantile_margin([r.ratio for r in flat], OVERRUN_SHARE),
                overrun_share=overruns(single[::2], single[1::2]),
            ),
            residuals=[Residual(round(r.predicted_ms, 3), round(r.ratio, 4)) for r in flat],
        )
    return models


def overruns(one: Sequence[Sequence[Residual]], other: Sequence[Sequence[Residual]]) -> float:
    """Share of iterations over a margin taken from other batches; each half judges the other."""
    over = []
    for known, new in ((one, other), (other, one)):
        residuals = [residual for batch in known for residual in batch]
        corrected = CorrectedModel(TIMELESS, residuals)
        over += [r.ratio > corrected.margin(r.predicted_ms) for batch in new for r in batch]
    return sum(over) / len(over) if over else 0.0


def noise_of(record: Record) -> Noise:
    """Scatter of equal batches, back to back and over the session."""
    spreads = [relative_spread(ms) for visits in record.visits.values() for ms in visits if len(ms) > 1]
    same = next((ms for point, ms in record.ms.items() if Point.parse(point).kind == "noise"), [])
    return Noise(
        back_to_back=statistics.median(spreads) if spreads else 0.0,
        over_time=relative_spread(same) if len(same) > 1 else 0.0,
    )


def relative_spread(ms: Sequence[float]) -> float:
    """Standard deviation over mean."""
    return statistics.stdev(ms) / statistics.mean(ms)
