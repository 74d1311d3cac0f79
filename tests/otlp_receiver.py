"""A real OTLP/HTTP collector in the test's process: it keeps the spans that it is sent."""

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Span:
    """A span as it came, its ids in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    service: str


@dataclass(slots=True, eq=False)
class OtlpReceiver:
    """Listens at `url` until the context ends."""

    spans: list[Span] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    status: int = 200
    url: str = ""
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.paths.add(self.path)
                packed = self.headers.get("content-encoding") == "gzip"
                receiver.spans += decoded(gzip.decompress(body) if packed else body)
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Span]:
        """Spans of this name, in the order of their beginnings."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)


def decoded(body: bytes) -> list[Span]:
    """Spans of an export request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = plain(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            found += [
                Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    failed=span.status.code == 2,
                    attributes=plain(span.attributes),
                    service=service,
                )
                for span in scope.spans
            ]
    return found


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
