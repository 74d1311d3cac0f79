"""DistServe with priorities: the pool's arrivals, the choice of a split, and its figures, on made-up engines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from conserve.bench import sweep
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.attainment import LatencyLimits
from conserve.bench.disaggregated import EngineSplit, best_split, budgets, pooled, score
from conserve.bench.machine import BenchMachine
from conserve.bench.measure import Block
from conserve.bench.simulated import Simulator
from conserve.bench.traces import Trace
from conserve.cli.bench_names import which
from conserve.errors import SettingsError
from tests.made_up_blocks import Answered, MadeUp, counted
from tests.unit.test_operating_points import CELL, MACHINE, PLAN, made_up, trace_of

SLO = LatencyLimits(ttft_ms=100.0, tbt_ms=20.0)


def test_a_pool_gets_the_arrivals_of_as_many_blocks_as_it_has_engines() -> None:
    blocks = [trace_of((n / 10, 10, n), (5 + n / 10, 20, n), shared=4) for n in range(1, 4)]
    first, second = pooled(blocks, 2)
    assert [one.output_tokens for one in first] == [1, 2, 1, 2]
    assert [one.output_tokens for one in second] == [3, 3, 1, 1], "the first block again, half a block later"
    assert [one.at_s for one in second] == pytest.approx([0.3, 5.3, 15.1, 20.1])
    assert first.shared_tokens == 4
    assert [one.arrivals for one in pooled(blocks, 1)] == [one.arrivals for one in blocks]
    (crowded,) = pooled(blocks[:1], 4)
    assert len({one.at_s for one in crowded}) == len(crowded) == 8, "no two come at once"
    assert crowded.arrivals == tuple(sorted(crowded.arrivals))


def test_budgets_hold_as_many_tokens_as_requests() -> None:
    assert budgets(BenchMachine.demo()) == [512, 128, 2048]
    many = replace(MACHINE, flags={**MACHINE.flags, "max_num_seqs": 600})
    assert budgets(many) == [2048, 600]
    few = replace(MACHINE, flags={**MACHINE.flags, "max_num_batched_tokens": 64, "max_num_seqs": 8})
    assert budgets(few) == [64]


def block(ttft_ms: float, tbt_ms: float, work: float) -> Block:
    times = (ttft_ms / 1e3, (ttft_ms + tbt_ms) / 1e3)
    answer = LoadAnswer(
        index=0, due_s=0.0, sent_s=0.0, ended_s=1.0, input_tokens=5, token_at_s=times, status=RequestEnd.OK
    )
    counts = {"iterations": 0, "planned": 0, "overruns": 0, "offline_tokens": 0, "offline_work": work}
    return Block(policy="distserve-p", started_s=0.0, duration_s=1.0, answers=(answer,), **counts)


def chosen(
    figures: dict[tuple[int, int, int], tuple[float, float, float]],
) -> tuple[Any, Sequence[EngineSplit]]:
    played: list[EngineSplit] = []

    def play(split: EngineSplit) -> list[Block]:
        played.append(split)
        return [block(*figures.get((split.prefill, split.decode, split.tokens), (900.0, 900.0, 1.0)))]

    def rows_per_s(blocks: Sequence[Block]) -> float:
        return sum(one.offline_work for one in blocks) - 100.0

    return best_split(BenchMachine.demo(), play, SLO, rows_per_s), played


def test_the_split_with_the_most_rows_within_the_slo_is_chosen_and_then_its_budget() -> None:
    found, played = chosen(
        {
            (1, 1, 512): (90.0, 10.0, 5.0),
            (2, 1, 512): (99.0, 19.0, 7.0),
            (1, 2, 512): (10.0, 25.0, 90.0),
            (3, 1, 512): (99.0, 19.0, 6.0),
            (2, 1, 128): (50.0, 15.0, 8.0),
            (1, 1, 128): (50.0, 15.0, 80.0),
        }
    )
    assert found.split == EngineSplit(prefill=2, decode=1, tokens=128)
    assert (found.kept, found.tried, len(played)) == (True, 6, 6)
    assert found.sentence() == (
        "distserve-p: 2 engines for prefill (128 tokens an iteration) and 1 for decode, which of 6 choices keeps "
        "the SLO with the most rows"
    )


@pytest.mark.parametrize("prefills", [True, False])
def test_engines_are_added_as_long_as_that_is_better(prefills: bool) -> None:
    """Rows are prompts more than answers, so that the best split lacks prefill engines, or the other way round."""

    def of(more: int) -> tuple[int, int, int]:
        return (more, 1, 512) if prefills else (1, more, 512)

    found, played = chosen({of(more): (90.0, 10.0, float(more)) for more in range(1, 5)})
    assert [(split.prefill, split.decode) for split in played[3:6]] == [of(more)[:2] for more in (3, 4, 5)]
    assert (found.split.prefill, found.split.decode, found.tried) == (*of(4)[:2], 8)
    found, played = chosen({of(more): (90.0, 10.0, float(more)) for more in range(1, 99)})
    assert max(split.engines for split in played) == found.split.engines == 8


def test_where_no_split_keeps_the_slo_the_nearest_one_is_chosen() -> None:
    found, _ = chosen({(1, 2, 512): (300.0, 20.0, 1.0), (1, 1, 512): (100.0, 80.0, 9.0)})
    assert found.split == EngineSplit(prefill=1, decode=2, tokens=512)
    assert not found.kept
    assert found.sentence().endswith("which of 6 choices comes nearest to the SLO")


def test_a_split_is_judged_by_its_rows_beside_all_live_work() -> None:
    """One that lets live requests wait has more in the block's time."""
    waits, serves = block(90.0, 10.0, 9.0), block(90.0, 10.0, 5.0)
    beside = {9.0: 1.0, 5.0: 4.0}
    scores = [score([one], SLO, lambda blocks: beside[blocks[0].offline_work]) for one in (waits, serves)]
    assert scores == [(True, 1.0), (True, 4.0)]


