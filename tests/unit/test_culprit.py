"""Whether a row or its server is at fault: no row fails for a server's faults, one that kills servers does."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from conserve.endpoints.culprit import MUTE_AFTER
from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.protocol import Call, Completion, Endpoint, Url
from conserve.endpoints.roster import rosters_of
from conserve.errors import (
    EndpointBusy,
    EndpointFailing,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    RequestRejected,
    ServerLost,
)
from conserve.jobs.fleet.fleet import Fleet
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from conserve.store.sql.query import views
from tests import virtual_time
from tests.conftest import WriteInput
from tests.submitting import submit

ROW_S = 3.0  # that a row takes
KILLER_S = 1.0  # until a row that kills has done so
ENVOY = "upstream connect error or disconnect/reset before headers. reset reason: "
PROXIES = {  # what each says where no server can be reached, and where the one that has the row hangs up
    "nginx": (httpx.Response(502), httpx.Response(502)),
    "ingress": (httpx.Response(503), httpx.Response(502)),
    "envoy": (
        httpx.Response(503, text=f"{ENVOY}connection failure"),
        httpx.Response(503, text=f"{ENVOY}connection termination"),
    ),
}
DEAD_ENGINE = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Server:
    """A server that rows may take down (`kill`) or make fail for a while (`poison`); some only `fault`."""

    def __init__(self, *, back_after_s: float = 30.0) -> None:
        self.back_after_s = back_after_s
        self.back_at = 0.0  # it is down until then
        self.well_at = 0.0  # it answers all with 500 until then
        self.lives = 0  # ends of them
        self._life = asyncio.Event()  # set at its end
        self.rows: list[str] = []  # that came while it was up
        self.small: httpx.Response | Exception | None = None  # its answer to small requests, if another one
        self.failure = httpx.Response(500, json={"error": {"message": "out of memory"}})
        self.lacks: set[str] = set()  # routes
        self.broken: set[str] = set()  # routes that answer 500
        self.model = "served"
        self.unknown = False  # the model
        self.slots = 8
        self.refused = 0

    async def serve(self, request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        if loop.time() < self.back_at:
            raise httpx.ConnectError("refused")
        if request.method == "GET":
            known = request.url.path in ("/v1/models", "/health")
            return httpx.Response(200 if known else 404, json={"data": [{"id": self.model}]})
        if self.unknown:
            said = {"error": {"message": "The model `served` does not exist."}}
            return httpx.Response(404 if request.url.path == Url.CHAT else 400, json=said)
        if request.url.path in self.lacks:
            return httpx.Response(404, json={"detail": "Not Found"})
        if request.url.path in self.broken:
            return self.failure
        asked = json.loads(request.content)
        if request.url.path == Url.EMBEDDINGS:
            return httpx.Response(200, json={"data": [{"embedding": [0.5]}]})
        is_small = asked.get("max_tokens") == 1 or "messages" not in asked
        if is_small and self.small is not None:
            await asyncio.sleep(0.1)
            if isinstance(self.small, Exception):
                raise self.small
            return self.small
        if loop.time() < self.well_at:
            return self.failure
        if is_small:
            return answer("a")
        return await self._row(asked["messages"][-1]["content"])

    async def _row(self, text: str) -> httpx.Response:
        loop, life = asyncio.get_running_loop(), self._life
        self.rows.append(text)
        if "kill" in text or "poison" in text:
            await asyncio.sleep(KILLER_S)
            until = loop.time() + self.back_after_s
            self.lives += 1
            self.back_at, self.well_at = (until, 0.0) if "kill" in text else (0.0, until)
            self._life.set()
            self._life = asyncio.Event()
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(life.wait(), ROW_S)
        if loop.time() < self.back_at:
            raise httpx.ReadError("reset")
        if loop.time() < self.well_at:
            return self.failure
        if "too large" in text:
            self.refused += 1
            return httpx.Response(429, json={"error": {"message": "Request too large: Limit 30000 TPM"}})
        if "breaks" in text:
            broken = {"message": {"content": ""}, "finish_reason": "error"}
            return httpx.Response(200, json={"choices": [broken]})
        if "absent" in text:
            return httpx.Response(404, json={"error": {"message": "No such file: file-abc"}})
        return httpx.Response(500, text="no") if "fault" in text else answer(text)

    def endpoint(self, url: str = "http://server") -> HttpEndpoint:
        return HttpEndpoint(url, transport=httpx.MockTransport(self.serve), most_rows=self.slots)


class Proxy:
    """A proxy before servers, which it asks in turns; it answers for those that are down."""

    def __init__(self, *servers: Server, kind: str) -> None:
        self.servers, self.kind = servers, kind
        self.turn = 0

    async def serve(self, request: httpx.Request) -> httpx.Response:
        for _ in self.servers:
            self.turn += 1
            try:
                return await self.servers[self.turn % len(self.servers)].serve(request)
            except httpx.ConnectError:
                continue
            except httpx.ReadError:
                return PROXIES[self.kind][1]
        return PROXIES[self.kind][0]

    def endpoint(self, url: str = "http://server") -> HttpEndpoint:
        slots = sum(server.slots for server in self.servers)
        return HttpEndpoint(url, transport=httpx.MockTransport(self.serve), most_rows=slots)


def answer(text: str) -> httpx.Response:
    message = {"message": {"content": f"re: {text}"}}
    return httpx.Response(
        200, json={"choices": [message], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    )


def asked(server: Server, *texts: str, before: Callable[[], None] = lambda: None) -> list[Any]:
    """Send rows, each a minute after the last; returns the answer or the kind of error of each."""

    async def go() -> list[Any]:
        endpoint = server.endpoint()
        await endpoint.start()
        before()
        found: list[Any] = []
        for text in texts:
            found += await asyncio.gather(endpoint.complete(call(text)), return_exceptions=True)
            await asyncio.sleep(60.0)
        await endpoint.close()
        return [one if isinstance(one, Completion) else type(one) for one in found]

    return virtual_time.run(go())


def call(text: str, route: Url = Url.CHAT) -> Call:
    body = {"input": text} if route is Url.EMBEDDINGS else {"messages": [{"role": "user", "content": text}]}
    return Call(key=text, url=route, body=body)


# One row after the other.


def test_a_row_that_a_well_server_gives_no_usable_answer_is_at_fault() -> None:
    assert asked(Server(), "fault") == [EndpointFault]


@pytest.mark.parametrize(
    "small",
    [
        httpx.Response(500),
        httpx.Response(503),
        httpx.Response(502),
        httpx.Response(200, text="<html>log in</html>"),
        httpx.Response(200, json={"error_code": 10401, "text": "Failed to get response"}),
        httpx.Response(200, json={"error": {"message": "no", "code": 500}}),
        httpx.ConnectError("refused"),
    ],
)
def test_a_row_is_not_at_fault_where_no_other_request_is_answered(small: httpx.Response | Exception) -> None:
    server = Server()
    server.small = small
    assert asked(server, "fault") == [EndpointFailing]


@pytest.mark.parametrize("small", [httpx.Response(400), httpx.Response(404), httpx.ReadTimeout("busy")])
def test_a_small_request_that_is_refused_or_late_says_nothing(small: httpx.Response | Exception) -> None:
    server = Server()
    server.small = small
    assert asked(server, "fault") == [EndpointFault]


def test_an_engine_that_turns_out_to_be_dead_is_said_to_be() -> None:
    server = Server()
    server.small = httpx.Response(500, json={"error": {"message": DEAD_ENGINE}})
    assert asked(server, "fault") == [EngineDied]


@pytest.mark.parametrize("row", ["kill", "poison"])
def test_a_server_that_was_well_is_lost_with_the_row(row: str) -> None:
    assert asked(Server(), "good", row)[1] is ServerLost


def test_a_server_that_was_lost_may_come_back_as_another_one() -> None:
    server = Server()

    async def go() -> str:
        endpoint = server.endpoint()
        await endpoint.start()
        await endpoint.complete(call("good"))
        await asyncio.gather(endpoint.complete(call("kill")), return_exceptions=True)
        server.model = "another"
        await asyncio.sleep(server.back_after_s)
        await endpoint.complete(call("good"))
        await endpoint.close()
        return endpoint.server.model

    assert virtual_time.run(go()) == "another"


@pytest.mark.parametrize(("row", "error"), [("kill", EndpointFailing), ("poison", EndpointFailing)])
def test_a_server_that_answered_nothing_yet_was_not_well(row: str, error: type[Exception]) -> None:
    assert asked(Server(), row) == [error]


@pytest.mark.parametrize("row", ["kill", "poison"])
def test_an_outage_is_one_loss_of_a_row_however_long_it_lasts(row: str) -> None:
    found = asked(Server(back_after_s=200.0), "good", row, row, row, row, row)[1:]
    assert found[0] is ServerLost
    assert all(issubclass(one, EndpointUnavailable) for one in found[1:4])
    assert found[4] is ServerLost, "after it was well again"


def test_rows_go_on_at_a_server_that_answers_them_and_no_small_request() -> None:
    """Faults are those of their rows once enough others were answered: a model for sound alone is such a server."""
    server = Server()
    server.small = httpx.Response(500)
    found = asked(server, *["fault", "good"] * (MUTE_AFTER + 1), "good")
    assert found[0] is EndpointFailing
    assert {type(one) for one in found[1::2]} == {Completion}
    assert found[-3] is EndpointFault


def test_the_name_of_a_model_is_wrong_whatever_other_routes_say_of_it() -> None:
    """Servers may answer 404 on one route, and 400 on another."""
    server = Server()
    server.unknown = True
    assert asked(server, "good") == [EndpointUnusable]


@pytest.mark.parametrize("small", [httpx.Response(500), httpx.Response(429), httpx.ConnectError("refused")])
def test_a_small_request_that_was_answered_once_tells_for_ever(small: httpx.Response | Exception) -> None:
    """Small requests may fail as often as they like afterwards: a balancer may have a bad replica."""
    server = Server()

    async def go() -> list[Any]:
        endpoint = server.endpoint()
        await endpoint.start()
        found = await asyncio.gather(endpoint.complete(call("fault")), return_exceptions=True)
        server.small = small
        for _ in range(2 * MUTE_AFTER):
            for text in ("fault", "good"):
                found += await asyncio.gather(endpoint.complete(call(text)), return_exceptions=True)
        await endpoint.close()
        return found

    found = virtual_time.run(go())
    assert type(found[0]) is EndpointFault
    assert EndpointFault not in {type(one) for one in found[1:]}


def test_an_outage_says_nothing_about_small_requests_however_many_rows_meet_it() -> None:
    """No small request is answered before it or in it; the next outage is told as one."""
    server = Server()

    async def go() -> list[Any]:
        endpoint = server.endpoint()
        await endpoint.start()
        found: list[Any] = []
        for _ in range(3):
            await endpoint.complete(call("good"))
            server.well_at = asyncio.get_running_loop().time() + 60.0
            rows = [endpoint.complete(call("good")) for _ in range(4 * MUTE_AFTER)]
            found += await asyncio.gather(*rows, return_exceptions=True)
            server.small = httpx.Response(429)
            await asyncio.sleep(60.0)
            await endpoint.complete(call("good"))
            server.small = None
        await endpoint.close()
        return found

    assert EndpointFault not in {type(one) for one in virtual_time.run(go())}


def test_a_limit_of_requests_says_nothing_about_the_row_or_the_server() -> None:
    server = Server()
    server.small = httpx.Response(429, headers={"retry-after": "7"})
    assert asked(server, "good", "fault", "fault", "good")[1:3] == [EndpointBusy, EndpointBusy]


def test_a_server_that_fails_on_one_route_is_lost_there_once() -> None:
    """Answers on another route prove nothing about this one: one backend of a gateway may be down."""
    server = Server()

    async def go() -> list[Any]:
        endpoint = server.endpoint()
        await endpoint.start()
        await endpoint.complete(call("good", Url.EMBEDDINGS))
        server.broken.add(Url.EMBEDDINGS)
        found: list[Any] = []
        for _ in range(3):
            row = endpoint.complete(call("good", Url.EMBEDDINGS))
            found += await asyncio.gather(row, return_exceptions=True)
            await endpoint.complete(call("good"))
        await endpoint.close()
        return [type(one) for one in found]

    assert virtual_time.run(go()) == [ServerLost, EndpointFailing, EndpointFailing]


def test_one_row_at_a_time_is_sent_to_a_server_that_is_doubted() -> None:
    server = Server()
    server.small = httpx.Response(500)

    async def go() -> list[Any]:
        endpoint = server.endpoint()
        await endpoint.start()
        await asyncio.gather(endpoint.complete(call("fault")), return_exceptions=True)
        rows = [endpoint.complete(call(f"row {n}")) for n in range(4)]
        found = await asyncio.gather(*rows, return_exceptions=True)
        server.small = None
        rows = [endpoint.complete(call(f"row {n}")) for n in range(4, 8)]
        found += await asyncio.gather(*rows)
        await endpoint.close()
        return found

    found = virtual_time.run(go())
    assert [type(one) for one in found] == [Completion, *[EndpointFailing] * 3, *[Completion] * 4]
    assert server.rows == ["fault", "row 0", "row 4", "row 5", "row 6", "row 7"]


@pytest.mark.parametrize(
    ("lacks", "error"),
    [
        ({Url.CHAT}, RequestRejected),
        ({Url.CHAT, Url.COMPLETIONS, Url.EMBEDDINGS}, RequestRejected),
        (set(Url), EndpointUnusable),
    ],
)
def test_a_first_row_fails_for_a_missing_route_only_where_another_is_there(
    lacks: set[str], error: type[Exception]
) -> None:
    server = Server()
    server.lacks = lacks
    assert asked(server, "good") == [error]


def test_a_first_row_fails_for_its_404_where_the_server_rejects_small_requests() -> None:
    """A rejection shows that the server has the route: it may want `max_completion_tokens`."""
    server = Server()
    server.small = httpx.Response(400)
    assert asked(server, "absent") == [RequestRejected]


# A queue.


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> Callable[..., str]:
    """Submits prompts; returns the job's id."""

    def queue_up(*prompts: str) -> str:
        path = write_input("rows.parquet", q=list(prompts))
        return submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}")).job_id

    return queue_up


