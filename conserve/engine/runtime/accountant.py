"""Accounts of the promises: from the latencies so far, the bound on the next iteration (docs/adr/0015).

Policies have no memory, so the memory is here. A promise that P50 is at most 40 ms lets half of the gaps take
longer. Each gap within its bound earns a part of one that may exceed it, and each gap beyond costs one. What is
earned and not spent is kept up to a limit, so that an hour of short gaps does not pay for a minute of long ones.
"""

from collections.abc import Mapping

from conserve.engine.policy.promises import HARM, LATENCIES, MEAN, Promises, ceiling_ms, rank
from conserve.engine.policy.view import Slo

MARGIN = 0.1  # part of what a promise allows that is never spent
SAVED = 2.0  # iterations whose late gaps the credit pays for at most
DEBT = 50.0  # iterations whose late gaps are remembered, where gaps exceeded the bound that was handed out
SAVED_OF_LARGEST = 10.0  # the same as `SAVED` for the largest bound: nothing is planned by its credit
OVERDRAWN = 3.0  # iterations whose late gaps the largest bound may owe: a burst is no broken promise
ROUNDING = 1e-9


class QuantileAccount:
    """Credit of the promise that a share `rank` of latencies is at most `bound_ms`."""

    def __init__(self, rank: float, bound_ms: float, saved: float = SAVED) -> None:
        self.bound_ms = bound_ms
        self._saved = saved  # iterations
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

    def note(self, ms: float, count: int, concurrent: int) -> None:
        """Note `count` latencies of `ms`, while up to `concurrent` requests had one at once."""
        late = count if ms > self.bound_ms else 0
        self._iteration = (1 - self._earned) * max(count, concurrent)
        self._credit = clamped(self._credit + count * self._earned - late, self._iteration, self._saved)


class MeanAccount:
    """Credit of the promise that the mean is at most `bound_ms`, in ms."""

    def __init__(self, bound_ms: float) -> None:
        self._mean_ms = bound_ms * (1 - MARGIN)
        self._credit_ms = 0.0

    def left_ms(self, count: int) -> float:
        """Longest latency that so many requests at once may have."""
        return max(0.0, self._mean_ms + self._credit_ms / count)

    def note(self, ms: float, count: int, concurrent: int) -> None:
        """Note `count` latencies of `ms`, while up to `concurrent` requests had one at once."""
        iteration_ms = self._mean_ms * max(count, concurrent)
        self._credit_ms = clamped(self._credit_ms + count * (self._mean_ms - ms), iteration_ms)


class Account:
    """All promises of one latency."""

    def __init__(self, named: Mapping[str, float]) -> None:
        self._ceiling_ms = ceiling_ms(named)
        self._quantiles = [
            QuantileAccount(rank(name), ms)
            for name, ms in named.items()
            if name != MEAN and ms < self._ceiling_ms
        ]
        largest = max(map(rank, named), default=0.0)  # no quantile is less than a lower one
        self._largest = QuantileAccount(largest, self._ceiling_ms, SAVED_OF_LARGEST) if largest else None
        self._mean = MeanAccount(named[MEAN]) if MEAN in named else None
        self._concurrent = 1

    def bound_ms(self, count: int) -> float:
        """Longest latency that `count` requests at once may have next so that every promise can be kept."""
        self._concurrent = count = max(1, count)
        bound_ms = (
            self._ceiling_ms if self._mean is None else min(self._ceiling_ms, self._mean.left_ms(count))
        )
        return min([bound_ms, *(one.bound_ms for one in self._quantiles if not one.covers(count))])

    @property
    def broken(self) -> bool:
        """True if the largest bound, which no iteration is planned beyond, is exceeded too often all the same."""
        return self._largest is not None and self._largest.overdrawn

    def note(self, ms: float, count: int = 1) -> None:
        """Note `count` latencies of `ms`."""
        if self._largest is not None:
            self._largest.note(ms, count, self._concurrent)
        for one in self._quantiles:
            one.note(ms, count, self._concurrent)
        if self._mean is not None:
            self._mean.note(ms, count, self._concurrent)


class Accountant:
    """Accounts of TTFT and TBT."""

    def __init__(self, promises: Promises) -> None:
        self.promises = promises
        self.ttft, self.tbt = (Account(getattr(promises, name)) for name in LATENCIES)

    @property
    def broken(self) -> list[str]:
        """Latencies whose largest bound is not kept, so that rows are held to a harm of `HARM` to them."""
        accounts = zip(LATENCIES, (self.ttft, self.tbt), strict=True)
        return [name for name, account in accounts if account.broken]

    def slo(self, *, waiting: int, decoding: int) -> Slo:
        """Bounds on the next iteration, with so many live requests before and after their first token.

        One more request may arrive while the iteration runs.
        """
        slo = self.promises.slo
        return Slo(
            ttft_ms=self.ttft.bound_ms(waiting + 1),
            tbt_ms=self.tbt.bound_ms(decoding),
            harm=slo.harm,
            largest_ttft_ms=slo.ttft_ms,
            largest_tbt_ms=slo.tbt_ms,
            only_ttft_harm=HARM if self.ttft.broken else slo.only_ttft_harm,
            only_tbt_harm=HARM if self.tbt.broken else slo.only_tbt_harm,
        )


def clamped(credit: float, iteration: float, saved: float = SAVED) -> float:
    """The credit within so many `saved` iterations and `DEBT` iterations of debt."""
    return max(-DEBT * iteration, min(saved * iteration, credit))
