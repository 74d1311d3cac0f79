"""Rows beside requests of others, on a server without ConServe's scheduler: how many at once."""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf

import httpx

from conserve.endpoints.discovery import Mode, ServerFacts, metrics
from conserve.endpoints.probes import Probes
from conserve.endpoints.protocol import Url
from conserve.endpoints.window import ALONE_S, CongestionWindow, OtherRequests, Ours

LOOK_EVERY_S = 1.0  # between two reads of vLLM's metrics
JUST_SENT = 2  # looks within which a slow engine takes a request in
PROBE_EVERY_S = 5.0  # between two small requests where no metrics tell that others are there


class ConsiderateRows:
    """Rows at a server, and how many there may be at once.

    Small requests take as long as requests of others wait. vLLM's metrics tell whether there are others: where
    there are none, rows fill the server.
    """

    def __init__(self, client: httpx.AsyncClient, probes: Probes, server: Callable[[], ServerFacts]) -> None:
        self._client, self._probes, self._server = client, probes, server
        self.window = CongestionWindow(high=1)
        self.in_flight = self._answered = 0
        self._route = Url.CHAT  # of the row that was sent last
        self._others = OtherRequests()
        self._sent = 0
        self._sent_before = deque([0], maxlen=JUST_SENT + 1)  # by look
        self._probe_at = self._pressed_at = -inf
        self._ended_at = -inf  # the row that was the last one there

    def begin(self, most_rows: int) -> None:
        """Begin at a server, or at another one at its address."""
        self.window, self._others = CongestionWindow(high=most_rows), OtherRequests()

    def sent(self, route: Url) -> None:
        """Note that a row is sent."""
        self.in_flight += 1
        self._sent += 1
        self._route = route

    def ended(self, *, answered: bool) -> None:
        """Note that a row is at the server no more."""
        self.in_flight -= 1
        self._answered += answered
        self._ended_at = asyncio.get_running_loop().time()

    def refused(self) -> None:
        """Note that the server refused a row as busy; a burst of refusals is one sign of pressure."""
        now = asyncio.get_running_loop().time()
        if now >= self._pressed_at + LOOK_EVERY_S:
            self._pressed_at = now
            self._press()

    async def keep_looking(self) -> None:
        """Move the window by what the server tells, repeatedly while rows are in flight."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S if self._server().has_metrics else PROBE_EVERY_S)
            if self.in_flight and self._server().mode is not Mode.COSERVING:
                await self.look()
            else:
                self._others.forget()
            if not self.in_flight and asyncio.get_running_loop().time() - self._ended_at > ALONE_S:
                self.window.start_over()  # others may be there when the next rows come

    async def look(self) -> None:
        """Move the window once."""
        if not self._server().has_metrics:
            await self._probe()
            return
        before = self._ours
        page = await metrics(self._client)
        if page is None:
            self._press()
            return
        now = asyncio.get_running_loop().time()
        others = self._others.observe(page, before, self._ours, now=now)
        queued = self._queued(page.waiting)
        if not others:
            self.window.fill(rows=self.in_flight, queued=queued)
            if now >= self._probe_at and not page.waiting:  # the scale is there once others come
                self._probe_at = now + PROBE_EVERY_S
                await self._probe(moves=False)
        elif queued:
            self.window.press()
        else:
            await self._probe()

    def _queued(self, waiting: float) -> float:
        """Requests that wait in the server's queue, but for those that were just sent."""
        self._sent_before.append(self._sent)
        return max(0.0, waiting - (self._sent - self._sent_before[0]))

    @property
    def _ours(self) -> Ours:
        return Ours(in_flight=self.in_flight, answered=self._answered + self._probes.answered)

    def _press(self) -> None:
        """Halve the window; whoever keeps the server busy may be in front of it, so that no metrics show them."""
        self.window.press()
        self._others.forget()

    async def _probe(self, *, moves: bool = True) -> None:
        """Time a small request. One that is rejected tells nothing; vLLM's metrics alone let no rows in then."""
        window, route, rows = self.window, self._route, self.in_flight
        patience_s = max(LOOK_EVERY_S, window.patience_s(route))
        try:
            async with asyncio.timeout(None if patience_s == inf else patience_s):
                probe_s = await self._probes.seconds(self._server().model, route)
        except TimeoutError:
            probe_s = patience_s
        if probe_s is not None:
            window.observe(route, probe_s, rows=rows, moves=moves)
        elif moves and self._server().has_metrics:
            window.press()
