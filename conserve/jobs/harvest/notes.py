"""Notes in the store on the servers of a fleet, and the servers that the store says are drained."""

import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from conserve.endpoints.protocol import Endpoint
from conserve.hosts import is_loopback
from conserve.store.books import servers
from conserve.store.books.servers import Sighting
from conserve.store.database.store import Store

NOTE_S = 5.0  # between two notes of the same states


@runtime_checkable
class ServerFleet(Protocol):
    """An endpoint of many servers."""

    def sightings(self) -> list[Sighting]:
        """Observations of each server by this harvester."""

    def drain(self, urls: Collection[str]) -> None:
        """Give these servers no rows from now on, and all others rows again."""


class ServerNotes:
    """Writes what a fleet sees at each change, and every `NOTE_S`; without a fleet there is nothing to write."""

    def __init__(
        self,
        endpoint: Endpoint,
        store: Store,
        owner: str,
        in_store: Callable[..., Awaitable[Any]],
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._fleet = endpoint if isinstance(endpoint, ServerFleet) else None
        self._store, self._owner, self._in_store = store, owner, in_store
        self._clock, self._monotonic = clock, monotonic
        self._noted: object = None
        self._note_at = 0.0

    async def look(self) -> None:
        """Drain the servers that are to be drained, and note what the servers do."""
        if self._fleet is None:
            return
        drained = await self._in_store(self._drained)
        own = {seen.url for seen in self._fleet.sightings() if self._name(seen.url) in drained}
        self._fleet.drain(drained | own)
        sightings = merged(replace(seen, url=self._name(seen.url)) for seen in self._fleet.sightings())
        news, now = noteworthy(sightings), self._monotonic()
        if news != self._noted or now >= self._note_at:
            await self._in_store(self._note, sightings)
            self._noted, self._note_at = news, now + NOTE_S

    def _name(self, url: str) -> str:
        """URL under which the store knows a server; in a shared store it has this machine's name."""
        return of_this_machine(url) if is_shared(self._store) else url

    def _drained(self) -> frozenset[str]:
        with self._store.read() as tx:
            return servers.drained(tx)

    def _note(self, sightings: Sequence[Sighting]) -> None:
        with self._store.write() as tx:
            servers.note(tx, self._owner, sightings, now=servers.moment(tx, self._clock()))


def merged(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Sightings by URL: a server of this machine may be in a list under two names."""
    found: dict[str, Sighting] = {}
    for seen in sightings:
        before = found.setdefault(seen.url, seen)
        if before is not seen:
            found[seen.url] = replace(
                before, in_flight=before.in_flight + seen.in_flight, waiting=before.waiting + seen.waiting
            )
    return list(found.values())


def is_shared(store: Store) -> bool:
    """True if harvesters of other machines may use the store."""
    return store.engine.url.get_backend_name() != "sqlite"


def of_this_machine(url: str) -> str:
    """URL with the machine's name in place of a loopback address, which means another server on each machine."""
    parts = urlsplit(url)
    if not is_loopback(parts.hostname or ""):
        return url
    port = f":{parts.port}" if parts.port else ""
    return parts._replace(netloc=f"{socket.gethostname()}{port}").geturl()


def noteworthy(sightings: Sequence[Sighting]) -> object:
    """The part of what is seen that is written as soon as it changes.

    Rows in flight count for a server that gets no more: `conserve fleet drain --wait` waits for the last one.
    """
    ending = ("drained", "leaving")
    return [
        (seen.url, seen.state, seen.model, seen.version, seen.alive, seen.state in ending and seen.in_flight)
        for seen in sightings
    ]
