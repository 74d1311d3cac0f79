"""`conserve store`: its size; its move to another database, backup and restore are in modules of their own."""

from typing import Annotated

import typer

from conserve.cli import backups, moving, output
from conserve.cli.context import Context
from conserve.cli.disk_usage import document, table
from conserve.units import decimal_size

EXAMPLE = """
conserve store size
conserve store move sqlite:////home/ann/conserve/conserve.db postgresql://ann@db/conserve
conserve store backup /backups/monday
"""
SIZE_EXAMPLE = """
conserve store size
conserve store size --json
"""
EXAMPLES = {
    "size": SIZE_EXAMPLE,
    "move": moving.EXAMPLE,
    "backup": backups.BACKUP_EXAMPLE,
    "restore": backups.RESTORE_EXAMPLE,
}


def show_size(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show how much room each job takes, the largest first, and all else in the store."""
    from conserve.store.upkeep.removal import room

    context: Context = ctx.obj
    with context.store_to_read() as store:
        found = room(store)
    jobs = sorted(found.jobs, key=lambda usage: -usage.bytes)
    others = {
        "database": found.database_bytes,
        "trash": found.trash_bytes,
        "unknown": found.unknown_bytes,
        "total": found.total_bytes,
    }
    if as_json:
        sizes = {f"{name}_bytes": number for name, number in others.items()}
        output.data_json({"jobs": [document(job) for job in jobs], **sizes})
        return
    if jobs:
        output.data("\n".join(table(jobs)))
    for name, number in others.items():
        if number or name == "total":
            output.data(f"{output.coloured(f'{name:<9}', 'bright_black')} {decimal_size(number):>10}")
    if found.trash_bytes:
        output.say("empty the trash with: conserve prune")


VERBS = {
    "size": show_size,
    "move": moving.move,
    "backup": backups.backup,
    "restore": backups.restore,
}
