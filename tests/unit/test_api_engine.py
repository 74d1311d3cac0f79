"""`conserve.Engine`: it leaves no engine behind that its user cannot close."""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, cast

import pytest

import conserve
from conserve.api import engines, runs
from conserve.api.portal import portal
from conserve.errors import UsageError


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


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_has_no_run_and_no_engine_of_its_parent(slow: Slow, engine: conserve.Engine) -> None:
    slow.ready.set()
    unused = conserve.Engine("other", progress=False)
    asyncio.run(engine.borrowed())
    key = ("store", "job")
    runs.under_way[key] = cast("Any", "a run")
    try:
        answer, says = os.pipe()
        if (child := os.fork()) == 0:
            try:
                words = [said(work) for work in (engine.borrowed(), engine._close(), unused.borrowed())]
                os.write(says, "|".join([*map(str, runs.under_way), *words]).encode())
            finally:
                os._exit(0)
        os.close(says)
        os.waitpid(child, 0)
        with os.fdopen(answer) as file:
            words = file.read().split("|")
        refused = (
            f"the engine runs in process {os.getpid()}, of which this one is a fork; "
            "make another conserve.Engine in this process"
        )
        assert words == [refused, "nothing", "nothing"]
        assert key in runs.under_way
        assert slow.up
    finally:
        runs.under_way.pop(key, None)
        asyncio.run(engine._close())


def said(work: Coroutine[Any, Any, object]) -> str:
    """Words of the error in the first step of this work; a fork has no loop to run more of it."""
    try:
        work.send(None)
    except UsageError as error:
        return str(error)
    except BaseException:
        return "nothing"
    return "nothing"
