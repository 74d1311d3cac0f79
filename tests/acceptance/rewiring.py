"""Puts code around functions of the program, from outside: tests aim signals and follow the work by it."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


def rewire(at: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace "module:function" or "module:Class.method" by what `around` makes of it."""
    module_name, _, path = at.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    setattr(owner, name, around(getattr(owner, name)))


def nothing() -> None:
    """Do nothing before, or after, a call."""


def wrap(at: str, *, before: Callable[[], None] = nothing, after: Callable[[], None] = nothing) -> None:
    """Call these before and after each call of the function."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        assert after is nothing or not inspect.iscoroutinefunction(function), f"{at} ends later than its call"

        @functools.wraps(function)
        def calling(*arguments: Any, **named: Any) -> Any:
            before()
            result = function(*arguments, **named)
            after()
            return result

        return calling

    rewire(at, around)
