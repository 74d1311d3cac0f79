"""Delay of delivery: by how much clients have a latency later than the engine counts it (`way_ms` in reports).

A promise is made to clients, and the engine keeps it by its own clock: from a request's arrival in the API server
to the moment at which the engine core has the token. Reading a body and writing tokens come on top, and wait where
the API server is busy. It measures both latencies of each streamed answer; quantiles of both over about a minute,
one less the other, are what the engine has to be earlier by. Each class of live traffic has delays of its own,
since one class's bodies may be long; of several API servers the longest delay counts.
"""

from collections.abc import Mapping, Sequence
from math import exp

from conserve.engine.policy.promises import LATENCIES, MEAN, Promises, rank
from conserve.engine.runtime.latency_bins import STEP, bin_of

FADES_S = 60.0  # after which a latency counts by 1/e
LEAST = 3.0  # latencies above a quantile that is compared: of fewer a higher quantile says nothing
SCANTY = 1e-3  # counts below it are dropped
FORGOTTEN_S = 120.0  # after which an API server that reports no more is forgotten

Delays = Mapping[str, Mapping[str, float]]  # by latency and name of a promise: ms that clients have it later


class FadingCounts:
    """Counts of latencies in bins, of which old ones count less and less."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._sum_ms = 0.0

    def note(self, ms: float) -> None:
        """Count a latency."""
        place = bin_of(ms)
        self._counts[place] = self._counts.get(place, 0.0) + 1
        self._sum_ms += ms

    def fade(self, share: float) -> None:
        """Leave this share of all counts."""
        self._sum_ms *= share
        self._counts = {at: count * share for at, count in self._counts.items() if count * share > SCANTY}

    @property
    def total(self) -> float:
        """Number of latencies, as far as they still count."""
        return sum(self._counts.values())

    @property
    def mean_ms(self) -> float:
        """Mean in ms; of none it is 0."""
        return self._sum_ms / (self.total or 1.0)

    def quantile_ms(self, q: float) -> float:
        """Upper edge in ms of the bin that this share of the latencies does not exceed; of none it is 0."""
        wanted, reached = q * self.total, 0.0
        for place, count in sorted(self._counts.items()):
            reached += count
            if reached >= wanted:
                return exp(STEP * place)
        return 0.0


class LatencyDelay:
    """TTFT or TBT as the engine counts it and as clients have it."""

    def __init__(self) -> None:
        self._engine, self._clients = FadingCounts(), FadingCounts()

    def note(self, engine_ms: float, client_ms: float) -> None:
        """Note one latency on both clocks."""
        self._engine.note(engine_ms)
        self._clients.note(client_ms)

    def fade(self, share: float) -> None:
        """Leave this share of what was noted."""
        self._engine.fade(share)
        self._clients.fade(share)

    def delay_ms(self, promise: str) -> float:
        """Difference of clients' quantile or mean to the engine's, in ms, 0 at least; 0 of too few latencies."""
        total = self._engine.total
        if total < 2 * LEAST:
            return 0.0
        if promise == MEAN:
            return max(0.0, self._clients.mean_ms - self._engine.mean_ms)
        q = min(rank(promise), 1 - LEAST / total)
        return max(0.0, self._clients.quantile_ms(q) - self._engine.quantile_ms(q))


class DeliveryDelay:
    """TTFT and TBT of one class at one API server, by both clocks."""

    def __init__(self) -> None:
        self.latencies = {name: LatencyDelay() for name in LATENCIES}
        self._faded_at: float | None = None

    def fade(self, *, now: float) -> None:
        """Have everything count less by the time since the last call, in monotonic seconds."""
        if self._faded_at is not None:
            share = exp((self._faded_at - now) / FADES_S)
            for one in self.latencies.values():
                one.fade(share)
        self._faded_at = now

    def delays_ms(self, promises: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
        """Differences of clients' latencies to the engine's, in ms, by latency and by name of a promise."""
        return {
            name: {promise: self.latencies[name].delay_ms(promise) for promise in promises.get(name, ())}
            for name in LATENCIES
        }


class ReportedDelays:
    """Keeps the delays that API servers report to an engine. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._by_server: dict[str, tuple[float, Mapping[str, Delays]]] = {}

    def report(self, server: str, delays_ms: Mapping[str, Delays], *, now: float) -> None:
        """Keep the delays of one API server, by class, in place of what it reported before."""
        self._by_server[server] = now, delays_ms
        self._by_server = {
            name: reported for name, reported in self._by_server.items() if reported[0] > now - FORGOTTEN_S
        }

    def longest_ms(self, live_class: str) -> dict[str, dict[str, float]]:
        """The longest delays of a class at any API server."""
        found: dict[str, dict[str, float]] = {name: {} for name in LATENCIES}
        for _, by_class in self._by_server.values():
            for latency, delays in by_class.get(live_class, {}).items():
                for promise, ms in delays.items():
                    found[latency][promise] = max(ms, found[latency].get(promise, 0.0))
        return found


def names_of(promises: Promises) -> dict[str, list[str]]:
    """Names of what is promised, by latency."""
    return {name: sorted(getattr(promises, name)) for name in LATENCIES}
