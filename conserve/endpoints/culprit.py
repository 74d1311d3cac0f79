"""Tells whether a row or its server is at fault, by whether the server answers another request.

    not proven ── a row or a small request is answered ──> proven ── a fault, and a small request fails too ──┐
        ^                                                                                                     │
        └──── doubted: one row at a time is sent until that or a small request is answered <──────────────────┘

Each route has a state of its own; a server that is gone is doubted on all. A server that was proven when a row was
sent, and answers nothing after it, was lost with that row. So an outage counts one loss of a row, however long it
lasts.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto

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


class Standing(Enum):
    """Standing of a server on a route, as the requests since the last trouble tell."""

    UNKNOWN = auto()
    """No request was answered yet, and there was no trouble."""
    PROVEN = auto()
    """A request was answered since the last trouble."""
    DOUBTED = auto()
    """There was trouble, and no request was answered since."""


@dataclass(slots=True)
class RouteHealth:
    """Record of a server's answers on one route."""

    standing: Standing = Standing.UNKNOWN
    rows_answered: bool = False  # with this key and this model
    trial: object | None = None  # the row under way where the server is doubted
    probe_answered: bool = False
    failed_probes: int = 0  # as `MUTE_AFTER` counts them
    row_since_probe: bool = False  # a row was answered since the last of `failed_probes`

    @property
    def answers_no_probes(self) -> bool:
        """True if rows are answered, and small requests never are, as of a model for sound alone."""
        return self.failed_probes >= MUTE_AFTER and not self.probe_answered


class Culprit:
    """Record of one server's answers, by route."""

    def __init__(self, probes: Probes, base_url: str) -> None:
        self._probes, self._base_url = probes, base_url
        # A record is looked up anew after each wait, in which `forget` may have dropped it.
        self._routes = defaultdict[Url, RouteHealth](RouteHealth)

    @property
    def answered(self) -> frozenset[Url]:
        """Routes on which rows were answered, with this key and this model."""
        return frozenset(route for route, health in self._routes.items() if health.rows_answered)

    def forget(self) -> None:
        """Forget what is known: the server is another one."""
        self._routes.clear()

    @asynccontextmanager
    async def judging(self, model: str, route: Url) -> AsyncGenerator[None, None]:
        """Send a row in this context; a fault that is the server's becomes another error.

        Raises `EndpointFailing` if the server is doubted and another row is on trial.
        """
        trial = await self._trial(model, route)
        proven = self._routes[route].standing is Standing.PROVEN
        try:
            yield
        except EndpointFault as error:
            raise await self._of_fault(error, model=model, route=route, proven=proven) from error
        except ServerLost as error:
            for each in Url:
                self._routes[each].standing = Standing.DOUBTED
            raise self._of_loss(str(error), EngineDied.kind, proven=proven) from error
        else:
            health = self._routes[route]
            health.standing, health.rows_answered, health.row_since_probe = Standing.PROVEN, True, True
            if trial is not None:
                await self._ask(model, route)
        finally:
            if trial is not None and self._routes[route].trial is trial:
                self._routes[route].trial = None

    async def _trial(self, model: str, route: Url) -> object | None:
        """Sign of a row that is to show whether a server is well which answers no small request; else None."""
        health = self._routes[route]
        if health.standing is not Standing.DOUBTED or health.answers_no_probes:
            return None
        small = await self._ask(model, route)
        health = self._routes[route]
        if small.error is None:
            health.standing = Standing.PROVEN
            return None
        if health.trial is not None:
            raise EndpointFailing(f"{self._base_url} answers no request: {small.error}")
        health.trial = object()
        return health.trial

    async def _ask(self, model: str, route: Url) -> SmallAnswer:
        """Ask a small request, and note what becomes of it."""
        small = await self._probes.small(model, route)
        health = self._routes[route]
        if small.answered:
            health.probe_answered = True
        if isinstance(small.error, EndpointFault) and health.row_since_probe:
            health.failed_probes += 1
            health.row_since_probe = False
        return small

    async def _of_fault(self, error: EndpointFault, *, model: str, route: Url, proven: bool) -> EndpointError:
        """The error for an answer of no use; `proven` is what the server was when the row was sent."""
        if isinstance(error, AnswerTooLong):
            return error
        small = await self._ask(model, route)
        if small.error is None or self._routes[route].answers_no_probes:
            return error
        if isinstance(small.error, EngineDied):
            return EngineDied(str(error))
        if isinstance(small.error, EndpointBusy):  # it limits requests, and says nothing about the row
            return small.error
        self._routes[route].standing = Standing.DOUBTED
        said = f"{self._base_url} answers no other request either: {error}"
        return self._of_loss(said, error.kind, proven=proven)

    def _of_loss(self, message: str, kind: str, *, proven: bool) -> EndpointFailing | ServerLost:
        """The error for a row whose server answers nothing any more; its `kind` if the row is the reason."""
        return ServerLost(message, kind=kind) if proven else EndpointFailing(message)
