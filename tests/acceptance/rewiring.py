"""Puts code around functions of the program, from outside: tests aim signals and follow the work by it."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


def rewire(at: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace "module:function" or "module:Class.method" by what `around` makes of it."""
    owner, _, name = at.rpartition(":" if "." not in at.partition(":")[2] else ".")
    place = named(owner)
    setattr(place, name, around(getattr(place, name)))


def named(at: str) -> Any:
    """The module, class or function that "module", "module:Class" or "module:function" names."""
    module_name, _, path = at.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


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
