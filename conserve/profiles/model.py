"""The interface of a latency model, and what all models that are linear in their coefficients share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import isfinite, sqrt
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from conserve.profiles.batch import Batch, Slice


class LatencyModel(Protocol):
    """Predicts how long an engine iteration takes (milliseconds)."""

    def predict(self, batch: Batch) -> float:
        """How long the batch takes, in ms."""

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """The most of `request.tokens` that can join the batch so that it still takes at most `tbt_ms`.

        Zero if none can. Source: conserve-2026 section 4.2, ``can_schedule(batch, req, TBT)``.
        """


class Timeless:
    """Implements `LatencyModel` where nothing is known: for plans that bound no time."""

    def predict(self, batch: Batch) -> float:
        """Zero."""
        return 0.0

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """All of it."""
        return request.tokens


TIMELESS = Timeless()


class Parabola(NamedTuple):
    """``curve * p^2 + slope * p + offset`` milliseconds, where one request brings p tokens."""

    curve: float
    slope: float
    offset: float

    def reaches(self, ms: float) -> float:
        """The p at which it comes to `ms`; infinite if it never does."""
        rest = ms - self.offset
        if rest <= 0:
            return 0.0
        root = sqrt(self.slope * self.slope + 4 * self.curve * rest)
        return 2 * rest / (self.slope + root) if root > 0 else float("inf")


class LinearModel(ABC):
    """A sum of non-negative coefficients times named terms that grow with every token and context token.

    Hence predictions are never negative and monotone, and `can_schedule` is exact.
    """

    name: ClassVar[str]
    terms: ClassVar[Mapping[str, str]]  # name of each coefficient -> what it stands for

    def __init__(self, coefficients: Mapping[str, float]) -> None:
        """`coefficients` in ms per unit of their terms: one for each of `terms`, none negative."""
        if set(coefficients) != set(self.terms):
            raise ValueError(f"{self.name} has the coefficients {', '.join(self.terms)}")
        if not all(isfinite(value) and value >= 0 for value in coefficients.values()):
            raise ValueError(f"a coefficient of {self.name} is negative or not a number")
        self.coefficients = {name: float(coefficients[name]) for name in self.terms}
        self._weights = tuple(self.coefficients.values())

    @classmethod
    def of(cls, *weights: float) -> Self:
        """The model with these coefficients, in the order of `terms`."""
        return cls(dict(zip(cls.terms, weights, strict=True)))

    @staticmethod
    @abstractmethod
    def columns(sums: Any) -> tuple[Any, ...]:
        """The terms' values, in their order.

        `sums` has the attributes of a `Batch`: numbers, or arrays with one entry per batch.
        """

    @abstractmethod
    def _with(self, batch: Batch, context: int) -> Parabola:
        """What the batch takes with one more prefill chunk after `context` tokens, by the chunk's size."""

    def predict(self, batch: Batch) -> float:
        """How long the batch takes, in ms."""
        ms = 0.0
        for weight, value in zip(self._weights, self.columns(batch), strict=True):
            ms += weight * value
        return ms

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """The largest number of tokens that fits, from the root of a quadratic.

        The root is checked with real predictions and moved if rounding put it wrong, so that the answer is
        exact: its prediction is within the budget, and that of one token more is not.
        """
        wanted, context, decode = request

        def fits(tokens: int) -> bool:
            batch.add(tokens, context, decode)
            ms = self.predict(batch)
            batch.remove(tokens, context, decode)
            return ms <= tbt_ms

        if wanted < 1:
            return 0
        if fits(wanted):
            return wanted
        tokens = int(min(self._with(batch, context).reaches(tbt_ms), wanted - 1))
        while tokens > 0 and not fits(tokens):
            tokens -= 1
        while tokens < wanted - 1 and fits(tokens + 1):
            tokens += 1
        return tokens
