"""Tables of a Markdown page."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Table(NamedTuple):
    """A table: the heading that it is under, its header, and its rows as texts."""

    section: str
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
    section = ""
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif block:
            found.append(Table(section, block[0], block[2:]))
            block = []
        if line.startswith("#"):
            section = line.lstrip("# ")
    return found


def under(found: Sequence[Table], section: str, place: int = 0) -> Table:
    """The table at this place of a section, so that tables of other sections may come and go.

    Raises `LookupError` unless there is one.
    """
    there = [table for table in found if table.section == section]
    if place >= len(there):
        raise LookupError(f"{len(there)} tables are under {section!r}")
    return there[place]


def numbers(cell: str) -> list[float]:
    """Numbers of a cell, in their order; thousands may be separated by commas."""
    return [float(number.replace(",", "")) for number in NUMBER.findall(cell)]
