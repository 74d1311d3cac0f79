"""The interface of a latency model, and the base of models that are linear in their coefficients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import isfinite, sqrt
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from conserve.profiles.batch import Batch, Slice


class LatencyModel(Protocol):
    """Predicts the time of an engine iteration, in ms (conserve-2026 section 4.2)."""

    def predict(self, batch: Batch) -> float:
        """Predicted time of the batch, in ms."""

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """Most of `request.tokens` that can join the batch so that it still takes at most `tbt_ms`; 0 if none can.

        Source: conserve-2026 section 4.2, ``can_schedule(batch, req, TBT)``.
        """

    def margin(self, at_ms: float) -> float:
        """Factor that `can_schedule` keeps between its prediction and a limit of about `at_ms`."""


class Timeless:
    """A `LatencyModel` for plans without time limits: every batch takes 0 ms."""

    def predict(self, batch: Batch) -> float:
        """Zero."""
        return 0.0

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """All tokens of the request."""
        return request.tokens

    def margin(self, at_ms: float) -> float:
        """One: no time is kept back."""
        return 1.0


TIMELESS = Timeless()


def smallest_ms(model: LatencyModel) -> float:
    """Predicted time of the smallest iteration, which is mostly the constant part that every iteration has.

    The larger of one prefill token and one decode step, since a fitted model may have no constant for one of them.
    """
    return max(model.predict(Batch.of([Slice(1, 0, decode)])) for decode in (True, False))


def added_ms(model: LatencyModel, part: Slice) -> float:
    """Predicted time that this part adds to an iteration that holds others, in ms.

    The others are two decode steps, since the second token of an iteration may cost more than a later one.
    """
    others = [Slice(1, 0, True)] * 2
    return model.predict(Batch.of([*others, part])) - model.predict(Batch.of(others))


class Parabola(NamedTuple):
    """``curve * p^2 + slope * p + offset`` milliseconds, where p is the number of one request's tokens."""

    curve: float
    slope: float
    offset: float

    def reaches(self, ms: float) -> float:
        """The p at which the parabola reaches `ms`; infinite if it never does."""
        rest = ms - self.offset
        if rest <= 0:
            return 0.0
        root = sqrt(self.slope * self.slope + 4 * self.curve * rest)
        return 2 * rest / (self.slope + root) if root > 0 else float("inf")


class LinearModel(ABC):
    """A sum of named terms with non-negative coefficients; every term grows with tokens and context tokens.

    Hence predictions are monotone and never negative, and `can_schedule` is exact.
    """

    name: ClassVar[str]
    terms: ClassVar[Mapping[str, str]]  # name of each coefficient -> its meaning
    added: ClassVar[frozenset[str]] = frozenset()  # terms that earlier versions did not know: 0 if left out

    def __init__(self, coefficients: Mapping[str, float]) -> None:
        """`coefficients` in ms per unit of their terms: one for each of `terms`, none negative."""
        if set(coefficients) | self.added != set(self.terms):
            raise ValueError(f"{self.name} has the coefficients {', '.join(self.terms)}")
        if not all(isfinite(value) and value >= 0 for value in coefficients.values()):
            raise ValueError(f"a coefficient of {self.name} is negative or not a number")
        self.coefficients = {name: float(coefficients.get(name, 0.0)) for name in self.terms}
        self._weights = tuple(self.coefficients.values())

    @classmethod
    def of(cls, *weights: float) -> Self:
        """The model with these coefficients, in the order of `terms`; those that were `added` may be left out."""
        return cls(dict(zip([*cls.terms][: len(weights)], weights, strict=True)))

    @staticmethod
    @abstractmethod
    def columns(sums: Any) -> tuple[Any, ...]:
        """The terms' values, in the order of `terms`.

        `sums` has the attributes of a `Batch`: numbers, or arrays with one entry per batch.
        """

    @classmethod
    def untold(cls, sums: Any) -> frozenset[str]:
        """Terms that these batches do not tell from another one, which has the time of both."""
        return frozenset()

    @abstractmethod
    def _with(self, batch: Batch, context: int) -> Parabola:
        """Time of the batch with one more prefill chunk after `context` tokens, by the chunk's size."""

    def predict(self, batch: Batch) -> float:
        """Predicted time of the batch, in ms."""
        ms = 0.0
        for weight, value in zip(self._weights, self.columns(batch), strict=True):
            ms += weight * value
        return ms

    def margin(self, at_ms: float) -> float:
        """One: no time is kept back."""
        return 1.0

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """The largest number of tokens that fits, from the root of a quadratic.

        The root is checked with real predictions and corrected for rounding, so that the answer is exact: its
        prediction is within the budget, and that of one token more is not.
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
        while fits(tokens + 1):  # all wanted tokens do not
            tokens += 1
        return tokens
