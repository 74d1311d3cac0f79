"""Tells whether a row or its server is at fault, by whether the server answers another request.

    not proven ── a row or a small request is answered ──> proven ── a fault, and a small request fails too ──┐
        ^                                                                                                     │
        └──── doubted: one row at a time is sent until that or a small request is answered <──────────────────┘

A server that was proven when a row was sent, and answers nothing after it, was lost with that row. So an outage
counts one loss of a row, however long it lasts.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from conserve.endpoints.probes import Probes
from conserve.endpoints.protocol import Url
from conserve.errors import (
    AnswerTooLong,
    EndpointError,
    EndpointFailing,
    EndpointFault,
    EngineDied,
    ServerLost,
)


class Culprit:
    """What is known of one server's answers."""

    def __init__(self, probes: Probes, base_url: str) -> None:
        self._probes, self._base_url = probes, base_url
        self.answered: set[Url] = set()  # routes on which rows were answered, with this key and this model
        self._proven = False  # a request was answered since the last trouble
        self._doubted = False  # none was, and there was trouble
        self._on_trial = False  # a row is under way to a server that is doubted
        self._mute: set[Url] = set()  # routes on which rows are answered, and small requests are not

    def forget(self) -> None:
        """Forget what is known: the server is another one."""
        self._proven = self._doubted = False
        self.answered.clear()
        self._mute.clear()

    @asynccontextmanager
    async def judging(self, model: str, route: Url) -> AsyncGenerator[None, None]:
        """Send a row in this context; a fault that is the server's becomes another error.

        Raises `EndpointFailing` if the server is doubted and another row is on trial.
        """
        trial = await self._is_trial(model, route)
        proven = self._proven
        try:
            yield
        except EndpointFault as error:
            raise await self._of_fault(error, model=model, route=route, proven=proven) from error
        except ServerLost as error:
            raise self._of_loss(str(error), proven=proven) from error
        else:
            self.answered.add(route)
            self._proven, self._doubted = True, False
            if trial and await self._probes.trouble(model, route) is not None:
                self._mute.add(route)
        finally:
            self._on_trial = self._on_trial and not trial

    async def _is_trial(self, model: str, route: Url) -> bool:
        """True if a row is to show whether a server is well that answers no small request."""
        if not self._doubted or route in self._mute:
            return False
        trouble = await self._probes.trouble(model, route)
        if trouble is None:
            self._proven, self._doubted = True, False
        elif self._on_trial:
            raise EndpointFailing(f"{self._base_url} answers no request: {trouble}")
        else:
            self._on_trial = True
        return trouble is not None

    async def _of_fault(self, error: EndpointFault, *, model: str, route: Url, proven: bool) -> EndpointError:
        """The error for an answer of no use; `proven` is what the server was when the row was sent."""
        if isinstance(error, AnswerTooLong) or route in self._mute:
            return error
        trouble = await self._probes.trouble(model, route)
        if trouble is None:
            return error
        if isinstance(trouble, EngineDied):
            return EngineDied(str(error))
        return self._of_loss(f"{self._base_url} answers no other request either: {error}", proven=proven)

    def _of_loss(self, said: str, *, proven: bool) -> EndpointFailing:
        """The error for a row whose server answers nothing any more."""
        self._proven, self._doubted = False, True
        return ServerLost(said) if proven else EndpointFailing(said)
