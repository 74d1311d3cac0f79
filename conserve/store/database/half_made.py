"""A database that is being made anew: until that is done it lacks rows, and no command takes it for the store.

A file beside it, DATABASE.rebuilding, has the name of the damaged one that was put aside (`store.upkeep.rebuild`).
"""

from pathlib import Path

from conserve.errors import StoreError


def mark_of(path: Path) -> Path:
    """File that stands beside a database while it is rebuilt, with the name of the damaged one."""
    return path.with_name(f"{path.name}.rebuilding")


def unfinished(path: Path | None) -> Path | None:
    """The damaged database that a rebuild put aside and did not make up for; None without one."""
    if path is None or not mark_of(path).exists():
        return None
    aside = path.with_name(mark_of(path).read_text(encoding="utf-8").strip())
    return aside if aside.is_file() else None


def refuse(path: Path | None) -> None:
    """Raise `StoreError` for a database that lacks what its repair has yet to bring."""
    if unfinished(path) is not None:
        raise StoreError(
            f"a repair of the store {path} is under way or was interrupted, and until it ends rows are missing; "
            "run: conserve check --repair"
        )


def forget(path: Path | None) -> None:
    """Remove the mark of a rebuild that a whole database makes up for."""
    if path is not None:
        mark_of(path).unlink(missing_ok=True)