def harvest(store: Store, endpoint: Endpoint, *, most_s: float = 4 * 3600.0, **named: Any) -> Tally:
    """Work until the queue is empty, or for so many seconds."""

    async def go() -> Tally:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(most_s, stop.set)
        return await Harvester(store, endpoint, clock=loop.time, **named).run(stop)

    return virtual_time.run(go())


def fleet(*servers: Server | Proxy) -> Fleet:
    by_url = {f"http://server-{n}": server for n, server in enumerate(servers)}
    return Fleet(rosters_of(list(by_url), []), lambda url: by_url[url].endpoint(url))


@pytest.mark.parametrize("servers", [0, 1, 2, 3])
@pytest.mark.parametrize("killer", ["kill", "poison"])
@pytest.mark.parametrize("back_after_s", [5.0, 60.0])
def test_a_row_that_takes_servers_down_fails_and_all_others_are_answered(
    store: Store, queue_up: Callable[..., str], servers: int, killer: str, back_after_s: float
) -> None:
    """Of one server without a fleet, and of fleets."""
    job_id = queue_up(*[f"row {n}" for n in range(30)], killer, *[f"row {n}" for n in range(30, 59)])
    its = [Server(back_after_s=back_after_s) for _ in range(max(1, servers))]
    tally = harvest(store, fleet(*its) if servers else its[0].endpoint(), max_deaths=3)
    assert (tally.succeeded, tally.failed) == (59, 1)
    with views(store, now=0.0, only=[job_id]) as opened:
        errors = opened.duck.execute("select row_index, error_type from results where error_type is not null")
        kind = "engine_died" if killer == "kill" else "endpoint_fault"
        assert errors.fetchall() == [(30, kind)]
    assert sum(server.lives for server in its) <= 12


