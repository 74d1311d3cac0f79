"""Report of a comparison: tables for a terminal, sentences, and an HTML page without outside resources."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isinf
from typing import NamedTuple

from conserve.bench.attainment import SCALES, LatencyLimits
from conserve.bench.harm import FEWEST_BLOCKS, Change, Harm, Interval
from conserve.bench.measure import LATE_MS, ORDER, Block, PolicyComparison, PolicyOutcome, RowRates
from conserve.bench.names import alone_of, most_of
from conserve.bench.pages import verdict
from conserve.bench.pages.figures import SPARE, colours, timeline
from conserve.bench.pages.svg import figure
from conserve.bench.restless import StepTimes

HEADER = (
    *("policy", "requests", "failed", "TTFT P50", "TTFT P99", "TTFT max", "TBT P50", "TBT P99", "offline/s"),
    *(
        "work/s",
        "rows/s",
        "rows/s in block",
        "TTFT P50 ratio",
        "TTFT P99 ratio",
        "TBT P50 ratio",
        "TBT P99 ratio",
        "offline ratio",
        "rows ratio",
        "iterations left",
        "wasted",
        "restored",
        "recomputed",
        "overruns",
    ),
)
NOTHING = verdict.NOTHING
UNSTEADY = "Ratios below that may be the machine's; more rounds (--rounds) even it out."
CLIENTS = HEADER[1:2] + HEADER[3:8] + HEADER[12:16]
QUEUE = HEADER[8:12] + HEADER[16:18]
ENGINE = HEADER[18:] + HEADER[2:3]
CLIENTS_NOTE = (
    "Online requests and their latencies in milliseconds: time to first token (TTFT), time between tokens (TBT). "
    "Ratios: P50s and P99s to those of online-only. A request that failed counts as slower than any."
)
QUEUE_NOTE = (
    "Offline tokens per second; work: the same with decode steps counted as so many tokens of prompts as they "
    "cost, to compare policies whose rows are at different stages. Rows: work by the cost of a mean row, beside "
    "all live work: less the live requests that a policy still had before it when a block's time was over. Rows in "
    "block: as counted by then, like tokens and work. Offline ratio: tokens to those of non-preemptive; rows "
    "ratio: the same of rows beside all live work."
)
ENGINE_NOTE = (
    "Iterations left: those that offline rows left for a live request; wasted: tokens computed for "
    "those rows by then, as a share of offline tokens. Restored and recomputed: tokens of evicted rows. "
    "Overruns: share of planned iterations that took longer than their limit. "
    "Failed: online requests without a whole answer."
)
ATTAINMENT_NOTE = (
    "Share of requests whose TTFT, and of token gaps, that stay within the reference times the scale (the smaller "
    "of the two; a failed request is a miss). Reference:"
)


class CellTable(NamedTuple):
    """Cells as text; all columns but the first hold figures."""

    header: list[str]
    rows: list[list[str]]

    def part(self, names: Sequence[str]) -> "CellTable":
        """Table with the policies and these columns."""
        places = [0, *(self.header.index(name) for name in names)]
        return CellTable([self.header[n] for n in places], [[row[n] for n in places] for row in self.rows])


def table_rows(comparison: PolicyComparison) -> CellTable:
    """Table with a row per policy: latencies in ms, tokens per second, and ratios.

    Work is the offline tokens weighted by their cost: a decode step counts as the prompt tokens it is worth. Rows
    are beside all live work, those in the block as counted while its time ran. The
    ratios are those of the P50s and P99s to online-only's, and of the tokens to non-preemptive's. Wasted is the
    share of offline tokens that was computed for rows that then left the iteration. Restored and recomputed are
    tokens of evicted rows.
    """
    rows = []
    for name, outcome in comparison.policies.items():
        ratios, rates = comparison.ratios[name], comparison.rows.get(name, RowRates())
        rows.append(
            [
                name,
                f"{outcome.requests:,}",
                f"{outcome.failed:,}",
                *_latencies(outcome),
                figure(outcome.offline_tokens_per_s),
                figure(outcome.offline_work_per_s),
                _rate(rates.rows_per_s),
                _rate(rates.rows_in_block_per_s),
                times(ratios.ttft_p50_to_online_only),
                times(ratios.ttft_p99_to_online_only),
                times(ratios.tbt_p50_to_online_only),
                times(ratios.tbt_p99_to_online_only),
                times(ratios.offline_tokens_to_non_preemptive),
                times(rates.of_non_preemptive),
                _told(outcome.left.iterations, outcome),
                _fine_share(outcome.left.wasted_share),
                _told(outcome.evicted.tokens_restored, outcome),
                _told(outcome.evicted.tokens_recomputed, outcome),
                _fine_share(outcome.overruns.share),
            ]
        )
    return CellTable([*HEADER], rows)


def attainment_rows(comparison: PolicyComparison) -> CellTable:
    """Table with a row per policy and a column per scale; no rows without a reference."""
    rows = [
        [name, *(percent(outcome.attainment[str(scale)].attainment) for scale in SCALES)]
        for name, outcome in comparison.policies.items()
        if outcome.attainment
    ]
    return CellTable(["policy", *(f"{scale:g} x" for scale in SCALES)], rows)


def reference_words(comparison: PolicyComparison) -> str:
    """Words for the latencies that attainment is relative to; empty without any."""
    if comparison.reference is None:
        return ""
    whose = "the given SLO" if comparison.given else "online-only's P99s"
    return f"{whose} ({limits_words(comparison.reference)})"


def limits_words(limits: LatencyLimits) -> str:
    """Words for both limits."""
    return f"TTFT {figure(limits.ttft_ms)} ms, TBT {figure(limits.tbt_ms)} ms"


def receipts(comparison: PolicyComparison) -> list[str]:
    """Harm receipt of each policy, a sentence each."""
    return [_receipt(name, harm) for name, harm in comparison.harm.items()]


def warnings(comparison: PolicyComparison) -> list[str]:
    """Sentences on what makes the figures doubtful: failed requests, a late load generator, a restless machine."""
    found = []
    for name, outcome in comparison.policies.items():
        if outcome.failed:
            kinds = ", ".join(f"{count} {status}" for status, count in outcome.failures.items())
            found.append(f"{name}: {outcome.failed:,} of {outcome.requests:,} requests failed ({kinds}).")
    late = {name: outcome.late for name, outcome in comparison.policies.items() if outcome.late.share > 0}
    if late:
        shares = ", ".join(f"{name} {lateness.share:.2%}" for name, lateness in late.items())
        most_ms = figure(max(lateness.max_ms for lateness in late.values()))
        found.append(
            f"The load generator itself sent requests over {LATE_MS:g} ms late ({shares}), "
            f"{most_ms} ms at most; their TTFT includes that."
        )
    if comparison.steps is not None and comparison.steps.restless:
        found.append(_restless(comparison.steps))
    return found


def _restless(steps: StepTimes) -> str:
    return (
        f"The machine's own speed changed: without rows the decode step of a live request alone took "
        f"{figure(steps.quickest_ms)} ms in one block and {figure(steps.slowest_ms)} ms in another "
        f"({steps.times:.2f} times). {UNSTEADY}"
    )


def page(
    comparison: PolicyComparison,
    blocks: Sequence[Block],
    *,
    title: str = "Policies compared",
    slo: LatencyLimits | None = None,
    facts: Mapping[str, str] | None = None,
    stopped: str | None = None,
) -> str:
    """Render the HTML page, the answer first.

    `slo` are the limits to draw, by default the comparison's reference; `facts` describe the measurement
    (machine, model, versions, commit, seed, trace, command); `stopped` says which blocks are missing, if any.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    slo = slo or comparison.reference
    source = (files("conserve.bench.pages") / "page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    return template.render(
        title=title,
        answer=verdict.sentence(comparison),
        stopped=stopped,
        warnings=warnings(comparison),
        chart=verdict.chart(comparison),
        note=_chart_note(comparison),
        receipts=receipts(comparison),
        timeline=Markup(timeline(blocks, slo)),
        tables=_tables(comparison),
        slo=slo,
        facts=facts or {},
        colours=colours(comparison.policies),
        shades=len(ORDER) + SPARE,
    )


