"""Many servers behind one harvester, in virtual time: which rows go where, and what becomes of those in flight."""

import asyncio
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from conserve.endpoints.fake import WORDS, answer_tokens, request_text
from conserve.endpoints.protocol import Call, Completion, InFlight, OnTokens, Url
from conserve.errors import (
    EndpointBusy,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    RequestRejected,
)
from conserve.jobs.fleet.care import DRAIN_S
from conserve.jobs.fleet.fleet import now_s
from conserve.jobs.fleet.member import Member, MemberState
from conserve.jobs.harvest import notes as server_notes
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.ledger import Ledger
from conserve.jobs.harvest.notes import ServerNotes, merged, of_this_machine
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.task import Kind, Task
from conserve.jobs.window.prompt_key import prompt_key
from conserve.store.books import catalog
from conserve.store.books import servers as notes
from conserve.store.database.store import Store
from conserve.store.sql.query import views
from tests import virtual_time
from tests.conftest import WriteInput
from tests.modelled_server import ChangingList, ModelledServer, fleet_of
from tests.submitting import submit

TOKENS = 24  # in each answer
TASK = Task(kind=Kind.PROMPT, template="{{ q }}", params={"max_tokens": TOKENS})
A, B, C = (f"http://gpu-{name}:8000" for name in "abc")


def three(**named: Any) -> list[ModelledServer]:
    return [ModelledServer(url, **named) for url in (A, B, C)]


def prompts_of(groups: int, rows: int, *, prefix_chars: int = 2048) -> list[str]:
    """Prompts in groups that share their beginning."""
    return [
        f"group {group:04} ".ljust(prefix_chars, "=") + f" row {row}"
        for group in range(groups)
        for row in range(rows)
    ]


def queue_up(store: Store, write_input: WriteInput, prompts: Sequence[str]) -> str:
    return submit(store, str(write_input("rows.parquet", q=list(prompts))), TASK).job_id


def check(store: Store, job_id: str, prompts: Sequence[str]) -> None:
    """Every row once, with its own answer."""
    with views(store, now=0.0, only=[job_id], sealed=False, uses=lambda empty: {"results"}) as opened:
        rows = opened.duck.execute("select row_index, text, error from results order by 1").fetchall()
    assert rows == [(n, answer_to(prompt), None) for n, prompt in enumerate(prompts)]


def answer_to(prompt: str) -> str:
    return " ".join(WORDS[t] for t in answer_tokens(request_text(TASK.body(prompt)), TOKENS))


def call(text: str) -> Call:
    body = {**TASK.body(text)} if text else {}
    return Call(key=text, url=Url.CHAT, body=body, identity="m")


