"""A host that launches work stays close to the device that does it."""

from collections.abc import Iterator

import pytest

from conserve.engine.runtime.launches import AHEAD, Launches


class Device:
    """A stream of launched work that is done only when the host waits for it."""

    def __init__(self) -> None:
        self.launched = self.done = 0
        self.events: list[Mark] = []
        self.log: list[tuple[str, int]] = []  # what happened, and to which event

    def event(self) -> "Mark":
        self.events.append(Mark(self, len(self.events)))
        return self.events[-1]

    def launch(self) -> None:
        self.launched += 1


class Mark:
    """Implements `launches.DeviceEvent`."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number
        self.at: int | None = None

    def record(self) -> None:
        self.at = self.device.launched
        self.device.log.append(("record", self.number))

    def synchronize(self) -> None:
        assert self.at is not None, "an event that was never recorded is not waited for"
        self.device.done = max(self.device.done, self.at)
        self.device.log.append(("wait", self.number))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def launches(device: Device) -> Launches:
    return Launches(device.event)


def iteration(device: Device, launches: Launches, layers: int) -> Iterator[int]:
    """A layer is one piece of work, with a safepoint before each; yields how far behind the device is."""
    launches.begin()
    begun = device.launched
    for _ in range(layers):
        launches.keep_up()
        yield device.launched - max(begun, device.done)
        device.launch()


def test_the_device_is_never_further_behind_than_two_safepoints(device: Device, launches: Launches) -> None:
    assert list(iteration(device, launches, 6)) == [0, 1, 2, 2, 2, 2]
    assert AHEAD == 2


def test_the_host_never_waits_for_what_it_launched_last(device: Device, launches: Launches) -> None:
    """Otherwise the device would have nothing to do while the host launches the next layer."""
    assert min(list(iteration(device, launches, 30))[AHEAD:]) == AHEAD


def test_a_mark_is_waited_for_before_it_is_recorded_anew(device: Device, launches: Launches) -> None:
    list(iteration(device, launches, 4))
    assert device.log == [
        ("record", 0),
        ("record", 1),
        *[("wait", 0), ("record", 0)],
        ("wait", 1),
        ("record", 1),
    ]


def test_events_are_made_once(device: Device, launches: Launches) -> None:
    for layers in (30, 1, 7, 30):
        list(iteration(device, launches, layers))
    assert len(device.events) == AHEAD


def test_an_iteration_does_not_wait_for_marks_of_the_last_one(device: Device, launches: Launches) -> None:
    list(iteration(device, launches, 5))
    device.log.clear()
    list(iteration(device, launches, 2))
    assert device.log == [("record", 0), ("record", 1)]


@pytest.mark.parametrize("layer", range(5))
def test_an_abandoned_iteration_leaves_nothing_under_way(
    device: Device, launches: Launches, layer: int
) -> None:
    rest = iteration(device, launches, 6)
    for _ in range(layer + 1):
        next(rest)
    launches.finish()
    assert device.done == device.launched == layer
    assert list(iteration(device, launches, 4)) == [0, 1, 2, 2], "and the next one is like any other"


def test_what_is_launched_after_others_have_left_is_kept_up_with(device: Device, launches: Launches) -> None:
    rest = iteration(device, launches, 6)
    for _ in range(3):
        next(rest)
    launches.finish()
    assert list(rest) == [1, 2, 2]
