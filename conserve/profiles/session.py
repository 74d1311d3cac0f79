"""Measuring an engine into a profile: within a budget of time, interruptible, resumable."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from conserve.errors import ProfilingFailed
from conserve.profiles.batch import Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel, Residual, quantile_margin
from conserve.profiles.fit import Samples, errors, fit
from conserve.profiles.points import NOISE_EVERY, Limits, Point
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
from conserve.profiles.whole import write_whole

VISITS = 3  # times each point is measured, far apart, so that a neighbour's busy second spoils one of them
SHORT_MS = 60.0  # iterations under this are repeated at once
SHORT_REPEATS = 3
RESERVE_S = 8.0  # kept for copies, safepoints and the fit
COPY_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
OVERRUN_SHARE = 0.01


class Rig(Protocol):
    """A real engine that runs exactly the batch it is told to."""

    name: str
    key: ProfileKey
    limits: Limits

    def measure(self, slices: Sequence[Slice], repeats: int) -> list[float]:
        """Run this batch `repeats` times; the time of each iteration in ms."""

    def empty_iteration_ms(self) -> float:
        """The time of an iteration that computes nothing, in ms."""

    def kv_copies(self, blocks: Sequence[int]) -> list[KVCopy]:
        """Time copies of so many KV blocks in both directions."""

    def safepoint(self) -> Safepoint:
        """Time a look at the preemption flag."""


class Visit(NamedTuple):
    """One line of the session's file: a point, its times, and what the visit cost."""

    point: str
    ms: list[float]
    seconds: float


class Header(NamedTuple):
    """The first line: sessions of other engines or plans are not continued."""

    key: str
    plan: str


@dataclass(slots=True)
class Record:
    """What a session has measured, kept in a file as it grows."""

    path: Path | None
    header: Header
    visits: dict[str, list[list[float]]] = field(default_factory=dict)  # point -> the times of each visit
    seconds: float = 0.0

    @classmethod
    def open(cls, path: Path | None, header: Header) -> "Record":
        """Go on from the file if it is of the same engine and plan, else start it anew."""
        record = cls(path, header)
        if path is None:
            return record
        earlier = read_visits(path, header)
        for visit in earlier:
            record._count(visit)
        # Written again, so that a line which a crash cut off does not swallow the next one.
        lines = [msgspec.json.encode(line) for line in (header, *earlier)]
        write_whole(path, b"\n".join(lines) + b"\n")
        return record

    @property
    def ms(self) -> dict[str, list[float]]:
        """All times of each point."""
        return {point: [ms for visit in visits for ms in visit] for point, visits in self.visits.items()}

    def add(self, visit: Visit) -> None:
        """Keep a visit."""
        self._count(visit)
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(visit) + b"\n")

    def _count(self, visit: Visit) -> None:
        self.visits.setdefault(visit.point, []).append(visit.ms)
        self.seconds += visit.seconds

    def discard(self) -> None:
        """The profile is written; the file has done its duty."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def read_visits(path: Path, header: Header) -> list[Visit]:
    """The visits in a session's file, up to the first line that is damaged; none if it is of another session."""
    visits: list[Visit] = []
    try:
        first, *lines = path.read_bytes().splitlines()
        if msgspec.json.decode(first, type=Header) == header:
            for line in lines:
                visits.append(msgspec.json.decode(line, type=Visit))  # noqa: PERF401  keeps those before a bad one
    except (FileNotFoundError, ValueError, msgspec.DecodeError):
        pass
    return visits


class Progress(NamedTuple):
    """How far a session is."""

    seconds: float  # of measuring, those before an interruption included
    budget_s: float
    points: int  # measured at least once


def measure(
    rig: Rig,
    points: Sequence[Point],
    record: Record,
    *,
    budget_s: float,
    visits: int = VISITS,
    on_progress: Callable[[Progress], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Visit points until the budget is used up: as many as leave time to visit each of them `visits` times.

    Visits of one point lie far apart, since what disturbs a measurement lasts longer than an iteration.
    """
    usable_s = max(budget_s - RESERVE_S, budget_s / 2)
    rig.measure(points[0].slices, 2)  # the first iteration allocates and compiles

    def visit(point: Point) -> None:
        begun = clock()
        ms = rig.measure(point.slices, 2 if point.kind == "noise" else 1)
        if ms[0] < SHORT_MS and point.kind != "noise":
            ms = rig.measure(point.slices, SHORT_REPEATS)
        record.add(Visit(str(point), ms, clock() - begun))
        on_progress(Progress(record.seconds, budget_s, len(record.visits)))

    for point in points:
        if record.seconds >= usable_s / visits:
            break
        if point.kind == "noise" or str(point) not in record.visits:
            visit(point)
    known = [point for point in map(Point.parse, record.visits) if point.kind != "noise"]
    noise = next((point for point in points if point.kind == "noise"), None)
    for round_number in range(2, visits + 1):
        for number, point in enumerate(known):
            if record.seconds >= usable_s:
                return
            if noise is not None and number % NOISE_EVERY == 0:
                visit(noise)
            if len(record.visits[str(point)]) < round_number:
                visit(point)


def conclude(rig: Rig, record: Record) -> Profile:
    """Fit the models to what was measured, and measure what is left; raises `ProfilingFailed`."""
    measured = {Point.parse(name): ms for name, ms in record.ms.items()}
    fitted_points = {p: ms for p, ms in measured.items() if p.kind in ("prefill", "decode", "mixed")}
    held_out = {p: ms for p, ms in measured.items() if p.kind == "held-out"}
    if len(fitted_points) < 2 * max(len(model.terms) for model in MODELS.values()):
        raise ProfilingFailed(
            f"only {len(fitted_points)} batches were measured in {record.seconds:.0f} s, too few to fit; "
            "run the command again with a larger --budget"
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
    """The points' batches with the median of their times."""
    return Samples.of([point.batch for point in points], [statistics.median(ms) for ms in points.values()])


def fit_models(
    fitted_points: dict[Point, list[float]], held_out: dict[Point, list[float]]
) -> dict[str, FittedModel]:
    """Every model, fitted to the one set and judged by the other (by the first, where the other is empty)."""
    train, judged_by = samples_of(fitted_points), held_out or fitted_points
    test = samples_of(judged_by)
    models = {}
    for name, kind in MODELS.items():
        model = fit(kind, train)
        predicted = test.predictions(model)
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
    """The share of iterations over a margin taken from other batches: each half judged by the other."""
    over = []
    for known, new in ((one, other), (other, one)):
        residuals = [residual for batch in known for residual in batch]
        corrected = CorrectedModel(ConServeModel.of(*[0.0] * len(ConServeModel.terms)), residuals)
        over += [r.ratio > corrected.margin(r.predicted_ms) for batch in new for r in batch]
    return sum(over) / len(over) if over else 0.0


def noise_of(record: Record) -> Noise:
    """How much equal batches differ."""
    spreads = [relative_spread(ms) for visits in record.visits.values() for ms in visits if len(ms) > 1]
    same = next((ms for point, ms in record.ms.items() if Point.parse(point).kind == "noise"), [])
    return Noise(
        back_to_back=statistics.median(spreads) if spreads else 0.0,
        over_time=relative_spread(same) if len(same) > 1 else 0.0,
    )


def relative_spread(ms: Sequence[float]) -> float:
    """Standard deviation over mean."""
    return statistics.stdev(ms) / statistics.mean(ms)
