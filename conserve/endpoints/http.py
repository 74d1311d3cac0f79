"""Any OpenAI-compatible HTTP server as an endpoint."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from typing import Any

import httpx
from msgspec.structs import replace

from conserve import open_files
from conserve.endpoints.answers import UNREADABLE
from conserve.endpoints.considerate import ConsiderateRows
from conserve.endpoints.culprit import Culprit
from conserve.endpoints.discovery import (
    LOOK_S,
    Mode,
    ServerFacts,
    discover,
    vllm_version,
)
from conserve.endpoints.exchange import (
    IN_ONE_PIECE,
    SILENT_S,
    AnswerLimits,
    AnswerMemory,
    WholeResponse,
    chunks,
    complaint,
    open_client,
    read_out,
    read_whole,
    short_response,
)
from conserve.endpoints.handing import Handing
from conserve.endpoints.other_routes import read
from conserve.endpoints.probes import Probes
from conserve.endpoints.protocol import Call, Completion, Endpoint, InFlight, KvCache, OnTokens, model_of
from conserve.endpoints.refusals import certificate_error, with_own_status
from conserve.endpoints.rejections import Rejections
from conserve.endpoints.requests import request_body, streamed_body, trace_headers
from conserve.endpoints.stream import AnswerPieces, NotFaithful, events
from conserve.endpoints.window import SendingOrder
from conserve.errors import (
    AnswerTooLong,
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    ServerLost,
    one_line,
)
from conserve.hosts import server_root, split_login

log = logging.getLogger(__name__)

PIECE_TOKENS = 8  # of a row in one event: making one takes the server longer than the rest of a token does
PROXY_S = 12.0  # longer than AWS's balancer looks for a server (10 s); Envoy gives a request up after 15 s
BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.DecodingError)


class HttpEndpoint(Endpoint):
    """The `Endpoint` protocol over HTTP.

    A co-serving server shows tokens, and rows continue from them; on other servers rows cut short start over. With
    `considerate`, rows give way to live requests as far as the server allows. `most_rows` limits the rows in
    flight, `limits` each answer and all that are under way. `of_fleet` and `of_jobs` are as of `discover`.
    """

    notice: str | None = None

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        most_rows: int | None = None,
        considerate: bool = False,
        steady: bool = False,
        of_fleet: bool = False,
        of_jobs: bool = False,
        limits: AnswerLimits | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url, login = split_login(base_url)
        self.base_url = server_root(url)
        self._model, self._most_rows, self._considerate = model, most_rows, considerate
        self._steady, self._of_fleet, self._of_jobs = steady, of_fleet, of_jobs
        self._limits = limits or AnswerLimits()
        self._memory = AnswerMemory(self._limits)
        self._server: ServerFacts | None = None
        self._streams = True
        self._order = SendingOrder()
        self._streamed: set[AnswerPieces] = set()
        self._look_again = False  # the server may be another one by now
        self._looking = asyncio.Lock()
        self._handing = Handing()
        self._watch: asyncio.Task[None] | None = None
        self._client = open_client(self.base_url, api_key, transport, login=login)
        self._probes = Probes(self._client)
        self._rows = ConsiderateRows(self._client, self._probes, lambda: self.server)
        self._culprit = Culprit(self._probes, self.base_url)
        self._rejections = Rejections(self._probes, self._culprit, self.base_url, self._see_what_it_is)

    @property
    def server(self) -> ServerFacts:
        """Facts about the server, once started."""
        assert self._server is not None, "not started"
        return self._server

    @property
    def identity(self) -> str:
        return self.server.identity

    @property
    def model(self) -> str:
        """The server's name of the model."""
        return self.server.model

    @property
    def doing(self) -> str | None:
        """Step of the start; None once the endpoint is ready."""
        return None if self._server else f"asking {self.base_url} what it serves"

    @property
    def in_flight(self) -> InFlight:
        """Tokens that streams have brought; a row without a stream counts when it ends."""
        return InFlight(sum(pieces.computed_tokens for pieces in self._streamed))

    @property
    def kv_cache(self) -> KvCache:
        """Size of the server's KV cache."""
        return self.server.kv_cache

    @property
    def capacity(self) -> int:
        adaptive = self._considerate and not self._steady and self.server.mode is not Mode.COSERVING
        return self._rows.window.size if adaptive else self.server.most_rows

    async def start(self) -> None:
        """Find out the server's kind and model."""
        await self._discover()
        if self._considerate and not self._steady and self._watch is None:
            self._watch = asyncio.create_task(self._rows.keep_looking())

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer one call.

        Raises `RequestRejected`, `EndpointUnusable` if no row can be answered, or a `RetryableError` otherwise.
        """
        await self._see_that_it_is_the_same(call)
        self._rows.sent(call.url)
        answered = False
        try:
            async with self._culprit.judging(self.server.model, call.url):
                completion = await self._complete(call, on_tokens)
            answered = True
            self._rejections.answered(call)
            return completion
        except EndpointBusy:
            self._rows.refused()
            raise
        except (EndpointUnavailable, EngineDied, ServerLost):
            self._look_again = True
            raise
        finally:
            self._rows.ended(answered=answered)
            if not self._rows.in_flight and self.server.mode is Mode.COSERVING:
                self._look_again = True  # a restart now would break no row, so go unnoticed

    async def alive(self) -> bool:
        """True if the server answers at all, whatever its answer."""
        try:
            await short_response(self._client, "GET", "/health", seconds=LOOK_S)
        except httpx.HTTPError:
            return False
        return True

    async def version(self) -> str | None:
        """Versions of ConServe and of vLLM, as far as the server tells them."""
        told = [self.server.version and f"conserve {self.server.version}", await vllm_version(self._client)]
        return ", ".join(filter(None, told)) or None

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._probes.close()
        await self._client.aclose()
        await asyncio.sleep(0)

    # The server.

    async def _discover(self) -> None:
        server = await discover(
            self._client,
            model=self._model,
            most_rows=self._most_rows,
            considerate=self._considerate,
            of_fleet=self._of_fleet,
            of_jobs=self._of_jobs,
            known=None if self._server is None or self._of_fleet else self._server.model,
        )
        if self._server is None or server.identity != self._server.identity:
            self._culprit.forget()
            self._rejections.forget()
        if self._server is None or not server.bears_as(self._server):
            self._rows.begin(server.most_rows)
        notice = server.notice(self.base_url, steady=self._steady)
        self._server, self._look_again, self.notice = server, False, notice

    async def _see_that_it_is_the_same(self, call: Call) -> None:
        """Ask again what the server is, after trouble or idle time; raises if the call was made for another."""
        if self._look_again:
            async with self._looking:
                if self._look_again:
                    try:
                        await self._discover()
                    except EndpointUnusable as error:
                        raise EndpointUnavailable(str(error)) from error
        if call.identity not in (None, self.identity) or call.model not in (None, model_of(self)):
            raise EndpointUnavailable(f"{self.base_url} serves something else now")

    async def _see_what_it_is(self, call: Call) -> None:
        """Ask what the server is by now; raises if the call was made for another."""
        self._look_again = True
        await self._see_that_it_is_the_same(call)

    # One call.

    async def _complete(self, call: Call, on_tokens: OnTokens | None) -> Completion:
        if on_tokens is not None and self._streams and self.server.resumes:
            try:
                return await self._in_pieces(call, on_tokens)
            except NotFaithful:
                self._streams = False  # a parser of the server's changes its answers, as it will all others
        return await self._in_one_piece(call)

    async def _in_one_piece(self, call: Call) -> Completion:
        begun, sent_at = False, asyncio.get_running_loop().time()
        sending = self._order.send()
        try:
            async with self._exchange(call, request_body(call, self.server)) as answer:
                begun = True
                content = await read_whole(answer, self._limits.num_bytes, self._memory)
        except (httpx.HTTPError, TimeoutError) as error:
            trouble = await self._trouble(error, begun=begun)
            if isinstance(trouble, AnswerTooLong) and not begun and self._order.waits(sending):
                why = f"{trouble}, and rows that were sent before are answered: fewer at once wait less"
                raise EndpointBusy(f"{why} (--window N)") from error
            raise trouble from error
        try:
            completion = replace(read(call, content), started_over=True)
        except EndpointFault as error:
            said = with_own_status(WholeResponse(answer.status_code, answer.headers, content))
            if said.status == httpx.codes.OK:
                raise
            waited_s = asyncio.get_running_loop().time() - sent_at
            raise await self._refused(call, said, answer.request.url, waited_s) from error
        self._order.answered(sending)
        return completion

    async def _in_pieces(self, call: Call, on_tokens: OnTokens) -> Completion:
        """Stream the answer; saved tokens are sent along, and come back as its beginning."""
        body = streamed_body(call, self.server, piece_tokens=PIECE_TOKENS)
        pieces = AnswerPieces(call.url, on_tokens, saved=len(call.resume_from))
        self._streamed.add(pieces)
        try:
            async with (
                self._exchange(call, body) as answer,
                aclosing(chunks(answer, self._limits.num_bytes, self._memory)) as received,
                aclosing(events(received)) as found,
            ):
                async for payload in found:
                    pieces.add(payload)
                await read_out(received)
            if not pieces.ended and not pieces.gained and await self._probes.is_up(self.server):
                # The next attempt would be no further, nor the one after.
                raise EndpointFault("the stream ended before the answer did, and brought no token")
            return pieces.completion()
        except (httpx.HTTPError, TimeoutError) as error:
            raise await self._trouble(error, begun=pieces.begun) from error
        except UNREADABLE as error:
            raise EndpointFault(f"the stream is no completion: {one_line(error)}") from error
        finally:
            self._streamed.discard(pieces)

    @asynccontextmanager
    async def _exchange(self, call: Call, body: dict[str, Any]) -> AsyncGenerator[httpx.Response, None]:
        """A response of status 200, with its body in time; raises `TimeoutError` if it is late."""
        in_turn = bool(body.get("stream")) and self.server.mode is Mode.COSERVING
        async with AsyncExitStack() as stack:
            async with self._handing.turn() if in_turn else nullcontext():
                if in_turn:  # another server may have taken the place of this one meanwhile
                    await self._see_that_it_is_the_same(call)
                await stack.enter_async_context(asyncio.timeout(self._limits.seconds))
                sent_at = asyncio.get_running_loop().time()
                silence = httpx.USE_CLIENT_DEFAULT if body.get("stream") else IN_ONE_PIECE
                sending = self._client.stream(
                    "POST", call.url, json=body, headers=trace_headers(call), timeout=silence
                )
                answer = await stack.enter_async_context(sending)
            if answer.status_code != httpx.codes.OK:
                waited_s = asyncio.get_running_loop().time() - sent_at
                raise await self._refused(call, await complaint(answer), answer.request.url, waited_s)
            yield answer

    async def _refused(
        self, call: Call, reply: WholeResponse, url: httpx.URL, waited_s: float
    ) -> EndpointError:
        """The error for a response with a status other than 200, for which the row waited so long."""
        if reply.status == httpx.codes.GATEWAY_TIMEOUT and await self._outlives_a_proxy(waited_s):
            return AnswerTooLong(
                f"HTTP 504 after {waited_s:.0f} s, and the server is up: this row takes longer than a "
                f"proxy in front of {self.base_url} waits; raise its timeout (nginx: proxy_read_timeout; "
                "Envoy: the route's timeout)"
            )
        return await self._rejections.error_of(call, reply, url, self.server)

    async def _outlives_a_proxy(self, waited_s: float) -> bool:
        """True if the server is up, and a proxy gave up a row that did not wait for live requests."""
        may_wait = self.server.mode is Mode.COSERVING
        return waited_s > PROXY_S and not may_wait and await self._probes.is_up(self.server)

    async def _trouble(self, error: httpx.HTTPError | TimeoutError, *, begun: bool) -> EndpointError:
        """The error for a connection that broke or took too long."""
        # The row may be at fault, unless the server is gone or let the row wait for live requests.
        if isinstance(error, httpx.ReadTimeout | TimeoutError):
            return self._late(error, begun=begun)
        if (refused := certificate_error(error, self.base_url)) is not None:
            return refused
        if (full := open_files.too_many(error)) is not None:
            return EndpointUnavailable(full)
        said = one_line(error) or type(error).__name__
        if isinstance(error, BROKEN):
            if await self._probes.is_up(self.server):
                return EndpointFault(f"the connection broke: {said}")
            return ServerLost(f"{self.base_url} is gone: {said}")
        return EndpointUnavailable(f"cannot reach {self.base_url}: {said}")

    def _late(self, error: httpx.ReadTimeout | TimeoutError, *, begun: bool) -> EndpointError:
        """The error for an answer that did not come in time."""
        silent = isinstance(error, httpx.ReadTimeout)
        said = (
            f"no byte of the answer within {SILENT_S:,.0f} s"
            if silent
            else f"no whole answer within {self._limits.seconds:,g} s (max_answer_s)"
        )
        waited = self.server.mode is Mode.COSERVING and (silent or not begun)
        return EndpointUnavailable(said) if waited else AnswerTooLong(said)
