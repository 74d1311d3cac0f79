"""Sweeps and confirmations on servers of their own, which are made up: what is asked of them, and what is kept."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conserve.bench import baseline_parameters, compare
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.bound import Mix
from conserve.bench.compare import Design, Source
from conserve.bench.deployment import Deployment, OneServer
from conserve.bench.field import Field, Turn
from conserve.bench.load import LoadPlan, LoadTarget
from conserve.bench.machine import BenchMachine
from conserve.bench.measure import Block
from conserve.bench.names import is_stock
from conserve.bench.playing import Measurement
from conserve.bench.points import Cell
from conserve.bench.presets import CPU
from conserve.bench.promise_search import Parameter, TriedValue, Tuning
from conserve.bench.servers import confirmation, rows, servers, sweep
from conserve.bench.sizing import Sized
from conserve.bench.slo_search import Promise
from conserve.bench.sweep import CellLedger, SweepPlan
from conserve.bench.traces import Arrival, Trace
from conserve.cli import output
from conserve.cli.bench_plan import own_plan
from conserve.cli.tune import TuneFlags, confirm
from conserve.config import Settings, load
from conserve.errors import ConserveError, EndpointUnusable, InputError
from conserve.jobs.telemetry.otlp import is_wanted
from conserve.store.database.store import Store
from tests import virtual_time
from tests.store_rows import leased

MACHINE = BenchMachine.demo()
HARMS = Parameter("harm", 0.01, 1.0, lambda share: {"harm": round(share, 2)})


class EndlessQueue:
    """Offline rows that never run out."""

    def waiting(self) -> int:
        return 1_000_000

    def taken(self) -> bool:
        return True


class FakeServers:
    """Servers that were started, and ended."""

    made: list["FakeServers"]

    def __init__(self, plan: Any, design: Design) -> None:
        self.plan, self.ended, self.deployment, self.prepare = plan, False, self, None
        self.answers = False  # the plug-in's server, which is stopped while stock ones have a turn
        self.comparisons: list[Design] = []
        self.ends: list[int] = []  # comparisons that were over when the servers ended to start anew
        self.made.append(self)

    async def start(self) -> None:
        self.answers = True

    async def engine(self) -> Any:
        return MACHINE.engine

    async def engines(self) -> int:
        return 1

    async def end(self) -> None:
        self.answers = False
        self.ends.append(len(self.comparisons))

    async def close(self) -> None:
        self.ended = True


class Measured:
    """Stands in for `measure`: gaps are longer by the harm that a policy's name promises."""

    def __init__(self) -> None:
        self.designs: list[Design] = []
        self.sources: list[Source] = []
        self.fails: str | None = None  # beginning of the policies whose requests time out
        self.offline_tokens: int | None = None  # of each block; None for those of `block`

    async def __call__(
        self,
        deployment: Any,
        prepare: Any,
        preset: Any,
        design: Design,
        measurement: Measurement,
        wishes: Any,
    ) -> None:
        assert deployment.answers
        deployment.comparisons.append(design)
        deployment.answers = not any(map(is_stock, design.policies))
        self.designs.append(design)
        source = measurement.offered.source(preset, None)
        self.sources.append(source)
        measurement.sized = Sized(
            preset=preset,
            design=design,
            source=source,
            rate=measurement.offered.rate,
            lengths=1.0,
            chosen=False,
            forecasts=(),
        )
        for number in range(design.rounds):
            for policy in design.policies:
                measurement.blocks.append(self._block(policy, source(number), design.block_s))
        slo = compare.limits(measurement.blocks, design.slo_scale)
        measurement.sized = replace(measurement.sized, design=replace(design, slo=slo))

    def _block(self, policy: str, trace: Trace, block_s: float) -> Block:
        whole = block(policy, trace, block_s)
        if self.offline_tokens is not None:
            whole = replace(whole, offline_tokens=self.offline_tokens)
        if self.fails is None or not policy.startswith(self.fails):
            return whole
        return replace(whole, answers=tuple(replace(one, status=RequestEnd.TIMEOUT) for one in whole.answers))


