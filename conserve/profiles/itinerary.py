"""Order of a profiling session's batches, by its budget and by the times of the measured ones."""

import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from conserve.profiles.affordable import LEAST_FITTED, Costs, iterations_s
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.fit import Samples, fit
from conserve.profiles.points import FITTED, NOISE_EVERY, Point, first_points
from conserve.profiles.record import Record


class Stretch(NamedTuple):
    """Time that a session takes beyond a budget that is too small for a fit."""

    more_s: float
    batches: int  # batches still to measure


class Itinerary:
    """Yields points of a plan, each chosen after the one before was added to the record.

    A few small points come first. Their times tell how long an iteration may be so that enough batches, visited
    `visits` times each, fit into `usable_s`. Then come the others that are not longer, in the plan's order,
    with the noise point between them. The first round ends when its share of the time is used up and there are
    `LEAST_FITTED` batches, however long that takes. Later rounds visit the same points again, far apart.
    """

    def __init__(
        self,
        points: Sequence[Point],
        record: Record,
        *,
        usable_s: float,
        visits: int,
        on_stretch: Callable[[Stretch], None] = lambda _: None,
    ) -> None:
        self.more_s = 0.0  # beyond the budget, as told to `on_stretch`
        self._record, self._usable_s, self._visits, self._on_stretch = record, usable_s, visits, on_stretch
        self._planned = {str(point): point for point in points if point.kind != "noise"}
        self._points = self._planned | other_points(record, self._planned)
        self._batches = {name: point.batch for name, point in self._points.items()}
        self._noise = next((point for point in points if point.kind == "noise"), None)
        self._first = first_points(points)
        self._half = Batch.of([Slice(max(point.batch.tokens for point in self._planned.values()) // 2, 0)])
        self._predicted_ms: dict[str, float] = {}  # of unknown points; empty before the first look ahead
        self._reach_ms = inf

    @property
    def smallest(self) -> Point:
        """The point of the plan that takes the least time."""
        return self._first[0]

    def __iter__(self) -> Iterator[Point]:
        yield from (point for point in self._first if str(point) not in self._record.visits)
        while (point := self._next_unknown()) is not None:
            if self._noise is not None and self._noise_is_due():
                yield self._noise
            yield point
        yield from self._later_rounds()

    def _next_unknown(self) -> Point | None:
        """The next point of the first round; None once that is over."""
        missing = LEAST_FITTED - sum(self._points[name].kind in FITTED for name in self._known())
        if missing <= 0 and self._record.seconds >= self._usable_s / self._visits:
            return None
        unknown = [name for name in self._planned if name not in self._record.visits]
        if not unknown:
            return None
        if missing > 0 or not self._predicted_ms:
            self._look_ahead(unknown, max(missing, 0))
        # Where batches are missing, one was just found to be within reach.
        within = (self._points[name] for name in unknown if self._predicted_ms[name] <= self._reach_ms)
        return next(within, None)

    def _look_ahead(self, unknown: Sequence[str], missing: int) -> None:
        """Predict the times of unknown points, set the longest affordable one, and announce a stretch."""
        known, visits = self._known(), self._record.visits
        ms = [statistics.median(chain.from_iterable(visits[name])) for name in known]
        model = fit(ConServeModel, Samples.of([self._batches[name] for name in known], ms))
        samples = Samples.of([self._batches[name] for name in unknown], [0.0] * len(unknown))
        predicted_ms = samples.predictions(model)
        self._predicted_ms = dict(zip(unknown, predicted_ms.tolist(), strict=True))
        noise_ms = model.predict(self._noise.batch) if self._noise is not None else 0.0
        overhead = self._overhead()
        costs = Costs.of(
            predicted_ms,
            np.array([float(self._points[name].kind in FITTED) for name in unknown]),
            overhead=overhead,
            noise_s=2 * noise_ms / 1e3 * overhead,
        )
        left_s = self._usable_s - self._record.seconds
        ahead = costs.affordable(
            missing=missing,
            left_s=left_s,
            visits=self._visits,
            fair_ms=model.predict(self._half),
            least_ms=noise_ms,
        )
        self._reach_ms = ahead.reach_ms
        if ahead.seconds > left_s and not self.more_s:
            self.more_s = ahead.seconds - left_s
            self._on_stretch(Stretch(self.more_s, ahead.batches))

    def _later_rounds(self) -> Iterator[Point]:
        """Yield known points with fewer visits than the round has, and noise points, while there is time."""
        known = [name for name in self._known() if name in self._planned]
        for round_number in range(2, self._visits + 1):
            for number, name in enumerate(known):
                if self._record.seconds >= self._usable_s:
                    return
                if self._noise is not None and number % NOISE_EVERY == 0:
                    yield self._noise
                if len(self._record.visits[name]) < round_number:
                    yield self._points[name]

    def _known(self) -> list[str]:
        """Names of the measured points, in the order of measuring."""
        return [name for name in self._record.visits if name in self._points]

    def _noise_is_due(self) -> bool:
        """True if `NOISE_EVERY` points were measured since the last noise point, or none was measured yet."""
        noise_visits = len(self._record.visits.get(str(self._noise), ()))
        return noise_visits * NOISE_EVERY <= len(self._known())

    def _overhead(self) -> float:
        """Ratio of a visit's time to its iterations': decode steps must be started first."""
        iterations = sum(
            iterations_s(name, ms) for name, visits in self._record.visits.items() for ms in visits
        )
        return max(1.0, self._record.seconds / iterations)


def other_points(record: Record, planned: Container[str]) -> dict[str, Point]:
    """Points measured by an earlier call under another plan: their times are known, and they are not visited.

    If an engine's KV memory is what the machine has left, it differs from start to start, and the plan with it.
    """
    others = (Point.parse(name) for name in record.visits if name not in planned)
    return {str(point): point for point in others if point.kind != "noise"}
