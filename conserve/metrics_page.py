"""The metrics page of a process: its registry, and the server of a process that has no other one."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from conserve import __version__
from conserve.hosts import in_url


class Build(Collector):
    """Version of the program."""

    def __init__(self, command: str) -> None:
        self._command = command

    def collect(self) -> Iterator[Metric]:
        value = {"version": __version__, "command": self._command}
        yield InfoMetricFamily("conserve_build", "Version and command of this process.", value)


def new_registry(command: str | None, collectors: Sequence[Collector] = ()) -> CollectorRegistry:
    """Registry with these collectors, and with the process's own figures unless `command` is None."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge for each counter: when it was made
    registry = CollectorRegistry()
    if command is not None:
        ProcessCollector(registry=registry)
        registry.register(Build(command))
    for collector in collectors:
        registry.register(collector)
    return registry


class Served:
    """A metrics page that is served from a thread until it is closed."""

    def __init__(self, url: str, close: Callable[[], None]) -> None:
        self.url, self.close = url, close


def serve_page(registry: CollectorRegistry, host: str, port: int) -> Served:
    """Serve `GET /metrics`; port 0 takes a free one. Raises `OSError` if the address cannot be had."""
    server, thread = start_http_server(port, addr=host, registry=registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return Served(f"http://{in_url(host)}:{server.server_port}/metrics", close)
