"""Credit of a promise: what latencies within their bound earn, and what late ones cost (docs/adr/0015)."""

MARGIN = 0.1  # part of what a promise allows that is never spent
SAVED = 2.0  # iterations whose late gaps the credit pays for at most
DEBT = 50.0  # iterations whose late gaps are remembered, where gaps exceeded the bound that was handed out
OVERDRAWN = 3.0  # iterations whose late gaps an account may owe: a burst is no broken promise
ROUNDING = 1e-9


class QuantileAccount:
    """Credit of the promise that a share `rank` of latencies is at most `bound_ms`."""

    def __init__(self, rank: float, bound_ms: float, *, saved: float = SAVED, debt: float = DEBT) -> None:
        self.bound_ms = bound_ms
        self._saved, self._debt = saved, debt  # iterations
        self._earned = (1 - rank) * (1 - MARGIN)  # late latencies for each latency
        self._credit = 0.0  # late latencies
        self._iteration = 1.0  # late latencies of one

    def covers(self, count: int) -> bool:
        """True if so many latencies at once may be late."""
        return self._credit + ROUNDING >= count * (1 - self._earned)

    @property
    def overdrawn(self) -> bool:
        """True if so many more latencies were late than the promise allows that it is not kept."""
        return self._credit < -OVERDRAWN * self._iteration - ROUNDING

    @property
    def settled(self) -> bool:
        """True if nothing is owed."""
        return self._credit >= -ROUNDING

    def note(self, ms: float, count: int, concurrent: int) -> None:
        """Note `count` latencies of `ms`, while up to `concurrent` requests had one at once."""
        late = count if ms > self.bound_ms else 0
        self._iteration = (1 - self._earned) * max(count, concurrent)
        self._credit = clamped(
            self._credit + count * self._earned - late, self._iteration, self._saved, self._debt
        )


class MeanAccount:
    """Credit of the promise that the mean is at most `bound_ms`, in ms."""

    def __init__(self, bound_ms: float) -> None:
        self.set_bound(bound_ms)
        self._credit_ms = 0.0

    def set_bound(self, bound_ms: float) -> None:
        """Hold latencies against this mean from now on."""
        self._mean_ms = bound_ms * (1 - MARGIN)

    def left_ms(self, count: int) -> float:
        """Longest latency that so many requests at once may have."""
        return max(0.0, self._mean_ms + self._credit_ms / count)

    def note(self, ms: float, count: int, concurrent: int) -> None:
        """Note `count` latencies of `ms`, while up to `concurrent` requests had one at once."""
        iteration_ms = self._mean_ms * max(count, concurrent)
        self._credit_ms = clamped(self._credit_ms + count * (self._mean_ms - ms), iteration_ms)


def clamped(credit: float, iteration: float, saved: float = SAVED, debt: float = DEBT) -> float:
    """The credit within so many `saved` iterations and so many of `debt`."""
    return max(-debt * iteration, min(saved * iteration, credit))
