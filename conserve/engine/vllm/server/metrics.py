"""Adds the scheduler's counters to vLLM's /metrics. Imported in API servers only."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from conserve.engine.policy.policies import kept_promises
from conserve.engine.policy.promises import Promises
from conserve.engine.vllm.server.batch_proxy import backlog
from conserve.engine.vllm.server.live_metrics import live_metrics
from conserve.engine.vllm.server.reports import LastReports
from conserve.metrics_page import Build
from conserve.server_report import SchedulerReport, of_engine

PATH = "/metrics"
WAIT_S = 2.0  # the scheduler answers between two iterations; after this time its last answer is shown
STALE_S = 60.0
"""Age beyond which an answer is shown no more: figures that stand still would keep every alert quiet."""


class Count(NamedTuple):
    """A counter: its name without `_total`, its help text, and its place in the scheduler's report."""

    name: str
    says: str
    of: Callable[[SchedulerReport], float]


ONLINE_REQUESTS = Count(
    "conserve_online_requests", "Live requests that got a token.", lambda said: said.online.requests
)
COUNTS = (
    ONLINE_REQUESTS,
    Count(
        "conserve_offline_tokens", "Tokens computed for offline requests.", lambda said: said.offline.tokens
    ),
    Count(
        "conserve_pushed_tokens",
        "Tokens computed beyond the usual limit for jobs that would miss their deadline.",
        lambda said: said.pushing.tokens,
    ),
    Count(
        "conserve_live_prompt_tokens",
        "Tokens of prompts of live requests that asked the prefix cache.",
        lambda said: said.live_prefixes.prompt_tokens,
    ),
    Count(
        "conserve_live_prefix_tokens_found",
        "Of these, tokens that the cache had.",
        lambda said: said.live_prefixes.found_tokens,
    ),
    Count(
        "conserve_live_prefix_tokens_lost",
        "Of these, tokens that a cache of the same size would have had without rows.",
        lambda said: said.live_prefixes.lost_tokens,
    ),
    Count(
        "conserve_receipt_pauses",
        "Pauses of offline work in which live latencies were measured.",
        lambda said: said.harm.pauses,
    ),
    Count("conserve_iterations", "Iterations that computed tokens.", lambda said: said.iterations),
    Count("conserve_planned_iterations", "Iterations with a time limit.", lambda said: said.planned),
    Count("conserve_overruns", "Iterations that took longer than their limit.", lambda said: said.overruns),
    Count(
        "conserve_standstills",
        "Iterations in which the process stood still.",
        lambda said: said.standstills,
    ),
    Count("conserve_busy_seconds", "Seconds spent in iterations.", lambda said: said.busy_s),
    Count(
        "conserve_iterations_left",
        "Iterations that offline rows left.",
        lambda said: said.preemption.iterations_left,
    ),
    Count(
        "conserve_abandoned_iterations",
        "Iterations that every row left.",
        lambda said: said.preemption.abandoned,
    ),
    Count("conserve_rows_leaving", "Times that a row left an iteration.", lambda said: said.preemption.rows),
    Count(
        "conserve_kv_tokens_saved",
        "Tokens whose KV was copied to host memory.",
        lambda said: said.checkpoint.tokens_saved,
    ),
    Count(
        "conserve_kv_tokens_restored",
        "Tokens whose KV came back.",
        lambda said: said.checkpoint.tokens_restored,
    ),
    Count(
        "conserve_kv_tokens_recomputed",
        "Tokens of offline requests computed again after their KV was lost.",
        lambda said: said.checkpoint.tokens_recomputed,
    ),
    Count(
        "conserve_kv_restores",
        "Requests whose KV was brought back.",
        lambda said: said.checkpoint.restores,
    ),
    Count(
        "conserve_kv_blocks_failed",
        "KV blocks whose copy failed.",
        lambda said: said.checkpoint.blocks_failed,
    ),
    Count(
        "conserve_kv_blocks_refused",
        "KV blocks beyond host memory.",
        lambda said: said.checkpoint.blocks_refused,
    ),
    Count(
        "conserve_layers_before_leaving",
        "Layers computed before rows left.",
        lambda said: said.preemption.layers_run,
    ),
    Count(
        "conserve_tokens_redone",
        "Tokens of rows that left, to be computed again.",
        lambda said: said.preemption.tokens_redone,
    ),
    Count(
        "conserve_live_tokens_recomputed",
        "Tokens of online requests computed twice because their iteration was left; always 0.",
        lambda said: said.preemption.live_tokens_recomputed,
    ),
    Count(
        "conserve_tokens_wasted",
        "Tokens' worth of computing thrown away.",
        lambda said: said.preemption.tokens_wasted,
    ),
)
REACTION = "From the decision that rows leave until the scheduler had control, of the last thousand times."


