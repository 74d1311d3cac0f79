"""Tables of operating points in the documentation: what is bold, which cell is the worst."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conserve.bench.cell import RATIOS
from tools.docs.points import CLAIMS, cells, middle_and_worst, page


def cell(lengths: str, *, harm: float, p99: float, rows: float) -> dict[str, Any]:
    """A cell's document, in which all ratios of a policy are alike."""

    def policy(ratio: float) -> dict[str, Any]:
        return {
            "ratios": {name: [ratio, ratio - 0.1, ratio + 0.1] for name in RATIOS},
            "ttft_ms": {"p99": 50.0 * ratio},
            "tbt_ms": {"p99": 20.0 * ratio},
            "attainment": {"ttft": 1.0, "tbt": 0.985},
            "of_non_preemptive": rows,
            "of_bound": rows,
            "computed_twice": 0.0,
        }

    point = {"busy": 0.2, "cv": 0.5, "lengths": lengths, "scale": 1.25, "requests": 7, "steps": None}
    point |= {"slo_ms": [62.5, 20.0]}
    return {**point, "policies": {"conserve": policy(p99), "conserve/harm": policy(harm)}}


MEASURED = [
    cell("chat", harm=1.0, p99=1.0, rows=0.9),
    cell("code", harm=1.2, p99=1.3, rows=0.6),
    cell("agents", harm=1.0, p99=1.1, rows=0.86),
]


def claims_of(measured: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Middle, worst and floors of each claim, by its words."""
    _, _, *lines = middle_and_worst(measured).splitlines()
    return dict(line.strip("| ").split(" | ", 1) for line in lines)


def test_a_missed_floor_and_a_broken_promise_are_bold() -> None:
    claims = claims_of(MEASURED)
    assert len(claims) == len(CLAIMS)
    assert claims["`conserve/harm`, P50 TTFT"] == "1.00 | 1.20 | 1.10, 1.25"
    assert claims["`conserve`, P99 TBT"] == "**1.10** | **1.30** | 1.05, 1.25"
    assert claims["`conserve`, rows of non-preemptive"] == "0.86 | **0.60** | 0.85, 0.70"
    assert claims["`conserve`, P99 TTFT to its promise"].startswith("0.88 | 1.04")
    assert claims["`conserve`, P99 TTFT to its SLO in ms"].startswith("0.88 | 1.04")
    assert claims["`conserve`, P99 TBT to its SLO in ms"].startswith("1.10 | 1.30")
    _, _, *rows = cells(MEASURED).splitlines()
    assert [row.split(" | ")[0] for row in rows[::2]] == [
        f"| {name}, 20 % busy, CV 0.5, SLO x1.25; 7" for name in ("code", "agents", "chat")
    ]
    assert "| 1.30 [1.20, 1.40] | **1.30** [1.20, 1.40] | 1.30 [1.20, 1.40] | **1.30** [" in rows[0]
    assert rows[1].startswith("| | `conserve/harm` |" + " **1.20** [1.10, 1.30] |" * 4)


def test_a_p99_without_the_requests_that_failed_is_none() -> None:
    failing = cell("chat", harm=1.0, p99=0.9, rows=0.9)
    failing["policies"]["conserve"]["failed"] = 2
    claims = claims_of([*MEASURED, failing])
    assert claims["`conserve`, P99 TBT"] == "**1.20** | **failed** | 1.05, 1.25"
    assert claims["`conserve`, P99 TTFT to its promise"] == "0.96 | failed"
    assert claims["`conserve`, P99 TTFT to its SLO in ms"] == "0.96 | failed"
    assert claims["`conserve`, P50 TTFT"].startswith("1.05 | 1.30")
    _, _, first, *_ = cells([*MEASURED, failing]).splitlines()
    assert "| 0.90 [0.80, 1.00] | **failed** | 0.90 [0.80, 1.00] | **failed** |" in first


def test_rows_have_no_ratio_to_a_bound_where_live_requests_fill_the_time() -> None:
    full = cell("code", harm=1.0, p99=1.0, rows=0.5)
    full["policies"]["conserve"] |= {"of_non_preemptive": None, "of_bound": -2.5}
    assert claims_of([*MEASURED, full])["`conserve`, rows of the bound"] == "0.86 | 0.60"


def test_a_page_has_the_tables_of_its_ledgers(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    lines = [{"seed": 0}, *MEASURED]
    ledger = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "raw" / "some.jsonl.gz").write_bytes(gzip.compress(ledger.encode()))
    text = "before\n<!-- cells: some.jsonl.gz -->\nold\n<!-- end -->\nbehind\n"
    (tmp_path / "page.md").write_text(text)
    assert page(tmp_path / "page.md") == text.replace("old", cells(MEASURED))
