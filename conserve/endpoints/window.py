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
PATIENCE = 4.0  # times the borne latency after which a small request tells enough
LATEST = 10  # readings whose median is the latency of late: single readings differ twofold
SHORTEST_S = 1e-6
FIRST = 5  # readings that tell the calm latency at first, and that a cut waits for after another one
LONG = 60  # readings whose median is the calm latency if it is lower
FEW_ROWS = 2  # that make no pressure
AT_FEW = 15  # readings beside them that tell the calm latency anew
DEEPEST = 0.25  # part of the window that a cut leaves at least
NEAR, PAST = 0.7, 1.25  # parts of the size that was cut, between which rows come back slowly
SLOWLY = 0.2  # rows that a calm reading adds there
SMALL = 0.25  # part of the largest window below which one is small
SMALL_FOR, LONGEST_SMALL = 600, 7200  # readings of a small window, after which it is held at few rows
HELD = 300  # readings at most, until enough are beside few rows
ALONE_S, LONGEST_ALONE_S = 60.0, 1800.0  # without a sign of others, after which there are none
SOON = 10  # times as long without others, within which they come back soon
IN_TRANSIT = 2  # answers at least that may be on their way
ROWS_IN_TRANSIT = 8  # of which one may be on its way
LOOKS = 5  # of which one at least finds next to no answer on its way


