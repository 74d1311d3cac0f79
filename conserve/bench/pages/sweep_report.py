"""Report of a sweep, the worst cell first: tables for a terminal, Markdown, and a page with heat maps."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from math import inf
from typing import Any, NamedTuple

from conserve.bench.cell import RATIOS, ratio, worst
from conserve.bench.names import runs_offline
from conserve.bench.pages.report import NOTHING, UNSTEADY, CellTable, percent, times
from conserve.bench.pages.svg import figure
from conserve.bench.points import BUSY, CVS, LENGTHS, SCALES, TRACES, Cell
from conserve.bench.restless import StepTimes
from conserve.bench.sweep import ranked
from conserve.names import CONSERVE
from conserve.units import count

FAILED = "failed"
LATENCIES = {
    "ttft_p50": "TTFT P50",
    "ttft_p99": "TTFT P99",
    "tbt_p50": "TBT P50",
    "tbt_p99": "TBT P99",
}
QUEUE = {
    "rows_per_s": "rows/s",
    "prompt_tokens_per_s": "prompt tokens/s",
    "decode_tokens_per_s": "decode tokens/s",
    "of_non_preemptive": "of non-preemptive",
    "of_bound": "of the bound",
    "computed_twice": "computed twice",
}
WORST = {"computed_twice": max}
HEADER = ["", "policy", *LATENCIES.values(), "TTFT in SLO", "TBT in SLO", "failed", *QUEUE.values()]
EQUAL = [
    "tuned to conserve's P99s",
    "has them in cells",
    "with rows in",
    "conserve's rows to its there, middle",
    "least",
    "most",
    "middle of all cells",
]
NOTE = (
    "Latencies are times online-only's, in brackets the 95 % interval of the bootstrap. In SLO: share of requests, "
    "and of token gaps, within the cell's SLO. Failed: live requests without an answer. A P99 over all cells "
    "counts as failed where one of its requests failed, above any other. Rows/s: offline work per "
    "second, by the cost of a mean row, less the live work that a policy left behind when a block's time was over. "
    "Of non-preemptive: that work to non-preemptive scheduling's. Of the bound: the same to what a scheduler that "
    "knows the future would have harvested with every live answer within the SLO; a policy that breaks the SLO can "
    "exceed 1. Computed twice: share of offline tokens that rows lost with an iteration or with their KV."
)


class Square(NamedTuple):
    """A cell of a heat map."""

    text: str
    heat: float | None  # 0 (good) to 1 (bad); None where nothing was measured
    told: str


class HeatMap(NamedTuple):
    """A figure over the grid: lengths and load downwards, burstiness and SLO across."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Square]]]


def lead_of(policies: Sequence[str]) -> str:
    """The policy whose cells are ranked: the first of ConServe's, or of the baselines the first with rows."""
    ours = (name for name in policies if name.partition("/")[0] == CONSERVE)
    return next(ours, next(filter(runs_offline, policies), policies[0]))


