"""Profiling: an engine's iterations are timed within a budget, and a profile is fitted to them."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from conserve.errors import ProfilingFailed
from conserve.profiles.affordable import SHORT_MS, SHORT_REPEATS
from conserve.profiles.batch import Slice
from conserve.profiles.evaluation import fit_models, noise_of
from conserve.profiles.itinerary import Itinerary, Stretch
from conserve.profiles.points import FITTED, IterationLimits, Point
from conserve.profiles.profile import MODELS, KVCopy, Profile, ProfileKey, Safepoint, write_sample
from conserve.profiles.record import Record, Visit

VISITS = 3  # times each point is measured, far apart, so that a neighbour's busy second spoils one of them
RESERVE_S = 8.0  # kept for copies, safepoints and the fit
COPY_BLOCKS = (1, 2, 4, 8, 16, 32, 64)


class Rig(Protocol):
    """An engine that runs exactly the given batch."""

    name: str
    key: ProfileKey
    limits: IterationLimits

    def measure(self, slices: Sequence[Slice], repeats: int) -> list[float]:
        """Run this batch `repeats` times; returns the time of each iteration in ms."""

    def empty_iteration_ms(self) -> float:
        """Time of an iteration that computes nothing, in ms."""

    def kv_copies(self, blocks: Sequence[int]) -> list[KVCopy]:
        """Time copies of each of these numbers of KV blocks, in both directions."""

    def safepoint(self) -> Safepoint:
        """Time one look at the flag that rows are to leave."""


class SessionProgress(NamedTuple):
    """Progress of a profiling session."""

    seconds: float  # spent measuring, including those before an interruption
    expected_s: float  # budget, or its stretched length
    points: int  # measured at least once


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
    """Time the points in the order of an `Itinerary`, until the budget is used up and a fit is possible.

    `on_stretch` is called once if a fit takes longer than the budget.
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
    """Fit the models to the record, and time copies and safepoints; raises `ProfilingFailed`."""
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