class Play:
    """A fleet, and things that happen at some second."""

    def __init__(self, servers: Sequence[ModelledServer], changing: ChangingList | None = None) -> None:
        self.said: list[str] = []
        self.fleet = fleet_of(*servers, changing=changing, say=self.said.append)
        self.begun, self.seconds = now_s(), 0.0

    def at(self, seconds: float, happens: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(seconds, happens)

    async def send(self, prompts: Sequence[str]) -> None:
        """Send rows through the fleet as a harvester does, without a store; each has its own answer, once."""
        await self.fleet.start()
        waiting, running = deque(prompts), dict[asyncio.Task[Completion], str]()
        while waiting or running:
            free = self.fleet.capacity - len(running)
            if free >= max(1, self.fleet.capacity // 4):
                rows = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                running |= {asyncio.create_task(self.fleet.complete(call(row), seen)): row for row in rows}
            done, _ = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                assert task.result().choices[0].text == answer_to(running.pop(task))
        await self.fleet.close()
        self.seconds = now_s() - self.begun


def seen(tokens: Sequence[int]) -> None:
    """Tokens are of no interest here; that they are asked for lets rows continue."""


def send(
    servers: Sequence[ModelledServer],
    prompts: Sequence[str],
    happens: Callable[[Play], None] = lambda play: None,
    changing: ChangingList | None = None,
) -> Play:
    """Send rows through a fleet of these servers."""

    async def run() -> Play:
        play = Play(servers, changing)
        happens(play)
        await play.send(prompts)
        return play

    return virtual_time.run(run())


def harvest(
    store: Store,
    servers: Sequence[ModelledServer],
    happens: Callable[[Play], None] = lambda play: None,
    changing: ChangingList | None = None,
    until_s: float | None = None,
) -> Tally:
    """Run a harvester over a fleet of these servers to the end of its queue, or follow the queue for so long."""

    async def run() -> Tally:
        play, stop = Play(servers, changing), asyncio.Event()
        harvester = Harvester(
            store,
            play.fleet,
            follow=until_s is not None,
            clock=asyncio.get_running_loop().time,
            say=play.said.append,
        )
        happens(play)
        if until_s is not None:
            play.at(until_s, stop.set)
        return await harvester.run(stop)

    return virtual_time.run(run())


def reuse(servers: Sequence[ModelledServer]) -> float:
    """Share of prompt tokens found in the servers' caches."""
    return sum(s.cached_tokens for s in servers) / sum(s.prompt_tokens for s in servers)


@pytest.mark.parametrize(
    ("groups", "rows", "num_blocks", "faster"),
    [(20, 24, 400, 1.8), (6, 80, 4096, 1.3), (80, 5, 400, 2.6), (1, 200, 400, 0.9)],
)
def test_prefix_reuse_is_within_a_tenth_of_one_servers(
    groups: int, rows: int, num_blocks: int, faster: float
) -> None:
    prompts = prompts_of(groups, rows)
    servers = three(num_blocks=num_blocks, streams=False)
    alone = ModelledServer(A, num_blocks=num_blocks, streams=False)
    three_s, one_s = send(servers, prompts).seconds, send([alone], prompts).seconds
    assert sum(len(server.texts) for server in servers) == len(prompts)
    assert reuse(servers) >= 0.9 * reuse([alone])
    assert one_s >= faster * three_s, "groups that are few and large have to be split"


SHORT = prompts_of(20, 20, prefix_chars=64)


def test_a_server_that_joins_is_fed_and_one_that_leaves_is_empty_within_seconds() -> None:
    servers, changing = three(streams=False), ChangingList(A, B)
    running: dict[str, int] = {}

    def happens(play: Play) -> None:
        play.at(1.0, lambda: changing.urls.append(C))
        play.at(4.0, lambda: running.update(joined=servers[2].running))
        play.at(4.0, lambda: changing.urls.remove(A))
        play.at(6.0, lambda: running.update(left=servers[0].running))

    play = send(servers, SHORT * 3, happens, changing)
    assert running == {"joined": servers[2].capacity, "left": 0}
    assert f"{A} is no longer in the list of servers" in play.said
    assert A not in play.fleet.servers.by_url


def test_a_server_that_joins_another_takes_rows_that_wait_there() -> None:
    servers, changing = [ModelledServer(A, streams=False), ModelledServer(B, streams=False)], ChangingList(A)
    play = send(servers, SHORT, lambda play: play.at(0.5, lambda: changing.urls.append(B)), changing)
    assert len(servers[1].texts) > len(SHORT) / 4
    assert play.seconds < 10


def test_a_server_that_dies_costs_no_row_and_its_rows_continue_from_their_tokens() -> None:
    servers = three()
    play = send(servers, SHORT, lambda play: play.at(0.3, servers[1].die))
    assert servers[0].continued or servers[2].continued
    assert any(line.startswith(B) and line.endswith("its rows go elsewhere") for line in play.said)


def test_a_server_that_is_back_gets_rows_within_seconds() -> None:
    servers = three(streams=False, tokens_per_s=50.0)
    begun: list[int] = []

    def happens(play: Play) -> None:
        play.at(0.3, servers[1].die)
        play.at(3.0, lambda: setattr(servers[1], "up", True))
        play.at(3.0, lambda: begun.append(servers[1].begun))
        play.at(9.0, lambda: begun.append(servers[1].begun))

    send(servers, SHORT * 2, happens)
    assert begun[1] > begun[0]


def test_a_server_that_slows_down_gets_fewer_rows_and_holds_up_none() -> None:
    steady_s = send(three(streams=False), SHORT * 2).seconds
    servers = three(streams=False)
    slow_down = lambda play: play.at(0.5, lambda: setattr(servers[0], "tokens_per_s", 10.0))  # noqa: E731
    play = send(servers, SHORT * 2, slow_down)
    assert len(servers[0].texts) < len(servers[1].texts) / 4
    assert play.seconds < 2 * steady_s + 6, "no more than without the server, and the time to notice it"


@pytest.mark.parametrize("counting", [0, 1])
def test_equal_servers_get_as_many_rows_whether_or_not_they_count_tokens(counting: int) -> None:
    """Some servers send no `usage`."""
    servers = [ModelledServer(A), ModelledServer(B)]
    for server in servers[counting:]:
        server.counts = False
    send(servers, prompts_of(200, 1, prefix_chars=64))
    assert all(80 <= len(server.texts) <= 120 for server in servers)


def test_a_server_that_falls_silent_is_suspected_and_its_rows_are_asked_elsewhere() -> None:
    servers = three(streams=False, tokens_per_s=50.0)
    states: list[str] = []

    def happens(play: Play) -> None:
        play.at(0.5, lambda: setattr(servers[1], "tokens_per_s", 1e-6))
        play.at(12.0, lambda: states.extend(one.state for one in play.fleet.sightings() if one.url == B))

    play = send(servers, SHORT * 2, happens)
    assert states == [MemberState.SUSPECTED.value]
    assert any("fell silent with 8 rows in flight; its rows go elsewhere" in line for line in play.said)
    assert play.seconds < 60


def test_a_suspected_server_that_answers_again_is_fed_again() -> None:
    servers = three(streams=False, tokens_per_s=50.0)

    def happens(play: Play) -> None:
        play.at(0.5, lambda: setattr(servers[1], "tokens_per_s", 1e-6))
        play.at(11.5, lambda: setattr(servers[1], "tokens_per_s", 50.0))

    send(servers, SHORT * 2, happens)
    assert len(servers[1].texts) > len(SHORT) / 3


def test_a_server_that_does_not_answer_at_all_gives_its_rows_back() -> None:
    servers = three(tokens_per_s=2.0, streams=False)  # no row ends before the server is missed

    def vanish() -> None:
        servers[1].responds, servers[1].tokens_per_s = False, 1e-6

    play = send(servers, SHORT[:48], lambda play: play.at(0.5, vanish))
    assert f"{B} does not answer; its rows go elsewhere" in play.said


@pytest.mark.parametrize("drained", [True, False])
def test_a_server_without_rows_that_does_not_answer_is_down_until_it_is_back(drained: bool) -> None:
    async def run() -> None:
        servers = three()
        play = Play(servers)
        await play.fleet.start()
        play.fleet.drain([B] if drained else [])
        fine = "drained" if drained else "serving"

        async def seen_after(seconds: float) -> list[tuple[str, bool]]:
            await asyncio.sleep(seconds)
            return [(one.state, one.alive) for one in play.fleet.sightings()][:2]

        assert await seen_after(100.0) == [("serving", True), (fine, True)]
        servers[1].responds = servers[1].up = False
        assert await seen_after(40.0) == [("serving", True), (fine if drained else "down", False)]
        assert f"{B} does not answer" in play.said
        servers[1].responds = servers[1].up = True
        servers[1].model = servers[1].identity = "new"
        back = fine if drained else "other model"
        assert await seen_after(6.0) == [("serving", True), (back, True)]
        await play.fleet.close()

    virtual_time.run(run())


def test_a_long_row_is_not_moved_for_ever() -> None:
    """A row that takes longer than its server may be silent goes elsewhere twice, and comes to its end."""
    servers = [ModelledServer(A, streams=False), ModelledServer(B, streams=False)]
    long = "long " * 8000
    play = send(servers, [*SHORT[:40], long], lambda play: None)
    assert play.seconds < 400
    assert sum(server.begun for server in servers) <= 41 + 2


def test_a_server_of_another_model_gets_no_row() -> None:
    servers = [ModelledServer(A), ModelledServer(B, model="other", identity="other")]
    play = send(servers, SHORT[:40])
    assert not servers[1].begun
    assert any(f"{B} serves other and gets no rows" in line for line in play.said)


@pytest.mark.parametrize("old_dies", [True, False])
def test_rows_of_a_job_that_is_bound_to_one_model_go_back_where_the_servers_have_another_by_now(
    store: Store, write_input: WriteInput, old_dies: bool
) -> None:
    """A rolling upgrade: the last server of a model leaves the list as the first one of another joins."""
    job_id = queue_up(store, write_input, SHORT[:40])
    old, new = ModelledServer(A, tokens_per_s=1.5), ModelledServer(B, model="new", identity="new")
    changing = ChangingList(A)

    def happens(play: Play) -> None:
        play.at(20.0, lambda: setattr(changing, "urls", [B]))
        if old_dies:
            play.at(23.0, old.die)

    tally = harvest(store, [old, new], happens, changing)
    assert not new.begun
    assert "bound to m and this run has new" in str(tally.refused[job_id])
    with store.read() as tx:
        assert catalog.get(tx, job_id).failed == 0
        saved = tx.scalars(text("select tokens from request where tokens is not null")).all()
    assert saved, "rows go back with their tokens"


@pytest.mark.parametrize("busy", [False, True])
def test_a_job_without_an_answer_is_free_again_once_the_servers_have_another_model(
    store: Store, write_input: WriteInput, busy: bool
) -> None:
    """Also in a session that goes on, busy with rows of another job."""
    job_id = queue_up(store, write_input, SHORT[:4])
    old = ModelledServer(A, streams=False, tokens_per_s=0.01)
    new = ModelledServer(B, model="new", identity="new", tokens_per_s=12.0 if busy else 200.0)
    changing = ChangingList(A, B)

    def leave() -> None:
        changing.urls = [B]
        if busy:
            submit(store, str(write_input("more.parquet", q=SHORT)), TASK, model="new")

    def happens(play: Play) -> None:
        play.at(0.5, leave)
        play.at(1.0, old.die)

    tally = harvest(store, [old, new], happens, changing, until_s=12.0 if busy else None)
    check(store, job_id, SHORT[:4])
    assert not tally.refused
    with store.read() as tx:
        assert catalog.get(tx, job_id).model == "new"


def test_a_job_that_is_bound_while_the_servers_change_their_model_is_free_again(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = queue_up(store, write_input, SHORT[:4])
    old, new = ModelledServer(A), ModelledServer(B, model="new", identity="new")
    changing, plays, claim = ChangingList(A, B), list[Play](), Ledger.claim

    def claimed(ledger: Ledger, *arguments: Any) -> list[ReadyRow]:
        works = claim(ledger, *arguments)
        if works and changing.urls == [A, B]:
            changing.urls = [B]
            plays[0].fleet.servers._list([B])
        return works

    monkeypatch.setattr(Ledger, "claim", claimed)
    tally = harvest(store, [old, new], plays.append, changing, until_s=5.0)
    assert (old.begun, tally.refused) == (0, {})
    check(store, job_id, SHORT[:4])


def test_servers_of_another_model_are_used_once_the_last_one_of_the_first_model_has_left_the_list(
    store: Store, write_input: WriteInput
) -> None:
    first = queue_up(store, write_input, SHORT[:8])
    second = submit(store, str(write_input("more.parquet", q=SHORT[:20])), TASK, model="new").job_id
    servers = [ModelledServer(A, tokens_per_s=4.0), ModelledServer(B, model="new", identity="new")]
    changing, plays = ChangingList(A, B), list[Play]()

    def happens(play: Play) -> None:
        plays.append(play)
        play.at(8.0, lambda: setattr(changing, "urls", [B]))

    tally = harvest(store, servers, happens, changing)
    check(store, first, SHORT[:8])
    check(store, second, SHORT[:20])
    assert tally.retried == 0, "rows with tokens end on the server that they are on"
    assert "no server in the list serves m any more; rows are for new now" in plays[0].said


def test_rows_that_wait_for_a_server_go_back_once_it_has_another_model() -> None:
    async def run() -> None:
        server = ModelledServer(A, places=1, tokens_per_s=1.0)
        fleet = fleet_of(server)
        await fleet.start()
        asked = [fleet.complete(msgspec.structs.replace(call(f"row {n}"), model="m")) for n in range(3)]
        tasks = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(1.0)
        server.die()
        server.up, server.model, server.identity = True, "new", "new"
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [EndpointUnavailable] * 3
        assert str(errors[-1]) == "the servers answer for new now; rows for m go back"
        assert server.begun == 1
        assert (await fleet.complete(msgspec.structs.replace(call("row"), model="new", identity=None))).engine
        await fleet.close()

    virtual_time.run(run())


def test_tokens_continue_only_under_the_identity_that_they_are_from() -> None:
    servers = [ModelledServer(A), ModelledServer(A), ModelledServer(B, identity="upgraded")]
    play = send(servers[1:], SHORT[:60], lambda play: play.at(0.25, servers[1].die))
    assert servers[2].texts
    assert not servers[2].continued
    assert play.seconds


def test_a_drained_server_is_empty_within_seconds_and_gets_rows_again_once_it_is_undrained(
    store: Store, write_input: WriteInput
) -> None:
    prompts = SHORT
    job_id = queue_up(store, write_input, prompts)
    servers = three(tokens_per_s=100.0)
    running: dict[str, int] = {}

    def mark(*, drained: bool) -> None:
        with store.write() as tx:
            notes.drain(tx, "gpu-b", now=0.0) if drained else notes.undrain(tx, "gpu-b")

    def happens(play: Play) -> None:
        play.at(1.0, lambda: mark(drained=True))
        play.at(2.0, lambda: running.update(drained=servers[1].running))
        play.at(2.0, lambda: mark(drained=False))
        play.at(3.0, lambda: running.update(undrained=servers[1].running))

    tally = harvest(store, servers, happens)
    check(store, job_id, prompts)
    assert running == {"drained": 0, "undrained": servers[1].capacity}
    assert servers[0].continued or servers[2].continued
    assert tally.retried == 0, "no row went back to the store"


@pytest.mark.parametrize("others", [0, 2])
def test_a_harvester_that_starts_while_its_server_is_drained_waits_for_it(
    store: Store, write_input: WriteInput, others: int
) -> None:
    prompts = SHORT[:40]
    job_id = queue_up(store, write_input, prompts)
    servers = three()[: 1 + others]
    harvest(store, servers)  # so that the store knows them

    def mark(*, drained: bool) -> None:
        with store.write() as tx:
            for server in servers:
                notes.drain(tx, server.url, now=0.0) if drained else notes.undrain(tx, server.url)

    check(store, job_id, prompts)
    second = queue_up(store, write_input, prompts)
    mark(drained=True)
    servers = three()[: 1 + others]  # of another event loop
    harvest(store, servers, lambda play: play.at(15.0, lambda: mark(drained=False)))
    check(store, second, prompts)


def test_rows_without_tokens_have_some_seconds_to_end_on_a_drained_server() -> None:
    servers = three(streams=False)
    servers[1].tokens_per_s = 0.01
    left: list[int] = []

    def happens(play: Play) -> None:
        play.at(0.2, lambda: play.fleet.drain([B]))
        play.at(3.0, lambda: left.append(servers[1].running))
        play.at(0.2 + DRAIN_S + 1, lambda: left.append(servers[1].running))

    send(servers, SHORT * 3, happens)
    assert left == [servers[1].capacity, 0]


def test_what_the_servers_do_is_in_the_store_and_gone_once_the_harvester_ends(
    store: Store, write_input: WriteInput
) -> None:
    queue_up(store, write_input, SHORT[:160])
    found: list[notes.SeenServer] = []

    def look() -> None:
        with store.read() as tx:
            found.extend(notes.everything(tx))

    harvest(store, three(tokens_per_s=15.0), lambda play: play.at(6.5, look))
    assert [server.url for server in found] == [A, B, C]
    assert all(server.model == "m" and server.seen_at for server in found)
    assert sum(feeding.in_flight for server in found for feeding in server.feedings) >= 20
    assert all(feeding.tokens_per_s > 0 for server in found for feeding in server.feedings)
    with store.read() as tx:
        assert all(not server.feedings for server in notes.everything(tx))


def test_each_result_names_the_engine_that_it_is_from(store: Store, write_input: WriteInput) -> None:
    prompts = SHORT[:60]
    job_id = queue_up(store, write_input, prompts)
    servers = [ModelledServer(A), ModelledServer(B, identity="upgraded")]
    harvest(store, servers)
    check(store, job_id, prompts)
    with views(store, now=0.0, only=[job_id], sealed=False, uses=lambda empty: {"results"}) as opened:
        engines = dict(opened.duck.execute("select engine, count(*) from results group by 1").fetchall())
    assert engines == {"m": len(servers[0].texts), "upgraded": len(servers[1].texts)}


@pytest.mark.parametrize(("identity", "resumed"), [("m", 5), ("upgraded", 0)])
def test_saved_tokens_that_the_server_does_not_go_on_from_are_not_resumed(
    identity: str, resumed: int
) -> None:
    async def run() -> None:
        fleet = fleet_of(ModelledServer(A, identity=identity))
        await fleet.start()
        begun = call("row")
        saved = answer_tokens(request_text(begun.body), TOKENS)[:5]
        begun = msgspec.structs.replace(begun, resume_from=saved)
        assert (await fleet.complete(begun, seen)).resumed_tokens(begun) == resumed
        await fleet.close()

    virtual_time.run(run())


def test_two_harvesters_over_three_servers_of_which_one_dies_answer_each_row_once(
    store: Store, write_input: WriteInput
) -> None:
    prompts = SHORT
    job_id = queue_up(store, write_input, prompts)
    servers = three()

    async def run() -> None:
        plays = [Play(servers), Play(servers)]
        plays[0].at(0.7, servers[1].die)
        clock = asyncio.get_running_loop().time
        both = [Harvester(store, play.fleet, clock=clock) for play in plays]
        tallies = await asyncio.gather(*(one.run(asyncio.Event()) for one in both))
        assert all(tally.succeeded for tally in tallies)

    virtual_time.run(run())
    check(store, job_id, prompts)
    texts = Counter(text for server in servers for text in server.texts)
    assert set(texts.values()) == {1}


def test_all_servers_down_is_an_outage_that_ends_within_seconds_of_the_first_that_is_back(
    store: Store, write_input: WriteInput
) -> None:
    job_id = queue_up(store, write_input, SHORT[:100])
    servers = three(tokens_per_s=50.0)
    texts: list[int] = []

    def happens(play: Play) -> None:
        for server in servers:
            play.at(0.5, server.die)
        play.at(15.0, lambda: setattr(servers[2], "up", True))
        play.at(15.0, lambda: texts.append(len(servers[2].texts)))
        play.at(23.0, lambda: texts.append(len(servers[2].texts)))

    harvest(store, servers, happens)
    check(store, job_id, SHORT[:100])
    assert texts[1] > texts[0]


def test_a_fleet_without_a_server_names_the_cause_or_waits(store: Store) -> None:
    servers = three()
    for server in servers:
        server.up = False

    async def start() -> None:
        fleet = fleet_of(*servers)
        with pytest.raises(EndpointUnusable, match="no server takes rows \\(3 down\\)"):
            await fleet.start()
        await fleet.close()

    async def wait() -> float:
        said: list[str] = []
        changing = ChangingList()
        fleet = fleet_of(*servers, changing=changing, patient=True, say=said.append)
        loop = asyncio.get_running_loop()
        loop.call_later(30.0, lambda: changing.urls.append(A))
        loop.call_later(30.0, lambda: setattr(servers[0], "up", True))
        begun = loop.time()
        await fleet.start()
        await fleet.close()
        assert said[0] == "no server is listed; waiting for one"
        return loop.time() - begun

    virtual_time.run(start())
    assert 30.0 <= virtual_time.run(wait()) < 33.0


def ask(*servers: ModelledServer) -> Any:
    """Ask a fleet one row; returns what came of it."""

    async def run() -> Any:
        fleet = fleet_of(*servers)
        await fleet.start()
        try:
            return await fleet.complete(call("hello"))
        except Exception as error:
            return error
        finally:
            await fleet.close()

    return virtual_time.run(run())


@pytest.mark.parametrize(
    "error",
    [EndpointBusy("slow down", retry_after_s=5.0), EndpointUnavailable("502"), EndpointUnusable("401")],
)
def test_an_error_of_one_server_is_mended_by_another(error: Exception) -> None:
    servers = [ModelledServer(A), ModelledServer(B)]
    servers[0].failing = lambda: error
    assert ask(*servers).engine == "m"


@pytest.mark.parametrize("error", [RequestRejected("no"), EndpointFault("garbage"), EngineDied("dead")])
def test_an_error_that_says_something_about_the_row_is_the_rows(error: Exception) -> None:
    servers = [ModelledServer(A), ModelledServer(B)]
    for server in servers:
        server.failing = lambda: error
    assert ask(*servers) is error


def test_one_server_alone_passes_its_errors_on() -> None:
    for error in (EndpointBusy("slow down"), EndpointUnavailable("502"), EndpointUnusable("401")):
        server = ModelledServer(A)
        server.failing = lambda error=error: error  # type: ignore[misc]
        assert ask(server) is error


def test_a_row_with_which_three_servers_went_down_is_a_suspect() -> None:
    servers = [*three(), ModelledServer("http://gpu-d:8000")]

    def poison(server: ModelledServer) -> Callable[[], Exception]:
        def die() -> Exception:
            server.die()
            return EndpointUnavailable("the connection broke")

        return die

    for server in servers:
        server.failing = poison(server)
    answer = ask(*servers)
    assert isinstance(answer, EngineDied)
    assert sum(server.up for server in servers) == 1


def test_a_server_whose_answers_are_of_no_use_is_suspected(store: Store, write_input: WriteInput) -> None:
    job_id = queue_up(store, write_input, SHORT[:100])
    servers = three()
    servers[0].failing = lambda: EndpointFault("HTTP 500")
    harvest(store, servers)
    check(store, job_id, SHORT[:100])


def test_servers_behind_a_proxy_that_cuts_rows_off_are_not_suspected(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Proxied(ModelledServer):
        async def _complete(self, call: Call, on_tokens: OnTokens | None) -> Completion:
            assert on_tokens is not None

            def cut(tokens: Sequence[int]) -> None:
                if len(tokens) - len(call.resume_from) > 6:
                    raise EndpointFault("the connection broke")
                on_tokens(tokens)

            return await super()._complete(call, cut)

    suspected: list[Member] = []
    monkeypatch.setattr(Member, "suspect", lambda self, *_: suspected.append(self))
    job_id = queue_up(store, write_input, SHORT[:40])
    harvest(store, [Proxied(url) for url in (A, B, C)])
    check(store, job_id, SHORT[:40])
    assert not suspected


def test_a_row_that_is_withdrawn_frees_its_place(store: Store) -> None:
    async def run() -> None:
        server = ModelledServer(A, places=1, tokens_per_s=1.0)
        fleet = fleet_of(server, ModelledServer(B, places=1, tokens_per_s=1.0))
        await fleet.start()
        tasks = [asyncio.create_task(fleet.complete(call(f"row {n}"))) for n in range(4)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert server.running == 0
        assert (await fleet.complete(call("another"))).completion_tokens == TOKENS
        assert all(sighting.in_flight == sighting.waiting == 0 for sighting in fleet.sightings())
        await fleet.close()

    virtual_time.run(run())


def test_a_burst_of_refusals_is_one_incident_and_no_number_of_them_is_too_large() -> None:
    async def run() -> None:
        play = Play(three())
        await play.fleet.start()
        member = next(iter(play.fleet.servers))
        for _ in range(20):
            member.hold(None, 100.0)
        assert member.held_until == 101.0
        for _ in range(3000):
            member.fail(EndpointUnavailable("away"), 100.0)
        assert member.try_at <= 160.0
        member.hold(None, 1e6)
        assert member.held_until <= 1e6 + 60.0
        await play.fleet.close()

    virtual_time.run(run())


def test_a_single_server_that_is_silent_while_it_works_keeps_its_rows(
    store: Store, write_input: WriteInput
) -> None:
    prompts = SHORT[:4]
    job_id = queue_up(store, write_input, prompts)
    server = ModelledServer(A, streams=False, tokens_per_s=1.5)
    server.responds = False
    tally = harvest(store, [server])
    check(store, job_id, prompts)
    assert tally.retried == 0


def test_a_server_under_two_names_is_noted_once() -> None:
    one = notes.Sighting(
        url=A,
        state="serving",
        model="m",
        version="1",
        alive=True,
        in_flight=3,
        waiting=1,
        tokens_per_s=1.0,
        why=None,
    )
    (found,) = merged([one, replace(one, in_flight=4)])
    assert (found.in_flight, found.waiting) == (7, 2)


@pytest.mark.parametrize(
    ("url", "known_as"),
    [
        ("http://localhost:8000/v1", "http://gpu-7:8000/v1"),
        ("https://127.0.0.1/v1?a=1", "https://gpu-7/v1?a=1"),
        ("http://[::1]:8000", "http://gpu-7:8000"),
        ("http://gpu-a:8000", "http://gpu-a:8000"),
        ("not a URL", "not a URL"),
    ],
)
def test_a_loopback_address_is_this_machines_in_a_store_that_others_share(
    url: str, known_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    assert of_this_machine(url) == known_as


@pytest.mark.parametrize(("last", "most"), [(InFlight(5, 40), 70), (InFlight(5), None)])
def test_tokens_in_flight_are_those_of_all_servers_as_far_as_they_tell(
    last: InFlight, most: int | None
) -> None:
    async def run() -> InFlight:
        servers = three()
        for server, told in zip(servers, (InFlight(1, 10), InFlight(2, 20), last), strict=True):
            server.in_flight = told
        fleet = fleet_of(*servers)
        await fleet.start()
        found = fleet.in_flight
        await fleet.close()
        return found

    assert virtual_time.run(run()) == InFlight(8, most)


def test_a_server_is_believed_to_hold_no_more_prefixes_than_its_cache_does() -> None:
    async def run() -> None:
        servers = [ModelledServer(A, num_blocks=100), ModelledServer(B, num_blocks=100)]
        fleet = fleet_of(*servers)
        await fleet.start()
        for prompt in prompts_of(groups=20, rows=1):
            await fleet.complete(call(prompt))
        keys = [prompt_key(Url.CHAT, TASK.body(prompt), servers[0].kv_cache) for prompt in prompts_of(20, 1)]
        for member in fleet.servers:
            held = sum(block in member.cached for key in keys for block in key)
            assert 64 < held <= 100
        await fleet.close()

    virtual_time.run(run())


def test_signs_of_life_that_were_owed_before_a_server_came_back_do_not_count() -> None:
    async def run() -> None:
        servers = three()
        fleet = fleet_of(*servers)
        await fleet.start()
        member = fleet.servers.by_url[A]
        for _ in range(2):
            servers[0].responds = False
            await fleet._care.check(member)
            assert member.ready, "one sign alone may be missing"
            await fleet._care.check(member)
            assert not member.ready
            servers[0].responds = True
            await fleet._reach(member)
            assert member.ready
        await fleet.close()

    virtual_time.run(run())


class Seen:
    """A fleet of which a test says what it sees."""

    def __init__(self, *sightings: notes.Sighting) -> None:
        self.seen = list(sightings)
        self.drained: list[set[str]] = []

    def sightings(self) -> list[notes.Sighting]:
        return self.seen

    def drain(self, urls: frozenset[str]) -> None:
        self.drained.append(set(urls))


def sighting(url: str, **named: Any) -> notes.Sighting:
    values = {"state": "serving", "model": "m", "version": "1", "alive": True, "in_flight": 0, "waiting": 0}
    return notes.Sighting(**{"url": url, "tokens_per_s": 1.0, "why": None, **values, **named})


def looks(store: Store, fleet: object, *moments: float) -> Iterator[ServerNotes]:
    """Yield the notes of a harvester, to look at each of these moments."""
    moment = [0.0]

    async def in_store(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    looking = ServerNotes(
        fleet, store, "ann", in_store, clock=lambda: 1e9 + moment[0], monotonic=lambda: moment[0]
    )
    for moment[0] in moments:
        yield looking


def test_a_change_of_a_server_is_noted_at_once_and_anything_else_every_few_seconds(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, noted = Seen(sighting(A)), []
    monkeypatch.setattr(notes, "note", lambda *_, now: noted.append(now - 1e9))
    states = {3.0: "busy", 9.0: "drained", 9.5: "drained", 10.0: "drained"}
    flying = {1.0: 5, 9.0: 2, 9.5: 1, 10.0: 1}
    for looking in looks(store, fleet, 0.0, 1.0, 3.0, 4.0, 8.0, 9.0, 9.5, 10.0):
        now = looking._monotonic()
        fleet.seen = [sighting(A, state=states.get(now, "serving"), in_flight=flying.get(now, 0))]
        asyncio.run(looking.look())
    assert noted == [0.0, 3.0, 4.0, 9.0, 9.5]


def test_servers_that_the_store_drains_are_drained_under_their_own_names(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_notes, "is_shared", lambda _: True)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    fleet = Seen(sighting("http://localhost:8000"), sighting(B), sighting("http://127.0.0.1:8000"))
    monkeypatch.setattr(notes, "drained", lambda _: frozenset({"http://gpu-7:8000", A}))
    (looking,) = looks(store, fleet, 0.0)
    asyncio.run(looking.look())
    assert fleet.drained == [{"http://gpu-7:8000", A, "http://localhost:8000", "http://127.0.0.1:8000"}]


def test_a_server_alone_is_not_noted(store: Store) -> None:
    (looking,) = looks(store, object(), 0.0)
    asyncio.run(looking.look())
    with store.read() as tx:
        assert notes.drained(tx) == frozenset()


@pytest.mark.parametrize("row_s", [5.0, 20.0])
@pytest.mark.parametrize("streams", [False, True])
def test_no_row_stays_on_a_server_whose_engine_hangs_while_its_routes_answer(
    row_s: float, streams: bool
) -> None:
    servers = [ModelledServer(url, streams=streams, tokens_per_s=45 / row_s, places=8) for url in (A, B)]
    hangs = lambda play: play.at(1.0, lambda: setattr(servers[1], "tokens_per_s", 1e-9))  # noqa: E731
    play = send(servers, prompts_of(1, 100, prefix_chars=64), hangs)
    assert play.seconds < 2 * 100 / 8 * row_s
    assert len(servers[0].texts) > 90


def test_rows_of_a_server_that_another_row_found_out_of_reach_are_asked_elsewhere() -> None:
    """The machine is gone without a word: the rows that it had hear nothing, and a new one cannot connect."""
    servers = [ModelledServer(url, tokens_per_s=2.0) for url in (A, B)]

    async def run() -> float:
        play = Play(servers)
        await play.fleet.start()
        rows = prompts_of(1, 16, prefix_chars=64)
        tasks = [asyncio.create_task(play.fleet.complete(call(row), seen)) for row in rows[:12]]
        await asyncio.sleep(3.0)
        assert servers[1].running == 6
        servers[1].up, servers[1].tokens_per_s = False, 1e-9
        tasks += [asyncio.create_task(play.fleet.complete(call(row), seen)) for row in rows[12:]]
        await asyncio.wait_for(asyncio.gather(*tasks), 300.0)
        await play.fleet.close()
        assert [line for line in play.said if "its rows go elsewhere" in line]
        return now_s() - play.begun

    assert virtual_time.run(run()) < 60


def test_a_server_that_refuses_the_key_is_named_beside_one_that_answers() -> None:
    servers = [ModelledServer(url) for url in (A, B)]
    servers[1].failing = lambda: EndpointUnusable("HTTP 401: no; check CONSERVE_API_KEY", status=401)
    play = send(servers, SHORT)
    assert [line for line in play.said if "check CONSERVE_API_KEY" in line]
    assert len(servers[0].texts) == len(SHORT)


def test_a_row_that_every_server_refuses_as_busy_goes_back() -> None:
    servers = [ModelledServer(url) for url in (A, B)]
    for server in servers:
        server.failing = lambda: EndpointBusy("HTTP 429: Request too large")

    async def run() -> float:
        play = Play(servers)
        await play.fleet.start()
        with pytest.raises(EndpointBusy):
            await play.fleet.complete(call("row"), seen)
        await play.fleet.close()
        return now_s() - play.begun

    assert virtual_time.run(run()) < 10
