"""Change points in the scores of many nights: since when has the level been another? Pure.

The nights are split where the levels of the two sides differ most, by the largest two-sample t statistic over all
splits. Its significance is that of a permutation test: without a change every order of the nights is as likely
(Pettitt, Applied Statistics 28, 1979, for ranks; here of the scores themselves).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from conserve.evals.bootstrap import Floats

LEAST = 3  # nights on each side of a change
SHUFFLES = 1999  # at least
FINENESS = 20  # shuffles for each that may show a larger split by chance


class ChangePoint(NamedTuple):
    """First night of a new level, the mean scores before and since, and the chance of such a split by chance."""

    night: int
    before: float
    since: float
    p: float


def change_points(scores: Sequence[float], *, alpha: float = 0.05, seed: int = 0) -> list[ChangePoint]:
    """Changes of level at this significance, the first one first; none among fewer than six nights.

    Nights before a change that was found are left out, and the rest is split again.
    """
    found: list[ChangePoint] = []
    begin = 0
    shuffles = max(SHUFFLES, ceil(FINENESS / alpha))
    while (
        split := one_split(np.array(scores[begin:], float), seed, shuffles)
    ) is not None and split.p <= alpha:
        begin += split.night
        found.append(split._replace(night=begin))
    return found


def change_point(scores: Sequence[float], *, alpha: float = 0.05, seed: int = 0) -> ChangePoint | None:
    """The latest change of level; None without one."""
    found = change_points(scores, alpha=alpha, seed=seed)
    return found[-1] if found else None


def lasting_decline(scores: Sequence[float], effect: float, *, alpha: float = 0.05) -> ChangePoint | None:
    """The latest fall of level by `effect` or more that no later level made good, with the mean since; or None."""
    changes = change_points(scores, alpha=alpha)
    bounds = [change.night for change in changes] + [len(scores)]
    levels = [float(np.mean(scores[begin:end])) for begin, end in pairwise(bounds)]
    for number in range(len(changes) - 1, -1, -1):
        if changes[number].before - max(levels[number:]) >= effect:
            return changes[number]._replace(since=float(np.mean(scores[changes[number].night :])))
    return None


def one_split(scores: Floats, seed: int, shuffles: int) -> ChangePoint | None:
    """Split of the nights with the largest difference of levels; None if there are too few nights or no spread."""
    n = len(scores)
    if n < 2 * LEAST or np.ptp(scores) == 0:
        return None
    statistics = split_statistics(scores[None, :])[0]
    split = LEAST + int(statistics.argmax())
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(np.tile(scores, (shuffles, 1)), axis=1)
    larger = int((split_statistics(shuffled).max(-1) >= statistics.max() * (1 - 1e-9)).sum())
    return ChangePoint(
        split, float(scores[:split].mean()), float(scores[split:].mean()), (1 + larger) / (1 + shuffles)
    )


def split_statistics(nights: Floats) -> Floats:
    """Squared difference of levels of each split of each row, over its variance: (rows, splits)."""
    n = nights.shape[-1]
    before = np.arange(LEAST, n - LEAST + 1)
    off = nights - nights.mean(-1, keepdims=True)
    sums = off.cumsum(-1)[:, before - 1]
    between: Floats = sums**2 * n / (before * (n - before))
    return between
