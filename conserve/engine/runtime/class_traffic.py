"""Live requests of one class over the last 60 s: their latencies, their accounts, and the cost of their tokens."""

from collections import deque
from collections.abc import Collection, Mapping
from math import inf, isinf
from typing import Any

from conserve.engine.policy.promises import ALONE, LATENCIES, MEAN, Promises, rank
from conserve.engine.policy.view import Slo
from conserve.engine.runtime.accountant import Accountant
from conserve.engine.runtime.histogram import TBT_MS, TTFT_MS, LatencyHistogram
from conserve.engine.runtime.ranked import Moment, Ranked, quantiles

WINDOW_S = 60.0  # seconds that a report covers
YIELDING = ("held_back", "paused_for")  # fields of a report: latencies for which rows yield
EARLIER = 16  # accounts that are kept: a benchmark changes between a few policies and promises


class LateCount:
    """Latencies since the start, and those above the promise of the P99 or a higher quantile."""

    def __init__(self, named: Mapping[str, float]) -> None:
        self._all = self._late = 0
        self.promise(named)

    def promise(self, named: Mapping[str, float]) -> None:
        """Hold latencies against these bounds from now on."""
        self._bound_ms = tail_ms(named)

    def note(self, ms: float, times: int = 1) -> None:
        """Note a latency that was measured so many times."""
        self._all += times
        if ms > self._bound_ms:
            self._late += times

    def report(self) -> dict[str, int]:
        """The two counts, for JSON."""
        return {"all": self._all, "late": self._late}


class ClassTraffic:
    """One class. Times are monotonic seconds, given by the caller."""

    def __init__(self, promises: Promises) -> None:
        self.accountant = Accountant(promises)
        self._policy = ""  # whose rows are beside the live requests
        self._accounts = deque([(self._policy, self.accountant)], maxlen=EARLIER)
        self._delays_ms: Mapping[str, Mapping[str, float]] = {}
        self.ttft_ms: deque[Moment] = deque()
        self.tbt_ms: deque[Moment] = deque()
        self.ttft_counts, self.tbt_counts = LatencyHistogram(TTFT_MS), LatencyHistogram(TBT_MS)
        self.ttft_late, self.tbt_late = LateCount(promises.ttft_ms), LateCount(promises.tbt_ms)
        self.requests = 0  # that got a token
        self.waiting = self.decoding = 0  # in the engine, before and after their first token
        self.served = 0.0  # cost of the tokens computed for it, in prompt tokens
        self.arrived_at: float | None = None  # last arrival

    @property
    def promises(self) -> Promises:
        """The promises that the latencies are held against."""
        return self.accountant.promises

    @property
    def busy(self) -> bool:
        """True if requests of the class are in the engine."""
        return bool(self.waiting or self.decoding)

    def promise(self, promises: Promises) -> None:
        """Hold latencies against these promises from now on; some that were held before are taken up again."""
        self._take_up(self._policy, promises)
        self.ttft_late.promise(promises.ttft_ms)
        self.tbt_late.promise(promises.tbt_ms)

    def use_policy(self, policy: str) -> None:
        """Go on with the accounts of this policy: each answers for what its own rows made late."""
        self._take_up(policy, self.promises)

    def _take_up(self, policy: str, promises: Promises) -> None:
        for earlier, accountant in self._accounts:
            if (earlier, accountant.promises) == (policy, promises):
                self.accountant = accountant
                break
        else:
            self.accountant = Accountant(promises)
            self._accounts.append((policy, self.accountant))
        self._policy = policy
        self.tighten_by(self._delays_ms)

    def tighten_by(self, delays_ms: Mapping[str, Mapping[str, float]]) -> None:
        """Keep promises so many ms earlier in the engine, by latency and name: clients have them so much later."""
        self._delays_ms = delays_ms
        self.accountant.tighten_by(delays_ms)

    def bounds(self) -> Slo:
        """Bounds on the next iteration under which every promise can be kept."""
        return self.accountant.slo(waiting=self.waiting, decoding=self.decoding)

    def expected(self, *, now: float) -> bool:
        """True if a request of the class has arrived in the last 60 s."""
        return self.arrived_at is not None and self.arrived_at >= now - WINDOW_S

    def paused_for(self, *, now: float) -> list[str]:
        """Latencies for whose promise rows are to pause: while requests that have one are there or expected."""
        paused = self.accountant.paused_for(now=now)
        if not paused or self.expected(now=now):
            return paused
        there = {"ttft_ms": self.waiting, "tbt_ms": self.decoding}
        return [name for name in paused if there[name]]

    def answered(self, ms: float, rows_ms: float, *, at: float, promised: bool = True) -> None:
        """Note a first token after `ms`, of which rows took `rows_ms`; `promised`: by this class's promises."""
        self.requests += 1
        self.waiting -= 1
        self.decoding += 1
        self._waited(ms, rows_ms, at, promised=promised)

    def given_up(self, ms: float, rows_ms: float, *, at: float, promised: bool = True) -> bool:
        """Note that a client left after so long without a token; True if the wait counts as a TTFT.

        It counts if it is longer than promised, or without a promise than all TTFTs of the last 60 s. A shorter
        wait says nothing: the token could have come in time.
        """
        forget(self.ttft_ms, now=at)
        longest_ms = self.promises.slo.ttft_ms
        if isinf(longest_ms):
            longest_ms = max((moment.value for moment in self.ttft_ms), default=0.0)
        if ms <= longest_ms:
            return False
        self._waited(ms, rows_ms, at, promised=promised)
        return True

    def _waited(self, ms: float, rows_ms: float, at: float, *, promised: bool) -> None:
        remember(self.ttft_ms, Moment(at, ms, promised=promised))
        self.ttft_counts.note(ms)
        if promised:
            self.ttft_late.note(ms)
            self.accountant.ttft.note(ms, rows_ms=rows_ms, at=at)

    def tbt(self, ms: float, rows_ms: float, count: int, *, at: float) -> None:
        """Note `count` TBTs of `ms`, of which rows took `rows_ms`."""
        remember(self.tbt_ms, Moment(at, ms, count))
        self.tbt_counts.note(ms, count)
        self.tbt_late.note(ms, count)
        self.accountant.tbt.note(ms, count, rows_ms=rows_ms, at=at)

    def latencies(self, *, now: float) -> tuple[deque[Moment], deque[Moment]]:
        """TTFTs and TBTs of the last 60 s, in ms."""
        for window in (self.ttft_ms, self.tbt_ms):
            forget(window, now=now)
        return self.ttft_ms, self.tbt_ms

    def report(self, *, now: float, holds_back: bool) -> dict[str, Any]:
        """Latencies of the last 60 s beside the promises, for JSON; `holds_back` as in `Traffic.report`."""
        there = self.busy or self.expected(now=now)
        ttft_ms, tbt_ms = map(Ranked, self.latencies(now=now))
        promised_ms = Ranked(moment for moment in self.ttft_ms if moment.promised)
        return {
            "requests": self.requests,
            "ttft_ms": quantiles(ttft_ms),
            "tbt_ms": quantiles(tbt_ms),
            "attainment": attained(self.promises, promised_ms, tbt_ms),
            "held_back": self.accountant.broken if holds_back and there else [],
            "paused_for": self.paused_for(now=now) if holds_back else [],
            "way_ms": {
                name: {
                    promise: self._delays_ms.get(name, {}).get(promise, 0.0)
                    for promise in getattr(self.promises, name)
                }
                for name in LATENCIES
            },
            "promises": {
                name: kept(getattr(self.promises, name), ordered)
                for name, ordered in zip(LATENCIES, (promised_ms, tbt_ms), strict=True)
            },
            "counts": {"ttft_ms": self.ttft_late.report(), "tbt_ms": self.tbt_late.report()},
            "histograms": {"ttft_ms": self.ttft_counts.report(), "tbt_ms": self.tbt_counts.report()},
        }


