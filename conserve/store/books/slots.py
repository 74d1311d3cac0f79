"""Slots of harvested tokens as they are read, apart from SQLAlchemy, for which `conserve status` has no time."""

from collections.abc import Sequence
from typing import Any


def is_slot(row: Sequence[Any]) -> bool:
    """True unless a damaged page put values of other kinds into a slot of harvested tokens."""
    return isinstance(row[0], int) and all(isinstance(value, int | float) for value in row[1:])
