"""Signals that end a command: its clean-up runs, and a block that must be whole is not interrupted."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

FIRST = 1  # id of the first process of a container
STOPPING = (signal.SIGINT, signal.SIGTERM)
ENDING = (*STOPPING, signal.SIGHUP)
SAME_S = 0.5


@contextmanager
def ended_in_order() -> Iterator[None]:
    """End the block by SIGTERM and SIGHUP as by Ctrl-C, so that it removes its unfinished files."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    with handled_by(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


def end_as_first_process() -> None:
    """Have SIGTERM and SIGHUP end the first process of a container, for which the kernel has no default action."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == FIRST:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a forked child, which has the default action
        signal.raise_signal(number)

    if os.getpid() == FIRST:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, interrupt)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold signals back during the block; one that arrived is delivered after it."""
    came: list[int] = []
    with handled_by(lambda number, frame: came.append(number), *ENDING):
        yield
    if came:
        signal.raise_signal(came[0])


@contextmanager
def handled_by(handler: object, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals by this handler. Only the main thread can, and only it receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that nohup ignores stays ignored.
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextmanager
def told_to_stop(on_signal: Callable[[], object]) -> Iterator[None]:
    """Call this on Ctrl-C and SIGTERM during the block, which runs on an event loop.

    Signals within `SAME_S` are one: `timeout` sends SIGTERM to its child, and then to the group that both are in.
    The signals are given back behind the block: uvloop would keep them behind its end, and swallow a Ctrl-C.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    last = -SAME_S

    def heed() -> None:
        nonlocal last
        if loop.time() >= last + SAME_S:
            last = loop.time()
            on_signal()

    for number in STOPPING:
        loop.add_signal_handler(number, heed)
    try:
        yield
    finally:
        for number in STOPPING:
            loop.remove_signal_handler(number)
