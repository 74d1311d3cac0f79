"""The API server's outermost layer: keys and the size of bodies, on an app without an engine."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute

from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.server.guard import GUARD, LIMITS, RequestGuard, with_own_key
from conserve.engine.vllm.server.privileges import CALLER, SLO, Caller, Keys, Role, why_not_allowed
from conserve.variables import HARVEST_KEY

CLIENT, HARVESTER = "sesame", "open"


async def echo(request: Request) -> JSONResponse:
    """Length of the body, and the caller as a route of vLLM's sees it."""
    caller = CALLER.get()
    body = await request.body()
    return JSONResponse(
        {"bytes": len(body), "role": caller and caller.role, "slo": caller and str(caller.ttft_slo_ms)}
    )


PATHS = (
    *("/health", "/ping", "/version", "/metrics", "/load", "/docs", "/tokenize", "/invocations"),
    *(
        "/v1/models",
        "/v1/chat/completions",
        "/v1/conserve",
        "/v1/load_lora_adapter",
        "/sleep",
        "/collective_rpc",
    ),
)


def app_for(
    api_keys: list[str] | None, front: ApiLimits | None = None, *, slo_ms: float | None = None
) -> Starlette:
    app = Starlette(routes=[Route(path, echo, methods=["GET", "POST"]) for path in PATHS])
    app.state.args = Namespace(**{"api_key": api_keys, LIMITS: front})
    setattr(app.state, SLO, slo_ms)
    app.add_middleware(RequestGuard)
    return app


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> Starlette:
    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    return app_for([CLIENT, HARVESTER])


def ask(app: Starlette, path: str, key: str | None = None, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    headers |= options.pop("headers", {})

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(options.pop("method", "POST"), path, headers=headers, **options)

    return asyncio.run(go())


def test_every_route_wants_a_key_but_those_of_load_balancers(keyed: Starlette) -> None:
    for path in PATHS:
        free = path in ("/health", "/ping", "/version")
        for method in ("GET", "POST"):
            assert ask(keyed, path, method=method).status_code == (200 if free else 401), path
            assert ask(keyed, path, "guess", method=method).status_code == (200 if free else 401), path


def test_an_answer_without_a_key_says_how_to_send_it_as_openai_words_errors(keyed: Starlette) -> None:
    answer = ask(keyed, "/invocations")
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error == {
        "message": "this server wants an API key: send it as Authorization: Bearer KEY",
        "type": "authentication_error", "param": None, "code": 401,
    }  # fmt: skip


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"Basic {CLIENT}", CLIENT, f"Bearer {CLIENT} ", "Bearer séame"]
)
def test_what_is_no_bearer_token_is_no_key(keyed: Starlette, header: str) -> None:
    assert ask(keyed, "/v1/models", headers={"Authorization": header.encode()}).status_code == 401


def test_the_scheme_is_read_as_http_reads_it(keyed: Starlette) -> None:
    assert ask(keyed, "/v1/models", headers={"Authorization": f"bearer {CLIENT}"}).status_code == 200


def test_what_changes_the_server_for_all_wants_the_harvesters_key(keyed: Starlette) -> None:
    for path in ("/v1/conserve", "/v1/load_lora_adapter", "/sleep", "/collective_rpc"):
        refused = ask(keyed, path, CLIENT)
        assert refused.status_code == 403, path
        assert "harvester's key" in refused.json()["error"]["message"]
        assert ask(keyed, path, HARVESTER).status_code == 200
    assert ask(keyed, "/v1/conserve", CLIENT, method="GET").status_code == 200


def test_a_mistyped_path_is_not_there_with_any_key(keyed: Starlette) -> None:
    assert ask(keyed, "/chat/completions", CLIENT).status_code == 404
    assert ask(keyed, "/chat/completions").status_code == 401


def test_metrics_are_open_only_if_they_were_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    opened = app_for([CLIENT], ApiLimits(open_metrics=True))
    assert ask(opened, "/metrics", method="GET").status_code == 200
    assert ask(opened, "/load", method="GET").status_code == 401
    closed = app_for([CLIENT])
    for key, status in ((None, 401), (CLIENT, 200), (HARVESTER, 200)):
        assert ask(closed, "/metrics", key, method="GET").status_code == status


def test_without_an_api_key_every_client_may_do_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    for path in PATHS:
        answer = ask(app_for(None), path)
        assert (answer.status_code, answer.json()["role"]) == (200, "harvester"), path


def test_vllms_variable_holds_an_api_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", CLIENT)
    app = app_for(None)
    assert ask(app, "/tokenize").status_code == 401
    assert ask(app, "/tokenize", CLIENT).json()["role"] == "harvester"  # there is no other key
    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    assert ask(app_for(None), "/tokenize", CLIENT).json()["role"] == "client"


