"""What live clients got of late, as the engine core sees it, and the offline tokens beside them."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

from conserve.engine.policy.view import Slo

WINDOW_S = 60.0  # that a report covers
RECENT_PROMPTS = 64  # of which the median is a typical prompt


class Moment(NamedTuple):
    """Something measured at a time."""

    at: float  # monotonic seconds
    value: float
    times: int = 1  # that the same was measured


class Traffic:
    """Rolling windows over the last minute. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._ttft_ms: deque[Moment] = deque()
        self._tbt_ms: deque[Moment] = deque()
        self._offline_tokens: deque[Moment] = deque()
        self._offline_since: float | None = None
        self._arrived_at: dict[str, float] = {}  # online requests without a token yet
        self._last_token_at: dict[str, float] = {}
        self._peaks: deque[Moment] = deque()  # of online requests at once, each higher than all after it
        self._arrivals: deque[Moment] = deque()
        self._prompts: deque[int] = deque(maxlen=RECENT_PROMPTS)
        self._typical_prompt = 0
        self._prompt_at = 0.0
        self.online_requests = 0
        self.offline_tokens = 0

    def typical_prompt(self, *, now: float) -> int:
        """Median tokens of recent online prompts; 0 if the last minute brought none."""
        return self._typical_prompt if now < self._prompt_at + WINDOW_S else 0

    def arrivals_per_s(self, *, now: float) -> float:
        """Online requests a second in the last minute."""
        forget(self._arrivals, now=now)
        return len(self._arrivals) / WINDOW_S

    @property
    def online_now(self) -> int:
        """Online requests in the engine."""
        return len(self._arrived_at) + len(self._last_token_at)

    def expected(self, *, now: float) -> int:
        """How many more online requests the last minute had at once than there are now."""
        while self._peaks and self._peaks[0].at < now - WINDOW_S:
            self._peaks.popleft()
        return max(0, int(self._peaks[0].value) - self.online_now) if self._peaks else 0

    def arrived(self, request: str, prompt_tokens: int, *, at: float) -> None:
        """An online request has arrived."""
        self._arrived_at[request] = at
        while self._peaks and self._peaks[-1].value <= self.online_now:
            self._peaks.pop()  # the first of them is the most there were at once
        self._peaks.append(Moment(at, self.online_now))
        remember(self._arrivals, Moment(at, 1.0))
        self._prompts.append(prompt_tokens)
        self._typical_prompt = int(median(self._prompts))
        self._prompt_at = at

    def tokens(self, requests: Iterable[str], *, at: float) -> None:
        """These requests got a token each, or several at once; only online ones are followed."""
        followed = self._last_token_at
        gaps: dict[float, int] = {}  # since which moment -> how many of them
        for request in requests:
            last = followed.get(request)
            if last is not None:
                gaps[last] = gaps.get(last, 0) + 1
            elif (arrived := self._arrived_at.pop(request, None)) is not None:
                self.online_requests += 1
                remember(self._ttft_ms, Moment(at, (at - arrived) * 1e3))
            else:
                continue
            followed[request] = at
        for last, count in gaps.items():
            remember(self._tbt_ms, Moment(at, (at - last) * 1e3, count))

    def answered(self, request: str) -> bool:
        """Whether the online request has its first token."""
        return request in self._last_token_at

    def finished(self, request: str) -> None:
        """The request is over."""
        self._arrived_at.pop(request, None)
        self._last_token_at.pop(request, None)

    def offline(self, tokens: int, *, at: float) -> None:
        """So many tokens of offline requests were computed."""
        self.offline_tokens += tokens
        remember(self._offline_tokens, Moment(at, tokens))
        if self._offline_since is None:
            self._offline_since = at

    def report(self, slo: Slo, *, now: float) -> dict[str, Any]:
        """The last minute, for JSON."""
        for window in (self._ttft_ms, self._tbt_ms, self._offline_tokens):
            forget(window, now=now)
        ttft_ms, tbt_ms = values(self._ttft_ms), values(self._tbt_ms)
        span_s = WINDOW_S if self._offline_since is None else min(WINDOW_S, now - self._offline_since)
        return {
            "online": {
                "requests": self.online_requests,
                "ttft_ms": quantiles(ttft_ms),
                "tbt_ms": quantiles(tbt_ms),
                "attainment": min(share(ttft_ms, slo.ttft_ms), share(tbt_ms, slo.tbt_ms)),
            },
            "offline": {
                "tokens": self.offline_tokens,
                "tokens_per_s": sum(moment.value for moment in self._offline_tokens) / max(span_s, 1.0),
            },
        }


def remember(window: deque[Moment], moment: Moment) -> None:
    """Add a moment, and drop those that the window has left behind: it may be long until somebody asks."""
    window.append(moment)
    forget(window, now=moment.at)


def forget(window: deque[Moment], *, now: float) -> None:
    """Drop what is older than the window."""
    while window and window[0].at < now - WINDOW_S:
        window.popleft()


def values(moments: deque[Moment]) -> list[float]:
    """Sorted, each as often as it was measured; fast, since it runs between two iterations."""
    ordered: list[float] = []
    for moment in sorted(moments, key=lambda moment: moment.value):
        ordered += [moment.value] * moment.times
    return ordered


def quantiles(ordered: list[float]) -> dict[str, float | None]:
    """P50 and P99 of sorted values."""
    return {name: at_rank(ordered, q) for name, q in (("p50", 0.5), ("p99", 0.99))}


def at_rank(ordered: list[float], q: float) -> float | None:
    """The smallest value that a share of `q` does not exceed."""
    return ordered[max(0, min(len(ordered) - 1, -int(-q * len(ordered) // 1) - 1))] if ordered else None


def share(ordered: list[float], limit: float) -> float:
    """How many of the values stay within the limit; all of none."""
    return bisect_right(ordered, limit) / len(ordered) if ordered else 1.0
