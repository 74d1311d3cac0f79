"""A server of another kind for clients of batches: it answers every upload, batch and poll at once.

    python -m tests.benchmarks.elsewhere PORT

Clients that are busy with it take the same processor time as beside a measured server, and ask nothing of that one.
"""

import asyncio
import sys

BODY = b'{"id": "batch_elsewhere", "status": "in_progress"}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection until it is closed."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name == b"content-length":
                    await reader.readexactly(int(value))
            writer.write(ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve(port: int) -> None:
    """Serve until SIGTERM."""
    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
