"""Operating points, their bound, the sweep's ledger and tables: all on made-up engines and made-up cells."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from conserve.bench import points, sweep
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.attainment import LatencyLimits
from conserve.bench.bound import Mix, least_iterations, rows_per_s, wanted_by
from conserve.bench.cell import RATIOS
from conserve.bench.cell_baselines import batches_of
from conserve.bench.leftover import left_ms
from conserve.bench.load import prompt_ids
from conserve.bench.machine import DEMO, BenchMachine
from conserve.bench.measure import Block
from conserve.bench.pages import sweep_report
from conserve.bench.points import BUSY, CVS, LENGTHS, SCALES, TRACES, Cell, grid, spread
from conserve.bench.simulate_online import play
from conserve.bench.simulate_with_rows import Sharing, play_with_rows
from conserve.bench.simulated import Simulator
from conserve.bench.sweep import CellLedger, SweepPlan, SweepTimeLeft
from conserve.bench.traces import Arrival, Trace
from conserve.cli.sweep import (
    SETS,
    SIZES,
    SweepFlags,
    facts,
    measure_simulated,
    plan_of,
    plan_on_servers,
    policies_of,
    usual_folder,
)
from conserve.config import Settings
from conserve.errors import InputError, SettingsError
from conserve.profiles.batch import Slice
from conserve.profiles.book import Book
from conserve.profiles.conserve import ConServeModel
from tests.made_up_blocks import Answered, MadeUp, counted

MACHINE = BenchMachine.demo()
RAW = Path(__file__).parents[2] / "docs" / "benchmarks" / "raw"
PLAN = SweepPlan(
    seed=3,
    cells=4,
    policies=["conserve", "online-only", "non-preemptive"],
    blocks=2,
    block_s=30.0,
    simulated=True,
    engine="the demo model",
)
CELL = Cell(busy=0.4, cv=2.0, lengths="agents", scale=1.0)


def trace_of(*arrivals: tuple[float, int, int], shared: int = 0) -> Trace:
    return Trace(
        name="made up",
        duration_s=30.0,
        arrivals=tuple(Arrival(*one) for one in arrivals),
        shared_tokens=shared,
    )


# Cells


def test_every_beginning_of_the_order_fills_the_grid_evenly() -> None:
    cells = list(spread(seed=5))
    assert sorted(map(repr, cells)) == sorted(map(repr, grid()))
    assert len(set(cells)) == len(cells) == (len(LENGTHS) * len(CVS) + len(TRACES)) * len(BUSY) * len(SCALES)
    for count in (16, 32, 64):
        first = cells[:count]
        for name, values in (("busy", BUSY), ("scale", SCALES)):
            share = [sum(getattr(cell, name) == value for cell in first) / count for value in values]
            assert all(abs(one - 1 / len(values)) < 0.13 for one in share)
        assert {cell.lengths for cell in first} >= set(LENGTHS)
    assert list(spread(seed=5)) == cells
    assert list(spread(seed=6)) != cells


def test_a_rate_keeps_the_engine_as_busy_as_the_cell_says() -> None:
    for cell in islice(spread(seed=1), 3):
        rate = points.rate_of(cell, MACHINE.engine, 30.0)
        steady = replace(cell, cv=None if cell.cv is None else 1.0)
        trace = points.arrivals(steady, rate, 120.0)(0)
        assert play(trace, MACHINE.engine, 120.0, until_s=120.0).busy == pytest.approx(cell.busy, rel=0.15)


def test_blocks_are_of_their_own_and_the_same_again() -> None:
    arrivals = points.arrivals(CELL, 1.0, 30.0)
    assert arrivals(0) == arrivals(0) != arrivals(1)
    assert arrivals(0).shared_tokens == LENGTHS["agents"].shared
    trace = points.arrivals(replace(CELL, lengths="trace-code", cv=None), 1.0, 30.0)(0)
    assert trace.duration_s <= 31
    assert len({one.output_tokens for one in trace}) > 2, "its own lengths, uncut"


def test_agents_share_the_beginning_of_their_prompts() -> None:
    one, other = Arrival(0.0, 600, 96), Arrival(1.0, 500, 96)
    first, second = (
        prompt_ids(one, 0, (100, 20_000), 1, shared=384),
        prompt_ids(other, 7, (100, 20_000), 2, shared=384),
    )
    assert (len(first), len(second)) == (600, 500)
    assert first[:384] == second[:384]
    assert first[384:400] != second[384:400]


def test_what_is_shared_takes_no_time_in_forecasts() -> None:
    apart, shared = trace_of((0.0, 600, 4)), trace_of((0.0, 600, 4), shared=384)
    own = trace_of((0.0, 216, 4))
    engine, sharing = MACHINE.engine, Sharing(online_first=True, max_tokens=2048)
    busy = [play(trace, engine, 30.0).busy_s for trace in (own, shared, apart)]
    assert busy == sorted(busy)
    assert busy[1] < 1.3 * busy[0] < busy[2], "its context is read all the same"
    beside = [
        play_with_rows(trace, engine, 30.0, sharing, [(64, 8)], window=8).offline_tokens
        for trace in (shared, apart)
    ]
    assert beside[0] > beside[1]


def test_a_profile_is_a_machine(tmp_path: Path) -> None:
    machine = BenchMachine.of(Book(tmp_path).named("llama-3.1-8b-h100"))
    assert machine.times == 4.0
    assert machine.rows(10, seed=0)[0][0] > MACHINE.rows(10, seed=0)[0][0]
    assert MACHINE.times == 1.0
    assert MACHINE.model.coefficients["constant"] * 2.2 == pytest.approx(DEMO[-1])
    assert MACHINE.limited(256).engine.max_tokens == 256


def test_hygens_predictor_is_fitted_to_batches_as_large_as_those_of_its_engine(tmp_path: Path) -> None:
    for machine in (MACHINE, BenchMachine.of(Book(tmp_path).named("llama-3.1-8b-h100"))):
        batches = batches_of(machine, seed=0)
        requests, tokens = machine.flags["max_num_seqs"], machine.flags["max_num_batched_tokens"]
        assert 0.7 < max(one.requests - one.prefills for one in batches) / requests < 1
        assert 0.8 < max(one.prefill_tokens for one in batches) / tokens < 2
        assert 0.9 < max(one.context for one in batches) / machine.kv_tokens < 1.2
    assert sum(one.context for one in batches_of(MACHINE, seed=0)) == 10_438_690, "as in the published sweeps"


# The bound


def test_iterations_are_shared_as_far_as_the_slo_lets_them() -> None:
    slo = LatencyLimits(1000, 100)
    assert least_iterations(trace_of((0.0, 10, 5)), slo) == 5
    assert least_iterations(trace_of((0.0, 10, 5), (0.1, 10, 5)), slo) == 5, "side by side"
    assert least_iterations(trace_of((0.0, 10, 5), (9.0, 10, 5)), slo) == 10, "one after the other"
    assert least_iterations(trace_of((0.0, 10, 5), (1.2, 10, 5)), slo) == 5
    assert least_iterations(trace_of((0.0, 10, 5), (1.2, 10, 5)), LatencyLimits(1000, 10)) == 10


def test_only_what_the_slo_wants_by_the_end_of_the_block_is_live_work() -> None:
    slo = LatencyLimits(1000, 100)
    found = wanted_by(trace_of((0.0, 10, 5), (28.75, 10, 5), (29.5, 10, 5)), 30.0, slo)
    assert [one.output_tokens for one in found] == [5, 3], "the last one's first token may come after it"


def test_a_bound_falls_with_live_work_and_with_a_tighter_slo() -> None:
    mix = Mix.of(MACHINE.rows(200, seed=0), MACHINE.engine)
    cells = [points.arrivals(CELL, rate, 30.0)(0) for rate in (0.5, 1.0, 2.0)]
    loose, tight = LatencyLimits(2000, 500), LatencyLimits(2000, 30)
    bounds = [rows_per_s([trace], MACHINE.engine, 30.0, loose, mix) for trace in cells]
    assert all(more > less for more, less in pairwise(bounds))
    assert all(
        rows_per_s([trace], MACHINE.engine, 30.0, tight, mix) < bound
        for trace, bound in zip(cells, bounds, strict=True)
    )
    crowded = [points.arrivals(CELL, rate, 30.0)(0) for rate in (20.0, 40.0)]
    few, fewer = (rows_per_s([trace], MACHINE.engine, 30.0, loose, mix) for trace in crowded)
    assert fewer < few < 0, "live work that goes beyond the block is taken off, as it is of a policy's rows"


def test_no_simulated_sharing_harvests_more_than_the_bound() -> None:
    rows = MACHINE.rows(300, seed=0)
    mix, slo = Mix.of(rows, MACHINE.engine), LatencyLimits(2000, 500)
    tokens = mix.prompt + mix.steps
    for rate in (0.3, 0.8):
        trace = points.arrivals(replace(CELL, lengths="chat"), rate, 60.0)(0)
        sharing = Sharing(online_first=True, max_tokens=2048, budget_ms=500.0)
        found = play_with_rows(trace, MACHINE.engine, 60.0, sharing, rows, window=160)
        assert found.offline_tokens / 60 / tokens <= 1.05 * rows_per_s(
            [trace], MACHINE.engine, 60.0, slo, mix
        )


def test_work_of_rows_is_what_their_tokens_take() -> None:
    mix = Mix(prompt=100.0, steps=10.0, token_ms=1.0, step_ms=5.0)
    assert mix.row_ms == 150
    assert mix.rows(300, 0) == mix.rows(0, 60) == 2.0


# A sweep


def made_up(machine: BenchMachine, policy: str, blocks: Iterable[Trace], **given: Any) -> Iterator[MadeUp]:
    """Gaps of 20 ms alone, ten times as long first come first served, and a tenth longer under our policy."""
    slow = {"online-only": 1.0, "non-preemptive": 10.0}.get(policy, 1.1)
    rows = policy != "online-only"
    for trace in blocks:
        yield block_of(trace, slow, round(1000 * slow) * rows, 100 * rows)


def block_of(trace: Trace, slow: float, tokens: int, steps: int) -> MadeUp:
    """A block whose latencies are so many times the shortest ones."""
    answers = [
        Answered([100 + one.at_s + slow * (0.1 + 0.02 * n) for n in range(one.output_tokens)])
        for one in trace
    ]
    last = counted(tokens, steps, planned=50, overruns=1)
    return MadeUp(100.0, 130.0, answers, counted(0, 0), last)


def simulator() -> Simulator:
    return Simulator(machine=MACHINE, simulate=made_up, block_s=30.0, seed=0)


@pytest.mark.parametrize(
    ("name", "simulated_as"),
    [
        ("conserve/-scheduler", "sarathi++/prompt"),
        ("conserve/-scheduler-checkpoints", "sarathi++/prompt"),
        ("conserve/-scheduler-preemption", "sarathi++/off"),
        ("conserve/-preemption", "conserve/off"),
        ("conserve", "conserve"),
        ("sarathi++", "sarathi++/off"),
        ("non-preemptive", "non-preemptive"),
        ("sarathi-p", "priority"),
    ],
)
def test_an_arm_goes_without_the_mechanisms_that_it_names_alone(name: str, simulated_as: str) -> None:
    asked: list[tuple[str, bool]] = []

    def noted(machine: BenchMachine, policy: str, blocks: Iterable[Trace], **given: Any) -> Iterator[MadeUp]:
        asked.append((policy, bool(given["promises"])))
        yield from made_up(machine, policy, blocks, **given)

    replace(simulator(), simulate=noted).play(name, [trace_of((0.0, 10, 2))], LatencyLimits(100.0, 10.0))
    assert asked == [(simulated_as, name.startswith("conserve"))], "rows leave by the promise"


def test_a_simulated_cell_has_every_figure() -> None:
    found = sweep.simulated(CELL, PLAN, simulator())
    json.dumps(found)
    ours, most = found["policies"]["conserve"], found["policies"]["non-preemptive"]
    assert [ours["ratios"][name][0] for name in RATIOS] == pytest.approx([1.1] * 4)
    assert ours["ratios"]["tbt_p99"][1:] == pytest.approx([1.1, 1.1])
    assert most["ratios"]["ttft_p99"][0] == pytest.approx(10)
    assert ours["attainment"] == {"ttft": 0.0, "tbt": 0.0}
    assert ours["decode_tokens_per_s"] == pytest.approx(100 / 30)
    assert ours["overruns"] == {"count": PLAN.blocks, "share": 0.02}
    assert 0 < ours["of_non_preemptive"] < 1 == most["of_non_preemptive"]
    assert 0 < ours["of_bound"] < 1
    assert all(
        one["rows_per_s"] == pytest.approx(one["rows_in_block_per_s"] - left_rows_per_s(slow))
        for one, slow in ((ours, 1.1), (most, 10.0))
    )
    alone = found["policies"]["online-only"]
    assert (alone["rows_per_s"], alone["of_bound"], alone["rows_in_block_per_s"]) == (None, None, 0)
    assert left_rows_per_s(10.0) > left_rows_per_s(1.1) >= 0


def test_where_live_work_fills_the_time_no_ratio_is_told() -> None:
    """Non-preemptive scheduling has few rows, and all its answers come after their block."""

    def late(machine: BenchMachine, policy: str, blocks: Iterable[Trace], **given: Any) -> Iterator[MadeUp]:
        for played in made_up(machine, policy, blocks, **given):
            if policy == "non-preemptive":
                answers = [Answered([at + 1000 for at in one.token_at_s]) for one in played.answers]
                played = replace(played, answers=answers, last=counted(300, 10))
            yield played

    found = sweep.simulated(CELL, PLAN, replace(simulator(), simulate=late))
    assert found["policies"]["non-preemptive"]["rows_per_s"] < 0
    assert {one["of_non_preemptive"] for one in found["policies"].values()} == {None}
    assert found["policies"]["conserve"]["of_bound"] > 0


def at_equal_p99(
    slow_of: Callable[[float], float], steps_of: Callable[[float], int] = lambda budget: 0
) -> tuple[dict[str, Any], list[float]]:
    """A cell whose baselines are tuned to conserve's P99s, and the budgets that HyGen had, the reported one last.

    HyGen's latencies are so many times online-only's by its budget, and its tokens are more with a larger one.
    """
    budgets: list[float] = []

    def shared(machine: BenchMachine, policy: str, blocks: Iterable[Trace], **given: Any) -> Iterator[MadeUp]:
        if policy != "hygen/off":
            yield from made_up(machine, policy, blocks, **given)
            return
        budgets.append(given["terms"]["budget_ms"])
        steps = steps_of(budgets[-1])
        for trace in blocks:
            yield block_of(trace, slow_of(budgets[-1]), round(10 * budgets[-1]) + steps, steps)

    plan = replace(PLAN, policies=[*PLAN.policies, "hygen", "hygen-star", "sarathi-p"], equal_p99=True)
    return sweep.simulated(CELL, plan, replace(simulator(), simulate=shared)), budgets


def test_baselines_are_tuned_to_our_p99s_on_the_reported_blocks() -> None:
    found, budgets = at_equal_p99(lambda budget: 1.0 + budget / 1000)
    reported = budgets.pop()
    kept = [budget for budget in budgets if 1.0 + budget / 1000 <= 1.05 * 1.1]
    assert len(kept) > 1
    assert reported == max(kept), "the one with the most rows"
    rows = {name: one["rows_per_s"] for name, one in found["policies"].items()}
    assert found["at_equal_p99"]["hygen"] == {
        "kept": True,
        "times": pytest.approx(rows["conserve"] / rows["hygen"]),
    }
    assert found["at_equal_p99"]["hygen-star"]["times"] == found["at_equal_p99"]["sarathi-p"]["times"] == 1.0
    assert any("to conserve's, on the reported blocks" in said for said in found["tuned"])


def test_of_settings_with_our_p99s_the_one_with_the_most_rows_is_taken_not_the_one_with_the_most_tokens() -> (
    None
):
    """Up to 100 ms almost all of HyGen's tokens are decode steps, which take longer than tokens of prompts."""
    found, budgets = at_equal_p99(lambda budget: 1.0 + budget / 1000, lambda budget: 900 * (budget < 100))
    reported = budgets.pop()
    assert reported == max(budget for budget in budgets if budget < 100)
    assert reported < max(budget for budget in budgets if 1.0 + budget / 1000 <= 1.05 * 1.1)
    assert found["at_equal_p99"]["hygen"]["kept"]


