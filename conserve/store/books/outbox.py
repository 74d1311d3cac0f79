"""The outbox: messages to hooks, from the change that made them until the receiver has them.

A message is held by one process while it is sent. A process that is killed leaves it held, and another one sends it
under the same id: a receiver gets each message at least once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, update

from conserve.errors import UsageError
from conserve.store.books import events
from conserve.store.books.hooks import Hook, active
from conserve.store.database import schema

message = schema.message

HOLD_S = 120.0  # beyond the longest attempt; a message of a killed process of another machine waits as long
SKEW_S = 3600.0
"""Most by which the clocks of two machines differ; what lies further ahead is of a clock that was set back."""
LONGEST_WAIT_S = 24 * 3600.0  # between two attempts
MOST_OF_HOOK = 2  # held at a time, so that a slow receiver does not hold up the others
TEST = "test"


class MessageState(StrEnum):
    """State of a message."""

    WAITING = "waiting"
    """Message is to be sent, for the first time or again."""
    DELIVERED = "delivered"
    """Receiver answered with 2xx."""
    GIVEN_UP = "given_up"
    """Every attempt failed; `conserve hooks resend` begins again."""
    DROPPED = "dropped"
    """Hook ended before the receiver had the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """A row of the table `message`."""

    seq: int
    id: str
    hook_id: str
    event: str
    batch_id: str | None
    job_id: str | None
    body: str
    created_at: float
    state: MessageState
    attempts: int
    next_at: float
    owner: str | None
    held_until: float | None
    tried_at: float | None
    status: int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAttempt:
    """Outcome of an attempt to send a message."""

    at: float
    status: int | None = None  # of the receiver's answer; None without one
    error: str | None = None  # None if the receiver has the message


def is_due(now: float) -> ColumnElement[bool]:
    """Condition that a message is to be sent now and that no process holds it."""
    passed = or_(message.c.next_at <= now, message.c.next_at > now + LONGEST_WAIT_S + SKEW_S)
    free = or_(message.c.held_until.is_(None), ~is_held(now))
    return and_(message.c.state == MessageState.WAITING.value, passed, free)


def is_held(now: float) -> ColumnElement[bool]:
    """Condition that a process holds a message, by a clock that was not set back since."""
    return and_(message.c.held_until > now, message.c.held_until <= now + HOLD_S + SKEW_S)


def any_due(tx: Connection, *, now: float) -> bool:
    """True if a message is to be sent now."""
    return tx.scalar(select(message.c.seq).where(is_due(now)).limit(1)) is not None


def holders(tx: Connection) -> set[str]:
    """Processes that hold messages."""
    waiting = message.c.state == MessageState.WAITING.value  # as all that are held; the index knows these
    found = select(message.c.owner).where(waiting, message.c.owner.is_not(None)).distinct()
    return {str(owner) for owner in tx.scalars(found)}


def release(tx: Connection, dead: Collection[str]) -> None:
    """Let other processes send the messages that these processes hold."""
    if dead:
        tx.execute(update(message).where(message.c.owner.in_(dead)).values(owner=None, held_until=None))


def turn(tx: Connection, *, now: float, limit: int) -> list[str]:
    """Ids of up to `limit` messages that are due, few of each hook.

    First come those of hooks of which none is being sent, then those that were never tried, then the oldest. So
    hooks that do not answer leave a place to the others as soon as one is free.

    The query reads all that are due, so it belongs into a transaction that locks nothing out.
    """
    place = func.row_number().over(
        partition_by=message.c.hook_id, order_by=(message.c.next_at, message.c.seq)
    )
    busy = (
        select(message.c.hook_id, func.count().label("held"))
        .where(message.c.state == MessageState.WAITING.value, is_held(now))
        .group_by(message.c.hook_id)
        .subquery()
    )
    due = (
        select(message.c.id, message.c.hook_id, message.c.seq, message.c.attempts, place.label("place"))
        .where(is_due(now))
        .subquery()
    )
    held = func.coalesce(busy.c.held, 0)
    found = (
        select(due.c.id)
        .outerjoin(busy, busy.c.hook_id == due.c.hook_id)
        .where(due.c.place + held <= MOST_OF_HOOK)
        .order_by(due.c.place + held, due.c.attempts > 0, due.c.seq)
        .limit(limit)
    )
    return [str(message_id) for message_id in tx.scalars(found)]


