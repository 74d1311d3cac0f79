"""Coefficients of a latency model, fitted again to what an engine serves (docs/adr/0036).

A profile or a warm-up cannot know all of an engine's work: how long contexts are, how many rows decode together,
how much time sampling takes by the requests' parameters. A scale corrects all lengths alike: the time that it takes
from one kind of iteration it adds to all others. A fit to recent iterations corrects each term.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice, product
from math import exp, log
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.fit import Samples, fit, sums_of
from conserve.profiles.model import LinearModel

logger = logging.getLogger(__name__)
EVERY = 128  # iterations between two fits
OF_KIND = 16  # newest iterations of each kind that a fit sees: rare kinds count as much as frequent ones
KINDS = 64  # most kinds that are kept
SMALL = 4  # requests of a batch that tells the machine's speed
BETTER = 0.9  # times the error of the model in use: a candidate's error that replaces it
NO_WORSE = 1.1  # the same for kinds that were not seen since the candidate was fitted
FURTHEST = log(4)  # from the middle of its kind: logarithm of measured / predicted that a fit still sees
SHORTEST = 8.0  # times shorter than the first model has it at this speed: the shortest that a fit still sees
LARGEST_ERROR = 1.0  # of one iteration's logarithm, so that single ones decide nothing
SMALLEST_MS = 1e-3  # of a prediction that is divided by
CHUNKS = (16, 128, 512, 2048, 8192)  # tokens of the batches that the first model speaks for
STEPS = (1, 8, 32, 128)
CONTEXTS = (0, 64, 512, 4096, 16_384, 65_536)

Row = tuple[float, ...]  # the sums of a batch, and its time in ms


class FittedReach(NamedTuple):
    """Largest measured batches that a model was first fitted to; the default is any warm-up's."""

    tokens: int = 2048
    requests: int = 32
    context: int = 1024  # tokens of one request

    def batches(self) -> Iterator[Batch]:
        """Single chunks and decode steps within the reach."""
        contexts = [context for context in CONTEXTS if context <= self.context]
        for tokens, context in product(CHUNKS, contexts):
            if tokens <= self.tokens:
                yield Batch.of([Slice(tokens, context)])
        for count, context in product(STEPS, contexts):
            if count <= self.requests and context:
                yield Batch.of([Slice(1, context, True)] * count)


