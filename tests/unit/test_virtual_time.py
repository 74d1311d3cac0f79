"""The clock that tests of the harvester go by: it moves when nothing else does."""

import asyncio
import threading

import pytest

from tests import virtual_time


def test_the_shorter_wait_ends_first_and_a_day_takes_no_time() -> None:
    woken: list[str] = []

    async def wake(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        woken.append(name)

    async def day() -> float:
        begun = asyncio.get_running_loop().time()
        await asyncio.gather(wake("a day", 86_400), wake("5 ms", 0.005), wake("6 ms", 0.006))
        return asyncio.get_running_loop().time() - begun

    assert virtual_time.run(day()) == pytest.approx(86_400, abs=0.001)
    assert woken == ["5 ms", "6 ms", "a day"]


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def wait_for_a_thread() -> None:
        loop, go = asyncio.get_running_loop(), threading.Event()
        alarm = loop.call_later(1.0, pytest.fail, "time has passed")
        working = loop.run_in_executor(None, go.wait)
        for _ in range(10):
            await asyncio.sleep(0)
        go.set()
        await working
        assert not alarm.cancelled()
        assert loop.time() < alarm.when()
        alarm.cancel()

    virtual_time.run(wait_for_a_thread())


def test_a_wait_that_nothing_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing will bring about"):
        virtual_time.run(asyncio.Event().wait())
