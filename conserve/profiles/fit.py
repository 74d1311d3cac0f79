"""Fits a latency model to measured batches and measures its errors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from conserve.profiles.batch import Batch
from conserve.profiles.model import LinearModel

M = TypeVar("M", bound=LinearModel)
Floats = NDArray[np.float64]
ROBUST_ROUNDS = 2
HUBER = 2.0  # times the median error; batches further off count less
FOLDS = 8  # parts of the samples, each predicted from the others
SUMS = tuple(field.name for field in fields(Batch))
sums_of = attrgetter(*SUMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Measured batches by column: the sums of `Batch` and the time of each, as arrays of shape (n,)."""

    requests: Floats
    tokens: Floats
    context: Floats
    square: Floats
    product: Floats
    prefills: Floats
    prefill_tokens: Floats
    prefill_context: Floats
    ms: Floats

    @classmethod
    def of(cls, batches: Iterable[Batch], ms: Sequence[float]) -> Self:
        """Samples of these batches."""
        return cls.of_sums((*sums_of(batch), took) for batch, took in zip(batches, ms, strict=True))

    @classmethod
    def of_sums(cls, sums: Iterable[Sequence[float]]) -> Self:
        """Samples of batches of which only `SUMS` are known, each with its time in ms behind them."""
        *columns, ms = np.asarray([*sums], dtype=np.float64).reshape(-1, len(SUMS) + 1).T
        return cls(**dict(zip(SUMS, columns, strict=True)), ms=ms)

    def __len__(self) -> int:
        return len(self.ms)

    def of_rows(self, rows: NDArray[np.bool_]) -> Self:
        """The samples where `rows`, of shape (n,), is true."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def predictions(self, model: LinearModel) -> Floats:
        """The model's predictions, shape (n,)."""
        ms = np.zeros(len(self))
        for weight, column in zip(model.coefficients.values(), model.columns(self), strict=True):
            ms += weight * column
        return ms


def fit(model: type[M], samples: Samples) -> M:
    """Fit the model's coefficients by non-negative least squares on relative errors.

    Each row is divided by its measured time, so that a decode step of 20 ms weighs as much as a chunk of 2 s:
    the percentage is minimised. Then batches further off than the typical error get less weight (Huber's weights,
    twice), since a neighbour on the machine makes single batches late by any amount.
    """
    rows = np.column_stack([np.broadcast_to(column, len(samples)) for column in model.columns(samples)])
    untold = model.untold(samples)
    rows = rows * [name not in untold for name in model.terms]
    rows = rows / samples.ms[:, None]  # (n, terms): predicted / measured = rows @ coefficients
    coefficients = non_negative(rows, np.ones(len(samples)))
    for _ in range(ROBUST_ROUNDS):
        off = np.abs(rows @ coefficients - 1)
        typical = HUBER * float(np.median(off))
        if typical <= 0:
            break
        coefficients = non_negative(rows, np.sqrt(np.minimum(1, typical / np.maximum(off, typical))))
    return model.of(*coefficients)


def cross_predictions(kind: type[LinearModel], samples: Samples) -> Floats:
    """Predictions in ms, shape (n,): each sample by a model of this kind fitted without the sample's fold."""
    predicted = np.zeros(len(samples))
    for fold in range(FOLDS):
        inside = np.arange(len(samples)) % FOLDS == fold
        predicted[inside] = samples.of_rows(inside).predictions(fit(kind, samples.of_rows(~inside)))
    return predicted


def non_negative(rows: Floats, weights: Floats) -> Floats:
    """The k >= 0 that minimises the sum of (weights * (rows @ k - 1))^2. Shapes (n, terms), (n,) -> (terms,)."""
    from scipy.optimize import nnls

    weighted = rows * weights[:, None]
    scale = np.sqrt(np.einsum("ij,ij->j", weighted, weighted))  # the columns span ten orders of magnitude
    scale[scale == 0] = 1
    weighted /= scale
    # Normal equations: nnls on their Cholesky factor has terms x terms instead of n x terms numbers.
    gram = weighted.T @ weighted + 1e-12 * np.eye(rows.shape[1])
    triangle = np.linalg.cholesky(gram).T
    solution, _ = nnls(triangle, np.linalg.solve(triangle.T, weighted.T @ weights))
    return np.asarray(solution / scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Distances of predictions from measurements, as shares (0.01 is one percent)."""

    mape: float  # mean of |predicted - measured| / measured
    p50_error: float
    p90_error: float
    p99_error: float
    bias: float  # mean of (predicted - measured) / measured
    overrun_share: float  # share of iterations longer than predicted times a margin taken from other batches
    margin: float  # factor that at most 1 % of iterations exceed
    batches: int


def errors(predicted: Floats, measured: Floats, *, margin: float, overrun_share: float) -> Errors:
    """Errors of predictions against measurements, both of shape (n,) and in ms."""
    relative = predicted / measured - 1
    absolute = np.abs(relative)
    p50, p90, p99 = np.quantile(absolute, (0.5, 0.9, 0.99))
    return Errors(
        mape=float(absolute.mean()),
        p50_error=float(p50),
        p90_error=float(p90),
        p99_error=float(p99),
        bias=float(relative.mean()),
        overrun_share=overrun_share,
        margin=margin,
        batches=len(measured),
    )