def test_a_route_knows_who_asks_and_only_while_it_is_asked(keyed: Starlette) -> None:
    setattr(keyed.state, SLO, 1500.0)
    assert ask(keyed, "/v1/models", CLIENT).json() == {"bytes": 0, "role": "client", "slo": "1500.0"}
    assert ask(keyed, "/v1/models", HARVESTER).json()["role"] == "harvester"
    assert CALLER.get() is None


def test_browsers_ask_first_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are vLLM's: CORS behind the guard, and metrics that answer any method."""
    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    app = Starlette(routes=[Mount("/metrics", PlainTextResponse("counters")), Route("/v1/models", echo)])
    app.state.args = Namespace(api_key=[CLIENT])
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestGuard)
    first = {"Origin": "http://page", "Access-Control-Request-Method": "GET"}
    for path in ("/metrics", "/metrics/", "/v1/models"):
        answer = ask(app, path, method="OPTIONS", headers=first)
        assert (answer.status_code, answer.text) == (200, "OK"), path
        for name in first:
            left = {name: first[name]}
            assert ask(app, path, method="OPTIONS", headers=left).status_code == 401, path
        assert ask(app, path, method="OPTIONS").status_code == 401, path
    assert ask(app, "/metrics/", HARVESTER, method="OPTIONS").text == "counters"
    assert ask(app, "/v1/models", CLIENT, method="OPTIONS").status_code == 405  # the route's own answer


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example:8000", 403),
        ("https://localhost.evil.example", 403),
        ("null", 403),
        ("http://[::1", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8000", 200),
        ("http://[::1]:8000", 200),
        ("https://chat.example", 200),
    ],
)
def test_without_a_key_no_page_of_another_site_is_answered_on_this_machine(
    keyed: Starlette, origin: str, status: int
) -> None:
    app = app_for(None)
    app.state.args.allowed_origins = ["https://chat.example"]
    for path in ("/v1/chat/completions", "/v1/conserve", "/tokenize", "/sleep"):
        answer = ask(app, path, headers={"Origin": origin})
        assert answer.status_code == status, path
    assert ask(app, "/health", headers={"Origin": origin}).status_code == 200
    assert ask(keyed, "/v1/models", CLIENT, headers={"Origin": origin}).status_code == 200
    app.state.args.allowed_origins = ["*"]
    assert ask(app, "/tokenize", headers={"Origin": origin}).status_code == 200


