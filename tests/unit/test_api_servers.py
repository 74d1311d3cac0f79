"""Questions to servers that may be anything: an answer or a reason, and the key for that server alone."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from conserve.api.servers import ask
from conserve.config import Settings, load

HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"
NO_JSON = b"HTTP/1.1 200 OK\r\n\r\nx"


@contextmanager
def answering(said: bytes, seen: list[bytes]) -> Iterator[str]:
    """A socket that answers each connection with these bytes."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    seen.append(connection.recv(65536))
                    connection.sendall(said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("said", [b"SSH-2.0-x\r\n", HALF, b"", NO_JSON])
def test_an_odd_server_has_an_error(settings: Settings, said: bytes) -> None:
    with answering(said, []) as url:
        assert "error" in ask(url, settings)


def test_an_address_that_is_none_has_an_error(settings: Settings) -> None:
    assert "error" in ask("http://gpu:80a", settings)


def test_a_redirect_gets_no_key(settings: Settings) -> None:
    elsewhere: list[bytes] = []
    with answering(b"HTTP/1.1 200 OK\r\n\r\n{}", elsewhere) as other:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other}/\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(moved, []) as url:
            assert "error" in ask(url, settings)
    assert elsewhere == []


@pytest.mark.parametrize("rest", ["u:secret@db/x", "/x?host=db&password=secret", "u@db/x?password=secret"])
def test_no_password_of_the_store_is_shown(rest: str) -> None:
    assert "secret" not in load({"store": f"postgresql://{rest}"}).place
