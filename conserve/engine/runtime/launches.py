"""Limit on how far the host may launch GPU work ahead of the device."""

from collections.abc import Callable
from typing import Protocol

AHEAD = 2  # safepoints: one that the device works towards, and one more so that it never waits for the host


class DeviceEvent(Protocol):
    """The used part of `torch.cuda.Event`: a mark in the stream of launched work."""

    def record(self) -> None:
        """Put the mark behind everything launched so far; an earlier mark is replaced."""

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""


class Launches:
    """Keeps the host at most `AHEAD` safepoints ahead of the device.

    In eager mode the host only launches kernels, and may have launched all layers before the device has finished
    the first. Launched work cannot be taken back, so a flag read at such a safepoint would stop nothing. Therefore
    the host marks the stream at every safepoint and waits there for the mark before the last one. A row that
    leaves waits for at most `AHEAD` steps between safepoints. The `AHEAD` events are made once and recorded anew.

    Work on one stream runs in the order of its launches. So the KV blocks of an abandoned iteration need no wait:
    what it still writes there is written before anything later. The same holds for its tensors, whose memory
    the allocator gives out in that order, and for collective operations, which all ranks have launched up to
    the same safepoint. The host overwrites the pinned buffers, from which vLLM copies inputs and attention
    metadata to the device, at once and in no stream's order. Usually the sampled tokens tell the host that
    these copies are done; an iteration that is abandoned, or whose metadata changes half-way, gives no such
    sign. Therefore `finish` waits for all launched work. That also keeps the rest of an abandoned iteration out of
    the next one's time, from which the latency model learns.
    """

    def __init__(self, event: Callable[[], DeviceEvent]) -> None:
        self._events = [event() for _ in range(AHEAD)]
        self._passed = 0  # safepoints of this iteration

    def begin(self) -> None:
        """Start counting the safepoints of an iteration; marks of the one before are not waited for."""
        self._passed = 0

    def keep_up(self) -> None:
        """Wait at a safepoint until the device is close enough, and mark the stream."""
        event = self._events[self._passed % AHEAD]
        if self._passed >= AHEAD:
            event.synchronize()
        event.record()
        self._passed += 1

    def finish(self) -> None:
        """Wait until the device has done all launched work."""
        event = self._events[0]
        event.record()
        event.synchronize()
        self._passed = 0
