"""The routes as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from conserve.batch_api import batches, files, metrics, openapi, refusals
from conserve.batch_api.access import FREE, Access, KeyRing, StoreHere
from conserve.batch_api.foresight import Foresight
from conserve.batch_api.moved import MoveWatch
from conserve.batch_api.polls import Polls
from conserve.batch_api.reads import Reads
from conserve.batch_api.refusals import Refused
from conserve.batch_api.state import ApiState
from conserve.batch_api.streams import Streams
from conserve.batch_api.workers import Admissions, Deliveries, StepThread
from conserve.errors import ConserveError
from conserve.jobs.batches.lines import Limits
from conserve.jobs.hooks.courier import Courier
from conserve.store.database.store import Store

STOP_S = 5.0  # for a step of a worker under way

ROUTES = [
    Route("/v1/files", files.create, methods=["POST"]),
    Route("/v1/files", files.index, methods=["GET"]),
    Route("/v1/files/{id}", files.show, methods=["GET"]),
    Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
    Route("/v1/files/{id}/content", files.content, methods=["GET"]),
    Route("/v1/batches", batches.create, methods=["POST"]),
    Route("/v1/batches", batches.index, methods=["GET"]),
    Route("/v1/batches/{id}", batches.show, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", batches.cancel, methods=["POST"]),
    Route("/v1/batches/{id}/events", batches.stream, methods=["GET"]),
]


async def description(request: Request) -> Response:
    """Describe the routes, for tools that make or try clients."""
    return JSONResponse(openapi.document(ROUTES))


async def health(request: Request) -> Response:
    """Answer load balancers."""
    return JSONResponse({"status": "ok"})


OTHERS = [
    Route("/health", health),
    Route("/openapi.json", description),
    Route(metrics.PATH, metrics.show),
]


def application(
    store: Store, limits: Limits | None = None, *, beside: bool = False, open_metrics: bool = False
) -> Starlette:
    """The application over an open store; its workers run while it does.

    With `beside`, only a live server can reach it, and passes requests on. With `open_metrics` the metrics want
    no key.
    """
    limits = limits or Limits()
    moves = MoveWatch(store)
    courier, deliveries = Courier(store), Deliveries(store, moves)
    reads, foresight = Reads(store), Foresight(store)
    api = ApiState(
        store=store,
        limits=limits,
        admissions=Admissions(store, limits),
        deliveries=deliveries,
        moves=moves,
        streams=Streams(store, deliveries.ask),
        foresight=foresight,
        reads=reads,
        polls=Polls(reads, foresight),
    )

    @asynccontextmanager
    async def working(app: Starlette) -> AsyncIterator[None]:
        sender = StepThread("hooks", lambda now: courier.step())
        workers = api.admissions.worker, api.deliveries.worker, sender
        for worker in workers:
            worker.start()
        try:
            yield
        finally:
            courier.stop()
            for worker in workers:
                worker.stop(STOP_S)
            api.reads.close()

    routes = [*OTHERS, *ROUTES]
    measured = metrics.ApiMetrics(api.foresight.queue, routes, beside=beside)
    free = FREE | {metrics.PATH} if open_metrics else FREE
    app = Starlette(
        routes=routes,
        lifespan=working,
        middleware=[
            Middleware(metrics.Measured, metrics=measured),
            Middleware(Access, ring=KeyRing(reads), beside=beside, free=free),
            Middleware(StoreHere, moves=moves),
        ],
        exception_handlers={
            Refused: refusals.refused,
            ConserveError: refusals.failed,
            HTTPException: refusals.not_answered,
            Exception: refusals.broken,
        },
    )
    app.router.redirect_slashes = False  # a path that ends in a slash is another path
    app.state.conserve_api = api
    app.state.conserve_metrics = measured
    return app
