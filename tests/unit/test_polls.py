"""Polls of batches: each answer is of the store as it is, whoever changed it, and of the caller's project alone."""

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text

from conserve.batch_api import objects, polls
from conserve.batch_api.foresight import KEPT_S, Foreseen, Foresight
from conserve.batch_api.polls import Polls
from conserve.batch_api.reads import Reads
from conserve.batch_api.refusals import Refused
from conserve.errors import StoreError
from conserve.store.books import batches, keys
from conserve.store.books.batches import InputFault, NewBatch
from conserve.store.books.states import OnLate
from conserve.store.database import plain
from conserve.store.database.store import Store
from tests.batch_rig import CHAT
from tests.commands import HANGS_S
from tests.store_rows import add_job

NOW = 1_700_000_000.0


@pytest.fixture
def polling(store: Store) -> Iterator[Polls]:
    with closing(Reads(store)) as reads:
        yield Polls(reads, Foresight(store))


def add(store: Store, project: str = "default") -> str:
    """A batch that waits for its job."""
    new = NewBatch(
        file_id="file-a",
        endpoint=CHAT,
        completion_window="24h",
        window_s=86_400.0,
        metadata={"a": "é"},
        on_late=OnLate.BEST_EFFORT,
    )
    with store.write() as tx:
        return batches.add(tx, project, new, now=NOW)


def polled(polling: Polls, name: str, project: str = "default") -> dict[str, Any]:
    """The answer to a poll."""
    found: dict[str, Any] = json.loads(body_of(polling, name, project))
    return found


def body_of(polling: Polls, name: str, project: str = "default") -> bytes:
    """Body of the answer to a poll: the same object as before, if it was not encoded again."""
    return asyncio.run(polling.of(project, name)).body


def as_listed(store: Store, name: str) -> dict[str, Any]:
    """The batch as a list of batches shows it, without a forecast."""
    with store.read() as tx:
        found = batches.anywhere(tx, name)
    assert found is not None
    return json.loads(json.dumps(objects.batch_object(found)))


def set_job(store: Store, job_id: str, **values: object) -> None:
    with store.write() as tx:
        for name, value in values.items():
            tx.execute(text(f"update job set {name} = :value where id = :id"), {"value": value, "id": job_id})


def change(store: Store, work: Callable[[Any], object]) -> None:
    with store.write() as tx:
        work(tx)


def bound(store: Store, name: str) -> str:
    """Give a batch a job; returns its id."""
    job_id = add_job(store)
    change(store, lambda tx: batches.bind(tx, name, job_id, now=NOW))
    return job_id


def test_a_poll_sees_each_change_at_once_and_encodes_it_once(store: Store, polling: Polls) -> None:
    name = add(store)

    def check() -> dict[str, Any]:
        first, second = body_of(polling, name), body_of(polling, name)
        assert first is second
        assert json.loads(first) == as_listed(store, name)
        return as_listed(store, name)

    assert check()["status"] == "validating"
    job_id = bound(store, name)
    assert check()["status"] == "in_progress"
    set_job(store, job_id, succeeded=1, prompt_tokens=7)
    assert check()["request_counts"]["completed"] == 1
    set_job(store, job_id, model="m")
    assert check()["model"] == "m"
    set_job(store, job_id, state="failed", error="why", finished_at=NOW + 1)
    assert check()["errors"]["data"][0]["message"] == "why"
    set_job(store, job_id, state="queued", error=None, finished_at=None)
    check()
    with store.write() as tx:
        found = batches.get(tx, "default", name)
        assert found is not None
        batches.cancel(tx, found, now=NOW + 2)
    assert check()["status"] == "cancelling"
    with store.write() as tx:
        found = batches.get(tx, "default", name)
        assert found is not None
        assert batches.deliver(tx, found, output="file-b", errors=None, now=NOW + 3)
    assert check()["output_file_id"] == "file-b"


def test_a_batch_that_is_refused_is_shown_with_its_faults(store: Store, polling: Polls) -> None:
    name = add(store)
    fault = InputFault(code="bad", message="é", line=3)
    change(store, lambda tx: batches.refuse(tx, name, [fault], now=NOW))
    assert polled(polling, name) == as_listed(store, name)
    assert polled(polling, name)["errors"]["data"][0]["line"] == 3


def test_a_damaged_job_is_shown_until_it_is_mended(store: Store, polling: Polls) -> None:
    name = add(store)
    job_id = bound(store, name)
    whole = polled(polling, name)
    set_job(store, job_id, source="{")
    assert polled(polling, name) == as_listed(store, name)
    assert polled(polling, name)["conserve"]["state"] is None
    set_job(store, job_id, source='{"path": null, "format": "jsonl"}')
    assert polled(polling, name) == whole


