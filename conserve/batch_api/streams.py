"""Server-sent events of batches: each stream gets its batch whenever it has changed.

One look at the store a second serves all streams. An event holds the whole object and its id is a digest of it, so
that a stream goes on at any process without a history.
"""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from http import HTTPStatus
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from conserve.batch_api import objects
from conserve.batch_api.refusals import Refused
from conserve.errors import StoreError
from conserve.store.books import batches, keys
from conserve.store.books.batches import BatchRecord
from conserve.store.database import guard
from conserve.store.database.store import Store

log = logging.getLogger(__name__)

MOST_OF_KEY, MOST = 16, 64
LOOK_S = 1.0
BEAT_S = 15.0  # proxies close connections that are silent for longer, often after 60 s
RETRY_MS = 3000  # a browser's pause before it connects again
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
MEDIA = "text/event-stream"


class BatchSnapshot(NamedTuple):
    """A batch as its streams send it."""

    id: str  # digest of the object
    data: str
    final: bool

    @classmethod
    def of(cls, batch: BatchRecord) -> "BatchSnapshot":
        """Snapshot of a batch."""
        data = json.dumps(objects.batch_object(batch), separators=(",", ":"))
        return cls(hashlib.blake2b(data.encode(), digest_size=8).hexdigest(), data, batch.state.final)

    @property
    def event(self) -> str:
        """The snapshot as an event."""
        return f"id: {self.id}\nevent: batch\ndata: {self.data}\n\n"


class StreamLook(NamedTuple):
    """A look at the store."""

    found: Mapping[str, BatchSnapshot]
    revoked: Collection[str]  # names of keys


class Streams:
    """All streams of a process."""

    def __init__(self, store: Store, ask: Callable[[str], None], *, look_s: float = LOOK_S) -> None:
        self._store, self._ask, self._look_s = store, ask, look_s
        self._open: Counter[str | None] = Counter()  # by the name of the key
        self._watched: Counter[str] = Counter()  # by the batch's id
        self._look = StreamLook({}, ())
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self.looks = 0

    @property
    def open(self) -> int:
        """Number of open streams."""
        return self._open.total()

    def enter(self, key: str | None, batch_id: str, now: BatchSnapshot) -> None:
        """Take a place for a stream; raises `Refused` if the key or the server has too many."""
        if self._open[key] >= MOST_OF_KEY or self.open >= MOST:
            raise too_many()
        self._open[key] += 1
        self._watched[batch_id] += 1
        self._look = StreamLook({**self._look.found, batch_id: now}, self._look.revoked)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._keep_looking())

    def leave(self, key: str | None, batch_id: str) -> None:
        """Give a stream's place back."""
        self._open = self._open - Counter([key])
        self._watched = self._watched - Counter([batch_id])

    def close(self) -> None:
        """End all streams, so that a stop need not wait for their batches."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _keep_looking(self) -> None:
        while self._watched and not self._closed:
            await asyncio.sleep(self._look_s)
            wanted = list(self._watched)
            try:
                seen = await run_in_threadpool(self._read, wanted)
            except StoreError as error:
                log.warning("%s", error)
                continue
            except Exception:
                log.exception("batches could not be read for their streams")
                continue
            self.looks += 1
            opened = {each: self._look.found[each] for each in self._watched if each not in wanted}
            before, self._look = self._look, StreamLook({**seen.found, **opened}, seen.revoked)
            if self._look != before:
                self._tell()

    def _read(self, wanted: Collection[str]) -> StreamLook:
        with self._store.read() as tx:
            if guard.mark_text(tx) is not None:
                return StreamLook({}, ())  # the streams end; a client that asks again is told of the move
            found = batches.several(tx, wanted)
            revoked = {key.name for key in keys.everything(tx) if key.revoked_at is not None}
        for batch in found:
            if batch.unfinished:
                self._ask(batch.id)
        return StreamLook({batch.id: BatchSnapshot.of(batch) for batch in found}, revoked)

    async def events(self, key: str | None, batch_id: str, last: str | None) -> AsyncIterator[str]:
        """Yield events, from the first state that the client has not got to the last."""
        yield f"retry: {RETRY_MS}\n\n"
        while not self._closed and key not in self._look.revoked:
            news, now = self._news, self._look.found.get(batch_id)
            if now is None:
                return  # removed with its job
            if now.id != last:
                last = now.id
                yield now.event
            if now.final:
                return
            try:
                async with asyncio.timeout(BEAT_S):
                    await news.wait()
            except TimeoutError:
                yield ": still here\n\n"


class EventStream(StreamingResponse):
    """Answer that keeps its place among the streams until its end, also if the client leaves before it begins."""

    def __init__(self, streams: Streams, key: str | None, batch_id: str, last: str | None) -> None:
        super().__init__(streams.events(key, batch_id, last), media_type=MEDIA, headers=HEADERS)
        self._streams, self._key, self._batch_id = streams, key, batch_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.leave(self._key, self._batch_id)


def too_many() -> Refused:
    """Refusal of a stream beyond the limits."""
    said = (
        f"Too many streams are open: a key may have {MOST_OF_KEY}, the server {MOST}; poll the batch instead."
    )
    return Refused(
        HTTPStatus.TOO_MANY_REQUESTS,
        said,
        kind="requests",
        code="rate_limit_exceeded",
        headers={"Retry-After": "30"},
    )
