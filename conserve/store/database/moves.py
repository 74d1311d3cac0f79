"""The mark of a move: a database that was moved, or is being filled, is not opened as a store.

The mark is a row of the table `meta`. The module imports nothing heavy, because `conserve status` reads it too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from conserve.errors import StoreMoved

KEY = "move"  # of the mark in `meta`
QUERY = f"select value from meta where key = '{KEY}'"


LEAVES = "this store is being moved to"


class MoveState(StrEnum):
    """State of a database that takes part in a move, a backup or a restore."""

    LEAVING = "leaving"
    """Frozen, while its rows are copied to another database."""
    LEFT = "left"
    """Frozen for good: another database is the store now."""
    ARRIVING = "arriving"
    """Being filled; not a store yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMark:
    """Contents of the mark."""

    id: str
    """Name of the move, which both databases carry."""
    state: MoveState
    other: str
    """Address of the other database, or the path of a backup."""
    store_id: str
    after: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    """Key of the last row that each table of a database that is being filled has."""

    @property
    def sentence(self) -> str:
        """Sentence for a command that would open the database."""
        match self.state:
            case MoveState.LEFT:
                return f"this store was moved to {self.other}; set CONSERVE_STORE to that address"
            case MoveState.LEAVING:
                return (
                    f"{LEAVES} {self.other}; run the same conserve store move again to "
                    "end the move, or with --cancel to go on here"
                )
            case MoveState.ARRIVING:
                return (
                    f"this store is being filled from {self.other}; "
                    "run the same conserve store move or restore again to end that"
                )


def to_text(mark: MoveMark) -> str:
    """The mark as it is stored."""
    return json.dumps(asdict(mark))


def parse(value: str | None) -> MoveMark | None:
    """Parse a stored mark; None if there is none. Raises `StoreMoved` for one that is damaged."""
    if value is None:
        return None
    try:
        found = json.loads(value)
        return MoveMark(**{**found, "state": MoveState(found["state"])})
    except (ValueError, TypeError, KeyError) as error:
        raise StoreMoved(
            "the mark of a move in this store is damaged; to go on here, run: "
            "conserve store move SOURCE TARGET --cancel"
        ) from error


def refuse(value: str | None) -> None:
    """Raise `StoreMoved` if a database carries a mark."""
    if (mark := parse(value)) is not None:
        raise StoreMoved(mark.sentence, for_good=mark.state is MoveState.LEFT)


FROZEN = re.compile(r"this store (was|is being) moved to [^\n]*")


def said_by_guard(cause: str) -> str | None:
    """Sentence with which a frozen database refused a statement; None if the error has another cause."""
    found = FROZEN.search(cause)
    return found.group() if found else None
