"""`conserve.Engine`: it leaves no engine behind that its user cannot close."""

import asyncio
from typing import Any

import pytest

import conserve
from conserve.api import engines
from conserve.api.portal import portal


class Slow:
    """An endpoint whose start takes as long as the test says; its engine is up from the first step on."""

    doing = None

    def __init__(self) -> None:
        self.begun, self.ready = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.up = False
        self.closes = 0

    async def start(self) -> None:
        self.up = True
        self.begun.set()
        await self.ready.wait()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.up = False
        self.closes += 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    endpoint = Slow()

    def make(*given: Any, **named: Any) -> Any:
        return endpoint

    monkeypatch.setattr(engines, "make_endpoint", make)
    return endpoint


@pytest.fixture
def engine() -> conserve.Engine:
    return conserve.Engine("one", progress=False)


def test_a_start_that_is_cancelled_late_leaves_no_engine(slow: Slow, engine: conserve.Engine) -> None:
    async def go() -> None:
        starting = asyncio.create_task(engine.borrowed())
        await slow.begun.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not slow.up

    asyncio.run(go())


def test_a_start_that_fails_late_leaves_no_engine(slow: Slow, engine: conserve.Engine) -> None:
    slow.error = ValueError("no configuration")
    slow.ready.set()
    with pytest.raises(ValueError, match="no configuration"):
        asyncio.run(engine.borrowed())
    assert not slow.up


def test_an_engine_that_is_closed_while_it_starts_does_not_stay_up(
    slow: Slow, engine: conserve.Engine
) -> None:
    async def go() -> None:
        starting = asyncio.create_task(engine.borrowed())
        await slow.begun.wait()
        closing = asyncio.create_task(engine._close())
        await asyncio.wait([closing], timeout=0)
        slow.ready.set()
        await closing
        await starting
        assert not slow.up

    asyncio.run(go())
    assert engine._close not in portal._last
    assert "closed" in repr(engine)
