"""Pauses of rows for the sake of a promise that they break (docs/adr/0015).

Where a promise is hardly longer than live requests take alone, rows that add a tenth break it. So rows pause once
they are to blame for more late latencies than the promise allows, until latencies in time have made up for these.
"""

from bisect import bisect_left
from collections.abc import Mapping

from conserve.engine.policy.promises import rank
from conserve.engine.runtime.credit import QuantileAccount

DEBT = 6.0  # iterations whose late latencies are made up for at most
LONGEST_S = 600.0  # of a pause: rows in flight have an hour for their answers
KEPT = 8192  # iterations with rows whose time is known


class Pausing:
    """Pauses for the largest promise of one latency. Times are monotonic seconds, given by the caller."""

    def __init__(self, named: Mapping[str, float], bound_ms: float) -> None:
        """`named` are the promises by name, and `bound_ms` is the largest of them in the engine."""
        self._rank = max(map(rank, named), default=0.0)
        self._account = self._new_account(bound_ms)
        self._since: float | None = None  # start of the pause under way

    def on(self, *, now: float) -> bool:
        """True while rows are to pause, which is `LONGEST_S` at most, whatever comes meanwhile."""
        return self._since is not None and now < self._since + LONGEST_S

    def set_bound(self, bound_ms: float) -> None:
        """Hold latencies against this bound from now on."""
        self._account.bound_ms = bound_ms

    def note(self, ms: float, count: int, concurrent: int, *, rows_ms: float, at: float) -> None:
        """Note `count` latencies of `ms`, of which rows took `rows_ms`, that ended `at` this time.

        Up to `concurrent` requests had one at once. One that would be late without the rows too says nothing.
        """
        if self._since is not None and not self.on(now=at):
            self._begin_anew()
        if not self._rank or ms - rows_ms > self._account.bound_ms:
            return
        self._account.note(ms, count, concurrent)
        if self._since is None:
            self._since = at if self._account.overdrawn else None
        elif self._account.settled:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._since, self._account = None, self._new_account(self._account.bound_ms)

    def _new_account(self, bound_ms: float) -> QuantileAccount:
        return QuantileAccount(self._rank, bound_ms, debt=DEBT)


class RowsTime:
    """The time that rows took of the newest iterations. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = [0.0]  # seconds of rows until the start of each iteration, and until now

    def note(self, start: float, end: float, rows_s: float) -> None:
        """Note an iteration of which rows took so many seconds."""
        if rows_s <= 0 or end <= start:
            return
        self._starts.append(start)
        self._ends.append(end)
        self._before.append(self._before[-1] + rows_s)
        if len(self._ends) == 2 * KEPT:
            for several in (self._starts, self._ends, self._before):
                del several[:KEPT]

    def between(self, begin: float, end: float) -> float:
        """Seconds of rows between two moments, spread evenly over each iteration."""
        return self._until(end) - self._until(begin)

    def _until(self, moment: float) -> float:
        place = bisect_left(self._ends, moment)
        if place == len(self._ends) or moment <= self._starts[place]:
            return self._before[place]
        start, end = self._starts[place], self._ends[place]
        share = (moment - start) / (end - start)
        return self._before[place] + share * (self._before[place + 1] - self._before[place])
