"""Margins of a latency model: the factors on its predictions that nearly all measured iterations stayed under.

A margin is of iterations of about one length, since short ones scatter by a far larger share of their length.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, log
from typing import NamedTuple

import numpy as np

from conserve.profiles.fit import Floats

WINDOW = 1000  # iterations that the margin is taken from
LEAST_NEAR = 99  # residuals that a margin is taken from, if there are as many
STEPS = 4  # margins per doubling of the iteration's length
DOUBLINGS = 5  # shortest iterations that are tried under a limit, in halvings of it
ROUNDING = 1e-6


class Residual(NamedTuple):
    """Outcome of one prediction."""

    predicted_ms: float
    ratio: float  # measured / predicted


def step_of(at_ms: float) -> int:
    """The step of time for which one margin is kept: a quarter of a doubling."""
    return round(STEPS * log(at_ms, 2))


def margin_near(residuals: Sequence[Residual] | Floats, at_ms: float, share: float) -> float:
    """Margin for iterations of about `at_ms`, from the quarter of the residuals that are nearest in length."""
    predicted_ms, ratios = np.asarray(residuals, dtype=float).reshape(-1, 2).T
    apart = np.maximum(predicted_ms, at_ms) / np.minimum(predicted_ms, at_ms)
    nearest = np.argsort(apart, kind="stable")[: max(LEAST_NEAR, len(apart) // 4)]
    return quantile_margin(ratios[nearest].tolist(), share)


def planned_ms(margin: Callable[[float], float], limit_ms: float) -> float:
    """Longest predicted length, in ms, of iterations that stay under the limit with the margin of that length.

    Margins of neighbouring lengths may differ much: after a late iteration the margin of its length is large, and
    that of a much shorter one is not. So lengths are tried from the longest on, not iterated to a fixed point.
    """
    step, largest, shortest_ms = step_of(limit_ms), 0.0, limit_ms
    for tried in range(step + STEPS, step - STEPS * DOUBLINGS, -1):  # a margin may be below 1
        factor = margin(2 ** (tried / STEPS))
        shortest_ms = 2 ** ((tried - 0.5) / STEPS)
        fitting_ms = min(limit_ms / factor, 2 ** ((tried + 0.5) / STEPS))
        if fitting_ms >= shortest_ms:
            return fitting_ms
        largest = max(largest, factor)
    return min(shortest_ms, limit_ms / largest)


def limit_ms_for(margin: Callable[[float], float], predicted_ms: float) -> float:
    """Limit, in ms, under which `planned_ms` plans iterations of up to this predicted length.

    Longer ones may have a smaller margin, as after a warm-up with few of them. Then the limit is below the one
    under which the first of these would be planned.
    """
    limit_ms = predicted_ms * margin(predicted_ms)
    for longer in range(step_of(limit_ms) + STEPS, step_of(predicted_ms), -1):
        shortest_ms = 2 ** ((longer - 0.5) / STEPS)
        limit_ms = min(limit_ms, shortest_ms * margin(2 ** (longer / STEPS)) * (1 - ROUNDING))
    return limit_ms


def margin_beyond(margin: float, at_ms: float, longest_ms: float) -> float:
    """Margin for iterations of `at_ms` if none longer than `longest_ms` was measured.

    Its part above 1 is added once more for each doubling, since an extrapolated time is less certain.
    """
    if at_ms <= longest_ms:
        return margin
    return margin + max(0.0, margin - 1) * log(at_ms / longest_ms, 2)


def quantile_margin(ratios: Sequence[float], share: float) -> float:
    """The factor that at most `share` of iterations exceed, from their measured / predicted.

    It is the ceil((n + 1)(1 - share))-th smallest of n: with exchangeable residuals the next one exceeds it with a
    probability of at most `share` (split conformal prediction; Vovk, Gammerman and Shafer, 2005). That needs enough
    residuals (99 for 1 %). With fewer it is the largest of them plus a quarter of the distance from the median to
    the largest for every halving that is missing.
    """
    if not ratios:
        return 2.0
    ordered = sorted(ratios)
    rank = ceil((len(ordered) + 1) * (1 - share))
    if rank <= len(ordered):
        return ordered[rank - 1]
    missing = log(1 / share / (len(ordered) + 1), 2)
    return ordered[-1] + missing / 4 * (ordered[-1] - ordered[len(ordered) // 2])


class NewestResiduals:
    """The last `WINDOW` residuals, the oldest first, as rows of a table, in which a margin is found fast."""

    def __init__(self, residuals: Iterable[Residual]) -> None:
        self._rows = np.empty((2 * WINDOW, 2))
        self._end = 0
        for residual in residuals:
            self.append(residual)

    def append(self, residual: Residual) -> None:
        """Add a residual; the oldest one beyond `WINDOW` goes."""
        if self._end == len(self._rows):
            self._rows[:WINDOW] = self._rows[WINDOW:]
            self._end = WINDOW
        self._rows[self._end] = residual
        self._end += 1

    @property
    def table(self) -> Floats:
        """One row each: predicted time in ms, ratio."""
        return self._rows[max(0, self._end - WINDOW) : self._end]