def test_its_figures_are_those_of_one_engine() -> None:
    def pool(
        machine: BenchMachine, split: EngineSplit, blocks: Iterable[Trace], **given: Any
    ) -> Iterator[MadeUp]:
        """Each engine computes 1,000 tokens and 100 decode steps a block; 1:1 has the shortest gaps."""
        slow = 1.0 + split.engines / 10
        for trace in blocks:
            answers = [
                Answered([100 + one.at_s + slow * (0.1 + 0.02 * n) for n in range(one.output_tokens)])
                for one in trace
            ]
            last = counted(1000 * split.engines, 100 * split.engines)
            yield MadeUp(100.0, 130.0, answers, counted(0, 0), last)

    simulator = Simulator(machine=MACHINE, simulate=made_up, block_s=30.0, seed=0, simulate_pool=pool)
    plan = replace(PLAN, policies=[*PLAN.policies, "distserve-p"])
    found = sweep.simulated(CELL, plan, simulator)
    figures = found["policies"]["distserve-p"]
    assert figures["requests"] == found["policies"]["conserve"]["requests"]
    assert figures["decode_tokens_per_s"] == pytest.approx(100 / 30)
    assert figures["ratios"]["tbt_p50"][0] == pytest.approx(1.2)
    assert found["tuned"][-1].startswith("distserve-p: 1 engine for prefill (")


def test_it_is_simulated_alone() -> None:
    assert which("online-only,distserve-p", simulated=True) == ["online-only", "distserve-p"]
    with pytest.raises(SettingsError) as refused:
        which("online-only,distserve-p")
    assert str(refused.value) == (
        "distserve-p has several engines at once, which are simulated; compare it with: conserve bench --sweep "
        "quick --simulated --policies conserve,online-only,non-preemptive,distserve-p"
    )