class CalmLatency:
    """Compares the latency of late with the calm one: that beside few rows, or a lower one of many readings.

    A reading beside more rows never raises the calm latency, or rows would make room for themselves.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._long: deque[float] = deque(maxlen=LONG)
        self._at_few: deque[float] = deque(maxlen=AT_FEW)
        self.borne_s = inf

    def observe(self, latency_s: float, *, rows: int) -> float:
        """Take one reading beside so many rows; returns the latency of late in times of the borne one."""
        self._latest.append(latency_s)
        self._long.append(latency_s)
        if rows <= FEW_ROWS:
            self._at_few.append(latency_s)
        if rows <= FEW_ROWS and self.is_told_anew:
            self._bear(median(self._at_few))
            self._long.clear()
        elif len(self._long) == LONG or len(self._latest) == FIRST:
            self._lower_to(median(self._long))
        return median(self._latest) / self.borne_s

    @property
    def is_told_anew(self) -> bool:
        """True if the readings beside few rows are enough to tell the calm latency."""
        return len(self._at_few) == AT_FEW

    def forget_few(self) -> None:
        """Have the calm latency told by readings to come."""
        self._at_few.clear()

    def _lower_to(self, calm_s: float) -> None:
        if SLOWER * calm_s < self.borne_s:
            self._bear(calm_s)
            self._at_few.clear()

    def _bear(self, calm_s: float) -> None:
        self.borne_s = SLOWER * max(calm_s, SHORTEST_S)


class CongestionWindow:
    """Number of rows in flight, between 1 and `high`.

    A calm reading adds a row, near the size that was cut last only a part of one. Under pressure the window is cut
    to what the latency says. A window that stays small is held at few rows for some readings: prompts may be longer
    by now, or clients more.
    """

    def __init__(self, *, high: int) -> None:
        self.high = max(1, high)
        self._scales: dict[Hashable, CalmLatency] = {}
        self._small_for, self._small_until = 0, SMALL_FOR
        self.start_over()

    def start_over(self) -> None:
        """Begin with one row again; what is known of calm latencies stays."""
        self._exact = 1.0
        self._cut_at = self._places = inf  # size that was cut, and rows that found a place at once
        self._since_cut = FIRST  # readings
        self._held = 0  # readings that are left of a hold

    @property
    def size(self) -> int:
        """Rows that may be in flight."""
        return min(FEW_ROWS, self.high) if self._held else int(self._exact)

    def patience_s(self, of: Hashable) -> float:
        """Seconds after which a small request of this kind tells enough; infinite while nothing is known."""
        return PATIENCE * self._scales[of].borne_s if of in self._scales else inf

    def observe(self, of: Hashable, latency_s: float, *, rows: int, moves: bool = True) -> int:
        """Take a latency of this kind of requests beside so many rows; returns the new size.

        An infinite one is trouble. Unless it `moves` the window, the reading only tells the scale.
        """
        if latency_s == inf:
            return self.press()
        scale = self._scales.setdefault(of, CalmLatency())
        times = scale.observe(latency_s, rows=rows)
        if self._held:
            self._held = 0 if scale.is_told_anew else self._held - 1
        elif moves:
            self._move(times, grows=latency_s <= scale.borne_s)
            self._look_whether_it_stays_small()
        return self.size

    def press(self) -> int:
        """Halve the window: requests wait, the server refuses rows, or it tells nothing; returns the new size."""
        self._cut(0.5)
        return self.size

    def fill(self, *, rows: int, queued: float) -> int:
        """Go to the size that fills a server without other requests; some of our `rows` stand in its queue."""
        if queued:
            self._places = self._exact = max(1.0, rows - queued)
        else:
            self._exact = 2 * self._exact if 2 * self._exact <= self._places else self._exact + 1
        self._exact = min(float(self.high), self._exact)
        self._held, self._small_for, self._cut_at = 0, 0, inf
        return self.size

    def _move(self, times: float, *, grows: bool) -> None:
        self._since_cut += 1
        if times > 1:
            if self._since_cut > FIRST:  # the latency of late is of this size, for the most part
                self._cut(max(DEEPEST, 1 / times))
        elif grows:
            if self._exact > PAST * self._cut_at:  # which was no limit, or is none any more
                self._cut_at = inf
            near = self._exact > NEAR * self._cut_at
            self._exact = min(self.high, self._exact + (SLOWLY if near else 1))

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
    process, or lack requests or answers of ours, as of one replica behind a balancer, nothing is known: others may
    be there. Where they come back soon after there were none, it takes longer the next time until there are none.
    """

    def __init__(self) -> None:
        self._looked_at = self._seen_at = -inf
        self._alone_since = inf
        self._alone_s = ALONE_S
        self._started_at: float | None = None
        self._foreign: deque[float] = deque(maxlen=int(ALONE_S))  # answers that were not ours, by look
        # Requests that a page shows, and rows of ours then.
        self._shown: deque[tuple[float, int]] = deque(maxlen=2 * LOOKS)

    def observe(self, metrics: ServerMetrics, before: Ours, after: Ours, *, now: float) -> bool:
        """Take a reading, and the requests of ours before and after it; True unless there are no others."""
        self._foreign.append(metrics.finished - after.answered)
        first = now - self._looked_at > ALONE_S or metrics.started_at != self._started_at
        self._looked_at, self._started_at = now, metrics.started_at
        here = metrics.running + metrics.waiting
        most, least = max(before.in_flight, after.in_flight), min(before.in_flight, after.in_flight)
        self._shown.append((here, least))
        if first or here > most or self._lacks_rows() or self._answers_differ():
            self._see(now)
        elif now - self._seen_at >= self._alone_s:
            self._alone_since = min(self._alone_since, now)
        return now - self._seen_at < self._alone_s

    def forget(self) -> None:
        """Forget what was seen: others may come between two looks, or be refused in front of the server."""
        self._looked_at = -inf

    def _see(self, now: float) -> None:
        if self._alone_since < inf:
            soon = now - self._alone_since < SOON * self._alone_s
            self._alone_s = min(2 * self._alone_s, LONGEST_ALONE_S) if soon else ALONE_S
        self._seen_at, self._alone_since = now, inf
        self._foreign.clear()
        self._shown.clear()

    def _lacks_rows(self) -> bool:
        """True if the page has shown fewer rows than there are for longer than a slow engine takes to show them."""
        if len(self._shown) < 2 * LOOKS:
            return False
        shown, ours = max(here for here, _ in self._shown), min(rows for _, rows in self._shown)
        return shown < ours - IN_TRANSIT - ours // ROWS_IN_TRANSIT

    def _answers_differ(self) -> bool:
        """True if answers that are not ours have become more or fewer, but for those that are on their way."""
        if len(self._foreign) < 2 * LOOKS:
            return False
        seen = list(self._foreign)
        return abs(min(seen[-LOOKS:]) - min(seen[:LOOKS])) > IN_TRANSIT


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
