"""The answer of a comparison, latency of clients and tokens of the queue, as one sentence and one chart."""

from collections.abc import Iterable, Sequence
from math import isfinite, isinf
from typing import NamedTuple

from conserve.bench.harm import Change
from conserve.bench.measure import Percentiles, PolicyComparison, PolicyOutcome
from conserve.bench.names import alone_of, most_of, runs_offline
from conserve.bench.pages.svg import figure

NOTHING = "-"
FAILED = "failed"  # in place of a percentile: so many requests did


class Bar(NamedTuple):
    """A figure of the chart."""

    length: float  # share of the column's longest
    value: str
    ratio: str  # to the policy that the column compares with; empty for that policy itself
    middle: str = ""  # the P50 beside a P99, the share beside all live work under the queue's


class Column(NamedTuple):
    """A figure of every policy, in the chart's order of policies."""

    heading: str
    unit: str
    bars: list[Bar]
    mark: float | None  # length of online-only's bar


class Chart(NamedTuple):
    """A chart: a row per policy, a column per figure."""

    policies: list[str]
    columns: list[Column]


def sentence(comparison: PolicyComparison) -> str:
    """Sentence with the answer for the first policy that runs offline rows."""
    lead = next((name for name in comparison.policies if runs_offline(name)), None)
    if lead is None:
        alone = next(iter(comparison.policies.values()))
        return f"With no offline rows {_clients(alone, None, None)}; no other policy was measured."
    outcome, harm = comparison.policies[lead], comparison.harm.get(lead)
    changes = (harm.ttft_p99, harm.tbt_p99) if harm else (None, None)
    return f"Under {lead} {_clients(outcome, *changes)}; the queue got {_queue(comparison, lead)}."


def chart(comparison: PolicyComparison) -> Chart:
    """Chart of clients' latencies and the queue's tokens, a bar for each policy."""
    outcomes, ratios = list(comparison.policies.values()), list(comparison.ratios.values())
    alone = alone_of([*comparison.policies])
    mark = [*comparison.policies].index(alone) if alone is not None else None
    return Chart(
        [*comparison.policies],
        [
            _latency(
                "Clients: first token",
                [one.ttft_ms for one in outcomes],
                [(one.ttft_p99_to_online_only, one.ttft_p50_to_online_only) for one in ratios],
                mark,
            ),
            _latency(
                "Clients: next tokens",
                [one.tbt_ms for one in outcomes],
                [(one.tbt_p99_to_online_only, one.tbt_p50_to_online_only) for one in ratios],
                mark,
            ),
            _queue_column(comparison),
        ],
    )


def _queue_column(comparison: PolicyComparison) -> Column:
    """Column of the queue's tokens, with the shares beside all live work."""
    outcomes, ratios = list(comparison.policies.values()), list(comparison.ratios.values())
    shares = [_percent(one.offline_tokens_to_non_preemptive) for one in ratios]
    column = _column("Queue", "tokens/s", [one.offline_tokens_per_s for one in outcomes], shares, None)
    middles = [_beside_live(comparison, name) for name in comparison.policies]
    bars = [bar._replace(middle=middle) for bar, middle in zip(column.bars, middles, strict=True)]
    return column._replace(bars=bars)


def _latency(
    heading: str,
    latencies: Sequence[Percentiles | None],
    ratios: Sequence[tuple[float | None, float | None]],
    mark: int | None,
) -> Column:
    """Column of P99s, the P50s in words beside them."""
    values = [one.p99 if one else None for one in latencies]
    column = _column(heading, "P99, ms", values, [_times(p99) for p99, _ in ratios], mark)
    middles = [
        f"P50 {latency(one.p50, ' ms')} {_times(p50)}".rstrip() if one else ""
        for one, (_, p50) in zip(latencies, ratios, strict=True)
    ]
    bars = [bar._replace(middle=middle) for bar, middle in zip(column.bars, middles, strict=True)]
    return column._replace(bars=bars)


def _column(
    heading: str, unit: str, values: list[float | None], ratios: Iterable[str], mark: int | None
) -> Column:
    longest = max([value for value in values if value is not None and isfinite(value)], default=0.0) or 1.0
    plain = unit.rpartition(" ")[2]
    bars = [
        Bar(
            min(1.0, (value or 0.0) / longest),
            NOTHING if value is None else latency(value, f" {plain}"),
            ratio,
        )
        for value, ratio in zip(values, ratios, strict=True)
    ]
    marked = mark is not None and values[mark] is not None
    return Column(heading, unit, bars, bars[mark].length if mark is not None and marked else None)


def latency(value: float, unit: str = "") -> str:
    """A percentile in a table or a chart."""
    return FAILED if isinf(value) else f"{figure(value)}{unit}"


def _clients(outcome: PolicyOutcome, ttft: Change | None, tbt: Change | None) -> str:
    """Words for the two P99s; "P99" is spelled out."""
    if outcome.ttft_ms is None:
        return "no client got a token"
    said, told = "more than 1% of clients got no whole answer", isfinite(outcome.ttft_ms.p99)
    if told:
        said = f"99% of clients' first tokens came within {figure(outcome.ttft_ms.p99)} ms{_before(ttft)}"
    if outcome.tbt_ms is not None and isfinite(outcome.tbt_ms.p99):
        alone = _before(tbt, again=told and ttft is not None)
        said += f" and 99% of the next ones within {figure(outcome.tbt_ms.p99)} ms of the one before{alone}"
    return said + (f", {outcome.failed:,} of {outcome.requests:,} requests failed" if outcome.failed else "")


def _before(change: Change | None, *, again: bool = False) -> str:
    """Words for the figure without offline rows (unexplained if `again`) and the certainty of the difference."""
    if change is None:
        return ""
    low, high = change.difference_ci_ms
    within = ", no certain difference" if low <= 0 <= high else ""
    alone = "" if again else " with no offline rows"
    return f" ({figure(change.without_ms)} ms{alone}{within})"


def _queue(comparison: PolicyComparison, policy: str) -> str:
    tokens_per_s = comparison.policies[policy].offline_tokens_per_s
    if not tokens_per_s:
        return "nothing"
    share, most = comparison.ratios[policy].offline_tokens_to_non_preemptive, most_of([*comparison.policies])
    if share is None or policy == most:
        return f"{figure(tokens_per_s)} tokens/s"
    beside = _beside_live(comparison, policy)
    of = f"{share:.0%} of what {most} gave it" + (f" ({beside})" if beside else "")
    return f"{figure(tokens_per_s)} tokens/s, {of}"


def _beside_live(comparison: PolicyComparison, policy: str) -> str:
    """Words for the policy's share of non-preemptive's work beside all live work; empty if it is unknown."""
    rates = comparison.rows.get(policy)
    share = rates.of_non_preemptive if rates is not None else None
    return "" if share is None else f"{share:.0%} beside all live work"


def _times(ratio: float | None) -> str:
    return "" if ratio is None or isinf(ratio) else f"{ratio:.2f} x"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"