def test_a_baseline_that_has_our_p99s_with_no_setting_has_no_ratio() -> None:
    found, _ = at_equal_p99(lambda budget: 1.2 + budget / 1000)
    assert found["at_equal_p99"]["hygen"] == {"kept": False, "times": None}
    least, _ = at_equal_p99(lambda budget: 1.1 if budget < 20 else 2.0)
    assert least["at_equal_p99"]["hygen"] == {"kept": True, "times": None}, "with next to no rows"


def test_cells_without_such_a_baseline_count_as_above_any_ratio() -> None:
    measured = [told(cell, 1.0) for cell in PLAN.wanted()]
    assert sweep_report.equal_table(measured) is None
    assert "At equal P99s" not in sweep_report.page(measured, PLAN.policies, {})
    found = [(True, 1.5), (True, 1.1), (False, None), (True, 2.0)]
    for one, (kept, ratio) in zip(measured, found, strict=True):
        hygen = {"kept": kept, "times": ratio}
        one["at_equal_p99"] = {"hygen": hygen, "hygen-star": {"kept": kept, "times": None}}
    table = sweep_report.equal_table(measured)
    assert table is not None
    assert table.rows == [
        ["hygen", "3 of 4", "3", "1.50", "1.10", "2.00", "1.75"],
        ["hygen-star", "3 of 4", "0", "-", "-", "-", "above any"],
    ]
    assert "At equal P99s" in sweep_report.page(measured, PLAN.policies, {})
    assert "| hygen | 3 of 4 | 3 | 1.50 |" in sweep_report.markdown(measured, PLAN.policies, {})


