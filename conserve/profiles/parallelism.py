"""Splits computation (k1) from communication (k3), using profiles at several degrees of parallelism."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from conserve.profiles.conserve import ConServeModel
from conserve.profiles.profile import Profile


class Split(NamedTuple):
    """Milliseconds per token: of computation on one device, and of one full exchange between devices."""

    k1: float
    k3: float


def separate(compute_by_degree: Mapping[int, float]) -> Split | None:
    """Split `compute` (k1 + k3, ms per token) measured at several degrees of tensor parallelism.

    Computation shrinks with the degree t as k1 / t. A ring all-reduce moves 2 (t - 1) / t of the data, so
    communication is k3 * (t - 1) / t, where k3 includes the factor 2. The fit is least squares without negative
    results. None for a single degree, which cannot tell the two apart.
    """
    if len(compute_by_degree) < 2:
        return None
    from scipy.optimize import nnls

    degrees = np.asarray(list(compute_by_degree), dtype=np.float64)
    rows = np.column_stack([1 / degrees, (degrees - 1) / degrees])  # (degrees, 2)
    (k1, k3), _ = nnls(rows, np.asarray(list(compute_by_degree.values())))
    return Split(float(k1), float(k3))


def siblings(profile: Profile, others: Sequence[Profile]) -> dict[int, float]:
    """`compute` by tensor-parallel degree, over profiles that differ in that degree only."""
    found = {}
    for other in [*others, profile]:
        words, own = (dict(word.split("=") for word in p.key.parallelism.split()) for p in (other, profile))
        # One device uses another executor than several.
        different = {d.split(":")[0] for d in profile.key.differences(other.key)} - {
            "parallelism",
            "executor",
        }
        if not different and (words["pp"], words["dp"]) == (own["pp"], own["dp"]):
            found[int(words["tp"])] = other.models[ConServeModel.name].coefficients["compute"]
    return found
