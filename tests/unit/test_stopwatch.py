"""Times of iterations by the device's clock: what lies between two marks in its stream."""

import pytest

from conserve.engine.runtime.stopwatch import DeviceTime, Stopwatch


class Stream:
    """A device whose clock moves as it reaches marks."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> "Event":
        return Event(self)

    def launch(self, ms: float) -> None:
        self.now += ms


class Event:
    """Implements `TimedEvent`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at: float | None = None
        self.reached = False

    def record(self) -> None:
        self.at = self._stream.now

    def synchronize(self) -> None:
        assert self.at is not None, "it was never recorded"
        self.reached = True

    def elapsed_time(self, later: "Event") -> float:
        assert later.reached, "the device may not have got there"
        assert self.at is not None
        assert later.at is not None
        return later.at - self.at


def test_a_lap_is_what_was_launched_between_its_marks_and_since_the_last_one() -> None:
    stream = Stream()
    watch = Stopwatch(stream.event)
    watch.begin()
    stream.launch(5.0)
    first = watch.end()
    stream.launch(2.0)  # the device waits for the host
    watch.begin()  # the next one is launched before the first one's results are read
    stream.launch(40.0)
    second = watch.end()
    assert first is not None
    assert second is not None
    assert first.time() == DeviceTime(own_ms=5.0, since_last_ms=None)
    assert second.time() == DeviceTime(own_ms=40.0, since_last_ms=42.0)


@pytest.mark.parametrize("told", [True, False])
def test_behind_an_iteration_without_results_a_time_is_its_own_alone(told: bool) -> None:
    stream = Stream()
    watch = Stopwatch(stream.event)
    assert watch.end() is None
    watch.begin()
    stream.launch(5.0)
    watch.end()
    watch.begin()
    stream.launch(1.0)  # and is abandoned
    if told:
        watch.forget()
        assert watch.end() is None
    watch.begin()
    stream.launch(2.0)
    lap = watch.end()
    assert lap is not None
    assert lap.time() == DeviceTime(own_ms=2.0, since_last_ms=None)
    watch.begin()
    stream.launch(3.0)
    lap = watch.end()
    assert lap is not None
    assert lap.time() == DeviceTime(own_ms=3.0, since_last_ms=3.0)