@pytest.mark.parametrize("servers", [0, 1, 3])
@pytest.mark.parametrize("kind", PROXIES)
@pytest.mark.parametrize("back_after_s", [5.0, 60.0])
def test_a_row_that_takes_servers_down_behind_their_proxies_fails_and_all_others_are_answered(
    store: Store, queue_up: Callable[..., str], servers: int, kind: str, back_after_s: float
) -> None:
    """A proxy says of the row that its server died of what it says of those that come while it is down."""
    queue_up(*[f"row {n}" for n in range(30)], "kill", *[f"row {n}" for n in range(30, 59)])
    its = [Server(back_after_s=back_after_s) for _ in range(max(1, servers))]
    before = [Proxy(server, kind=kind) for server in its]
    tally = harvest(store, fleet(*before) if servers else before[0].endpoint(), max_deaths=3)
    assert (tally.succeeded, tally.failed) == (59, 1)
    assert sum(server.lives for server in its) <= 12


@pytest.mark.parametrize("kind", PROXIES)
@pytest.mark.parametrize("back_after_s", [5.0, 60.0])
def test_a_row_that_takes_down_the_servers_of_one_proxy_fails_before_it_has_them_all_again(
    store: Store, queue_up: Callable[..., str], kind: str, back_after_s: float
) -> None:
    queue_up(*[f"row {n}" for n in range(30)], "kill", *[f"row {n}" for n in range(30, 59)])
    its = [Server(back_after_s=back_after_s) for _ in range(4)]
    tally = harvest(store, Proxy(*its, kind=kind).endpoint())
    assert (tally.succeeded, tally.failed) == (59, 1)
    assert sum(server.lives for server in its) <= 8


