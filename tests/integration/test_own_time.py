"""Time of the plug-in's own scheduling: measured around vLLM's, of iterations with live requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [*OF_VLLM, pytest.mark.engine]


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock, in seconds, that the test moves."""
    from conserve.engine.vllm.scheduling import own_time

    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(own_time, "time", clock)
    return clock


def iteration(own: Any, clock: Any, ours_s: float, *, live: bool = True) -> None:
    """Each half of ours lasts as long; vLLM's part and the device take a second each."""

    def vllms() -> str:
        clock.now += 1.0
        return "scheduled"

    own.begin()
    clock.now += ours_s / 4
    assert own.of_vllm(vllms)() == "scheduled"
    clock.now += ours_s / 4
    own.pause()
    clock.now += 1.0  # the device
    own.begin()
    clock.now += ours_s / 4
    own.of_vllm(vllms)()
    clock.now += ours_s / 4
    own.end(counts=live)


def test_own_time_is_the_median_of_what_is_around_vllms_code(moving: Any) -> None:
    from conserve.engine.vllm.scheduling.own_time import EVERY, NEWEST, OwnTime

    own = OwnTime()
    for _ in range(EVERY - 1):
        iteration(own, moving, 0.002)
    assert own.ms == 0.0, "too few to tell"
    iteration(own, moving, 0.5)
    assert own.ms == pytest.approx(2.0), "one that was held up says nothing"
    for _ in range(NEWEST):
        iteration(own, moving, 0.004)
    assert own.ms == pytest.approx(4.0)


def test_iterations_of_rows_alone_say_nothing_of_live_ones(moving: Any) -> None:
    from conserve.engine.vllm.scheduling.own_time import EVERY, OwnTime

    own = OwnTime()
    for number in range(2 * EVERY):
        iteration(own, moving, 0.002 if number % 2 else 0.03, live=bool(number % 2))
    assert own.ms == pytest.approx(2.0)


def test_overlapping_iterations_wait_for_no_planning(moving: Any) -> None:
    from conserve.engine.vllm.scheduling.own_time import EVERY, OwnTime

    own = OwnTime(hidden=True)
    for _ in range(2 * EVERY):
        iteration(own, moving, 0.002)
    assert own.ms == 0.0


def test_a_call_that_fails_leaves_the_clock_running(moving: Any) -> None:
    from conserve.engine.vllm.scheduling.own_time import OwnTime

    def fails() -> None:
        moving.now += 1.0
        raise RuntimeError("it failed")

    own = OwnTime()
    own.begin()
    with pytest.raises(RuntimeError, match="it failed"):
        own.of_vllm(fails)()
    moving.now += 0.25
    own.pause()
    assert own._spent_s == pytest.approx(0.25)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_scheduler_tells_its_policy_what_its_own_part_takes(
    ahead: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduled ahead, an iteration is planned while the device computes: its own part is hidden."""
    from conserve.engine.policy.conserve import Conserve
    from tests.bare_scheduler import BareEngine, engine_config

    section = {"policy": "conserve", "harm": 0.5}
    engine = BareEngine(engine_config(tmp_path, section=section))
    scheduler, told = engine.scheduler, []
    plan, settle = Conserve.plan, scheduler._count_offline
    monkeypatch.setattr(Conserve, "plan", lambda self, view: [told.append(view.own_ms), plan(self, view)][1])

    def slow(*args: Any) -> None:
        engine.clock.now += 0.003
        settle(*args)

    monkeypatch.setattr(scheduler, "_count_offline", slow)
    monkeypatch.setattr(type(scheduler.repetition), "again", lambda self, model: None)
    monkeypatch.setattr(scheduler.ahead, "begin", lambda: setattr(scheduler.ahead, "beside", ahead))
    engine.add(20, 100)
    engine.add(20, 100, offline=True)
    with engine.clock.installed():
        for _ in range(30):
            engine.step()
    assert scheduler.conserve()["scheduling_ms"] == pytest.approx(3.0)
    assert told[0] == 0.0
    assert told[-1] == (0.0 if ahead else pytest.approx(3.0))