def yielding(reports: Collection[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Latencies for which rows are held back, and for which they pause, in any of these reports."""
    return {
        field: [name for name in LATENCIES if any(name in one[field] for one in reports)]
        for field in YIELDING
    }


def remember(window: deque[Moment], moment: Moment) -> None:
    """Add a moment, and drop old ones: the next report may be far away."""
    window.append(moment)
    forget(window, now=moment.at)


def forget(window: deque[Moment], *, now: float) -> None:
    """Drop moments older than the window."""
    while window and window[0].at < now - WINDOW_S:
        window.popleft()


def kept(promised: Mapping[str, float], ranked: Ranked) -> dict[str, Any]:
    """Each promise beside these latencies, for JSON; `seen_ms` is None without latencies."""
    seen = {name: ranked.mean if name == MEAN else ranked.at(rank(name)) for name in promised}
    return {
        name: {"promised_ms": ms, "seen_ms": seen[name], "kept": (seen[name] or 0.0) <= ms}
        for name, ms in promised.items()
    }


def attained(promises: Promises, ttft_ms: Ranked, tbt_ms: Ranked) -> float:
    """Share of the TTFTs, or of the TBTs if it is smaller, within the largest bound promised of nearly all of them.

    1 where neither a P99 nor a higher quantile is promised: a promise of a median leaves half of them longer.
    """
    return min(ttft_ms.within(tail_ms(promises.ttft_ms)), tbt_ms.within(tail_ms(promises.tbt_ms)))


def tail_ms(named: Mapping[str, float]) -> float:
    """Largest bound of the P99 or a higher quantile; infinite without one."""
    return max((ms for name, ms in named.items() if rank(name) >= rank(ALONE)), default=inf)
