"""Coefficients of a latency model, fitted again to what an engine serves (docs/adr/0036).

A profile or a warm-up cannot know all of an engine's work: how long contexts are, how many rows decode together,
how much time sampling takes by the requests' parameters. A scale corrects all lengths alike: the time that it takes
from one kind of iteration it adds to all others. A fit to recent iterations corrects each term.
"""

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.fit import SUMS, Samples, fit
from conserve.profiles.model import LinearModel

EVERY = 128  # iterations between two fits
OF_KIND = 16  # newest iterations of each kind that a fit sees: rare kinds count as much as frequent ones
KINDS = 64  # most kinds that are kept
BETTER = 0.9  # times the error of the model in use: a candidate's error that replaces it
SMALLEST_MS = 1e-3  # of a prediction that is divided by
LARGEST_ERROR = 1.0  # of one iteration's logarithm, so that single ones decide nothing

FAMILIAR = (  # batches that each profile and warm-up knows; the fit takes the first model's word for them
    *(Batch.of([Slice(tokens, context)]) for tokens in (16, 128, 512, 2048) for context in (0, 1024)),
    *(Batch.of([Slice(1, context, True)] * count) for count in (1, 8, 32) for context in (64, 512)),
)

Row = tuple[float, ...]  # the sums of a batch, and its time in ms
sums_of = attrgetter(*SUMS)


class Refit:
    """Newest iterations of each kind, and models fitted to them.

    A fitted model is used once it has predicted iterations that it had not seen, and better than the model in use.
    """

    def __init__(self, model: LinearModel) -> None:
        """`model`: a profile's or a warm-up's, right where the engine's iterations do not tell otherwise."""
        import scipy.optimize  # noqa: F401 - half a second, which no iteration should wait for

        self._first = model
        self._by_kind: dict[tuple[int, ...], deque[Row]] = {}  # the kind seen last is the last
        self._since: list[Row] = []  # iterations since the last fit
        self._candidate: LinearModel | None = None

    def observe(self, batch: Batch, ms: float, model: LinearModel) -> LinearModel | None:
        """Note that an iteration took `ms`; returns a model that predicts better than `model`, if one is found."""
        row = (*sums_of(batch), ms)
        kind = kind_of(batch)
        rows = self._by_kind.pop(kind, None) or deque(maxlen=OF_KIND)
        rows.append(row)
        self._by_kind[kind] = rows
        if len(self._by_kind) > KINDS:
            del self._by_kind[next(iter(self._by_kind))]
        self._since.append(row)
        return self._fit(model) if len(self._since) >= EVERY else None

    @property
    def kept(self) -> Samples:
        """The newest iterations of each kind."""
        return samples_of(self._rows())

    def _rows(self) -> list[Row]:
        return [row for rows in self._by_kind.values() for row in rows]

    def _fit(self, model: LinearModel) -> LinearModel | None:
        """Judge the last candidate by the iterations since, and fit another."""
        judges, self._since = samples_of(self._since), []
        last = self._candidate
        self._candidate = fit(type(self._first), self._to_fit())
        better = last is not None and error(last, judges) < BETTER * error(model, judges)
        return last if better else None

    def _to_fit(self) -> Samples:
        """The kept iterations, and `FAMILIAR` batches by the first model, at the speed of the kept ones.

        Without these, terms that recent iterations do not tell apart would take each other's time: p^2 of steps is
        their number, and a coefficient fitted to that would foretell hours for a prompt.
        """
        kept = self.kept
        speed = float(np.median(kept.ms / np.maximum(kept.predictions(self._first), SMALLEST_MS)))
        familiar = [
            (*sums_of(batch), max(speed * self._first.predict(batch), SMALLEST_MS)) for batch in FAMILIAR
        ]
        return samples_of([*self._rows(), *familiar])


def kind_of(batch: Batch) -> tuple[int, ...]:
    """Batches of one kind have about as many requests, tokens and tokens of context, and prompts or none."""
    return (
        batch.requests.bit_length(),
        batch.tokens.bit_length(),
        batch.context.bit_length() // 2,
        batch.prefills > 0,
    )


def samples_of(rows: Sequence[Row]) -> Samples:
    """Samples of rows with the sums of a batch and its time in ms."""
    *columns, ms = np.asarray(rows, dtype=np.float64).reshape(-1, len(SUMS) + 1).T
    return Samples(**dict(zip(SUMS, columns, strict=True)), ms=ms)


def error(model: LinearModel, samples: Samples) -> float:
    """Mean error of the model's predictions, each kind counted alike, whatever its scale.

    An iteration's error is the logarithm of measured / predicted, less the median of all.
    """
    logs = np.log(samples.ms / np.maximum(samples.predictions(model), SMALLEST_MS))
    off = np.minimum(np.abs(logs - np.median(logs)), LARGEST_ERROR)
    return float(means_by(kinds_of(samples), off).mean())


def kinds_of(samples: Samples) -> NDArray[np.int64]:
    """A number for the kind of each sample."""
    columns = [
        np.frexp(samples.requests)[1],
        np.frexp(samples.tokens)[1],
        np.frexp(samples.context)[1] // 2,
        samples.prefills > 0,
    ]
    _, numbers = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    return np.asarray(numbers, dtype=np.int64).reshape(-1)


def means_by(groups: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the values of each group."""
    return np.bincount(groups, weights=values) / np.bincount(groups)
