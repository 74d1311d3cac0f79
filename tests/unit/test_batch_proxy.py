"""Files and batches behind a live server's own address: the guard in front, the Batch API at a socket."""

import asyncio
import json
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from conserve import http_server
from conserve.batch_api.app import application
from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.server import batch_proxy, key_answers
from conserve.engine.vllm.server.batch_connection import Reply
from conserve.engine.vllm.server.guard import FORM_BYTES, LIMITS, RequestGuard
from conserve.engine.vllm.server.key_answers import KeyAnswers
from conserve.engine.vllm.server.privileges import CALLER
from conserve.store.books import uploads
from conserve.store.database.store import Store
from conserve.variables import BATCH_API, HARVEST_KEY
from tests import patient
from tests.batch_rig import CHAT, answered, client, compute, create, quick_looks, reaches
from tests.commands import until
from tests.served import served
from tests.unit.test_keys import make

OWN, HARVESTER = "sesame", "open"


async def chat(request: Request) -> JSONResponse:
    """The key that vLLM's own middleware would see; the caller as the choice of its class sees it, if asked."""
    caller = CALLER.get()
    assert caller is not None
    named = [caller.key, caller.project, caller.asked_class]
    known = {"caller": named} if caller.asked_class else {}
    return JSONResponse({"key": request.headers.get("authorization"), **known})


@asynccontextmanager
async def closing(app: Starlette) -> AsyncIterator[None]:
    """Close the connections to the Batch API with the server."""
    yield
    await getattr(app.state, batch_proxy.BATCH_PROXY).close()


@contextmanager
def both(store: Store, path: Path, api_keys: list[str] | None) -> Iterator[str]:
    """A live server without an engine, and the Batch API beside it."""
    inner, outer = socket.socket(socket.AF_UNIX), socket.socket()
    inner.bind(str(path))
    outer.bind(("127.0.0.1", 0))
    routes = [Route(CHAT, chat, methods=["POST"]), Route("/metrics", PlainTextResponse("counters"))]
    app = Starlette(routes=routes, lifespan=closing)
    app.state.args = Namespace(**{"api_key": api_keys, LIMITS: ApiLimits(body_bytes=1000, file_bytes=50_000)})
    batch_proxy.attach(app)  # type: ignore[arg-type]
    app.add_middleware(RequestGuard)
    with quick_looks(), served(application(store, beside=True), inner), served(app, outer):
        yield f"http://127.0.0.1:{outer.getsockname()[1]}/v1"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    monkeypatch.setenv(BATCH_API, str(tmp_path / "s"))
    return tmp_path / "s"


@pytest.fixture
def url(store: Store, path: Path) -> Iterator[str]:
    """Both, with a key of the server's own."""
    with both(store, path, [OWN, HARVESTER]) as found:
        yield found


def test_a_batch_goes_through_at_the_live_servers_address(store: Store, url: str) -> None:
    api = client(url, OWN)
    batch = create(api, ["one", "REJECT"])
    reaches(api, batch.id, "in_progress")
    compute(store)
    done = reaches(api, batch.id, "completed")
    assert answered(api, done.output_file_id).keys() == {"r-0"}
    assert [found.id for found in api.batches.list(limit=1)] == [batch.id]
    with pytest.raises(openai.NotFoundError, match="No such batch"):
        api.batches.retrieve("batch_none")
    assert api.files.delete(str(done.output_file_id)).deleted


def test_a_stream_of_events_comes_as_it_is_made(store: Store, url: str) -> None:
    batch = create(client(url, OWN), ["one"])
    reaches(client(url, OWN), batch.id, "in_progress")
    events, key = f"{url}/batches/{batch.id}/events", {"Authorization": f"Bearer {OWN}"}
    with patient.stream("GET", events, headers=key) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("data: ")), "before the batch has ended"
        compute(store)
        last = [line for line in lines if line.startswith("id: ")][-1].removeprefix("id: ")
    assert patient.get(events, headers={**key, "Last-Event-ID": last}).status_code == 204


def test_no_key_or_an_unknown_one_reaches_nothing(url: str) -> None:
    for headers in ({}, {"Authorization": "Bearer guess"}):
        for method, path in (
            ("GET", "/files"),
            ("POST", "/files"),
            ("GET", "/batches/a"),
            ("POST", CHAT[3:]),
        ):
            assert patient.request(method, url + path, headers=headers).status_code == 401
    assert patient.get(f"{url}/files", headers={"x-conserve-caller": "keyed"}).status_code == 401


