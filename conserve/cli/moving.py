"""`conserve store move`: take the store to another database."""

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conserve.store.copying.tables import TableDigest

EXAMPLE = """
conserve store move sqlite:////home/ann/conserve/conserve.db postgresql://ann@db/conserve
conserve store move postgresql://ann@db/conserve sqlite:////home/ann/conserve/conserve.db --wait
"""

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Address of the database that is the store.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="Address of an empty database.")]


def move(
    ctx: typer.Context,
    source: Source,
    target: Target,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until harvesters hold no rows.")] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End a move that was begun; SOURCE goes on as it was.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Take the store's database to another one, compare both row by row, and leave the old one marked as moved.

    Files of jobs stay where they are. A move that was killed goes on when the same command is run again.
    """
    from conserve.jobs.harvest.release import Release, waited
    from conserve.store.copying import move as moves
    from conserve.store.database.connection import address

    if wait and cancel:
        raise UsageError("--wait and --cancel exclude each other")
    context: Context = ctx.obj
    settings = context.settings()
    begun = time.monotonic()
    release = Release(lease_s=settings.lease_s)
    with closing(moves.Ends.of(source.strip(), target.strip())) as ends:  # of files that end in a line break
        goal = address(ends.target)
        if cancel:
            if left := moves.cancel(ends):
                output.say(left)
            output.say(f"the move was cancelled; the store is at {address(ends.source)}")
            return

        def attempt() -> "Mapping[str, TableDigest]":
            return moves.move(settings.home, ends, CopyProgress().page, release.require)

        found = waited(attempt, output.say) if wait else attempt()
    tell(found, goal, time.monotonic() - begun, as_json=as_json)


class CopyProgress:
    """Tells the rows of each table as they are copied."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._said_at = time.monotonic()

    def page(self, table: str, rows: int) -> None:
        """Count the rows of a page; says at most one sentence a second."""
        self._rows[table] = self._rows.get(table, 0) + rows
        if time.monotonic() - self._said_at >= 1:
            self._said_at = time.monotonic()
            output.say(f"{table}: {self._rows[table]:,} rows")


def tell(found: "Mapping[str, TableDigest]", address: str, seconds: float, *, as_json: bool) -> None:
    """Print the tables that were moved, and what is left to do."""
    if as_json:
        output.data_json({"target": address, "tables": document(found), "seconds": round(seconds, 3)})
    elif found:
        output.data("\n".join(table(found)))
    rows = sum(digest.rows for digest in found.values())
    said = f"moved {output.count(rows, 'row')} in {output.duration(seconds)}" if found else "was moved before"
    output.say(f"{said}; now set CONSERVE_STORE={address} wherever this store is used")


def table(found: "Mapping[str, TableDigest]") -> list[str]:
    """Lines with the rows and the digest of each table."""
    rows = [[name, f"{digest.rows:,}", digest.digest[:16]] for name, digest in found.items()]
    return output.columns(("TABLE", "ROWS", "DIGEST ON BOTH SIDES"), rows, right=(1,))


def document(found: "Mapping[str, TableDigest]") -> dict[str, Any]:
    """Tables as JSON (docs/reference/json.md)."""
    return {name: digest._asdict() for name, digest in found.items()}