class BatchKind(NamedTuple):
    """Batches of one kind have prompts or none, and about as many requests, tokens and tokens of context."""

    prompts: bool
    requests: int  # number of binary digits
    tokens: int
    context: int  # half of that number

    @classmethod
    def of(cls, row: Row) -> "BatchKind":
        """The kind of a batch with these sums."""
        requests, tokens, context, _, _, prefills, *_ = map(int, row)
        return cls(prefills > 0, requests.bit_length(), tokens.bit_length(), context.bit_length() // 2)

    @property
    def near(self) -> "frozenset[BatchKind]":
        """The kinds whose numbers differ from these by one at most; a lone token is near to lone ones alone."""
        steps = product((-1, 0, 1), repeat=3)
        kinds = (
            BatchKind(self.prompts, self.requests + a, self.tokens + b, self.context + c) for a, b, c in steps
        )
        return frozenset(kind for kind in kinds if (kind.tokens == 1) == (self.tokens == 1))


class Refit:
    """Newest iterations of each kind, and models fitted to them.

    A fitted model is used once it has predicted iterations that it had not seen, and better than the model in use.
    """

    def __init__(
        self, model: LinearModel, reach: FittedReach | None = None, rows: Iterable[Row] = ()
    ) -> None:
        """`model` is right within its `reach` where iterations do not tell otherwise; `rows` were kept before."""
        import scipy.optimize  # noqa: F401 - half a second, which no iteration should wait for

        self._first = model
        familiar = [
            (*sums_of(batch), max(model.predict(batch), SMALLEST_MS))
            for batch in (reach or FittedReach()).batches()
        ]
        self._familiar = [(BatchKind.of(row).near, row) for row in familiar]
        self._by_kind: dict[BatchKind, deque[Row]] = {}  # the kind seen last is the last
        self._since: list[Row] = []  # iterations since the last fit
        self._candidate: LinearModel | None = None
        for row in rows:
            self._keep(row)

    def observe(self, batch: Batch, ms: float, model: LinearModel) -> LinearModel | None:
        """Note that an iteration took `ms`; returns a model that predicts better than `model`, if one is found."""
        row = (*sums_of(batch), ms)
        self._keep(row)
        self._since.append(row)
        return self._fit(model) if len(self._since) >= EVERY else None

    @property
    def rows(self) -> list[Row]:
        """The newest iterations of each kind."""
        return [row for rows in self._by_kind.values() for row in rows]

    def _keep(self, row: Row) -> None:
        kind = BatchKind.of(row)
        rows = self._by_kind.pop(kind, None) or deque(maxlen=OF_KIND)
        rows.append(row)
        self._by_kind[kind] = rows
        if len(self._by_kind) > KINDS:  # of the requests that have most kinds, the one not seen for longest
            crowded, _ = Counter(known[:2] for known in self._by_kind).most_common(1)[0]
            del self._by_kind[next(known for known in self._by_kind if known[:2] == crowded)]

    def _fit(self, model: LinearModel) -> LinearModel | None:
        """Judge the last candidate by the iterations since, and fit another."""
        since, self._since = self._since, []
        last, self._candidate = self._candidate, None
        try:
            self._candidate = fit(type(self._first), self._to_fit())
        except (RuntimeError, ValueError, np.linalg.LinAlgError) as error:  # the model in use goes on
            logger.warning("a fit of the latency model failed, and the model stays as it is: %s", error)
        return last if last is not None and self._is_better(last, model, since) else None

    def _is_better(self, candidate: LinearModel, model: LinearModel, since: Sequence[Row]) -> bool:
        if error(candidate, since) >= BETTER * error(model, since):
            return False
        seen = {*map(BatchKind.of, since)}
        absent = [row for kind, rows in self._by_kind.items() if kind not in seen for row in rows]
        if not absent:
            return True
        known = [*since, *absent]  # the middle of all is the scale of all
        return error(candidate, known, but=seen) <= NO_WORSE * error(model, known, but=seen)

    def _to_fit(self) -> Samples:
        """The kept iterations, and familiar batches by the first model of which none nearby was seen.

        Without these, terms that recent iterations do not tell apart would take each other's time: p^2 of steps is
        their number, and a coefficient fitted to that would foretell hours for a prompt.
        """
        logs = iter(logs_of(self._first, Samples.of_sums(self.rows)).tolist())
        near: list[tuple[Row, float]] = []
        for kept in self._by_kind.values():
            own = [*islice(logs, len(kept))]
            middle = sorted(own)[len(own) // 2]
            near += [(row, off) for row, off in zip(kept, own, strict=True) if abs(off - middle) <= FURTHEST]
        small = [off for row, off in near if row[0] <= SMALL]
        speed = exp(median(small)) if small else 1.0
        # Of a kind with one iteration the middle tells nothing, and a fit of shares minds too short times most.
        rows = [row for row, off in near if off > log(speed / SHORTEST)]
        seen = self._by_kind.keys()
        familiar = [(*row[:-1], speed * row[-1]) for kinds, row in self._familiar if seen.isdisjoint(kinds)]
        return Samples.of_sums([*rows, *familiar])


def logs_of(model: LinearModel, samples: Samples) -> NDArray[np.float64]:
    """Logarithms of measured / predicted."""
    logs: NDArray[np.float64] = np.log(samples.ms / np.maximum(samples.predictions(model), SMALLEST_MS))
    return logs


def error(model: LinearModel, rows: Sequence[Row], *, but: Container[BatchKind] = ()) -> float:
    """Mean error of the model's predictions, each kind counted alike, whatever its scale.

    An iteration's error is the logarithm of measured / predicted, less the median of all. `but`: kinds whose errors
    do not count.
    """
    logs = logs_of(model, Samples.of_sums(rows))
    off = np.minimum(np.abs(logs - np.median(logs)), LARGEST_ERROR)
    by_kind: defaultdict[BatchKind, list[float]] = defaultdict(list)
    for row, one in zip(rows, off.tolist(), strict=True):
        by_kind[BatchKind.of(row)].append(one)
    return fmean(fmean(errors) for kind, errors in by_kind.items() if kind not in but)
