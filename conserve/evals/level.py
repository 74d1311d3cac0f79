"""Mean score of a suite with its interval. Pure."""

from math import fsum, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

from conserve.evals.bootstrap import Floats, clustered_error


def interval(scores: Floats, clusters: NDArray[np.int64], confidence: float) -> tuple[float, float, float]:
    """Mean with the bounds of its interval: Wilson's for independent right or wrong answers, else Student's.

    Errors are clustered: items of one source count together. One cluster alone says nothing about others, so its
    interval is all that scores may be: 0 to 1, or as far as they go beyond. Where clusters of right or wrong
    answers do not differ at all, each counts as one answer.
    """
    mean, n = fsum(scores) / len(scores), len(scores)  # the same digits in any order
    sums, sizes = np.bincount(clusters, scores).astype(float), np.bincount(clusters).astype(float)
    are_answers = bool(np.isin(scores, (0.0, 1.0)).all())
    if are_answers and len(sums) == n:
        return mean, *wilson(mean, n, confidence)
    if len(sums) < 2:
        return mean, min(0.0, float(scores.min())), max(1.0, float(scores.max()))
    error = float(clustered_error(sums, sizes))
    if are_answers and error == 0:
        return mean, *wilson(mean, len(sums), confidence)
    margin = float(t.isf((1 - confidence) / 2, len(sums) - 1)) * error
    low, high = mean - margin, mean + margin
    return (mean, max(0.0, low), min(1.0, high)) if are_answers else (mean, low, high)


def wilson(share: float, n: int, confidence: float) -> tuple[float, float]:
    """Wilson's interval of a share of n items (Journal of the American Statistical Association 22, 1927)."""
    z = float(norm.isf((1 - confidence) / 2))
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    margin = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if share == 0 else max(0.0, centre - margin)  # exactly, whatever the rounding
    return low, 1.0 if share == 1 else min(1.0, centre + margin)
