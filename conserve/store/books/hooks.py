"""Hooks: addresses that are told of changes of batches."""

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Row, insert, select, update

from conserve.errors import UsageError
from conserve.store.books.events import Event
from conserve.store.books.keys import NAME
from conserve.store.database import schema

hook, message = schema.hook, schema.message

SECRET_BYTES = 32
REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A row of the table `hook`."""

    seq: int
    id: str
    project: str | None
    url: str
    events: tuple[str, ...]
    secret: str
    allow_private: bool
    created_at: float
    ended_at: float | None
    ended: str | None


def add(
    tx: Connection,
    url: str,
    *,
    events: Sequence[Event],
    project: str | None = None,
    allow_private: bool = False,
    now: float,
) -> Hook:
    """Add a hook with a secret of its own; the URL has been checked."""
    if project is not None and NAME.fullmatch(project) is None:
        raise UsageError(f"a project is letters, digits, - _ and ., at most 64, not {project!r}")
    hook_id = f"hook_{secrets.token_hex(4)}"
    tx.execute(
        insert(hook).values(
            id=hook_id,
            project=project,
            url=url,
            events=json.dumps([event.value for event in events]),
            secret=new_secret(),
            allow_private=allow_private,
            created_at=now,
        )
    )
    return get(tx, hook_id)


def new_secret() -> str:
    """Secret in the form of Standard Webhooks: 256 random bits."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()}"


def get(tx: Connection, hook_id: str) -> Hook:
    """The hook with this id; raises `UsageError` if there is none."""
    row = tx.execute(select(hook).where(hook.c.id == hook_id)).one_or_none()
    if row is None:
        raise UsageError(f"there is no hook {hook_id!r}; run: conserve hooks list")
    return to_hook(row)


def active(tx: Connection, hook_id: str) -> Hook:
    """The hook with this id; raises `UsageError` if it has ended."""
    found = get(tx, hook_id)
    if found.ended_at is not None:
        raise UsageError(
            f"the hook {hook_id} has ended ({found.ended}); make another: conserve hooks add URL"
        )
    return found


def everything(tx: Connection) -> list[Hook]:
    """All hooks, also those that have ended, the oldest first."""
    return [to_hook(row) for row in tx.execute(select(hook).order_by(hook.c.seq))]


def to_hook(row: Row[tuple[object, ...]]) -> Hook:
    """Convert a database row."""
    values = dict(row._mapping)
    return Hook(**{**values, "events": tuple(json.loads(values["events"]))})


def end(tx: Connection, hook_id: str, why: str, *, now: float) -> int:
    """Send a hook nothing more; returns the number of messages that are dropped."""
    mine = hook.c.id == get(tx, hook_id).id, hook.c.ended_at.is_(None)
    tx.execute(update(hook).where(*mine).values(ended_at=now, ended=why))
    waiting = message.c.hook_id == hook_id, message.c.state == "waiting"
    return tx.execute(update(message).where(*waiting).values(state="dropped", owner=None)).rowcount
