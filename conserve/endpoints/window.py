"""How many rows a server bears beside its live requests: what it shows of pressure, and what follows from it.

Everything here is pure: no clock, no I/O. Additive increase and multiplicative decrease are those of TCP's
congestion avoidance (Chiu and Jain, 1989).
"""

import re
from collections import deque
from statistics import median
from typing import NamedTuple, Self

SLOWER = 1.5  # latency over the calm one that counts as pressure
READINGS = 5  # that make a median: one slow answer is none


class Window:
    """Rows in flight: one more for every calm look, half as many under pressure."""

    def __init__(self, *, low: int = 1, high: int) -> None:
        self.low, self.high = low, max(low, high)
        self.size = low

    def observe(self, pressed: bool) -> int:
        """Take one look into account; returns the new size, never outside `low` to `high`."""
        size = self.size // 2 if pressed else self.size + 1
        self.size = min(max(size, self.low), self.high)
        return self.size


class Latencies:
    """Tells whether a server has become slow: the last readings' median against the lowest there was."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=READINGS)
        self._lowest_s = float("inf")

    def observe(self, latency_s: float) -> bool:
        """Take one reading; returns whether the server is under pressure. The first ones set the scale."""
        self._recent.append(latency_s)
        now_s = median(self._recent)
        if len(self._recent) == READINGS:
            self._lowest_s = min(self._lowest_s, now_s)
        return now_s > SLOWER * self._lowest_s


class Metrics(NamedTuple):
    """What vLLM's /metrics page says, summed over its engines."""

    waiting: float  # requests in the scheduler's queue, ours among them
    first_tokens: float  # requests that have got their first token, ever
    first_token_s: float  # seconds that they waited for it, altogether

    @classmethod
    def read(cls, page: str) -> Self | None:
        """Read the page; None if it is not vLLM's."""
        waiting = total(page, "vllm:num_requests_waiting")
        if waiting is None:
            return None
        count = total(page, "vllm:time_to_first_token_seconds_count")
        seconds = total(page, "vllm:time_to_first_token_seconds_sum")
        return cls(waiting=waiting, first_tokens=count or 0.0, first_token_s=seconds or 0.0)


def total(page: str, name: str) -> float | None:
    """The sum of a metric over its labels; None if it does not occur."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", page, re.MULTILINE)
    return sum(map(float, values)) if values else None


class MetricsPressure:
    """Judges vLLM's own figures.

    Anything that waits is pressure: if it is one of our rows, there are more of them than the engine runs.
    """

    def __init__(self) -> None:
        self._latencies = Latencies()
        self._last: Metrics | None = None

    def observe(self, metrics: Metrics) -> bool:
        """Take one look; returns whether the server is under pressure."""
        last, self._last = self._last, metrics
        slow = False
        if last is not None and metrics.first_tokens > last.first_tokens:
            answered = metrics.first_tokens - last.first_tokens
            slow = self._latencies.observe((metrics.first_token_s - last.first_token_s) / answered)
        return slow or metrics.waiting > 0
