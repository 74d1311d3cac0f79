"""Metrics of a harvester: histograms that it fills as it works, counters that are read at a scrape.

Names and labels are in docs/reference/metrics.md. No label names a job or a row: their number has no bound.
"""

from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from conserve.endpoints.protocol import Call, Completion
from conserve.errors import EndpointError
from conserve.jobs.harvest.observer import Observer
from conserve.jobs.harvest.workload import ReadyRow
from conserve.store.books.journal import Committed

if TYPE_CHECKING:
    from conserve.jobs.harvest.harvester import Harvester

LATENCY_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Buckets of a row at a server: from an embedding to an answer that waits an hour behind live requests."""
STORE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Buckets of a transaction: a commit to a fast disk takes 1 ms, one that waits for a lock up to 10 s."""
TOKENS = tuple(1 << power for power in range(3, 18))
"""8 to 131,072 tokens."""
ROWS = tuple(1 << power for power in range(15))
"""1 to 16,384 rows, which is a shard's most."""
WITHDRAWN, BROKEN = "withdrawn", "broken"


class HarvestMetrics(Observer):
    """Histograms of a harvester's work, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, says: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"conserve_{name}", says, buckets=buckets, registry=registry)

        self._latency = histogram(
            "row_latency_seconds",
            "Time of an answered row from its sending to the end of its answer.",
            LATENCY_S,
        )
        self._prompt = histogram("row_prompt_tokens", "Prompt tokens of an answered row.", TOKENS)
        self._completion = histogram("row_completion_tokens", "Tokens of a row's answer.", TOKENS)
        self._claim = histogram("claim_seconds", "Time of leasing and loading rows.", STORE_S)
        self._claimed = histogram("claim_rows", "Rows leased at once.", ROWS)
        self._commit = histogram(
            "commit_seconds", "Time of a transaction that makes results durable.", STORE_S
        )
        self._committed = histogram("commit_rows", "Results of such a transaction.", ROWS)
        self._move = histogram(
            "shard_seconds", "Time of moving results from the journal to a shard.", STORE_S
        )
        self._broken = Counter(
            "conserve_attempt_errors",
            "Attempts that ended without an answer, by the kind of error.",
            ["error"],
            registry=registry,
        )

    def claimed(self, works: Sequence[ReadyRow], *, begun: float, seconds: float) -> None:
        self._claim.observe(seconds)
        self._claimed.observe(len(works))

    def answered(self, call: Call, completion: Completion, *, begun: float, seconds: float) -> None:
        self._latency.observe(seconds)
        self._prompt.observe(completion.prompt_tokens)
        self._completion.observe(completion.completion_tokens)

    def broke(self, call: Call, error: BaseException, *, begun: float, seconds: float) -> None:
        self._broken.labels(kind_of(error)).inc()

    def committed(self, committed: Committed, *, begun: float, seconds: float) -> None:
        if not committed.written:  # rows that go back, or saved tokens alone
            return
        self._commit.observe(seconds)
        self._committed.observe(len(committed.written))

    def moved(self, job_id: str, positions: Sequence[int], *, begun: float, seconds: float) -> None:
        self._move.observe(seconds)


def kind_of(error: BaseException) -> str:
    """Kind of an error as a label, of which there are few."""
    if isinstance(error, CancelledError):
        return WITHDRAWN
    return str(getattr(error, "kind", BROKEN)) if isinstance(error, EndpointError) else BROKEN


class HarvesterCollector(Collector):
    """Counters and gauges that the harvester keeps anyway."""

    def __init__(self, harvester: "Harvester") -> None:
        self._harvester = harvester

    def collect(self) -> Iterator[Metric]:
        tally = self._harvester.tally
        rows = CounterMetricFamily(
            "conserve_rows", "Rows by their outcome, once it is durable.", labels=["outcome"]
        )
        for outcome in ("succeeded", "failed", "late"):
            rows.add_metric([outcome], getattr(tally, outcome))
        tokens = CounterMetricFamily("conserve_row_tokens", "Tokens of durable answers.", labels=["kind"])
        for kind in ("prompt", "completion", "cached", "resumed"):
            tokens.add_metric([kind], getattr(tally, f"{kind}_tokens"))
        outages = CounterMetricFamily("conserve_outages", "Outages that were waited out.", labels=["of"])
        for of in ("store", "endpoint"):
            outages.add_metric([of], tally.outages[of])
        yield from (rows, tokens, outages)
        yield CounterMetricFamily("conserve_row_retries", "Attempts that put their row back.", tally.retried)
        yield CounterMetricFamily("conserve_leases_lost", "Leases that others ended.", tally.leases_lost)
        yield GaugeMetricFamily(
            "conserve_rows_in_flight",
            "Rows that are sent, or wait in the harvester for a place at one of several servers.",
            tally.in_flight,
        )
        yield from self._states()

    def _states(self) -> Iterator[Metric]:
        ready = self._harvester.ready_at is not None
        capacity = self._harvester.endpoint.capacity if ready else 0
        yield GaugeMetricFamily(
            "conserve_rows_in_flight_most",
            "Rows that the harvester takes at a time, to keep its servers busy; 0 before one is ready.",
            capacity,
        )
        yield GaugeMetricFamily(
            "conserve_harvester_waiting",
            "1 while something keeps the harvester from its rows.",
            float(self._harvester.tally.waiting_for is not None),
        )
