"""The short way of a poll gives the answer that the long way gives, whatever the request."""

import asyncio
import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from conserve.batch_api.app import application
from conserve.config import Settings
from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.server import batch_proxy
from conserve.engine.vllm.server.guard import GUARD, LIMITS, RequestGuard
from conserve.store.books import batches, keys
from conserve.store.database.store import Store
from conserve.variables import BATCH_API, HARVEST_KEY
from tests.commands import until
from tests.conftest import examples
from tests.unit.test_batch_proxy import HARVESTER, OWN, served
from tests.unit.test_keys import make
from tests.unit.test_polls import add

MINE = "user.Layer"  # among the user's own layers, every poll goes the long way


class Ways:
    """Live servers without an engine, one for each way and each kind of keys, before one Batch API."""

    def __init__(self, store: Store, path: Path) -> None:
        self.runner = asyncio.Runner()
        self.store_keys = {
            name: make(store, name, live=name != "batch", batch=name != "live")
            for name in ("ann", "bob", "live", "batch", "revoked")
        }
        self.names = [add(store, project) for project in ("default", "ann", "bob")]
        with store.write() as tx:
            keys.revoke(tx, "revoked", now=0.0)
        os.environ[BATCH_API] = str(path)
        self.fronts = {
            (asked, short): self.front(
                [OWN, HARVESTER] if asked else None, [GUARD] if short else [MINE, GUARD]
            )
            for asked in (True, False)
            for short in (True, False)
        }
        self.polls = 0
        for app in self.fronts.values():
            process: batch_proxy.BatchProxy = getattr(app.state, batch_proxy.BATCH_PROXY)
            self.count(process)

    def front(self, api_keys: list[str] | None, middleware: list[str]) -> Starlette:
        app = Starlette()
        args = {"api_key": api_keys, LIMITS: ApiLimits(body_bytes=1000), "middleware": middleware}
        app.state.args = Namespace(**args)
        batch_proxy.attach(app)  # type: ignore[arg-type]
        app.add_middleware(RequestGuard)
        return app

    def count(self, process: batch_proxy.BatchProxy) -> None:
        poll = process.poll

        async def counted(*named: object) -> None:
            self.polls += 1
            await poll(*named)  # type: ignore[arg-type]

        process.poll = counted  # type: ignore[method-assign, assignment]

    def ask(self, asked: bool, short: bool, address: str, request: httpx.Request) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.fronts[asked, short], client=(address, 40_000))
            async with httpx.AsyncClient(transport=transport) as client:
                return await client.send(request)

        return self.runner.run(send())

    def close(self) -> None:
        for app in self.fronts.values():
            self.runner.run(getattr(app.state, batch_proxy.BATCH_PROXY).close())
        self.runner.close()


@pytest.fixture(scope="module", params=[True, False], ids=["keys in the store", "no keys in the store"])
def ways(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    folder = tmp_path_factory.mktemp("ways")
    store = Store.open(Settings(home=folder / "home"))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "s"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HARVEST_KEY, HARVESTER)
        patch.setenv(BATCH_API, "")
        found = Ways(store, folder / "s")
        if not request.param:
            with store.write() as tx:
                tx.execute(keys.api_key.delete())
        with served(application(store, beside=True), listening):
            until(lambda: not validating(store))  # the API refuses these batches: their file is nowhere
            yield found
            found.close()
    store.close()


def validating(store: Store) -> list[str]:
    """Batches whose answer will change once the API has looked at them."""
    with store.read() as tx:
        return batches.validating(tx)


HEADERS: list[tuple[str, str | bytes]] = [
    *(("Host", host) for host in ("evil.example", "127.0.0.1:80", "[")),
    *(("Origin", site) for site in ("http://localhost:3000", "https://evil.example", "null")),
    *(("X-Conserve-Caller", said) for said in ("keyed", "open", "far")),
    *(("Content-Length", length) for length in ("0", "1001", "x")),
    *(("Via", "1.1 proxy"), ("X-Forwarded-For", "127.0.0.1"), ("Connection", "close")),
    *(("Accept", b"\xe9"), ("Idempotency-Key", "a"), ("X-Stainless-Lang", "python")),
]
ODD_NAMES = ["batch_none", "a", "a.b", "..", "é", "a/b", "", "a" * 65]


@hypothesis_settings(max_examples=examples(300))
@given(data=st.data())
def test_both_ways_give_the_same_answer(ways: Ways, data: st.DataObject) -> None:
    names = [*ways.names, ways.names[0].upper(), data.draw(st.sampled_from(ODD_NAMES))]
    name = data.draw(st.sampled_from(names))
    good = [f"Bearer {key}" for key in (OWN, ways.store_keys["ann"], ways.store_keys["bob"])]
    other = [f"Bearer {key}" for key in (HARVESTER, "guess", *ways.store_keys.values())]
    wrong = [f"bearer {OWN}", OWN, f"Basic {OWN}", "", "Bearer", f"Bearer  {ways.store_keys['ann']}"]
    keys_sent = st.sampled_from(good) | st.none() | st.sampled_from([*other, *wrong])
    headers = dict(data.draw(st.lists(st.sampled_from(HEADERS), max_size=2)))
    if (key := data.draw(keys_sent)) is not None:
        headers["Authorization"] = key
    method = data.draw(st.sampled_from(["GET", "GET", "GET", "HEAD", "PUT"]))
    query = data.draw(st.sampled_from(["", "", "", "?a=b"]))
    asked = data.draw(st.booleans())
    address = data.draw(st.sampled_from(["127.0.0.1", "127.0.0.1", "203.0.113.9"]))
    unnamed = data.draw(st.booleans())  # as HTTP/1.0 allows
    answers, before = [], ways.polls
    for short in (True, False):
        request = httpx.Request(method, f"http://localhost/v1/batches/{name}{query}", headers=headers)
        if unnamed:
            del request.headers["Host"]
        answers.append(ways.ask(asked, short, address, request))
    short_way, long_way = answers
    event(f"{ways.polls - before} on the short way, {short_way.status_code}")
    assert short_way.status_code == long_way.status_code
    assert short_way.headers == long_way.headers
    assert short_way.content == long_way.content
    assert "date" not in short_way.headers


def test_only_plain_polls_go_the_short_way(ways: Ways) -> None:
    def polls(method: str = "GET", path: str = "", short: bool = True, **headers: str) -> int:
        before = ways.polls
        url = f"http://localhost/v1/batches/{path or ways.names[0]}"
        asking = {"Authorization": f"Bearer {OWN}", **headers}
        ways.ask(True, short, "127.0.0.1", httpx.Request(method, url, headers=asking))
        return ways.polls - before

    assert polls() == 1
    assert polls(Authorization="Bearer guess") == 0
    assert polls(Origin="http://localhost") == 0
    assert polls(short=False) == 0
    assert polls("HEAD") == 0
    assert polls(path=f"{ways.names[0]}/events") == 0
