"""Mean score of a suite with its interval. Pure."""

from math import fsum, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

from conserve.evals.paired import Floats, clustered_error


def interval(
    scores: Floats, clusters: NDArray[np.int64], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Mean with the bounds of its interval: Wilson's for independent right or wrong answers, else Student's.

    Errors are clustered: items of one source count together. One cluster alone has no interval but the mean.
    """
    mean, n = fsum(scores) / len(scores), len(scores)  # the same digits in any order
    sums, sizes = np.bincount(clusters, scores).astype(float), np.bincount(clusters).astype(float)
    if len(sums) == n and bool(np.isin(scores, (0.0, 1.0)).all()):
        return mean, *wilson(mean, n, confidence)
    if len(sums) < 2:
        return mean, mean, mean
    margin = float(t.isf((1 - confidence) / 2, len(sums) - 1)) * float(clustered_error(sums, sizes))
    return mean, mean - margin, mean + margin


def wilson(share: float, n: int, confidence: float) -> tuple[float, float]:
    """Wilson's interval of a share of n items (Journal of the American Statistical Association 22, 1927)."""
    z = float(norm.isf((1 - confidence) / 2))
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    margin = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if share == 0 else max(0.0, centre - margin)  # exactly, whatever the rounding
    return low, 1.0 if share == 1 else min(1.0, centre + margin)
