"""Refusals with a status of the fours: a row that is refused alone fails; where everything is, all rows wait."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.protocol import Call, Completion, Endpoint, Url
from conserve.endpoints.rejections import IN_A_ROW
from conserve.endpoints.roster import rosters_of
from conserve.errors import EndpointBusy, EndpointUnavailable, EndpointUnusable, RequestRejected
from conserve.jobs.fleet.fleet import Fleet
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from tests import virtual_time
from tests.conftest import WriteInput
from tests.submitting import submit

ROW_S = 1.0
OF_CONTENTS = (400, 413, 422)
OF_NO_ROW = (405, 410, 418, 421, 426, 431, 451)


class Barred:
    """A server that rejects faulty rows, and perhaps small requests; what is before it may refuse everything."""

    def __init__(self, *, status: int = 400, speaks: bool = True) -> None:
        self.rejection = httpx.Response(status, text="<html>refused</html>")
        self.barred = False
        self.speaks = speaks
        self.small, self.rows = 0, list[str]()

    async def serve(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            known = request.url.path == "/v1/models"
            return httpx.Response(200 if known else 404, json={"data": [{"id": "served"}]})
        body = json.loads(request.content)
        is_small, text = body.get("max_tokens") == 1, body["messages"][0]["content"]
        self.small += is_small
        if not is_small:
            self.rows.append(text)
        if self.barred or (not self.speaks if is_small else "faulty" in text):
            return self.rejection
        await asyncio.sleep(ROW_S)
        return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})

    def endpoint(self) -> HttpEndpoint:
        return HttpEndpoint("http://server", transport=httpx.MockTransport(self.serve))

    async def ask(self, endpoint: Endpoint, *texts: str) -> list[Any]:
        """Ends of rows that are sent one after the other."""
        found: list[Any] = []
        for text in texts:
            body = {"messages": [{"role": "user", "content": text}]}
            row = endpoint.complete(Call(key=text, url=Url.CHAT, body=body))
            found += await asyncio.gather(row, return_exceptions=True)
        return [type(one) for one in found]


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> Callable[..., None]:
    """Submits prompts."""

    def queue_up(*prompts: str) -> None:
        submit(
            store,
            str(write_input("rows.parquet", q=list(prompts))),
            Task(kind=Kind.PROMPT, template="{{ q }}"),
        )

    return queue_up


def harvested(
    store: Store, server: Barred, *, bars: tuple[float, float] | None = None, fleet: bool = False
) -> Tally:
    """Work until the queue is empty, or for four hours; everything is refused between two moments."""

    async def bar(loop: asyncio.AbstractEventLoop, begins_s: float, ends_s: float) -> None:
        await asyncio.sleep(begins_s)
        server.barred = True
        await asyncio.sleep(ends_s - begins_s)
        server.barred = False

    async def go() -> Tally:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(4 * 3600.0, stop.set)
        outage = loop.create_task(bar(loop, *bars)) if bars else None
        roster = rosters_of(["http://server"], [])
        endpoint = Fleet(roster, lambda _: server.endpoint()) if fleet else server.endpoint()
        tally = await Harvester(store, endpoint, clock=loop.time).run(stop)
        if outage is not None:
            await outage
        return tally

    return virtual_time.run(go())


@pytest.mark.parametrize("status", [*OF_CONTENTS, *OF_NO_ROW])
def test_single_faulty_rows_fail_at_once(status: int) -> None:
    server = Barred(status=status)

    async def go() -> list[Any]:
        endpoint = server.endpoint()
        await endpoint.start()
        found = await server.ask(endpoint, *["good", *["faulty"] * (IN_A_ROW - 1)] * 3)
        await endpoint.close()
        return found

    assert virtual_time.run(go()) == [Completion, *[RequestRejected] * (IN_A_ROW - 1)] * 3
    assert server.small == (0 if status in OF_CONTENTS else 3 * (IN_A_ROW - 1))


@pytest.mark.parametrize("speaks", [True, False])
@pytest.mark.parametrize("status", OF_CONTENTS)
@pytest.mark.parametrize("first", [[], ["good"]])
def test_a_queue_of_faulty_rows_comes_to_its_end(
    store: Store, queue_up: Callable[..., None], status: int, speaks: bool, first: list[str]
) -> None:
    """Also on a server that rejects small requests in the same words, as one for sound alone."""
    rows = [*first, *[f"faulty {n}" for n in range(100)]]
    queue_up(*rows)
    server = Barred(status=status, speaks=speaks)
    tally = harvested(store, server)
    assert (tally.succeeded, tally.failed, tally.retried) == (len(first), 100, 0)
    assert 0 < server.small <= 100 / IN_A_ROW
    assert len(server.rows) <= len(rows) + 100 / IN_A_ROW


@pytest.mark.parametrize("fleet", [False, True])
@pytest.mark.parametrize(
    ("status", "speaks"), [(400, True), (400, False), (422, True), (405, True), (410, True), (431, True)]
)
def test_rows_wait_while_everything_is_refused(
    store: Store, queue_up: Callable[..., None], status: int, speaks: bool, fleet: bool
) -> None:
    queue_up(*[f"row {n}" for n in range(200)])
    tally = harvested(store, Barred(status=status, speaks=speaks), bars=(1.5 * ROW_S, 60.0), fleet=fleet)
    lost = IN_A_ROW - 1 if status in OF_CONTENTS else 0
    assert (tally.succeeded, tally.failed) == (200 - lost, lost)


def test_an_answer_between_rejections_begins_their_count_anew() -> None:
    server = Barred()

    async def go() -> list[list[Any]]:
        endpoint = server.endpoint()
        await endpoint.start()
        found = [await server.ask(endpoint, "good")]
        server.barred = True
        found.append(await server.ask(endpoint, *["row"] * (IN_A_ROW + 1)))
        server.barred = False
        found.append(await server.ask(endpoint, "good", "faulty"))
        await endpoint.close()
        return found

    assert virtual_time.run(go()) == [
        [Completion],
        [*[RequestRejected] * (IN_A_ROW - 1), EndpointUnavailable, EndpointUnavailable],
        [Completion, RequestRejected],
    ]


class Limited:
    """A server whose answers depend on the text; small requests get one status."""

    def __init__(self, small: int) -> None:
        self.small = small

    def serve(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            known = request.url.path == "/v1/models"
            return httpx.Response(200 if known else 404, json={"data": [{"id": "served"}]})
        (message,) = json.loads(request.content)["messages"]
        match message["content"]:
            case "good":
                return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})
            case "moderated":
                return httpx.Response(403, json={"error": {"message": "flagged"}})
            case "faulty":
                return httpx.Response(500, json={"error": {"message": "oops"}})
            case "unpaid":
                return httpx.Response(429, json={"error": {"code": "insufficient_quota", "message": "no"}})
        return httpx.Response(self.small, json={"error": {"message": "over capacity"}})

    def ask(self, *texts: str, after_s: float = 0.0) -> list[type[object]]:
        """Ends of rows that are sent one after the other, so long apart."""

        async def go() -> list[type[object]]:
            endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(self.serve))
            await endpoint.start()
            found = []
            for text in texts:
                body = {"messages": [{"role": "user", "content": text}]}
                row = endpoint.complete(Call(key=text, url=Url.CHAT, body=body))
                found += await asyncio.gather(row, return_exceptions=True)
                await asyncio.sleep(after_s)
            await endpoint.close()
            return [type(one) for one in found]

        return virtual_time.run(go())


@pytest.mark.parametrize("status", [424, 429, 498, 499, 529])
def test_a_refused_row_waits_where_a_small_request_meets_a_limit(status: int) -> None:
    """Neither the key nor the row is known to be at fault."""
    assert Limited(status).ask("good", "moderated") == [Completion, EndpointUnavailable]


@pytest.mark.parametrize("status", [429, 498, 529])
def test_a_faulty_answer_while_small_requests_meet_a_limit_is_no_lost_server(status: int) -> None:
    assert Limited(status).ask("good", "faulty") == [Completion, EndpointBusy]


def test_a_limit_of_tokens_that_is_told_as_a_lack_of_credit_is_waited_for() -> None:
    """Qwen's API tells such a limit in OpenAI's words, and answers rows again within a minute."""
    waits = [EndpointBusy, EndpointBusy, Completion]
    assert Limited(429).ask(*["unpaid", "unpaid", "good"] * 3, after_s=50.0) == waits * 3
    assert Limited(429).ask(*["unpaid"] * 4, after_s=50.0) == [*[EndpointBusy] * 3, EndpointUnusable]
