"""Times of iterations by the device's clock: what lies between two marks in its stream."""

from conserve.engine.runtime.stopwatch import Stopwatch


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


def test_a_lap_is_what_was_launched_between_its_marks() -> None:
    stream = Stream()
    watch = Stopwatch(stream.event)
    watch.begin()
    stream.launch(5.0)
    first = watch.end()
    watch.begin()  # the next one is launched before the first one's results are read
    stream.launch(40.0)
    second = watch.end()
    assert first is not None
    assert second is not None
    assert (first.ms(), second.ms()) == (5.0, 40.0)


def test_an_iteration_without_results_leaves_no_lap() -> None:
    stream = Stream()
    watch = Stopwatch(stream.event)
    assert watch.end() is None
    watch.begin()
    stream.launch(1.0)
    watch.begin()  # the one before was abandoned
    stream.launch(2.0)
    lap = watch.end()
    assert lap is not None
    assert lap.ms() == 2.0
    assert watch.end() is None
