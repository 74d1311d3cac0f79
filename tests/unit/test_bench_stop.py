"""`conserve bench` that is stopped: soon over, with the blocks it has measured. In virtual time, no processes."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pyarrow.parquet as pq
import pytest

from conserve.bench import compare, presets
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.deployment import Deployment
from conserve.bench.load import LoadPlan
from conserve.bench.servers import rows
from conserve.bench.stock import StockServer
from conserve.config import Settings
from conserve.errors import InputError, ServiceFailed
from conserve.profiles.batch import Batch, Slice
from conserve.store.books.readings import read_jobs
from conserve.store.database.store import Store
from tests import server_reports, virtual_time
from tests.commands import Done, conserve
from tests.store_rows import leased
from tests.unit.test_sizing import ENGINE

T = TypeVar("T")

ENDS_S = 10.0
NEVER = 1000
FOUR = "conserve,online-only/planned,non-preemptive/planned,priority"
WORDS = ("bench", "--gamma", "1,1,16,4", "--policies", FOUR, "--rounds", "2", "--block-s", "20")
METRICS = """vllm:prompt_tokens_total{engine="0"} 1000.0
vllm:generation_tokens_total{engine="0"} 100.0
"""
STATE: dict[str, Any] = {
    "policy": "online-only",
    "slo": {**server_reports.SLO, "harm": 0.1},
    "latency_model": {**server_reports.MODEL, "name": "another"},
    "preemption": {"policy": "off"},
    "iterations": 5,
    "planned": 4,
    "overruns": 1,
    "busy_s": 0.5,
}


class World:
    """Behaviour of a comparison's processes and server, and the time of the signal."""

    def __init__(
        self, *, stop_in: int = NEVER, number: int = signal.SIGTERM, hangs: bool = False, dies_in: int = NEVER
    ) -> None:
        self.stop_in, self.number, self.hangs, self.dies_in = stop_in, number, hangs, dies_in
        self.blocks = 0
        self.playing = 0  # load generators under way
        self.came_s: float | None = None  # the signal
        self.took_s: float | None = None  # from there to the end of the event loop
        self.answers = True  # whether the server does
        self.posted: list[dict[str, Any]] = []
        self.killed = False
        self.started: list[str] = []  # modules of the servers
        self.taken: Callable[[int], None] = lambda block: None  # takes offline rows
        self.rows = 1  # in the engine, as the server tells
        self.played: list[
            tuple[str, str]
        ] = []  # by whom each block was answered, and the plug-in's policy then

    def stop(self) -> None:
        self.came_s = asyncio.get_running_loop().time()
        os.kill(os.getpid(), self.number)

    async def warm(self, *_: Any, **__: Any) -> list[LoadAnswer]:
        """Live requests before a block."""
        return []

    async def play(self, plan: LoadPlan, begin: Callable[[], float]) -> list[LoadAnswer]:
        """The load generator: three tokens for every request, or a block in which the signal comes."""
        self.playing += 1
        if self.posted:
            self.played.append((plan.target.base_url, self.posted[-1]["policy"]))
        try:
            await asyncio.sleep(2.0)
            begin()
            await asyncio.sleep(1.0)
            if self.blocks == self.stop_in:
                self.answers = not self.hangs
                self.stop()
            await asyncio.sleep(30.0)
            self.blocks += 1
            self.taken(self.blocks)
            return [answer(n, arrival.at_s) for n, arrival in enumerate(plan.trace)]
        finally:
            self.playing -= 1

    async def serve(self, request: httpx.Request) -> httpx.Response:
        if not self.answers:
            await asyncio.sleep(3600.0)
        if self.blocks >= self.dies_in:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        if request.url.path == "/metrics":
            return httpx.Response(200, text=METRICS)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.method == "POST":
            self.posted.append(json.loads(request.content))
        offline = {"tokens": 7, "rows": self.rows}
        return httpx.Response(200, content=server_reports.answer(**STATE, offline=offline))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Instead of `asyncio.run`."""

        async def timed() -> T:
            try:
                return await main
            finally:
                if self.came_s is not None:
                    self.took_s = asyncio.get_running_loop().time() - self.came_s

        return virtual_time.run(timed())


def answer(index: int, due_s: float) -> LoadAnswer:
    times_s = (due_s + 0.1, due_s + 0.2, due_s + 0.3)
    sent = {"index": index, "due_s": due_s, "sent_s": due_s, "ended_s": due_s + 0.3}
    return LoadAnswer(**sent, input_tokens=9, token_at_s=times_s, status=RequestEnd.OK)


class SlowService:
    """The processes of a server that take a minute to stop unless they are killed."""

    world: World
    comes_up = True

    def __init__(self, server: Any, *_: Any, **__: Any) -> None:
        self._killed = asyncio.Event()
        self.world.started.append(server.words[2])

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], Awaitable[None]]) -> None:
        if self.comes_up:
            await on_ready()
        else:
            asyncio.get_running_loop().call_later(5.0, self.world.stop)
        await stop.wait()
        try:
            await asyncio.wait_for(self._killed.wait(), 65.0)
        except TimeoutError:
            raise ServiceFailed("it was let to take its time") from None

    def process_ids(self) -> list[int]:
        return []

    def kill(self) -> None:
        self.world.killed = True
        self._killed.set()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Done]:
    """Run a comparison in a world, on a server of its own unless one is named."""

    def go(world: World, *more: str) -> Done:
        transport = httpx.MockTransport(world.serve)
        for module in ("servers.servers", "playing"):
            monkeypatch.setattr(
                f"conserve.bench.{module}.Deployment", partial(Deployment, transport=transport)
            )
            monkeypatch.setattr(
                f"conserve.bench.{module}.StockServer", partial(StockServer, transport=transport)
            )
        monkeypatch.setattr("conserve.bench.servers.place.Service", SlowService)
        monkeypatch.setattr(rows.OfflineQueue, "taken", lambda self: True)  # by a harvester of no process
        monkeypatch.setattr(SlowService, "world", world, raising=False)
        monkeypatch.setattr(compare, "play_apart", world.play)
        monkeypatch.setattr(compare, "play", world.warm)
        monkeypatch.setattr(asyncio, "run", world.run)
        return conserve(*WORDS, "-o", str(tmp_path / "out"), *more)

    monkeypatch.setitem(presets.PRESETS, "full", replace(presets.FULL, offline_rows=3))
    return go


Run = Callable[..., Done]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_stopped_ends_soon_with_the_blocks_it_has(
    stopped: Run, tmp_path: Path, number: int
) -> None:
    world = World(stop_in=2, number=number)
    done = stopped(world)
    assert done.returncode == 130, done.stderr
    assert world.took_s is not None
    assert world.took_s <= ENDS_S
    assert world.killed
    assert world.playing == 0
    said = (
        "Stopped after 2 of 8 blocks: 1 of conserve, 1 of online-only/planned, 0 of non-preemptive/planned, "
        "0 of priority."
    )
    assert said in (tmp_path / "out" / "page.html").read_text()
    assert said in done.stderr
    document = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert document["design"]["stopped"] == said
    assert set(document["policies"]) == {"conserve", "online-only/planned"}
    assert pq.read_table(tmp_path / "out" / "blocks.parquet").num_rows == 2


@pytest.mark.parametrize("folder", ["out", "deep/er"])
def test_no_empty_folder_is_left_where_no_server_answers(tmp_path: Path, folder: str) -> None:
    for words, said in ((WORDS, "went away"), (("bench", "--gamma", "1,1"), "--gamma takes")):
        done = conserve(*words, "--endpoint", "http://127.0.0.1:9", "-o", str(tmp_path / folder))
        assert done.returncode != 0
        assert said in done.stderr
        assert not [*tmp_path.iterdir()]
    (tmp_path / folder).mkdir(parents=True)
    conserve(*WORDS, "--endpoint", "http://127.0.0.1:9", "-o", str(tmp_path / folder))
    assert (tmp_path / folder).is_dir(), "it is the user's"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smollm2-demo", "--gama", "1,1,9,9"], "leave out: smollm2-demo --gama 1,1,9,9"),
        (["--kv-checkpoint", "off"], "--kv-checkpoint off goes with a server of the benchmark's own"),
        (["--offline", "64,8"], "--offline goes with a server of the benchmark's own"),
    ],
)
def test_a_server_that_runs_already_has_its_model_flags_and_checkpoints(
    stopped: Run, tmp_path: Path, words: list[str], said: str
) -> None:
    world = World()
    done = stopped(world, "--endpoint", "http://host", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not world.blocks
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [True, False])
def test_the_blocks_before_the_servers_death_are_kept(stopped: Run, tmp_path: Path, own: bool) -> None:
    done = stopped(World(dies_in=3), *([] if own else ["--endpoint", "http://host"]))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    counts = "1 of conserve, 1 of online-only/planned, 1 of non-preemptive/planned, 0 of priority"
    said = f"Stopped after 3 of 8 blocks: {counts}. The cause: "
    assert said in (tmp_path / "out" / "page.html").read_text()
    assert said in done.stderr
    assert pq.read_table(tmp_path / "out" / "blocks.parquet").num_rows == 3
    assert "online-only" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("conserve: ")
    assert "went away" in last


def test_a_queue_that_runs_dry_ends_the_comparison_with_the_blocks_before_it(
    stopped: Run, tmp_path: Path
) -> None:
    def take_all(block: int) -> None:
        if block == 3:
            store = Store.open(Settings(home=tmp_path / "out" / "store-1"))
            assert len(leased(store).rows) == 3
            store.close()

    world = World()
    world.taken = take_all
    done = stopped(world)
    assert done.returncode == 1, done.stderr
    counts = "1 of conserve, 1 of online-only/planned, 0 of non-preemptive/planned, 0 of priority"
    assert f"Stopped after 2 of 8 blocks: {counts}." in (tmp_path / "out" / "page.html").read_text()
    last = done.stderr.splitlines()[-1]
    assert "the offline rows of non-preemptive/planned ran out within a block" in last
    assert last.endswith("give fewer or shorter blocks (--rounds, --block-s)")


def test_rows_of_the_user_that_run_out_end_the_comparison_with_the_blocks_before_it(
    stopped: Run, tmp_path: Path
) -> None:
    world = World()
    world.rows = 9

    def take_all(block: int) -> None:
        world.rows = 9 if block < 3 else 0

    world.taken = take_all
    done = stopped(world, "--endpoint", "http://host")
    assert done.returncode == 1, done.stderr
    counts = "1 of conserve, 1 of online-only/planned, 0 of non-preemptive/planned, 0 of priority"
    assert f"Stopped after 2 of 8 blocks: {counts}." in (tmp_path / "out" / "page.html").read_text()
    last = done.stderr.splitlines()[-1]
    assert "the server has no offline row at the end of a block of non-preemptive/planned" in last
    assert world.posted[-1]["policy"] == STATE["policy"], "the server has its policy back"


def test_a_queue_has_as_many_rows_before_a_block_as_a_fast_engine_answers_in_it(
    stopped: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TOLD.items():
        monkeypatch.setitem(STATE, name, value)
    monkeypatch.setitem(presets.PRESETS, "full", replace(presets.FULL, offline_rows=500))
    words = ("--gamma", "0.2,1,16,4", "--offline", "64,8", "--rounds", "1")
    done = stopped(World(), *words, "--policies", "online-only/planned,conserve,non-preemptive")
    assert done.returncode == 0, done.stderr
    row_s = ENGINE.ms(Batch.of([Slice(64, 0)])) / 1e3 + 8 * ENGINE.ms(Batch.of([Slice(1, 64, True)])) / 1e3
    for store in ("store-1", "store-1-non-preemptive"):
        jobs = read_jobs(Settings(home=tmp_path / "out" / store), now=0.0)
        assert sum(job.rows for job in jobs) > max(500, 2 * 20.0 / row_s + 2 * 32)


def test_a_round_without_arrivals_is_refused_before_the_first_block(stopped: Run, tmp_path: Path) -> None:
    world = World()
    done = stopped(world, "--gamma", "0.3,4,128,16", "--seed", "3")
    assert done.returncode == 2, done.stderr
    assert "no request arrives within 20 s" in done.stderr.splitlines()[-1]
    assert world.blocks == 0
    assert not (tmp_path / "out" / "page.html").exists()


def test_blocks_outlast_whatever_ends_the_comparison(
    stopped: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(block: int) -> None:
        if block == 3:
            raise InputError("the fourth block cannot be played")

    world = World()
    world.taken = refuse
    done = stopped(world)
    assert done.returncode == 2, done.stderr
    assert "Stopped after 2 of 8 blocks" in (tmp_path / "out" / "page.html").read_text()
    assert "the fourth block cannot be played" in done.stderr.splitlines()[-1]


def test_a_server_that_dies_before_the_first_block_leaves_its_error_alone(
    stopped: Run, tmp_path: Path
) -> None:
    done = stopped(World(dies_in=0), "--endpoint", "http://host")
    assert done.returncode == 1, done.stderr
    assert not (tmp_path / "out" / "page.html").exists()


def test_a_comparison_that_is_let_finish_is_not_called_stopped(stopped: Run, tmp_path: Path) -> None:
    done = stopped(World(), "--json")
    assert done.returncode == 0, done.stderr
    assert "stopped" not in json.loads(done.stdout)["design"]
    assert "Stopped" not in (tmp_path / "out" / "page.html").read_text()


def test_a_server_that_ran_already_is_given_back_as_it_was(stopped: Run, tmp_path: Path) -> None:
    world = World(stop_in=1)
    done = stopped(world, "--endpoint", "http://host")
    assert done.returncode == 130, done.stderr
    mechanisms = {"preemption": "off", "checkpoint": "off", "batching": "on"}
    assert world.posted[-1] == {"policy": "online-only", "slo": STATE["slo"], **mechanisms}
    assert world.posted[-2]["policy"] == "conserve"
    assert (tmp_path / "out" / "page.html").exists()


def test_stock_vllm_beside_plays_online_only_while_rows_wait(stopped: Run, tmp_path: Path) -> None:
    world = World()
    names = "online-only,online-only/planned,conserve"
    servers = ("--endpoint", "http://plugged", "--stock-endpoint", "http://stock/v1/")
    done = stopped(world, *servers, "--policies", names, "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert world.played == [
        ("http://stock", "online-only"),
        ("http://plugged", "online-only"),
        ("http://plugged", "conserve"),
    ]
    document = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert set(document["policies"]) == {*names.split(",")}
    assert not document["policies"]["online-only"]["tells"]


def test_a_stock_server_that_does_not_answer_is_named(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    serve = world.serve

    async def only_ours(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if request.url.host == "stock" else await serve(request)

    monkeypatch.setattr(world, "serve", only_ours)
    servers = ("--endpoint", "http://plugged", "--stock-endpoint", "http://me:secret@stock")
    done = stopped(world, *servers, "--policies", "online-only,conserve")
    assert done.returncode == 1
    assert "no OpenAI server answers at http://stock" in done.stderr
    assert "secret" not in done.stderr
    assert not world.posted, "the other server is as it was"
    assert "start it with: vllm serve" in done.stderr


def test_an_address_that_is_none_is_told_by_its_own_flag(stopped: Run) -> None:
    servers = ("--endpoint", "http://plugged", "--stock-endpoint", "stock:8000")
    done = stopped(World(), *servers, "--policies", "online-only,conserve")
    assert done.returncode == 2
    assert "--stock-endpoint takes an http:// or https:// address, not 'stock:8000'" in done.stderr


def test_a_server_that_hangs_does_not_hold_the_end_up(stopped: Run, tmp_path: Path) -> None:
    world = World(stop_in=1, hangs=True)
    done = stopped(world, "--endpoint", "http://host")
    assert done.returncode == 130, done.stderr
    assert world.took_s is not None
    assert world.took_s <= ENDS_S
    assert "http://host did not take its policy online-only back" in done.stderr
    assert (tmp_path / "out" / "page.html").exists()


@pytest.mark.parametrize("comes_up", [True, False])
def test_without_a_block_there_is_no_page(
    stopped: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_up: bool
) -> None:
    monkeypatch.setattr(SlowService, "comes_up", comes_up)
    world = World(stop_in=0)
    done = stopped(world)
    assert done.returncode == 130, done.stderr
    assert world.took_s is not None
    assert world.took_s <= ENDS_S
    assert "before the first block was measured: there is no page" in done.stderr
    assert not (tmp_path / "out" / "page.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rows_that_are_still_being_made_do_not_hold_the_end_up(
    stopped: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def endless(settings: Settings, preset: presets.Preset, seed: int) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal ends this")

    monkeypatch.setattr(rows, "make_rows", endless)
    before = signal.getsignal(signal.SIGTERM)
    done = stopped(World())
    assert done.returncode == 130, done.stderr
    assert "there is no page" in done.stderr
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_after_the_last_block_loses_nothing(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    run = SlowService.run

    async def stops_late(self: SlowService, stop: asyncio.Event, **more: Any) -> None:
        running = asyncio.ensure_future(run(self, stop, **more))
        await stop.wait()
        world.stop()
        await running

    monkeypatch.setattr(SlowService, "run", stops_late)
    done = stopped(world)
    assert world.blocks == 8
    assert done.returncode == 0, done.stderr
    assert world.killed


def test_stock_policies_have_servers_of_their_own_which_end_before_the_next_starts(
    stopped: Run, tmp_path: Path
) -> None:
    world = World()
    done = stopped(world, "--policies", "conserve,online-only,non-preemptive", "--json")
    assert done.returncode == 0, done.stderr
    plugged, stock = "conserve.engine.vllm.server.process", "conserve.engine.vllm.server.stock"
    # online-only, conserve, non-preemptive; then in another order: conserve, non-preemptive, online-only
    assert world.started == [plugged, stock, plugged, stock, plugged, stock, stock]
    found = json.loads(done.stdout)
    assert found["policies"]["online-only"]["offline_tokens_per_s"] == 0
    assert found["harm"].keys() == {"conserve", "non-preemptive"}
    assert [sent["policy"] for sent in world.posted] == ["conserve", "conserve"]
    assert {path.name for path in (tmp_path / "out").glob("store*")} == {
        "store-1",
        "store-1-non-preemptive",
    }


def test_a_second_run_into_a_folder_begins_with_new_rows_on_every_server(
    stopped: Run, tmp_path: Path
) -> None:
    for _ in range(2):
        done = stopped(World(), "--policies", "conserve,online-only,non-preemptive", "--rounds", "1")
        assert done.returncode == 0, done.stderr
    for store in ("store-1", "store-1-non-preemptive", "store-2", "store-2-non-preemptive"):
        (job,) = read_jobs(Settings(home=tmp_path / "out" / store), now=0.0)
        assert job.rows == 3


MODEL = {**server_reports.MODEL, "coefficients": ENGINE.model.coefficients}
TOLD = {"latency_model": MODEL, "max_num_batched_tokens": 512, "max_num_seqs": 32}


def test_test_runs_on_the_engine_are_blocks_of_their_own(
    stopped: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TOLD.items():
        monkeypatch.setitem(STATE, name, value)
    world = World()
    words = ("--policies", "online-only/planned,hygen", "--rounds", "1", "--profiler", "engine", "--json")
    done = stopped(world, "--gamma", "0.2,1,16,4", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "1 test runs, on the engine" in found["design"]["tuned"]
    assert [sent["policy"] for sent in world.posted] == ["online-only", "hygen", "online-only", "hygen"]
    tried, used = (sent["hygen"]["budget_ms"] for sent in world.posted if "hygen" in sent)
    assert tried == used > 0
    assert found["policies"]["hygen"]["blocks"] == 1


def test_a_server_that_tells_no_model_leaves_policies_untuned_and_says_so(stopped: Run) -> None:
    done = stopped(World(), "--policies", "online-only/planned,hygen,hygen-star", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "hygen, hygen-star: not tuned, since the server tells no latency model" in done.stderr
