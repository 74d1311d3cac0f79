"""A bound on connections, with real sockets against uvicorn: no client can use it up by being slow."""

import asyncio
import resource
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.server.guard import LIMITS, RequestGuard
from conserve.http_server import RESERVED, affordable, bounded
from tests.tiers import in_full

GET = b"GET /v1/quick HTTP/1.1\r\nHost: server\r\n\r\n"
HALF_A_HEADER = b"GET /v1/quick HTTP/1.1\r\nHos"
HALF_A_BODY = b"POST /v1/body HTTP/1.1\r\nHost: server\r\nContent-Length: 100\r\n\r\n{"
BUSY = b"GET /v1/busy HTTP/1.1\r\nHost: server\r\n\r\n"


class Client(NamedTuple):
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> bytes:
        """The status line of the next answer, whose rest is read; empty if the connection is closed instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return b""
        lines = head.lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        await self.reader.readexactly(length)
        return head.split(b"\r\n")[0]


class Running:
    """A server with the guard and a bound, in this event loop."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.arrived: asyncio.Queue[str] = asyncio.Queue()  # requests whose route runs
        self.release = asyncio.Event()  # ends requests to /v1/busy
        self.clients: list[Client] = []

    async def connect(self, sent: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        client.writer.write(sent)
        await client.writer.drain()
        self.clients.append(client)
        return client


@asynccontextmanager
async def serving(most: int) -> AsyncIterator[Running]:
    running = Running(0)

    async def quick(request: Request) -> PlainTextResponse:
        return PlainTextResponse("done")

    async def body(request: Request) -> PlainTextResponse:
        running.arrived.put_nowait("body")
        return PlainTextResponse(str(len(await request.body())))

    async def busy(request: Request) -> PlainTextResponse:
        running.arrived.put_nowait("busy")
        await running.release.wait()
        return PlainTextResponse("done")

    routes = [Route("/v1/quick", quick), Route("/v1/busy", busy), Route("/v1/body", body, methods=["POST"])]
    app = Starlette(routes=routes)
    app.state.args = Namespace(**{LIMITS: ApiLimits(connections=most)})
    app.add_middleware(RequestGuard)
    config = uvicorn.Config(app, port=0, http=bounded(most), log_level="critical", lifespan="off")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    running.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        running.release.set()
        for client in running.clients:
            client.writer.transport.abort()
        server.force_exit = True
        await server.shutdown()


def on_server(most: int, play: Callable[[Running], Awaitable[None]]) -> None:
    async def go() -> None:
        async with serving(most) as running:
            await play(running)

    asyncio.run(go())


@pytest.fixture
def descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1300:
        pytest.skip("too few file descriptors: ulimit -n 2048")


@pytest.mark.parametrize(
    ("slow", "most"),
    [
        *((b"", 300), (HALF_A_HEADER, 300), (HALF_A_BODY, 300), (HALF_A_HEADER, 4096)),
        *in_full((b"", 4096), (HALF_A_BODY, 4096)),
    ],
)
@pytest.mark.usefixtures("descriptors")
def test_five_hundred_slow_clients_do_not_stop_a_fast_one(slow: bytes, most: int) -> None:
    async def play(running: Running) -> None:
        for _ in range(500):
            await running.connect(slow)
        fast = await running.connect(GET)
        assert await fast.answer() == b"HTTP/1.1 200 OK"

    on_server(most, play)


def test_the_connection_that_waits_for_its_client_longest_makes_room() -> None:
    async def play(running: Running) -> None:
        first, second = [await running.connect(HALF_A_HEADER) for _ in range(2)]
        third = await running.connect(GET)
        assert await third.answer() == b"HTTP/1.1 200 OK"
        assert await first.answer() == b""  # closed
        second.writer.write(b"t: server\r\n\r\n")
        assert await second.answer() == b"HTTP/1.1 200 OK"

    on_server(2, play)


def test_one_between_two_requests_makes_room_too() -> None:
    async def play(running: Running) -> None:
        idle = await running.connect(GET)
        assert await idle.answer() == b"HTTP/1.1 200 OK"
        another = await running.connect(GET)
        assert await another.answer() == b"HTTP/1.1 200 OK"
        assert await idle.answer() == b""

    on_server(1, play)


def test_a_request_that_is_served_is_never_dropped_and_who_comes_on_top_is_told_to_come_back() -> None:
    async def play(running: Running) -> None:
        served = [await running.connect(BUSY) for _ in range(2)]
        for _ in served:
            await running.arrived.get()
        on_top = await running.connect(GET)
        head = await on_top.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head.lower()
        assert b"--max-connections" in await on_top.reader.read()  # to its end: it is closed
        running.release.set()
        for client in served:
            assert await client.answer() == b"HTTP/1.1 200 OK"
        later = await running.connect(GET)
        assert await later.answer() == b"HTTP/1.1 200 OK"

    on_server(2, play)


def test_a_body_that_does_not_come_makes_room_and_its_request_ends() -> None:
    async def play(running: Running) -> None:
        half = await running.connect(HALF_A_BODY)
        assert await running.arrived.get() == "body"
        fast = await running.connect(GET)
        assert await fast.answer() == b"HTTP/1.1 200 OK"
        assert await half.answer() == b""

    on_server(1, play)


def test_an_unread_answer_makes_room() -> None:
    class Connection:
        number = 0
        cycle = Namespace(response_complete=False, more_body=False)
        flow: Any = Namespace(write_paused=True)

    from conserve.http_server import waits_for_its_client

    assert waits_for_its_client(Connection())
    Connection.flow = Namespace(write_paused=False)
    assert not waits_for_its_client(Connection())


def test_the_bound_leaves_file_descriptors_for_everything_else() -> None:
    assert affordable(4096, 65_535) == 4096
    assert affordable(4096, 1024) == 1024 - RESERVED
    assert affordable(4096, 100) == 1
