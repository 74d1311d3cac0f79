"""Rows at a modelled vLLM without ConServe's scheduler, beside requests of others and without any."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from conserve.endpoints.considerate import PROBE_EVERY_S
from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.protocol import Call, Url
from conserve.endpoints.window import ALONE_S
from tests import virtual_time

CALM_S, ROW_S = 0.1, 10.0
ANSWER = {"choices": [{"message": {"content": "a"}}]}


class ModelledVllm:
    """Runs `places` requests at a time; a small one takes twice as long beside `rows_at_ease` rows."""

    def __init__(
        self, *, places: int = 256, rows_at_ease: int = 16, replicas: int = 1, row_s: float = ROW_S
    ) -> None:
        self.row_s = row_s
        self.places, self.rows_at_ease, self.replicas = places, rows_at_ease, replicas
        self.slots = asyncio.Semaphore(places)
        self.most, self.stops = 1000, False  # requests that a gateway lets through; no more rows are sent
        self.here = self.finished = self.small = self.rows = self.answered = 0
        transport = httpx.MockTransport(self.serve)
        self.endpoint = HttpEndpoint("http://server", considerate=True, transport=transport)

    async def serve(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            pages = {"/metrics": self.page(), "/v1/models": json.dumps({"data": [{"id": "served"}]})}
            return httpx.Response(200, text=pages.get(request.url.path, "{}"))
        if self.here >= self.most:
            return httpx.Response(429)
        if json.loads(request.content).get("max_tokens") == 1:
            self.small += 1
            await self.run(CALM_S * (1 + self.rows / self.rows_at_ease))
        else:
            await self.row()
        return httpx.Response(200, json=ANSWER)

    async def row(self) -> None:
        self.rows += 1
        try:
            await self.run(self.row_s)
        finally:
            self.rows -= 1
        self.answered += 1

    async def run(self, seconds: float) -> None:
        """Take a place for so long."""
        self.here += 1
        try:
            async with self.slots:
                await asyncio.sleep(seconds)
        finally:
            self.here -= 1
        self.finished += 1

    def page(self) -> str:
        """Metrics of the first of the replicas, to which requests go in turn."""
        here = self.here // self.replicas
        return (
            f"vllm:num_requests_running {min(here, self.places)}\n"
            f"vllm:num_requests_waiting {max(0, here - self.places)}\n"
            f'vllm:request_success_total{{finished_reason="stop"}} {self.finished // self.replicas}\n'
        )

    @asynccontextmanager
    async def others(self, *, every_s: float, seconds: float) -> AsyncIterator[None]:
        """Requests of others meanwhile."""
        running = set[asyncio.Task[None]]()

        async def come() -> None:
            while True:
                await asyncio.sleep(every_s)
                running.add(asyncio.create_task(self.run(seconds)))

        coming = asyncio.create_task(come())
        try:
            yield
        finally:
            coming.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(coming, *running, return_exceptions=True)

    @asynccontextmanager
    async def harvest(self) -> AsyncIterator[list[int]]:
        """Keep the endpoint full of rows; yields the list of rows at the server, one number a second."""
        await self.endpoint.start()
        loop, rows, seen = asyncio.get_running_loop(), set[asyncio.Task[Any]](), list[int]()

        async def feed() -> None:
            number, look_at = 0, loop.time()
            while True:
                rows.difference_update({row for row in rows if row.done()})
                while len(rows) < self.endpoint.capacity and not self.stops:
                    call = Call(key=str(number := number + 1), url=Url.CHAT, body={"messages": []})
                    rows.add(loop.create_task(self.endpoint.complete(call)))
                if loop.time() >= look_at:
                    look_at += 1
                    seen.append(self.rows)
                await asyncio.sleep(CALM_S)

        feeding = loop.create_task(feed())
        try:
            yield seen
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            for row in rows:
                row.cancel()
            await asyncio.gather(*rows, return_exceptions=True)
            await self.endpoint.close()


def test_rows_fill_a_server_without_others_whatever_small_requests_take() -> None:
    async def go() -> None:
        server = ModelledVllm()
        async with server.harvest() as rows:
            await asyncio.sleep(ALONE_S + 30)
            small = server.small
            await asyncio.sleep(600)
        assert sum(rows[-600:]) / 600 > 60
        assert server.small - small <= 600 / PROBE_EVERY_S

    virtual_time.run(go())


@pytest.mark.parametrize("places", [4, 24])
def test_rows_fill_the_places_of_a_server_without_others(places: int) -> None:
    """Small requests wait behind rows there."""

    async def go() -> None:
        server = ModelledVllm(places=places)
        async with server.harvest() as rows:
            await asyncio.sleep(4 * ALONE_S)
            answered = server.answered
            await asyncio.sleep(600)
        assert server.answered - answered > 0.95 * places * 600 / ROW_S
        assert sum(rows[-300:]) / 300 <= 1.25 * places + 2, "rows of two seconds wait before a next request"

    virtual_time.run(go())


@pytest.mark.parametrize(("every_s", "seconds"), [(20.0, 5.0), (3.0, 0.01)], ids=["long", "unseen by looks"])
def test_rows_give_way_while_others_come_and_fill_the_server_after_the_last_one(
    every_s: float, seconds: float
) -> None:
    async def go() -> None:
        server = ModelledVllm()
        async with server.harvest() as rows:
            async with server.others(every_s=every_s, seconds=seconds):
                await asyncio.sleep(900)
            slowed = [1 + count / server.rows_at_ease for count in rows[300:]]
            assert sum(rows[300:]) / 600 > 8
            assert sum(slowed) / len(slowed) < 2
            await asyncio.sleep(2 * ALONE_S)
            assert rows[-1] >= 60

    virtual_time.run(go())


@pytest.mark.parametrize("row_s", [ROW_S, 600.0])
def test_rows_give_way_where_the_metrics_are_of_one_replica_among_several(row_s: float) -> None:
    """Requests of others might be at any of them."""

    async def go() -> None:
        server = ModelledVllm(replicas=2, row_s=row_s)
        async with server.harvest() as rows:
            await asyncio.sleep(900)
        slowed = [1 + count / server.rows_at_ease for count in rows[300:]]
        assert sum(slowed) / len(slowed) < 2

    virtual_time.run(go())


def test_rows_stay_few_where_requests_wait_already_at_the_start() -> None:
    """A queue of others at the start tells no calm latency."""

    async def go() -> None:
        server = ModelledVllm(places=4)
        async with server.others(every_s=1.0, seconds=5.0):
            await asyncio.sleep(60)
            async with server.harvest() as rows:
                await asyncio.sleep(300)
        assert max(rows) <= 4

    virtual_time.run(go())


def test_rows_begin_anew_after_a_time_without_rows() -> None:
    async def go() -> None:
        server = ModelledVllm()
        async with server.harvest():
            await asyncio.sleep(2 * ALONE_S)
            full = server.endpoint.capacity
            server.stops = True
            while server.rows:
                await asyncio.sleep(1)
            await asyncio.sleep(2 * ALONE_S)
            server.stops = False
            await asyncio.sleep(1)
            assert (full, server.rows <= 3) == (64, True)

    virtual_time.run(go())


def test_refusals_of_a_gateway_are_a_sign_of_others_that_no_metrics_show() -> None:
    async def go() -> None:
        server = ModelledVllm()
        async with server.harvest() as rows:
            await asyncio.sleep(2 * ALONE_S)
            server.most = 24
            await asyncio.sleep(600)
        assert sum(rows[-300:]) / 300 < 24

    virtual_time.run(go())
