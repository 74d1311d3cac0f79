"""The guard: triggers that let a frozen database refuse every change, also by processes that had it open before."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Table, delete, insert, inspect, or_, select, text, update

from conserve.store.database import moves, schema
from conserve.store.database.moves import MoveMark
from conserve.store.database.versions import number

NAME = "conserve_moved"
VERBS = ("insert", "update", "delete")
LITERAL = re.compile("'((?:[^']|'')*)'")  # of SQL: a trigger has one, its sentence

meta = schema.meta
STANDING = select(meta.c.key, meta.c.value).where(or_(meta.c.key == "version", meta.c.key == moves.KEY))
TABLE = f"select 1 from sqlite_master where type = 'table' and name = '{meta.name}'"
MARK = select(meta.c.value).where(meta.c.key == moves.KEY)


def is_store(tx: Connection) -> bool:
    """True if the database has the tables of a store."""
    if tx.dialect.name != "sqlite":
        return inspect(tx).has_table(meta.name)
    return tx.exec_driver_sql(TABLE).first() is not None  # an inspector takes three times as long


def version_here(tx: Connection) -> int:
    """Number of the last migration, 0 without tables; raises `StoreMoved` unless the store is here, and whole."""
    if not is_store(tx):
        return 0
    found = dict(tx.execute(STANDING).all())
    moves.refuse(found.get(moves.KEY))
    return number(found.get("version") or 0)


def mark_text(tx: Connection) -> str | None:
    """The stored mark of a move; None if there is none."""
    return tx.scalar(MARK)


def mark_of(tx: Connection, *, locked: bool = False) -> MoveMark | None:
    """Mark of a move, None also without tables; if `locked`, no other transaction changes it meanwhile."""
    if not is_store(tx):
        return None
    return moves.parse(tx.scalar(MARK.with_for_update() if locked else MARK))


def require_here(tx: Connection) -> None:
    """Raise `StoreMoved` if the store is in another database, or not whole in this one yet."""
    moves.refuse(mark_text(tx))


def put_mark(tx: Connection, mark: MoveMark | None) -> None:
    """Write the mark, or remove it."""
    if mark is None:
        tx.execute(delete(meta).where(meta.c.key == moves.KEY))
        return
    value = moves.to_text(mark)
    changed = tx.execute(update(meta).where(meta.c.key == moves.KEY).values(value=value)).rowcount
    if not changed:
        tx.execute(insert(meta).values(key=moves.KEY, value=value))


@contextmanager
def lifted(tx: Connection) -> Iterator[None]:
    """Lift the guard of a database within a transaction; afterwards it follows from the mark again."""
    if is_store(tx) and mark_text(tx) is not None:
        drop(tx)
    yield
    mark = mark_of(tx)
    if mark is not None and mark.state is not moves.MoveState.ARRIVING:
        add(tx, mark.sentence)


def tables(tx: Connection) -> list[Table]:
    """Tables of the store that the database has."""
    there = set(inspect(tx).get_table_names())
    return [table for table in schema.metadata.sorted_tables if table.name in there]


def add(tx: Connection, sentence: str) -> None:
    """Let every statement that changes a table fail with a sentence."""
    said = "'" + sentence.replace("'", "''") + "'"
    if tx.dialect.name == "postgresql":
        body = f"begin raise exception using message = {said}; end"
        run(
            tx,
            f"create or replace function {NAME}() returns trigger language plpgsql as $guard$ {body} $guard$",
        )
    for table in tables(tx):
        name = quoted(tx, table)
        if tx.dialect.name == "postgresql":
            verbs = " or ".join((*VERBS, "truncate"))
            run(
                tx,
                f"create trigger {NAME} before {verbs} on {name} for each statement execute function {NAME}()",
            )
            continue
        for verb in VERBS:
            trigger = f"{NAME}_{table.name}_{verb}"
            run(
                tx, f"create trigger {trigger} before {verb} on {name} begin select raise(abort, {said}); end"
            )


def said(tx: Connection) -> str | None:
    """Sentence of the triggers, which tells the state where the mark is damaged; None without triggers."""
    kept = "select sql from sqlite_master where type = 'trigger' and instr(name, :name) = 1"
    if tx.dialect.name == "postgresql":
        kept = "select prosrc from pg_proc where proname = :name"
    found = LITERAL.search(str(tx.scalar(text(kept), {"name": NAME}) or ""))
    return found.group(1).replace("''", "'") if found else None


def drop(tx: Connection) -> None:
    """Remove the triggers, if there are any."""
    for table in tables(tx):
        if tx.dialect.name == "postgresql":
            run(tx, f"drop trigger if exists {NAME} on {quoted(tx, table)}")
            continue
        for verb in VERBS:
            run(tx, f"drop trigger if exists {NAME}_{table.name}_{verb}")
    if tx.dialect.name == "postgresql":
        run(tx, f"drop function if exists {NAME}()")


def quoted(tx: Connection, table: Table) -> str:
    """Name of a table as SQL has it."""
    return tx.dialect.identifier_preparer.format_table(table)


def run(tx: Connection, sql: str) -> None:
    """Run a statement in which a colon is no parameter."""
    tx.execute(text(sql.replace(":", r"\:")))