def left_rows_per_s(slow: float) -> float:
    """Rows' worth of the live work that `made_up` answers after the end of a block."""
    _, traces = sweep.arrivals(CELL, PLAN, simulator())
    mix = Mix.of(MACHINE.rows(1000, seed=0), MACHINE.engine)
    late_ms = 0.0
    for trace, one in ((of, one) for of in traces for one in of):
        at_s = [one.at_s + slow * (0.1 + 0.02 * n) for n in range(one.output_tokens)]
        late = sum(at > 30.0 for at in at_s)
        if late == one.output_tokens:
            cached = trace.cached(one)
            late_ms += MACHINE.engine.added_ms(Slice(one.input_tokens - cached, cached))
            late -= 1
        context = one.input_tokens + one.output_tokens // 2
        late_ms += late * MACHINE.engine.added_ms(Slice(1, context, True))
    return late_ms / mix.row_ms / 30.0 / len(traces)


def left_after(**answered: Any) -> float:
    """`left_ms` of a block of 30 s whose one live request, a prompt of 1,000 tokens, is answered in this way."""
    answer = LoadAnswer(index=0, due_s=0.0, sent_s=0.0, input_tokens=1000, **answered)
    block = Block(
        policy="conserve",
        started_s=0.0,
        duration_s=30.0,
        answers=(answer,),
        offline_tokens=0,
        iterations=0,
        planned=0,
        overruns=0,
    )
    return left_ms([block], MACHINE.engine)


