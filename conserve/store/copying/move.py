"""A move: takes the database of a store across to another one, and leaves the old one frozen.

    1. freeze   the source refuses every change from here on, by triggers; no lease is held at that moment
    2. fill     the target is made anew and filled (`filling`)
    3. compare  each table has the same rows on both sides
    4. leave    the source is marked as moved
    5. open     the target loses its mark: it is the store now

A process may be killed between any two statements. The same command goes on from there, because both databases name
the move. At no instant do both of them take changes.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Connection, Engine, func, select

from conserve.errors import SettingsError, StoreError, StoreInUse, StoreMoved
from conserve.store.copying import filling
from conserve.store.copying.filling import Told
from conserve.store.copying.tables import TableDigest
from conserve.store.database import guard, half_made, lineage, schema
from conserve.store.database.connection import (
    LOCK_NOT_AVAILABLE,
    address,
    code,
    engine_of,
    masked,
    transaction,
)
from conserve.store.database.migrations import migrate, store_id
from conserve.store.database.moves import LEAVES, MoveMark, MoveState

LOCK_TIMEOUT = (
    "set local lock_timeout = '200ms'"  # shorter than PostgreSQL waits before it looks for a deadlock
)
LOCK_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two databases of a move."""

    source: Engine
    target: Engine

    @classmethod
    def of(cls, source: str, target: str) -> "Ends":
        """Open both databases; raises `SettingsError` if they are one."""
        opened = cls(source=engine_of(source), target=engine_of(target))
        if opened.source.url == opened.target.url:
            raise SettingsError("SOURCE and TARGET are one database; name another TARGET")
        return opened

    def close(self) -> None:
        """Close the connections."""
        self.source.dispose()
        self.target.dispose()


def move(home: Path, ends: Ends, told: Told, ask: Callable[[Connection], None]) -> dict[str, TableDigest]:
    """Move a store; returns the digests of its tables, or nothing if the store was moved there before.

    `ask` is called in the transaction that freezes the source, and raises `StoreInUse` if harvesters hold leases.
    """
    require_store(ends.source)
    mark = mark_on(ends.source)
    if mark is not None and (masked(mark.other) != address(ends.target) or mark.state is MoveState.ARRIVING):
        raise StoreMoved(mark.sentence)  # one that arrives is no store yet, whatever its other end is
    if mark is None or mark.state is not MoveState.LEFT:
        require_place(ends)
        mark = freeze(ends, ask)
        arriving = replace(mark, state=MoveState.ARRIVING, other=address(ends.source))
        begin(ends, arriving)
        with transaction(ends.source, read_only=True) as source:
            filling.fill(source, ends.target, told)
    return conclude(home, ends, mark)


def require_store(source: Engine) -> None:
    """Raise `SettingsError` unless a database holds a store."""
    missing = SettingsError(f"there is no store at {address(source)}; name the one to be moved")
    if source.dialect.name == "sqlite":
        path = Path(source.url.database or "")
        if not path.is_file():
            raise missing  # opening it would make it
        half_made.refuse(path)
    with transaction(source, read_only=True) as tx:
        if not guard.is_store(tx):
            raise missing


def mark_on(engine: Engine) -> MoveMark | None:
    """Mark of a database; None if it has none, or no tables."""
    with transaction(engine, read_only=True) as tx:
        return guard.mark_of(tx)


def require_place(ends: Ends) -> None:
    """Raise `SettingsError` if the target holds a store: another one, or a copy that still takes changes."""
    with transaction(ends.source, read_only=True) as tx:
        ours = store_id(tx)
    with transaction(ends.target, read_only=True) as tx:
        require_free(tx, ours)


def require_free(tx: Connection, ours: str) -> None:
    """Raise `SettingsError` if a database is no place for the store with this id."""
    if not guard.tables(tx):
        return
    if not guard.is_store(tx):
        raise SettingsError(f"{address(tx.engine)} holds tables of others; name an empty database")
    there = guard.mark_of(tx)
    if there is not None and there.state is MoveState.LEAVING:
        raise StoreMoved(there.sentence)  # it may be the only whole copy
    same = (there.store_id if there else store_id(tx)) == ours
    if there is not None and same:
        return  # begun by this move or an earlier one, or the former place of this store
    if there is None and not rows_in(tx):
        return
    what = "a copy of this store that takes changes" if same else "another store"
    raise SettingsError(f"{address(tx.engine)} holds {what}; name an empty database")


def begin(ends: Ends, mark: MoveMark) -> None:
    """Empty the target under a mark; if it became another store since the first look, the move is cancelled."""
    try:
        filling.begin(ends.target, mark, lambda tx: require_free(tx, mark.store_id))
    except SettingsError:
        cancel(ends)
        raise


