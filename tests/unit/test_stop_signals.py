"""Signals that ask a command to stop."""

import asyncio
import os
import signal

from conserve.cli import signals
from tests import virtual_time


def test_two_signals_of_one_moment_are_one() -> None:
    """`timeout` of a crontab sends SIGTERM to its child, and then to the group that both are in."""
    told: list[float] = []

    async def go() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with signals.told_to_stop(lambda: told.append(round(loop.time() - begun))):
            for wait_s in (0.0, 10.0):
                await asyncio.sleep(wait_s)
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(0.01)

    virtual_time.run(go())
    assert told == [0, 10]
