"""Tables of a Markdown page."""

import re
from pathlib import Path
from typing import NamedTuple

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Table(NamedTuple):
    """A table: its header, and its rows as texts."""

    header: list[str]
    rows: list[list[str]]

    def row(self, beginning: str) -> list[str]:
        """The row whose first cell begins like this; raises `LookupError` unless there is exactly one."""
        found = [row for row in self.rows if row[0].startswith(beginning)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows begin with {beginning!r}")
        return found[0]


def tables(page: Path) -> list[Table]:
    """Tables of a page, in their order."""
    found: list[Table] = []
    block: list[list[str]] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif block:
            found.append(Table(block[0], block[2:]))
            block = []
    return found


def numbers(cell: str) -> list[float]:
    """Numbers of a cell, in their order; thousands may be separated by commas."""
    return [float(number.replace(",", "")) for number in NUMBER.findall(cell)]
