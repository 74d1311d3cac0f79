"""Accounts of the promises: from the latencies so far, the bound on the next iteration (docs/adr/0015).

Policies have no memory, so the memory is here. A promise that P50 is at most 40 ms lets half of the gaps take
longer. Each gap within its bound earns a part of one that may exceed it, and each gap beyond costs one. What is
earned and not spent is kept up to a limit, so that an hour of short gaps does not pay for a minute of long ones.
"""

from collections.abc import Mapping
from math import inf

from conserve.engine.policy.promises import LATENCIES, MEAN, Promises, ceiling_ms, rank
from conserve.engine.policy.view import Slo
from conserve.engine.runtime.credit import MeanAccount, QuantileAccount
from conserve.engine.runtime.pausing import Pausing
from conserve.names import DEFAULT_HARM

SAVED_OF_LARGEST = 10.0  # the same as `SAVED` for the largest bound: nothing is planned by its credit
LEAST_SHARE = 0.5  # of a promise that the engine has, however long the delay to clients is


class Account:
    """All promises of one latency."""

    def __init__(self, named: Mapping[str, float]) -> None:
        self._named = named
        self.ceiling_ms = ceiling_ms(named)  # no latency in the engine is planned beyond it
        self._quantiles = {
            name: QuantileAccount(rank(name), ms)
            for name, ms in named.items()
            if name != MEAN and ms < self.ceiling_ms
        }
        largest = max(map(rank, named), default=0.0)  # no quantile is less than a lower one
        self._largest = QuantileAccount(largest, self.ceiling_ms, saved=SAVED_OF_LARGEST) if largest else None
        self.pausing = Pausing(named, self.ceiling_ms)
        self._mean = MeanAccount(named[MEAN]) if MEAN in named else None
        self._concurrent = 1

    def tighten_by(self, delays_ms: Mapping[str, float]) -> None:
        """Keep each promise so many ms earlier in the engine, by its name: clients have the latency later."""
        bounds = in_engine(self._named, delays_ms)
        self.ceiling_ms = ceiling_ms(bounds)
        for name, one in self._quantiles.items():
            one.bound_ms = bounds[name]
        if self._largest is not None:
            self._largest.bound_ms = self.ceiling_ms
        self.pausing.set_bound(self.ceiling_ms)
        if self._mean is not None:
            self._mean.set_bound(bounds[MEAN])

    def bound_ms(self, count: int) -> float:
        """Longest latency that `count` requests at once may have next so that every promise can be kept."""
        self._concurrent = count = max(1, count)
        bound_ms = self.ceiling_ms if self._mean is None else min(self.ceiling_ms, self._mean.left_ms(count))
        return min([bound_ms, *(one.bound_ms for one in self._quantiles.values() if not one.covers(count))])

    @property
    def broken(self) -> bool:
        """True if the largest bound, which no iteration is planned beyond, is exceeded too often all the same."""
        return self._largest is not None and self._largest.overdrawn

    def note(self, ms: float, count: int = 1, *, rows_ms: float = 0.0, at: float = 0.0) -> None:
        """Note `count` latencies of `ms`, of which rows took `rows_ms`, that ended `at` monotonic seconds."""
        if self.broken or self.pausing.on(now=at):  # rows that add a tenth are tried first
            self.pausing.note(ms, count, self._concurrent, rows_ms=rows_ms, at=at)
        if self._largest is not None:
            self._largest.note(ms, count, self._concurrent)
        for one in self._quantiles.values():
            one.note(ms, count, self._concurrent)
        if self._mean is not None:
            self._mean.note(ms, count, self._concurrent)


class Accountant:
    """Accounts of TTFT and TBT."""

    def __init__(self, promises: Promises) -> None:
        self.promises = promises
        self.ttft, self.tbt = (Account(getattr(promises, name)) for name in LATENCIES)
        self._accounts = dict(zip(LATENCIES, (self.ttft, self.tbt), strict=True))

    def tighten_by(self, delays_ms: Mapping[str, Mapping[str, float]]) -> None:
        """Keep promises so many ms earlier in the engine, by latency and by the promise's name."""
        for name, account in self._accounts.items():
            account.tighten_by(delays_ms.get(name, {}))

    @property
    def broken(self) -> list[str]:
        """Latencies whose largest bound is not kept, so that rows are held to `DEFAULT_HARM` of harm to them."""
        return [name for name, account in self._accounts.items() if account.broken]

    def paused_for(self, *, now: float) -> list[str]:
        """Latencies for whose promise rows are to pause."""
        return [name for name, account in self._accounts.items() if account.pausing.on(now=now)]

    def slo(self, *, waiting: int, decoding: int) -> Slo:
        """Bounds on the next iteration, with so many live requests before and after their first token.

        One more request may arrive while the iteration runs.
        """
        slo = self.promises.slo
        return Slo(
            ttft_ms=self.ttft.bound_ms(waiting + 1),
            tbt_ms=self.tbt.bound_ms(decoding),
            harm=slo.harm,
            largest_ttft_ms=self.ttft.ceiling_ms,
            largest_tbt_ms=self.tbt.ceiling_ms,
            stand_in_ttft_harm=DEFAULT_HARM if self.ttft.broken else slo.stand_in_ttft_harm,
            stand_in_tbt_harm=DEFAULT_HARM if self.tbt.broken else slo.stand_in_tbt_harm,
        )


def in_engine(named: Mapping[str, float], delays_ms: Mapping[str, float]) -> dict[str, float]:
    """Bounds in the engine under which clients have the promised ones; none exceeds that of a higher quantile."""
    bounds = {name: max(LEAST_SHARE * ms, ms - delays_ms.get(name, 0.0)) for name, ms in named.items()}
    most_ms = inf
    for name in sorted((name for name in bounds if name != MEAN), key=rank, reverse=True):
        bounds[name] = most_ms = min(most_ms, bounds[name])
    return bounds
