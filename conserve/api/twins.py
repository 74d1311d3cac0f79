"""Calls that block, and their twins that are awaited: `job.wait()` and `await job.wait.aio()`.

Each has one implementation: a function, which the twin runs in a thread, or a coroutine function, which both run in
the portal.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from conserve.api.caller import called
from conserve.api.portal import portal
from conserve.api.speech import spoken

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class BlockingCall(Generic[P, R]):
    """A function that blocks; `aio` takes the same arguments and is awaited."""

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with called(), spoken():
            return self._function(*args, **kwargs)

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function in a thread, off the event loop; if cancelled, it still runs to its end."""
        with called(), spoken():
            return await asyncio.to_thread(self._function, *args, **kwargs)


class PortalCall(BlockingCall[P, R]):
    """A coroutine function that runs in the portal; cancelling either form ends it in order."""

    def __init__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> None:
        functools.update_wrapper(self, function)
        self._work = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with called(), spoken():
            return portal.submit(self._work(*args, **kwargs)).result()

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Await the coroutine in the portal's loop, without blocking the caller's."""
        with called(), spoken():
            return await portal.submit(self._work(*args, **kwargs)).awaited()


class Method(Generic[P, R]):
    """A method whose bound form is a `BlockingCall`."""

    def __init__(self, function: Callable[..., Any], kind: Callable[..., BlockingCall[P, R]]) -> None:
        wrapper: Any = self
        functools.update_wrapper(wrapper, function)
        self._function, self._kind = function, kind

    def __call__(self, instance: object, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__get__(instance, type(instance))(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> BlockingCall[P, R]: ...

    def __get__(self, instance: object | None, owner: type) -> Self | BlockingCall[P, R]:
        if instance is None:
            return self
        return self._kind(self._function.__get__(instance, owner))


def blocking(function: Callable[Concatenate[S, P], R]) -> Method[P, R]:
    """Give a method that blocks an awaited twin."""
    return Method(function, BlockingCall)


def awaited(function: Callable[Concatenate[S, P], Coroutine[Any, Any, R]]) -> Method[P, R]:
    """Give a coroutine method, which runs in the portal, a form that blocks and one that is awaited."""
    return Method(function, PortalCall)
