"""Tells whether a refusal is the row's or the server's: whether another request is answered right then."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx

from conserve.endpoints.culprit import Culprit
from conserve.endpoints.discovery import ServerFacts
from conserve.endpoints.exchange import WholeResponse
from conserve.endpoints.probes import Probes, has_route
from conserve.endpoints.protocol import Call, Url
from conserve.endpoints.refusals import BUSY, GIVEN_UP, OF_ROWS, is_of_account, refusal, retry_after_s
from conserve.endpoints.requests import request_body
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointUnavailable,
    EndpointUnusable,
    RequestRejected,
)

DOUBTFUL = (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)  # about one request, or about all of them
UNPAID_AFTER_S = 120.0  # without an answer: a limit of tokens a minute lets rows through before
IN_A_ROW = 5  # rejections of rows without an answer between them, from which on a small request is asked


class Rejections:
    """Record of one server's refusals, by route.

    A row whose contents are rejected fails at once. After some of these without an answer between them everything
    may be refused, as by a proxy. It is if a small request is rejected in the same way, and so is the row that was
    answered last: some servers reject small requests alone. `look_again` asks the server what it is, and raises if
    it is another than the call was made for.
    """

    def __init__(
        self, probes: Probes, culprit: Culprit, base_url: str, look_again: Callable[[Call], Awaitable[None]]
    ) -> None:
        self._probes, self._culprit, self._base_url = probes, culprit, base_url
        self._look_again = look_again
        self._in_a_row: Counter[Url] = Counter()
        self._answered: dict[Url, Call] = {}  # last on each route
        self._unpaid_since: float | None = None

    def forget(self) -> None:
        """Forget what is known: the server is another one."""
        self._in_a_row.clear()
        self._answered.clear()
        self._unpaid_since = None

    def answered(self, call: Call) -> None:
        """Note that a row was answered."""
        self._unpaid_since = None
        self._in_a_row[call.url] = 0
        self._answered[call.url] = call

    async def error_of(
        self, call: Call, reply: WholeResponse, url: httpx.URL, server: ServerFacts
    ) -> EndpointError:
        """The error for a response with a status other than 200."""
        error = refusal(reply, url, call.url, now=time.time())
        if isinstance(error, EndpointUnusable) and reply.status in BUSY and self._may_pass():
            return EndpointBusy(str(error), retry_after_s=retry_after_s(reply.headers, now=time.time()))
        rejected = isinstance(error, RequestRejected)
        if reply.status in DOUBTFUL or (rejected and reply.status not in OF_ROWS):
            return await self._doubtful(call, reply, url, server)
        if reply.status == httpx.codes.BAD_REQUEST and is_of_account(reply):
            return await self._of_account(call, error, server)
        return await self._of_contents(call, reply, error, server) if rejected else error

    def _may_pass(self) -> bool:
        """True while an account without credit may be one over its limit of tokens a minute: Qwen's API says so."""
        now = asyncio.get_running_loop().time()
        self._unpaid_since = now if self._unpaid_since is None else self._unpaid_since
        return now - self._unpaid_since < UNPAID_AFTER_S

    async def _doubtful(
        self, call: Call, reply: WholeResponse, url: httpx.URL, server: ServerFacts
    ) -> EndpointError:
        """The error for a refusal, which is the row's only if the server answers another request right now."""
        answered = self._culprit.answered
        route = call.url if call.url in answered else min(answered, default=call.url)
        status = await self._probes.status(server.model, route)
        unclear = status is None or status in (*BUSY, *GIVEN_UP) or status >= 500
        error = refusal(reply, url, call.url, now=time.time())
        missing = isinstance(error, RequestRejected)  # a thing, and neither the key nor the model
        answers = status == httpx.codes.OK or (missing and status is not None and has_route(status))
        if missing and not answers and not answered and not unclear:
            answers = await self._probes.any_route(server.model, but=route)
        if answers:
            return refusal(reply, url, call.url, now=time.time(), answers=True)
        await self._look_again(call)
        if unclear or (missing and answered):
            return self._all_refused(error)
        if missing:
            where = f"{self._base_url} answers no request on any route: {str(error).rstrip('. ')}"
            return EndpointUnusable(f"{where}; correct --endpoint (CONSERVE_ENDPOINT)", status=reply.status)
        return error

    async def _of_account(self, call: Call, error: EndpointError, server: ServerFacts) -> EndpointError:
        """The error for a 400 that names the key or the model; the row's unless a small request gets it too."""
        try:
            small = await self._probes.smallest(server.model, call.url)
        except httpx.HTTPError as broken:
            return self._all_refused(broken)
        if small.status != httpx.codes.BAD_REQUEST or not is_of_account(small):
            return error
        return EndpointUnusable(f"{error}; check CONSERVE_API_KEY and --model", status=small.status)

    async def _of_contents(
        self, call: Call, reply: WholeResponse, error: EndpointError, server: ServerFacts
    ) -> EndpointError:
        """The error for a rejection of a row's contents, which is the row's unless everything is rejected."""
        self._in_a_row[call.url] += 1
        if self._in_a_row[call.url] < IN_A_ROW:
            return error
        status = await self._probes.status(server.model, call.url)
        before = self._answered.get(call.url)
        if status == reply.status and before is not None:
            status = await self._probes.status_again(before.url, request_body(before, server))
            if status == reply.status:
                await self._look_again(call)
                return self._all_refused(error)
        self._in_a_row[call.url] = 0
        return error

    def _all_refused(self, error: Exception) -> EndpointUnavailable:
        return EndpointUnavailable(f"{self._base_url} answers no other request either: {error}")
