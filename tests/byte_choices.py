"""Many small choices read from one string of bytes, which Hypothesis draws at once.

A draw for each choice takes most of a property's time where an example consists of a hundred choices. Hypothesis
shrinks the bytes towards zeros, so each choice has its plainest option first.
"""

from collections.abc import Callable, Sequence
from math import nextafter
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
EDGES = 16  # one of so many numbers is an edge of its range
LARGEST = 1 << 24


class ByteChoices:
    """Choices by the next bytes; behind the last byte each choice is the plainest."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def _next(self, count: int) -> int:
        taken = self._content[self._at : self._at + count]
        self._at += count
        return int.from_bytes(taken, "big")

    def one_of(self, options: Sequence[T]) -> T:
        """One of at most 256 options."""
        return options[self._next(1) * len(options) >> 8]

    def yes(self) -> bool:
        """True in half of the cases."""
        return self.one_of((False, True))

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, now and then one of its edges."""
        span = high - low + 1
        if span <= EDGES:
            return low + (self._next(1) * span >> 8)
        if self._next(1) >= 256 - 256 // EDGES:
            return self.one_of((low, low + 1, high - 1, high))
        return low + (self._next(3) * span) // LARGEST

    def real(self, low: float, high: float) -> float:
        """A number between `low` and `high`, by its logarithm: as many of 0.01 to 0.1 as of 0.1 to 1."""
        if self._next(1) >= 256 - 256 // EDGES:
            return self.one_of((low, nextafter(low, high), nextafter(high, low), high))
        return min(high, low * (high / low) ** (self._next(3) / (LARGEST - 1)))


def made_of_bytes(size: int, make: Callable[..., T]) -> Callable[..., st.SearchStrategy[T]]:
    """A function that returns a strategy: what `make` makes by its first argument's choices, with the others."""
    contents = st.binary(min_size=size, max_size=size)
    return lambda **rest: contents.map(lambda content: make(ByteChoices(content), **rest))