class MetricsRoute:
    """The route /metrics. A request asks the scheduler."""

    def __init__(self, reports: LastReports, *, wait_s: float = WAIT_S) -> None:
        self._reports = reports
        self._wait_s = wait_s
        self._highest: dict[str, float] = {}

    def attach(self, app: FastAPI) -> None:
        """Answer in the place of vLLM's route: the first route of a path does, in every version."""
        app.add_api_route(PATH, self.show, methods=["GET"], include_in_schema=False)
        app.router.routes.insert(0, app.router.routes.pop())

    async def show(self, request: Request) -> Response:
        """Answer with vLLM's metrics, then ours, then those of the backlog."""
        report = await self._reports.within(request.app.state.engine_client, self._wait_s)
        age_s = report.age_s if report is not None and report.said is not None else None
        said = report.said if report is not None and report.age_s <= STALE_S else None
        shown = await asyncio.to_thread(exposition, said, age_s, self._highest)
        content = shown + await backlog(request.app.state)
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})


class ReportAge(NamedTuple):
    """Collector of the age of the scheduler's report."""

    seconds: float

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge."""
        says = "Age of the scheduler's last report; after a minute its figures are left out."
        yield GaugeMetricFamily("conserve_report_age_seconds", says, self.seconds)


class Report(NamedTuple):
    """Collector of the scheduler's report.

    `highest` has what each counter was shown with. An iteration counts once it is scheduled, and rows that leave it
    are uncounted: Prometheus would take a fall for a restart, and count everything again.
    """

    said: SchedulerReport
    highest: dict[str, float]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        said = self.said
        for count in COUNTS:
            if count is not ONLINE_REQUESTS or not said.classes:
                value = float(count.of(said))
                value = self.highest[count.name] = max(value, self.highest.get(count.name, value))
                yield CounterMetricFamily(count.name, count.says, value)
        yield from live_metrics(said.classes or {None: said.online})
        yield from self._harm_limits()
        says = "Scale of the promises up to which rows may push."
        yield GaugeMetricFamily("conserve_slo_scale", says, said.pushing.slo_scale)
        says = "Free KV blocks with prefixes of live requests, which rows do not take."
        yield GaugeMetricFamily("conserve_live_prefix_blocks", says, said.live_prefixes.kept_blocks)
        yield from self._harm()
        yield from self._reactions()

    def _harm_limits(self) -> Iterator[Metric]:
        """Largest harm to each latency that has one: to both, or by default to the one without an SLO."""
        kept = kept_promises(self.said.slo, self.said.policy)
        slo = Promises.of(msgspec.to_builtins(kept)).slo
        limits = GaugeMetricFamily(
            "conserve_harm_limit",
            "Share of its own time that a latency may be longer by.",
            labels=["latency"],
        )
        for latency, harm in (("ttft", slo.ttft_harm), ("tbt", slo.tbt_harm)):
            if harm is not None:
                limits.add_metric([latency], harm)
        if limits.samples:
            yield limits

    def _harm(self) -> Iterator[Metric]:
        """Live latency with offline work over live latency in its pauses, and the interval."""
        labels = ["latency", "quantile", "bound"]
        harm = GaugeMetricFamily(
            "conserve_harm_ratio", "Live latency with offline work over that in its pauses.", labels=labels
        )
        for latency, quantiles in self.said.harm.items():
            for name, one in quantiles.items():
                figures = (
                    () if one is None else (("estimate", one.ratio), ("low", one.low), ("high", one.high))
                )
                for bound, figure in figures:
                    if figure is not None:
                        harm.add_metric([latency.removesuffix("_ms"), name, bound], figure)
        if harm.samples:
            yield harm

    def _reactions(self) -> Iterator[Metric]:
        reaction = GaugeMetricFamily("conserve_leave_reaction_seconds", REACTION, labels=["quantile"])
        for quantile, reaction_ms in self.said.preemption.reaction_ms.items():
            if reaction_ms is not None:
                reaction.add_metric([quantile], reaction_ms / 1e3)
        if reaction.samples:
            yield reaction


def exposition(said: Mapping[str, Any] | None, age_s: float | None, highest: dict[str, float]) -> bytes:
    """Both groups of metrics in Prometheus's text format, ours as far as the report is there."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    theirs: bytes = generate_latest(get_prometheus_registry())
    if age_s is None:
        return theirs
    aged = theirs + generate_latest(Build("serve")) + generate_latest(ReportAge(age_s))
    return aged if said is None else aged + generate_latest(Report(of_engine(said), highest))