@pytest.mark.parametrize(
    ("status", "ended_s", "counts"),
    [
        (RequestEnd.REFUSED, 0.01, False),
        (RequestEnd.REFUSED, 31.0, True),
        (RequestEnd.TIMEOUT, 31.0, True),
        (RequestEnd.TIMEOUT, 29.0, True),
        (RequestEnd.BROKEN, 0.01, True),
    ],
)
def test_a_request_that_the_server_refuses_leaves_no_work_behind(
    status: RequestEnd, ended_s: float, counts: bool
) -> None:
    """A prompt beyond the context is refused under every policy; one that waited for the block's end is work."""
    left = left_after(status=status, ended_s=ended_s, token_at_s=())
    assert left == counts * MACHINE.engine.added_ms(Slice(1000, 0))


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_an_answer_that_is_cut_off_leaves_the_tokens_that_it_lacks(tokens: int) -> None:
    """A policy that drops a live request early would have its decode steps for rows."""
    cut = {"ended_s": 5.0, "token_at_s": [1.0 + 0.1 * n for n in range(tokens)], "output_tokens": 48}
    prompt_ms = 0.0 if tokens else MACHINE.engine.added_ms(Slice(1000, 0))
    step_ms = MACHINE.engine.added_ms(Slice(1, 1024, True))
    left = left_after(status=RequestEnd.BROKEN, **cut)
    assert left == pytest.approx(prompt_ms + (48 - max(1, tokens)) * step_ms)
    assert left_after(status=RequestEnd.OK, **cut) == prompt_ms, "complete with the tokens that it has"


