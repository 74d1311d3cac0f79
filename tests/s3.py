"""An S3 server for tests (moto's), and a proxy before it that answers requests with faults."""

import http.client
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOP = ("expect", "transfer-encoding", "content-length")  # between two neighbours alone
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTKEYTESTKEY",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-nothing-shows",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
CONTENT = "content-length"


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the proxy has read."""

    method: str
    path: str


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer instead of the server's: a status, or a connection that is cut after some bytes of the answer."""

    status: int | None = None
    cut_after: int = 0
    passed_on: bool = False
    """True if the server gets the request all the same, and only its answer is lost."""


Judge = Callable[[Request], Fault | None]


@dataclass
class Proxy:
    """Passes requests on to a server; `judge` names the fault of each, None for none."""

    upstream: str
    judge: Judge = lambda request: None
    seen: list[Request] = field(default_factory=list)
    faults: int = 0
    address: str = ""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        request = Request(handler.command, handler.path)
        self.seen.append(request)
        body = body_of(handler)
        fault = self.judge(request)
        if fault is None or fault.passed_on:
            answer = self.ask(handler, body)
        if fault is None:
            self.reply(handler, answer.status, answer.getheaders(), answer.read())
            return
        self.faults += 1
        handler.close_connection = True
        if fault.status is not None:
            self.reply(handler, fault.status, [("connection", "close")], b"")
        elif fault.cut_after:
            whole = self.ask(handler, body)
            content = whole.read()
            handler.send_response_only(whole.status)
            for name, value in whole.getheaders():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(content[: fault.cut_after])
            handler.wfile.flush()

    def ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> http.client.HTTPResponse:
        """Pass a request on."""
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in HOP}
        connection.request(handler.command, handler.path, body=body, headers=headers)
        return connection.getresponse()

    def reply(
        self, handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        """Send an answer; that to a HEAD has the length of the object, and no body."""
        handler.send_response_only(status)
        lengths = [value for name, value in headers if name.lower() == CONTENT]
        for name, value in headers:
            if name.lower() not in (CONTENT, "transfer-encoding", "connection"):
                handler.send_header(name, value)
        is_head = handler.command == "HEAD" and lengths
        handler.send_header("Content-Length", lengths[0] if is_head else str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)


def body_of(handler: BaseHTTPRequestHandler) -> bytes:
    """Body of a request, of a known length or in chunks."""
    if handler.headers.get("transfer-encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get(CONTENT) or 0))
    body = b""
    while size := int(handler.rfile.readline().partition(b";")[0], 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    while handler.rfile.readline().strip():
        pass
    return body


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """Run a proxy before a server."""
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            with suppress(ConnectionError):
                proxy.handle(self)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one  # noqa: N815

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server in a process of its own; yields its host and port.

    Commands fork off the test's process, which therefore must not be in the middle of a server's work.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", address.rpartition(":")[2]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **quiet) as server:
        try:
            while not answers(address):
                assert server.poll() is None, "the S3 server has ended"
            yield address
        finally:
            server.kill()


def answers(address: str) -> bool:
    """True once a server answers at an address."""
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        time.sleep(0.02)
        return False
    return True


def make_bucket(server: str) -> str:
    """Make a bucket of a new name; returns the name."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    connection = http.client.HTTPConnection(server, timeout=60)
    connection.request("PUT", f"/{name}", headers={"Host": server, "Authorization": AUTHORIZED})
    assert connection.getresponse().status == 200
    return name


AUTHORIZED = f"AWS4-HMAC-SHA256 Credential={KEYS['AWS_ACCESS_KEY_ID']}/20200101/us-east-1/s3/aws4_request"
