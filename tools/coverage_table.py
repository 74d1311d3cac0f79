"""python tools/coverage_table.py FILE: lines and branches that the tests run, by folder, from coverage's JSON."""

import json
import sys
from collections import Counter
from pathlib import Path, PurePath

DEPTH = 2  # conserve/store; conserve/engine has a third level, whose rooms differ
DEEPER = "conserve/engine"


def folder(file: str) -> str:
    """Folder that a file counts for."""
    parts = PurePath(file).parent.parts
    return "/".join(parts[: DEPTH + ("/".join(parts[:DEPTH]) == DEEPER)])


def table(measured: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """Rows of a Markdown table; the last one is of all files."""
    sums: dict[str, Counter[str]] = {}
    for file, found in measured.items():
        sums.setdefault(folder(file), Counter()).update(found["summary"])
    whole = Counter[str]()
    for summed in sums.values():
        whole.update(summed)
    rows = ["| folder | lines | run | branches | taken |", "|---|---|---|---|---|"]
    for name, summed in [*sorted(sums.items()), ("all", whole)]:
        lines, branches = summed["num_statements"], summed["num_branches"]
        rows.append(
            f"| `{name}` | {lines:,} | {summed['covered_lines'] / max(lines, 1):.1%} "
            f"| {branches:,} | {summed['covered_branches'] / max(branches, 1):.1%} |"
        )
    return rows


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text())["files"])))
