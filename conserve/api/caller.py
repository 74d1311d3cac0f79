"""The line of the user's program that called, for warnings: the work itself may run in other threads."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

PASSED_OVER = ("conserve", "asyncio", "concurrent", "contextlib", "threading")
"""Packages of the frames between the work and the user's program."""


class UsersLine(NamedTuple):
    """Place of a call; a frame itself would keep the program's tables alive."""

    file: str
    line: int
    module: str
    registry: dict[Any, Any]  # of warnings that were shown


_LINE: ContextVar[UsersLine | None] = ContextVar("users_line", default=None)


@contextmanager
def called() -> Iterator[None]:
    """Remember the user's line, unless the call is part of another."""
    if _LINE.get() is not None:
        yield
        return
    token = _LINE.set(users_line())
    try:
        yield
    finally:
        _LINE.reset(token)


def users_line() -> UsersLine:
    """Line of the nearest frame that is neither ours nor between us and the program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and package(frame) in PASSED_OVER:
        frame = frame.f_back
    module, registry = frame.f_globals.get("__name__", "<unknown>"), "__warningregistry__"
    return UsersLine(
        frame.f_code.co_filename, frame.f_lineno, module, frame.f_globals.setdefault(registry, {})
    )


def package(frame: FrameType) -> str:
    """Top package of the frame's module."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def warn(sentence: str, category: type[Warning]) -> None:
    """Warn at the user's line."""
    at = _LINE.get() or users_line()
    warnings.warn_explicit(sentence, category, at.file, at.line, module=at.module, registry=at.registry)
