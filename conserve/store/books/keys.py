"""Keys of the Batch API and of live requests: each belongs to a project, and the store has its hash alone."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, text, update

from conserve.errors import UsageError
from conserve.store.database import schema

api_key = schema.api_key

EVERYTHING = f"select {', '.join(api_key.columns.keys())} from api_key order by seq"
"""All keys, as `of_rows` reads them: plain SQL that every database takes."""

PREFIX = "csk-"
MOST = 2**63 - 1  # that the database holds
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A row of the table `api_key`."""

    seq: int
    name: str
    project: str
    hash: str
    live: bool
    batch: bool
    limit_rows: int | None
    limit_tokens: int | None
    created_at: float
    revoked_at: float | None


def add(
    tx: Connection,
    name: str,
    *,
    project: str,
    now: float,
    live: bool = True,
    batch: bool = True,
    limit_rows: int | None = None,
    limit_tokens: int | None = None,
) -> str:
    """Make a key; returns it, which is the only time that it can be read."""
    for what, given in (("name", name), ("project", project)):
        if NAME.fullmatch(given) is None:
            raise UsageError(f"a {what} is letters, digits, - _ and ., at most 64, not {given!r}")
    for flag, limit in (("--limit-rows", limit_rows), ("--limit-tokens", limit_tokens)):
        if limit is not None and limit > MOST:
            raise UsageError(f"{flag} is at most {MOST:,}; leave it out for no limit")
        if limit is not None and not batch:
            raise UsageError(
                f"{flag} limits batches, and this key is for live requests alone; leave it out, or give --batch too"
            )
    if tx.scalar(select(api_key.c.seq).where(api_key.c.name == name)) is not None:
        raise UsageError(f"there is or was a key {name!r}; choose another name, or run: conserve keys list")
    made = PREFIX + secrets.token_urlsafe(32)
    tx.execute(
        insert(api_key).values(
            name=name,
            project=project,
            hash=hashed(made),
            live=live,
            batch=batch,
            limit_rows=limit_rows,
            limit_tokens=limit_tokens,
            created_at=now,
        )
    )
    return made


def hashed(key: str) -> str:
    """SHA-256 of a key. A key has 256 random bits, so that a slow hash would add nothing."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def revoke(tx: Connection, name: str, *, now: float) -> None:
    """End a key for good; its batches stay with its project."""
    mine = api_key.c.name == name
    if tx.scalar(select(api_key.c.seq).where(mine)) is None:
        raise UsageError(f"there is no key {name!r}; run: conserve keys list")
    tx.execute(update(api_key).where(mine, api_key.c.revoked_at.is_(None)).values(revoked_at=now))


def lock(tx: Connection, name: str) -> None:
    """Wait until no other transaction counts what the key has used."""
    tx.execute(select(api_key.c.seq).where(api_key.c.name == name).with_for_update())


def everything(tx: Connection) -> list[ApiKey]:
    """All keys, also those that were revoked, the oldest first."""
    return of_rows(tx.execute(text(EVERYTHING)))


def of_rows(rows: Iterable[Sequence[Any]]) -> list[ApiKey]:
    """The keys of rows of `EVERYTHING`."""
    found = (dict(zip(api_key.columns.keys(), row, strict=True)) for row in rows)
    return [ApiKey(**{**row, "live": bool(row["live"]), "batch": bool(row["batch"])}) for row in found]


def of_text(known: Iterable[ApiKey], text: str) -> ApiKey | None:
    """The key that a caller sent; None for another text, and for a key that was revoked.

    Every hash is compared, to its end, so that the time taken tells nothing about a key.
    """
    sent = hashed(text)
    found = [key for key in known if hmac.compare_digest(key.hash, sent)]
    return next((key for key in found if key.revoked_at is None), None)
