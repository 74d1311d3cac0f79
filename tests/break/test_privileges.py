"""Privileges on a server with keys: vLLM's whole app, our guard around it, and our hook where requests end.

Only the engine and vLLM's serving classes are missing: a route ends where they end, in `AsyncLLM.generate`.
"""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple
from unittest import mock

import httpx
import pytest

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.server.privileges import FREE, SLO
from conserve.variables import HARVEST_KEY
from tests.installed import needs

from .table import report

pytestmark = [
    needs("vllm"),
    pytest.mark.breakage,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

KEYS = {"nobody": None, "guess": "guess", "client": "sesame", "harvester": "open"}
SLO_MS = 1500.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"model": "served", "messages": [{"role": "user", "content": "a"}]},
    COMPLETIONS: {"model": "served", "prompt": "a"},
    "/invocations": {"model": "served", "messages": [{"role": "user", "content": "a"}]},
}
CONTROL = {
    *("/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache", "/pause", "/abort_requests"),
    *("/update_weights", "/server_info", "/v1/conserve", "/inference/v1/abort_requests", "/scale_elastic_ep"),
}
SERVING = {
    *(
        CHAT,
        COMPLETIONS,
        "/v1/models",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/invocations",
        "/metrics",
    ),
    *("/load", "/docs", "/openapi.json", "/v1/messages", "/generative_scoring"),
}


class Seen(NamedTuple):
    """A request as the engine got it."""

    priority: int
    extra: dict[str, Any]


class Engine:
    """Stands for `AsyncLLM` behind its hooks: remembers what comes through."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    class model_config:  # noqa: N801
        """vLLM's, as far as it is asked."""

        @staticmethod
        def get_vocab_size() -> int:
            return 1000


async def generate(
    llm: Engine, prompt: Any, params: Any, request_id: str, *, priority: int = 0, **rest: Any
) -> AsyncIterator[Any]:
    llm.seen.append(Seen(priority, dict(params.extra_args or {})))
    yield None


def resumed(llm: Engine, start: Any, prompt: Any, params: Any, request_id: str, saved: Any) -> Any:
    return start(prompt, params, request_id)


class Serving:
    """Ends where vLLM's serving classes do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def create(self, request: Any, raw_request: Any) -> Any:
        from vllm.entrypoints.generate.base.serving import GenerateBaseServing
        from vllm.v1.engine.async_llm import AsyncLLM

        priority = GenerateBaseServing._get_priority(request, raw_request)
        params = request.to_sampling_params(16, {})
        outputs = AsyncLLM.generate(self._engine, {"prompt_token_ids": [1]}, params, "1", priority=priority)
        return self._stream(outputs)

    create_chat_completion = create_completion = create

    async def _stream(self, outputs: Any) -> AsyncIterator[str]:
        async for _ in outputs:
            yield "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """vLLM's app with development routes, as `conserve serve` puts it together."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    from conserve.engine.vllm.server import plugin
    from conserve.engine.vllm.server.process import put_in_front

    environment = {"VLLM_API_KEY": "sesame", HARVEST_KEY: "open", "VLLM_SERVER_DEV_MODE": "1"}
    priority_of = staticmethod(GenerateBaseServing._get_priority)
    session_of = staticmethod(GenerateBaseServing._get_session_id)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(AsyncLLM, "generate", generate),
        mock.patch.object(AsyncLLM, "encode", AsyncLLM.encode),
        mock.patch.object(GenerateBaseServing, "_get_priority", priority_of),
        mock.patch.object(GenerateBaseServing, "_get_session_id", session_of),
        mock.patch.object(plugin, "resumed", resumed),
        mock.patch("vllm.plugins.load_endpoint_plugins", return_value=[plugin.Surface()]),
    ):
        plugin.hook_server()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["served"])
        put_in_front(args, ApiLimits())
        app = build_app(args, ("generate",))
        app.state.engine = Engine()
        app.state.openai_serving_chat = app.state.openai_serving_completion = Serving(app.state.engine)
        setattr(app.state, SLO, SLO_MS)
        yield app


def ask(app: Any, who: str, path: str, *, method: str = "POST", **options: Any) -> httpx.Response:
    key = KEYS[who]
    headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **options.pop("headers", {})}

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, headers=headers, **options)

    return asyncio.run(go())


def routes(app: Any) -> list[tuple[str, str]]:
    found = [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()]
    return [(method, path.replace("{response_id}", "resp_1")) for method, path in found if method != "HEAD"]


def test_no_route_is_answered_without_a_key_but_those_of_load_balancers(server: Any) -> None:
    tried, open_routes = routes(server), []
    for who in ("nobody", "guess"):
        for method, path in tried:
            if ask(server, who, path, method=method).status_code != 401:
                open_routes.append(path)
    assert set(open_routes) == FREE
    report("routes without a key", tried=2 * len(tried), lost=0, doubled=0)


def test_clients_reach_every_route_that_serves_and_none_that_changes_the_server(server: Any) -> None:
    reached, refused = set(), set()
    for method, path in routes(server):
        denied = "harvester's key" in ask(server, "client", path, method=method).text
        (refused if denied else reached).add(path)
        assert "harvester's key" not in ask(server, "harvester", path, method=method).text
    assert refused >= CONTROL
    assert reached >= SERVING
    assert refused & reached == {"/v1/conserve"}  # GET says how it does
    report("routes that change the server, as a client", tried=len(refused), lost=0, doubled=0)


