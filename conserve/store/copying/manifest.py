"""The manifest of a backup, written last: a folder without one is no backup."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conserve.config import BACKUP
from conserve.errors import StoreDamaged, StoreError
from conserve.store.files.digests import Seal, fault

MANIFEST = BACKUP
DATABASE = "conserve.db"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a backup."""

    id: str
    store_id: str
    version: str  # of ConServe that made it
    made_at: float
    source: str  # address of the database
    database: Seal
    tables: Mapping[str, int]  # rows of each
    files: int
    file_bytes: int
    missing: tuple[str, ...]  # files that the database names and the home lacked


def to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as it is stored."""
    return {"format": FORMAT, **asdict(manifest)}


def read(folder: Path) -> Manifest:
    """Manifest of a backup whose database is whole; raises `StoreError` if there is none."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
        if found.pop("format") != FORMAT:
            raise StoreError(f"{folder} is a backup of a later version of ConServe; upgrade ConServe")
        found |= {"database": Seal(**found["database"]), "missing": tuple(found["missing"])}
        manifest = Manifest(**found)
    except FileNotFoundError as error:
        raise StoreError(
            f"{folder} is no finished backup; name another, or make one: conserve store backup"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreDamaged(f"the manifest of the backup {folder} is damaged; name another backup") from error
    if what := fault(folder / DATABASE, manifest.database):
        raise StoreDamaged(
            f"the database of the backup {folder} {what}; name another backup, or see what is left of this one: "
            f"conserve --home {folder} check"
        )
    return manifest