def test_pages_are_answered_on_other_machines_as_all_are_there_without_a_key() -> None:
    async def go() -> int:
        transport = httpx.ASGITransport(app_for(None), client=("10.0.0.7", 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.post("/tokenize", headers={"Origin": "http://page.example"})).status_code

    assert asyncio.run(go()) == 200


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    app = app_for(None, ApiLimits(body_bytes=1000))
    assert ask(app, "/v1/models", content=b"x" * 1000).json()["bytes"] == 1000
    refused = ask(app, "/v1/models", content=b"x" * 1001)
    assert refused.status_code == 413
    assert "more than 1,000 bytes" in refused.json()["error"]["message"]


def test_a_body_without_a_length_is_cut_off_at_the_limit() -> None:
    app = app_for(None, ApiLimits(body_bytes=1000))
    sent = 0

    async def parts(number: int) -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(number):
            sent += 100
            yield b"x" * 100

    assert ask(app, "/v1/models", content=parts(10)).json()["bytes"] == 1000
    sent = 0
    refused = ask(app, "/v1/models", content=parts(10_000))
    assert refused.status_code == 413
    assert sent < 2000, "it was read to its end"


def test_a_body_that_lies_about_its_length_is_counted_too() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    headers = {"content-length": "5", "transfer-encoding": "chunked"}
    app = app_for(None, ApiLimits(body_bytes=1000))
    assert ask(app, "/v1/models", content=parts(), headers=headers).status_code == 413


def test_without_a_key_no_byte_of_a_body_is_read(keyed: Starlette) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body is read")
        yield b""

    assert ask(keyed, "/v1/models", content=never()).status_code == 401


def test_a_web_socket_wants_a_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def accept(socket: Any) -> None:
        await socket.accept()

    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    app = app_for([CLIENT])
    app.router.routes.append(WebSocketRoute("/v1/realtime", accept))

    async def first(headers: list[tuple[bytes, bytes]]) -> Any:
        said: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            said.append(message)

        scope = {
            "type": "websocket", "path": "/v1/realtime", "raw_path": b"/v1/realtime", "query_string": b"",
            "root_path": "", "headers": headers, "subprotocols": [], "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        await app(scope, receive, send)
        return said[0]

    refused = asyncio.run(first([]))
    assert (refused["type"], refused["status"]) == ("websocket.http.response.start", 401)
    accepted = asyncio.run(first([(b"authorization", f"Bearer {CLIENT}".encode())]))
    assert accepted["type"] == "websocket.accept"


# What a request may ask for.

LIVE = Caller(role=Role.CLIENT, ttft_slo_ms=1500.0)
NO_SLO = Caller(role=Role.CLIENT)
ROWS = Caller(role=Role.HARVESTER)
RESUMED = {"conserve_resume": [1, 2]}


@pytest.mark.parametrize(
    ("caller", "priority", "extra", "why"),
    [
        (LIVE, 0, {}, None),
        (LIVE, 999, {}, None),
        (LIVE, 1000, {}, None),
        (LIVE, -1, {}, "priority -1 would push other requests aside"),
        (LIVE, -(10**9), {}, "send 0 or more"),
        (LIVE, 0, RESUMED, "conserve_resume wants the harvester's key"),
        (LIVE, 0, {"conserve_resume": []}, None),
        (LIVE, 1000, {"conserve_push": 1}, "conserve_push wants the harvester's key"),
        (ROWS, 1000, {"conserve_push": 1}, None),
        (LIVE, 0, {"conserve_ttft_ms": 1500}, None),
        (LIVE, 0, {"conserve_ttft_ms": 3000.5}, None),
        (LIVE, 0, {"conserve_ttft_ms": 1499.9}, "below the server's --ttft-slo, 1500 ms"),
        (LIVE, 0, {"conserve_ttft_ms": 1e-9}, "below the server's --ttft-slo"),
        (LIVE, 0, {"conserve_ttft_ms": -1}, "below the server's --ttft-slo"),
        (LIVE, 0, {"conserve_ttft_ms": float("nan")}, "below the server's --ttft-slo"),
        (LIVE, 0, {"conserve_ttft_ms": "5000"}, "below the server's --ttft-slo"),
        (LIVE, 1000, {"conserve_ttft_ms": 1}, None),  # a row's, which stops no client
        (NO_SLO, 0, {"conserve_ttft_ms": 5000}, "without --ttft-slo"),
        (ROWS, -5, {**RESUMED, "conserve_ttft_ms": 1e-9}, None),
        (None, -5, {**RESUMED, "conserve_ttft_ms": 1e-9}, None),
    ],
)
def test_a_client_may_lower_itself_and_nothing_else(
    caller: Caller | None, priority: int, extra: dict[str, Any], why: str | None
) -> None:
    said = why_not_allowed(caller, priority, extra)
    assert (said is None) == (why is None)
    assert why is None or why in (said or "")


def test_the_harvesters_key_is_not_a_clients() -> None:
    keys = Keys.of([CLIENT, "second", HARVESTER], {HARVEST_KEY: HARVESTER})
    assert keys.clients == (CLIENT.encode(), b"second")
    assert [keys.role(f"Bearer {key}".encode()) for key in (CLIENT, "second", HARVESTER, "third")] == [
        *(Role.CLIENT, Role.CLIENT, Role.HARVESTER, None)
    ]


def test_vllms_own_layer_need_not_know_the_harvesters_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HARVEST_KEY, HARVESTER)
    monkeypatch.setenv("VLLM_API_KEY", CLIENT)

    async def key(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.headers.get("authorization", ""))

    app = Starlette(routes=[Route("/v1/models", key)])
    app.state.args = Namespace(api_key=None)
    app.add_middleware(RequestGuard)
    for sent in (CLIENT, HARVESTER):
        assert ask(app, "/v1/models", sent, method="GET").text == f"Bearer {CLIENT}"
    monkeypatch.delenv("VLLM_API_KEY")
    assert ask(app, "/v1/models", "any", method="GET").text == "Bearer any", "it asks for no key"


def test_one_key_for_both_does_not_open_the_server() -> None:
    keys = Keys.of([HARVESTER], {HARVEST_KEY: HARVESTER})
    assert keys.role(b"") is None
    assert keys.role(f"Bearer {HARVESTER}".encode()) is Role.HARVESTER
    assert Keys.of([""], {HARVEST_KEY: HARVESTER}).role(b"") is Role.HARVESTER  # no API key: as without any


def test_the_name_of_the_guard_in_vllms_flags_leads_to_it() -> None:
    module, _, name = GUARD.rpartition(".")
    assert (module, getattr(import_module(module), name)) == ("conserve.vllm", RequestGuard)
    assert not hasattr(import_module(module), "RequestGuard")


def test_a_caller_with_a_key_of_the_store_is_let_through_where_the_servers_only_key_is_the_harvesters() -> (
    None
):
    keys = Keys.of([HARVESTER], {HARVEST_KEY: HARVESTER})
    scope = with_own_key({"headers": [(b"authorization", b"Bearer of-the-store"), (b"host", b"here")]}, keys)
    assert scope["headers"] == [(b"host", b"here"), (b"authorization", f"Bearer {HARVESTER}".encode())]
