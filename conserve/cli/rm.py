"""`conserve rm` and `conserve prune`: remove jobs that are not wanted any more."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids
from conserve.cli.disk_usage import document, table
from conserve.errors import ConserveError, JobRefused, StoreForbidden, UsageError
from conserve.units import decimal_size, parse_length

if TYPE_CHECKING:
    from conserve.store.database.store import Store
    from conserve.store.upkeep.removal import DiskUsage

EXAMPLES = {
    "rm": """
conserve rm gsm8k-k3f9
conserve rm gsm8k-k3f9 --yes
""",
    "prune": """
conserve prune --older-than 30d
conserve prune --yes
""",
}
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print what was removed as JSON.")]


def rm(
    ctx: typer.Context,
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...", help="Job ids, or beginnings of them.", autocompletion=job_ids),
    ],
    force: Annotated[bool, typer.Option("--force", help="Also jobs that are not finished.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove jobs with their requests and results; shows what that deletes and asks first."""
    from conserve.store.books import catalog
    from conserve.store.upkeep import removal

    context: Context = ctx.obj
    with context.store() as store:
        with store.read() as tx:
            wanted = list(dict.fromkeys(catalog.get_id(tx, job) for job in jobs))
        chosen = removal.usage(store, removal.among(wanted))
        open_ones = [usage for usage in chosen if not usage.finished]
        if open_ones and not force:
            raise JobRefused(removal.refusal(open_ones[0].job_id, open_ones[0].state))
        if confirm_removal(chosen, 0, yes=yes, as_json=as_json):
            removed, kept = removed_of(store, chosen, now=time.time(), force=force, but=())
            tell(removed, 0, kept, as_json=as_json)


def prune(
    ctx: typer.Context,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Finished jobs that ended so long ago too: 12h, 30d, 8w."),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove finished jobs that ended long ago, and empty the trash; shows what that deletes and asks first."""
    from conserve.store.files import trash
    from conserve.store.files.place import place_of
    from conserve.store.upkeep import removal

    context: Context = ctx.obj
    age_s = None if older_than is None else seconds(older_than)
    now = time.time()
    context.require_store()
    ended_by = None if age_s is None else now - age_s
    with context.store_to_read() as store:
        chosen = [] if ended_by is None else removal.usage(store, removal.ended_by(ended_by))
    places = {store.data, store.local}  # a bucket, and this machine
    thrown = [entry for place in places for entry in trash.contents(place)]
    if not confirm_removal(chosen, sum(place_of(entry).size() for entry in thrown), yes=yes, as_json=as_json):
        return
    # This needs no free space, unlike the removals that follow.
    freed = sum(place_of(entry).delete() for entry in thrown)
    removed: list[DiskUsage] = []
    kept: list[StoreForbidden] = []
    if chosen:
        with context.store() as store:
            # A job that was retried since it was shown stays.
            removed, kept = removed_of(store, chosen, now=now, ended_by=ended_by, but=JobRefused)
    kept += [StoreForbidden(trash.stays(entry)) for entry in thrown if trash.is_left(entry)]
    tell(removed, freed, kept, as_json=as_json)


def removed_of(
    store: "Store",
    chosen: "Sequence[DiskUsage]",
    *,
    now: float,
    force: bool = False,
    ended_by: float | None = None,
    but: type[ConserveError] | tuple[()],
) -> "tuple[list[DiskUsage], list[StoreForbidden]]":
    """Remove jobs; returns those that went, with the bytes that are free now, and errors of those that may not go.

    A job that raises `but` stays without a word.
    """
    from conserve.store.upkeep import removal

    removed: list[DiskUsage] = []
    kept: list[StoreForbidden] = []
    for usage in chosen:
        try:
            freed = removal.remove(store, usage.job_id, now=now, force=force, ended_by=ended_by)
        except StoreForbidden as error:
            kept.append(error)
        except but:
            continue
        else:
            removed += [] if freed is None else [replace(usage, bytes=freed)]
    return removed, kept


def confirm_removal(chosen: "Sequence[DiskUsage]", trash_bytes: int, *, yes: bool, as_json: bool) -> bool:
    """Show the jobs to be deleted and ask; raises `UsageError` where nothing can be asked."""
    if not chosen and not trash_bytes:
        if as_json:
            output.data_json({"jobs": [], "trash_bytes": 0, "freed_bytes": 0})
        output.say("nothing to remove")
        return False
    if not as_json and chosen:
        output.say("\n".join(table(chosen)))
    if not as_json and trash_bytes:
        output.say(f"trash {decimal_size(trash_bytes)}")
    if yes:
        return True
    what = summary(chosen, trash_bytes)
    if not is_terminal():
        raise UsageError(f"this removes {what}; nothing was removed, add --yes if that is meant")
    if typer.confirm(f"remove {what}?", err=True):
        return True
    output.say("nothing was removed")
    raise typer.Exit(exits.DONE)


def is_terminal() -> bool:
    """True if the user can be asked."""
    return sys.stdin.isatty()


def summary(chosen: "Sequence[DiskUsage]", trash_bytes: int) -> str:
    """Words for the jobs and bytes to be deleted."""
    freed = decimal_size(sum(usage.bytes for usage in chosen) + trash_bytes)
    parts = [output.count(len(chosen), "job")] if chosen else []
    parts += ["the trash"] if trash_bytes else []
    return f"{' and '.join(parts)}, {freed}"


def tell(
    removed: "Sequence[DiskUsage]", trash_bytes: int, kept: Sequence[ConserveError], *, as_json: bool
) -> None:
    """Print what was removed, and why anything else was kept; exits 1 then."""
    freed = sum(usage.bytes for usage in removed) + trash_bytes
    if as_json:
        jobs = [document(usage) for usage in removed]
        output.data_json({"jobs": jobs, "trash_bytes": trash_bytes, "freed_bytes": freed})
    else:
        for usage in removed:
            output.data(f"{usage.job_id}: removed, {decimal_size(usage.bytes)}")
        if trash_bytes:
            output.data(f"trash: emptied, {decimal_size(trash_bytes)}")
    for error in kept:
        output.say_error(error)
    if kept:
        raise typer.Exit(exits.FAILED)


def seconds(age: str) -> float:
    """Seconds of an age such as `30d`."""
    found = parse_length(age)
    if found is None:
        raise UsageError(f"--older-than {age!r} is no age; write a number with s, m, h, d or w, as 30d")
    return found
