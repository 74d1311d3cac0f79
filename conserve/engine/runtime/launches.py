"""How far a host that launches work on a GPU may be ahead of it."""

from collections.abc import Callable
from typing import Protocol

AHEAD = 2  # safepoints: one that the device works towards, and one so that it never waits for the host


class Event(Protocol):
    """What is used of `torch.cuda.Event`: a mark in the stream of launched work."""

    def record(self) -> None:
        """Put the mark behind everything launched so far; one put earlier counts no more."""

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""


class Launches:
    """Keeps the host's safepoints at most `AHEAD` of the device's.

    Kernels are only launched by the host: in eager mode it may be through with all layers before the device has
    done the first. A flag that is read then says nothing about what the device has still to do, since nothing
    that was launched can be taken back. So the host marks the stream at every safepoint, and waits there for the
    mark before the last; whoever leaves at a safepoint has at most `AHEAD` steps between safepoints to wait for.
    There are as many events as marks that can be under way, made once and recorded anew.

    What is launched on one stream runs in the order of the launches. So for the KV blocks of an abandoned iteration
    nobody would have to wait: what it still writes there is written before anything that comes next. Nor for
    its tensors, whose memory the allocator gives out again in the same order, nor for collective operations,
    which all ranks have launched up to the same safepoint. But the pinned buffers from which vLLM copies inputs and
    attention metadata to the device are overwritten by the host, at once and in no stream's order. Usually
    the host knows that these copies are done when it has the sampled tokens; who abandons an iteration, or changes
    its metadata in the middle, has none. Therefore `finish` waits for all that was launched. That also keeps the
    rest of an abandoned iteration out of the next one's time, from which the latency model learns.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._events = [event() for _ in range(AHEAD)]
        self._passed = 0  # safepoints of this iteration

    def begin(self) -> None:
        """An iteration begins; marks of the last one, be it whole or abandoned, are not waited for."""
        self._passed = 0

    def keep_up(self) -> None:
        """The host is at a safepoint: let the device come close."""
        event = self._events[self._passed % AHEAD]
        if self._passed >= AHEAD:
            event.synchronize()
        event.record()
        self._passed += 1

    def finish(self) -> None:
        """Wait until the device has done all that was launched."""
        event = self._events[0]
        event.record()
        event.synchronize()
        self._passed = 0
