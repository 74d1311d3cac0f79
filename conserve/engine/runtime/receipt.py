"""The harm receipt of a running server: live latencies with offline work and without it, on the user's own traffic.

Time is cut into slots. A few of them, drawn at random, are pauses: no offline token is computed. A few others are
drawn for comparison. Requests that arrive in a slot are followed to their first token, and gaps within it count.
A slot is the unit that is drawn, so it is the unit that intervals resample: latencies of one slot are alike.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any

import numpy as np

from conserve.engine.runtime.latency_bins import STEP, bin_of

SLOT_S = 5.0
SETTLE_S = 0.5  # start of a slot that is not counted: the iteration under way ends, and its queue is served
LONGEST_S = 15.0  # of a slot whose requests have no first token yet
EXPECTED_S = 30.0  # after a live request in which slots are drawn: a pause without traffic teaches nothing
SHARE = 0.01  # of the slots that are pauses
LARGEST_SHARE = 0.1
COMPARED = 4  # slots that are drawn for comparison for each pause
KEPT = 240  # newest slots of each kind
RESAMPLES = 200
COVERED = 0.95  # of the intervals
LEAST = 5  # slots of each kind with latencies, below which there is no interval
LEAST_FOR_P99 = 20  # and below which nothing is said of P99s
# Latencies of each kind for P99s: of a hundred, a P99 is the largest one, and longer the more there are.
LEAST_LATENCIES = 300
RANKS = {"p50": 0.5, "p99": 0.99}


@dataclass(slots=True)
class TimeSlot:
    """A span of time and the latencies in it, in bins."""

    start: float  # monotonic seconds
    pause: bool
    ttft: Counter[int] = field(default_factory=Counter)
    tbt: Counter[int] = field(default_factory=Counter)
    waiting: int = 0  # requests that arrived in it and have no first token yet
    ends: float = field(init=False)

    def __post_init__(self) -> None:
        self.ends = self.start + SLOT_S

    def covers(self, moment: float) -> bool:
        """True if what begins then counts."""
        return self.start + SETTLE_S <= moment < self.ends


class Receipt:
    """Draws the slots and keeps their latencies. Times are monotonic seconds, given by the caller."""

    def __init__(self, *, share: float = SHARE, dice: Random | None = None) -> None:
        self.share = share
        self._dice = dice or Random()
        self._slot: TimeSlot | None = None  # the one under way, if it was drawn
        self._slot_ends = 0.0
        self._live_at: float | None = None  # last arrival
        self._kept: dict[bool, deque[TimeSlot]] = {pause: deque(maxlen=KEPT) for pause in (True, False)}
        self._counted = {True: 0, False: 0}
        self._report: dict[str, Any] | None = None

    def restart(self) -> None:
        """Forget all slots: what follows is planned otherwise."""
        for slots in self._kept.values():
            slots.clear()
        self._slot, self._slot_ends, self._report = None, 0.0, None

    def pauses(self, *, offline: bool, now: float) -> bool:
        """True if no offline token is to be computed now; `offline` says if there is any."""
        if now >= self._slot_ends and not self._goes_on(now):
            self._close()
            self._slot, self._slot_ends = self._drawn(now) if offline else None, now + SLOT_S
        return self._slot is not None and self._slot.pause

    def skip(self, *, now: float) -> None:
        """Draw no slot now, since rows pause for another reason.

        A pause under way is dropped. A comparison ends with what it has: rows do most harm just before.
        """
        if self._slot is not None and self._slot.pause:
            self._slot = None
        if self._slot is not None:
            self._slot.ends = min(self._slot.ends, now)
        if not self._goes_on(now):
            self._close()
        self._slot_ends = now

    def arrived(self, *, at: float) -> None:
        """Note the arrival of a live request."""
        self._live_at = at
        if self._slot is not None and self._slot.covers(at):
            self._slot.waiting += 1

    def answered(self, *, arrived: float, at: float) -> None:
        """Note the first token of a live request."""
        if self._slot is not None and self._slot.covers(arrived):
            self._slot.waiting -= 1
            self._slot.ttft[bin_of((at - arrived) * 1e3)] += 1

    def tbt(self, count: int, *, last: float, at: float) -> None:
        """Note `count` tokens after those that came `last`."""
        if self._slot is not None and self._slot.covers(last):
            self._slot.tbt[bin_of((at - last) * 1e3)] += count

    def gone(self, *, arrived: float) -> None:
        """Note that a live request ended without a token."""
        if self._slot is not None and self._slot.covers(arrived):
            self._slot.waiting -= 1

    def report(self) -> dict[str, Any]:
        """P50 and P99 with and without offline work, their ratio and its interval, for JSON."""
        if self._report is None:
            with_it, without = self._kept[False], self._kept[True]
            self._report = {
                "pauses": self._counted[True],
                "compared": self._counted[False],
                "ttft_ms": compared([slot.ttft for slot in with_it], [slot.ttft for slot in without]),
                "tbt_ms": compared([slot.tbt for slot in with_it], [slot.tbt for slot in without]),
            }
        return self._report

    def _goes_on(self, now: float) -> bool:
        """True while requests of the slot wait for their first token: leaving the slow ones out would flatter."""
        slot = self._slot
        return slot is not None and slot.waiting > 0 and now < slot.start + LONGEST_S

    def _close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None and (slot.ttft or slot.tbt):
            self._kept[slot.pause].append(slot)
            self._counted[slot.pause] += 1
            self._report = None

    def _drawn(self, now: float) -> TimeSlot | None:
        if self._live_at is None or now - self._live_at > EXPECTED_S:
            return None
        drawn = self._dice.random()
        if drawn >= self.share * (1 + COMPARED):
            return None
        return TimeSlot(now, drawn < self.share)


def compared(with_it: Sequence[Mapping[int, int]], without: Sequence[Mapping[int, int]]) -> dict[str, Any]:
    """P50 and P99 of both, the ratio, and its bootstrap interval over slots; None of too few latencies."""
    with_it, without = ([one for one in slots if one] for slots in (with_it, without))
    if not with_it or not without:
        return dict.fromkeys(RANKS)
    lowest = min(chain(*with_it, *without))
    highest = max(chain(*with_it, *without))
    dice = np.random.default_rng(len(with_it) + len(without))
    tables = [table(slots, lowest, highest) for slots in (with_it, without)]
    here, there = (quantiles(counts, dice) for counts in tables)
    slots, latencies = (min(sizes) for sizes in zip(*[(len(one), one.sum()) for one in tables], strict=True))
    found: dict[str, Any] = {
        name: said(here[:, place], there[:, place], lowest, enough=slots >= LEAST)
        for place, name in enumerate(RANKS)
    }
    if slots < LEAST_FOR_P99 or latencies < LEAST_LATENCIES:
        found["p99"] = None
    return found


def table(slots: Sequence[Mapping[int, int]], lowest: int, highest: int) -> Any:
    """Latencies of each slot in each bin."""
    counts = np.zeros((len(slots), highest - lowest + 1))  # (slots, bins)
    for row, slot in enumerate(slots):
        for place, count in slot.items():
            counts[row, place - lowest] = count
    return counts


def quantiles(counts: Any, dice: np.random.Generator) -> Any:
    """Bins of the quantiles of all slots (first row), and of `RESAMPLES` draws of slots with replacement."""
    slots = len(counts)
    draws = dice.multinomial(slots, np.full(slots, 1 / slots), RESAMPLES)  # (resamples, slots)
    weights = np.vstack([np.ones(slots), draws])
    reached = np.cumsum(weights @ counts, axis=1)  # (1 + resamples, bins)
    total = reached[:, -1:]
    return np.stack([(reached >= rank * total).argmax(axis=1) for rank in RANKS.values()], axis=1)


def said(here: Any, there: Any, lowest: int, *, enough: bool) -> dict[str, float | None]:
    """One quantile with offline work and without, in ms, and their ratio."""
    ratios = np.exp(STEP * (here - there))
    low, high = np.quantile(ratios[1:], [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return {
        "with_ms": float(np.exp(STEP * (here[0] + lowest))),
        "without_ms": float(np.exp(STEP * (there[0] + lowest))),
        "ratio": float(ratios[0]),
        "low": float(low) if enough else None,
        "high": float(high) if enough else None,
    }
