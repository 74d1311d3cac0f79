"""A port that no other process of the machine is given while a test's servers start, end and start again."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def hold() -> socket.socket:
    """Bind a free port that refuses connections until a server that reuses addresses listens there too."""
    holding = socket.socket()
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holding.bind(("127.0.0.1", 0))
    return holding


@contextmanager
def held_port() -> Iterator[int]:
    """Yield the number of a port that is held meanwhile."""
    with hold() as holding:
        yield holding.getsockname()[1]
