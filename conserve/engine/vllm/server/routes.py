"""Routes beside vLLM's: the scheduler's report and settings, the spill, and errors for unknown routes."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Mapping
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

import conserve
from conserve.engine.policy.policies import BENCHED
from conserve.engine.policy.preemption import LEAVE_RULES
from conserve.engine.policy.promises import Promises
from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.vllm.profiling.learning import require_model, scheduler_says
from conserve.engine.vllm.requests.data_parallel import most_requests, number_of_engines
from conserve.engine.vllm.scheduling.row_terms import RowTerms
from conserve.engine.vllm.server.privileges import CALLER, SLO, Role
from conserve.engine.vllm.server.reports import LastReports
from conserve.engine.vllm.settings import command_of, section_of
from conserve.errors import ProfileMissing
from conserve.names import OFF
from conserve.openai_error import error_body, kind_of
from conserve.regime_change import RegimeChange
from conserve.server_report import PATH, SPILL_PATH, UNREADABLE, WITHIN
from conserve.variables import SUPERVISOR

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from starlette.requests import Request
    from starlette.responses import Response

LOOK_S = 0.05  # between two checks of the writing workers


def attach(app: FastAPI) -> None:
    """Add the routes."""
    from conserve.engine.vllm.server import batch_proxy
    from conserve.engine.vllm.server.metrics import MetricsRoute

    app.add_route(PATH, show, methods=["GET"])
    app.add_route(PATH, change, methods=["POST"])
    app.add_route(SPILL_PATH, spill, methods=["POST"])
    app.add_exception_handler(HTTPException, not_answered)
    app.state.conserve_reports = reports = LastReports(scheduler_says)
    MetricsRoute(reports).attach(app)
    batch_proxy.attach(app)


async def show(request: Request) -> Response:
    """Answer with the scheduler's report; with `within_s`, after this time with its last one and the age of it."""
    wait_s = seconds(request.query_params.get(WITHIN))
    if wait_s is None:
        return await answer(request, None)
    reports: LastReports = request.app.state.conserve_reports
    report = await reports.within(request.app.state.engine_client, wait_s)
    if report is None:
        return refused(HTTPStatus.SERVICE_UNAVAILABLE, "the scheduler has not reported yet; ask again")
    return reply_with(request, report.said, age_s=round(report.age_s, 3))


def seconds(given: str | None) -> float | None:
    """Seconds of a query's parameter; None without a number of seconds."""
    try:
        wait_s = float(given or "")
    except ValueError:
        return None
    return wait_s if 0 <= wait_s < inf else None


async def change(request: Request) -> Response:
    """Change policy, preemption, checkpoints or SLO, if the engine was started to allow it (`conserve bench`)."""
    client = request.app.state.engine_client
    section = section_of(client.vllm_config)
    if not section.control:
        return refused(HTTPStatus.FORBIDDEN, "this engine keeps its policy and its SLO")
    try:
        wanted = change_of(await request.body(), section.policy)
    except (*UNREADABLE, TypeError, AttributeError):
        slo = '{"ttft_ms": 1500, "tbt_ms": {"p50": 40, "p99": 150}, "harm": null}'
        example = f'{{"preemption": "off", "checkpoint": "on", "slo": {slo}}}'
        names = f"policies are {', '.join(BENCHED)}; rules of preemption are {', '.join((*LEAVE_RULES, OFF))}"
        return refused(HTTPStatus.BAD_REQUEST, f"send e.g. {example}; {names}")
    try:
        promised = {} if wanted.slo is UNSET else wanted.slo
        if promised and (said := await scheduler_says(client)) is not None:
            require_model(said, promised, command_of(client.vllm_config))
    except ProfileMissing as missing:
        return refused(HTTPStatus.CONFLICT, str(missing))
    return await answer(request, wanted.document())


def change_of(content: bytes, own_policy: str) -> RegimeChange:
    """The change that a body asks for; raises one of `UNREADABLE`, TypeError or AttributeError."""
    change = msgspec.json.decode(content, type=RegimeChange)
    if change.policy is not UNSET and change.policy not in (*BENCHED, own_policy):
        raise ValueError(f"there is no policy {change.policy!r}")
    if change.preemption is not UNSET and change.preemption not in (*LEAVE_RULES, OFF):
        raise ValueError(f"there is no rule of preemption {change.preemption!r}")
    Promises.of({} if change.slo is UNSET else change.slo)
    RowTerms.of({} if change.hygen is UNSET else change.hygen, now=0.0)
    return change


async def spill(request: Request) -> Response:
    """Write KV of rows in flight to disk; only for the process that started this server and is about to stop it."""
    secret, sent = os.environ.get(SUPERVISOR, ""), request.headers.get(SUPERVISOR, "")
    if not secret or not hmac.compare_digest(sent.encode(), secret.encode()):
        return refused(HTTPStatus.FORBIDDEN, "only conserve serve may ask for that")
    ask = request.app.state.engine_client.engine_core.call_utility_async
    said = await ask("conserve_spill", "begin")
    while said is not None and said["writing"]:
        await asyncio.sleep(LOOK_S)
        said = await ask("conserve_spill", "end")
    if said is None:
        return refused(HTTPStatus.NOT_FOUND, "this engine has no checkpoints to spill")
    return JSONResponse(said)


async def answer(request: Request, wanted: Mapping[str, Any] | None) -> Response:
    """The scheduler's report, with figures of the API server."""
    client = request.app.state.engine_client
    said = await scheduler_says(client, wanted)
    if said is not None:
        remember(request.app.state, said)
    return reply_with(request, said)


def reply_with(request: Request, said: Mapping[str, Any] | None, **more: float) -> Response:
    """The response with a report."""
    if said is None:
        return refused(HTTPStatus.NOT_FOUND, "this engine runs with another scheduler")
    client = request.app.state.engine_client
    caller = CALLER.get()
    at_start, weights = getattr(request.app.state, "conserve_identity", ""), said.get("weights")
    return JSONResponse(
        {
            "version": conserve.__version__,
            "resumes": caller is None or caller.role is Role.HARVESTER,
            "identity": f"{at_start}+{weights}" if weights is not None else at_start,
            "engines": number_of_engines(client),
            "max_num_seqs": most_requests(client),
            "offline_priority": OFFLINE_PRIORITY,
            **more,
            **said,
        }
    )


def remember(state: State, said: Mapping[str, Any]) -> None:
    """Keep the report, and the SLO where the guard reads it: clients may not ask for a TTFT below it."""
    state.conserve_reports.keep(said)
    setattr(state, SLO, said["slo"]["ttft_ms"])


async def not_answered(request: Request, error: Exception) -> Response:
    """Answer for a missing route or method; vLLM's own answer has no explanation."""
    assert isinstance(error, HTTPException)
    lacks = (
        f"this server does not answer {request.method} {request.url.path}; GET /openapi.json lists its routes"
    )
    message = lacks if error.status_code in (404, 405) else error.detail
    return refused(error.status_code, message, error.headers)


def refused(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as OpenAI's API words it, of vLLM's types."""
    kind = "NotFoundError" if status == HTTPStatus.NOT_FOUND else kind_of(status)
    return JSONResponse(error_body(message, kind=kind, code=int(status)), status, headers)
