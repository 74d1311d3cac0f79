"""Times at which tokens of live answers leave the API server, beside the engine's: the delay of delivery.

The guard makes a `Delivery` for each request, which sees what is sent; `delivering` tells it which live request of
the engine's the answer comes from, and of which class. While there are such answers, and until what they say has
faded, the engine's scheduler is told once a second (`runtime/delivery_delay`).
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
from conserve.engine.runtime.delivery_delay import DeliveryDelay
from conserve.engine.vllm.requests.data_parallel import ask_engines
from conserve.engine.vllm.requests.token_watch import state_of
from conserve.engine.vllm.server.live_classes import class_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import RequestStateStats

log = logging.getLogger("vllm.conserve")
REPORT_EVERY_S = 1.0
BODY = "http.response.body"
REPORTER = "conserve_delays"  # attribute of vLLM's front end

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class DelayReporter:
    """Keeps the delays of one API server, and reports them to the engines."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.delays: dict[str, DeliveryDelay] = {}  # by class
        self._name = uuid4().hex
        self._promises: dict[str, Any] = {}  # by class: names of what is promised, as the engine said last
        self._due = 0.0
        self._reporting: asyncio.Task[None] | None = None  # kept, or it might be collected while it runs

    def of_class(self, live_class: str) -> DeliveryDelay:
        """The delays of a class."""
        return self.delays.setdefault(live_class, DeliveryDelay())

    def noted(self, now: float) -> None:
        """Report to the engines if a second has passed since the last report."""
        if now >= self._due and (self._reporting is None or self._reporting.done()):
            self._reporting = asyncio.ensure_future(self._report())

    async def _report(self) -> None:
        """Report to the engines, again and again until there is no delay to report."""
        while await self._report_once(time.monotonic()):
            await asyncio.sleep(REPORT_EVERY_S)

    async def _report_once(self, now: float) -> bool:
        """Report to the engines once; True if clients have anything later."""
        self._due = now + REPORT_EVERY_S
        delays_ms = {}
        for name, delay in self.delays.items():
            delay.fade(now=now)
            delays_ms[name] = delay.delays_ms(self._promises.get(name, {}))
        try:
            answers = await ask_engines(self.llm, "conserve_delays", self._name, delays_ms)
        except Exception:  # an engine that fails says so elsewhere
            log.debug("the engine was not told of delays to clients", exc_info=True)
            return False
        if answers[0] is None:  # another scheduler runs
            self._due = inf
            return False
        self._promises = answers[0]
        return any(
            ms
            for by_latency in delays_ms.values()
            for by_name in by_latency.values()
            for ms in by_name.values()
        )


class Delivery:
    """One answer on its way to its client."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._reporter: DelayReporter | None = None  # None for an answer without times
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
        self._reporter, self._request = (reporter_of(llm), request_id) if self._parts == 1 else (None, "")

    def watching(self, send: Send) -> Send:
        """Pass messages on to `send`, and note when the parts of a streamed body are handed over."""

        async def watched(message: Message) -> None:
            if self._reporter is not None and message["type"] == BODY and message.get("more_body"):
                self._handed_over(self._reporter, time.monotonic())
            await send(message)

        return watched

    def _handed_over(self, reporter: DelayReporter, now: float) -> None:
        stats = self._stats
        if stats is None:
            state = state_of(reporter.llm, self._request)
            self._stats = stats = None if state is None else state.stats
            if stats is None or not stats.first_token_ts:
                # An answer of one token is over by now; without statistics there is no time.
                self._reporter = None
                return
            arrived = now - (time.time() - stats.arrival_time)
            in_engine, to_client = stats.first_token_ts - arrived, now - self._began
            reporter.of_class(self._class).latencies["ttft_ms"].note(in_engine * 1e3, to_client * 1e3)
        elif stats.last_token_ts > self._engine_at:  # not the end of an answer, nor what follows a role
            gap, to_client = stats.last_token_ts - self._engine_at, now - self._sent_at
            reporter.of_class(self._class).latencies["tbt_ms"].note(gap * 1e3, to_client * 1e3)
        else:
            return
        self._engine_at, self._sent_at = stats.last_token_ts, now
        reporter.noted(now)


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


def reporter_of(llm: AsyncLLM) -> DelayReporter:
    """The reporter of this front end, made when it is first asked for."""
    found: DelayReporter | None = getattr(llm, REPORTER, None)
    if found is None:
        found = DelayReporter(llm)
        setattr(llm, REPORTER, found)
    return found
