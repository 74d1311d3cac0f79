"""Exchanges with a server, each bounded in time and in size."""

import asyncio
import functools
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import httpx

from conserve.config import Settings
from conserve.endpoints.proxies import proxy_of
from conserve.errors import AnswerTooLong, EndpointBusy, EndpointFault, SettingsError, one_line
from conserve.hosts import about_login, about_query, bearer, without_login
from conserve.units import MIB

CONNECT_S = 10.0
SILENT_S = 1800.0  # longest time without a byte: an offline request may wait long behind online traffic
IN_ONE_PIECE = httpx.Timeout(SILENT_S, connect=CONNECT_S, read=None)
"""Of an answer whose first byte comes with its last: `AnswerLimits.seconds` alone bounds the wait for it."""
KEPT_OPEN = 64  # connections kept open between requests
REST_S = 4.0  # of a connection between two requests: vLLM ends it after 5 s, under a request of that moment
COMPLAINT_BYTES = 64 << 10  # of an error's body: enough for any message
COMPLAINT_S = 10.0  # time for an error's body to come
END_S = 0.1  # from the last part of an answer to the end of its body
LAST_PORT = 65_535
KEEPALIVE = (  # a connection that is silent for a minute is asked for a sign of life, four times in a minute
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)
    ),
)
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # variables that name those to trust
PAGE_BYTES = 16 * MIB  # of a page that describes the server, such as /metrics
UNCOMPRESSED = "identity"  # encoding of bodies: limits count what comes, of which another makes much more


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Limits of one answer: seconds from sending the request to the answer's end, and bytes.

    All answers that are under way have `all_bytes` together, or `num_bytes` if that is more.
    """

    seconds: float = 3600.0
    num_bytes: int = 64 * MIB
    all_bytes: int = 512 * MIB

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The limits in the settings."""
        return cls(
            seconds=settings.max_answer_s,
            num_bytes=int(settings.max_answer_mib * MIB),
            all_bytes=int(settings.max_answers_mib * MIB),
        )


class AnswerMemory:
    """Bytes that the answers under way hold together.

    An answer that finds too little left gives up, and what it holds is free for the others. So some of them always
    come to their end, where answers that waited for each other would not.
    """

    def __init__(self, limits: AnswerLimits) -> None:
        self._most = max(limits.all_bytes, limits.num_bytes)
        self._left = self._most

    def take(self, num_bytes: int) -> None:
        """Take bytes; raises `EndpointBusy` if so many are not left."""
        if num_bytes > self._left:
            most = f"{self._most / MIB:g} MiB (max_answers_mib)"
            raise EndpointBusy(f"the answers under way are longer than {most} together")
        self._left -= num_bytes

    def give(self, num_bytes: int) -> None:
        """Give bytes back."""
        self._left += num_bytes


class WholeResponse(NamedTuple):
    """A response with its whole body."""

    status: int
    headers: httpx.Headers
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


def check_address(base_url: str) -> None:
    """Raise `SettingsError` for a malformed address, one with a query, or one whose port no machine has."""
    if odd := about_query(base_url):
        raise SettingsError(f"--endpoint is {odd}")
    try:
        if (port := httpx.URL(base_url).port) is not None and port > LAST_PORT:
            raise httpx.InvalidURL(f"the last port is {LAST_PORT}")
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        why = about_login(base_url) or f": {error}"  # the error may repeat a part of the password
        raise SettingsError(f"--endpoint {without_login(base_url)!r} is no address{why}") from error


def transport_to(url: httpx.URL, limits: httpx.Limits) -> httpx.AsyncHTTPTransport:
    """A transport that finds out within two minutes that the server's machine is gone, unless a proxy is between.

    Without it a row waits for as long as an answer may take.
    """
    # Where no certificate comes, none need be read.
    verify: ssl.SSLContext | bool = certificates() if url.scheme == "https" else False
    return httpx.AsyncHTTPTransport(
        verify=verify, limits=limits, proxy=proxy_of(url), socket_options=KEEPALIVE
    )


