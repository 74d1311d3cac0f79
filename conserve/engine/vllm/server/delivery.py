"""Times at which tokens of live answers leave the API server, beside the engine's: the way to clients.

The guard makes a `Delivery` for each request, which sees what is sent; `delivering` tells it which live request of
the engine's the answer comes from, and of which class. While there are such answers, and until what they say has
faded, the engine's scheduler is told once a second (`runtime/way`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from math import inf
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from conserve.engine.policy.view import DEFAULT_CLASS, OFFLINE_PRIORITY
from conserve.engine.runtime.way import Way
from conserve.engine.vllm.requests.engines import ask_engines
from conserve.engine.vllm.requests.token_watch import state_of
from conserve.engine.vllm.server.live_classes import class_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import RequestStateStats

log = logging.getLogger("vllm.conserve")
TOLD_EVERY_S = 1.0
BODY = "http.response.body"
TELLER = "conserve_way"  # attribute of vLLM's front end

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class WayTeller:
    """Keeps the ways of one API server, and tells the engines of them."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.ways: dict[str, Way] = {}  # by class
        self._name = uuid4().hex
        self._promises: dict[str, Any] = {}  # by class: names of what is promised, as the engine said last
        self._due = 0.0
        self._telling: asyncio.Task[None] | None = None  # kept, or it might be collected while it runs

    def way(self, live_class: str) -> Way:
        """The way of a class."""
        return self.ways.setdefault(live_class, Way())

    def noted(self, now: float) -> None:
        """Tell the engines if a second has passed since they were told."""
        if now >= self._due and (self._telling is None or self._telling.done()):
            self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        """Tell the engines, again and again until there is no way to tell of."""
        while await self._told(time.monotonic()):
            await asyncio.sleep(TOLD_EVERY_S)

    async def _told(self, now: float) -> bool:
        """Tell the engines once; True if clients have anything later."""
        self._due = now + TOLD_EVERY_S
        ways_ms = {}
        for name, way in self.ways.items():
            way.fade(now=now)
            ways_ms[name] = way.beyond_ms(self._promises.get(name, {}))
        try:
            answers = await ask_engines(self.llm, "conserve_way", self._name, ways_ms)
        except Exception:  # an engine that fails says so elsewhere
            log.debug("the engine was not told of the way to clients", exc_info=True)
            return False
        if answers[0] is None:  # another scheduler runs
            self._due = inf
            return False
        self._promises = answers[0]
        return any(
            ms for beyond in ways_ms.values() for by_name in beyond.values() for ms in by_name.values()
        )


class Delivery:
    """One answer on its way to its client."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._teller: WayTeller | None = None  # None for an answer without times
        self._request, self._class = "", DEFAULT_CLASS
        self._parts = 0  # of the engine's requests that the answer comes from
        self._stats: RequestStateStats | None = None
        self._engine_at = self._sent_at = 0.0  # of the newest token

    def comes_from(
        self, llm: AsyncLLM, request_id: str, samples: int, live_class: str = DEFAULT_CLASS
    ) -> None:
        """Note a live request of the engine's. An answer from several, or of several samples, has no times."""
        self._parts += samples
        self._class = live_class
        self._teller, self._request = (teller_of(llm), request_id) if self._parts == 1 else (None, "")

    def watching(self, send: Send) -> Send:
        """Pass messages on to `send`, and note when the parts of a streamed body are handed over."""

        async def watched(message: Message) -> None:
            if self._teller is not None and message["type"] == BODY and message.get("more_body"):
                self._handed_over(self._teller, time.monotonic())
            await send(message)

        return watched

    def _handed_over(self, teller: WayTeller, now: float) -> None:
        stats = self._stats
        if stats is None:
            state = state_of(teller.llm, self._request)
            self._stats = stats = None if state is None else state.stats
            if stats is None or not stats.first_token_ts:
                # An answer of one token is over by now; without statistics there is no time.
                self._teller = None
                return
            arrived = now - (time.time() - stats.arrival_time)
            in_engine, to_client = stats.first_token_ts - arrived, now - self._began
            teller.way(self._class).latencies["ttft_ms"].note(in_engine * 1e3, to_client * 1e3)
        elif stats.last_token_ts > self._engine_at:  # not the end of an answer, nor what follows a role
            gap, to_client = stats.last_token_ts - self._engine_at, now - self._sent_at
            teller.way(self._class).latencies["tbt_ms"].note(gap * 1e3, to_client * 1e3)
        else:
            return
        self._engine_at, self._sent_at = stats.last_token_ts, now
        teller.noted(now)


DELIVERY: ContextVar[Delivery | None] = ContextVar("conserve_delivery", default=None)
"""Delivery of the current request; None in a server without the guard."""


def delivering(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.generate`: the delivery is told of live requests of one answer."""

    @functools.wraps(generate)
    def wrapped(llm: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **rest: Any) -> Any:
        delivery = DELIVERY.get()
        if delivery is not None and rest.get("priority", 0) < OFFLINE_PRIORITY:
            delivery.comes_from(
                llm, request_id, getattr(sampling_params, "n", 1), class_of(llm, sampling_params)
            )
        return generate(llm, prompt, sampling_params, request_id, *args, **rest)

    return wrapped


def teller_of(llm: AsyncLLM) -> WayTeller:
    """The teller of this front end, made when it is first asked for."""
    found: WayTeller | None = getattr(llm, TELLER, None)
    if found is None:
        found = WayTeller(llm)
        setattr(llm, TELLER, found)
    return found
