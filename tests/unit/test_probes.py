"""Probe requests, whose time moves the number of rows at once on a server without metrics."""

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import httpx
import pytest

from conserve.endpoints import probes
from conserve.endpoints.considerate import PROBE_EVERY_S
from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.probes import Probes, SmallAnswer
from conserve.endpoints.protocol import Call, Url
from tests import virtual_time

PLACES, ALONE_S = 4, 1.0  # requests at the same time, and the time of each
BODIES: dict[Url, dict[str, Any]] = {
    Url.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Url.COMPLETIONS: {"prompt": "hi"},
    Url.EMBEDDINGS: {"input": "hi"},
    Url.RESPONSES: {"input": "hi"},
}
ANSWERS: dict[Url, dict[str, Any]] = {
    Url.CHAT: {"choices": [{"message": {"content": "a"}}]},
    Url.COMPLETIONS: {"choices": [{"text": "a"}]},
    Url.EMBEDDINGS: {"data": [{"embedding": [0.5]}]},
    Url.RESPONSES: {"output": [], "status": "completed"},
}
NEWER = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'."


class FewPlaces:
    """A server with few places, which slows down with each row beyond them."""

    def __init__(
        self, *routes: Url, refuses: str = "", said: str = NEWER, steady: bool = False, replicas: int = 0
    ) -> None:
        self._routes, self._refuses, self._said, self._replicas = routes, refuses, said, replicas
        self._looks = 0  # at the metrics, of which every replica has its own
        self.slow: Url | None = None  # a route on which everything takes longer
        self._places = asyncio.Semaphore(PLACES)
        self.asked: Counter[tuple[str, int]] = Counter()  # by route and status
        self.probed = 0  # with a limit of the answer, which no row here has
        transport = httpx.MockTransport(self.serve)
        self.endpoint = HttpEndpoint("http://server", considerate=True, steady=steady, transport=transport)

    async def serve(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            if request.url.path == "/metrics" and self._replicas:
                return httpx.Response(200, text=self._metrics())
            known = request.url.path == "/v1/models"
            return httpx.Response(200 if known else 404, json={"data": [{"id": "served"}]})
        answer = await self._answer(Url(request.url.path), json.loads(request.content))
        self.asked[request.url.path, answer.status_code] += 1
        return answer

    def _metrics(self) -> str:
        """vLLM's page of one replica after the other, without the time of its start."""
        self._looks += 1
        count = 1000 * (1 + self._looks % self._replicas) + self._looks
        name = "vllm:time_to_first_token_seconds"
        return f"vllm:num_requests_waiting 0\n{name}_count {count}\n{name}_sum {count * ALONE_S}\n"

    async def _answer(self, route: Url, body: dict[str, Any]) -> httpx.Response:
        self.probed += "max_tokens" in body
        if route not in self._routes:
            return httpx.Response(404)
        if self._refuses in body:
            return httpx.Response(400, json={"error": {"message": self._said}})
        async with self._places:
            await asyncio.sleep(5 * ALONE_S if route == self.slow else ALONE_S)
        return httpx.Response(200, json=ANSWERS[route])

    async def most_rows(self, *routes: Url, probed: int) -> int:
        """Keep the endpoint busy with rows of one route after the other, each for so many probes.

        Returns the most rows that it takes at once in the second half of the last route's time.
        """
        await self.endpoint.start()
        loop, most, sent, rows = asyncio.get_running_loop(), 0, 0, set[asyncio.Task[Any]]()
        for route in routes:
            most, half_s = 0, probed * PROBE_EVERY_S / 2
            until = loop.time() + 2 * half_s
            while loop.time() < until:
                rows = {row for row in rows if not row.done()}
                while len(rows) < self.endpoint.capacity:
                    call = Call(key=str(sent := sent + 1), url=route, body=BODIES[route])
                    rows.add(loop.create_task(self.endpoint.complete(call)))
                most = max(most, self.endpoint.capacity) if loop.time() > until - half_s else 0
                await asyncio.sleep(ALONE_S / 5)
        await asyncio.gather(*rows, return_exceptions=True)
        await self.endpoint.close()
        return most


@pytest.mark.parametrize("route", Url)
def test_rows_give_way_on_a_server_with_one_route(route: Url) -> None:
    """The window grows until probes take long, and a live request as long as they."""
    server = FewPlaces(route)
    assert PLACES <= virtual_time.run(server.most_rows(route, probed=40)) <= 4 * PLACES
    assert {status for _, status in server.asked} == {200}


def test_rows_give_way_where_a_balancer_mixes_the_metrics_of_replicas() -> None:
    """The page of each shows no slowness, and their differences show nothing."""
    server = FewPlaces(Url.CHAT, replicas=2)
    assert PLACES <= virtual_time.run(server.most_rows(Url.CHAT, probed=40)) <= 4 * PLACES
    assert server.probed > 20


def test_routes_that_take_different_times_are_judged_apart() -> None:
    server = FewPlaces(Url.CHAT, Url.EMBEDDINGS)
    server.slow = Url.CHAT
    assert virtual_time.run(server.most_rows(Url.EMBEDDINGS, Url.CHAT, probed=30)) >= PLACES


def test_a_model_that_reasons_is_probed_with_the_limit_that_it_takes() -> None:
    server = FewPlaces(Url.CHAT, refuses="max_tokens")
    assert PLACES <= virtual_time.run(server.most_rows(Url.CHAT, probed=40)) <= 4 * PLACES
    assert server.asked[Url.CHAT, 400] == 1


@pytest.mark.parametrize("steady", [False, True])
def test_a_rejected_probe_is_no_time_and_the_user_is_told_once(
    steady: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, probes.log.name)
    server = FewPlaces(Url.CHAT, refuses="max_tokens", said="audio is missing", steady=steady)
    most = virtual_time.run(server.most_rows(Url.CHAT, probed=20))
    said = [record.getMessage() for record in caplog.records if "--steady --window N" in record.getMessage()]
    assert (most, len(said), server.probed > 1) == ((64, 0, False) if steady else (1, 1, True))


@pytest.mark.parametrize("route", Url)
def test_no_small_request_is_answered_from_the_cache_of_a_gateway(route: Url) -> None:
    """Its server is down: the gateway knows the answers to the requests that came before."""
    known: dict[bytes, httpx.Response] = {}
    down = False

    def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            found = request.url.path == "/v1/models"
            return httpx.Response(200 if found else 404, json={"data": [{"id": "served"}]})
        if request.content not in known and not down:
            known[request.content] = httpx.Response(200, json=ANSWERS[route])
        return known.get(request.content, httpx.Response(500))

    async def go() -> list[SmallAnswer]:
        nonlocal down
        async with httpx.AsyncClient(
            base_url="http://server", transport=httpx.MockTransport(serve)
        ) as client:
            asked = Probes(client)
            well = await asked.small("served", route)
            down = True
            return [well, await asked.small("served", route)]

    assert [small.answered for small in asyncio.run(go())] == [True, False]