def _chart_note(comparison: PolicyComparison) -> str:
    """Key to the chart, for the references that were measured."""
    said = ["In each column the longest bar is the largest figure."]
    if (alone := alone_of([*comparison.policies])) is not None:
        said.append(f"The dashed line is {alone}, the same requests with no offline rows;")
        said.append("the ratios of latencies are to it.")
    if (most := most_of([*comparison.policies])) is not None:
        said.append(f"The queue's percentages are of {most}, which never makes rows wait;")
        said.append(
            "beside all live work, live requests that a policy left waiting at a block's end are taken off."
        )
    return " ".join(said)


def _tables(comparison: PolicyComparison) -> list[tuple[str, str, CellTable]]:
    """Heading, explanation and cells of each table, none of them wider than a sheet of paper."""
    table, reference = table_rows(comparison), reference_words(comparison)
    found = [
        ("Clients", CLIENTS_NOTE, table.part(CLIENTS)),
        ("Queue", QUEUE_NOTE, table.part(QUEUE)),
        ("Engine", ENGINE_NOTE, table.part(ENGINE)),
    ]
    if reference:
        found.append(("Attainment", f"{ATTAINMENT_NOTE} {reference}.", attainment_rows(comparison)))
    return found


def _latencies(outcome: PolicyOutcome) -> list[str]:
    ttft, tbt = outcome.ttft_ms, outcome.tbt_ms
    return [
        *(map(verdict.latency, (ttft.p50, ttft.p99, ttft.max)) if ttft else (NOTHING,) * 3),
        *(map(verdict.latency, (tbt.p50, tbt.p99)) if tbt else (NOTHING,) * 2),
    ]


