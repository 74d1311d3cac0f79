"""ASGI applications served by uvicorn in a thread, which ends as soon as it is told to."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import uvicorn
import uvicorn.server
from starlette.types import ASGIApp

from tests.commands import HANGS_S, until


async def nap(seconds: float) -> None:
    """Sleep for a twentieth of the time."""
    await asyncio.sleep(seconds / 20)


# uvicorn looks ten times a second whether it is to end and whether its connections have ended.
ASYNCIO = SimpleNamespace(**{**vars(asyncio), "sleep": nap})


@contextmanager
def served(app: ASGIApp, listening: socket.socket) -> Iterator[None]:
    """Serve the application at a bound socket, which is closed at the end."""
    # uvicorn ends connections after 5 s at rest, which is when httpx drops its own: a request then has no answer.
    config = uvicorn.Config(app, log_config=None, ws="none", timeout_keep_alive=int(HANGS_S))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    with patch.object(uvicorn.server, "asyncio", ASYNCIO):
        thread.start()
        until(lambda: server.started)
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()
            listening.close()
