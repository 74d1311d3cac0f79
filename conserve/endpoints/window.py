"""Number of rows in flight that a server bears beside its live requests, by signs of pressure.

All code here is pure: no clock, no I/O. Additive increase and multiplicative decrease are those of TCP's
congestion avoidance (Chiu and Jain, 1989).
"""

import re
from collections import deque
from statistics import median
from typing import NamedTuple, Self

SLOWER = 1.5  # ratio to the calm latency that counts as pressure
READINGS = 5  # readings in a median, so that one slow answer does not count
SMALL = 0.25  # part of the largest window below which one is small
CALM_AGAIN = 600  # readings of a small window, after which those beside few rows set the scale anew
FEW_ROWS = 2  # that make no pressure
AT_FEW = 30  # readings beside them that may set the scale
FALLS_APART = 30  # readings at least from one restart to the next; counters of several replicas fall oftener
MOST_REPLICAS = 1000  # that are told apart, also those that are gone


class CongestionWindow:
    """Number of rows in flight: one more after every calm reading, half as many under pressure."""

    def __init__(self, *, high: int) -> None:
        self.high = max(1, high)
        self.size = 1
        self.small_for = 0  # readings

    def observe(self, pressed: bool) -> int:
        """Take one reading; returns the new size, between 1 and `high`."""
        size = self.size // 2 if pressed else self.size + 1
        self.size = min(max(size, 1), self.high)
        self.small_for = self.small_for + 1 if self.size < max(2, self.high * SMALL) else 0
        return self.size


class SlownessWindow:
    """Tells if a server has become slow: compares the last readings' median with the lowest median."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=READINGS)
        self._at_few: deque[float] = deque(maxlen=AT_FEW)
        self._lowest_s = float("inf")

    def observe(self, latency_s: float, *, rows: int = FEW_ROWS + 1) -> bool:
        """Take one reading beside so many rows; True if the server is under pressure.

        The first `READINGS` set the scale.
        """
        self._recent.append(latency_s)
        if rows <= FEW_ROWS:
            self._at_few.append(latency_s)
        now_s = median(self._recent)
        if len(self._recent) == READINGS:
            self._lowest_s = min(self._lowest_s, now_s)
        return now_s > SLOWER * self._lowest_s

    def rescale(self) -> None:
        """Let readings beside few rows set the scale: prompts may be longer by now, or clients more.

        Readings beside more rows must not, or rows would make room for themselves.
        """
        if len(self._at_few) == AT_FEW:
            self._lowest_s = max(self._lowest_s, median(self._at_few))


class ServerMetrics(NamedTuple):
    """Figures of vLLM's /metrics page, summed over its engines."""

    waiting: float  # requests in the scheduler's queue, ours included
    first_tokens: float  # requests that have got their first token since the start
    first_token_s: float  # seconds that they waited for it, in total
    started_at: float | None = None  # of the process, as far as the page tells

    @classmethod
    def read(cls, page: str) -> Self | None:
        """Read the page; None if it is not vLLM's."""
        waiting = total(page, "vllm:num_requests_waiting")
        if waiting is None:
            return None
        count = total(page, "vllm:time_to_first_token_seconds_count")
        seconds = total(page, "vllm:time_to_first_token_seconds_sum")
        return cls(
            waiting=waiting,
            first_tokens=count or 0.0,
            first_token_s=seconds or 0.0,
            started_at=total(page, "process_start_time_seconds"),
        )


def total(page: str, name: str) -> float | None:
    """Sum of a metric over its labels; None if the page lacks it."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", page, re.MULTILINE)
    return sum(map(float, values)) if values else None


class Replica:
    """Latencies of one process, by consecutive readings of its counters."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.latencies = SlownessWindow()
        self._last = metrics

    def observe(self, metrics: ServerMetrics, *, rows: int) -> bool | None:
        """Take a reading; True if first tokens have become slow, None if it is no later one of this process."""
        last, self._last = self._last, metrics
        answered = metrics.first_tokens - last.first_tokens
        first_token_s = metrics.first_token_s - last.first_token_s
        if answered < 0 or first_token_s < 0:
            return None
        return answered > 0 and self.latencies.observe(first_token_s / answered, rows=rows)


class MetricsPressure:
    """Judges pressure by vLLM's own figures.

    Any waiting request is pressure: if it is one of our rows, there are more of them than the engine runs. Behind a
    balancer each reading may come from another replica; the time of its start tells which.
    """

    def __init__(self) -> None:
        self._replicas: dict[float | None, Replica] = {}
        self._since_fall = FALLS_APART  # readings
        self.mixed = False  # True: these are figures of several replicas that look alike, which tell nothing

    def observe(self, metrics: ServerMetrics, *, rows: int = FEW_ROWS + 1) -> bool:
        """Take one reading beside so many rows; True if the server is under pressure."""
        slow = self._replica(metrics).observe(metrics, rows=rows)
        self._since_fall += 1
        if slow is None:
            self.mixed = self.mixed or self._since_fall < FALLS_APART
            self._since_fall = 0
        return bool(slow) or metrics.waiting > 0

    def _replica(self, metrics: ServerMetrics) -> Replica:
        if metrics.started_at not in self._replicas:
            if len(self._replicas) == MOST_REPLICAS:
                del self._replicas[next(iter(self._replicas))]
            self._replicas[metrics.started_at] = Replica(metrics)
        return self._replicas[metrics.started_at]

    def rescale(self) -> None:
        """Let readings beside few rows set the scale."""
        for replica in self._replicas.values():
            replica.latencies.rescale()


class Sending(NamedTuple):
    """A row's place among the rows that were sent to one server."""

    number: int
    answers: int  # of the server before


class SendingOrder:
    """Tells a row that waits behind others in a server's queue from one that takes long by itself.

    Servers with few places, such as Ollama and llama.cpp, answer rows in the order in which they come.
    """

    def __init__(self) -> None:
        self._sent = self._answers = 0
        self._last = 0  # number of the newest row that was answered
        self._unanswered: set[int] = set()  # rows behind it; those that were given up are left in

    def send(self) -> Sending:
        """Note that a row is sent."""
        self._sent += 1
        self._unanswered.add(self._sent)
        return Sending(self._sent, self._answers)

    def answered(self, row: Sending) -> None:
        """Note that a row was answered."""
        self._answers += 1
        self._last = max(self._last, row.number)
        self._unanswered = {number for number in self._unanswered if number > self._last}

    def waits(self, row: Sending) -> bool:
        """True if the server has answered since this row was sent, only rows before it, and another row is next."""
        is_next = min(self._unanswered, default=row.number) >= row.number
        return self._answers > row.answers and self._last < row.number and not is_next
