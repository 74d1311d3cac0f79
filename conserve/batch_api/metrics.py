"""Route /metrics: the queue and the requests to this API, in Prometheus's text format."""

import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from conserve.jobs.telemetry.queue_metrics import QueueCollector, QueueSeen
from conserve.metrics_page import new_registry

PATH = "/metrics"
REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Buckets of a request: a listing reads a few rows of the store, an upload may take a minute."""
OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
BROKEN = 500

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ApiMetrics:
    """Metrics of one application, which has these routes.

    With `beside`, a live server's page has the process's own figures already.
    """

    def __init__(
        self, look: Callable[[], QueueSeen | None], routes: Sequence[Route], *, beside: bool = False
    ) -> None:
        self._routes = routes
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in routes}
        self.registry = new_registry(None if beside else "api", [QueueCollector(look)])
        self._requests = Counter(
            "conserve_api_requests",
            "Requests to the Batch API.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "conserve_api_request_seconds",
            "Time of a request to the Batch API until its answer has begun.",
            ["route"],
            buckets=REQUEST_S,
            registry=self.registry,
        )

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request; labels have no ids and no words of a client, of which there are many."""
        route = self._paths.get(scope.get("endpoint")) or self._asked(scope)
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def _asked(self, scope: Scope) -> str:
        """Path of the route that a request asked for, which an outer layer has answered."""
        matching = (route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return next(matching, OTHER)


class Measured:
    """Outermost layer: times each request."""

    def __init__(self, app: App, metrics: ApiMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        since, begun = time.perf_counter(), False

        def count(status: int) -> None:
            self._metrics.answered(scope, status, time.perf_counter() - since)

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not begun:  # the server's own layer answers, outside of this one
                count(BROKEN)
            raise


async def show(request: Request) -> Response:
    """Show the page."""
    metrics: ApiMetrics = request.app.state.conserve_metrics
    page = await run_in_threadpool(generate_latest, metrics.registry)
    return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})
