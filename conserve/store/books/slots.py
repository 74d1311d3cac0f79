"""Slots of harvested tokens as they are read, apart from SQLAlchemy, for which `conserve status` has no time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

SLOT_S = 900


class HarvestedQuarter(NamedTuple):
    """Tokens computed in a quarter of an hour, and the seconds of it in which any harvester had rows to run."""

    slot: int  # quarters of an hour since 1970
    tokens: float
    busy_s: float


def is_slot(row: Sequence[Any]) -> bool:
    """True unless a damaged page put values of other kinds into a slot of harvested tokens."""
    return isinstance(row[0], int) and all(isinstance(value, int | float) for value in row[1:])
