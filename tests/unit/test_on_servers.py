"""Sweeps and confirmations on servers of their own, which are made up: what is asked of them, and what is kept."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.bound import Mix
from conserve.bench.compare import Design
from conserve.bench.machine import BenchMachine
from conserve.bench.measure import Block
from conserve.bench.playing import Measurement
from conserve.bench.points import Cell
from conserve.bench.presets import CPU
from conserve.bench.profiler import Promise
from conserve.bench.servers import confirmation, rows, sweep
from conserve.bench.sizing import Sized
from conserve.bench.sweep import CellLedger, SweepPlan
from conserve.bench.traces import Trace
from conserve.bench.tune import Parameter, TriedValue, Tuning
from conserve.cli import output
from conserve.cli.bench_plan import own_plan
from conserve.cli.tune import TuneFlags, confirm
from conserve.config import Settings
from conserve.errors import EndpointUnusable

MACHINE = BenchMachine.demo()
HARMS = Parameter("harm", 0.01, 1.0, lambda share: {"harm": round(share, 2)})


class FakeServers:
    """Servers that were started, and ended."""

    made: list["FakeServers"]

    def __init__(self, plan: Any, design: Design) -> None:
        self.plan, self.ended, self.deployment, self.prepare = plan, False, self, None
        self.made.append(self)

    async def start(self) -> None: ...

    async def engine(self) -> Any:
        return MACHINE.engine

    async def close(self) -> None:
        self.ended = True


class Measured:
    """Stands in for `measure`: gaps are longer by the harm that a policy's name promises."""

    def __init__(self) -> None:
        self.designs: list[Design] = []

    async def __call__(
        self,
        deployment: Any,
        prepare: Any,
        preset: Any,
        design: Design,
        measurement: Measurement,
        wishes: Any,
    ) -> None:
        self.designs.append(design)
        source = measurement.offered.source(preset, None)
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
                measurement.blocks.append(block(policy, source(number), design.block_s))


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
    monkeypatch.setattr(rows, "make_rows", lambda settings, preset, seed: settings.home / "offline.jsonl")
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


def test_each_cell_is_a_comparison_on_servers_that_start_once(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = sweep_in(tmp_path)
    asyncio.run(cells.run(as_many_as_fit=False))
    (servers,) = FakeServers.made
    assert servers.ended
    assert servers.plan.preset.block_s == 20.0
    assert servers.plan.settings.home == tmp_path / "store-1", "never the user's"
    assert [design.slo_scale for design in measured.designs] == [cell.scale for cell in PLAN.wanted()]
    assert all((design.rounds, design.policies) == (2, PLAN.policies) for design in measured.designs)
    lines = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [Cell.of(line) for line in lines[1:]] == PLAN.wanted()
    ours = lines[1]["policies"]["conserve"]
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


def test_a_further_sitting_has_rows_of_its_own_and_measures_what_is_missing(
    tmp_path: Path, measured: Measured
) -> None:
    asyncio.run(sweep_in(tmp_path, replace(PLAN, cells=1)).run(as_many_as_fit=False))
    (tmp_path / "store-1").mkdir(exist_ok=True)
    asyncio.run(sweep_in(tmp_path).run(as_many_as_fit=False))
    assert FakeServers.made[1].plan.settings.home == tmp_path / "store-2"
    assert len(measured.designs) == 3


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


# A confirmation


class Quiet:
    """A simulator that plays nothing: the promise was found."""

    block_s = 20.0

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


def confirmed_in(tmp_path: Path, share: float, tolerance: float) -> tuple[TriedValue, bool]:
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
    candidate, confirmed = confirmed_in(tmp_path, 0.05, tolerance=0.1)
    assert (candidate.promises, confirmed) == ({"harm": 0.05}, True)
    (design,) = measured.designs
    assert design.policies == ["online-only/planned", "conserve/harm-5"]
    assert FakeServers.made[0].ended


def test_one_that_it_does_not_keep_is_lowered(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate, confirmed = confirmed_in(tmp_path, 0.2, tolerance=0.11)
    assert [design.policies[1] for design in measured.designs] == [
        "conserve/harm-20",
        "conserve/harm-14",
        "conserve/harm-10",
    ]
    assert (candidate.promises["harm"], confirmed) == (0.1, True)
    assert "on the engine it exceeds what may be harmed by 8%; trying less" in capsys.readouterr().err


def test_after_four_values_it_is_not_confirmed(tmp_path: Path, measured: Measured) -> None:
    _, confirmed = confirmed_in(tmp_path, 0.9, tolerance=0.05)
    assert not confirmed
    assert len(measured.designs) == 4