def test_of_a_prompt_in_the_prefix_cache_the_rest_alone_is_left_behind() -> None:
    late = {"status": RequestEnd.OK, "ended_s": 31.0, "token_at_s": (31.0,)}
    assert left_after(**late, cached_tokens=800) == MACHINE.engine.added_ms(Slice(200, 800))
    assert left_after(**late, cached_tokens=800) < left_after(**late)


def test_cells_with_few_requests_have_more_blocks() -> None:
    few = replace(CELL, busy=0.2, lengths="documents")
    _, blocks = sweep.arrivals(few, replace(PLAN, requests=1000), simulator())
    assert len(blocks) == sweep.MOST_BLOCKS
    assert len(sweep.arrivals(few, PLAN, simulator())[1]) == PLAN.blocks


def told(cell: Cell, p99: float) -> dict[str, Any]:
    ratios = {
        "ttft_p50": [1.0, 0.9, 1.1],
        "ttft_p99": [p99, 0.9, 2.0],
        "tbt_p50": None,
        "tbt_p99": [1.0, None, None],
    }
    figures = {"rows_per_s": 2.0, "prompt_tokens_per_s": 900.0, "decode_tokens_per_s": 60.0, "of_bound": 0.75}
    policy = {
        "ratios": ratios,
        "attainment": {"ttft": 0.99, "tbt": None},
        "of_non_preemptive": 0.8,
        "computed_twice": 0.001,
        **figures,
    }
    return {**cell.document(), "policies": dict.fromkeys(PLAN.policies, policy)}


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file, wanted = tmp_path / "cells.jsonl", PLAN.wanted()
    ledger = CellLedger.open(file, PLAN)
    ledger.keep(told(wanted[0], 1.0))
    with file.open("a") as opened:
        opened.write(json.dumps(told(wanted[1], 1.0))[:40])
    again = CellLedger.open(file, PLAN)
    assert (again.done, again.missing) == ([told(wanted[0], 1.0)], wanted[1:])
    again.keep(told(wanted[1], 1.0))
    more = CellLedger.open(file, replace(PLAN, cells=6))
    assert (len(more.done), len(more.missing)) == (2, 4), "more cells are the same sweep"
    with pytest.raises(InputError, match=r"other seed, policies; name another folder with --output"):
        CellLedger.open(file, replace(PLAN, seed=4, policies=["conserve"]))
    with pytest.raises(InputError, match=r"with other equal_p99;"):
        CellLedger.open(file, replace(PLAN, equal_p99=True))
    CellLedger.open(tmp_path / "equal.jsonl", replace(PLAN, equal_p99=True))
    with pytest.raises(InputError, match=r"with other equal_p99;"):
        CellLedger.open(tmp_path / "equal.jsonl", PLAN)
    with pytest.raises(InputError, match=r"other machine;"):
        CellLedger.open(file, replace(PLAN, machine="measured again"))


def test_a_sweep_of_several_versions_or_machines_goes_on_and_says_so(tmp_path: Path) -> None:
    file, wanted = tmp_path / "cells.jsonl", PLAN.wanted()
    CellLedger.open(file, PLAN).keep(told(wanted[0], 1.0))
    first = CellLedger.open(file, PLAN, "vllm 1 on a machine")
    assert first.mixed() is None, "what measured cells of earlier versions is unknown"
    first.keep(told(wanted[1], 1.0))
    assert CellLedger.open(file, PLAN, "vllm 1 on a machine").mixed() is None
    other = CellLedger.open(file, PLAN, "vllm 2 on a machine")
    assert f"{tmp_path} were measured with vllm 1 on a machine, and the others will be with" in str(
        other.mixed()
    )
    for cell in wanted[2:]:
        other.keep(told(cell, 1.0))
    assert other.mixed() is None, "none is to come"
    assert facts(other)["measured with"] == "vllm 1 on a machine (1 cell); vllm 2 on a machine (2 cells)"


