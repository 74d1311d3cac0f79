"""Number of rows in flight that a server bears beside requests of others, and whether there are any.

All code here is pure: no clock, no I/O. Additive increase and multiplicative decrease are those of TCP's
congestion avoidance (Chiu and Jain, 1989).
"""

import re
from collections import deque
from collections.abc import Hashable
from math import inf
from statistics import median
from typing import NamedTuple, Self

SLOWER = 1.5  # times the calm latency that are borne
LATEST = 10  # readings whose median is the latency of late: single readings differ twofold
SHORTEST_S = 1e-6
FIRST = 5  # readings that tell the calm latency at first, and that a cut waits for after another one
LONG = 60  # readings whose median is the calm latency if it is lower
FEW_ROWS = 2  # that make no pressure
AT_FEW = 15  # readings beside them that tell the calm latency anew
DEEPEST = 0.25  # part of the window that a cut leaves at least
NEAR, PAST, SLOWLY = (
    0.7,
    1.25,
    0.2,
)  # between these parts of the size that was cut, rows that a calm reading adds
SMALL = 0.25  # part of the largest window below which one is small
SMALL_FOR, LONGEST_SMALL = 600, 7200  # readings of a small window, after which it is held at few rows
HELD = 300  # readings at most, until enough are beside few rows
ALONE_S = 60.0  # without a sign of others, after which there are none
UNSEEN_S = 10.0  # between two looks, after which others may have come
IN_TRANSIT = 2  # answers at least that may be on their way
QUEUED_PART = 8  # one row in so many may wait in the server's queue, so that none of its places is empty


class CalmLatency:
    """Compares the latency of late with the calm one: that beside few rows, or a lower one of many readings.

    A reading beside more rows never raises the calm latency, or rows would make room for themselves.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._long: deque[float] = deque(maxlen=LONG)
        self._at_few: deque[float] = deque(maxlen=AT_FEW)
        self._calm_s = inf

    def observe(self, latency_s: float, *, rows: int) -> float:
        """Take one reading beside so many rows; returns the latency of late in times of the borne one."""
        self._latest.append(latency_s)
        self._long.append(latency_s)
        if rows <= FEW_ROWS:
            self._at_few.append(latency_s)
        if self.is_told_anew:
            self._calm_s = median(self._at_few)
            self._long.clear()
        elif len(self._long) == LONG or len(self._latest) == FIRST:
            self._calm_s = min(self._calm_s, median(self._long))
        late_s = median(self._latest)
        return inf if late_s == inf else late_s / (SLOWER * max(self._calm_s, SHORTEST_S))

    @property
    def is_told_anew(self) -> bool:
        """True if the readings beside few rows are enough to tell the calm latency."""
        return len(self._at_few) == AT_FEW

    def forget_few(self) -> None:
        """Have the calm latency told by readings to come."""
        self._at_few.clear()


class CongestionWindow:
    """Number of rows in flight, between 1 and `high`.

    A calm reading adds a row, near the size that was cut last only a part of one. Under pressure the window is cut
    to what the latency says. A window that stays small is held at few rows for some readings: prompts may be longer
    by now, or clients more.
    """

    def __init__(self, *, high: int) -> None:
        self.high = max(1, high)
        self._exact = 1.0
        self._scales: dict[Hashable, CalmLatency] = {}
        self._cut_at = inf  # size
        self._since_cut = FIRST  # readings
        self._small_for, self._small_until = 0, SMALL_FOR
        self._held = 0  # readings that are left of a hold

    @property
    def size(self) -> int:
        """Rows that may be in flight."""
        return min(FEW_ROWS, self.high) if self._held else int(self._exact)

    def observe(self, of: Hashable, latency_s: float, *, rows: int, moves: bool = True) -> int:
        """Take a latency of this kind of requests beside so many rows; returns the new size.

        Unless it `moves` the window, the reading only tells the scale.
        """
        scale = self._scales.setdefault(of, CalmLatency())
        times = scale.observe(latency_s, rows=rows)
        if self._held:
            self._held = 0 if scale.is_told_anew else self._held - 1
        elif moves:
            self._move(times)
            self._look_whether_it_stays_small()
        return self.size

    def press(self) -> int:
        """Halve the window: the server refuses rows, or tells nothing; returns the new size."""
        self._cut(0.5)
        return self.size

    def fill(self, *, rows: int, waiting: float) -> int:
        """Go to the size that fills a server without other requests; some of our `rows` there wait in its queue."""
        few = 1 + rows // QUEUED_PART
        more = 2 * self._exact if not waiting else self._exact + 1
        self._exact = float(min(self.high, more if waiting <= few else max(1, rows - waiting + few)))
        self._held, self._small_for, self._cut_at = 0, 0, inf
        return self.size

    def _move(self, times: float) -> None:
        self._since_cut += 1
        if times <= 1:
            if self._exact > PAST * self._cut_at:  # which was no limit, or is none any more
                self._cut_at = inf
            near = self._exact > NEAR * self._cut_at
            self._exact = min(self.high, self._exact + (SLOWLY if near else 1))
        elif self._since_cut > FIRST:  # the latency of late is of this size, for the most part
            self._cut(max(DEEPEST, 1 / times))

    def _cut(self, part: float) -> None:
        self._cut_at, self._since_cut = self._exact, 0
        self._exact = max(1.0, self._exact * part)

    def _look_whether_it_stays_small(self) -> None:
        """Hold a window that has been small for long, ever more rarely, until the calm latencies are told anew."""
        self._small_for = self._small_for + 1 if self._exact < self.high * SMALL else 0
        if self._small_for >= self._small_until:
            self._small_for, self._small_until = 0, min(2 * self._small_until, LONGEST_SMALL)
            self._held = HELD
            for scale in self._scales.values():
                scale.forget_few()


class ServerMetrics(NamedTuple):
    """Figures of vLLM's /metrics page, summed over its engines; requests of ours are among them."""

    running: float  # requests
    waiting: float  # requests in the scheduler's queue
    finished: float  # requests with a whole answer, since the start
    started_at: float | None = None  # of the process, as far as the page tells

    @classmethod
    def read(cls, page: str) -> Self | None:
        """Read the page; None if it is not vLLM's."""
        waiting = total(page, "vllm:num_requests_waiting")
        if waiting is None:
            return None
        return cls(
            running=total(page, "vllm:num_requests_running") or 0.0,
            waiting=waiting,
            finished=total(page, "vllm:request_success_total", 'finished_reason="(?!abort|error)') or 0.0,
            started_at=total(page, "process_start_time_seconds"),
        )


