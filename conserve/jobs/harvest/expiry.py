"""Which leases are over, and whether the clock was set: by this process's monotonic clock.

A lease names the wall time at which it ends, for people. It is not judged by that: the clock may be set, and clocks
of two machines differ. It is over when it was not renewed for as long as it lasts, while this process looked on.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from conserve.store.books.queue import Sign

JUMP_S = 5.0  # more than a clock that is slowed down or sped up gains between two looks


@dataclass(slots=True)
class Silence:
    """How long one lease went without being renewed."""

    sign: Sign
    looked_at: float
    seconds: float = 0.0


class Expiry:
    """Watches leases; of a look that comes late only half a lease's length counts.

    So a lease is never over after one look: where this process was suspended together with the lease's owner, the
    owner has renewed it by the next one.
    """

    def __init__(self, lease_s: float, monotonic: Callable[[], float]) -> None:
        self._lease_s, self._monotonic = lease_s, monotonic
        self._watched: dict[int, Silence] = {}

    def over(self, signs: Iterable[Sign]) -> list[Sign]:
        """Those of all leases that are over now."""
        now = self._monotonic()
        self._watched = {sign.epoch: self._watch(sign, now) for sign in signs}
        watched = self._watched.values()
        return [each.sign for each in watched if each.seconds >= self._length_s(each.sign)]

    def _watch(self, sign: Sign, now: float) -> Silence:
        before = self._watched.get(sign.epoch)
        if before is None or before.sign != sign:
            return Silence(sign, now)
        counts = min(now - before.looked_at, self._length_s(sign) / 2)
        return Silence(sign, now, before.seconds + counts)

    def _length_s(self, sign: Sign) -> float:
        """How long a lease lasts; one that an earlier version gave out does not say."""
        return self._lease_s if sign.lease_s is None else sign.lease_s


class WallClock:
    """Notices when the wall clock is set."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._ahead_s = self._now_ahead_s()

    def _now_ahead_s(self) -> float:
        return self._clock() - self._monotonic()

    def set_by(self) -> float | None:
        """Seconds by which it was set since this was asked last, negative for back; None if it was not."""
        before, self._ahead_s = self._ahead_s, self._now_ahead_s()
        by = self._ahead_s - before
        return by if abs(by) > JUMP_S else None