def test_a_sweep_on_servers_is_of_all_flags_that_they_start_with(tmp_path: Path) -> None:
    """Those of `conserve.toml` and of a file change between two sittings, and the command stays the same."""
    file = tmp_path / "flags.yaml"

    def plan(content: str, engine_args: str = "", preset: str = "cpu") -> SweepPlan:
        file.write_text(content)
        flags = SweepFlags.of({**FLAGS, "simulated": False, "preset": preset})
        settings = Settings(home=tmp_path, engine_args=engine_args)
        return plan_on_servers(settings, ["--config", str(file)], flags, SIZES["quick"])

    ledger = tmp_path / "cells.jsonl"
    CellLedger.open(ledger, plan("dtype: float32"))
    CellLedger.open(ledger, plan("dtype: float32"))
    for other in (plan("dtype: bfloat16"), plan("dtype: float32", "--enforce-eager")):
        with pytest.raises(InputError, match=r"other engine;"):
            CellLedger.open(ledger, other)
    with pytest.raises(InputError, match=r"other engine, preset;"):
        CellLedger.open(ledger, plan("dtype: float32", preset="full"))


def test_a_single_cell_is_played_anew_beside_no_other(tmp_path: Path) -> None:
    """Neither is an earlier play of it reported again, nor the report of a sweep replaced."""
    file, alone = tmp_path / "cells.jsonl", replace(PLAN, only=PLAN.wanted()[1])
    assert CellLedger.open(file, alone).missing == [alone.only]
    assert CellLedger.open(file, alone).missing == [alone.only], "a play that was stopped goes on"
    CellLedger.open(file, PLAN).keep(told(PLAN.wanted()[1], 1.0))
    with pytest.raises(
        InputError, match=r"has 1 measured cell, and .* anew; name another folder with --output"
    ):
        CellLedger.open(file, alone)


def test_cells_that_were_counted_otherwise_are_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cells.jsonl"
    CellLedger.open(file, PLAN)
    monkeypatch.setattr(sweep, "TUNING", sweep.TUNING + 1)
    assert CellLedger.open(file, PLAN).missing, "no policy of it is tuned"
    tuned = replace(PLAN, policies=[*PLAN.policies, "hygen-star"])
    CellLedger.open(tmp_path / "tuned.jsonl", tuned)
    monkeypatch.setattr(sweep, "TUNING", sweep.TUNING + 1)
    with pytest.raises(InputError, match=r"other tuning; name another folder"):
        CellLedger.open(tmp_path / "tuned.jsonl", tuned)
    monkeypatch.setattr(sweep, "FIGURES", sweep.FIGURES + 1)
    with pytest.raises(InputError, match=r"other figures; name another folder"):
        CellLedger.open(file, PLAN)


def test_a_policy_that_failed_a_request_is_the_worst() -> None:
    """The latencies that are compared are of answers: a request that timed out would make them shorter."""
    good, bad = (told(cell, 1.0) for cell in PLAN.wanted()[:2])
    bad["policies"] = {name: {**one, "failed": 1} for name, one in bad["policies"].items()}
    assert sweep.ranked([good, bad]) == [bad, good]


def test_an_engine_that_is_profiled_again_is_another() -> None:
    demo = BenchMachine.demo()
    slower = replace(demo, model=ConServeModel.of(*(2 * n for n in range(1, 9))))
    assert (
        len({one.digest for one in (demo, slower, replace(demo, num_blocks=5), replace(demo, flags={}))}) == 4
    )
    assert demo.digest == BenchMachine.demo().digest
    several = replace(demo, model=ConServeModel({**demo.model.coefficients, "several": 1.0}))
    assert several.digest != demo.digest


def test_a_published_sweep_goes_on(tmp_path: Path) -> None:
    """Its ledger is unpacked into the folder of the command, whose engine is the same one."""
    published = gzip.decompress((RAW / "sweep-grid.jsonl.gz").read_bytes())
    policies = "conserve,conserve/harm,online-only,non-preemptive"
    flags = SweepFlags.of({**FLAGS, "cells": 216, "policies": policies})
    plan = replace(plan_of(flags, SIZES["quick"], MACHINE.name), machine=MACHINE.digest)
    (tmp_path / "cells.jsonl").write_bytes(published)
    assert not CellLedger.open(tmp_path / "cells.jsonl", plan).missing


def test_an_estimate_is_of_the_cells_so_far() -> None:
    now = 0.0
    estimate = SweepTimeLeft(60.0, clock=lambda: now)
    assert estimate.left_s(10) == 600
    now = 50.0
    estimate.measured()
    estimate.measured()
    assert estimate.left_s(10) == 250


@pytest.mark.parametrize(
    ("policies", "ranked"),
    [
        (["online-only", "non-preemptive", "conserve/harm", "conserve"], "conserve/harm"),
        (["online-only", "non-preemptive", "hygen"], "non-preemptive"),
        (["online-only"], "online-only"),
    ],
)
def test_cells_are_ranked_by_our_policy_wherever_it_is_named(policies: list[str], ranked: str) -> None:
    assert sweep_report.lead_of(policies) == ranked


