"""Measures an engine into a profile: within a time budget, interruptible, resumable."""

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from conserve.errors import ProfilingFailed
from conserve.profiles.batch import Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel, Residual, quantile_margin
from conserve.profiles.fit import Samples, cross_predictions, errors, fit
from conserve.profiles.forecast import SHORT_MS, SHORT_REPEATS
from conserve.profiles.itinerary import Itinerary, Stretch
from conserve.profiles.points import FITTED, IterationLimits, Point
from conserve.profiles.profile import (
    MODELS,
    FittedModel,
    KVCopy,
    Noise,
    Profile,
    ProfileKey,
    Safepoint,
    write_sample,
)
from conserve.profiles.record import Record, Visit

VISITS = 3  # visits to each point, far apart, so that a neighbour's busy second spoils one of them
RESERVE_S = 8.0  # seconds kept for copies, safepoints and the fit
COPY_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
OVERRUN_SHARE = 0.01
LEAST_HELD_OUT = 20  # fewest held-out batches to judge models by


class Rig(Protocol):
    """A real engine that runs exactly the given batch."""

    name: str
    key: ProfileKey
    limits: IterationLimits

    def measure(self, slices: Sequence[Slice], repeats: int) -> list[float]:
        """Run this batch `repeats` times; returns the time of each iteration in ms."""

    def empty_iteration_ms(self) -> float:
        """Time of an iteration that computes nothing, in ms."""

    def kv_copies(self, blocks: Sequence[int]) -> list[KVCopy]:
        """Time copies of these numbers of KV blocks in both directions."""

    def safepoint(self) -> Safepoint:
        """Time a check of the flag."""


class SessionProgress(NamedTuple):
    """Progress of a session."""

    seconds: float  # time of measuring, including visits before an interruption
    expected_s: float  # the budget, or what it is stretched to
    points: int  # points measured at least once


def measure(
    rig: Rig,
    points: Sequence[Point],
    record: Record,
    *,
    budget_s: float,
    visits: int = VISITS,
    on_progress: Callable[[SessionProgress], None] = lambda _: None,
    on_stretch: Callable[[Stretch], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Visit points in the order of an `Itinerary`, until the budget is used up and there are enough for a fit.

    `on_stretch` is called once if enough points take longer than the budget.
    """
    usable_s = max(budget_s - RESERVE_S, budget_s / 2)
    itinerary = Itinerary(points, record, usable_s=usable_s, visits=visits, on_stretch=on_stretch)
    rig.measure(itinerary.smallest.slices, 2)  # the first iteration allocates and compiles
    for point in itinerary:
        begun = clock()
        ms = rig.measure(point.slices, 2 if point.kind == "noise" else 1)
        if ms[0] < SHORT_MS and point.kind != "noise":
            ms = rig.measure(point.slices, SHORT_REPEATS)
        record.add(Visit(str(point), ms, clock() - begun))
        on_progress(SessionProgress(record.seconds, budget_s + itinerary.more_s, len(record.visits)))


def conclude(rig: Rig, record: Record) -> Profile:
    """Fit the models to the record, and measure copies and safepoints; raises `ProfilingFailed`."""
    measured = {Point.parse(name): ms for name, ms in record.ms.items()}
    fitted_points = {p: ms for p, ms in measured.items() if p.kind in FITTED}
    held_out = {p: ms for p, ms in measured.items() if p.kind == "held-out"}
    if len(fitted_points) < 2 * max(len(model.terms) for model in MODELS.values()):
        raise ProfilingFailed(
            f"only {len(fitted_points)} different batches fit into this engine, too few for a profile; raise "
            "--max-context, or give the engine more with: -- --kv-cache-memory-bytes BYTES"
        )
    return Profile(
        name=rig.name,
        key=rig.key,
        how="measured",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(record.seconds, 1),
        limits=rig.limits,
        models=fit_models(fitted_points, held_out),
        noise=noise_of(record),
        empty_iteration_ms=rig.empty_iteration_ms(),
        kv_copies=rig.kv_copies(
            [n for n in COPY_BLOCKS if n * rig.limits.block_tokens <= rig.limits.kv_tokens // 2]
        ),
        safepoint=rig.safepoint(),
        samples=[write_sample(point, ms) for point, ms in measured.items()],
    )


def samples_of(points: dict[Point, list[float]]) -> Samples:
    """The points' batches with the medians of their times."""
    return Samples.of([point.batch for point in points], [statistics.median(ms) for ms in points.values()])


def fit_models(
    fitted_points: dict[Point, list[float]], held_out: dict[Point, list[float]]
) -> dict[str, FittedModel]:
    """Fit every model to one set of points and judge it by the other.

    With fewer than `LEAST_HELD_OUT` points to judge by, all points are fitted, and each is judged by a model fitted
    without it: a handful of batches could favour a model that fails on other ones.
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
    """Share of iterations over a margin taken from other batches: each half is judged by the other."""
    over = []
    for known, new in ((one, other), (other, one)):
        residuals = [residual for batch in known for residual in batch]
        corrected = CorrectedModel(ConServeModel.of(*[0.0] * len(ConServeModel.terms)), residuals)
        over += [r.ratio > corrected.margin(r.predicted_ms) for batch in new for r in batch]
    return sum(over) / len(over) if over else 0.0


def noise_of(record: Record) -> Noise:
    """Variation of equal batches."""
    spreads = [relative_spread(ms) for visits in record.visits.values() for ms in visits if len(ms) > 1]
    same = next((ms for point, ms in record.ms.items() if Point.parse(point).kind == "noise"), [])
    return Noise(
        back_to_back=statistics.median(spreads) if spreads else 0.0,
        over_time=relative_spread(same) if len(same) > 1 else 0.0,
    )


def relative_spread(ms: Sequence[float]) -> float:
    """Standard deviation over mean."""
    return statistics.stdev(ms) / statistics.mean(ms)
