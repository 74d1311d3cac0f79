"""Longest iteration that a profiling session can afford, from the times of its first batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple, Self

import numpy as np

from conserve.profiles.fit import Floats
from conserve.profiles.points import NOISE_EVERY

SHORT_MS = 60.0  # iterations under this are repeated at once
SHORT_REPEATS = 3
LEAST_FITTED = 32  # fewest batches in a fit: three and a half for each term of the largest model
SLACK = 1.2  # the next batches of a random order take more than their mean


class Affordable(NamedTuple):
    """Longest affordable iteration of a session, and the work left until a fit."""

    reach_ms: float  # longest iteration to measure; infinite if all are affordable
    batches: int  # batches to measure until there are enough for a fit
    seconds: float  # time of these batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Predicted costs of batches by rising length: entry i is of the i + 1 shortest. All of shape (n,)."""

    ms: Floats  # iteration of the longest batch
    fitted: Floats  # number of batches that go into the fit
    seconds: Floats  # time of one visit to each batch

    @classmethod
    def of(cls, ms: Floats, fitted: Floats, *, overhead: float, noise_s: float) -> Self:
        """Costs of batches with iterations of `ms`; `fitted` is 1 for batches in the fit and 0 for held-out ones.

        `overhead` is the ratio of a visit's time to its iterations', `noise_s` the time of a noise visit.
        """
        iterations = np.where(ms < SHORT_MS, 1 + SHORT_REPEATS, 1)
        seconds = ms / 1e3 * iterations * overhead + noise_s / NOISE_EVERY
        order = np.argsort(ms, kind="stable")
        return cls(ms=ms[order], fitted=np.cumsum(fitted[order]), seconds=np.cumsum(seconds[order]))

    def affordable(
        self, *, missing: int, left_s: float, visits: int, fair_ms: float, least_ms: float
    ) -> Affordable:
        """The longest iteration with which `missing` more batches of the fit take at most `left_s`.

        The time includes later visits to all batches. They are given up one by one before the longest iteration
        falls below `fair_ms`: one visit less costs precision, a shorter iteration costs the range of the profile.
        It never falls below `least_ms`, where a profile is of little use; then `left_s` may be exceeded.
        """
        missing = min(missing, int(self.fitted[-1]))
        enough = self.fitted >= max(missing, 1)
        possible = enough & (self.ms <= left_s * 1e3)  # else one batch takes more than all that is left
        for rounds in range(visits, 0 if missing else 1, -1):
            needed = SLACK * (missing + (rounds - 1) * LEAST_FITTED)
            affordable = np.flatnonzero(possible & (needed * self.seconds <= left_s * self.fitted))
            longest = int(affordable[-1]) if len(affordable) else -1
            if longest >= 0 and self.ms[longest] >= min(fair_ms if rounds > 1 else least_ms, self.ms[-1]):
                return self._at(longest, missing)
        least = int(np.searchsorted(self.ms, least_ms, side="right")) - 1
        return self._at(max(least, int(np.argmax(enough))), missing)

    def _at(self, index: int, missing: int) -> Affordable:
        """Reach, number and time of the missing batches if those up to `index` are measured."""
        share = missing / max(1.0, float(self.fitted[index]))
        return Affordable(
            reach_ms=inf if index == len(self.ms) - 1 else float(self.ms[index]),
            batches=ceil(share * (index + 1)),
            seconds=share * float(self.seconds[index]),
        )


def iterations_s(point: str, ms: Sequence[float]) -> float:
    """Seconds of a visit's iterations, including the one before the repeats of a short batch."""
    repeated = not point.startswith("noise") and len(ms) == SHORT_REPEATS
    return (sum(ms) + (ms[0] if repeated else 0.0)) / 1e3