def test_the_worst_cell_is_the_first_row_everywhere() -> None:
    cells = PLAN.wanted()
    measured = [told(cell, p99) for cell, p99 in zip(cells, (1.1, 1.7, 1.2, 1.0), strict=True)]
    table = sweep_report.first_table(measured, PLAN.policies)
    assert table.rows[0][:4] == [
        f"the worst cell: {cells[1].name}",
        "conserve",
        "1.00 [0.90, 1.10]",
        "1.70 [0.90, 2.00]",
    ]
    assert table.rows[3][:4] == ["median of 4 cells", "conserve", "1.00", "1.15"]
    assert table.rows[6][:4] == ["worst of 4 cells", "conserve", "1.00", "1.70"]
    assert sweep_report.every_cell(measured, PLAN.policies).rows[0][0] == cells[1].name
    page = sweep_report.page(measured, PLAN.policies, {"seed": "3"}, stopped="Stopped after 4 of 6 cells.")
    first = page.index("the worst cell")
    assert first < page.index("median of 4 cells") < page.index("offline work of the bound")
    assert f"<td>the worst cell: {cells[1].name}</td>" in page
    assert page.count('title="') >= 12
    assert "Stopped after 4 of 6" in page
    text = sweep_report.markdown(measured, PLAN.policies, {"seed": "3"})
    assert f"| the worst cell: {cells[1].name} | conserve | 1.00 [0.90, 1.10] |" in text


def test_a_cell_in_which_nothing_was_answered_is_the_worst() -> None:
    measured = [told(cell, 1.7) for cell in PLAN.wanted()]
    ours = dict(measured[2]["policies"]["conserve"])
    measured[2]["policies"] = {
        **measured[2]["policies"],
        "conserve": {**ours, "ratios": dict.fromkeys(RATIOS), "failed": 1234},
    }
    name = Cell.of(measured[2]).name
    table = sweep_report.first_table(measured, PLAN.policies)
    assert table.rows[0][0] == f"the worst cell: {name}"
    assert table.rows[0][table.header.index("failed")] == "1,234"
    assert f"({name}) answers no live request" in sweep_report.sentence(measured, PLAN.policies)
    squares = [one for _, row in sweep_report.heat_maps(measured, PLAN.policies)[0].rows for one in row]
    assert [one.heat for one in squares if one.text == "failed"] == [1.0]


def test_a_cell_in_which_one_request_failed_is_not_told_as_one_without_an_answer() -> None:
    measured = [told(cell, 1.1) for cell in PLAN.wanted()]
    ours = measured[1]["policies"]["conserve"]
    measured[1]["policies"] = {
        **measured[1]["policies"],
        "conserve": {**ours, "failed": 1, "requests": 1200},
    }
    name = Cell.of(measured[1]).name
    assert f"({name}) fails 1 of 1,200 live requests." in sweep_report.sentence(measured, PLAN.policies)
    squares = [one for _, row in sweep_report.heat_maps(measured, PLAN.policies)[0].rows for one in row]
    (square,) = [one for one in squares if one.text == "failed"]
    assert square.told == f"{name}: a request failed, or none was answered"


def test_over_all_cells_a_p99_without_the_requests_that_failed_is_none() -> None:
    """The slowest requests time out, and the others' P99 would be the best of all cells."""
    measured = [told(cell, 1.4) for cell in PLAN.wanted()]
    fails = {**told(CELL, 0.9)["policies"]["conserve"], "failed": 1, "requests": 40}
    measured[1]["policies"] = {**measured[1]["policies"], "conserve": fails}
    rows = {row[0]: row for row in sweep_report.first_table(measured, PLAN.policies).rows if row[0]}
    assert rows["median of 4 cells"][2:6] == ["1.00", "1.40", "-", "1.00"]
    assert rows["worst of 4 cells"][2:6] == ["1.00", "failed", "-", "failed"]
    assert "In the middle P99 TTFT is 1.40" in sweep_report.sentence(measured, PLAN.policies)
    measured[2]["policies"] = measured[1]["policies"]
    assert "In half of the cells or more live requests fail" in sweep_report.sentence(measured, PLAN.policies)


