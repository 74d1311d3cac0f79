"""The place of the files of a store's jobs: its home, another folder, or a bucket. The database names it.

A store without jobs takes the place that CONSERVE_DATA names. From then on the place stays, so that a command
without that setting finds the files too.
"""

from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, select

from conserve.errors import SettingsError
from conserve.store.database import schema
from conserve.store.files.bucket import Bucket
from conserve.store.files.objects import FilePath, ObjectPath

DATA = "data"  # its key in `meta`
meta = schema.meta
PLACE = select(meta.c.value).where(meta.c.key == DATA)


def root_of(home: Path, place: str | None, store_id: str) -> FilePath:
    """Folder of a store's files, or their path in a bucket, which begins with the store's id."""
    if place is None:
        return home
    return ObjectPath(Bucket.parse(place), store_id) if "://" in place else Path(place)


def settled(tx: Connection, home: Path, given: str | None) -> str | None:
    """Place of a store's files, as `given` or as the database names it; None for the home.

    Raises `SettingsError` if another place is given, and jobs have files already.
    """
    kept = recorded(tx)
    wanted = normal(home, given)
    if given is None or is_same(wanted, kept):
        return kept if given is None else wanted
    if in_use(tx):
        raise SettingsError(
            f"the files of this store lie in {kept or home}, not in {wanted or home}; correct CONSERVE_DATA, "
            "or leave it out: the store knows the place (a new store, by CONSERVE_HOME, may have another)"
        )
    return wanted


def recorded(tx: Connection) -> str | None:
    """Place that the database names."""
    found = tx.scalar(PLACE)
    return None if found is None else str(found)


def record(tx: Connection, place: str | None) -> None:
    """Let the database name a place."""
    tx.execute(delete(meta).where(meta.c.key == DATA))
    if place is not None:
        tx.execute(insert(meta).values(key=DATA, value=place))


def normal(home: Path, given: str | None) -> str | None:
    """A place as the database names it; raises `SettingsError` for one that is none."""
    if given is None:
        return None
    if "://" in given:
        return Bucket.parse(given).url
    folder = Path(given).expanduser().absolute()
    return None if folder == home else str(folder)


def is_same(one: str | None, other: str | None) -> bool:
    """True if two places are one; the address of a bucket's server may differ between machines."""
    if one is None or other is None or "://" not in one or "://" not in other:
        return one == other
    return Bucket.parse(one).is_at(Bucket.parse(other))


def in_use(tx: Connection) -> bool:
    """True if the store has a job, or a file of the Batch API."""
    return any(tx.scalar(select(func.count()).select_from(table)) for table in (schema.job, schema.file))


def text_of(home: Path, root: FilePath) -> str | None:
    """The inverse of `root_of`."""
    if isinstance(root, ObjectPath):
        return root.bucket.url
    return None if root == home else str(root)
