"""Connections of streamed rows: the next row takes the same one, whatever the server sends behind an answer."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.protocol import Call, Url
from tests.server_reports import FRONT_END

FACTS = {
    "/v1/models": {"data": [{"id": "served"}]},
    "/v1/conserve": FRONT_END,
}
PIECE = {"index": 0, "text": "yes", "finish_reason": "stop", "token_ids": [7], "prompt_token_ids": [1, 2]}
USAGE = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
EVENTS = [{"id": "a", "choices": [PIECE]}, {"id": "a", "choices": [], "usage": USAGE}]
BODY = b"".join(b"data: %s\n\n" % msgspec.json.encode(event) for event in EVENTS) + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

Write = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def at_once(writer: asyncio.StreamWriter) -> None:
    writer.write(END)


async def never(writer: asyncio.StreamWriter) -> None:
    pass


async def garbage(writer: asyncio.StreamWriter) -> None:
    writer.write(b"5\r\nworse\r\n")


@pytest.mark.parametrize(("end", "connections"), [(at_once, 1), (never, 3), (garbage, 3)])
def test_streamed_rows_share_a_connection_whose_bodies_end(end: Write, connections: int) -> None:
    assert asyncio.run(connections_of_three_rows(end)) == connections


async def connections_of_three_rows(end: Write) -> int:
    """Connections that brought rows, of three rows that are sent one after the other."""
    streamed: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [
                    int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")
                ]
                await reader.readexactly(sum(lengths))
                method, path, *_ = head.split()
                if method == "post":
                    streamed.add(writer)
                    writer.write(HEAD + b"%x\r\n%s\r\n" % (len(BODY), BODY))
                    await end(writer)
                else:
                    said = msgspec.json.encode(FACTS.get(path.partition("?")[0], {}))
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(said), said))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    endpoint = HttpEndpoint(f"http://{host}:{port}")
    await endpoint.start()
    try:
        for number in range(3):
            call = Call(
                key=str(number), url=Url.COMPLETIONS, body={"prompt": "?"}, identity=endpoint.identity
            )
            completion = await endpoint.complete(call, lambda tokens: None)
            assert completion.choices[0].text == "yes"
    finally:
        await endpoint.close()
        server.close()
    return len(streamed)
