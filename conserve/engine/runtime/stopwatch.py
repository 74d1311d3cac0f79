"""Times of iterations by the device's own clock.

Where iterations are scheduled ahead, the host reads an iteration's results after it has launched the next one, and
launching a long prompt takes tens of milliseconds. So the host's clock gives the time of one iteration to another.
Marks in the stream of launched work do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self


class TimedEvent(Protocol):
    """The used part of `torch.cuda.Event` with timing: a mark in the stream of launched work."""

    def record(self) -> None:
        """Put the mark behind everything launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""

    def elapsed_time(self, later: Self) -> float:
        """Time between two marks that the device has reached, in ms."""


@dataclass(frozen=True, slots=True)
class Lap:
    """The marks before and behind one iteration."""

    began: TimedEvent
    ended: TimedEvent

    def ms(self) -> float:
        """Time between the marks; waits for the second one, behind which the iteration has no results."""
        self.ended.synchronize()
        return self.began.elapsed_time(self.ended)


class Stopwatch:
    """Marks where iterations begin and end. The first mark is reached when the iteration before is over."""

    def __init__(self, event: Callable[[], TimedEvent]) -> None:
        self._event = event
        self._began: TimedEvent | None = None

    def begin(self) -> None:
        """Mark the begin of an iteration."""
        self._began = self._event()
        self._began.record()

    def end(self) -> Lap | None:
        """Mark its end; None if none has begun."""
        began, self._began = self._began, None
        if began is None:
            return None
        ended = self._event()
        ended.record()
        return Lap(began, ended)
