"""Rates of harvesting: what was seen by quarter of an hour, and possible courses of the hours to come. Pure.

A course takes, a few hours at a time, the rates of an earlier day at the same time of day; the same weekday counts
more. It begins at the present rate, whose difference to the earlier day's fades within hours.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from random import Random
from statistics import fmean

from conserve.store.books.slots import SLOT_S, HarvestedQuarter

DAY = 96  # slots
WEEK = 7 * DAY
LEAST_BUSY_S = 15.0  # of a slot whose rate counts
MOST_BUSY_S = SLOT_S + 1.0
MOST_TOKENS = 1e12  # of a slot
MOST_DAYS = 8 * 7  # back
HORIZON_DAYS = 14
HORIZON_S = HORIZON_DAYS * 86_400.0
BLOCK = 16  # slots that a course takes of one earlier day
SAME_WEEKDAY = 3.0  # weight of a day a number of weeks ago, beside 1 of any other
RECENT = 4  # slots that the present rate is the mean of
FADE = 6.0  # slots after which the present's difference to an earlier day has fallen to 1/e
DRIFT = 0.03  # standard deviation of a course's factor: days are not alike
DRIFT_OF_ONE_DAY = 0.1  # more of it, divided by the square root of the days seen


@dataclass(frozen=True, slots=True)
class Rates:
    """Harvested tokens per second by slot; slots in which hardly any row ran are left out."""

    by_slot: Mapping[int, float]
    _usual: dict[int, float] = field(default_factory=dict, compare=False, repr=False)  # asked for before

    @classmethod
    def of(cls, seen: Sequence[HarvestedQuarter]) -> "Rates":
        """Rates of quarters of an hour; figures that only damage explains are left out."""
        return cls(
            {
                slot: tokens / busy_s
                for slot, tokens, busy_s in seen
                if LEAST_BUSY_S <= busy_s <= MOST_BUSY_S and 0 <= tokens < MOST_TOKENS
            }
        )

    def mean(self, now: float) -> float | None:
        """Rate to expect over the next day, in tokens/s; None before any was seen."""
        if not self.by_slot:
            return None
        first = int(now // SLOT_S)
        return fmean(self.usual(slot) for slot in range(first, first + DAY))

    def usual(self, slot: int) -> float:
        """Mean rate at this time of day, the same weekday counting more; the mean of all if it was never seen."""
        if slot not in self._usual:
            self._usual[slot] = self._mean_at(slot)
        return self._usual[slot]

    def _mean_at(self, slot: int) -> float:
        weighted = [(weight, self.by_slot[slot - back]) for back, weight in self.days_before(slot)]
        if not weighted:
            return sum(self.by_slot.values()) / len(self.by_slot)
        return sum(weight * rate for weight, rate in weighted) / sum(weight for weight, _ in weighted)

    def days_before(self, slot: int) -> list[tuple[int, float]]:
        """Slots that earlier days lie back at which this time of day was seen, with their weights."""
        return [
            (back, SAME_WEEKDAY if back % WEEK == 0 else 1.0)
            for back in range(DAY, (MOST_DAYS + HORIZON_DAYS) * DAY + 1, DAY)
            if slot - back in self.by_slot
        ]

    def recent(self, slot: int, back: int = 0) -> float | None:
        """Mean rate of the slots before this one, so many slots earlier; None if none of them was seen."""
        found = [self.by_slot[at - back] for at in range(slot - RECENT, slot) if at - back in self.by_slot]
        return fmean(found) if found else None


class Course:
    """One possible course: tokens harvested from now on, in cumulation; it grows as far as it is asked."""

    def __init__(self, rates: Rates, *, now: float, seed: int) -> None:
        self._rates, self._now, self._dice = rates, now, Random(seed)
        self._first = int(now // SLOT_S)
        days = len(rates.by_slot) / DAY
        drift = sqrt(DRIFT**2 + DRIFT_OF_ONE_DAY**2 / max(days, 0.25))
        self._factor = exp(self._dice.gauss(0.0, drift))
        self._most = 1.1 * max(rates.by_slot.values(), default=0.0)
        self._seen = sorted(rates.by_slot)
        self._present = rates.recent(self._first + 1)
        self._ends = [now]
        self._tokens = [0.0]
        self._back, self._gap = 0, 0.0

    def when(self, tokens: float) -> float:
        """Moment at which so many tokens are done; infinite beyond the horizon."""
        while self._tokens[-1] < tokens:
            if self._ends[-1] - self._now > HORIZON_S:
                return float("inf")
            self._grow()
        place = bisect_left(self._tokens, tokens)
        if place == 0:
            return self._now
        before, after = self._tokens[place - 1], self._tokens[place]
        begin, end = self._ends[place - 1], self._ends[place]
        return begin + (end - begin) * (tokens - before) / (after - before)

    def by(self, moment: float) -> float:
        """Tokens done by a moment."""
        while self._ends[-1] < moment and self._ends[-1] - self._now <= HORIZON_S:
            self._grow()
        place = bisect_left(self._ends, moment)
        if place == 0:
            return 0.0
        if place == len(self._ends):
            return self._tokens[-1]
        begin, end = self._ends[place - 1], self._ends[place]
        before, after = self._tokens[place - 1], self._tokens[place]
        return before + (after - before) * (moment - begin) / (end - begin)

    def _grow(self) -> None:
        """Add the next slot."""
        step = len(self._ends) - 1
        slot = self._first + step
        if step % BLOCK == 0:
            self._choose_day(slot)
        donor = self._rates.by_slot.get(slot - self._back)
        if donor is None:
            donor = self._rates.usual(slot)
        rate = (donor + self._gap * exp(-step / FADE)) * self._factor
        end = float((slot + 1) * SLOT_S)
        self._tokens.append(self._tokens[-1] + max(0.0, min(rate, self._most)) * (end - self._ends[-1]))
        self._ends.append(end)

    def _choose_day(self, slot: int) -> None:
        """Choose the day whose rates come next: an earlier one, or any stretch where none was seen at this time."""
        days = self._rates.days_before(slot)
        if days:
            backs, weights = zip(*days, strict=True)
            (self._back,) = self._dice.choices(backs, weights)
        else:
            self._back = slot - self._dice.choice(self._seen)
        if slot == self._first:
            then = self._rates.recent(slot + 1, self._back)
            known = self._present is not None and then is not None
            self._gap = (self._present or 0.0) - (then or 0.0) if known else 0.0
