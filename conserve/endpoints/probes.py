"""Small requests that tell whether a server answers: a look at its health, and completions of one token."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar
from uuid import uuid4

import httpx

from conserve.endpoints.discovery import (
    LACKS_ROUTE,
    Mode,
    ServerFacts,
    base_url_of,
    healthy,
    served_models,
)
from conserve.endpoints.exchange import WholeResponse, short_response
from conserve.endpoints.other_routes import read
from conserve.endpoints.protocol import Call, Url
from conserve.endpoints.refusals import BUSY, OF_ROWS, error_message, refusal, with_own_status
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    RequestRejected,
    one_line,
)

log = logging.getLogger(__name__)

PROBE_S = 30.0  # for the answer to a completion of one token
PASSING = frozenset({502, *BUSY}) - {429, 498, 529}  # as of a server that starts again
NEWER_LIMIT = "max_completion_tokens"  # OpenAI's models that reason refuse `max_tokens`, and a limit below 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallAnswer:
    """Outcome of a small request: answered (or rejected for its contents), an error, or late."""

    answered: bool
    error: EndpointError | None = None


def smallest_body(route: Url, *, reasons: bool = False) -> dict[str, Any]:
    """A small request, for a model that `reasons` or not.

    Each has a text of its own: a gateway with a cache answers a text that it knows while its servers are down.
    """
    text = f"a {uuid4().hex[:8]}"
    if route is Url.CHAT:
        limit = {NEWER_LIMIT: 16} if reasons else {"max_tokens": 1}
        return {"messages": [{"role": "user", "content": text}], **limit}
    if route is Url.COMPLETIONS:
        return {"prompt": text, "max_tokens": 1}
    if route is Url.EMBEDDINGS:
        return {"input": text}
    return {"input": text, "max_output_tokens": 16}  # OpenAI takes no fewer


def has_route(status: int) -> bool:
    """True if the response to a small request shows that the server has the route, and takes our key there."""
    return status == httpx.codes.OK or status in OF_ROWS


class Probes:
    """Asks one server; rows that want to know the same thing at the same time share a request."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._reasons: set[str] = set()  # models that want the newer limit
        self._said = False  # that the server rejects small requests
        self.answered = 0  # small requests

    async def is_up(self, server: ServerFacts) -> bool:
        """True if the server answers a request that needs no work."""
        is_vllm = server.has_metrics or server.mode is Mode.COSERVING

        async def up() -> bool:
            try:
                await (healthy if is_vllm else served_models)(self._client)
            except EndpointUnusable as error:
                return not server.lists_models and error.status in LACKS_ROUTE
            return True

        return await self._shared("health", up)

    async def status(self, model: str, route: Url) -> int | None:
        """Status of the response to a small request on this route; None without a response."""
        reply = await self._reply(model, route)
        return None if isinstance(reply, httpx.HTTPError) else reply.status

    async def status_again(self, route: Url, body: dict[str, Any]) -> int | None:
        """Status of the response to a request that was answered before; None without a response in time."""

        async def ask() -> int | None:
            try:
                reply = await short_response(self._client, "POST", route, json=body, seconds=PROBE_S)
                return with_own_status(reply).status
            except httpx.HTTPError:
                return None

        return await self._shared(f"{route} again", ask)

    async def any_route(self, model: str, *, but: Url) -> bool:
        """True if the server has another route than this: it answers, or rejects, a small request there."""
        for route in Url:
            status = None if route == but else await self.status(model, route)
            if status is not None and has_route(status):
                return True
        return False

    async def small(self, model: str, route: Url) -> SmallAnswer:
        """Ask a small request on this route; says whether its outcome tells of trouble."""
        reply = await self._reply(model, route)
        if isinstance(reply, httpx.ReadTimeout):  # the server may be busy with long rows
            return SmallAnswer(answered=False)
        if isinstance(reply, httpx.HTTPError):
            said = one_line(reply) or type(reply).__name__
            return SmallAnswer(answered=False, error=EndpointUnavailable(said))
        if reply.status != httpx.codes.OK:
            refused = refusal(reply, httpx.URL(route), route, now=time.time(), answers=True)
            if isinstance(refused, RequestRejected):
                return SmallAnswer(answered=True)
            if isinstance(refused, EndpointBusy | EndpointFault) and reply.status in PASSING:
                refused = EndpointUnavailable(str(refused))
            return SmallAnswer(answered=False, error=refused)
        try:
            read(Call(key="", url=route, body=smallest_body(route)), reply.content)
        except EndpointError as error:
            return SmallAnswer(answered=False, error=error)
        return SmallAnswer(answered=True)

    async def _reply(self, model: str, route: Url) -> WholeResponse | httpx.HTTPError:
        """The response to a small request, or why there is none."""

        async def reply() -> WholeResponse | httpx.HTTPError:
            try:
                return await self.smallest(model, route)
            except httpx.HTTPError as error:
                return error

        return await self._shared(f"{route} {model}", reply)

    async def smallest(self, model: str, route: Url) -> WholeResponse:
        """The response to a small request on this route; raises `httpx.HTTPError` without one."""
        if route is Url.CHAT and model in self._reasons:
            return await self._post(model, route, smallest_body(route, reasons=True))
        reply = await self._post(model, route, smallest_body(route))
        rejected = route is Url.CHAT and reply.status == httpx.codes.BAD_REQUEST
        if not rejected or NEWER_LIMIT not in error_message(reply.content):
            return reply
        self._reasons.add(model)
        return await self._post(model, route, smallest_body(route, reasons=True))

    async def _post(self, model: str, route: Url, body: dict[str, Any]) -> WholeResponse:
        asked = {"model": model, **body}
        reply = with_own_status(
            await short_response(self._client, "POST", route, json=asked, seconds=PROBE_S)
        )
        self.answered += reply.status == httpx.codes.OK
        return reply

    async def seconds(self, model: str, route: Url) -> float | None:
        """Time of a small request on this route: infinite if the server is in trouble, None if it is rejected."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            reply = await self.smallest(model, route)
        except httpx.HTTPError:
            return inf
        if reply.status == httpx.codes.OK:
            return loop.time() - begun
        if reply.status in BUSY or reply.status >= 500:
            return inf
        if has_route(reply.status) and not self._said:
            self._said = True
            log.warning(
                "%s answers small requests with HTTP %d, so the number of rows at once cannot follow its load "
                "and stays as it is; --steady --window N sets it",
                base_url_of(self._client),
                reply.status,
            )
        return None

    async def _shared(self, about: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = self._under_way.get(about)
        if task is None or task.done():
            task = self._under_way[about] = asyncio.create_task(ask())
        found: T = await asyncio.shield(task)
        return found

    async def close(self) -> None:
        """Withdraw the requests that are under way."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