def claim(tx: Connection, turn: Sequence[str], *, owner: str, now: float) -> list[MessageRecord]:
    """Hold those of these messages that are still due."""
    return [get(tx, message_id) for message_id in turn if hold(tx, message_id, owner, now)]


def hold(tx: Connection, message_id: str, owner: str, now: float) -> bool:
    """Hold a message that is due; False if another process was faster."""
    free = update(message).where(message.c.id == message_id, is_due(now))
    return tx.execute(free.values(held_by(owner, now))).rowcount == 1


def get(tx: Connection, message_id: str) -> MessageRecord:
    """The message with this id; raises `UsageError` if there is none."""
    row = tx.execute(select(message).where(message.c.id == message_id)).one_or_none()
    if row is None:
        raise UsageError(f"there is no message {message_id!r}; run: conserve hooks log")
    return to_message(row)


def to_message(row: Any) -> MessageRecord:
    """Convert a database row."""
    values = dict(row._mapping)
    return MessageRecord(**{**values, "state": MessageState(values["state"])})


def record(
    tx: Connection,
    sent: MessageRecord,
    attempt: SendAttempt,
    *,
    state: MessageState,
    next_at: float | None = None,
) -> None:
    """Write down an attempt; one that failed changes nothing if another process holds the message by now."""
    mine = [message.c.id == sent.id, message.c.state == MessageState.WAITING.value]
    if state is not MessageState.DELIVERED:
        mine.append(message.c.owner == sent.owner)
    tx.execute(
        update(message)
        .where(*mine)
        .values(
            state=state.value,
            attempts=message.c.attempts + 1,
            next_at=next_at if next_at is not None else message.c.next_at,
            owner=None,
            held_until=None,
            tried_at=attempt.at,
            status=attempt.status,
            error=attempt.error,
        )
    )


def again(tx: Connection, message_id: str, *, owner: str, now: float) -> MessageRecord:
    """Hold a message to send it again, under its id; raises `UsageError` if it is held or its hook has ended."""
    active(tx, get(tx, message_id).hook_id)
    fresh = {"state": MessageState.WAITING.value, "attempts": 0, "next_at": now, **held_by(owner, now)}
    held = and_(message.c.owner.is_not(None), is_held(now))
    changed = tx.execute(update(message).where(message.c.id == message_id, ~held).values(fresh)).rowcount
    if not changed:
        raise UsageError(f"the message {message_id} is being sent now; run: conserve hooks log")
    return get(tx, message_id)


def add_test(tx: Connection, to: Hook, *, owner: str, now: float) -> MessageRecord:
    """Add a message that tells of nothing, and hold it."""
    body = events.encoded("conserve.test", {"hook": to.id}, now=now)
    values = events.new_message(to.id, TEST, body, now=now) | held_by(owner, now)
    tx.execute(insert(message).values(values))
    return get(tx, values["id"])


def held_by(owner: str, now: float) -> dict[str, Any]:
    """Columns of a message that a process holds from now on."""
    return {"owner": owner, "held_until": now + HOLD_S}


def page(
    tx: Connection, *, hook_id: str | None = None, state: MessageState | None = None, limit: int
) -> list[MessageRecord]:
    """Messages of a hook, or of all, the newest first."""
    found = select(message).order_by(message.c.seq.desc()).limit(limit)
    if hook_id is not None:
        found = found.where(message.c.hook_id == hook_id)
    if state is not None:
        found = found.where(message.c.state == state.value)
    return [to_message(row) for row in tx.execute(found)]


def counts(tx: Connection) -> dict[str, dict[str, int]]:
    """Number of messages of each hook by state."""
    columns = message.c.hook_id, message.c.state
    found: dict[str, dict[str, int]] = {}
    for hook_id, state, number in tx.execute(select(*columns, func.count()).group_by(*columns)):
        found.setdefault(hook_id, {})[state] = number
    return found


def forget(tx: Connection, *, before: float) -> int:
    """Delete the messages that are over and were last tried before this moment; returns how many."""
    last = func.coalesce(message.c.tried_at, message.c.created_at)
    over = message.c.state != MessageState.WAITING.value, last < before
    return tx.execute(delete(message).where(*over)).rowcount
