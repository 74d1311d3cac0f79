"""Route /metrics: the backlog by deadline in Prometheus's text format, for programs that add engines."""

from collections.abc import Iterator

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from conserve.batch_api.api import Api
from conserve.jobs.deadlines.backlog import Backlog

PATH = "/metrics"
FORMAT = "text/plain; version=0.0.4; charset=utf-8"
HOUR_S = 3600


async def show(request: Request) -> Response:
    """Show the seconds of work that wait, by deadline."""
    found = await run_in_threadpool(Api.of(request).foresight.now)
    return PlainTextResponse("".join(f"{line}\n" for line in lines(found.backlog)), media_type=FORMAT)


def lines(found: Backlog | None) -> Iterator[str]:
    """Lines of the page; none of the backlog before anything was harvested."""
    if found is None:
        return
    yield from head("conserve_backlog_seconds", "Predicted seconds of work that is due within so many hours.")
    for within_s, due_s in found.due_s:
        yield f'conserve_backlog_seconds{{due_within="{within_s // HOUR_S}h"}} {due_s:.1f}'
    yield f'conserve_backlog_seconds{{due_within="any"}} {found.total_s:.1f}'
    yield from head(
        "conserve_deadline_load",
        "Largest share, over all deadlines, of the time until it that the work due by then takes.",
    )
    yield f"conserve_deadline_load {found.load:.4f}"
    yield from head("conserve_backlog_jobs", "Jobs with rows to run.")
    yield f"conserve_backlog_jobs {found.jobs}"


def head(name: str, says: str) -> Iterator[str]:
    """Lines in front of a gauge."""
    yield f"# HELP {name} {says}"
    yield f"# TYPE {name} gauge"
