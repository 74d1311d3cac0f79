"""Tells whether a row or its server is at fault, by whether the server answers another request.

    not proven ── a row or a small request is answered ──> proven ── a fault, and a small request fails too ──┐
        ^                                                                                                     │
        └──── doubted: one row at a time is sent until that or a small request is answered <──────────────────┘

Each route has a state of its own; a server that is gone is doubted on all. A server that was proven when a row was
sent, and answers nothing after it, was lost with that row. So an outage counts one loss of a row, however long it
lasts.
"""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from conserve.endpoints.probes import Probes, SmallAnswer
from conserve.endpoints.protocol import Url
from conserve.errors import (
    AnswerTooLong,
    EndpointBusy,
    EndpointError,
    EndpointFailing,
    EndpointFault,
    EngineDied,
    ServerLost,
)

MUTE_AFTER = 10  # small requests that bring a fault, each after an answered row: an outage is one of them


class Culprit:
    """Record of one server's answers, by route."""

    def __init__(self, probes: Probes, base_url: str) -> None:
        self._probes, self._base_url = probes, base_url
        self.answered: set[Url] = set()  # rows were answered there, with this key and this model
        self._proven: set[Url] = set()  # a request was answered since the last trouble
        self._doubted: set[Url] = set()  # none was, and there was trouble
        self._trials: dict[Url, object] = {}  # rows under way where the server is doubted
        self._refused: Counter[Url] = Counter()  # small requests as `MUTE_AFTER` counts them
        self._since: set[Url] = set()  # a row was answered since the last of these
        self._speaks: set[Url] = set()  # a small request was answered

    def forget(self) -> None:
        """Forget what is known: the server is another one."""
        for known in (self.answered, self._proven, self._doubted, self._since, self._speaks):
            known.clear()
        self._trials.clear()
        self._refused.clear()

    @asynccontextmanager
    async def judging(self, model: str, route: Url) -> AsyncGenerator[None, None]:
        """Send a row in this context; a fault that is the server's becomes another error.

        Raises `EndpointFailing` if the server is doubted and another row is on trial.
        """
        trial = await self._trial(model, route)
        proven = route in self._proven
        try:
            yield
        except EndpointFault as error:
            raise await self._of_fault(error, model=model, route=route, proven=proven) from error
        except ServerLost as error:
            self._doubt(*Url)
            raise self._of_loss(str(error), EngineDied.kind, proven=proven) from error
        else:
            self.answered.add(route)
            self._prove(route)
            self._since.add(route)
            if trial is not None:
                await self._ask(model, route)
        finally:
            if trial is not None and self._trials.get(route) is trial:
                del self._trials[route]

    async def _trial(self, model: str, route: Url) -> object | None:
        """Sign of a row that is to show whether a server is well which answers no small request; else None."""
        if route not in self._doubted or self._is_mute(route):
            return None
        small = await self._ask(model, route)
        if small.error is None:
            self._prove(route)
            return None
        if route in self._trials:
            raise EndpointFailing(f"{self._base_url} answers no request: {small.error}")
        return self._trials.setdefault(route, object())

    async def _ask(self, model: str, route: Url) -> SmallAnswer:
        """Ask a small request, and note what becomes of it."""
        small = await self._probes.small(model, route)
        if small.answered:
            self._speaks.add(route)
        if isinstance(small.error, EndpointFault) and route in self._since:
            self._refused[route] += 1
            self._since.discard(route)
        return small

    def _is_mute(self, route: Url) -> bool:
        """True if rows are answered on a route, and small requests never are, as of a model for sound alone."""
        return self._refused[route] >= MUTE_AFTER and route not in self._speaks

    async def _of_fault(self, error: EndpointFault, *, model: str, route: Url, proven: bool) -> EndpointError:
        """The error for an answer of no use; `proven` is what the server was when the row was sent."""
        if isinstance(error, AnswerTooLong):
            return error
        small = await self._ask(model, route)
        if small.error is None or self._is_mute(route):
            return error
        if isinstance(small.error, EngineDied):
            return EngineDied(str(error))
        if isinstance(small.error, EndpointBusy):  # it limits requests, and says nothing about the row
            return small.error
        self._doubt(route)
        said = f"{self._base_url} answers no other request either: {error}"
        return self._of_loss(said, error.kind, proven=proven)

    def _of_loss(self, said: str, kind: str, *, proven: bool) -> EndpointFailing | ServerLost:
        """The error for a row whose server answers nothing any more; its `kind` if the row is the reason."""
        return ServerLost(said, kind=kind) if proven else EndpointFailing(said)

    def _prove(self, route: Url) -> None:
        self._proven.add(route)
        self._doubted.discard(route)

    def _doubt(self, *routes: Url) -> None:
        self._proven.difference_update(routes)
        self._doubted.update(routes)
