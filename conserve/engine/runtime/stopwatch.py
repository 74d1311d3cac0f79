"""Times of iterations by the device's own clock.

Where iterations are scheduled ahead, the host reads an iteration's results after it has launched the next one, and
launching a long prompt takes tens of milliseconds. So the host's clock gives the time of one iteration to another.
Marks in the stream of launched work do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self


class TimedEvent(Protocol):
    """The used part of `torch.cuda.Event` with timing: a mark in the stream of launched work."""

    def record(self) -> None:
        """Put the mark behind everything launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""

    def elapsed_time(self, later: Self) -> float:
        """Time between two marks that the device has reached, in ms."""


class DeviceTime(NamedTuple):
    """Time of an iteration in ms: from the host's call to its end, and from the end of the one before."""

    own_ms: float
    since_last_ms: float | None  # None behind an iteration without results


@dataclass(frozen=True, slots=True)
class Lap:
    """The marks before and behind one iteration, and behind the one before."""

    last: TimedEvent | None
    began: TimedEvent
    ended: TimedEvent

    def time(self) -> DeviceTime:
        """Time between the marks; waits for the last one, behind which the iteration has no results."""
        self.ended.synchronize()
        since = self.last.elapsed_time(self.ended) if self.last is not None else None
        return DeviceTime(self.began.elapsed_time(self.ended), since)


class Stopwatch:
    """Marks where iterations begin and end. A mark at the begin is reached when the iteration before is over."""

    def __init__(self, event: Callable[[], TimedEvent]) -> None:
        self._event = event
        self._began: TimedEvent | None = None
        self._last: TimedEvent | None = None  # end of the last iteration, if it had results

    def begin(self) -> None:
        """Mark the begin of an iteration. One that has begun and not ended had no results."""
        if self._began is not None:
            self._last = None
        self._began = self._event()
        self._began.record()

    def end(self) -> Lap | None:
        """Mark the end of the iteration; None if none has begun."""
        began, self._began = self._began, None
        if began is None:
            return None
        last, self._last = self._last, self._event()
        self._last.record()
        return Lap(last, began, self._last)

    def forget(self) -> None:
        """The iteration ended without results: the next one's time is its own alone."""
        self._began = self._last = None