def total(page: str, name: str, label: str = "") -> float | None:
    """Sum of a metric over its labels, or over those in which a pattern is found; None if the page lacks it."""
    found = re.findall(rf"^{re.escape(name)}(\{{[^}}]*\}})? (\S+)", page, re.MULTILINE)
    values = [float(value) for labels, value in found if re.search(label, labels)]
    return sum(values) if values else None


class Ours(NamedTuple):
    """Requests of ours at one server."""

    in_flight: int
    answered: int


class OtherRequests:
    """Tells by vLLM's figures whether requests of others come to a server.

    More requests than ours are others', and so are more answers than ours. Where the figures are not of one
    process, or lack answers of ours, as of one replica behind a balancer, nothing is known: others may be there.
    """

    def __init__(self) -> None:
        self._looked_at = self._seen_at = -inf
        self._started_at: float | None = None
        self._foreign: deque[tuple[float, float]] = deque()  # when, and answers that were not ours by then

    def observe(self, metrics: ServerMetrics, before: Ours, after: Ours, *, now: float) -> bool:
        """Take a reading, and the requests of ours before and after it; True unless there are no others."""
        is_first = now - self._looked_at > UNSEEN_S or metrics.started_at != self._started_at
        if is_first:
            self._foreign.clear()
        self._looked_at, self._started_at = now, metrics.started_at
        in_flight = max(before.in_flight, after.in_flight)
        on_their_way = IN_TRANSIT + in_flight // QUEUED_PART
        more = metrics.running + metrics.waiting > in_flight
        foreign, least = metrics.finished - after.answered, metrics.finished - before.answered
        if is_first or more or not self._within(on_their_way, foreign):
            self._seen_at = now
            self._foreign.clear()
        while self._foreign and self._foreign[0][0] < now - ALONE_S:
            self._foreign.popleft()
        self._foreign.append((now, least))
        return now - self._seen_at < ALONE_S

    def _within(self, most: float, foreign: float) -> bool:
        """True if answers that are not ours have become neither more nor fewer than those on their way explain."""
        return not self._foreign or abs(foreign - self._foreign[0][1]) <= most


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