def certificates() -> ssl.SSLContext:
    """Certificates by which servers are trusted, read once and not for each server of a fleet."""
    return _certificates(*(os.environ.get(name) for name in CERTIFICATES))


@functools.cache
def _certificates(*places: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context()


def open_client(
    base_url: str,
    api_key: str | None,
    transport: httpx.AsyncBaseTransport | None,
    *,
    login: tuple[str, str] | None = None,
    silent_s: float = SILENT_S,
) -> httpx.AsyncClient:
    """A client for the server at this address; raises `SettingsError` for a malformed address or key."""
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise SettingsError("the API key has characters that no header carries; correct CONSERVE_API_KEY")
    check_address(base_url)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_OPEN, keepalive_expiry=REST_S)
    return httpx.AsyncClient(
        base_url=base_url,
        headers={**bearer(key), "Accept-Encoding": UNCOMPRESSED},
        auth=login,
        timeout=httpx.Timeout(silent_s, connect=CONNECT_S),
        transport=transport or transport_to(httpx.URL(base_url), limits),
    )


def plain_bytes(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes; raises `httpx.DecodingError` if it is compressed, which was not asked for."""
    encoding = answer.headers.get("content-encoding") or UNCOMPRESSED
    if encoding.strip().lower() != UNCOMPRESSED:
        raise httpx.DecodingError(
            f"the body has the encoding {one_line(encoding, most=60)}, and none was asked for; "
            "turn compression off in the proxy before the server"
        )
    return answer.aiter_bytes()


async def chunks(
    answer: httpx.Response, num_bytes: int, memory: AnswerMemory | None = None
) -> AsyncGenerator[bytes, None]:
    """The body as it comes; raises `AnswerTooLong` past this many bytes, `EndpointBusy` if the memory is full."""
    held = 0
    try:
        async with aclosing(plain_bytes(answer)) as found:  # type: ignore[type-var]
            async for chunk in found:
                if held + len(chunk) > num_bytes:
                    raise AnswerTooLong(f"the answer is longer than {num_bytes / MIB:g} MiB (max_answer_mib)")
                if memory is not None:
                    memory.take(len(chunk))
                held += len(chunk)
                yield chunk
    finally:
        if memory is not None:
            memory.give(held)


async def read_whole(answer: httpx.Response, num_bytes: int, memory: AnswerMemory | None = None) -> bytes:
    """The body in one piece; raises as `chunks` does."""
    async with aclosing(chunks(answer, num_bytes, memory)) as found:
        return b"".join([chunk async for chunk in found])


async def read_out(received: AsyncGenerator[bytes, None]) -> None:
    """Read the end of a body whose last event has come, so that its connection takes the next request."""
    with suppress(httpx.HTTPError, TimeoutError, EndpointBusy, EndpointFault):  # the answer is there already
        async with asyncio.timeout(END_S):
            await anext(received, None)


async def complaint(answer: httpx.Response) -> WholeResponse:
    """An error's response with as much of its body as comes in time."""
    content = b""
    with suppress(TimeoutError, httpx.HTTPError):  # its status says enough
        async with asyncio.timeout(COMPLAINT_S), aclosing(plain_bytes(answer)) as found:  # type: ignore[type-var]
            async for chunk in found:
                content += chunk
                if len(content) >= COMPLAINT_BYTES:
                    break
    return WholeResponse(answer.status_code, answer.headers, content[:COMPLAINT_BYTES])


async def short_response(
    client: httpx.AsyncClient, method: str, path: str, *, seconds: float, json: Any = None
) -> WholeResponse:
    """A short response; raises `httpx.HTTPError` if it is not there as a whole within this many seconds."""
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(method, path, json=json, timeout=seconds) as answer,
        ):
            return WholeResponse(answer.status_code, answer.headers, await read_whole(answer, PAGE_BYTES))
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from error
    except EndpointFault as error:
        raise httpx.DecodingError(f"an answer of more than {PAGE_BYTES / MIB:g} MiB") from error
