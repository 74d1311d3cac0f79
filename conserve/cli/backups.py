"""`conserve store backup` and `conserve store restore`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.cli.suggestions import over_this_store
from conserve.units import decimal_size

if TYPE_CHECKING:
    from conserve.store.copying.manifest import Manifest

BACKUP_EXAMPLE = """
conserve store backup /backups/monday
conserve store backup /mnt/other-disk/monday.tar
"""
RESTORE_EXAMPLE = """
conserve --home /srv/conserve store restore /backups/monday
"""
Copy = Annotated[bool, typer.Option("--copy", help="Copy files also where a hard link would do.")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def backup(
    ctx: typer.Context,
    to: Annotated[Path, typer.Argument(metavar="FOLDER|FILE.tar", help="A new folder or archive.")],
    copy: Copy = False,
    as_json: Json = False,
) -> None:
    """Copy the store as it is at one moment, while it is in use.

    Files of jobs become hard links on the same file system, since they never change, and copies elsewhere.
    """
    from conserve.store.copying import backup as backups

    context: Context = ctx.obj
    begun = time.monotonic()
    context.require_store()
    with context.store() as store:
        made = backups.backup(store, to.absolute(), now=time.time(), copy=copy, say=output.say)
    tell(made, to, time.monotonic() - begun, "backed up", as_json=as_json)
    if made.missing:
        output.say(f"{output.count(len(made.missing), 'file')} of the store are missing; run: conserve check")
    raise typer.Exit(exits.FAILED if made.missing else exits.DONE)


def restore(
    ctx: typer.Context,
    backup: Annotated[Path, typer.Argument(metavar="FOLDER|FILE.tar", help="A backup.")],
    copy: Copy = False,
    as_json: Json = False,
) -> None:
    """Put a backup into an empty CONSERVE_HOME, and into an empty database if CONSERVE_STORE names one."""
    from conserve.store.copying import restore as restores

    context: Context = ctx.obj
    begun = time.monotonic()
    made = restores.restore(
        context.settings(), backup.absolute(), now=time.time(), copy=copy, told=lambda table, rows: None
    )
    tell(made, backup, time.monotonic() - begun, "restored", as_json=as_json)
    output.say(f"look at it with: {over_this_store(context.home, 'check')}")


def tell(made: "Manifest", where: Path, seconds: float, verb: str, *, as_json: bool) -> None:
    """Print what a backup holds."""
    if as_json:
        output.data_json(document(made, where))
        return
    jobs, files = made.tables.get("job", 0), made.files
    held = f"{output.count(jobs, 'job')}, {output.count(files, 'file')}, {decimal_size(made.file_bytes)}"
    output.say(f"{verb} {held} in {output.duration(seconds)}")
    output.data(str(where))


def document(made: "Manifest", where: Path) -> dict[str, Any]:
    """A backup as JSON (docs/reference/json.md)."""
    return {
        "path": str(where),
        "store_id": made.store_id,
        "made_at": output.iso(made.made_at),
        "tables": dict(made.tables),
        "files": made.files,
        "file_bytes": made.file_bytes,
        "missing": list(made.missing),
    }
