"""Server-sent events of a batch: every state that a client has not got, to the last; one look for all streams."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import openai
import pytest

from conserve.batch_api import streams as streams_module
from conserve.batch_api.streams import MOST_OF_KEY, BatchSnapshot, Streams
from conserve.store.books import batches, catalog, keys
from conserve.store.books.states import FailedBy
from conserve.store.database.moves import MoveState
from conserve.store.database.store import Store
from tests import patient
from tests.batch_rig import client, compute, create, live, reaches
from tests.commands import until
from tests.store_rows import add_job, add_mark, finish, leased


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    with live(store) as found:
        yield found


@contextmanager
def following(url: str, batch_id: str, **headers: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Events of a batch, each with its id."""
    with patient.stream("GET", f"{url}/batches/{batch_id}/events", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield parsed(answer.iter_lines())


def parsed(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    event: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif "data" in event:
            assert event["event"] == "batch"
            yield event["id"], json.loads(event["data"])
            event = {}


def test_a_client_follows_a_batch_to_its_end(store: Store, url: str) -> None:
    api = client(url)
    batch = create(api, ["one", "two"])
    reaches(api, batch.id, "in_progress")
    with following(url, batch.id) as events:
        _, first = next(events)
        assert (first["id"], first["status"]) == (batch.id, "in_progress")
        compute(store)
        *_, (last_id, last) = events
    assert (last["status"], last["request_counts"]) == (
        "completed",
        {"total": 2, "completed": 2, "failed": 0},
    )
    assert openai.types.Batch.model_validate(last) == api.batches.retrieve(batch.id)
    again = patient.get(f"{url}/batches/{batch.id}/events", headers={"Last-Event-ID": last_id})
    assert (again.status_code, again.content) == (204, b"")
    with following(url, batch.id, **{"Last-Event-ID": "another"}) as events:
        assert [found_id for found_id, _ in events] == [last_id]


def test_a_stream_resumes_behind_what_the_client_has(store: Store, url: str) -> None:
    api = client(url)
    batch = create(api, ["one"])
    reaches(api, batch.id, "in_progress")
    with following(url, batch.id) as events:
        first_id, _ = next(events)
    with following(url, batch.id, **{"Last-Event-ID": first_id}) as events:
        api.batches.cancel(batch.id)
        seen = [document["status"] for _, document in events]
    assert seen[-1] == "cancelled"
    assert "in_progress" not in seen, "the client had that"


def test_a_job_of_submit_has_a_stream_that_ends(store: Store, url: str) -> None:
    add_job(store)
    with store.write() as tx:
        batches.of_submitted(tx, "job-1", now=0.0)
        catalog.move(tx, "job-1", "pause", now=0.0)
    (shown,) = client(url).batches.list().data
    with following(url, shown.id) as events:
        assert next(events)[1]["conserve"]["state"] == "paused"
        with store.write() as tx:
            catalog.move(tx, "job-1", "cancel", now=0.0)
        assert next(events)[1]["status"] in ("cancelling", "cancelled")


def test_heads_and_strangers_get_no_stream(store: Store, url: str) -> None:
    api = client(url)
    batch = create(api, ["one"])
    head = patient.head(f"{url}/batches/{batch.id}/events")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("batch_1", "batch_" + "0" * 32, "%00"):
        assert patient.get(f"{url}/batches/{name}/events").status_code == 404
    with store.write() as tx:
        other = keys.add(tx, "ann", project="ann", now=0.0)
    until(lambda: patient.get(f"{url}/batches").status_code == 401)
    hers = {"Authorization": f"Bearer {other}"}
    assert patient.get(f"{url}/batches/{batch.id}/events", headers=hers).status_code == 404


def test_a_key_may_have_so_many_streams_and_gets_its_places_back(store: Store, url: str) -> None:
    batch = create(client(url), ["one"])
    with ExitStack() as opened:
        streams = [opened.enter_context(following(url, batch.id)) for _ in range(MOST_OF_KEY)]
        for events in streams:
            next(events)
        refused = patient.get(f"{url}/batches/{batch.id}/events")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")

    def has_place() -> bool:
        with patient.stream("GET", f"{url}/batches/{batch.id}/events") as answer:
            return answer.status_code == 200

    until(has_place)


def queued(store: Store, job_id: str) -> batches.BatchRecord:
    add_job(store, job_id)
    with store.write() as tx:
        batches.of_submitted(tx, job_id, now=0.0)
    with store.read() as tx:
        return batches.page(tx, "default", before=None, limit=1)[0]


async def collected(
    streams: Streams, key: str | None, batch: batches.BatchRecord, last: str | None = None
) -> list[str]:
    """Events that a stream sends until it ends."""
    streams.enter(key, batch.id, BatchSnapshot.of(batch))
    try:
        return [text async for text in streams.events(key, batch.id, last)]
    finally:
        streams.leave(key, batch.id)


def test_one_look_serves_all_streams(store: Store) -> None:
    found = [queued(store, f"job-{number}") for number in range(3)]

    async def run() -> int:
        streams = Streams(store, lambda batch_id: None, look_s=0.01)
        tasks = [asyncio.create_task(collected(streams, None, found[n % 3])) for n in range(12)]
        while streams.looks < 3:
            await asyncio.sleep(0)
        reads = streams.looks
        with store.write() as tx:
            catalog.refuse(tx, "job-0", "its input changed", FailedBy.INPUT, now=1.0)
            catalog.refuse(tx, "job-1", "its input changed", FailedBy.INPUT, now=1.0)
            catalog.refuse(tx, "job-2", "its input changed", FailedBy.INPUT, now=1.0)
        for sent in await asyncio.gather(*tasks):
            assert [json.loads(text.split("data: ")[1])["status"] for text in sent[1:]] == [
                "in_progress",
                "failed",
            ]
        assert streams.open == 0
        return streams.looks - reads

    assert asyncio.run(run()) <= 3, "each stream has looked by itself"


def test_streams_end_with_their_key_their_job_and_the_server(store: Store) -> None:
    first, second, third = (queued(store, f"job-{number}") for number in range(3))
    with store.write() as tx:
        keys.add(tx, "ann", project="default", now=0.0)

    async def run() -> None:
        streams = Streams(store, lambda batch_id: None, look_s=0.01)
        revoked = asyncio.create_task(collected(streams, "ann", first))
        removed = asyncio.create_task(collected(streams, None, second))
        stopped = asyncio.create_task(collected(streams, None, third))
        while streams.open < 3:
            await asyncio.sleep(0)
        with store.write() as tx:
            keys.revoke(tx, "ann", now=1.0)
            tx.exec_driver_sql("delete from batch where job_id = 'job-1'")
        await revoked
        await removed
        assert not stopped.done()
        streams.close()
        await stopped

    asyncio.run(run())


def test_streams_end_once_their_store_is_elsewhere(store: Store, url: str) -> None:
    batch = create(client(url), ["one"])
    reaches(client(url), batch.id, "in_progress")
    with following(url, batch.id) as events:
        next(events)
        add_mark(store, MoveState.LEAVING)
        assert list(events) == []


def test_a_silent_stream_shows_that_it_lives(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "BEAT_S", 0.0)
    batch = queued(store, "job-1")

    async def run() -> None:
        streams = Streams(store, lambda batch_id: None)
        streams.enter(None, batch.id, BatchSnapshot.of(batch))
        events = streams.events(None, batch.id, None)
        sent = [await anext(events) for _ in range(3)]
        assert sent[0] == "retry: 3000\n\n"
        assert sent[2] == ": still here\n\n"
        streams.leave(None, batch.id)
        streams.close()
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_a_store_out_of_reach_keeps_its_streams(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = queued(store, "job-1")
    failures = iter([True, True])

    async def run() -> list[str]:
        streams = Streams(store, lambda batch_id: None, look_s=0.01)
        read = streams._read

        def broken(wanted: Any) -> Any:
            if next(failures, False):
                raise streams_module.StoreError("the store failed")
            return read(wanted)

        monkeypatch.setattr(streams, "_read", broken)
        task = asyncio.create_task(collected(streams, None, batch))
        with store.write() as tx:
            catalog.refuse(tx, "job-1", "its input changed", FailedBy.INPUT, now=1.0)
        return await task

    assert len(asyncio.run(run())) == 3


def test_rows_that_end_are_told_as_counts(store: Store) -> None:
    batch = queued(store, "job-1")
    before = BatchSnapshot.of(batch)
    finish(store, leased(store), of=[0])
    with store.read() as tx:
        (now,) = batches.several(tx, [batch.id])
    assert BatchSnapshot.of(now).id != before.id