def test_a_batch_that_is_kept_is_of_its_project_alone(store: Store, polling: Polls) -> None:
    name = add(store, "ann")
    assert polled(polling, name, "ann")["id"] == name
    for other in (("bob", name), ("ann", name.upper()), ("ann", "none"), ("", name)):
        with pytest.raises(Refused, match="No such batch"):
            asyncio.run(polling.of(*other))
    assert polled(polling, name, "ann")["id"] == name


def test_a_batch_that_is_gone_is_not_shown_again(store: Store, polling: Polls) -> None:
    name = add(store)
    polled(polling, name)
    change(store, lambda tx: tx.execute(text("delete from batch")))
    with pytest.raises(Refused, match="No such batch"):
        asyncio.run(polling.of("default", name))


def test_a_forecast_is_as_old_as_the_look_at_the_queue(store: Store) -> None:
    now = [time.time()]
    foresight = Foresight(store, lambda: now[0])
    name = add(store)
    with closing(Reads(store)) as reads:
        polling = Polls(reads, foresight)
        assert polled(polling, name)["conserve"]["forecast"] is None
        assert foresight.recent is None, "a batch without a job needs no look"
        bound(store, name)
        polled(polling, name)
        first = foresight.recent
        assert first is not None
        now[0] += KEPT_S - 1
        polled(polling, name)
        assert foresight.recent is first
        now[0] += KEPT_S + 1
        polled(polling, name)
        assert foresight.recent is not None
        assert foresight.recent is not first


def test_polls_wait_for_no_new_forecast_and_share_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls as many as there are threads, so that other requests would find none."""
    now = [time.time()]
    foresight = Foresight(store, lambda: now[0])
    name, looks, go_on = add(store), list[float](), threading.Event()
    bound(store, name)
    make = foresight.now

    def slow() -> Foreseen:
        looks.append(now[0])
        go_on.wait(HANGS_S)
        return make()

    async def play(polling: Polls) -> None:
        async def poll() -> None:
            await asyncio.gather(*(polling.of("default", name) for _ in range(50)))

        await poll()
        first = foresight.recent
        monkeypatch.setattr(foresight, "now", slow)
        now[0] += KEPT_S
        await poll()
        assert foresight.recent is None, "the old one is shown while another is made"
        go_on.set()
        assert foresight._making is not None
        second = await foresight._making
        assert second is foresight.recent is not first
        now[0] += 2 * KEPT_S
        await poll()
        assert foresight.recent is not None, "one that is too old is not shown"

    with closing(Reads(store)) as reads:
        asyncio.run(play(Polls(reads, foresight)))
    assert len(looks) == 2


def test_batches_beyond_those_kept_are_encoded_again(
    store: Store, polling: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polls, "MOST_KEPT", 2)
    a, b, c = (add(store) for _ in range(3))
    first = {name: body_of(polling, name) for name in (a, b)}
    assert body_of(polling, a) is first[a]
    body_of(polling, c)
    assert body_of(polling, a) is first[a]
    assert body_of(polling, b) is not first[b], "the one polled the longest ago went"


def test_keys_are_read_as_they_are(store: Store) -> None:
    for name, named in (("a", {}), ("b", {"live": False, "limit_rows": 3}), ("c", {"batch": False})):
        change(store, lambda tx, name=name, named=named: keys.add(tx, name, project="p", now=NOW, **named))
    change(store, lambda tx: keys.revoke(tx, "a", now=NOW))
    with closing(Reads(store)) as reads, store.read() as tx:
        found = keys.of_rows(asyncio.run(reads.rows(keys.EVERYTHING, {})))
        assert found == keys.everything(tx)
    assert all(type(key.live) is bool and type(key.batch) is bool for key in found)


def test_a_poll_does_not_wait_for_a_writer(store: Store, polling: Polls) -> None:
    name = add(store)
    with store.write() as tx:
        tx.execute(text("update batch set completion_window = '1h'"))
        assert polled(polling, name)["completion_window"] == "24h"
    assert polled(polling, name)["completion_window"] == "1h"


@pytest.mark.sqlite
def test_what_cannot_be_read_at_once_is_read_in_a_thread(
    store: Store, polling: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add(store)

    def no_room(*_: object, **named: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(plain, "reader", no_room)
    assert polled(polling, name) == as_listed(store, name)


@pytest.mark.sqlite
def test_a_store_that_cannot_be_read_is_an_error_until_it_can(store: Store, polling: Polls) -> None:
    name = add(store)
    polled(polling, name)
    change(store, lambda tx: tx.execute(text("alter table batch rename to lost")))
    with pytest.raises(StoreError):
        asyncio.run(polling.of("default", name))
    change(store, lambda tx: tx.execute(text("alter table lost rename to batch")))
    assert polled(polling, name) == as_listed(store, name)