def test_a_key_of_the_store_is_good_for_what_it_was_made_for(store: Store, url: str) -> None:
    keys = {
        use: make(store, use, live=use != "batch", batch=use != "live") for use in ("live", "batch", "both")
    }
    for use, key in keys.items():
        headers = {"Authorization": f"Bearer {key}", "x-conserve-caller": "keyed"}
        live = patient.post(url + CHAT[3:], headers=headers)
        listed = patient.get(f"{url}/batches", headers=headers)
        page = patient.get(url.replace("/v1", "/metrics"), headers=headers)
        assert (page.status_code, page.text) == (200, "counters"), "at the API this key reads them too"
        assert live.status_code == (403 if use == "batch" else 200)
        assert listed.status_code == (403 if use == "live" else 200)
        if use != "batch":
            assert live.json() == {"key": f"Bearer {OWN}"}, "vLLM's middleware knows no other"
    create(client(url, keys["both"]), ["one"])
    assert client(url, keys["batch"]).batches.list().data == [], "another project's"
    assert client(url, OWN).batches.list().data == [], "the server's own key is the default project's"


def test_a_callers_class_is_chosen_by_its_keys_name_and_project(store: Store, url: str) -> None:
    for key, named in ((make(store, "web", project="pages"), ["web", "pages"]), (OWN, [None, None])):
        headers = {"Authorization": f"Bearer {key}", "X-Conserve-Class": "chat"}
        assert patient.post(url + CHAT[3:], headers=headers).json()["caller"] == [*named, "chat"]


def test_a_server_without_a_key_of_its_own_asks_for_the_stores(store: Store, path: Path) -> None:
    with both(store, path, None) as url:
        create(client(url), ["one"])
        key = make(store, "ann")
        until(lambda: patient.get(f"{url}/files").status_code == 401)
        assert client(url, key).files.list().data == []


def test_without_keys_pages_of_other_sites_and_proxies_reach_nothing(store: Store, path: Path) -> None:
    with both(store, path, None) as url:
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "https://evil.example"},
            {"Host": "localhost", "X-Forwarded-For": "127.0.0.1"},
            {"Host": "localhost", "Via": "1.1 proxy"},
        ):
            answer = patient.get(f"{url}/files", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "keys_required")
        assert patient.get(f"{url}/files", headers={"Origin": "http://localhost:3000"}).status_code == 200


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "203.0.113.9", "::ffff:203.0.113.9"]
)
def test_without_keys_other_machines_reach_nothing_whatever_host_they_name(
    store: Store, path: Path, address: str
) -> None:
    async def asked() -> int:
        app = Starlette()
        batch_proxy.attach(app)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, client=(address, 40_000))
        async with (
            closing(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as caller,
        ):
            return (await caller.get("/v1/files")).status_code

    with both(store, path, None):
        assert asyncio.run(asked()) == (403 if "203" in address else 200)


@pytest.mark.parametrize("up", ["..", "%2e%2e", ".%2E", "./..", "x/../.."])
def test_no_path_leads_out_of_files_and_batches(store: Store, url: str, up: str) -> None:
    head = [
        ("Authorization", f"Bearer {make(store, 'ann', live=False)}"),
        ("Host", "a"),
        ("Connection", "close"),
    ]
    said = "".join(f"{name}: {value}\r\n" for name, value in head)
    address = httpx.URL(url)
    for target in (f"{up}/{up}/metrics", f"{up}/{up}/caller", f"{up}/{up}/openapi.json", f"{up}/batches"):
        with socket.create_connection((address.host, address.port or 80)) as asking:
            asking.sendall(f"GET /v1/files/{target} HTTP/1.1\r\n{said}\r\n".encode())
            assert asking.makefile("rb").readline().split()[1] == b"404"


def test_with_a_key_of_its_own_a_server_has_any_name(url: str) -> None:
    headers = {"Authorization": f"Bearer {OWN}", "Host": "gpu-7.example"}
    assert patient.get(f"{url}/files", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "target", "headers", "status"),
    [
        ("GET", "/files", {"Content-Length": b"3"}, 200),
        ("GET", "/files?after=file-%ff", {}, 404),
        ("GET", "/files?a=%3F%26%23&limit=1", {}, 200),
        ("GET", "/files/a%3Fb%00", {}, 404),
        ("POST", "/batches", {"Idempotency-Key": b"\xe9"}, 400),
        ("GET", "/files", {"Accept": b"\xe9"}, 200),
    ],
)
def test_whatever_clients_send_gets_an_answer(
    url: str, method: str, target: str, headers: dict[str, bytes], status: int
) -> None:
    asked = [("Authorization", f"Bearer {OWN}".encode()), *headers.items()]
    body = b"abc" if "Content-Length" in headers else None
    assert patient.request(method, url + target, headers=asked, content=body).status_code == status


