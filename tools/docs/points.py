"""Tables of operating points in a page of docs/benchmarks, from the ledgers of `conserve bench --sweep`.

A page names them between two comments: `<!-- cells: LEDGER -->` or `<!-- middle and worst: LEDGER -->`, and
`<!-- end -->`. What stands between them is written anew.
"""

import gzip
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from conserve.bench import names
from conserve.bench.cell import RATIOS, ratio
from conserve.bench.names import HARM_PERCENT
from conserve.bench.pages.report import times
from conserve.bench.pages.sweep_report import FAILED, LATENCIES, interval
from conserve.bench.points import TRACES, Cell
from conserve.bench.sweep import documents, ranked
from conserve.names import CONSERVE

HARM = f"{CONSERVE}/{names.HARM}"  # the default promise
HARM_TIMES = 1 + HARM_PERCENT / 100  # online-only's latencies, at most
PART = re.compile(r"(<!-- (cells|middle and worst): (\S+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
NAMES = {name: f"{name.removeprefix('trace-')} trace" for name in TRACES}
HEADER = (
    *("cell, requests a policy", "policy"),
    *LATENCIES.values(),
    *("kept", "rows, of non-preemptive", "steady"),
)
Measured = Mapping[str, Any]


class Claim(NamedTuple):
    """A figure of each cell, and its floors: of the median cell and of the worst one; None without floors."""

    words: str
    of: Callable[[Measured], float | None]
    floors: tuple[float, float] | None = None
    more_is_better: bool = False
    form: str = ".2f"

    def told(self, value: float) -> str:
        """A figure or a floor."""
        return FAILED if value == inf else _spaced(format(value, self.form))

    def misses(self, value: float, floor: float) -> bool:
        """True if the value is on the wrong side of the floor."""
        return value < floor if self.more_is_better else value > floor


def _ratio(policy: str, name: str) -> Callable[[Measured], float | None]:
    return lambda cell: ratio(cell, policy, name)


def _promised(name: str) -> Callable[[Measured], float | None]:
    """A P99 of `conserve` to what it promises: so many times online-only's."""

    def kept(cell: Measured) -> float | None:
        found = ratio(cell, CONSERVE, name)
        return found / cell["scale"] if found is not None else None

    return kept


def _to_slo(latency: str) -> Callable[[Measured], float | None]:
    """A P99 of `conserve` to the cell's SLO in ms, which a pass of online-only before the blocks has set."""

    def kept(cell: Measured) -> float | None:
        if ratio(cell, CONSERVE, f"{latency}_p99") == inf:
            return inf
        found = cell["policies"][CONSERVE][f"{latency}_ms"]
        if not cell["slo_ms"] or not found:
            return None
        ttft_ms, tbt_ms = cell["slo_ms"]
        return found["p99"] / {"ttft": ttft_ms, "tbt": tbt_ms}[latency]

    return kept


def _figure(policy: str, name: str) -> Callable[[Measured], float | None]:
    return lambda cell: cell["policies"][policy][name]


def _twice(cell: Measured) -> float:
    return max(cell["policies"][policy]["computed_twice"] or 0.0 for policy in (CONSERVE, HARM))


def _of_bound(cell: Measured) -> float | None:
    """Rows of `conserve` to the bound, where non-preemptive scheduling has time for rows at all."""
    figures = cell["policies"][CONSERVE]
    return None if figures["of_non_preemptive"] is None else figures["of_bound"]


MIDDLE, TAIL, ROWS = (1.10, 1.25), (1.05, 1.25), (0.85, 0.70)
CLAIMS = (
    Claim("`conserve/harm`, P50 TTFT", _ratio(HARM, "ttft_p50"), MIDDLE),
    Claim("`conserve/harm`, P50 TBT", _ratio(HARM, "tbt_p50"), MIDDLE),
    Claim("`conserve/harm`, P99 TTFT", _ratio(HARM, "ttft_p99"), TAIL),
    Claim("`conserve/harm`, P99 TBT", _ratio(HARM, "tbt_p99"), TAIL),
    Claim("`conserve/harm`, rows of non-preemptive", _figure(HARM, "of_non_preemptive"), more_is_better=True),
    Claim("`conserve`, P99 TTFT", _ratio(CONSERVE, "ttft_p99"), TAIL),
    Claim("`conserve`, P99 TBT", _ratio(CONSERVE, "tbt_p99"), TAIL),
    Claim("`conserve`, P99 TTFT to its promise", _promised("ttft_p99")),
    Claim("`conserve`, P99 TBT to its promise", _promised("tbt_p99")),
    Claim("`conserve`, P99 TTFT to its SLO in ms", _to_slo("ttft")),
    Claim("`conserve`, P99 TBT to its SLO in ms", _to_slo("tbt")),
    Claim("`conserve`, P50 TTFT", _ratio(CONSERVE, "ttft_p50")),
    Claim("`conserve`, P50 TBT", _ratio(CONSERVE, "tbt_p50")),
    Claim(
        "`conserve`, rows of non-preemptive",
        _figure(CONSERVE, "of_non_preemptive"),
        ROWS,
        more_is_better=True,
    ),
    Claim("`conserve`, rows of the bound", _of_bound, more_is_better=True),
    Claim("rows computed twice", _twice, (0.01, 0.03), form=".1%"),
)


def page(path: Path) -> str:
    """The page's text, with its tables written anew from `raw` beside it."""

    def written(found: re.Match[str]) -> str:
        measured = ledger(path.parent / "raw" / found[3])
        return found[1] + (cells(measured) if found[2] == "cells" else middle_and_worst(measured)) + found[4]

    return PART.sub(written, path.read_text(encoding="utf-8"))


def ledger(path: Path) -> Sequence[Measured]:
    """Cells of a compressed ledger."""
    _, *measured = documents(gzip.decompress(path.read_bytes()).decode())
    return measured


def cells(measured: Iterable[Measured]) -> str:
    """Every cell with both promises, the worst P99 of `conserve` first."""
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for cell in ranked(measured):
        steps = cell["steps"]
        steady = times(steps["times"] if steps else None)
        lines.append(_row(f"{name_of(Cell.of(cell))}; {cell['requests']}", cell, CONSERVE, steady))
        lines.append(_row("", cell, HARM, ""))
    return "\n".join(lines)


def name_of(cell: Cell) -> str:
    """The cell's name as pages write it."""
    return _spaced(cell.name.replace(cell.lengths, NAMES.get(cell.lengths, cell.lengths), 1))


def _spaced(text: str) -> str:
    return text.replace("%", " %")


def _row(heading: str, cell: Measured, policy: str, steady: str) -> str:
    figures = cell["policies"][policy]
    kept = ""
    if policy == CONSERVE and figures["attainment"]:
        kept = "{ttft:.1f}, {tbt:.1f} %".format(
            **{name: 100 * (share or 0.0) for name, share in figures["attainment"].items()}
        )
    said = [_latency(cell, policy, name) for name in RATIOS]
    fields = [heading, f"`{policy}`", *said, kept, times(figures["of_non_preemptive"]), steady]
    return "".join(f"| {field} " if field else "| " for field in fields) + "|"


def _latency(cell: Measured, policy: str, name: str) -> str:
    """A ratio with its interval; bold if it is more than what was promised."""
    told, *between = interval(cell["policies"][policy]["ratios"][name]).split(" ", 1)
    found = ratio(cell, policy, name)
    if found == inf:
        return _bold(FAILED, True)
    p99s = cell["scale"] if name.endswith("p99") else inf
    limit = HARM_TIMES if policy == HARM else p99s
    exceeds = found is not None and round(found, 2) > limit
    return " ".join([_bold(told, exceeds), *between])


def _bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def middle_and_worst(measured: Sequence[Measured]) -> str:
    """Median and worst cell of each claim, beside its floors; bold where one is missed."""
    lines = [f"| of {len(measured)} cells | middle | worst | floors |", "|---|---|---|---|"]
    for claim in CLAIMS:
        values = [value for value in map(claim.of, measured) if value is not None]
        found = median(values), (min if claim.more_is_better else max)(values)
        said, floors = map(claim.told, found), ""
        if claim.floors is not None:
            missed = map(claim.misses, found, claim.floors)
            said, floors = map(_bold, said, missed), ", ".join(map(claim.told, claim.floors))
        lines.append(f"| {claim.words} | {' | '.join(said)} | {floors} |")
    return "\n".join(lines)
