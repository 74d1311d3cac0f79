"""`conserve check`: find damaged files and records of the store, and repair them."""

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids
from conserve.cli.suggestions import at_home
from conserve.config import Settings
from conserve.errors import (
    DatabaseDamaged,
    JobNotFound,
    SettingsError,
    SpillRefused,
    StoreDamaged,
    StoreForbidden,
)

if TYPE_CHECKING:
    from conserve.store.database.store import Store
    from conserve.store.upkeep.checking import Checked
    from conserve.store.upkeep.damage import Damage

EXAMPLE = """
conserve check
conserve check gsm8k-k3f9 --repair
"""

MOST_NAMED = 5


def check(
    ctx: typer.Context,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB...", help="Only these jobs; all by default.", autocompletion=job_ids),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Recover what the rest allows; lost rows are computed again.")
    ] = False,
    kv_spill: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Look at the KV spill in this folder too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Find what is damaged in the store: files, records and rows that are missing or not what was written."""
    context: Context = ctx.obj
    settings = context.settings()
    if kv_spill is None:  # whose server needs no store here
        context.require_store()
    begun = time.monotonic()
    checked, only = find(settings, jobs, write=repair)
    checked.damages += spill_damage(kv_spill)
    if not as_json:
        tell(checked, time.monotonic() - begun)
    said: list[str] = []
    left: Sequence[Damage] = checked.damages
    if repair and checked.damages:
        said, left = mend(settings, checked, only, kv_spill)
    if as_json:
        output.data_json(document(checked, said, left))
    elif repair:
        tell_repairs(said, left)
    raise typer.Exit(exits.FAILED if left else exits.DONE)


def find(
    settings: Settings, jobs: Sequence[str] | None, *, write: bool
) -> tuple["Checked", Sequence[str] | None]:
    """Check the store; returns the findings, and the ids of the jobs that the command line names."""
    from conserve.jobs.repair import task_fault
    from conserve.store.books import catalog
    from conserve.store.database import half_made
    from conserve.store.database.store import Store
    from conserve.store.upkeep import checking

    if half_made.unfinished(settings.sqlite_file) is not None:
        said = "its repair was interrupted, and it lacks what it had"
        return checking.Checked(damages=[checking.database_is("the database", said)]), None
    try:
        with closing(Store.open(settings) if write else Store.open_to_read(settings)) as store:
            with store.read() as tx:
                only = [catalog.get_id(tx, job) for job in jobs] if jobs else None
            checked = checking.check(store, only=only, judge=task_fault)
            checked.damages += unnamed_jobs(store) if only is None else []
            return checked, only
    except (DatabaseDamaged, StoreDamaged) as error:
        return checking.Checked(damages=[checking.database_is("the database", str(error))]), None


def unnamed_jobs(store: "Store") -> list["Damage"]:
    """Jobs that an earlier database at this place named, and this one does not."""
    from conserve.store.upkeep import checking, rebuild

    found = [stranger.job_id for stranger in rebuild.strangers(store)]
    names = ", ".join(found[:MOST_NAMED]) + ("" if len(found) <= MOST_NAMED else ", ...")
    said = f"it does not name {output.count(len(found), 'job')} whose folders are here: {names}"
    return [checking.database_is(store.place, said)] if found else []


def mend(
    settings: Settings, checked: "Checked", only: Sequence[str] | None, kv_spill: Path | None
) -> tuple[list[str], Sequence["Damage"]]:
    """Repair the damage, the database first; returns sentences on the repairs, and the damage that is left."""
    from conserve.store.upkeep.damage import StorePart

    said, damages = [], checked.damages
    if any(damage.part is StorePart.DATABASE for damage in damages):
        said += mend_database(settings)
        damages = find(settings, only, write=True)[0].damages
    said += mend_jobs(settings, damages)
    if kv_spill is not None and spill_damage(kv_spill):
        said.append(discard_spill(kv_spill))
    left = find(settings, only, write=True)[0].damages
    return said, [*left, *spill_damage(kv_spill)]


def mend_database(settings: Settings) -> list[str]:
    """Repair the database in place if that is enough, else make a new one from its readable parts."""
    from conserve.store.database import half_made
    from conserve.store.database.store import Store
    from conserve.store.upkeep import checking, mending, rebuild

    now = time.time()
    said: list[str] = []
    if half_made.unfinished(settings.sqlite_file) is not None:
        return rebuild.rebuild(settings, now=now)
    try:
        with closing(Store.open(settings)) as store:
            said = mending.mend_database(store)
            if not checking.database_damage(store):
                return said + rebuild.adopt(store, rebuild.strangers(store), now=now)
    except (DatabaseDamaged, StoreDamaged):
        pass
    return said + rebuild.rebuild(settings, now=now)


def mend_jobs(settings: Settings, damages: Sequence["Damage"]) -> list[str]:
    """Repair each damaged job; returns a sentence on each repair."""
    from conserve.jobs.repair import repair
    from conserve.store.database.store import Store

    repairs: list[str] = []
    with closing(Store.open(settings)) as store:
        for job_id in dict.fromkeys(damage.job_id for damage in damages if damage.job_id is not None):
            ours = [damage for damage in damages if damage.job_id == job_id]
            # A job may have been removed since it was checked; of files out of reach the next check tells.
            with suppress(JobNotFound, StoreForbidden):
                repairs += repair(store, job_id, ours, now=time.time())
    return repairs


def spill_damage(folder: Path | None) -> list["Damage"]:
    """Damage of the KV spill, if the command line names one."""
    if folder is None:
        return []
    from conserve.engine.runtime import spill_file
    from conserve.store.upkeep.damage import Damage, StorePart

    if not folder.is_dir():
        raise SettingsError(f"--kv-spill {folder} is no folder; name the one that conserve serve was given")
    try:
        spill_file.verify(folder)
    except SpillRefused as error:
        fix = f"run: conserve check --repair --kv-spill {folder} (its rows are computed again)"
        return [
            Damage(job_id=None, part=StorePart.SPILL, file=str(folder), what=f"is refused: {error}", fix=fix)
        ]
    return []


def discard_spill(folder: Path) -> str:
    """Remove a KV spill that no server would accept."""
    from conserve.engine.runtime import spill_file

    with spill_file.claim(folder):
        spill_file.discard(folder)
    return f"the spill in {folder} was removed"


def tell(checked: "Checked", seconds: float) -> None:
    """Print the findings."""
    for damage in checked.damages:
        output.data(at_home(damage.sentence))
    looked_at = f"{output.count(checked.jobs, 'job')}, {output.count(checked.files, 'file')}"
    read = f"{checked.bytes / 1e6:,.1f} MB in {output.duration(seconds)}"
    found = output.count(len(checked.damages), "damage") if checked.damages else "nothing is damaged"
    output.say(f"{found} ({looked_at}, {read})")


def tell_repairs(repairs: Sequence[str], damages: Sequence["Damage"]) -> None:
    """Print the repairs, and the damage that is left."""
    for sentence in repairs:
        output.data(f"repaired: {sentence}")
    for damage in damages:
        output.say(f"still damaged: {damage.sentence}")


def document(checked: "Checked", repairs: Sequence[str], damages: Sequence["Damage"]) -> dict[str, Any]:
    """Findings as JSON (docs/reference/json.md)."""
    return {
        "jobs": checked.jobs,
        "files": checked.files,
        "bytes": checked.bytes,
        "damages": [asdict(damage) for damage in checked.damages],
        "repairs": list(repairs),
        "left": [asdict(damage) for damage in damages],
    }
