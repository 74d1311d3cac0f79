"""Latencies of live requests over the last 60 s as the engine core sees them, and offline tokens beside them."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from conserve.engine.policy.promises import LATENCIES, MEAN, Promises, rank
from conserve.engine.policy.view import Slo
from conserve.engine.runtime.accountant import Accountant
from conserve.engine.runtime.receipt import Receipt

WINDOW_S = 60.0  # seconds that a report covers
RECENT_PROMPTS = 64  # prompts whose median is the typical prompt


class Moment(NamedTuple):
    """A value measured at a time."""

    at: float  # monotonic seconds
    value: float
    times: int = 1  # number of equal measurements


class Traffic:
    """Rolling windows over the last 60 s. Times are monotonic seconds, given by the caller."""

    def __init__(self, promises: Promises | None = None, receipt: Receipt | None = None) -> None:
        self.receipt = receipt or Receipt(share=0.0)
        self._accountant = Accountant(promises or Promises())
        self._ttft_ms: deque[Moment] = deque()
        self._tbt_ms: deque[Moment] = deque()
        self._offline_tokens: deque[Moment] = deque()
        self._offline_since: float | None = None
        self._arrived_at: dict[str, float] = {}  # online requests without a token yet
        self._last_token_at: dict[str, float] = {}
        self._peaks: deque[Moment] = deque()  # of concurrent online requests, each higher than all after it
        self._arrivals: deque[Moment] = deque()
        self._prompts: deque[int] = deque(maxlen=RECENT_PROMPTS)
        self._typical_prompt = 0
        self._prompt_at = 0.0
        self.online_requests = 0
        self.offline_tokens = 0

    @property
    def promises(self) -> Promises:
        """The promises that the latencies are held against."""
        return self._accountant.promises

    def promise(self, promises: Promises) -> None:
        """Hold latencies against these promises from now on."""
        self._accountant = Accountant(promises)

    def bounds(self) -> Slo:
        """Bounds on the next iteration under which every promise can be kept."""
        return self._accountant.slo(waiting=len(self._arrived_at), decoding=len(self._last_token_at))

    def typical_prompt(self, *, now: float) -> int:
        """Median number of tokens in recent online prompts; 0 after 60 s without one."""
        return self._typical_prompt if now < self._prompt_at + WINDOW_S else 0

    def arrivals_per_s(self, *, now: float) -> float:
        """Online requests per second over the last 60 s."""
        forget(self._arrivals, now=now)
        return len(self._arrivals) / WINDOW_S

    @property
    def online_now(self) -> int:
        """Number of online requests in the engine."""
        return len(self._arrived_at) + len(self._last_token_at)

    def expected(self, *, now: float) -> int:
        """Peak number of concurrent online requests in the last 60 s, minus the current number."""
        while self._peaks and self._peaks[0].at < now - WINDOW_S:
            self._peaks.popleft()
        return max(0, int(self._peaks[0].value) - self.online_now) if self._peaks else 0

    def arrived(self, request: str, prompt_tokens: int, *, at: float) -> None:
        """Note an online request that has arrived."""
        self._arrived_at[request] = at
        self.receipt.arrived(at=at)
        while self._peaks and self._peaks[-1].value <= self.online_now:
            self._peaks.pop()  # the first one left is the peak
        self._peaks.append(Moment(at, self.online_now))
        remember(self._arrivals, Moment(at, 1.0))
        self._prompts.append(prompt_tokens)
        self._typical_prompt = int(median(self._prompts))
        self._prompt_at = at

    def tokens(self, requests: Iterable[str], *, at: float) -> None:
        """Note requests that got one or more tokens; only online ones are counted."""
        followed = self._last_token_at
        gaps: dict[float, int] = {}  # time of the last token -> number of requests
        for request in requests:
            last = followed.get(request)
            if last is not None:
                gaps[last] = gaps.get(last, 0) + 1
            elif (arrived := self._arrived_at.pop(request, None)) is not None:
                self.online_requests += 1
                remember(self._ttft_ms, Moment(at, (at - arrived) * 1e3))
                self._accountant.ttft.note((at - arrived) * 1e3)
                self.receipt.answered(arrived=arrived, at=at)
            else:
                continue
            followed[request] = at
        for last, count in gaps.items():
            remember(self._tbt_ms, Moment(at, (at - last) * 1e3, count))
            self._accountant.tbt.note((at - last) * 1e3, count)
            self.receipt.gap(count, last=last, at=at)

    def answered(self, request: str) -> bool:
        """True if the online request has its first token."""
        return request in self._last_token_at

    def finished(self, request: str) -> None:
        """Forget a finished request."""
        if (arrived := self._arrived_at.pop(request, None)) is not None:
            self.receipt.gone(arrived=arrived)
        self._last_token_at.pop(request, None)

    def offline(self, tokens: int, *, at: float) -> None:
        """Note computed tokens of offline requests."""
        self.offline_tokens += tokens
        remember(self._offline_tokens, Moment(at, tokens))
        if self._offline_since is None:
            self._offline_since = at

    def report(self, *, now: float) -> dict[str, Any]:
        """Report on the last 60 s, for JSON."""
        for window in (self._ttft_ms, self._tbt_ms, self._offline_tokens):
            forget(window, now=now)
        ttft_ms, tbt_ms = values(self._ttft_ms), values(self._tbt_ms)
        promises, slo = self.promises, self.promises.slo
        span_s = WINDOW_S if self._offline_since is None else min(WINDOW_S, now - self._offline_since)
        return {
            "online": {
                "requests": self.online_requests,
                "ttft_ms": quantiles(ttft_ms),
                "tbt_ms": quantiles(tbt_ms),
                "attainment": min(share(ttft_ms, slo.ttft_ms), share(tbt_ms, slo.tbt_ms)),
                "promises": {
                    name: kept(getattr(promises, name), ordered)
                    for name, ordered in zip(LATENCIES, (ttft_ms, tbt_ms), strict=True)
                },
            },
            "offline": {
                "tokens": self.offline_tokens,
                "tokens_per_s": sum(moment.value for moment in self._offline_tokens) / max(span_s, 1.0),
            },
        }


def remember(window: deque[Moment], moment: Moment) -> None:
    """Add a moment, and drop old ones: the next report may be far away."""
    window.append(moment)
    forget(window, now=moment.at)


def forget(window: deque[Moment], *, now: float) -> None:
    """Drop moments older than the window."""
    while window and window[0].at < now - WINDOW_S:
        window.popleft()


def values(moments: deque[Moment]) -> list[float]:
    """Sorted values, each as often as it was measured; fast, since it runs between two iterations."""
    ordered: list[float] = []
    for moment in sorted(moments, key=lambda moment: moment.value):
        ordered += [moment.value] * moment.times
    return ordered


def quantiles(ordered: list[float]) -> dict[str, float | None]:
    """P50 and P99 of sorted values."""
    return {name: at_rank(ordered, q) for name, q in (("p50", 0.5), ("p99", 0.99))}


def at_rank(ordered: list[float], q: float) -> float | None:
    """Smallest value that at least a share `q` of the values does not exceed."""
    return ordered[max(0, min(len(ordered) - 1, -int(-q * len(ordered) // 1) - 1))] if ordered else None


def kept(promised: Mapping[str, float], ordered: list[float]) -> dict[str, Any]:
    """Each promise beside these sorted latencies, for JSON; `seen_ms` is None without latencies."""
    mean_ms = sum(ordered) / len(ordered) if ordered else None
    seen = {name: mean_ms if name == MEAN else at_rank(ordered, rank(name)) for name in promised}
    return {
        name: {"promised_ms": ms, "seen_ms": seen[name], "kept": (seen[name] or 0.0) <= ms}
        for name, ms in promised.items()
    }


def share(ordered: list[float], limit: float) -> float:
    """Share of values within the limit; 1 without values."""
    return bisect_right(ordered, limit) / len(ordered) if ordered else 1.0
