"""Small questions to the Batch API's process over connections that stay open."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from conserve.engine.vllm.server import batch_connection
from conserve.engine.vllm.server.batch_connection import BatchConnections, Reply, whole

Answer = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length:  2\r\n\r\n{}"
REPLY = Reply(200, [(b"content-type", b"application/json"), (b"content-length", b"2")], b"{}")


async def with_server(path: Path, answer: Answer, ask: Callable[[BatchConnections], Awaitable[None]]) -> int:
    """Let a server answer each connection, told its number, and ask it; returns the number of connections."""
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        try:
            await answer(len(connections) - 1, reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_unix_server(serve, str(path)):
        api = BatchConnections(str(path))
        await ask(api)
        api.close()
        await asyncio.gather(*(writer.wait_closed() for writer in connections), return_exceptions=True)
    return len(connections)


async def question(reader: asyncio.StreamReader) -> bytes | None:
    """The next question; None at the end of the connection."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def always(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await question(reader) is not None:
        writer.write(OK)


def test_questions_share_a_connection_and_say_what_was_asked(tmp_path: Path) -> None:
    heard = []

    async def answer(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (asked := await question(reader)) is not None:
            heard.append(asked)
            writer.write(OK)

    async def ask(api: BatchConnections) -> None:
        assert await api.get(b"/a?b=c", [(b"host", b"d"), (b"accept", b"\xe9")], 60.0) == REPLY
        assert await api.get(b"/e", [], 60.0) == REPLY

    assert asyncio.run(with_server(tmp_path / "s", answer, ask)) == 1
    assert heard == [b"GET /a?b=c HTTP/1.1\r\nhost: d\r\naccept: \xe9\r\n\r\n", b"GET /e HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize("size", [1, 7, len(OK) - 1, len(OK)])
def test_an_answer_may_come_in_pieces(size: int) -> None:
    connection = batch_connection.BatchConnection()

    class Transport(asyncio.Transport):
        def write(self, data: object) -> None: ...

    async def go() -> None:
        connection.connection_made(Transport())
        for _ in range(2):
            answer = connection.ask(b"")
            for start in range(0, len(OK), size):
                assert not answer.done()
                connection.data_received(OK[start : start + size])
            assert await answer == REPLY

    asyncio.run(go())


def test_a_connection_that_was_closed_while_idle_is_replaced(tmp_path: Path) -> None:
    async def once(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await question(reader)
        writer.write(OK)

    async def ask(api: BatchConnections) -> None:
        for _ in range(3):
            assert await api.get(b"/", [], 60.0) == REPLY

    assert asyncio.run(with_server(tmp_path / "s", once, ask)) == 3


def test_a_new_connection_that_ends_early_is_an_error(tmp_path: Path) -> None:
    async def part(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await question(reader)
        writer.write(OK[:-1])

    async def ask(api: BatchConnections) -> None:
        with pytest.raises(ConnectionError):
            await api.get(b"/", [], 60.0)

    assert asyncio.run(with_server(tmp_path / "s", part, ask)) == 1


def test_a_process_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(BatchConnections(str(tmp_path / "s")).get(b"/", [], 60.0))


def test_a_late_answer_is_never_taken_for_that_to_another_question(tmp_path: Path) -> None:
    asked, late = asyncio.Event(), asyncio.Event()

    async def answer(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await question(reader) is not None:
            asked.set()
            if number == 0:
                await late.wait()
            writer.write(OK if number else OK.replace(b"{}", b"[]"))

    async def ask(api: BatchConnections) -> None:
        given_up = asyncio.create_task(api.get(b"/", [], 60.0))
        await asked.wait()
        given_up.cancel()
        late.set()
        await asyncio.gather(given_up, return_exceptions=True)
        assert await api.get(b"/", [], 60.0) == REPLY

    assert asyncio.run(with_server(tmp_path / "s", answer, ask)) == 2


def test_an_answer_that_does_not_come_in_time_is_an_error(tmp_path: Path) -> None:
    async def silent(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await question(reader) is not None:
            pass

    async def ask(api: BatchConnections) -> None:
        with pytest.raises(TimeoutError):
            await api.get(b"/", [], 0.01)

    assert asyncio.run(with_server(tmp_path / "s", silent, ask)) <= 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 many OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: two\r\n\r\n",
        OK + OK,
    ],
)
def test_another_form_is_an_error_and_ends_the_connection(tmp_path: Path, garbage: bytes) -> None:
    async def answer(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await question(reader)
        writer.write(OK if number else garbage)
        await question(reader)

    async def ask(api: BatchConnections) -> None:
        with pytest.raises(ValueError):
            await api.get(b"/", [], 60.0)
        assert await api.get(b"/", [], 60.0) == REPLY

    assert asyncio.run(with_server(tmp_path / "s", answer, ask)) == 2


def test_what_was_not_asked_for_ends_the_connection(tmp_path: Path) -> None:
    said = asyncio.Event()

    async def twice(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await question(reader)
        writer.write(OK)
        await said.wait()
        if number == 0:
            writer.write(OK)
        await question(reader)

    async def ask(api: BatchConnections) -> None:
        assert await api.get(b"/", [], 60.0) == REPLY
        said.set()
        (kept,) = api._idle
        while kept._transport is not None:
            await asyncio.sleep(0)
        assert await api.get(b"/", [], 60.0) == REPLY

    assert asyncio.run(with_server(tmp_path / "s", twice, ask)) == 2


def test_questions_beyond_the_limit_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_connection, "MOST", 2)

    async def ask(api: BatchConnections) -> None:
        assert await asyncio.gather(*(api.get(b"/", [], 60.0) for _ in range(9))) == [REPLY] * 9

    assert asyncio.run(with_server(tmp_path / "s", always, ask)) <= 2


def test_the_end_of_an_answer_is_where_it_says() -> None:
    assert [whole(OK[:length]) for length in range(len(OK))] == [None] * len(OK)
    assert whole(OK) == REPLY