class Try(NamedTuple):
    """A request, the keys that allow it, and the body that the engine then gets."""

    says: dict[str, Any]
    headers: dict[str, str]
    client: int  # status
    priority: int  # that the engine sees


PRIORITY = "X-Vllm-Priority"
TRIES = (
    Try({}, {}, 200, 0),
    Try({"priority": 0}, {}, 200, 0),
    Try({"priority": 7}, {}, 200, 7),
    Try({"priority": OFFLINE_PRIORITY}, {}, 200, OFFLINE_PRIORITY),
    Try({"service_tier": "flex"}, {}, 200, OFFLINE_PRIORITY),
    Try({"priority": -1}, {}, 403, -1),
    Try({"priority": -1_000_000_000}, {}, 403, -1_000_000_000),
    Try({"priority": 5}, {PRIORITY: "-5"}, 403, -5),
    Try({"priority": -5}, {PRIORITY: "5"}, 200, 5),
    Try({"priority": -5, "service_tier": "flex"}, {}, 200, OFFLINE_PRIORITY),
    Try({"vllm_xargs": {"conserve_ttft_ms": SLO_MS}}, {}, 200, 0),
    Try({"vllm_xargs": {"conserve_ttft_ms": SLO_MS - 1}}, {}, 403, 0),
    Try({"vllm_xargs": {"conserve_ttft_ms": 1e-9}}, {}, 403, 0),
    Try({"vllm_xargs": {"conserve_resume": [1, 2]}}, {}, 403, 0),
    Try({"vllm_xargs": {"something_else": 1}}, {}, 200, 0),
)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", range(len(TRIES)))
def test_a_field_is_for_whom_the_table_says(server: Any, path: str, stream: bool, number: int) -> None:
    says, headers, status, priority = TRIES[number]
    expected = {"nobody": 401, "guess": 401, "client": status, "harvester": 200}
    for who, wanted in expected.items():
        server.state.engine.seen.clear()
        body = {**BODIES[path], **says, "stream": stream}
        answer = ask(server, who, path, json=body, headers=headers)
        assert answer.status_code == wanted, (who, answer.text)
        if wanted == 200:
            (seen,) = server.state.engine.seen
            assert seen.priority == priority
        else:
            assert not server.state.engine.seen
            assert answer.json()["error"]["message"]
    if number == len(TRIES) - 1 and stream:
        report(f"fields of {path}, by key", tried=2 * len(TRIES) * len(expected), lost=0, doubled=0)


@pytest.mark.parametrize(
    "says",
    [
        {"logprobs": True},
        {"n": 2},
        {"seed": 1, "temperature": 1},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"vllm_xargs": {"conserve_resume": "1, 2"}},
        {"vllm_xargs": {"conserve_resume": [1.5]}},
        {"vllm_xargs": {"conserve_resume": [1000]}},
        {"vllm_xargs": {"conserve_resume": [-1]}},
    ],
)
def test_what_cannot_go_on_from_saved_tokens_is_refused_at_once(server: Any, says: dict[str, Any]) -> None:
    server.state.engine.seen.clear()
    body = {**BODIES[CHAT], "vllm_xargs": {"conserve_resume": [1, 2]}, **says}
    answer = ask(server, "harvester", CHAT, json=body)
    assert answer.status_code == 400, answer.text
    assert "conserve_resume" in answer.json()["error"]["message"]
    assert not server.state.engine.seen


def test_no_client_gets_past_the_rules_whatever_it_sends(server: Any, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    rounds *= 250
    past = served = 0
    for _ in range(rounds):
        server.state.engine.seen.clear()
        path = dice.choice(list(BODIES))
        answer = ask(
            server, "client", path, content=json.dumps({**BODIES[path], **wish(dice)}), headers=header(dice)
        )
        assert answer.status_code in (200, 400, 403), answer.text
        served += answer.status_code == 200
        past += any(map(is_past, server.state.engine.seen))
    assert not past
    report("requests of a client, at random", tried=rounds, lost=0, doubled=0)
    assert served > rounds / 20


def wish(dice: random.Random) -> dict[str, Any]:
    """Fields that a client might try."""
    number = dice.choice([0, 1, -1, 999, 1000, -1000, 2**31, -(2**31), 1.5, "-3", None, True, "1e3"])
    extra: dict[str, Any] = {}
    if dice.random() < 0.3:
        extra["conserve_ttft_ms"] = dice.choice([0, 1e-9, -1, 1499, 1500, 1e12, "9999", "1"])
    if dice.random() < 0.3:
        extra["conserve_resume"] = dice.choice([[], [1], [1, 2], "1", 7, ["1"]])
    found: dict[str, Any] = {}
    if dice.random() < 0.4:
        found["priority"] = number
    if dice.random() < 0.3:
        found["service_tier"] = dice.choice(["flex", "priority", "auto"])
    return {**found, "vllm_xargs": extra} if extra else found


def header(dice: random.Random) -> dict[str, str]:
    """Headers that a client might try."""
    found = {"Content-Type": "application/json"}
    if dice.random() < 0.3:
        found[dice.choice([PRIORITY, PRIORITY.lower()])] = dice.choice(
            ["-1", " -7 ", "-1_000", "x", "3", "٣", "-٣"]
        )
    return {name: value for name, value in found.items() if value.isascii()}


def is_past(seen: Seen) -> bool:
    promise = seen.extra.get("conserve_ttft_ms")
    kept = isinstance(promise, int | float) and promise >= SLO_MS
    below = promise is not None and not kept and seen.priority < OFFLINE_PRIORITY
    return seen.priority < 0 or bool(seen.extra.get("conserve_resume")) or below
