"""The worst cells of a simulated sweep once more, with many more requests: chance, or the policy?

    python -m tests.benchmarks.worst_cells FOLDER                   # of `conserve bench --sweep ... -o FOLDER`
    python -m tests.benchmarks.worst_cells FOLDER --requests 5000   # instead of 1,200 each

A P99 of a hundred requests is one of them. Writes `again.jsonl` into the folder, a cell a line as in `cells.jsonl`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from conserve.bench import points
from conserve.bench.cell import ratio
from conserve.bench.points import Cell
from conserve.bench.sweep import SweepPlan
from conserve.cli.context import Context
from conserve.cli.sweep import FILE, machine_of, measuring

WORST_OF = (
    *(("conserve", figure) for figure in ("ttft_p99", "tbt_p99")),
    *(("conserve/harm", figure) for figure in ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99")),
)
"""Figures by which cells are chosen: what each of our promises is about."""


def main(words: Sequence[str]) -> int:
    """Play the worst cell of each figure again, and print the figures before and now."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.worst_cells", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=1200)
    given = parser.parse_args(words)
    plan, *cells = map(json.loads, (given.folder / FILE).read_text().splitlines())
    machine = machine_of(Context().settings(model=None), None)
    if plan["machine"] != machine.digest:
        sys.exit(f"the cells in {given.folder} are of another engine than this one; play them again first")
    with (given.folder / "again.jsonl").open("w") as file:
        for before in chosen(cells):
            cell = Cell.of(before)
            rate = points.rate_of(
                cell, machine.engine, plan["block_s"], times=machine.times, seed=plan["seed"]
            )
            longer = {**plan, "blocks": ceil(given.requests / (rate * plan["block_s"])), "requests": 0}
            now = measuring(plan_of(longer, cells=len(cells)), machine)(cell)
            file.write(json.dumps(now) + "\n")
            file.flush()
            print(f"{cell.name}: {before['requests']} requests, then {now['requests']}")
            for policy, figure in WORST_OF:
                values = (ratio(before, policy, figure), ratio(now, policy, figure))
                if None not in values:
                    print(f"  {policy:14s} {figure:9s} {values[0]:6.2f} {values[1]:6.2f}")
    return 0


def chosen(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The worst cell of each figure, each once; cells that differ by their SLO alone are one under a harm."""
    found: dict[Any, Mapping[str, Any]] = {}
    for policy, figure in WORST_OF:
        worst = max(cells, key=lambda cell: ratio(cell, policy, figure) or 0.0)
        found.setdefault((worst["lengths"], worst["busy"], worst["cv"]), worst)
    return list(found.values())


def plan_of(said: Mapping[str, Any], *, cells: int) -> SweepPlan:
    """A plan as it stands in the first line of a sweep's file."""
    names = SweepPlan.__dataclass_fields__
    return replace(
        SweepPlan(**{"cells": cells, **{name: said[name] for name in names if name in said}}),
        policies=tuple(said["policies"]),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