def rows_in(tx: Connection) -> int:
    """Number of rows of all tables, but for a store's own facts."""
    counted = [table for table in guard.tables(tx) if table is not schema.meta]
    return sum(tx.scalar(select(func.count()).select_from(table)) or 0 for table in counted)


def freeze(ends: Ends, ask: Callable[[Connection], None]) -> MoveMark:
    """Bring the source up to date and let it refuse changes from here on; returns its mark, old or new."""
    for _ in range(LOCK_TRIES):
        try:
            with transaction(ends.source) as tx:
                lock(tx)
                with guard.lifted(tx):
                    migrate(tx)
                    if (mark := guard.mark_of(tx)) is None:
                        ask(tx)
                        mark = new_mark(tx, ends)
                        guard.put_mark(tx, mark)
                return mark
        except StoreError as error:
            if code(error) != LOCK_NOT_AVAILABLE:
                raise
    raise StoreInUse("other processes write all the time", step="stop them and run this again")


def new_mark(tx: Connection, ends: Ends) -> MoveMark:
    """Mark of a source whose move begins."""
    return MoveMark(
        id=uuid.uuid4().hex, state=MoveState.LEAVING, other=address(ends.target), store_id=store_id(tx)
    )


def lock(tx: Connection) -> None:
    """Wait until no other transaction changes a table; on SQLite a writer is alone anyway."""
    if tx.dialect.name != "postgresql":
        return
    guard.run(tx, LOCK_TIMEOUT)
    names = ", ".join(guard.quoted(tx, table) for table in guard.tables(tx))
    guard.run(tx, f"lock table {names} in share row exclusive mode")


def conclude(home: Path, ends: Ends, mark: MoveMark) -> dict[str, TableDigest]:
    """Compare both sides, mark the source as moved, and open the target."""
    there = mark_on(ends.target)
    if there is None or there.id != mark.id:
        if mark.state is MoveState.LEFT:
            forget(home, ends.source, mark.store_id)
            return {}
        raise StoreError(f"{address(ends.target)} was changed by another process; run this again")
    with transaction(ends.source, read_only=True) as source, transaction(ends.target) as tx:
        found = filling.end(source, tx)
    with transaction(ends.source) as tx, guard.lifted(tx):
        now = guard.mark_of(tx, locked=True)
        if now is None or now.id != mark.id:
            raise StoreError("the move was cancelled meanwhile; the store stays where it was")
        guard.put_mark(tx, replace(mark, state=MoveState.LEFT))
    # The target opens after this: a move that is killed here goes on here.
    forget(home, ends.source, mark.store_id)
    with transaction(ends.target) as tx:
        guard.put_mark(tx, None)
    lineage.note(home, lineage.place(home, ends.target), mark.store_id)
    return found


def forget(home: Path, source: Engine, store_id: str) -> None:
    """Let no store that is made at the old place own the jobs, in this home and in the one that has the file."""
    file = source.url.database
    beside = [Path(file).parent] if source.dialect.name == "sqlite" and file else []
    for each in (home, *beside):
        lineage.forget(each, lineage.place(each, source), store_id)


def cancel(ends: Ends) -> str | None:
    """End a move that was begun: the source takes changes again, and the target is emptied.

    Returns a sentence if the target cannot be reached. It is no store: its mark says that it was being filled.
    """
    require_store(ends.source)
    with transaction(ends.source) as tx:  # a move that ends meanwhile waits, and finds no mark
        mark = leaving(tx, ends)
        with guard.lifted(tx):
            guard.put_mark(tx, None)
    try:
        if mark is not None:
            filling.discard(ends.target, mark.id)
    except StoreError as error:
        return f"what was copied stays there, and is no store: {error}"
    return None


def leaving(tx: Connection, ends: Ends) -> MoveMark | None:
    """Mark of a source whose move may be cancelled; None if the triggers alone can be read. Raises otherwise."""
    try:
        mark = guard.mark_of(tx, locked=True)
    except StoreMoved:  # it is damaged
        said = guard.said(tx)
        if said is None:
            where = address(ends.source)
            raise StoreMoved(
                f"the mark in {where} is damaged, and it is no whole store; empty it and fill it again"
            ) from None
        if not said.startswith(f"{LEAVES} {address(ends.target)};"):
            raise StoreMoved(said) from None
        return None
    if mark is None:
        raise SettingsError(f"no move of {address(ends.source)} is under way")
    if mark.state is not MoveState.LEAVING or masked(mark.other) != address(ends.target):
        raise StoreMoved(mark.sentence)
    return mark


def named(holders: set[str]) -> str:
    """The first harvesters by machine and process, and the number of the others."""
    shown = [":".join(holder.split(":")[:2]) for holder in sorted(holders)[:3]]
    more = len(holders) - len(shown)
    return ", ".join(shown) + (f" and {more} others" if more else "")
