"""The parts of a fleet by themselves: a server and its rows, paces, estimates, and what is said and asked."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from conserve.endpoints.fake import answer_tokens, request_text
from conserve.endpoints.protocol import Call, Choice, Completion, Endpoint, KvCache, Url
from conserve.endpoints.roster import Joined
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    RequestRejected,
    ServerLost,
)
from conserve.jobs.fleet import dispatch
from conserve.jobs.fleet.care import CHECK_S, DRAIN_S, Care, late_rows
from conserve.jobs.fleet.dispatch import Dispatch, load_of, usual_pace
from conserve.jobs.fleet.estimate import FIRST_TOKENS, AnswerLength
from conserve.jobs.fleet.fleet import Fleet, now_s
from conserve.jobs.fleet.member import START_S, Errand, Member
from conserve.jobs.fleet.membership import Membership
from conserve.jobs.fleet.pace import HALF_LIFE_S, Pace
from conserve.jobs.fleet.pieces import UnplacedRow, parts, pieces
from conserve.jobs.fleet.prefixes import CachedPrefixes
from tests import virtual_time
from tests.modelled_server import ChangingList, ModelledServer, fleet_of

A, B = "http://gpu-a:8000", "http://gpu-b:8000"
GONE = EndpointUnavailable("gone")


def call(text: str = "hi", **body: Any) -> Call:
    return Call(
        key=text, url=Url.CHAT, body={"messages": [{"role": "user", "content": text}], **body}, identity="m"
    )


def errand(tokens: float = 10.0, number: int = 0) -> Errand:
    turn = asyncio.get_running_loop().create_future()
    return Errand(call=call(), on_tokens=None, asked=UnplacedRow(number, (), tokens), turn=turn)


def member(**named: Any) -> Member:
    """A server that is ready."""
    found = Member(A, ModelledServer(A, **named))
    found.ready = True
    return found


def in_loop(test: Callable[[], None]) -> None:
    """Run a test within an event loop."""

    async def run() -> None:
        test()

    virtual_time.run(run())


# A server.


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "serving"),
        ({"held_until": 10.1}, "busy"),
        ({"held_until": 10.0}, "serving"),
        ({"suspected": True, "held_until": 99.0}, "suspected"),
        ({"ready": False}, "starting"),
        ({"ready": False, "error": GONE}, "down"),
        ({"drained": True, "ready": False}, "drained"),
        ({"listed": False, "drained": True}, "leaving"),
    ],
)
def test_a_server_is_in_the_state_that_matters_most(changes: dict[str, Any], state: str) -> None:
    server = member()
    for name, value in changes.items():
        setattr(server, name, value)
    assert server.state("m", 10.0).value == state
    assert server.is_open is (server.ready and server.listed and not server.drained)
    if state in ("serving", "busy", "suspected"):
        assert server.state("another", 10.0).value == "other model"


def test_a_server_out_of_reach_is_tried_after_a_time_that_doubles_to_five_seconds() -> None:
    server = member()
    server.cached.add([1, 2])
    waits = []
    for _ in range(6):
        server.fail(GONE, 100.0)
        waits.append(server.try_at - 100.0)
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert (server.ready, server.error, server.why, 1 in server.cached) == (False, GONE, "gone", False)
    server.fail(TimeoutError(), 0.0)
    assert server.why == f"{A} does not answer"
    assert isinstance(server.error, EndpointUnusable)
    server.answered(7.0, 1.0)
    server.fail(GONE, 100.0)
    assert server.try_at == 100.5, "an answer makes the next failure a first one"


def test_a_hold_lasts_as_long_as_was_asked_for_and_doubles_with_each_incident() -> None:
    server, holds = member(), []
    now = 100.0
    for wish in (None, None, 0.2, 30.0, 600.0):
        server.hold(wish, now)
        holds.append(server.held_until - now)
        now = server.held_until
    assert holds == [1.0, 1.0, 2.0, 30.0, 60.0]
    server.hold(600.0, now - 1.0)
    assert server.held_until == now + 59.0, "one incident asks for more"
    server.hold(1.0, now - 1.0)
    assert server.held_until == now + 59.0


def test_a_suspect_gets_one_row_at_a_time_until_it_answers() -> None:
    server = member(places=8)
    assert (server.places, server.free) == (8, 8)
    server.suspect(GONE, 50.0)
    assert (server.places, server.free, server.held_until, server.seen_at) == (1, 1, 52.0, 50.0)
    assert [server.fault() for _ in range(3)] == [1, 2, 3]
    server.refuses, server.misses = True, 1
    server.pace.elapse(0.0, 1)
    server.answered(60.0, 3.5)
    assert (server.places, server.error, server.seen_at) == (8, None, 60.0)
    assert (server.refuses, server.misses, list(server.times_s)) == (False, 0, [3.5])
    assert server.fault() == 1


def test_a_server_owes_a_sign_while_nothing_comes_and_later_if_it_has_no_row() -> None:
    def test() -> None:
        server = member()
        server.seen_at = 70.0
        assert not server.owes_sign(100.0, 5.0, idle_s=30.0), "it has no row"
        assert server.owes_sign(100.1, 5.0, idle_s=30.0)
        server.running.add(errand())
        assert server.owes_sign(100.0, 5.0, idle_s=30.0)
        server.seen_at = 95.0
        assert not server.owes_sign(100.0, 5.0, idle_s=30.0)
        assert server.owes_sign(100.1, 5.0, idle_s=30.0)
        server.ready = False
        assert not server.owes_sign(100.1, 5.0, idle_s=30.0)

    in_loop(test)


def test_rows_that_wait_are_charged_until_they_go() -> None:
    def test() -> None:
        server = member()
        rows = [errand(number=number) for number in range(6)]
        for number, row in enumerate(rows):
            server.enqueue(row, 10.0 + number, piece=number // 2)
        assert server.tokens == 75.0
        rows[0].turn.cancel()
        assert server.next() is rows[1]
        assert server.tokens == 65.0, "of a row that was withdrawn nothing is left"
        assert server.last_piece(9) == rows[4:6], "not those of another piece"
        assert server.tokens == 65.0 - 29.0
        assert server.last_piece(1) == [rows[3]]
        rows[2].turn.cancel()
        assert server.last_piece(1) == []
        assert server.tokens == 11.0, "that of the row that runs"
        assert server.next() is None
        server.enqueue(rows[4], 5.0, 7)
        server.enqueue(rows[5], 6.0, 7)
        rows[4].turn.cancel()
        assert server.give_up_queue() == [rows[5]]
        assert (server.tokens, rows[5].charge, rows[5].piece) == (11.0, 6.0, 7)

    in_loop(test)


def test_rows_that_are_recalled_avoid_the_server_that_they_come_from() -> None:
    async def run() -> None:
        server, waits, done, unsent = member(), errand(), errand(), errand()
        waits.task = asyncio.ensure_future(asyncio.sleep(9.0))  # type: ignore[arg-type]
        done.task = asyncio.ensure_future(asyncio.sleep(0.0))  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        server.recall([waits, done, unsent])
        await asyncio.gather(waits.task, done.task, return_exceptions=True)
        assert [row.recalled for row in (waits, done, unsent)] == [True, False, False]
        assert [row.avoid for row in (waits, done, unsent)] == [{server}, frozenset(), frozenset()]
        assert waits.task.cancelled()

    virtual_time.run(run())


# Paces and estimates.


def test_a_pace_is_of_one_place_and_old_rows_count_less() -> None:
    pace = Pace()
    assert (pace.of_a_place, pace.tokens_per_s, pace.believed(30.0)) == (None, 0.0, 30.0)
    pace.elapse(100.0, 4)
    pace.elapse(110.0, 4)
    assert pace.of_a_place is None
    pace.add(200.0)
    assert (pace.of_a_place, pace.tokens_per_s) == (5.0, 20.0)
    assert pace.believed(46.0) == pytest.approx((200.0 + 46.0) / 41.0)
    pace.elapse(105.0, 9)
    assert pace.of_a_place == 5.0, "time does not run back"
    pace.elapse(105.0 + HALF_LIFE_S, 0)
    assert (pace.of_a_place, pace.tokens_per_s) == (5.0, 20.0), "without rows it only ages"
    assert pace.believed(46.0) == pytest.approx((100.0 + 46.0) / 21.0)
    pace.elapse(106.0 + HALF_LIFE_S, 2)
    kept = 0.5 ** (1 / HALF_LIFE_S)
    assert pace.of_a_place == pytest.approx(100.0 * kept / (20.0 * kept + 2.0))


def test_a_server_that_was_never_measured_has_the_pace_of_the_others() -> None:
    def test() -> None:
        fast, fresh = member(places=2), member(places=4)
        assert load_of(fresh, usual_pace([fresh])).tokens_per_s == 4.0
        fast.pace.elapse(0.0, 1)
        fast.pace.elapse(10.0, 1)
        fast.pace.add(500.0)
        row = Errand(
            call=call(), on_tokens=None, asked=UnplacedRow(0, (7, 8), 1.0),
            turn=asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        fresh.enqueue(row, 30.0, 0)
        load = load_of(fresh, usual_pace([fast, fresh]))
        assert (load.tokens_per_s, load.tokens, load.coming) == (200.0, 30.0, {7, 8})
        assert load_of(fresh, 1.0, with_queue=False).coming == set()
        fresh.tokens = -1.0
        assert load_of(fresh, usual_pace([fast, fresh])).tokens == 0.0

    in_loop(test)


def test_a_row_is_late_where_another_server_would_be_done_in_half_the_time() -> None:
    """Times are of a row of 100 tokens: 20 s here and, begun anew, 5 s there; one second is to spare."""

    def test() -> None:
        slow, row = member(), errand()
        slow.running.add(row)
        row.charge = 100.0
        assert late_rows(slow, 20.0, now=0.0) == [], "it was never measured"
        slow.pace.elapse(0.0, 1)
        slow.pace.elapse(20.0, 1)
        slow.pace.add(100.0)
        assert late_rows(slow, 20.0, now=8.9) == [row]
        assert late_rows(slow, 20.0, now=9.0) == []
        row.sent_at = 5.0
        assert late_rows(slow, 20.0, now=13.9) == [row]
        assert late_rows(slow, 8.0, now=5.0) == []
        row.moves = 2
        assert late_rows(slow, 20.0, now=5.0) == []

    in_loop(test)


def completion(tokens: int) -> Completion:
    return Completion(
        choices=[Choice(text="", finish_reason="stop")], prompt_tokens=1, completion_tokens=tokens,
        cached_tokens=0, model="m",
    )  # fmt: skip


def test_an_answer_is_taken_to_be_as_long_as_others_or_as_its_limit() -> None:
    length = AnswerLength()
    assert length.asked(3, call(), None) == UnplacedRow(3, length.asked(0, call(), None).key, FIRST_TOKENS)
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        assert length.asked(0, call(**{name: 9}), None).tokens == 9
        assert length.asked(0, call(**{name: "9"}), None).tokens == FIRST_TOKENS
    length.answered(completion(40))
    assert length.asked(0, call(), None).tokens == 40
    length.answered(completion(60))
    assert length.asked(0, call(), None).tokens == pytest.approx(41.0)
    resumed = Call(key="a", url=Url.CHAT, body=call().body, resume_from=(1,) * 30)
    assert length.asked(0, resumed, None).tokens == pytest.approx(11.0)
    begun = Call(key="a", url=Url.CHAT, body=call(max_tokens=5).body, resume_from=(1,) * 5)
    assert length.asked(0, begun, None).tokens == 1.0
    keyed = length.asked(0, call("x" * 640, max_tokens=10), 16)
    assert keyed.tokens == 18.0
    assert 9 <= len(keyed.key) <= 11
    assert len(length.asked(0, call("x" * 640_000), 16).key) == 256


def test_a_group_is_cut_where_its_prompts_part_first() -> None:
    rows = [UnplacedRow(n, key, 1.0) for n, key in enumerate([(1, 2, 3), (1, 2, 4), (1, 5), (1, 5)])]
    assert parts(rows) == [rows[:2], rows[2:]]
    assert parts(rows[2:]) == [rows[2:3], rows[3:]], "halves, if they are equal"


def test_the_blocks_used_last_are_taken_to_be_cached() -> None:
    cached = CachedPrefixes(3)
    cached.add([1, 2, 3])
    assert [block in cached for block in (1, 2, 3)] == [True, True, True]
    cached.add([1, 4])
    assert [block in cached for block in (1, 2, 3, 4)] == [True, True, False, True]


def test_no_rows_are_no_pieces() -> None:
    assert pieces([], servers=2, block_tokens=16) == []


# A fleet.


def test_a_fleet_has_places_for_rows_that_wait_unless_it_is_one_server() -> None:
    async def run() -> None:
        for servers, capacity in (([ModelledServer(A)], 8), ([ModelledServer(A), ModelledServer(B)], 48)):
            fleet = fleet_of(*servers)
            assert fleet.capacity == 0
            await fleet.start()
            assert fleet.capacity == capacity
            await fleet.close()

    virtual_time.run(run())


def test_a_fleet_says_which_step_it_is_at_until_a_server_is_ready() -> None:
    async def run() -> None:
        changing, steps = ChangingList(), []
        fleet = fleet_of(ModelledServer(A), ModelledServer(B), changing=changing)
        for urls in ([], [A], [A, B]):
            changing.urls = urls
            await fleet._look()
            steps.append(fleet.doing)
        await fleet.start()
        steps.append(fleet.doing)
        await fleet.close()
        assert steps == [
            "waiting for a first server",
            f"asking {A} what it serves",
            "asking 2 servers what they serve",
            None,
        ]

    virtual_time.run(run())


def test_what_a_server_has_to_say_is_said_once_when_it_is_ready() -> None:
    async def run() -> list[str]:
        said: list[str] = []
        servers = [ModelledServer(A), ModelledServer(B)]
        servers[1].notice = f"{B} is stock vLLM"
        fleet = fleet_of(*servers, say=said.append)
        await fleet.start()
        await fleet.start()
        await asyncio.sleep(5.0)
        await fleet.close()
        return said

    assert sorted(virtual_time.run(run())) == [f"{A} is ready", f"{B} is stock vLLM"]


def test_a_silent_server_is_asked_for_a_sign_of_life_every_five_seconds() -> None:
    async def run() -> list[float]:
        asked: list[float] = []

        class Asked(ModelledServer):
            async def alive(self) -> bool:
                asked.append(now_s() - begun)
                return True

        fleet = fleet_of(Asked(A, streams=False, tokens_per_s=0.5))
        await fleet.start()
        begun = now_s()
        await fleet.complete(call("x" * 40, max_tokens=3))
        await fleet.close()
        return asked

    moments = virtual_time.run(run())
    assert moments[0] == pytest.approx(CHECK_S + 0.5, abs=0.6)
    assert [later - one for one, later in pairwise(moments)] == pytest.approx(
        [CHECK_S] * (len(moments) - 1), abs=0.6
    )
    assert len(moments) >= 4


@pytest.mark.parametrize(("undrained", "begun"), [(True, 1), (False, 2)])
def test_a_server_that_is_undrained_in_time_keeps_its_rows(undrained: bool, begun: int) -> None:
    """Rows without tokens have ten seconds to end."""

    async def run() -> int:
        first, second = ModelledServer(A, streams=False, tokens_per_s=0.5), ModelledServer(B)
        changing = ChangingList(A)
        fleet = fleet_of(first, second, changing=changing)
        await fleet.start()
        asking = asyncio.create_task(fleet.complete(call("x", max_tokens=8)))
        await asyncio.sleep(0.5)
        changing.urls = [A, B]
        await fleet._look()
        fleet.drain([A])
        await asyncio.sleep(DRAIN_S / 2)
        if undrained:
            fleet.drain([])
        await asking
        await fleet.close()
        return first.begun + second.begun

    assert virtual_time.run(run()) == begun


def test_rows_wait_for_servers_that_asked_to_slow_down() -> None:
    async def run() -> float:
        servers = [ModelledServer(A), ModelledServer(B)]
        fleet = fleet_of(*servers)
        await fleet.start()
        for server in servers:
            server.failing = lambda: EndpointBusy("slow down", retry_after_s=3.0)
        asking = asyncio.create_task(fleet.complete(call()))
        begun = now_s()
        await asyncio.sleep(1.0)
        for server in servers:
            server.failing = None
        assert {seen.state for seen in fleet.sightings()} == {"busy"}
        await asking
        waited = now_s() - begun
        await fleet.close()
        return waited

    assert 3.0 <= virtual_time.run(run()) < 4.0


def test_the_states_of_its_servers_are_the_error_of_a_fleet_that_takes_no_rows() -> None:
    def test() -> None:
        servers = Membership(Joined([]), lambda url: ModelledServer(url), model="m", say=lambda _: None)  # type: ignore[arg-type,return-value]
        assert str(servers.none_left(0.0)) == "no server is listed"
        for url in (A, B):
            servers.by_url[url] = Member(url, ModelledServer(url))
        assert str(servers.none_left(0.0)) == "no server takes rows (2 starting)"
        servers.by_url[A].error = EndpointFault("odd")
        assert str(servers.none_left(0.0)) == "no server takes rows (1 down, 1 starting)"
        del servers.by_url[B]
        assert str(servers.none_left(0.0)) == "odd"
        servers.by_url[A].error = EndpointUnusable("odd", status=401)
        assert servers.none_left(0.0).status == 401
        servers.by_url[A].drained = True
        assert str(servers.none_left(0.0)) == "no server takes rows (1 drained)"

    in_loop(test)


def test_sightings_tell_what_a_harvester_sees_of_each_server() -> None:
    async def run() -> None:
        servers = [ModelledServer(A, places=1, tokens_per_s=1.0), ModelledServer(B, num_blocks=9)]
        servers[1].up = False
        fleet = fleet_of(*servers)
        await fleet.start()
        assert fleet.kv_cache == KvCache(block_tokens=16, num_blocks=4096)
        tasks = [asyncio.create_task(fleet.complete(call(f"row {n}"))) for n in range(3)]
        await asyncio.sleep(0.1)
        one, other = fleet.sightings()
        assert (one.url, one.state, one.model, one.alive, one.in_flight, one.waiting) == (
            A, "serving", "m", True, 1, 2,
        )  # fmt: skip
        assert (one.why, other.state, other.alive, other.in_flight) == (None, "down", False, 0)
        assert other.why == f"{B} does not answer"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.close()

    virtual_time.run(run())


def test_a_patient_fleet_waits_for_a_server_and_another_names_the_cause() -> None:
    async def run() -> None:
        said: list[str] = []
        server = ModelledServer(A)
        server.up = False
        with pytest.raises(EndpointUnusable, match="does not answer"):
            await fleet_of(server).start()
        fleet: Fleet = fleet_of(server, patient=True, say=said.append)
        asyncio.get_running_loop().call_later(7.0, setattr, server, "up", True)
        begun = now_s()
        await fleet.start()
        assert 7.0 <= now_s() - begun < 13.0
        assert said[0] == f"{A} does not answer; waiting for one"
        await fleet.close()

    virtual_time.run(run())


# Rows that go elsewhere, and rows that are withdrawn.


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({}, True),
        ({"waits": True}, False),
        ({"suspected": True}, False),
        ({"held_until": 9.0}, False),
        ({"busy": True}, False),
        ({"measured": False}, False),
    ],
)
def test_a_server_with_nothing_to_run_takes_rows_of_a_slow_one_once_none_waits(
    changes: dict[str, Any], moved: bool
) -> None:
    async def run() -> None:
        slow, idle, row = member(), member(places=1), errand()
        rows = [row, errand()]
        for one in rows:
            one.task = asyncio.ensure_future(asyncio.sleep(99.0))  # type: ignore[arg-type]
            one.charge = 100.0
        slow.running.update(rows)
        for server, tokens in ((slow, 10.0), (idle, 1000.0)):
            if server is slow or changes.get("measured", True):
                server.pace.elapse(0.0, 1)
                server.pace.elapse(1.0, 1)
                server.pace.add(tokens)
        idle.suspected = changes.get("suspected", False)
        idle.held_until = changes.get("held_until", 0.0)
        if changes.get("busy"):
            idle.running.add(errand())
        servers = SimpleNamespace(open=lambda: [slow, idle])
        dispatch = SimpleNamespace(waits=changes.get("waits", False))
        Care(servers, dispatch).hurry(1.0)  # type: ignore[arg-type]
        assert [one.recalled for one in rows].count(True) == (1 if moved else 0), "as many as it has places"
        assert sum(one.moves for one in rows) == (1 if moved else 0)

    virtual_time.run(run())


def test_rows_wait_for_a_server_that_they_do_not_come_from() -> None:
    async def run() -> None:
        fleet = fleet_of(ModelledServer(A, places=99), ModelledServer(B, places=1))
        await fleet.start()
        first, second = fleet.servers
        rows = [errand(number=number) for number in range(3)]
        rows[1].avoid, rows[2].avoid = frozenset({first}), frozenset({first, second})
        fleet._dispatch._place(rows, [first, second])
        assert list(first.queue) == [rows[0], rows[2]], "a row that comes from all goes to any"
        assert list(second.queue) == [rows[1]]
        await fleet.close()

    virtual_time.run(run())


def test_rows_that_are_withdrawn_while_they_wait_leave_nothing_to_take_over() -> None:
    async def run() -> None:
        broken: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
        fleet = fleet_of(ModelledServer(A, places=1), ModelledServer(B, places=1))
        await fleet.start()
        first, _ = fleet.servers
        rows = [errand(number=number) for number in range(3)]
        for row in rows:
            first.enqueue(row, 10.0, 0)
        first.running.add(errand())
        for row in rows:
            row.turn.cancel()
        fleet._dispatch.soon()
        await asyncio.sleep(1.0)
        assert broken == []
        assert (len(first.queue), first.tokens) == (0, 0.0)
        await fleet.close()

    virtual_time.run(run())


def test_a_row_that_is_withdrawn_in_the_instant_of_its_turn_frees_its_place() -> None:
    async def run() -> None:
        fleet = fleet_of(ModelledServer(A, places=1))
        await fleet.start()
        (server,) = fleet.servers
        asking = asyncio.create_task(fleet.complete(call()))
        send = fleet._dispatch._send

        def then_withdraw(*arguments: Any) -> None:
            send(*arguments)
            asking.cancel()

        fleet._dispatch._send = then_withdraw  # type: ignore[method-assign]
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()
        assert (server.running, server.tokens) == (set(), 0.0)
        await fleet.close()

    virtual_time.run(run())


def test_tokens_that_a_row_brought_along_are_no_pace_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []
    monkeypatch.setattr(Pace, "add", lambda _, tokens: counted.append(tokens))

    async def run() -> Completion:
        fleet = fleet_of(ModelledServer(A))
        await fleet.start()
        text = "x" * 400
        ids = answer_tokens(request_text(call(text).body), 24)
        asked = replace(call(text, max_tokens=24), resume_from=tuple(ids[:10]))
        answer = await fleet.complete(asked, lambda tokens: None)
        await fleet.close()
        return answer

    answer = virtual_time.run(run())
    assert counted == [answer.prompt_tokens + 14]


@pytest.mark.parametrize(
    ("error", "starts", "state"),
    [
        (EndpointBusy("slow down", retry_after_s=2.0), 1, "busy"),
        (EndpointFault("garbage"), 1, "serving"),
        (EndpointUnavailable("broken connection"), 2, "busy"),
    ],
)
def test_a_server_is_reached_anew_only_where_its_connection_broke(
    error: Exception, starts: int, state: str
) -> None:
    async def run() -> tuple[int, str]:
        started: list[float] = []

        class Counted(ModelledServer):
            async def start(self) -> None:
                started.append(now_s())
                await super().start()

        servers = [Counted(A), ModelledServer(B)]
        servers[0].failing = lambda: error
        fleet = fleet_of(*servers)
        await fleet.start()
        fleet.servers.by_url[B].held_until = now_s() + 0.1
        await asyncio.gather(fleet.complete(call()), return_exceptions=True)
        state = fleet.sightings()[0].state
        await fleet.close()
        return len(started), state

    assert virtual_time.run(run()) == (starts, state)


def test_the_list_of_servers_is_read_as_often_as_it_asks_for() -> None:
    async def run() -> int:
        looked: list[float] = []

        class Counted(ChangingList):
            async def look(self) -> list[str]:
                looked.append(now_s())
                return await super().look()

        fleet = fleet_of(ModelledServer(A), changing=Counted(A))
        await fleet.start()
        await asyncio.sleep(12.0)
        await fleet.close()
        return len(looked)

    assert 8 <= virtual_time.run(run()) <= 13


def test_a_row_that_is_withdrawn_while_it_runs_is_asked_nowhere_else() -> None:
    async def run() -> None:
        servers = [ModelledServer(A, tokens_per_s=1.0), ModelledServer(B, tokens_per_s=1.0)]
        fleet = fleet_of(*servers)
        await fleet.start()
        asking = asyncio.create_task(fleet.complete(call()))
        await asyncio.sleep(1.0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()
        await asyncio.sleep(1.0)
        assert sum(server.begun for server in servers) == 1
        assert sum(server.running for server in servers) == 0
        await fleet.close()

    virtual_time.run(run())


def test_the_prefix_cache_of_a_fleet_is_its_largest() -> None:
    async def run() -> int | None:
        fleet = fleet_of(ModelledServer(A, num_blocks=10), ModelledServer(B, num_blocks=99))
        assert fleet.kv_cache == KvCache()
        await fleet.start()
        await asyncio.sleep(0.1)
        found = fleet.kv_cache.num_blocks
        await fleet.close()
        return found

    assert virtual_time.run(run()) == 99


def test_a_server_that_leaves_the_list_is_closed_and_one_out_of_reach_is_named_once() -> None:
    async def run() -> None:
        closed: list[str] = []
        said: list[str] = []

        class Counted(ModelledServer):
            async def close(self) -> None:
                closed.append(self.url)

        servers = [Counted(A), Counted(B)]
        servers[1].up = False
        changing = ChangingList(A, B)
        fleet = fleet_of(*servers, changing=changing, say=said.append)
        await fleet.start()
        await asyncio.sleep(20.0)
        assert said.count(f"{B} does not answer") == 1
        changing.urls = [A]
        await asyncio.sleep(3.0)
        assert closed == [B]
        await fleet.close()
        assert closed == [B, A]

    virtual_time.run(run())


# Care, with servers and rows that no event loop moves.


async def runs(server: Member, *rows: Errand) -> None:
    """Let a server run these rows, none of which ends by itself."""
    for row in rows:
        row.task = asyncio.ensure_future(asyncio.sleep(1e6))  # type: ignore[arg-type]
        row.charge = 100.0
    server.running.update(rows)


def paced(server: Member, tokens_per_s: float) -> Member:
    """A server of whose places this pace was measured."""
    server.pace.elapse(0.0, 1)
    server.pace.elapse(1.0, 1)
    server.pace.add(tokens_per_s)
    return server


class Cared:
    """Care of these servers, and what was said about them."""

    def __init__(self, *servers: Member) -> None:
        self.lost: list[tuple[Member, str]] = []
        known = SimpleNamespace(
            model="m",
            open=lambda: [one for one in servers if one.is_open],
            lost=lambda one, why: self.lost.append((one, str(why))),
        )
        self.care = Care(known, SimpleNamespace(waits=False))  # type: ignore[arg-type]


def test_a_server_with_nothing_to_run_takes_rows_of_one_slow_server_at_a_time() -> None:
    async def run() -> list[int]:
        slow = [paced(member(), 10.0) for _ in range(2)]
        rows = [[errand(), errand()] for _ in slow]
        for server, its in zip(slow, rows, strict=True):
            await runs(server, *its)
        Cared(*slow, paced(member(places=2), 1000.0)).care.hurry(1.0)
        return [sum(row.recalled for row in its) for its in rows]

    assert virtual_time.run(run()) == [2, 0]


def test_a_slow_server_without_late_rows_keeps_an_idle_one_from_no_other() -> None:
    async def run() -> list[bool]:
        busy, slow, rows = paced(member(), 900.0), paced(member(), 10.0), [errand(), errand()]
        await runs(busy, rows[0])
        await runs(slow, rows[1])
        Cared(busy, slow, paced(member(), 1000.0)).care.hurry(1.0)
        return [row.recalled for row in rows]

    assert virtual_time.run(run()) == [False, True]


@pytest.mark.parametrize(("another", "at_once"), [(True, [True, False]), (False, [False, False])])
def test_rows_of_a_drained_server_go_at_once_if_they_lose_no_token_and_all_in_ten_seconds(
    another: bool, at_once: list[bool]
) -> None:
    async def run() -> None:
        drained, rows = member(), [errand(), errand()]
        await runs(drained, *rows)
        rows[0].tokens = [1, 2]
        drained.drained = True
        care = Cared(drained, *[member()] * another).care
        care.release(drained, 100.0)
        assert [row.recalled for row in rows] == at_once
        care.tend(drained, 100.0 + DRAIN_S - 0.1)
        assert [row.recalled for row in rows] == at_once
        care.tend(drained, 100.0 + DRAIN_S)
        assert [row.recalled for row in rows] == [True, True]

    virtual_time.run(run())


def test_a_server_that_is_undrained_keeps_the_rows_that_it_runs() -> None:
    async def run() -> None:
        server, row = member(), errand()
        await runs(server, row)
        care = Cared(server, member()).care
        server.drained = True
        care.release(server, 90.0)
        server.drained = False
        care.release(server, 95.0)
        care.tend(server, 1000.0)
        assert not row.recalled

    virtual_time.run(run())


@pytest.mark.parametrize(
    ("changes", "now", "silent"),
    [
        ({}, 110.0, False),
        ({}, 110.1, True),
        ({"others_took": (1.0, 10.0, 2.0)}, 130.0, False),
        ({"others_took": (1.0, 10.0, 2.0)}, 130.1, True),
        ({"others_took": ()}, 999.0, False),
        ({"other_suspected": True}, 999.0, False),
        ({"other_closed": True}, 999.0, False),
        ({"ready": False}, 999.0, False),
        ({"seen_at": None}, 999.0, False),
        ({"moves": (2, 2)}, 140.0, False),
        ({"moves": (2, 2)}, 140.1, True),
        ({"moves": (2, 1)}, 120.0, False),
        ({"moves": (2, 1)}, 120.1, True),
        ({"moves": (5, 6)}, 421.0, True),
        ({"moves": None}, 999.0, False),
    ],
)
def test_a_server_is_silent_if_it_brings_nothing_for_far_longer_than_rows_take_elsewhere(
    changes: dict[str, Any], now: float, silent: bool
) -> None:
    async def run() -> None:
        quiet, other = member(), member()
        moves = changes.get("moves", (0, 0))
        rows = [errand() for _ in moves or ()]
        await runs(quiet, *rows)
        for row, moved in zip(rows, moves or (), strict=True):
            row.moves = moved
        quiet.seen_at = changes.get("seen_at", 100.0)
        quiet.ready = changes.get("ready", True)
        quiet.times_s.append(0.1)
        other.times_s.extend(changes.get("others_took", (1.0,)))
        other.suspected = changes.get("other_suspected", False)
        other.drained = changes.get("other_closed", False)
        cared = Cared(quiet, other)
        cared.care.tend(quiet, now)
        assert quiet.suspected is silent
        said = [(quiet, f"{A} fell silent with {len(rows)} rows in flight")]
        assert cared.lost == (said if silent else [])
        left = [silent and now - 100.0 > 10.0 * 2**moved for moved in moves or ()]
        if "others_took" in changes:
            left = [silent] * 2
        assert [row.recalled for row in rows] == left
        assert [row.moves for row in rows] == [
            moved + one for moved, one in zip(moves or (), left, strict=True)
        ]

    virtual_time.run(run())


@pytest.mark.parametrize(
    ("changes", "gone"), [({}, True), ({"alone": True}, False), ({"ready": False}, False)]
)
def test_a_server_that_owes_two_signs_of_life_is_out_of_reach_if_there_is_another(
    changes: dict[str, bool], gone: bool
) -> None:
    async def run() -> None:
        quiet, row = member(), errand()
        await runs(quiet, row)
        endpoint: Any = quiet.endpoint
        cared = Cared(quiet, *[member()] * (not changes.get("alone")))
        endpoint.responds = False
        await cared.care.check(quiet)
        endpoint.responds = True
        await cared.care.check(quiet)
        assert quiet.misses == 0, "it gave a sign"
        endpoint.responds = False
        await cared.care.check(quiet)
        assert (quiet.ready, row.recalled, cared.lost) == (True, False, [])
        quiet.ready = changes.get("ready", True)
        await cared.care.check(quiet)
        said = f"{A} does not answer"
        assert cared.lost == ([(quiet, said)] if gone else [])
        assert row.recalled is gone
        assert quiet.why == (said if gone else None)

    virtual_time.run(run())


def test_a_server_that_can_give_no_sign_of_life_owes_none() -> None:
    class Mute(Endpoint):
        capacity = 1

    async def run() -> None:
        mute = Member(A, Mute())
        for _ in range(3):
            await Cared(mute, member()).care.check(mute)
        assert mute.misses == 0

    virtual_time.run(run())


# Dispatch, with servers that send nothing.


class Known(list[Member]):
    """Servers of a dispatch; a block is 16 tokens."""

    kv_cache = KvCache(block_tokens=16)
    model = "m"

    def open(self) -> list[Member]:
        return [one for one in self if one.is_open]

    def none_left(self, now: float) -> EndpointUnavailable:
        return EndpointUnavailable(f"none at {now}")


def dispatched(test: Callable[[], Any]) -> None:
    """Run a test of a dispatch, which places rows once the loop is free."""

    async def run() -> None:
        await test()

    virtual_time.run(run())


def sent(*rows: Errand) -> list[Member | None]:
    """The servers that rows were sent to."""
    return [row.turn.result() if row.turn.done() else None for row in rows]


def test_rows_wait_until_they_are_sent() -> None:
    async def test() -> None:
        server, rows = member(places=1), [errand(number=n) for n in range(2)]
        dispatch = Dispatch(Known([server]))  # type: ignore[arg-type]
        assert not dispatch.waits
        dispatch.add(*rows)
        assert dispatch.waits
        await asyncio.sleep(0)
        assert sent(*rows) == [server, None]
        assert dispatch.waits
        server.running.clear()
        dispatch.soon()
        await asyncio.sleep(0)
        assert sent(*rows) == [server, server]
        assert not dispatch.waits
        assert server.seen_at == now_s(), "silence counts from its first row"

    dispatched(test)


@pytest.mark.parametrize(("held_s", "taken"), [(0.0, True), (0.1, False)])
def test_a_server_takes_rows_from_the_end_of_its_hold_on(held_s: float, taken: bool) -> None:
    async def test() -> None:
        server, row = member(), errand()
        server.held_until = now_s() + held_s
        dispatch = Dispatch(Known([server]))  # type: ignore[arg-type]
        dispatch.add(row)
        await asyncio.sleep(0)
        assert sent(row) == [server if taken else None]
        assert dispatch.waits is not taken

    dispatched(test)


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ("held", "open", "second"),
        ("held", "drained", "first's queue"),
        ("held", None, "first's queue"),
        ("drained", "open", "second"),
        ("drained", "held", "nowhere yet"),
        ("drained", None, "error"),
        ("drained", "drained", "error"),
    ],
)
def test_rows_that_wait_for_a_server_that_takes_none_go_to_another_if_there_is_one(
    first: str, second: str | None, where: str
) -> None:
    async def test() -> None:
        servers = [member(), *([member()] if second else [])]
        for server, state in zip(servers, (first, second), strict=False):
            server.drained = state == "drained"
            server.held_until = now_s() + 9.0 if state == "held" else 0.0
        row = errand()
        servers[0].enqueue(row, 10.0, 0)
        dispatch = Dispatch(Known(servers))  # type: ignore[arg-type]
        dispatch.soon()
        await asyncio.sleep(0)
        if where == "error":
            assert str(row.turn.exception()) == f"none at {now_s()}"
        else:
            assert sent(row) == [servers[-1] if where == "second" else None]
        assert list(servers[0].queue) == ([row] if where == "first's queue" else [])
        assert dispatch.waits is (where in ("first's queue", "nowhere yet"))

    dispatched(test)


def test_a_row_that_is_withdrawn_before_it_is_placed_waits_nowhere() -> None:
    async def test() -> None:
        server, rows = member(places=1), [errand(number=n) for n in range(2)]
        dispatch = Dispatch(Known([server]))  # type: ignore[arg-type]
        dispatch.add(*rows)
        rows[0].turn.cancel()
        await asyncio.sleep(0)
        assert sent(rows[1]) == [server]
        assert (len(server.queue), server.running) == (0, {rows[1]})

    dispatched(test)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [({}, 2), ({"suspected": True}, 1), ({"slow": True}, 0), ({"slow": True, "suspected": True}, 1)],
)
def test_a_server_with_places_takes_half_of_the_last_piece_of_the_slowest_if_that_pays(
    changes: dict[str, bool], taken: int
) -> None:
    async def test() -> None:
        slow, idle = paced(member(places=1), 10.0), paced(member(), 1000.0)
        if changes.get("slow"):
            idle = paced(member(places=1), 0.1)
        idle.suspected = changes.get("suspected", False)
        rows = [errand(number=n) for n in range(6)]
        slow.running.add(rows[0])
        for row in rows[1:]:
            slow.enqueue(row, 10.0, 0)
        Dispatch(Known([slow, idle])).soon()  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert list(slow.queue) == rows[1 : 6 - taken]
        assert sent(*rows[6 - taken :]) == [idle] * taken
        assert slow.tokens == 10.0 * len(slow.queue)

    dispatched(test)


def test_what_one_server_with_places_does_not_take_the_next_may() -> None:
    """One that is suspected takes a single row, and leaves the others as they were."""

    async def test() -> None:
        slow, lame = paced(member(places=1), 10.0), paced(member(places=1), 0.1)
        suspected, fast = paced(member(), 0.1), paced(member(), 1000.0)
        suspected.suspected = True
        rows = [errand(number=n) for n in range(7)]
        slow.running.add(rows[0])
        for row in rows[1:]:
            slow.enqueue(row, 10.0, 0)
        Dispatch(Known([slow, lame, suspected, fast])).soon()  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert [len(one.running) for one in (slow, lame, suspected, fast)] == [1, 0, 1, 2]
        assert len(slow.queue) == 3
        assert slow.tokens == 10.0 * len(slow.queue)

    dispatched(test)


def test_a_dispatch_looks_through_all_servers_a_few_times_however_many_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[str] = []

    class Counting(Known):
        def open(self) -> list[Member]:
            looks.append("open")
            return super().open()

    def counted(takers: Sequence[Member]) -> float:
        looks.append("pace")
        return usual_pace(takers)

    monkeypatch.setattr(dispatch, "usual_pace", counted)

    async def test() -> None:
        slow, idle = paced(member(places=1), 10.0), [paced(member(places=1), 0.1) for _ in range(30)]
        slow.running.add(errand())
        slow.enqueue(errand(number=1), 10.0, 0)
        Dispatch(Counting([slow, *idle])).soon()  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert len(slow.queue) == 1, "none is faster"

    dispatched(test)
    assert (looks.count("pace"), looks.count("open")) == (1, 1)


def test_a_server_that_is_not_silent_is_compared_with_no_other() -> None:
    async def run() -> None:
        served = member()
        await runs(served, errand())
        served.seen_at = 100.0
        Care(SimpleNamespace(open=None), SimpleNamespace()).tend(served, 109.0)  # type: ignore[arg-type]
        assert not served.suspected

    virtual_time.run(run())


def test_rows_of_a_piece_are_charged_with_their_part_of_its_prefixes() -> None:
    async def test() -> None:
        first, second = member(places=1), member(places=1)
        first.running.add(errand())
        second.running.add(errand())
        rows = [errand(number=n) for n in range(3)]
        for row, key in zip(rows, [(1, 2, 3), (1, 2, 4), (9,)], strict=True):
            row.asked = UnplacedRow(row.asked.number, key, 10.0)
        Dispatch(Known([first, second])).add(*rows)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert [row.charge for row in rows] == [10.0 + 32.0, 10.0 + 32.0, 10.0 + 16.0]
        assert rows[0].piece == rows[1].piece != rows[2].piece

    dispatched(test)


# Errors of servers, judged one by one.

BUSY, FAULT = EndpointBusy("slow down", retry_after_s=5.0), EndpointFault("garbage")
UNUSABLE, DIED, REJECTED = EndpointUnusable("no such model"), EngineDied("gone"), RequestRejected("too long")


@pytest.mark.parametrize(
    ("errors", "others", "raised", "state"),
    [
        ([REJECTED], "open", RequestRejected, "serving"),
        ([FAULT, FAULT], "open", EndpointFault, "serving"),
        ([FAULT, FAULT, FAULT], "open", EndpointFault, "suspected"),
        ([FAULT, FAULT, FAULT], "none", EndpointFault, "serving"),
        ([BUSY], "open", None, "busy"),
        ([BUSY], "none", EndpointBusy, "serving"),
        ([BUSY], "drained", EndpointBusy, "serving"),
        ([UNUSABLE], "open", None, "down"),
        ([UNUSABLE], "none", EndpointUnusable, "down"),
        ([UNUSABLE], "drained", EndpointUnavailable, "down"),
        ([DIED], "open", EngineDied, "down"),
        ([DIED], "none", EngineDied, "down"),
    ],
)
def test_an_error_is_the_rows_or_its_servers_and_then_another_server_is_asked(
    errors: list[EndpointError], others: str, raised: type[EndpointError] | None, state: str
) -> None:
    async def run() -> None:
        fleet = fleet_of(*[ModelledServer(url) for url in ((A,) if others == "none" else (A, B))])
        await fleet.start()
        await asyncio.sleep(0.1)
        if others == "drained":
            fleet.drain([B])
        server, row = fleet.servers.by_url[A], errand()
        found: type[EndpointError] | None = None
        for error in errors:
            try:
                await fleet._judge(row, server, error)
            except EndpointError as judged:
                found = type(judged)
        assert found is raised
        assert row.avoid == (frozenset() if raised else {server})
        assert server.state("m", now_s()).value == state
        assert server.refuses is (errors == [UNUSABLE])
        if state == "busy":
            assert server.held_until == now_s() + 5.0
        await fleet.close()

    virtual_time.run(run())


def test_many_rows_that_a_server_dies_with_are_one_incident() -> None:
    async def run() -> None:
        fleet = fleet_of(ModelledServer(A), ModelledServer(B))
        await fleet.start()
        server = fleet.servers.by_url[A]
        for _ in range(5):
            with pytest.raises(EngineDied):
                await fleet._judge(errand(), server, DIED)
        assert server.try_at == now_s() + 0.5
        await fleet.close()

    virtual_time.run(run())


async def begun(*, up: bool, others: bool) -> Fleet:
    """Start a fleet of A, with `others` of B too; A is `up` or not from then on."""
    servers = [ModelledServer(url) for url in (A, B)[: 1 + others]]
    fleet = fleet_of(*servers)
    await fleet.start()
    await asyncio.sleep(0.1)
    servers[0].up = up
    return fleet


@pytest.mark.parametrize(("up", "others", "losses"), [(False, True, 1), (True, True, 0), (True, False, 0)])
def test_a_row_counts_the_servers_that_went_down_with_it_and_not_those_that_answer_again(
    up: bool, others: bool, losses: int
) -> None:
    async def run() -> None:
        fleet = await begun(up=up, others=others)
        server, row = fleet.servers.by_url[A], errand()
        judged = fleet._judge(row, server, EndpointUnavailable("broken connection"))
        with nullcontext() if others else pytest.raises(EndpointUnavailable):
            await judged
        assert (row.losses, server.ready) == (losses, up)
        assert server.held_until == (now_s() + 1.0 if up and others else 0.0), "it is tried again in a second"
        row.losses = 2
        if not up:
            with pytest.raises(EngineDied, match="3 servers went down with this row in flight: broken"):
                await fleet._judge(row, server, EndpointUnavailable("broken connection"))
        await fleet.close()

    virtual_time.run(run())


@pytest.mark.parametrize(
    ("up", "others", "state", "losses"),
    [(False, True, "down", 1), (True, True, "suspected", 0), (True, False, "serving", 0)],
)
def test_a_row_with_which_a_server_was_lost_goes_back_to_the_store_and_not_to_another_server(
    up: bool, others: bool, state: str, losses: int
) -> None:
    async def run() -> None:
        fleet = await begun(up=up, others=others)
        server, row = fleet.servers.by_url[A], errand()
        with pytest.raises(ServerLost):
            await fleet._judge(row, server, ServerLost("gone"))
        assert (server.state("m", now_s()).value, row.losses) == (state, losses)
        await fleet.close()

    virtual_time.run(run())


# The servers of a list.

C = "http://gpu-c:8000"


class Listed:
    """A membership over a list that a test changes, and what it says."""

    def __init__(self, *urls: str, model: str | None = None, **endpoints: ModelledServer) -> None:
        self.urls, self.failure, self.said, self.warned = list(urls), None, list[str](), list[str]()
        servers = {A: ModelledServer(A), B: ModelledServer(B), C: ModelledServer(C)} | {
            endpoint.url: endpoint for endpoint in endpoints.values()
        }
        say = self.said.append
        self.servers = Membership(self, servers.__getitem__, model=model, say=say, warn=self._warn)  # type: ignore[arg-type]

    def _warn(self, line: str) -> None:
        self.said.append(line)
        self.warned.append(line)

    async def look(self) -> list[str]:
        return list(self.urls)

    async def reached(self) -> "Listed":
        """The servers are read and reached, the first one first."""
        await self.servers.look()
        for server in self.servers:
            await self.servers.reach(server, now_s())
        return self


def test_a_server_that_leaves_the_list_or_comes_back_is_told_once() -> None:
    async def run() -> None:
        listed = Listed(A, B)
        assert await listed.servers.look() == []
        listed.urls = [B]
        first = listed.servers.by_url[A]
        assert await listed.servers.look() == [first]
        assert await listed.servers.look() == []
        assert not first.listed
        listed.urls = [A, B]
        assert await listed.servers.look() == [first]
        assert listed.servers.by_url[A] is first
        assert listed.said == [
            f"{A} is no longer in the list of servers",
            f"{A} is back in the list of servers",
        ]

    virtual_time.run(run())


def test_a_server_with_a_password_in_its_address_is_known_without_it() -> None:
    async def run() -> None:
        login, made = "http://ann:pass@gpu-a:8000", list[str]()
        changing = ChangingList(login)

        def make(address: str) -> ModelledServer:
            made.append(address)
            return ModelledServer(A)

        fleet = Fleet(Joined([changing]), make)
        fleet.drain([A])
        await fleet._look()
        assert fleet.doing == f"asking {A} what it serves"
        assert [(seen.url, seen.state) for seen in fleet.sightings()] == [(A, "drained")]
        await fleet.start()
        changing.urls = [B]
        await asyncio.sleep(3.0)
        assert (made, [server.url for server in fleet.servers]) == ([login, B], [B])
        await fleet.close()

    virtual_time.run(run())


def test_servers_are_drained_before_they_are_known_too() -> None:
    async def run() -> None:
        listed = Listed(A, B)
        await listed.servers.look()
        assert listed.servers.drain(frozenset({A, C})) == [listed.servers.by_url[A]]
        assert listed.servers.drain(frozenset({A, C})) == []
        listed.urls.append(C)
        await listed.servers.look()
        assert [server.drained for server in listed.servers] == [True, False, True]
        assert listed.servers.drain(frozenset({C})) == [listed.servers.by_url[A]]
        drained = f"{A} is drained; undo it with: conserve fleet undrain {A}"
        assert listed.said == [drained, f"{A} is no longer drained"]

    virtual_time.run(run())


def test_a_list_that_cannot_be_read_is_told_at_each_beginning() -> None:
    async def run() -> None:
        listed = Listed(A)
        for failure in (None, "no file", "no file", "not UTF-8", None, "not UTF-8"):
            listed.failure = failure  # type: ignore[assignment]
            await listed.servers.look()
        known = "; the servers that are known go on"
        assert listed.warned == [f"no file{known}", f"not UTF-8{known}", f"not UTF-8{known}"]

    virtual_time.run(run())


def test_that_a_server_is_lost_is_a_warning_and_that_it_is_back_is_none() -> None:
    async def run() -> None:
        listed = await Listed(A, B).reached()
        (first, _), ready = listed.servers, list(listed.said)
        listed.servers.lost(first, "no route")
        first.fail(EndpointUnavailable("no route"), now_s())
        assert listed.warned == ["no route"]
        assert await listed.servers.reach(first, now_s())
        assert listed.said == [*ready, "no route", f"{first.url} is ready"]
        assert listed.warned == ["no route"]

    virtual_time.run(run())


@pytest.mark.parametrize(("given", "model", "taken"), [(None, "m", [A, C]), ("other", "other", [B])])
def test_rows_are_for_the_model_that_was_given_or_the_first_servers(
    given: str | None, model: str, taken: list[str]
) -> None:
    async def run() -> None:
        listed = await Listed(A, B, C, model=given, second=ModelledServer(B, model="other")).reached()
        assert listed.servers.model == model
        assert [server.url for server in listed.servers.open()] == taken
        others = [line for line in listed.said if "gets no rows" in line]
        assert len(others) == 3 - len(taken)
        first, second = ("other", "m") if given is None else ("m", "other")
        assert f"serves {first} and gets no rows" in others[0]
        assert f"are for {second}; for the others: conserve harvest --model {first}" in others[0]
        listed.urls = [A, B]
        await listed.reached()
        assert listed.servers.model == model, "while a server in the list has it"
        listed.urls = [B] if given is None else [A]
        await listed.reached()
        assert listed.servers.model == "other"

    virtual_time.run(run())


def test_the_identity_of_a_fleet_is_that_of_most_servers_and_outlives_them() -> None:
    async def run() -> None:
        upgraded = [ModelledServer(url, identity="new") for url in (A, C)]
        listed = await Listed(A, B, C, first=upgraded[0], third=upgraded[1]).reached()
        assert listed.servers.identity == "new"
        listed.servers.drain(frozenset({A, C}))
        assert listed.servers.identity == "m"
        listed.servers.drain(frozenset({A, B, C}))
        assert listed.servers.identity == "m"

    virtual_time.run(run())


@pytest.mark.parametrize(("urls", "elsewhere", "said"), [
    ([A], False, []),
    ([A], True, [f"{A} does not answer; its rows go elsewhere"]),
    ([A, B], False, [f"{A} does not answer", f"{B} is ready"]),
])  # fmt: skip
def test_a_server_out_of_reach_is_told_unless_the_caller_is(
    urls: list[str], elsewhere: bool, said: list[str]
) -> None:
    async def run() -> None:
        away = ModelledServer(A)
        away.up = False
        listed = Listed(*urls, first=away)
        await listed.servers.look()
        listed.servers.by_url[A].running.update([errand()] * elsewhere)
        for _ in range(2):
            for server in listed.servers:
                assert await listed.servers.reach(server, now_s(), elsewhere=elsewhere) is (server.url == B)
        assert listed.said == said

    virtual_time.run(run())


def test_a_server_that_takes_longer_than_a_minute_to_say_what_it_serves_does_not_answer() -> None:
    """Under load each of its first answers may wait for seconds behind live requests."""

    class Slow(ModelledServer):
        seconds = START_S + 0.1

        async def start(self) -> None:
            await asyncio.sleep(self.seconds)

        async def version(self) -> str:
            return "0.32"

    async def run() -> None:
        endpoint = Slow(A, num_blocks=7)
        server = Member(A, endpoint)
        assert await asyncio.gather(server.start(now_s()), server.start(now_s())) == [False, False]
        assert (server.why, server.ready, server.version) == (f"{A} does not answer", False, None)
        assert server.try_at - now_s() == pytest.approx(0.5 - START_S, abs=0.01), "one try"
        server.misses, endpoint.seconds = 2, START_S - 0.1
        begun = now_s()
        waiting = asyncio.create_task(server.start(begun))
        await asyncio.sleep(0)
        assert await server.outcome()
        assert await waiting
        assert (server.why, server.ready, server.version, server.misses) == (None, True, "0.32", 0)
        assert server.seen_at == pytest.approx(begun + START_S - 0.1, abs=0.01), "as it answered"
        await server.close()

    virtual_time.run(run())


def test_a_server_that_left_the_list_is_closed_once_its_rows_have_ended() -> None:
    closed: list[str] = []

    class Counted(ModelledServer):
        async def close(self) -> None:
            closed.append(self.url)

    async def run() -> None:
        changing = ChangingList(A)
        fleet = fleet_of(Counted(A, streams=False, tokens_per_s=1.5), Counted(B), changing=changing)
        await fleet.start()
        asking = asyncio.create_task(fleet.complete(call("x", max_tokens=6)))
        await asyncio.sleep(0.1)
        changing.urls = [B]
        await asyncio.sleep(3.0)
        assert (closed, asking.done()) == ([], False)
        await asking
        await asyncio.sleep(1.0)
        assert closed == [A]
        await fleet.close()

    virtual_time.run(run())


@pytest.mark.parametrize(
    ("asks", "identity", "watched"), [(True, "m", True), (False, "m", False), (True, "another", False)]
)
def test_tokens_are_watched_for_a_row_that_asks_for_them_and_can_go_on_from_them(
    asks: bool, identity: str, watched: bool
) -> None:
    heard: list[bool] = []

    class Heard(ModelledServer):
        async def complete(self, call: Call, on_tokens: Any = None) -> Completion:
            heard.append(on_tokens is not None)
            return await super().complete(call, on_tokens)

    async def run() -> None:
        fleet = fleet_of(Heard(A, identity=identity))
        await fleet.start()
        await fleet.complete(call(), (lambda tokens: None) if asks else None)
        await fleet.close()

    virtual_time.run(run())
    assert heard == [watched]


def test_tokens_before_any_time_has_passed_are_no_pace() -> None:
    pace = Pace()
    pace.add(5.0)
    assert pace.of_a_place is None