def block(policy: str, trace: Trace, block_s: float) -> Block:
    percent = policy.partition("harm-")[2]
    slower = 1 + int(percent or 0) / 100
    answers = [
        LoadAnswer(
            index=number,
            due_s=one.at_s,
            sent_s=one.at_s,
            ended_s=one.at_s + 1,
            input_tokens=one.input_tokens,
            token_at_s=tuple(one.at_s + slower * (0.1 + 0.02 * n) for n in range(5)),
            status=RequestEnd.OK,
        )
        for number, one in enumerate(trace)
    ]
    offline = 0 if policy == "online-only" else 3000
    return Block(
        policy=policy,
        started_s=0.0,
        duration_s=block_s,
        answers=tuple(answers),
        offline_tokens=offline,
        offline_decodes=offline // 10,
        iterations=1,
        planned=0,
        overruns=0,
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    FakeServers.made = []
    stand_in = Measured()
    for module in (sweep, confirmation):
        monkeypatch.setattr(module, "measure", stand_in)
        monkeypatch.setattr(module, "Servers", FakeServers)
    monkeypatch.setattr(rows, "make_rows", lambda settings, preset, seed: EndlessQueue())
    return stand_in


# A sweep

PLAN = SweepPlan(
    seed=0,
    cells=3,
    policies=["conserve", "online-only", "non-preemptive"],
    blocks=2,
    block_s=20.0,
    simulated=False,
    engine="smollm2-demo",
)


def sweep_in(folder: Path, plan: SweepPlan = PLAN) -> sweep.OnServers:
    ledger = CellLedger.open(folder / "cells.jsonl", plan)
    made = partial(own_plan, Settings(home=folder / "home"), [], seed=plan.seed)
    return sweep.OnServers(made, plan, ledger, CPU, folder, say=output.say)


def test_each_cell_is_a_comparison_on_servers_of_one_store(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = sweep_in(tmp_path)
    asyncio.run(cells.run(as_many_as_fit=False))
    (started,) = FakeServers.made
    assert started.ended
    assert not started.ends, "a quick sweep has no time for it"
    assert started.plan.preset.block_s == 20.0
    assert started.plan.settings.home == tmp_path / "store-1", "never the user's"
    assert [design.slo_scale for design in measured.designs] == [cell.scale for cell in PLAN.wanted()]
    assert all((design.rounds, design.policies) == (2, PLAN.policies) for design in measured.designs)
    assert all(design.slo_ahead for design in measured.designs), "no promise changes within a cell"
    lines = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [Cell.of(line) for line in lines[1:]] == PLAN.wanted()
    assert lines[1]["slo_ms"] == pytest.approx([PLAN.wanted()[0].scale * ms for ms in (100.0, 20.0)])
    ours = lines[1]["policies"]["conserve"]
    assert ours["attainment"] == {"ttft": 1.0, "tbt": 1.0}
    assert (ours["decode_tokens_per_s"], ours["prompt_tokens_per_s"]) == (15, 135)
    assert ours["of_bound"] > 0
    assert ours["sent_late"] == {"share": 0.0, "max_ms": 0.0}
    kept = [
        pq.read_table(tmp_path / "raw" / f"00{n}-{of}.parquet")
        for n in (1, 2, 3)
        for of in ("answers", "blocks")
    ]
    assert [table.num_rows for table in kept[1::2]] == [6, 6, 6]
    policies = kept[0].group_by("policy").aggregate([([], "count_all")])
    assert sorted(policies["policy"].to_pylist()) == sorted(PLAN.policies)
    assert policies["count_all"].to_pylist() == [lines[1]["requests"]] * 3
    said = capsys.readouterr().err
    assert "3 cells to measure, 3 policies in each, chosen by seed 0; about" in said
    assert f"3 of 3: {PLAN.wanted()[2].name}; about 0.0 s left" in said


def test_servers_start_anew_for_each_cell_of_a_full_sweep(tmp_path: Path, measured: Measured) -> None:
    """A server that is started twice is some percent faster or slower, and would be so in all cells."""
    cells, once = sweep_in(tmp_path, replace(PLAN, anew=True)), sweep_in(tmp_path / "once")
    assert cells._starts_s() == compare.STARTED_S * 2, (
        "the plug-in's; two stock ones start in each cell's turns"
    )
    assert once._starts_s() == compare.STARTED_S * 2, "the stock ones"
    anew_s, once_s = (one._takes_s(PLAN.wanted()[0], MACHINE.engine) for one in (cells, once))
    assert anew_s - once_s > compare.STARTED_S * 2
    asyncio.run(cells.run(as_many_as_fit=False))
    (servers,) = FakeServers.made
    assert servers.ends == [1, 2], "between cells"
    with pytest.raises(InputError, match="other servers"):
        sweep_in(tmp_path)


def test_a_further_sitting_has_rows_of_its_own_and_measures_what_is_missing(
    tmp_path: Path, measured: Measured
) -> None:
    asyncio.run(sweep_in(tmp_path, replace(PLAN, cells=1)).run(as_many_as_fit=False))
    (tmp_path / "store-1").mkdir(exist_ok=True)
    asyncio.run(sweep_in(tmp_path).run(as_many_as_fit=False))
    assert FakeServers.made[1].plan.settings.home == tmp_path / "store-2"
    assert len(measured.designs) == 3


def test_a_store_is_new_whatever_was_removed_beside_it(tmp_path: Path) -> None:
    for name in ("store-1-sarathi-p", "store-2", "store-10"):
        (tmp_path / name).mkdir()
    assert rows.new_store(tmp_path) == tmp_path / "store-3"


def test_a_quick_sweep_has_the_cells_that_half_an_hour_allows(tmp_path: Path, measured: Measured) -> None:
    cells = sweep_in(tmp_path, replace(PLAN, cells=12, blocks=4))
    asyncio.run(cells.run(as_many_as_fit=True))
    assert 1 <= len(cells.ledger.done) < 12
    assert not cells.ledger.missing


def test_a_server_without_a_latency_model_sets_no_rates(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(self: Any) -> None: ...

    monkeypatch.setattr(FakeServers, "engine", none)
    with pytest.raises(EndpointUnusable, match="tells no latency model"):
        asyncio.run(sweep_in(tmp_path).run(as_many_as_fit=False))
    assert FakeServers.made[0].ended


# Prompts


class CountlessServer:
    """A server that takes each policy, and counts nothing."""

    async def follow(self, *_: Any, **__: Any) -> None: ...

    async def counters(self) -> None: ...

    async def rows(self) -> int:
        return 1

    async def watch(self, start_at: float) -> list[Any]:
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            return []
        raise AssertionError("a block is shorter")

    def counted(self, *_: Any) -> dict[str, int]:
        return {"offline_tokens": 0, "iterations": 0, "planned": 0, "overruns": 0}


class ReadyPlace:
    """Stands in for a server's processes, which are up."""

    started = True

    def __init__(self, name: str, *_: Any, url: str, **__: Any) -> None:
        self.name, self.url, self.server = name, url, CountlessServer()
        self.answers = False
        self.turns = 0

    def first_turn(self) -> bool:
        self.turns += 1
        return self.turns == 1

    async def begin(self) -> None:
        self.answers = True

    async def freeze(self) -> None:
        self.answers = False

    async def filled(self, seconds: float) -> None: ...


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Seeds of the prompts that are played."""
    found: list[int] = []

    async def play_apart(plan: LoadPlan, begin: Callable[[], float]) -> list[LoadAnswer]:
        found.append(plan.seed)
        await asyncio.sleep(10.0)  # its files are no longer in memory
        asked_at = asyncio.get_running_loop().time()
        assert asked_at < begin() < asked_at + 1
        return []

    async def warm(trace: Trace, target: LoadTarget, *, seed: int) -> list[LoadAnswer]:
        """Live requests before a block: short answers to a prompt as long as the block's, of which none knows."""
        (one,) = trace.arrivals
        assert (one.at_s, one.output_tokens <= compare.WARM_TOKENS) == (0.0, True)
        warmed.append(seed)
        return []

    async def follow(*_: Any, **__: Any) -> None: ...

    warmed: list[int] = []
    monkeypatch.setattr(compare, "play", warm)
    monkeypatch.setattr(compare, "play_apart", play_apart)
    monkeypatch.setattr(Deployment, "follow", follow)
    monkeypatch.setattr(servers, "ServerPlace", ReadyPlace)
    monkeypatch.setattr(rows.OfflineQueue, "taken", lambda self: True)  # by a harvester of no process
    yield found
    assert len({*warmed}) == len(warmed)
    assert not {*warmed} & {*found}


PAIR = Design(policies=["conserve", "online-only/planned"], rounds=2, block_s=5.0)


def sized_pair() -> Sized:
    trace = Trace(name="t", duration_s=5.0, arrivals=(Arrival(0.0, 16, 4),))
    return Sized(
        preset=CPU,
        design=PAIR,
        source=lambda number: trace,
        rate=0.2,
        lengths=1.0,
        chosen=False,
        forecasts=(),
    )


async def compared(field: Field) -> None:
    comparison = compare.alternate(field, sized_pair().source, PAIR, say=lambda line: None)
    assert len([block async for block in comparison]) == 4


def test_every_block_and_test_run_on_the_same_servers_has_prompts_of_its_own(
    tmp_path: Path, measured: Measured, seeds: list[int]
) -> None:
    async def cells() -> None:
        plan = own_plan(Settings(home=tmp_path), [], PAIR.policies, CPU, tmp_path / "store", seed=0)
        field = servers.Servers(plan, PAIR)
        for policy in ("hygen-star", "hygen"):
            test_run = baseline_parameters.measured_run(field, field.deployment, sized_pair(), policy)
            await test_run({baseline_parameters.TERMS[policy]: 1.0})
            await compared(field)

    virtual_time.run(cells())
    assert len(seeds) == len(set(seeds)) == 10


def test_a_server_has_its_turn_alone(tmp_path: Path, measured: Measured, seeds: list[int]) -> None:
    """The plug-in's one has it again where the next comparison asks for its speed."""
    design = replace(PAIR, policies=["conserve", "online-only"])

    async def turns() -> list[tuple[bool, bool]]:
        plan = own_plan(Settings(home=tmp_path), [], design.policies, CPU, tmp_path / "store", seed=0)
        field = servers.Servers(plan, design)
        await field.prepare(replace(sized_pair(), design=design), None, None)
        plugged, stock = field._plugged, field._stock["online-only"]
        found = []
        for turn in (field.start, partial(field.turn, "online-only", None), field.start):
            await turn()
            found.append((plugged.answers, stock.answers))  # type: ignore[attr-defined]
        return found

    assert virtual_time.run(turns()) == [(True, False), (False, True), (True, False)]


def test_harvesters_of_a_comparison_write_into_their_own_folder(tmp_path: Path) -> None:
    """Their rows are no job of the user's, who would be told to go on with them."""
    plan = own_plan(Settings(home=tmp_path), [], PAIR.policies, CPU, tmp_path / "store", seed=0)
    command = plan.harvester(plan.settings, "http://127.0.0.1:1", "--steady")
    assert command.log == tmp_path / "store" / "harvester.log"
    assert "--steady" in command.words


def test_servers_of_a_comparison_leave_the_users_files_metrics_and_traces_alone(tmp_path: Path) -> None:
    """A port that the user's harvester has would end theirs, and a bucket would keep their files for ever."""
    theirs = {"data": "s3://team/conserve", "metrics_port": 9108, "otlp_endpoint": "http://collector:4318"}
    (tmp_path / "conserve.toml").write_text(
        "".join(f"{name} = {value!r}\n" for name, value in theirs.items())
    )
    variables = {"CONSERVE_HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path)}
    users = load({}, variables, tmp_path)
    assert theirs == {name: getattr(users, name) for name in theirs}
    plan = own_plan(users, [], PAIR.policies, CPU, tmp_path / "store", seed=0)
    for own in (plan.settings, servers.stock_settings(plan.settings, "non-preemptive")):
        environment = plan.harvester(own, "http://127.0.0.1:1").environment
        found = load({"home": own.home}, {**variables, **environment}, tmp_path)
        assert (found.store_url, found.data) == (own.store_url, None)
        assert (found.metrics_port, found.otlp_endpoint) == (None, None)
        assert not is_wanted(found, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", **environment})


def test_a_block_of_rows_that_no_harvester_took_is_dropped(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be told as one in which the policy found no time for rows."""
    monkeypatch.setattr(EndlessQueue, "taken", lambda self: False)
    plan = own_plan(Settings(home=tmp_path), [], PAIR.policies, CPU, tmp_path / "store", seed=0)
    field = servers.Servers(plan, PAIR)
    asyncio.run(field.played("online-only/planned"))
    with pytest.raises(ConserveError, match=r"no offline row of conserve was sent .* harvester: nothing"):
        asyncio.run(field.played("conserve"))
    log = tmp_path / "store" / "harvester.log"
    log.parent.mkdir()
    log.write_text("conserve: the first\nconserve: cannot listen at 127.0.0.1:9108\n")
    with pytest.raises(ConserveError, match="harvester: conserve: cannot listen at"):
        asyncio.run(field.played("conserve"))


def test_a_queue_knows_whether_a_row_was_taken(tmp_path: Path) -> None:
    queue = rows.make_rows(Settings(home=tmp_path), replace(CPU, offline_rows=3), 0)
    assert (queue.waiting(), queue.taken()) == (3, False)
    store = Store.open(queue.settings)
    assert len(leased(store).rows) == 3
    store.close()
    assert (queue.waiting(), queue.taken()) == (0, True)


@pytest.mark.parametrize(
    ("policy", "seen", "dropped"),
    [
        ("conserve", [0] * 5, True),
        ("conserve", [0, 0, 3], False),
        ("online-only/planned", [], False),
    ],
)
def test_a_block_counts_if_the_users_server_has_a_row_at_one_of_several_looks(
    policy: str, seen: list[int], dropped: bool
) -> None:
    """A harvester with one row in flight has none for a moment."""

    class Told(CountlessServer):
        async def rows(self) -> int:
            return seen.pop(0)

    field = OneServer(
        deployment=Told(),  # type: ignore[arg-type]
        target=LoadTarget(base_url="http://host", model="m"),
        preemption="off",
    )
    ends = pytest.raises(ConserveError, match="no offline row at the end of a block of conserve")
    with ends if dropped else nullcontext():
        virtual_time.run(field.played(policy))
    assert not seen


def test_each_turn_begins_with_live_requests_that_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch, seeds: list[int]
) -> None:
    sent: list[int] = []
    warm = compare.play

    async def counted(trace: Trace, target: LoadTarget, *, seed: int) -> list[LoadAnswer]:
        sent.append(len(seeds))
        return await warm(trace, target, seed=seed)

    monkeypatch.setattr(compare, "play", counted)
    server, target = CountlessServer(), LoadTarget(base_url="http://host", model="m")
    field = OneServer(deployment=server, target=target, preemption="off")  # type: ignore[arg-type]
    virtual_time.run(compared(field))
    assert sent == [turn for turn in range(4) for _ in range(compare.WARMED_BY)], "before the block"


def test_a_server_that_has_just_started_meets_arrivals_that_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seeds: list[int]
) -> None:
    """Whichever policy comes first: those of 20 s from the block's first one on."""
    found: list[tuple[int, Trace]] = []
    warm = compare.play

    async def practice(trace: Trace, target: LoadTarget, *, seed: int) -> list[LoadAnswer]:
        if len(trace) == 1:
            return await warm(trace, target, seed=seed)
        found.append((seed, trace))
        return []

    monkeypatch.setattr(compare, "play", practice)
    monkeypatch.setattr(servers, "stock_command", lambda *_: None)
    arrivals = tuple(Arrival(at_s, 16, 40) for at_s in (3.0, 5.0, 22.9, 23.1))
    trace = Trace(name="t", duration_s=25.0, arrivals=arrivals)
    design = Design(policies=["conserve", "online-only"], rounds=2, block_s=25.0)

    async def rounds() -> None:
        plan = own_plan(Settings(home=tmp_path), [], design.policies, CPU, tmp_path / "store", seed=0)
        field = servers.Servers(plan, design)
        await field.prepare(replace(sized_pair(), design=design), None, None)
        async for _ in compare.alternate(field, lambda number: trace, design, say=lambda line: None):
            pass

    virtual_time.run(rounds())
    assert [[one.at_s for one in early] for _, early in found] == 2 * [[0.0, 2.0, pytest.approx(19.9)]]
    assert [one.output_tokens for one in found[0][1]] == [40, 40, 40]
    assert not {seed for seed, _ in found} & {*seeds}
    assert len(seeds) == 4


def test_a_test_run_on_a_server_that_has_just_started_is_practised_and_warmed_as_any_turn(
    monkeypatch: pytest.MonkeyPatch, seeds: list[int]
) -> None:
    """The first test run is the reference of a baseline's parameter, and would be of a cold server."""
    before: list[str] = []

    async def noted(what: str, *rest: Any) -> None:
        assert not seeds
        before.append(what)

    monkeypatch.setattr(compare, "practised", partial(noted, "practised"))
    monkeypatch.setattr(compare, "warmed", partial(noted, "warmed"))
    server, target = CountlessServer(), LoadTarget(base_url="http://host", model="m")
    field = OneServer(deployment=server, target=target, preemption="off")  # type: ignore[arg-type]
    virtual_time.run(baseline_parameters.measured(Started(field), sized_pair(), "online-only"))
    assert before == ["practised", "warmed"]
    assert len(seeds) == 1


class Started:
    """A field whose server has just started."""

    def __init__(self, field: OneServer) -> None:
        self.field = field

    async def turn(self, policy: str, slo: Any) -> Turn:
        return (await self.field.turn(policy, slo))._replace(first=True)

    async def played(self, policy: str) -> None: ...


def test_a_second_comparison_on_an_endpoint_has_other_prompts_than_the_first(seeds: list[int]) -> None:
    async def runs() -> None:
        for _ in range(2):
            server, target = CountlessServer(), LoadTarget(base_url="http://host", model="m")
            await compared(OneServer(deployment=server, target=target, preemption="off"))  # type: ignore[arg-type]

    virtual_time.run(runs())
    assert len(seeds) == len(set(seeds)) == 8


# A confirmation


class Quiet:
    """A simulator that plays nothing: the promise was found."""

    machine, block_s = MACHINE, 20.0

    def play(self, name: str, blocks: Any, **rest: Any) -> list[Block]:
        return [block(name, one, 20.0) for one in blocks]


def found(share: float) -> TriedValue:
    return TriedValue(
        parameter=HARMS,
        value=share,
        excess=0.9,
        rows_per_s=2.0,
        prompt_tokens_per_s=900.0,
        decode_tokens_per_s=60.0,
    )


def confirmed_in(tmp_path: Path, share: float, tolerance: float) -> TriedValue:
    from conserve.bench.points import arrivals

    cell = Cell(busy=0.4, cv=1.0, lengths="chat", scale=1.0)
    tuning = Tuning(
        simulator=Quiet(),  # type: ignore[arg-type]
        blocks=[arrivals(cell, 1.0, 20.0)(number) for number in range(3)],
        promised=[Promise("p99", "tbt", tolerance)],
        mix=Mix.of(MACHINE.rows(10, seed=0), MACHINE.engine),
        say=lambda sentence: None,
    )
    wanted = TuneFlags(model="smollm2-demo", flags=[], preset="cpu", rounds=2, seed=0)
    return confirm(Settings(home=tmp_path), wanted, tuning, found(share))


def test_a_promise_that_the_engine_keeps_is_confirmed(tmp_path: Path, measured: Measured) -> None:
    candidate = confirmed_in(tmp_path, 0.05, tolerance=0.1)
    assert (candidate.promises, candidate.kept) == ({"harm": 0.05}, True)
    assert candidate.excess == pytest.approx(1.05 / 1.1)
    assert (candidate.prompt_tokens_per_s, candidate.decode_tokens_per_s) == (135.0, 15.0), "of the engine"
    (design,) = measured.designs
    assert design.policies == ["online-only/planned", "conserve/harm-5"]
    assert FakeServers.made[0].ended


def test_each_engine_of_a_server_has_a_block_of_the_search(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def two(self: Any) -> int:
        return 2

    alone = confirmed_in(tmp_path, 0.05, tolerance=0.1)
    monkeypatch.setattr(FakeServers, "engines", two)
    both = confirmed_in(tmp_path, 0.05, tolerance=0.1)
    for rate in ("prompt_tokens_per_s", "decode_tokens_per_s"):
        assert getattr(both, rate) == getattr(alone, rate) / 2 > 0, "of one engine, as in the search"
    one, other = measured.sources
    assert len(other(0)) == len(one(0)) + len(one(1))
    assert [arrival.at_s for arrival in other(0)] == sorted(arrival.at_s for arrival in (*one(0), *one(1)))


def test_one_that_it_does_not_keep_is_lowered(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate = confirmed_in(tmp_path, 0.2, tolerance=0.11)
    assert [design.policies[1] for design in measured.designs] == [
        "conserve/harm-20",
        "conserve/harm-14",
        "conserve/harm-10",
    ]
    assert (candidate.promises["harm"], candidate.kept) == (0.1, True)
    assert "on the engine it exceeds what may be harmed by 8%; trying less" in capsys.readouterr().err


def test_a_promise_that_the_engine_did_not_keep_is_not_tried_again(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    """A harm is rounded to whole percent: 1.4 % and 0.98 % are the same promise, and so are 2.4 % and 1.68 %."""
    measured.fails = "conserve"
    candidate = confirmed_in(tmp_path, 0.024, tolerance=0.1)
    assert [design.policies[1] for design in measured.designs] == ["conserve/harm-2", "conserve/harm-1"]
    assert (candidate.promises, candidate.kept) == ({"harm": 0.01}, False)
    said = capsys.readouterr().err
    assert said.count("trying less") == said.count("nothing less can be promised") == 1


def test_live_requests_that_fail_without_rows_confirm_nothing(tmp_path: Path, measured: Measured) -> None:
    measured.fails = ""
    with pytest.raises(EndpointUnusable, match="failed with no row beside them"):
        confirmed_in(tmp_path, 0.05, tolerance=0.1)
    assert FakeServers.made[0].ended


def test_live_requests_that_fail_beside_rows_are_told_as_such(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    measured.fails = "conserve"
    assert not confirmed_in(tmp_path, 0.05, tolerance=0.1).kept
    said = "on the engine live requests beside rows failed, or were not answered in time; trying less"
    assert said in capsys.readouterr().err


def test_a_promise_beside_which_no_row_computed_is_not_confirmed(tmp_path: Path, measured: Measured) -> None:
    """Live requests beside no row are compared with themselves."""
    measured.offline_tokens = 0
    with pytest.raises(ConserveError, match=r"no token of a row was computed .* nothing is confirmed"):
        confirmed_in(tmp_path, 0.05, tolerance=0.1)
    assert FakeServers.made[0].ended


def test_after_four_values_it_is_not_confirmed(tmp_path: Path, measured: Measured) -> None:
    assert not confirmed_in(tmp_path, 0.9, tolerance=0.05).kept
    assert len(measured.designs) == 4
