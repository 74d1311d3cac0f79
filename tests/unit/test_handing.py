"""Rows on their way to a co-serving server, one at a time, in virtual time."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from conserve.endpoints.handing import TURN_S, Handing
from tests import virtual_time

QUICK_S, SLOW_S = TURN_S / 5, TURN_S * 10


def begun_at(takes_s: Sequence[float]) -> list[float]:
    """When each of some turns, all asked for at once, has begun; each would last so long."""

    async def go() -> list[float]:
        handing, began, loop = Handing(), [], asyncio.get_running_loop()

        async def hand(seconds: float) -> None:
            async with handing.turn():
                began.append(loop.time())
                await asyncio.sleep(seconds)

        start = loop.time()
        async with asyncio.TaskGroup() as group:
            for seconds in takes_s:
                group.create_task(hand(seconds))
        return [at - start for at in began]

    return virtual_time.run(go())


def test_a_row_goes_when_the_one_before_was_taken_in() -> None:
    assert begun_at([QUICK_S] * 4) == pytest.approx([0, QUICK_S, 2 * QUICK_S, 3 * QUICK_S], abs=QUICK_S / 10)


def test_a_row_waits_no_longer_for_one_that_is_not_taken_in() -> None:
    """Nor do later ones go two at a time, when the late turns end."""
    began = begun_at([SLOW_S] * 12 + [QUICK_S] * 30)
    assert began[:12] == pytest.approx([n * TURN_S for n in range(12)], abs=QUICK_S / 2)
    assert all(later - earlier > QUICK_S / 2 for earlier, later in pairwise(began))


def test_a_row_that_is_given_up_ends_its_turn() -> None:
    async def go() -> None:
        handing = Handing()

        async def hand() -> None:
            async with handing.turn():
                await asyncio.Event().wait()

        first, second = asyncio.create_task(hand()), asyncio.create_task(hand())
        await asyncio.sleep(0)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(TURN_S / 2), handing.turn():
            pass

    virtual_time.run(go())
