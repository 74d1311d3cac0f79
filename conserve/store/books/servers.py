"""Servers that harvesters feed: the last sign of life of each, what each harvester sees of it, drained or not."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from sqlalchemy import Connection, delete, exists, func, insert, select, update

from conserve.errors import UsageError
from conserve.hosts import server_root
from conserve.store.database import schema
from conserve.store.database.bulk import upsert_into
from conserve.store.database.trial import server_time_s

server, feeding = schema.server, schema.feeding

NOTE_FRESH_S = 30.0  # without a note after which a harvester counts as gone
KEPT_S = 7 * 86_400  # a server that no harvester feeds is listed this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One server as one harvester sees it."""

    url: str
    state: str
    model: str | None
    version: str | None
    alive: bool  # the server answered last
    in_flight: int
    waiting: int
    tokens_per_s: float
    why: str | None  # of a state that is not good


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """One server as one harvester saw it, and when."""

    owner: str
    state: str
    in_flight: int
    waiting: int
    tokens_per_s: float
    why: str | None
    noted_at: float

    def is_fresh(self, now: float) -> bool:
        """True if its harvester still notes what it sees."""
        return abs(now - self.noted_at) <= NOTE_FRESH_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenServer:
    """A server, and what each harvester saw of it."""

    url: str
    model: str | None
    version: str | None
    seen_at: float | None  # last sign of life
    drained_at: float | None
    feedings: Sequence[Feeding]


def moment(tx: Connection, here: float) -> float:
    """Time of notes and drains: by the clock of the database's server, or the time `here` where there is none."""
    at = server_time_s(tx)
    return here if at is None else at


def note(tx: Connection, owner: str, sightings: Sequence[Sighting], *, now: float) -> None:
    """Write down what a harvester sees of its servers, in place of what it wrote before."""
    # All harvesters write in one order, so that no two deadlock.
    for seen in sorted(sightings, key=lambda one: one.url):
        see(tx, seen, now)
    forget(tx, owner)
    rows = [
        {
            "owner": owner,
            "url": seen.url,
            "state": seen.state,
            "in_flight": seen.in_flight,
            "waiting": seen.waiting,
            "tokens_per_s": seen.tokens_per_s,
            "why": seen.why,
            "noted_at": now,
        }
        for seen in sightings
    ]
    if rows:
        tx.execute(insert(feeding), rows)


def see(tx: Connection, seen: Sighting, now: float) -> None:
    """Add a server, or its sign of life; other harvesters may do so at the same time."""
    life = {"model": seen.model, "version": seen.version, "seen_at": now} if seen.alive else {}
    added = upsert_into(tx, server).values(url=seen.url, **life)
    if life:
        tx.execute(added.on_conflict_do_update(index_elements=["url"], set_=life))
    else:
        tx.execute(added.on_conflict_do_nothing(index_elements=["url"]))


def forget(tx: Connection, owner: str) -> None:
    """Drop what a harvester saw: it ends."""
    tx.execute(delete(feeding).where(feeding.c.owner == owner))


def forget_old(tx: Connection, *, now: float) -> None:
    """Drop notes of harvesters that are gone, and servers that are neither drained nor fed for a week."""
    tx.execute(delete(feeding).where(func.abs(feeding.c.noted_at - now) > KEPT_S))
    fed = exists().where(feeding.c.url == server.c.url)
    last = func.coalesce(server.c.seen_at, 0.0)
    tx.execute(delete(server).where(server.c.drained_at.is_(None), last < now - KEPT_S, ~fed))


def drained(tx: Connection) -> frozenset[str]:
    """URLs of the servers that are drained."""
    return frozenset(tx.scalars(select(server.c.url).where(server.c.drained_at.is_not(None))))


def drain(tx: Connection, name: str, *, now: float) -> list[str]:
    """Let the servers of this name get no rows; returns their URLs. Raises `UsageError` if there is none."""
    urls = named(tx, name)
    undrained = server.c.url.in_(urls), server.c.drained_at.is_(None)
    tx.execute(update(server).where(*undrained).values(drained_at=now))
    return urls


def undrain(tx: Connection, name: str) -> list[str]:
    """Let the servers of this name get rows again; returns their URLs. Raises `UsageError` if there is none."""
    urls = named(tx, name)
    tx.execute(update(server).where(server.c.url.in_(urls)).values(drained_at=None))
    return urls


def named(tx: Connection, name: str) -> list[str]:
    """URLs of the servers with this URL, host and port, or host; raises `UsageError` if there is none."""
    urls = sorted(tx.scalars(select(server.c.url)))
    found = [url for url in urls if server_root(name) in names_of(url)]
    if not found:
        known = f"; there are {', '.join(urls)}" if urls else "; no harvester has seen any yet"
        raise UsageError(f"there is no server {name}{known}")
    # One order of locks for all that change them, as in `note`.
    locked = select(server.c.url).where(server.c.url.in_(found)).order_by(server.c.url).with_for_update()
    return list(tx.scalars(locked))


def names_of(url: str) -> Collection[str]:
    """Names by which a server can be given."""
    parts = urlsplit(url)
    return {url, parts.netloc.rpartition("@")[2], parts.hostname or ""} - {""}


def everything(tx: Connection) -> list[SeenServer]:
    """All servers by URL."""
    by_url: dict[str, list[Feeding]] = {}
    for row in tx.execute(select(feeding).order_by(feeding.c.owner)).mappings():
        values = dict(row)
        by_url.setdefault(values.pop("url"), []).append(Feeding(**values))
    found = tx.execute(select(server).order_by(server.c.url)).mappings().all()
    return [SeenServer(**row, feedings=by_url.get(row["url"], [])) for row in found]
