"""Metrics of live requests: latencies, attainment, promises; of all together or with the label `class`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from conserve.engine.policy.promises import LATENCIES
from conserve.server_report import LiveReport

CLASS = "class"
HISTOGRAMS = {
    "ttft_ms": "Time to first token of live requests.",
    "tbt_ms": "Time between tokens of live requests.",
}

YIELDING: tuple[tuple[Callable[[LiveReport], list[str]], str, str], ...] = (
    (
        lambda live: live.held_back,
        "conserve_rows_held_back",
        "1 while a latency is late too often to keep its SLO, so that rows add at most a tenth to it.",
    ),
    (
        lambda live: live.paused_for,
        "conserve_rows_paused",
        "1 while rows pause for a latency, since they made it late more often than its SLO allows.",
    ),
)
"""Latencies in the report, metric and help of each way in which rows yield."""

ByClass = Mapping[str, LiveReport] | Mapping[None, LiveReport]


def live_metrics(by_class: ByClass) -> Iterator[Metric]:
    """Metrics of the classes of live traffic; the name None is that of a server without classes."""
    names = [] if None in by_class else [CLASS]
    attainment = GaugeMetricFamily(
        "conserve_slo_attainment",
        "Share of the last minute's TTFTs, or TBTs if it is smaller, within the SLO.",
        labels=names,
    )
    for name, said in by_class.items():
        attainment.add_metric(of(name), said.attainment)
    several = (
        attainment,
        *yielding(by_class, names),
        *promises(by_class, names),
        *latencies(by_class, names),
        *late(by_class, names),
        *counted(by_class, names),
    )
    yield from (family for family in several if family.samples)
    if names:
        yield requests(by_class)


def yielding(by_class: ByClass, names: Sequence[str]) -> Iterator[Metric]:
    """For which latencies rows are held back, and for which they pause."""
    for yields_for, metric, about in YIELDING:
        found = GaugeMetricFamily(metric, about, labels=[*names, "latency"])
        for name, said in by_class.items():
            for latency in LATENCIES:
                where = [*of(name), latency.removesuffix("_ms")]
                found.add_metric(where, float(latency in yields_for(said)))
        yield found


def promises(by_class: ByClass, names: Sequence[str]) -> Iterator[Metric]:
    """Each promise of a quantile or a mean, its value over the last minute, and how much later clients have it."""
    labels = [*names, "latency", "promise"]
    bound = GaugeMetricFamily("conserve_promised_seconds", "Largest latency promised.", labels=labels)
    seen = GaugeMetricFamily(
        "conserve_promise_seen_seconds", "The same of the last minute's latencies.", labels=labels
    )
    way = GaugeMetricFamily(
        "conserve_way_seconds", "By how much clients have the latency later than the engine.", labels=labels
    )
    for name, said in by_class.items():
        for latency, promised in said.promises.items():
            for promise, one in promised.items():
                where = [*of(name), latency.removesuffix("_ms"), promise]
                bound.add_metric(where, one.promised_ms / 1e3)
                if one.seen_ms is not None:
                    seen.add_metric(where, one.seen_ms / 1e3)
                if (later_ms := said.way_ms.of(latency).get(promise)) is not None:
                    way.add_metric(where, later_ms / 1e3)
    yield from (bound, seen, way)


def requests(by_class: ByClass) -> Metric:
    """Requests of each class."""
    counter = CounterMetricFamily(
        "conserve_online_requests", "Live requests that got a token.", labels=[CLASS]
    )
    for name, said in by_class.items():
        counter.add_metric(of(name), said.requests)
    return counter


def latencies(by_class: ByClass, names: Sequence[str]) -> Iterator[Metric]:
    """P50 and P99 of the last minute."""
    latency = GaugeMetricFamily(
        "conserve_live_latency_seconds",
        "Latency of live requests over the last minute.",
        labels=[*names, "latency", "quantile"],
    )
    for name, said in by_class.items():
        for which, quantiles in said.items():
            for quantile, ms in quantiles.items():
                if ms is not None:
                    latency.add_metric([*of(name), which.removesuffix("_ms"), quantile], ms / 1e3)
    yield latency


def late(by_class: ByClass, names: Sequence[str]) -> Iterator[Metric]:
    """Latencies since the server's start, and how many of them were later than promised."""
    labels = [*names, "latency"]
    total = CounterMetricFamily("conserve_live_latencies", "TTFTs and TBTs of live requests.", labels=labels)
    over = CounterMetricFamily(
        "conserve_live_late", "Those above what is promised of the P99 or a higher quantile.", labels=labels
    )
    for name, said in by_class.items():
        for which, counts in said.counts.items():
            where = [*of(name), which.removesuffix("_ms")]
            total.add_metric(where, counts.all)
            over.add_metric(where, counts.late)
    yield total
    yield over


def counted(by_class: ByClass, names: Sequence[str]) -> Iterator[Metric]:
    """Histograms since the server's start."""
    for which, says in HISTOGRAMS.items():
        latency = which.removesuffix("_ms")
        family = HistogramMetricFamily(f"conserve_live_{latency}_seconds", says, labels=names)
        for name, said in by_class.items():
            one = said.histograms.of(which)
            bounds = [*(str(ms / 1e3) for ms in one.bounds_ms), "+Inf"]
            buckets = list(zip(bounds, accumulate(one.counts), strict=True))
            family.add_metric(of(name), buckets, one.sum_ms / 1e3)
        yield family


def of(name: str | None) -> list[str]:
    """Value of the label."""
    return [] if name is None else [name]
