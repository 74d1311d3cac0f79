"""One POST to a receiver: the connection goes to a checked address, and everything has to end in time."""

import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import httpcore

from conserve.jobs.hooks.addresses import Resolve, allowed, resolved
from conserve.units import parse_retry_after

CONNECT_S = 10.0  # to each address
CONNECTED_S = 30.0  # to any of a name's addresses
WHOLE_S = 20.0  # from the first byte sent to the status line


class ReceiverAnswer(NamedTuple):
    """Answer of a receiver; its body is not read."""

    status: int
    retry_after_s: float | None = None


def post(
    url: str,
    body: str,
    headers: Mapping[str, str],
    *,
    private: bool,
    context: ssl.SSLContext,
    resolve: Resolve = resolved,
) -> ReceiverAnswer:
    """Send a message; raises an error of `httpcore`, `OSError` or `NotPublic` without an answer.

    Redirects are not followed and proxies of the environment not used: both would lead around the checked address.
    """
    backend = CheckedBackend(resolve, private=private, clock=time.monotonic)
    with (
        httpcore.ConnectionPool(network_backend=backend, ssl_context=context) as pool,
        pool.stream("POST", url, headers=list(headers.items()), content=body.encode()) as answer,
    ):
        named = {name.lower(): value for name, value in answer.headers}
        asked = named.get(b"retry-after", b"").decode("latin-1")
        return ReceiverAnswer(answer.status, parse_retry_after(asked, now=time.time()))


class CheckedBackend(httpcore.NetworkBackend):
    """Connects to the addresses that were checked: no second look-up could give others."""

    def __init__(self, resolve: Resolve, *, private: bool, clock: Callable[[], float]) -> None:
        self._resolve, self._private, self._clock = resolve, private, clock
        self._plain = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        error: Exception | None = None
        addresses = allowed(self._resolve(host, port), private=self._private)
        until = self._clock() + CONNECTED_S
        for address in addresses:
            left_s = until - self._clock()
            if left_s <= 0:
                raise httpcore.ConnectTimeout(
                    f"no address of {host} takes a connection within {CONNECTED_S:g} s"
                )
            timeout_s = min(CONNECT_S, left_s)
            try:
                stream = self._plain.connect_tcp(str(address), port, timeout_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
            else:
                return TimedStream(stream, self._clock() + WHOLE_S, self._clock)
        raise error or httpcore.ConnectError(f"{host} has no address")

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        raise httpcore.UnsupportedProtocol("messages go over TCP")


class TimedStream(httpcore.NetworkStream):
    """A connection whose every step ends by one moment, so that a receiver that trickles holds up nothing."""

    def __init__(self, stream: httpcore.NetworkStream, until: float, clock: Callable[[], float]) -> None:
        self._stream, self._until, self._clock = stream, until, clock

    def _left(self) -> float:
        left = self._until - self._clock()
        if left <= 0:
            raise httpcore.ReadTimeout(f"no answer within {WHOLE_S:g} s")
        return left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        secure = self._stream.start_tls(ssl_context, server_hostname, self._left())
        return TimedStream(secure, self._until, self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
