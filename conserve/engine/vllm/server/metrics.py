"""vLLM's /metrics with what our scheduler counts. Imported in API servers only."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

log = logging.getLogger("vllm.conserve")
PATH = "/metrics"
WAIT_S = 2.0  # for the scheduler, which answers between two iterations; then the answer before it is shown

Ask = Callable[[Any], Awaitable[dict[str, Any] | None]]


class Count(NamedTuple):
    """A counter: its name without `_total`, what it says, where it stands in the scheduler's report."""

    name: str
    says: str
    place: tuple[str, ...]


COUNTS = (
    Count("conserve_online_requests", "Live requests that got a token.", ("online", "requests")),
    Count("conserve_offline_tokens", "Tokens computed for offline requests.", ("offline", "tokens")),
    Count("conserve_iterations", "Iterations that the latency model learned from.", ("iterations",)),
    Count("conserve_planned_iterations", "Iterations with a time limit.", ("planned",)),
    Count("conserve_overruns", "Iterations that took longer than their limit.", ("overruns",)),
    Count("conserve_busy_seconds", "Seconds spent in iterations.", ("busy_s",)),
    Count("conserve_preemptions", "Iterations that offline rows left.", ("preemption", "preemptions")),
    Count("conserve_abandoned_iterations", "Iterations that everybody left.", ("preemption", "abandoned")),
    Count("conserve_preempted_rows", "Rows that left an iteration.", ("preemption", "rows")),
    Count(
        "conserve_kv_tokens_saved",
        "Tokens whose KV was copied to host memory.",
        ("checkpoint", "tokens_saved"),
    ),
    Count("conserve_kv_tokens_restored", "Tokens whose KV came back.", ("checkpoint", "tokens_restored")),
    Count(
        "conserve_kv_tokens_recomputed",
        "Tokens of offline requests computed again after their KV was lost.",
        ("checkpoint", "tokens_recomputed"),
    ),
    Count("conserve_kv_restores", "Requests whose KV was brought back.", ("checkpoint", "restores")),
    Count("conserve_kv_blocks_failed", "KV blocks whose copy failed.", ("checkpoint", "blocks_failed")),
    Count("conserve_kv_blocks_refused", "KV blocks beyond host memory.", ("checkpoint", "blocks_refused")),
    Count("conserve_preempted_layers", "Layers computed before rows left.", ("preemption", "layers_run")),
    Count(
        "conserve_tokens_redone",
        "Tokens of rows that left, to be computed again.",
        ("preemption", "tokens_redone"),
    ),
    Count(
        "conserve_tokens_wasted", "Tokens' worth of computing thrown away.", ("preemption", "tokens_wasted")
    ),
)


class Metrics:
    """The route. The scheduler is asked when somebody looks, one question at a time."""

    def __init__(self, ask: Ask, *, wait_s: float = WAIT_S) -> None:
        self._ask = ask
        self._wait_s = wait_s
        self._asking: asyncio.Task[dict[str, Any] | None] | None = None
        self._said: dict[str, Any] | None = None

    def attach(self, app: FastAPI) -> None:
        """Take the place of vLLM's route, as its plug-ins may."""
        app.add_api_route(PATH, self.show, methods=["GET"], include_in_schema=False)

    async def show(self, request: Request) -> Response:
        """VLLM's metrics, then ours."""
        said = await self._report(request.app.state.engine_client)
        content = await asyncio.to_thread(exposition, said)
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _report(self, engine_client: Any) -> dict[str, Any] | None:
        """What the scheduler says, or said before where it does not answer in time."""
        asking = self._asking = self._asking or asyncio.ensure_future(self._ask(engine_client))
        await asyncio.wait({asking}, timeout=self._wait_s)
        if asking.done():
            if self._asking is asking:
                self._asking = None
            if asking.cancelled() or asking.exception() is not None:
                log.debug("the scheduler does not answer: %r", asking)
            else:
                self._said = asking.result()
        return self._said


class Report(NamedTuple):
    """The scheduler's report as a collector."""

    said: Mapping[str, Any]

    def collect(self) -> Iterator[Metric]:
        """The metrics; without those that the report lacks."""
        for name, says, place in COUNTS:
            value = at(self.said, place)
            if value is not None:
                yield CounterMetricFamily(name, says, value)
        attainment = at(self.said, ("online", "attainment"))
        if attainment is not None:
            yield GaugeMetricFamily(
                "conserve_slo_attainment",
                "Share of the last minute's TTFTs, or TBTs if it is smaller, within the SLO.",
                attainment,
            )
        reaction = GaugeMetricFamily(
            "conserve_preemption_reaction_seconds",
            "From the decision until the scheduler had control, of the last thousand preemptions.",
            labels=["quantile"],
        )
        for name, quantile in (("p50", "0.5"), ("p99", "0.99")):
            reaction_ms = at(self.said, ("preemption", "reaction_ms", name))
            if reaction_ms is not None:
                reaction.add_metric([quantile], reaction_ms / 1e3)
        if reaction.samples:
            yield reaction


def at(said: Mapping[str, Any], place: tuple[str, ...]) -> float | None:
    """The figure there, if there is one."""
    found: Any = said
    for name in place:
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def exposition(said: Mapping[str, Any] | None) -> bytes:
    """Prometheus's text format."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    theirs: bytes = generate_latest(get_prometheus_registry())
    return theirs if said is None else theirs + generate_latest(Report(said))
