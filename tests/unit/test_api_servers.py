"""Questions to servers that may be anything: an answer or a reason, and the key for that server alone."""

import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from conserve.api.servers import OTHER_VERSION, STOCK, Unreported, addresses, ask, logins
from conserve.cli.fleet_report import ways
from conserve.config import Settings, load
from conserve.server_report import SchedulerReport
from tests.server_reports import answer, report

HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"
NO_JSON = b"HTTP/1.1 200 OK\r\n\r\nx"

pytestmark = pytest.mark.usefixtures("slow_servers")


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


def error_of(said: SchedulerReport | Unreported) -> str | None:
    """Why a server tells no report."""
    return said.error if isinstance(said, Unreported) else None


@pytest.mark.parametrize("said", [b"SSH-2.0-x\r\n", HALF, b"", NO_JSON])
def test_an_odd_server_has_an_error(settings: Settings, said: bytes) -> None:
    with answering(said, []) as url:
        assert error_of(ask(url, settings))


@pytest.mark.parametrize("document", ["{}", "[]", '{"detail": "all is well"}'])
def test_an_answer_that_is_no_report_is_of_another_server(settings: Settings, document: str) -> None:
    with answering(f"HTTP/1.1 200 OK\r\n\r\n{document}".encode(), []) as url:
        assert ask(url, settings) == STOCK


def test_a_report_of_another_version_says_so(settings: Settings) -> None:
    changed = answer(iterations=None)
    with answering(b"HTTP/1.1 200 OK\r\n\r\n" + changed, []) as url:
        assert ask(url, settings) == Unreported(OTHER_VERSION)


def test_a_report_with_more_fields_is_read(settings: Settings) -> None:
    with answering(b"HTTP/1.1 200 OK\r\n\r\n" + answer(online={"later": [1]}, later={}), []) as url:
        assert ask(url, settings) == report()


def test_an_address_that_is_none_has_an_error(settings: Settings) -> None:
    assert error_of(ask("http://gpu:80a", settings))


def test_a_redirect_gets_no_key(settings: Settings) -> None:
    elsewhere: list[bytes] = []
    with answering(b"HTTP/1.1 200 OK\r\n\r\n{}", elsewhere) as other:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other}/\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(moved, []) as url:
            assert error_of(ask(url, settings))
    assert elsewhere == []


def test_a_login_in_the_address_is_sent_in_place_of_a_key(settings: Settings) -> None:
    seen: list[bytes] = []
    refused = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
    with answering(refused, seen) as url:
        address = url.replace("http://", "http://ann:secret@")
        said = ask(address, replace(settings, api_key="key"))
        assert addresses(settings, [f"{address}/v1"]) == {url: address}
    assert said == Unreported("refuses the login in its address")
    assert f"Authorization: Basic {b64encode(b'ann:secret').decode()}\r\n".encode() in seen[0]
    assert f"Host: {url.removeprefix('http://')}\r\n".encode() in seen[0]


def test_a_server_of_the_fleet_has_the_login_of_the_settings_or_their_lists(
    settings: Settings, tmp_path: Path
) -> None:
    listed = tmp_path / "gpus"
    listed.write_text("http://ben:word@gpu-b:8000/v1  # the second\n")
    lists = f"file://{listed} file://{tmp_path}/gone dns://gpus:8000"
    known = logins(replace(settings, endpoint="http://ann:secret@127.0.0.1:8000", endpoints=lists))
    first = "http://ann:secret@127.0.0.1:8000"
    assert known == {
        "http://127.0.0.1:8000": first,
        f"http://{socket.gethostname()}:8000": first,
        "http://gpu-b:8000": "http://ben:word@gpu-b:8000",
    }
    here = socket.gethostname().lower()
    assert ways(f"http://ann:secret@{here}:8000")[1] == first


@pytest.mark.parametrize("rest", ["u:secret@db/x", "/x?host=db&password=secret", "u@db/x?password=secret"])
def test_no_password_of_the_store_is_shown(rest: str) -> None:
    assert "secret" not in load({"store": f"postgresql://{rest}"}).place