def test_a_stopped_sweep_reports_the_cells_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[Cell]()

    def measured(cell: Cell, plan: SweepPlan, simulator: Simulator) -> dict[str, Any]:
        asked.append(cell)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return told(cell, 1.3)

    monkeypatch.setattr(sweep, "simulated", measured)
    monkeypatch.setattr("conserve.cli.sweep.simulator", lambda: made_up)
    assert measure_simulated(PLAN, MACHINE, tmp_path, processes=1, as_json=False) == 130
    said = capsys.readouterr()
    assert f"1 of 4: {PLAN.wanted()[0].name}" in said.err
    assert "Stopped after 1 of 4 cells. The same command goes on" in said.err
    assert "Stopped after 1 of 4 cells" in (tmp_path / "page.html").read_text()
    assert measure_simulated(PLAN, MACHINE, tmp_path, processes=1, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert [Cell.of(one) for one in document["cells"]] == PLAN.wanted()
    assert asked == [PLAN.wanted()[n] for n in (0, 1, 1, 2, 3)], "the cell that was dropped comes again"
    assert "4 cells to measure" not in capsys.readouterr().err


# Flags

FLAGS: dict[str, Any] = {
    **{name: usual for name, (_, usual) in SETS.items()},
    "sweep": "quick",
    "cells": None,
    "cell": None,
    "seed": 0,
    "policies": None,
    "rounds": None,
    "block_s": None,
    "simulated": True,
    "processes": None,
    "equal_p99": False,
    "preset": "full",
    "out": None,
}


def test_a_sweep_sets_the_arrivals_itself() -> None:
    wanted = SweepFlags.of(FLAGS)
    assert (wanted.size, wanted.simulated, wanted.folder) == ("quick", True, None)
    with pytest.raises(SettingsError, match=r"a sweep sets --trace, --rate itself; leave it out"):
        SweepFlags.of({**FLAGS, "trace": "t.parquet", "rate": 1.0})
    with pytest.raises(
        SettingsError, match=r"a sweep sets --tolerance, --no-preemption, --kv-checkpoint itself"
    ):
        SweepFlags.of({**FLAGS, "tolerance": "mean-tbt=10%", "preemption": False, "kv_checkpoint": "off"})
    with pytest.raises(SettingsError, match=r"a sweep sets --stock-endpoint, --allow-overload itself"):
        SweepFlags.of({**FLAGS, "stock_endpoint": "http://stock:8000", "overload": True})
    with pytest.raises(SettingsError, match=r"--cells, --cell, .* and --equal-p99 are for --sweep; add"):
        SweepFlags.of({**FLAGS, "sweep": None})
    with pytest.raises(SettingsError, match=r"one cell at a time; --processes goes with --simulated"):
        SweepFlags.of({**FLAGS, "processes": 2, "simulated": False})
    with pytest.raises(SettingsError, match=r"--equal-p99 .*; it goes with --simulated"):
        SweepFlags.of({**FLAGS, "equal_p99": True, "simulated": False})


def test_one_operating_point_is_played_by_its_name() -> None:
    name = "agents, 60 % busy, cv 4, slo x1.25"
    plan = plan_of(SweepFlags.of({**FLAGS, "cell": name}), SIZES["quick"], "an engine")
    assert plan.wanted() == [Cell(busy=0.6, cv=4.0, lengths="agents", scale=1.25)]
    assert all(points.named(cell.name) == cell for cell in grid())
    with pytest.raises(
        SettingsError, match=r"no operating point 'agents'; name one .* 'chat, 20% busy, CV 0.5, SLO"
    ):
        plan_of(SweepFlags.of({**FLAGS, "cell": "agents"}), SIZES["quick"], "an engine")
    with pytest.raises(SettingsError, match=r"--cell is one operating point"):
        SweepFlags.of({**FLAGS, "cell": name, "cells": 3})


def test_a_single_operating_point_has_a_folder_of_its_own() -> None:
    sweep = SweepFlags.of(FLAGS)
    assert str(usual_folder(sweep)) == "bench-sweep-quick-simulated"
    assert str(usual_folder(replace(sweep, size="full", simulated=False))) == "bench-sweep-full"
    assert usual_folder(replace(sweep, cell=grid()[0].name)).name.startswith("bench-cell-20")


def test_every_policy_plays_unless_some_are_named() -> None:
    simulated = policies_of(SweepFlags.of(FLAGS))
    assert simulated[:3] == ["conserve", "conserve/harm", "online-only"]
    assert {"sarathi-p", "sarathi++", "hygen-star", "hygen"} < set(simulated)
    quick = policies_of(SweepFlags.of({**FLAGS, "simulated": False}))
    assert quick == ["conserve", "conserve/harm", "online-only", "non-preemptive", "sarathi-p"]
    with pytest.raises(SettingsError, match="add it to --policies"):
        policies_of(SweepFlags.of({**FLAGS, "policies": "conserve"}))
    with pytest.raises(SettingsError, match=r"to the P99s of conserve; add it to --policies"):
        policies_of(SweepFlags.of({**FLAGS, "equal_p99": True, "policies": "online-only,hygen"}))
    with pytest.raises(SettingsError, match="conserve/-order cannot be simulated"):
        policies_of(SweepFlags.of({**FLAGS, "policies": "online-only,conserve/-order"}))
    arms = ["online-only", "conserve/-preemption", "conserve/-checkpoints", "conserve/recompute"]
    assert policies_of(SweepFlags.of({**FLAGS, "policies": ",".join(arms)})) == arms


def test_sizes_say_how_many_cells_and_blocks() -> None:
    plan = plan_of(SweepFlags.of({**FLAGS, "rounds": 3}), SIZES["full"], "x")
    assert (plan.cells, plan.blocks, plan.requests, plan.block_s) == (216, 3, 0, 30.0)
    plan = plan_of(SweepFlags.of({**FLAGS, "cells": 5}), SIZES["quick"], "x")
    assert (plan.cells, plan.blocks, plan.requests) == (5, 4, 100)
