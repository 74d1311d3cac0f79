"""`conserve check`: find what is damaged in the store, and mend it."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids
from conserve.errors import SettingsError, SpillRefused

if TYPE_CHECKING:
    from conserve.store.checking import Checked
    from conserve.store.damage import Damage
    from conserve.store.store import Store

EXAMPLE = """
conserve check
conserve check gsm8k-k3f9 --repair
"""


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
    from conserve.jobs.repair import task_fault
    from conserve.store import catalog, checking

    context: Context = ctx.obj
    begun = time.monotonic()
    with context.store() if repair else context.store_to_read() as store:
        with store.read() as tx:
            only = [catalog.get_id(tx, job) for job in jobs] if jobs else None
        checked = checking.check(store, only=only, judge=task_fault)
        checked.damages += spill_damage(kv_spill)
        if not as_json:
            tell(checked, time.monotonic() - begun)
        said: list[str] = []
        left: Sequence[Damage] = checked.damages
        if repair and checked.damages:
            said, left = mend(store, checked, kv_spill)
    if as_json:
        output.data_json(document(checked, said, left))
    elif repair:
        tell_repairs(said, left)
    raise typer.Exit(exits.FAILED if left else exits.DONE)


def mend(store: "Store", checked: "Checked", kv_spill: Path | None) -> tuple[list[str], Sequence["Damage"]]:
    """Repair what is damaged, job by job; returns what was done, and what is damaged still."""
    from conserve.jobs.repair import repair, task_fault
    from conserve.store import checking, mending
    from conserve.store.damage import Part

    now = time.time()
    parts = {damage.part for damage in checked.damages}
    said = mending.mend_database(store) if Part.DATABASE in parts else []
    damaged = list(dict.fromkeys(damage.job_id for damage in checked.damages if damage.job_id is not None))
    for job_id in damaged:
        ours = [damage for damage in checked.damages if damage.job_id == job_id]
        said += repair(store, job_id, ours, now=now)
    if Part.SPILL in parts and kv_spill is not None:
        said.append(discard_spill(kv_spill))
    return said, [*checking.check(store, only=damaged, judge=task_fault).damages, *spill_damage(kv_spill)]


def spill_damage(folder: Path | None) -> list["Damage"]:
    """What is wrong with a KV spill, if one was named."""
    if folder is None:
        return []
    from conserve.engine.runtime import spill_file
    from conserve.store.damage import Damage, Part

    if not folder.is_dir():
        raise SettingsError(f"--kv-spill {folder} is no folder; name the one that conserve serve was given")
    try:
        spill_file.verify(folder)
    except SpillRefused as error:
        fix = f"run: conserve check --repair --kv-spill {folder} (its rows are computed again)"
        return [Damage(job_id=None, part=Part.SPILL, file=str(folder), what=f"is refused: {error}", fix=fix)]
    return []


def discard_spill(folder: Path) -> str:
    """Remove a KV spill that no server would take in."""
    from conserve.engine.runtime import spill_file

    with spill_file.claim(folder):
        spill_file.discard(folder)
    return f"the spill in {folder} was removed"


def tell(checked: "Checked", seconds: float) -> None:
    """Say what was found."""
    for damage in checked.damages:
        output.data(damage.sentence)
    looked_at = f"{output.count(checked.jobs, 'job')}, {output.count(checked.files, 'file')}"
    read = f"{checked.bytes / 1e6:,.1f} MB in {output.duration(seconds)}"
    found = output.count(len(checked.damages), "damage") if checked.damages else "nothing is damaged"
    output.say(f"{found} ({looked_at}, {read})")


def tell_repairs(said: Sequence[str], left: Sequence["Damage"]) -> None:
    """Say what was repaired, and what is damaged still."""
    for sentence in said:
        output.data(f"repaired: {sentence}")
    for damage in left:
        output.say(f"still damaged: {damage.sentence}")


def document(checked: "Checked", said: Sequence[str], left: Sequence["Damage"]) -> dict[str, Any]:
    """The findings for JSON (docs/scripting.md)."""
    return {
        "jobs": checked.jobs,
        "files": checked.files,
        "bytes": checked.bytes,
        "damages": [asdict(damage) for damage in checked.damages],
        "repairs": list(said),
        "left": [asdict(damage) for damage in left],
    }