def first_table(measured: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> CellTable:
    """The worst cell under each policy, then medians and worst figures over all cells."""
    lead, over = lead_of(policies), count(len(measured), "cell")
    order = [lead, *(name for name in policies if name != lead)]
    worst_cell = ranked(measured, lead)[0]
    rows = [
        _row(f"the worst cell: {Cell.of(worst_cell).name}" if name == lead else "", name, worst_cell)
        for name in order
    ]
    rows += [
        [f"median of {over}" if name == lead else "", name, *_over(measured, name, statistics.median)]
        for name in order
    ]
    rows += [
        [f"worst of {over}" if name == lead else "", name, *_over(measured, name, None)] for name in order
    ]
    return CellTable(HEADER, rows)


def equal_table(measured: Sequence[Mapping[str, Any]]) -> CellTable | None:
    """ConServe's rows to each baseline's that is tuned to its P99s; None where none was.

    A cell in which no setting has these P99s, or only one with next to no rows, has no ratio: over all cells, it
    counts as above any.
    """
    told = [one["at_equal_p99"] for one in measured if "at_equal_p99" in one]
    rows = []
    for name in dict.fromkeys(name for one in told for name in one):
        found = [one[name] for one in told]
        ratios = sorted(one["times"] for one in found if one["times"] is not None)
        middle = statistics.median([*ratios, *[inf] * (len(found) - len(ratios))])
        rows.append(
            [
                name,
                f"{sum(one['kept'] for one in found)} of {len(found)}",
                str(len(ratios)),
                times(statistics.median(ratios) if ratios else None),
                times(ratios[0] if ratios else None),
                times(ratios[-1] if ratios else None),
                "above any" if middle == inf else times(middle),
            ]
        )
    return CellTable(EQUAL, rows) if rows else None


def every_cell(measured: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> CellTable:
    """All cells under the ranked policy, the worst first."""
    lead = lead_of(policies)
    return CellTable(HEADER, [_row(Cell.of(one).name, lead, one) for one in ranked(measured, lead)])


def _tables(measured: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> list[tuple[str, CellTable]]:
    """All tables of a report, each behind its heading."""
    found = {
        "The worst cell, medians and worst figures": first_table(measured, policies),
        "At equal P99s, within 5 %": equal_table(measured),
        "Every cell, the worst first": every_cell(measured, policies),
    }
    return [(heading, table) for heading, table in found.items() if table is not None]


def _row(heading: str, policy: str, measured: Mapping[str, Any]) -> list[str]:
    said = measured["policies"][policy]
    latencies = [interval((said["ratios"] or {}).get(name)) for name in RATIOS]
    kept = said["attainment"] or {}
    shares = [percent(kept.get("ttft")), percent(kept.get("tbt"))]
    failed = _count(said.get("failed"))
    return [heading, policy, *latencies, *shares, failed, *(_queue(name, said[name]) for name in QUEUE)]


def _over(measured: Sequence[Mapping[str, Any]], policy: str, of: Any) -> list[str]:
    """Figures of a policy over all cells; with `of` None each column's worst."""
    latencies = [_ratio(_fold([ratio(one, policy, name) for one in measured], of or max)) for name in RATIOS]
    said = [one["policies"][policy] for one in measured]
    kept = [
        percent(_fold([(one["attainment"] or {}).get(name) for one in said], of or min))
        for name in ("ttft", "tbt")
    ]
    queue = [_queue(name, _fold([one[name] for one in said], of or WORST.get(name, min))) for name in QUEUE]
    failed = _count(_fold([one.get("failed") for one in said], of or max))
    return [*latencies, *kept, failed, *queue]


def _fold(values: Iterable[float | None], of: Any) -> float | None:
    known = [value for value in values if value is not None]
    return float(of(known)) if known else None


def interval(said: Sequence[float | None] | None) -> str:
    """A ratio with its 95 % interval, in a table."""
    if said is None or said[0] is None:
        return NOTHING
    value, low, high = said
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else "")


def _ratio(value: float | None) -> str:
    return FAILED if value == inf else times(value)


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _queue(name: str, value: float | None) -> str:
    if value is None:
        return NOTHING
    if name == "computed_twice":
        return percent(value)
    return f"{value:.2f}" if name.startswith("of_") else figure(value)


def heat_maps(measured: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> list[HeatMap]:
    """The larger P99 to online-only's, and the offline work, of the ranked policy over the grid."""
    lead, found = lead_of(policies), {Cell.of(one): one for one in measured}
    return [
        _map(f"{lead}: larger P99, times online-only's", found, lambda one: worst(one, lead), 1.0, 1.5),
        _map(
            f"{lead}: offline work of non-preemptive's",
            found,
            lambda one: one["policies"][lead]["of_non_preemptive"],
            1.0,
            0.5,
        ),
        _map(
            f"{lead}: offline work of the bound",
            found,
            lambda one: one["policies"][lead]["of_bound"],
            1.0,
            0.3,
        ),
    ]


def _map(heading: str, found: Mapping[Cell, Any], of: Any, good: float, bad: float) -> HeatMap:
    across = [(cv, scale) for cv in (*CVS, None) for scale in SCALES]
    columns = [f"CV {cv:g}, x{scale:g}" if cv is not None else f"trace, x{scale:g}" for cv, scale in across]
    rows = []
    for lengths in (*LENGTHS, *TRACES):
        for busy in BUSY:
            cells = [Cell(busy=busy, cv=cv, lengths=lengths, scale=scale) for cv, scale in across]
            squares = [_square(cell, found.get(cell), of, good, bad) for cell in cells]
            if any(square.heat is not None for square in squares):
                rows.append((f"{lengths}, {busy:.0%} busy", squares))
    return HeatMap(heading, columns, rows)


def _square(cell: Cell, one: Any, of: Any, good: float, bad: float) -> Square:
    value = of(one) if one is not None else None
    if value is None:
        return Square("", None, "")
    if value == inf:
        return Square(FAILED, 1.0, f"{cell.name}: a request failed, or none was answered")
    heat = min(1.0, max(0.0, (value - good) / (bad - good)))
    return Square(f"{value:.2f}", heat, f"{cell.name}: {value:.3f}")


def markdown(measured: Sequence[Mapping[str, Any]], policies: Sequence[str], facts: Mapping[str, str]) -> str:
    """Both tables as Markdown, with how they were measured."""
    parts = [
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        NOTE,
        *(_piped(table) for _, table in _tables(measured, policies)),
    ]
    return "\n\n".join(parts) + "\n"


def _piped(table: CellTable) -> str:
    rule = ["---", "---", *["---:"] * (len(table.header) - 2)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (table.header, rule, *table.rows))


def page(
    measured: Sequence[Mapping[str, Any]],
    policies: Sequence[str],
    facts: Mapping[str, str],
    *,
    stopped: str | None = None,
) -> str:
    """The HTML page, without outside resources."""
    from jinja2 import Environment, StrictUndefined

    source = (files("conserve.bench.pages") / "sweep.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    return template.render(
        answer=sentence(measured, policies),
        note=NOTE,
        stopped=stopped,
        tables=_tables(measured, policies),
        maps=heat_maps(measured, policies),
        facts=facts,
    )


def sentence(measured: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> str:
    """The answer: the worst cell, then the medians."""
    lead = lead_of(policies)
    first = ranked(measured, lead)[0]
    ttft, tbt = (
        _fold([ratio(one, lead, name) for one in measured], statistics.median)
        for name in ("ttft_p99", "tbt_p99")
    )
    failing = inf in (ttft, tbt)
    middle = f"In the middle P99 TTFT is {times(ttft)} and P99 TBT {times(tbt)} times"
    share = _fold([one["policies"][lead]["of_non_preemptive"] for one in measured], statistics.median)
    queue = f"; the queue got {share:.0%} of what non-preemptive gave it" if share is not None else ""
    larger = worst(first, lead)
    has = f"has a P99 {larger:.2f} times online-only's" if larger < inf else _failing(first["policies"][lead])
    return (
        f"Under {lead} the worst of {count(len(measured), 'cell')} ({Cell.of(first).name}) {has}. "
        f"{'In half of the cells or more live requests fail' if failing else middle}{queue}."
    )


def _failing(said: Mapping[str, Any]) -> str:
    """Words for a policy in a cell without a P99 to compare."""
    if not said.get("failed") or said["ratios"]["ttft_p99"] is None:
        return "answers no live request"
    return f"fails {_count(said['failed'])} of {_count(said['requests'])} live requests"


def machine(measured: Sequence[Mapping[str, Any]]) -> str | None:
    """Sentence on cells in which the machine's own speed changed between blocks; None without any."""
    told = [StepTimes.of(one["steps"]) for one in measured if one.get("steps")]
    restless = [steps.times for steps in told if steps.restless]
    if not restless:
        return None
    return (
        f"In {len(restless)} of {count(len(measured), 'cell')} the machine's own speed changed: without rows the "
        f"decode step of a live request alone took up to {max(restless):.2f} times as long in one block as in "
        f"another. {UNSTEADY}"
    )
