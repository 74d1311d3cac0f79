"""Expiry of other owners' leases, judged by this process's monotonic clock.

The wall time at which a lease says it ends is for people: clocks may be set, and clocks of two machines differ. A
lease is over when this process has watched it for its whole length without a renewal.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from conserve.store.books.leases import Sign

JUMP_S = 5.0  # a clock that is slowed down or sped up gains less between two looks


@dataclass(slots=True)
class LeaseSilence:
    """Time for which one lease was not renewed."""

    sign: Sign
    looked_at: float
    seconds: float = 0.0


class Expiry:
    """Watches leases; the time between two looks counts for half a lease's length at most.

    So one late look never ends a lease: if this process was suspended together with the lease's owner, the owner
    has renewed the lease by the next look.
    """

    def __init__(self, lease_s: float, monotonic: Callable[[], float]) -> None:
        self._lease_s, self._monotonic = lease_s, monotonic
        self._watched: dict[int, LeaseSilence] = {}

    def over(self, signs: Iterable[Sign]) -> list[Sign]:
        """Look at the signs of all leases; returns the signs of leases that are over."""
        now = self._monotonic()
        self._watched = {sign.epoch: self._watch(sign, now) for sign in signs}
        watched = self._watched.values()
        return [each.sign for each in watched if each.seconds >= self._length_s(each.sign)]

    def _watch(self, sign: Sign, now: float) -> LeaseSilence:
        before = self._watched.get(sign.epoch)
        if before is None or before.sign != sign:
            return LeaseSilence(sign, now)
        counts = min(now - before.looked_at, self._length_s(sign) / 2)
        return LeaseSilence(sign, now, before.seconds + counts)

    def _length_s(self, sign: Sign) -> float:
        """Length of a lease; this process's own for a lease of an earlier version, which has none."""
        return self._lease_s if sign.lease_s is None else sign.lease_s


class WallClock:
    """Notices when the wall clock is set."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._ahead_s = self._now_ahead_s()

    def _now_ahead_s(self) -> float:
        return self._clock() - self._monotonic()

    def set_by(self) -> float | None:
        """Seconds by which the clock was set since the last call, negative for back; None if it was not."""
        before, self._ahead_s = self._ahead_s, self._now_ahead_s()
        by = self._ahead_s - before
        return by if abs(by) > JUMP_S else None
