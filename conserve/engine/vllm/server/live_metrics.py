"""Metrics of live requests: attainment and promises, of all together or with the label `class`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from conserve.engine.policy.promises import LATENCIES

CLASS = "class"


def live_metrics(by_class: Mapping[str | None, Mapping[str, Any]]) -> Iterator[Metric]:
    """Metrics of the classes of live traffic; the name None is that of a server without classes."""
    names = [] if None in by_class else [CLASS]
    attainment = GaugeMetricFamily(
        "conserve_slo_attainment",
        "Share of the last minute's TTFTs, or TBTs if it is smaller, within the SLO.",
        labels=names,
    )
    for name, said in by_class.items():
        if "attainment" in said:
            attainment.add_metric(of(name), said["attainment"])
    yield from (family for family in (attainment, *promises(by_class, names)) if family.samples)
    if names:
        yield from latencies(by_class)


def promises(by_class: Mapping[str | None, Mapping[str, Any]], names: Sequence[str]) -> Iterator[Metric]:
    """Each promise of a quantile or a mean, and its value over the last minute."""
    labels = [*names, "latency", "promise"]
    bound = GaugeMetricFamily("conserve_promised_seconds", "Largest latency promised.", labels=labels)
    seen = GaugeMetricFamily(
        "conserve_promise_seen_seconds", "The same of the last minute's latencies.", labels=labels
    )
    for name, said in by_class.items():
        for latency, promised in said.get("promises", {}).items():
            for promise, one in promised.items():
                where = [*of(name), latency.removesuffix("_ms"), promise]
                bound.add_metric(where, one["promised_ms"] / 1e3)
                if one["seen_ms"] is not None:
                    seen.add_metric(where, one["seen_ms"] / 1e3)
    yield bound
    yield seen


def latencies(by_class: Mapping[str | None, Mapping[str, Any]]) -> Iterator[Metric]:
    """Requests and latencies of each class."""
    requests = CounterMetricFamily(
        "conserve_online_requests", "Live requests that got a token.", labels=[CLASS]
    )
    latency = GaugeMetricFamily(
        "conserve_live_latency_seconds",
        "Latency of live requests over the last minute.",
        labels=[CLASS, "latency", "quantile"],
    )
    for name, said in by_class.items():
        requests.add_metric(of(name), said["requests"])
        for which in LATENCIES:
            for quantile, ms in said[which].items():
                if ms is not None:
                    latency.add_metric([*of(name), which.removesuffix("_ms"), quantile], ms / 1e3)
    yield requests
    yield latency


def of(name: str | None) -> list[str]:
    """Value of the label."""
    return [] if name is None else [name]