@pytest.mark.parametrize("servers", [0, 1, 3])
def test_a_server_that_answers_everything_with_500_fails_no_row(
    store: Store, queue_up: Callable[..., str], servers: int
) -> None:
    queue_up(*[f"row {n}" for n in range(40)])
    its = [Server() for _ in range(max(1, servers))]
    its[0].well_at = virtual_time.BEGIN_S + 600.0
    tally = harvest(store, fleet(*its) if servers else its[0].endpoint(), max_attempts=2)
    assert (tally.succeeded, tally.failed) == (40, 0)


@pytest.mark.parametrize("kind", [None, *PROXIES])
def test_servers_that_are_restarted_again_and_again_fail_no_row(
    store: Store, queue_up: Callable[..., str], kind: str | None
) -> None:
    """Rows are lost with them, and are answered in the end, alone."""
    queue_up(*[f"row {n}" for n in range(40)])
    server = Server()

    async def restart() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(12):
            await asyncio.sleep(0.5 * ROW_S)
            server.lives, server.back_at = server.lives + 1, loop.time() + 10.0
            await asyncio.sleep(10.0)

    async def go() -> Tally:
        loop = asyncio.get_running_loop()
        restarts = loop.create_task(restart())
        endpoint = Proxy(server, kind=kind).endpoint() if kind else server.endpoint()
        tally = await Harvester(store, endpoint, clock=loop.time, max_deaths=5).run(asyncio.Event())
        await restarts
        return tally

    tally = virtual_time.run(go())
    assert (tally.succeeded, tally.failed) == (40, 0)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_row_that_is_refused_as_busy_for_ever_holds_no_other_up(
    store: Store, queue_up: Callable[..., str], servers: int
) -> None:
    """A request beyond the limit of tokens a minute waits, and is sent again about once a minute."""
    rows = [f"row {n}" for n in range(200)]
    job_id = queue_up("too large", *rows)
    its = [Server() for _ in range(servers)]
    began: list[float] = []

    async def go() -> Tally:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        endpoint = fleet(*its) if servers > 1 else its[0].endpoint()
        began.append(loop.time())
        tally = asyncio.create_task(Harvester(store, endpoint, clock=loop.time).run(stop))
        while sum(len(one.rows) - one.refused for one in its) < len(rows):
            await asyncio.sleep(1.0)
        began.append(loop.time())
        loop.call_later(600.0, stop.set)
        return await tally

    tally = virtual_time.run(go())
    assert (tally.succeeded, tally.failed) == (200, 0), job_id
    assert began[1] - began[0] < 2 * ROW_S * 200 / (8 * servers) + 10
    assert sum(one.refused for one in its) < 60


def test_a_row_with_which_a_server_breaks_its_answer_off_fails_alone(
    store: Store, queue_up: Callable[..., str]
) -> None:
    queue_up("breaks", *[f"row {n}" for n in range(20)])
    tally = harvest(store, Server().endpoint(), max_attempts=3)
    assert (tally.succeeded, tally.failed) == (20, 1)