def times(value: float | None) -> str:
    """Ratio in a table."""
    if value is None:
        return NOTHING
    return verdict.FAILED if isinf(value) else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Share in a table."""
    return NOTHING if value is None else f"{value:.1%}"


def _rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"


def _told(count: int, outcome: PolicyOutcome) -> str:
    """A count that not every engine tells."""
    return f"{count:,}" if outcome.tells else NOTHING


def _fine_share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2%}"


def _receipt(name: str, harm: Harm) -> str:
    changes = [
        f"P99 {metric} {_changed(change)}"
        for metric, change in (("TTFT", harm.ttft_p99), ("TBT", harm.tbt_p99))
        if change is not None
    ]
    if not changes:
        return f"{name}: nothing to compare, since no online request was answered, or too few without rows."
    # Blocks of a machine differ, which no interval within a few of them knows of.
    within = (
        "" if harm.resampled == "blocks" else f", so within these blocks; {FEWEST_BLOCKS} rounds tell more"
    )
    how = f"95 % intervals from resampling {harm.resampled}{within}"
    return f"With offline work under {name}, online {' and '.join(changes)} ({how})."


def _changed(change: Change) -> str:
    """Words for a change: `went from 210 to 215 ms (+5 ms [-2, 11]; 1.02 times [0.99, 1.05])`."""
    if isinf(change.with_ms):
        return f"went from {figure(change.without_ms)} ms to none, since more than 1 % failed"
    sign = "+" if change.difference_ms >= 0 else ""
    ratio = f"; {change.ratio:.2f} times {_between(change.ratio_ci, 2)}" if change.ratio_ci else ""
    return (
        f"went from {figure(change.without_ms)} to {figure(change.with_ms)} ms "
        f"({sign}{figure(change.difference_ms)} ms {_between(change.difference_ci_ms)}{ratio})"
    )


def _between(interval: Interval, decimals: int | None = None) -> str:
    low, high = (
        verdict.latency(end) if decimals is None or isinf(end) else f"{end:.{decimals}f}" for end in interval
    )
    return f"[{low}, {high}]"
