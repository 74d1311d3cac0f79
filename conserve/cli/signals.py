"""Signals that end a command: each in order, and none half-way through what must be whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """End the block by SIGTERM and SIGHUP as by Ctrl-C, so that it clears away what it has begun."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    with handled_by(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Let no signal end the block; one that came meanwhile counts once the block is over."""
    came: list[int] = []
    with handled_by(lambda number, frame: came.append(number), *ENDING):
        yield
    if came:
        signal.raise_signal(came[0])


@contextmanager
def handled_by(handler: object, *numbers: signal.Signals) -> Iterator[None]:
    """Give these signals this handler; a thread other than the first cannot, and receives none either."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [
        number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN
    ]  # nohup ignores one
    before = {number: signal.signal(number, handler) for number in heeded}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