HALF_AN_UPLOAD = (
    f"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {OWN}\r\nContent-Length: 1000\r\n"
    "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
).encode()


def test_an_upload_that_is_broken_off_is_no_fault_of_the_server(
    store: Store, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = httpx.URL(url)
    for _ in range(2):
        with socket.create_connection((address.host, address.port or 80)) as broken:
            broken.sendall(HALF_AN_UPLOAD)
            until(lambda: any(uploads.folder(store).glob("*.tmp")))
        until(lambda: not any(uploads.folder(store).glob("*.tmp")))
    assert client(url, OWN).files.list().data == []
    assert not [record for record in caplog.records if record.exc_info]


def test_slow_uploads_lock_nobody_out(store: Store, url: str) -> None:
    address = httpx.URL(url)
    with ExitStack() as slow:
        for _ in range(101):
            one = slow.enter_context(socket.create_connection((address.host, address.port or 80)))
            one.sendall(HALF_AN_UPLOAD)
        until(lambda: len(list(uploads.folder(store).glob("*.tmp"))) == 101)
        assert client(url, OWN).files.list().data == []


def test_an_upload_of_which_no_more_comes_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PART_S", 0.0)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as stalled:
        stalled.sendall(HALF_AN_UPLOAD)
        with stalled.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 408 Request Timeout\r\n"


class Answers:
    """The Batch API's answers on keys; None for a process that is gone."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.asked = 0

    async def get(self, target: bytes, headers: object, within_s: float) -> Reply:
        self.asked += 1
        if self.status is None:
            raise ConnectionRefusedError
        return Reply(self.status, [], json.dumps({"live": True, "batch": False}).encode())


def test_a_known_key_is_good_while_the_batch_api_does_not_answer() -> None:
    now_s, answers = 0.0, Answers()
    process = KeyAnswers(answers, lambda: now_s)  # type: ignore[arg-type]

    async def walk() -> None:
        nonlocal now_s
        assert (await process.of(b"a")) == key_answers.StoreKey(live=True, batch=False)
        for answers.status in (None, 503, 500):
            now_s += key_answers.KEPT_S
            for _ in range(2):
                assert await process.of(b"a") == key_answers.StoreKey(live=True, batch=False)
            with pytest.raises(key_answers.Unanswered):
                await process.of(b"unknown")
        assert answers.asked == 1 + 2 * 3, "one question in `KEPT_S`"
        now_s = key_answers.STALE_S
        with pytest.raises(key_answers.Unanswered):
            await process.of(b"a")
        answers.status = 401
        assert await process.of(b"a") is None

    asyncio.run(walk())


def test_a_flood_of_keys_that_the_store_has_not_forgets_none_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_answers, "MOST_KEPT", 3)
    answers = Answers()
    process = KeyAnswers(answers, lambda: 0.0)  # type: ignore[arg-type]

    async def walk() -> None:
        own = [await process.of(b"a"), await process.of(b"b")]
        answers.status = 401
        assert [await process.of(b"%d" % number) for number in range(5)] == [None] * 5
        answers.status = None
        assert [await process.of(b"a"), await process.of(b"b")] == own
        assert await process.of(b"4") is None, "the last of the others are kept, too"
        with pytest.raises(key_answers.Unanswered):
            await process.of(b"1")

    asyncio.run(walk())


def test_of_too_many_keys_the_one_that_was_asked_about_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_answers, "MOST_KEPT", 2)
    now_s, answers = 0.0, Answers()
    process = KeyAnswers(answers, lambda: now_s)  # type: ignore[arg-type]

    async def walk() -> None:
        nonlocal now_s
        for key in (b"a", b"b", b"a", b"c"):
            now_s += key_answers.KEPT_S
            assert await process.of(key) is not None
        answers.status = None
        assert await process.of(b"a") is not None
        with pytest.raises(key_answers.Unanswered):
            await process.of(b"b")

    asyncio.run(walk())


def test_a_key_that_is_taken_back_is_known_no_more() -> None:
    now_s, answers = 0.0, Answers()
    process = KeyAnswers(answers, lambda: now_s)  # type: ignore[arg-type]

    async def walk() -> None:
        nonlocal now_s
        assert await process.of(b"a") is not None
        for answers.status, known in ((401, False), (200, True)):
            now_s += key_answers.KEPT_S
            assert (await process.of(b"a") is not None) == known

    asyncio.run(walk())


def test_a_batch_api_that_hangs_holds_no_known_key_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process costs a question its time-out: the first request waits for it, and no other does."""
    now_s, answers = 0.0, Answers()
    process, timed_out = KeyAnswers(answers, lambda: now_s), asyncio.Event()  # type: ignore[arg-type]
    get = answers.get

    async def hang(*asked: Any) -> Reply:
        nonlocal now_s
        answers.asked += 1
        await timed_out.wait()
        raise TimeoutError

    async def walk() -> None:
        nonlocal now_s
        known = await process.of(b"a")
        monkeypatch.setattr(answers, "get", hang)
        now_s = key_answers.KEPT_S
        first, second = (asyncio.create_task(process.of(b"a")) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        now_s += key_answers.ASKING_S
        timed_out.set()
        assert [await first, await second] == [known, known]
        assert answers.asked == 2, "one question for both"
        assert await process.of(b"a") == known, "the time-out was the last question's"
        assert answers.asked == 2
        timed_out.clear()
        now_s += key_answers.KEPT_S
        assert [await process.of(b"a") for _ in range(3)] == [known] * 3, "while a question is under way"
        await asyncio.sleep(0)
        assert answers.asked == 3
        timed_out.set()
        monkeypatch.setattr(answers, "get", get)
        answers.status = 401
        while await process.of(b"a") is not None:
            now_s += key_answers.KEPT_S
            await asyncio.sleep(0)

    asyncio.run(walk())


def test_a_key_that_cannot_be_told_is_no_wrong_key(path: Path) -> None:
    app, outer = (
        Starlette(routes=[Route(CHAT, chat), Route("/health", chat)], lifespan=closing),
        socket.socket(),
    )
    app.state.args = Namespace(api_key=[OWN, HARVESTER])
    outer.bind(("127.0.0.1", 0))
    batch_proxy.attach(app)  # type: ignore[arg-type]
    app.add_middleware(RequestGuard)
    with served(app, outer):
        url = f"http://127.0.0.1:{outer.getsockname()[1]}"
        headers = {"Authorization": "Bearer csk-ann"}
        answer = patient.get(url + CHAT, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert patient.get(url + "/health", headers=headers).status_code == 200
        assert patient.get(url + CHAT, headers={"Authorization": f"Bearer {OWN}"}).status_code == 200


def test_an_upload_has_a_limit_of_its_own(url: str) -> None:
    api = client(url, OWN)
    assert api.files.create(file=("a.jsonl", b"a" * 50_000), purpose="batch").bytes == 50_000
    with pytest.raises(openai.APIStatusError) as refused:
        api.files.create(file=("a.jsonl", b"a" * (50_001 + FORM_BYTES)), purpose="batch")
    assert refused.value.status_code == 413
    assert patient.post(url + CHAT[3:], content=b"a" * 1001).status_code == 401
    headers = {"Authorization": f"Bearer {OWN}"}
    assert patient.post(url + CHAT[3:], content=b"a" * 1001, headers=headers).status_code == 413


def test_while_the_batch_api_starts_clients_are_to_try_again(path: Path) -> None:
    app, outer = Starlette(lifespan=closing), socket.socket()
    outer.bind(("127.0.0.1", 0))
    batch_proxy.attach(app)  # type: ignore[arg-type]
    with served(app, outer), pytest.raises(openai.InternalServerError) as refused:
        client(f"http://127.0.0.1:{outer.getsockname()[1]}/v1").files.list()
    assert refused.value.status_code == 503
