"""Sizes of a comparison by the engine's speed, and the sentence where the load is too much."""

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.bench import compare, traces
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.arrivals import arrivals
from conserve.bench.attainment import LatencyLimits
from conserve.bench.compare import Design, alternate
from conserve.bench.deployment import Deployment
from conserve.bench.field import Turn
from conserve.bench.measure import Block
from conserve.bench.playing import Measurement, require_gaps
from conserve.bench.presets import CPU, FULL, Preset
from conserve.bench.servers.rows import rows_of_block
from conserve.bench.simulate_online import BlockForecast, EngineModel, p99s_ms, play
from conserve.bench.sizing import LEAST_REQUESTS, BlockLoad, Offered, Sized, judge, measured, size
from conserve.bench.traces import Arrival, Trace
from conserve.cli.app import main
from conserve.cli.bench_report import played as played_facts
from conserve.errors import EndpointUnusable, InputError, Overloaded, SettingsError
from conserve.names import CONSERVE, NON_PREEMPTIVE, ONLINE_ONLY, PRIORITY
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from tests.benchmarks.simulation import DEMO, FASTER
from tests.server_reports import MODEL, answer

BURSTY, CHAT = "azure_code_2023_10min_bursty", "azure_conv_2023_10min"
ALL = [CONSERVE, ONLINE_ONLY, NON_PREEMPTIVE, PRIORITY]
NOTHING: dict[str, Any] = {"rounds": None, "block_s": None}


def slower(times: float, **more: Any) -> EngineModel:
    """The engine of docs/benchmarks on a machine so many times slower."""
    model = ConServeModel.of(*(times * ms / FASTER for ms in DEMO))
    return EngineModel(model=model, **{"max_tokens": 2048, "max_requests": 128, **more})


def asked(
    preset: Preset = CPU,
    *,
    trace: str | None = None,
    gamma: str | None = None,
    on_off: str | None = None,
    rate: float | None = None,
    speed: float | None = None,
    lengths: float | None = None,
    seed: int = 0,
    **given: Any,
) -> Offered:
    """A comparison as the command line asks for it; of the bursty trace unless something else is named."""
    trace = BURSTY if (trace, gamma, on_off) == (None, None, None) else trace
    return arrivals(preset, trace, gamma, on_off, rate, speed, lengths, seed, given={**NOTHING, **given})


def design(preset: Preset = CPU, policies: list[str] = ALL, **more: Any) -> Design:
    return Design(policies=policies, **{"rounds": preset.rounds, "block_s": preset.block_s, **more})


# Online-only, foretold

ANY_TURN = Turn(server=None, target=None, seed=0)  # type: ignore[arg-type]
ENGINE = slower(1, max_tokens=100, max_requests=2)


def ms_of(*slices: Slice) -> float:
    return ENGINE.ms(Batch.of(slices))


def foretold(*given_arrivals: Arrival, block_s: float = 10.0, engine: EngineModel = ENGINE) -> BlockForecast:
    return play(Trace(name="t", duration_s=block_s, arrivals=given_arrivals), engine, block_s)


def test_a_request_alone_takes_its_prompt_and_its_decode_steps() -> None:
    found = foretold(Arrival(1.0, 60, 3))
    (request,) = found.requests
    steps_ms = [ms_of(Slice(60, 0)), ms_of(Slice(1, 60, True)), ms_of(Slice(1, 61, True))]
    assert request.token_at_s == pytest.approx([1 + sum(steps_ms[: n + 1]) / 1e3 for n in range(3)])
    assert found.busy_s == pytest.approx(sum(steps_ms) / 1e3)
    assert found.ended_s == found.requests[0].token_at_s[-1]


def test_prompts_share_an_iteration_and_long_ones_are_cut_into_chunks() -> None:
    one, other = foretold(Arrival(0.0, 60, 1), Arrival(0.0, 70, 1)).requests
    first_ms = ms_of(Slice(60, 0), Slice(40, 0))
    assert one.token_at_s == pytest.approx([first_ms / 1e3])
    assert other.token_at_s == pytest.approx([(first_ms + ms_of(Slice(30, 40))) / 1e3])


def test_a_request_waits_for_a_free_place_and_those_before_it() -> None:
    requests = foretold(*[Arrival(0.0, 10, 2)] * 3).requests
    assert requests[0].token_at_s == requests[1].token_at_s
    assert requests[2].token_at_s[0] > requests[0].token_at_s[1]


def test_only_what_falls_into_the_block_keeps_it_busy() -> None:
    after = foretold(Arrival(0.0, 100, 1), block_s=0.01)
    assert after.busy_s == pytest.approx(0.01)
    assert after.ended_s > 0.01
    assert play(None, ENGINE, 5.0).busy == 0.0


lengths = st.integers(1, 400)


# A request that arrives as the block ends keeps it busy for no time.
@given(
    st.lists(
        st.builds(Arrival, st.floats(0, 20, exclude_max=True), lengths, st.integers(1, 8)),
        min_size=1,
        max_size=12,
    )
)
def test_every_request_gets_its_tokens_one_after_the_other(drawn: list[Arrival]) -> None:
    found = foretold(*sorted(drawn), block_s=20.0)
    for request in found.requests:
        assert len(request.token_at_s) == request.output_tokens
        assert request.at_s < request.token_at_s[0]
        assert all(earlier < later for earlier, later in pairwise(request.token_at_s))
    assert 0 < found.busy_s <= found.ended_s
    assert found.busy <= 1 + 1e-9


# The preset's sizes


@pytest.mark.parametrize(
    ("times", "policies"),
    [
        (0.3, ALL),
        (1, ALL),
        (1.4, ALL),
        (5, ALL),
        (30, ALL),
        (5, [ONLINE_ONLY, CONSERVE]),
        (30, [ONLINE_ONLY]),
    ],
)
def test_the_cpu_preset_keeps_any_machine_half_busy(times: float, policies: list[str]) -> None:
    sized = size(asked(), CPU, design(policies=policies), slower(times))
    assert 0.45 <= sized.load.busy <= 0.6
    assert not sized.load.too_much
    requests = [len(forecast.requests) for forecast in sized.forecasts]
    assert sum(requests) / len(requests) >= LEAST_REQUESTS - 1


def test_a_slow_machine_gets_shorter_requests_then_longer_blocks_then_fewer_rounds() -> None:
    fast, slow, slowest = (size(asked(), CPU, design(), slower(times)) for times in (1, 5, 30))
    assert (fast.lengths, fast.design.block_s, fast.design.rounds) == (1.0, CPU.block_s, CPU.rounds)
    assert slow.lengths < 1
    assert (slow.design.block_s, slow.design.rounds) == (CPU.block_s, CPU.rounds)
    assert slowest.lengths < slow.lengths
    assert slowest.design.block_s > CPU.block_s
    assert slowest.design.rounds == 1
    assert all(5 < sized.takes_s / 60 < 16 for sized in (fast, slow, slowest))


def test_what_is_set_is_said_in_one_line() -> None:
    sized = size(asked(), CPU, design(), slower(30))
    said = sized.sentence()
    assert "\n" not in said
    (forecast,) = sized.forecasts
    for words in (
        f"{sized.rate:.3g} requests/s",
        f"1 x 4 blocks of {sized.design.block_s:g} s",
        f"busy {forecast.busy:.0%}",
        f"takes about {(sized.takes_s + sized.begins_s) / 60:.0f} min",
        f"P99 TTFT {p99s_ms([forecast])[0]:,.0f} ms",
        "SLO 1 x online-only's P99s",
    ):
        assert words in said


@pytest.mark.parametrize("times", [1, 5, 30])
def test_the_flags_it_names_play_the_same_on_any_machine(times: float) -> None:
    offered = asked(seed=3)
    sized = size(offered, CPU, design(), slower(times))
    words = shlex.split(sized.flags(offered, sized.rate))
    flags = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    preset = replace(CPU, block_s=flags["--block-s"], rounds=int(flags["--rounds"]))
    again = size(
        asked(preset, rate=flags["--rate"], lengths=flags.get("--lengths"), seed=3),
        preset,
        design(preset),
        slower(0.5),
    )
    assert not again.chosen
    for number in range(preset.rounds):
        assert again.source(number) == sized.source(number)


def test_what_is_given_stays() -> None:
    engine = slower(30)
    found = size(asked(block_s=10.0, lengths=0.25, rounds=2), CPU, design(block_s=10.0, rounds=2), engine)
    assert (found.design.block_s, found.lengths, found.design.rounds) == (10.0, 0.25, 2)
    assert 0.2 <= found.load.busy <= 0.8  # few requests, but the rate is still set
    slo = size(asked(), CPU, design(slo=LatencyLimits(1500.0, 90.0)), slower(1)).design.slo
    assert slo == (1500.0, 90.0)


@pytest.mark.parametrize("times", [None, 0.1, 1])
def test_the_rate_of_the_fixed_preset_plays_what_it_played(times: float | None) -> None:
    sized = size(asked(rate=0.8), CPU, design(), None if times is None else slower(times))
    requests = [len(sized.source(number)) for number in range(12)]
    assert (sum(requests[:2]), sum(requests[:4]), sum(requests)) == (44, 85, 228)  # as in docs/benchmarks
    first = sized.source(0)
    assert first.duration_s == pytest.approx(25.0)
    assert (max(a.input_tokens for a in first), max(a.output_tokens for a in first)) == (930, 48)
    assert (sized.design, sized.preset, sized.chosen) == (design(), CPU, False)


def test_without_a_latency_model_the_preset_plays_its_own_rate_and_says_so() -> None:
    whole = traces.read(traces.find_trace(BURSTY))
    sized = size(asked(), CPU, design(), None)
    assert sized.source(0) == CPU.arrivals(whole, 0)
    assert "0.8 requests/s" in sized.sentence()
    assert "no latency model" in sized.sentence()


def test_a_rate_stretches_a_trace_that_no_preset_thins() -> None:
    whole = traces.read(traces.find_trace(BURSTY))
    preset = replace(FULL, block_s=60.0)
    sized = size(asked(preset, rate=4.0), preset, design(preset), None)
    assert sized.source(1) == whole.at_rate(4.0).cut(60.0, 60.0)
    faster = size(asked(preset, speed=2.0), preset, design(preset), None)
    assert faster.source(1) == whole.scaled(2.0).cut(60.0, 60.0)
    assert asked(preset).rate == pytest.approx(len(whole) / 60.0)
    exact = asked(preset, speed=2.345678)
    assert exact.flags(exact.rate) == "--speed 2.345678"
    assert exact.flags(whole.rate / 3) == "--speed 0.333", "a rate that is advised has three digits"
    assert asked(preset, rate=1.2345678).flags(1.2345678) == "--rate 1.2345678"


@pytest.mark.parametrize(("preset", "rate"), [(CPU, None), (FULL, None), (FULL, 2.0)])
def test_bursts_that_are_spread_over_ticks_are_told(
    preset: Preset, rate: float | None, tmp_path: Path
) -> None:
    path = tmp_path / "bursts.parquet"
    columns = {"input_tokens": [9] * 160, "output_tokens": [2] * 160}
    pq.write_table(pa.table({"arrival_s": np.repeat(np.arange(10) * 60.0, 16), **columns}), path)
    spread = "the requests of each tick of its times spread over the tick"
    for engine in (None, slower(1)):
        assert (
            spread
            in size(asked(preset, trace=str(path), rate=rate), preset, design(preset), engine).sentence()
        )
        assert (
            spread
            not in size(asked(preset, rate=rate), preset, design(preset), engine, overload=True).sentence()
        )


def test_answers_of_one_token_need_an_slo_that_is_given() -> None:
    """Online-only has no TBT then, and conserve would go on with the promise that its server had before."""

    def sized(answer: int, **more: Any) -> Sized:
        offered = asked(gamma=f"2,1,64,{answer}")
        return size(offered, CPU, design(**more), None)

    with pytest.raises(InputError, match=r"live answers of one token .*; give --ttft-slo and --tbt-slo, or"):
        require_gaps(sized(1))
    with pytest.raises(InputError, match="live answers of one token"):
        require_gaps(sized(1, policies=[ONLINE_ONLY, "conserve/off"], slo_ahead=True))
    require_gaps(sized(2))
    require_gaps(sized(1, slo=LatencyLimits(100.0, 10.0)))
    require_gaps(sized(1, policies=[ONLINE_ONLY, "conserve/harm-25", NON_PREEMPTIVE]))


def test_no_rate_is_told_that_the_trace_does_not_have(tmp_path: Path) -> None:
    """Thirty requests in blocks of 25 s are at most 1.2 a second, whatever the machine could do."""
    columns = {"arrival_s": np.linspace(0, 3600, 30), "input_tokens": [9] * 30, "output_tokens": [2] * 30}
    path = tmp_path / "sparse.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(
        SettingsError, match=r"has: 30 requests, 1.2 a second in blocks of 25 s; give at most"
    ):
        asked(trace=str(path), rate=4.0)
    assert asked(trace=str(path), rate=1.2).rate == 1.2
    assert asked(replace(CPU, block_s=5.0), trace=str(path), rate=4.0).rate == 4.0
    for engine, rate in ((slower(1 / 50), None), (None, None), (None, 1.2)):
        few = replace(CPU, rate=3.0)
        sized = size(asked(few, trace=str(path), rate=rate), few, design(few), engine)
        assert (sized.rate, len(sized.source(0))) == (1.2, 30)


def test_a_trace_that_is_stretched_to_less_than_a_block_is_played_again_within_it() -> None:
    """And the second block goes on where the first one ended."""
    preset = replace(FULL, block_s=120.0)
    whole = traces.read(traces.find_trace(BURSTY)).at_rate(40.0)
    assert whole.duration_s < 50
    sized = size(asked(preset, rate=40.0), preset, design(preset), None)
    for number in (0, 1):
        block = sized.source(number)
        assert (block.duration_s, len(block) / 120) == (120.0, pytest.approx(40, rel=0.1))
    assert sized.source(0).arrivals[: len(whole)] == whole.arrivals
    first_s = 120.0 % whole.duration_s
    assert len(sized.source(1).cut(0.0, whole.duration_s - first_s)) == len(whole.cut(first_s, 120.0))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: asked(gamma="1,1,10,10", rate=1.0),
        lambda: asked(gamma="1,1,10,10", lengths=0.5),
        lambda: asked(on_off="1,1,10"),
        lambda: asked(gamma="1,1,inf,64"),
        lambda: asked(gamma="1,1,512,1e400"),
        lambda: asked(on_off="1,nan,10,9,9"),
        lambda: asked(trace=BURSTY, gamma="1,1,10,10"),
        lambda: asked(rate=1.0, speed=2.0),
        lambda: asked(rate=0.0),
        lambda: asked(lengths=-1.0),
        lambda: asked(speed=float("nan")),
    ],
)
def test_senseless_arrivals_are_refused(wrong: Callable[[], Offered]) -> None:
    with pytest.raises(SettingsError):
        wrong()


# Too much


@pytest.mark.parametrize(
    ("preset", "asks"),
    [
        (CPU, {"rate": 8.0}),
        (CPU, {"gamma": "6,1,256,48"}),
        (CPU, {"on_off": "30,6,9,256,32"}),
        (replace(FULL, rounds=1, block_s=40.0), {"trace": CHAT}),
        (replace(FULL, rounds=1, block_s=40.0), {"trace": CHAT, "speed": 2.0}),
    ],
)
def test_too_much_is_said_at_once_with_a_rate_that_is_not(preset: Preset, asks: dict[str, Any]) -> None:
    engine, offered = slower(1), asked(preset, **asks)
    with pytest.raises(Overloaded, match="online-only alone would keep the engine") as error:
        size(offered, preset, design(preset), engine)
    said = str(error.value)
    assert error.value.exit_code == 2
    assert "\n" not in said
    assert "--allow-overload" in said
    found = re.search(r"; use --(\S+) (\S+?),? (?:or|leave)", said)
    assert found
    name, value = found[1].replace("-", "_"), found[2]
    instead = asked(preset, trace=asks.get("trace"), **{name: value if "," in value else float(value)})
    assert 0.4 <= size(instead, preset, design(preset), engine).load.busy <= 0.65
    assert size(offered, preset, design(preset), engine, overload=True).load.too_much


@pytest.mark.parametrize(
    "asks",
    [
        {"rate": 0.8},
        {"rate": 1.3},
        {"trace": CHAT, "rate": 0.8},
        {"on_off": "0.9,6,9,256,32", "block_s": 30.0},
        {"on_off": "4,1.5,8,400,32", "block_s": 30.0, "seed": 6},
        {"gamma": "1,0.5,256,48"},
    ],
)
def test_the_comparisons_of_the_benchmarks_are_played_on_their_machine(asks: dict[str, Any]) -> None:
    preset = replace(CPU, block_s=asks.get("block_s", CPU.block_s))
    sized = size(asked(preset, **asks), preset, design(preset), slower(1))
    assert not sized.chosen
    assert sized.preset == preset


def answered(due_s: float, *token_at_s: float) -> LoadAnswer:
    ended_s = token_at_s[-1] if token_at_s else 60.0
    status = RequestEnd.OK if token_at_s else RequestEnd.TIMEOUT
    return LoadAnswer(
        index=0,
        due_s=due_s,
        sent_s=due_s,
        ended_s=ended_s,
        input_tokens=5,
        token_at_s=token_at_s,
        status=status,
    )


def played(busy_s: float, *answers: LoadAnswer) -> Block:
    counts = {"offline_tokens": 0, "iterations": 1, "planned": 0, "overruns": 0}
    return Block(policy=ONLINE_ONLY, started_s=0.0, duration_s=25.0, busy_s=busy_s, answers=answers, **counts)


@pytest.mark.parametrize(
    ("block", "too_much"),
    [
        (played(13.0, answered(24.0, 24.5, 40.0)), False),  # its tokens come late, but none was queued
        (played(24.0, answered(24.0, 24.5)), True),
        (played(13.0, answered(20.0, 33.0)), True),
        (played(13.0, answered(20.0)), True),
        (played(0.0), False),
    ],
)
def test_a_block_is_too_much_if_it_was_busy_throughout_or_left_a_queue(block: Block, too_much: bool) -> None:
    assert measured(block, 25.0).too_much == too_much


def test_a_block_that_was_too_much_ends_the_comparison_with_a_rate_for_the_machine_as_it_is() -> None:
    offered, engine = asked(), slower(1)
    sized = size(offered, CPU, design(), engine)
    judge(played(13.0, answered(24.0, 24.5)), sized=sized, offered=offered, engine=engine)
    busy = played(24.5, answered(24.0, 50.0, 60.0))
    with pytest.raises(Overloaded, match="kept the engine 98% busy, with first tokens 25 s after") as error:
        judge(busy, sized=sized, offered=offered, engine=engine)
    rate = float(str(error.value).partition("--rate ")[2].split()[0])
    foretold_s = sized.forecasts[0].busy_s + sized.forecasts[0].ended_s - 25
    slow = slower((24.5 + 35) / foretold_s)
    assert 0.45 <= size(asked(rate=rate), CPU, design(), slow).load.busy <= 0.6


def test_a_queue_beside_an_idle_engine_is_not_blamed_on_the_rate() -> None:
    offered, engine = asked(), slower(1)
    sized = size(offered, CPU, design(), engine)
    with pytest.raises(Overloaded, match="run it again with nothing beside it") as error:
        judge(played(1.0, answered(24.0, 50.0)), sized=sized, offered=offered, engine=engine)
    assert "kept the engine 4% busy" in str(error.value)
    assert "--rate" not in str(error.value)


def test_without_a_model_the_rate_follows_from_the_work_that_was_measured() -> None:
    offered = asked(rate=0.8)
    sized = size(offered, CPU, design(), None)
    with pytest.raises(Overloaded, match=r"use --rate 0\.208,"):  # 50 s of work in a block of 25 s
        judge(played(24.5, answered(24.0, 50.0, 50.5)), sized=sized, offered=offered, engine=None)


def test_the_comparison_stops_after_the_first_block_of_online_only(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[str] = []

    async def one_block(turn: Any, trace: Any, design: Any, policy: str, **_: Any) -> Block:
        blocks.append(policy)
        return replace(played(24.5, answered(24.0, 50.0)), policy=policy)

    class Following:
        async def turn(self, *_: Any) -> Turn:
            return ANY_TURN

        async def played(self, policy: str) -> None: ...

    def refuse(block: Block) -> None:
        assert block.policy == ONLINE_ONLY
        raise Overloaded("too much")

    async def go(judged: Any, policies: list[str]) -> None:
        blocks.clear()
        plan = design(policies=policies, settle_s=0.0, warmed_by=0)
        source = lambda number: Trace(name="t", duration_s=1.0, arrivals=())  # noqa: E731
        comparison = alternate(
            Following(),  # type: ignore[arg-type]
            source,
            plan,
            say=lambda line: None,
            judged=judged,
        )
        assert [block.policy async for block in comparison] == blocks

    monkeypatch.setattr(compare, "one_block", one_block)
    with pytest.raises(Overloaded):
        asyncio.run(go(refuse, ALL))
    assert blocks == [ONLINE_ONLY]
    asyncio.run(go(None, ALL))
    others = [CONSERVE, NON_PREEMPTIVE, PRIORITY]
    assert blocks == [ONLINE_ONLY, *others, *others, ONLINE_ONLY], "a place in a round is no policy's own"


def test_an_slo_of_a_pass_before_the_rounds_stays_the_same_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([9.0, 9.0, 1.0, 3.0, 9.0, 9.0, 9.0, 9.0])  # of requests due at once, block by block
    turns: list[tuple[str, Any]] = []

    async def one_block(turn: Any, trace: Any, design: Any, policy: str, **_: Any) -> Block:
        end_s = next(ends)
        return replace(played(24.5, answered(0.0, end_s - 0.5, end_s)), policy=policy)

    class Turning:
        async def turn(self, policy: str, slo: Any) -> Turn:
            turns.append((policy, slo))
            return ANY_TURN

        async def played(self, policy: str) -> None: ...

    async def go() -> Design:
        plan = design(
            policies=[CONSERVE, ONLINE_ONLY],
            rounds=2,
            warmed_by=0,
            settle_s=0.0,
            slo_scale=1.5,
            slo_ahead=True,
        )
        source = lambda number: Trace(name="t", duration_s=1.0, arrivals=())  # noqa: E731
        field: Any = Turning()
        promised = await compare.with_slo(field, source, plan, say=lambda line: None)
        assert [block async for block in alternate(field, source, promised, say=lambda line: None)]
        return promised

    monkeypatch.setattr(compare, "one_block", one_block)
    promised = asyncio.run(go())
    assert promised.slo == pytest.approx((3750, 750)), "of the slower block of the second pass, 1.5 times"
    assert turns[:4] == [(ONLINE_ONLY, None)] * 4
    assert [slo for _, slo in turns[4:]] == [promised.slo] * 4


def test_a_pass_before_the_rounds_takes_its_time_and_is_said() -> None:
    usual = size(asked(rate=0.8), CPU, design(), slower(1))
    ahead = size(asked(rate=0.8), CPU, design(slo_ahead=True), slower(1))
    rounds, each_s = ahead.design.rounds, ahead.design.block_s
    passes = 2 * rounds
    assert passes * each_s < ahead.takes_s - usual.takes_s < passes * (each_s + 10)
    assert "SLO 1 x online-only's P99s of a pass before them;" in ahead.sentence()


def test_servers_start_in_their_turns_and_those_that_stay_start_once() -> None:
    two = [CONSERVE, "online-only/planned", ONLINE_ONLY, NON_PREEMPTIVE]
    turning = design(policies=two, rounds=2, starts_servers=True)
    first, second = compare.order(two, 0), compare.order(two, 1)
    assert [*compare.turns(turning)] == [*first, *second]
    assert compare.started(turning, resident=True) == [ONLINE_ONLY, NON_PREEMPTIVE]
    assert (first, second) == (
        [ONLINE_ONLY, CONSERVE, "online-only/planned", NON_PREEMPTIVE],
        [CONSERVE, "online-only/planned", NON_PREEMPTIVE, ONLINE_ONLY],
    )
    assert compare.started(turning, resident=False) == [
        *(ONLINE_ONLY, CONSERVE, NON_PREEMPTIVE),
        *(CONSERVE, NON_PREEMPTIVE, ONLINE_ONLY),
    ]
    assert not compare.started(replace(turning, starts_servers=False), resident=False)
    ahead = replace(turning, slo_ahead=True)
    assert [*compare.turns(ahead)] == [ONLINE_ONLY] * 4 + [*first, *second]


def test_the_time_before_blocks_is_announced_and_sizes_nothing() -> None:
    """Servers start, meet arrivals and get rows; three live requests before each block wait as those in it."""
    given = asked(rate=0.8)
    running, own = (
        size(given, preset, design(preset, starts_servers=starts), slower(1))
        for preset, starts in ((CPU, False), (CPU, True))
    )
    assert running.takes_s == own.takes_s
    assert own.begins_s - running.begins_s > 2 * compare.STARTED_S, "two stock servers"
    ended = size(given, replace(CPU, resident=False), design(starts_servers=True), slower(1))
    assert ended.begins_s - running.begins_s > 6 * compare.STARTED_S
    full_s = slower(1).full_s()
    beside_rows = CPU.rounds * 2 * compare.WARMED_BY * compare.WARM_TOKENS * full_s
    assert beside_rows < running.begins_s < 2 * beside_rows, "of the two policies whose iterations are full"
    assert f"takes about {round((own.takes_s + own.begins_s) / 60)} min" in own.sentence()


def test_an_engine_with_room_is_asked_too_much_only_where_it_leaves_a_queue() -> None:
    assert BlockLoad(0.97, 20.0, 25.0).too_much
    assert not BlockLoad(0.97, 20.0, 25.0, roomy=True).too_much
    assert BlockLoad(0.5, 49.9, 25.0, roomy=True).too_much


@pytest.mark.parametrize(("step_ms", "roomy"), [(0.01, True), (0.15, True), (0.17, False), (1.6, False)])
def test_an_engine_has_room_if_64_decode_steps_take_less_than_twice_as_long_as_one(
    step_ms: float, roomy: bool
) -> None:
    engine = EngineModel(
        model=ConServeModel.of(step_ms, 0, 0, 0, 0, 0, 0, 10), max_tokens=512, max_requests=32
    )
    assert engine.roomy is roomy
    assert play(None, engine, 25.0).roomy is roomy


def test_several_engines_answer_so_many_times_the_arrivals_of_one() -> None:
    alone = [Arrival(at_s / 2, 300 + 50 * at_s, 20) for at_s in range(12)]
    of_one = Trace(name="t", duration_s=25.0, arrivals=tuple(alone))
    of_three = replace(of_one, arrivals=tuple(arrival for arrival in alone for _ in range(3)))
    one = play(of_one, slower(2), 25.0)
    three = play(of_three, slower(2, engines=3), 25.0)
    assert (three.busy, three.ended_s) == (pytest.approx(one.busy), one.ended_s)
    assert p99s_ms([three]) == pytest.approx(p99s_ms([one]))
    assert len(three.requests) == 3 * len(one.requests)
    assert play(replace(of_one, arrivals=tuple(alone[:1])), slower(2, engines=3), 25.0).busy < one.busy
    assert slower(2, engines=3).most_rows == 3 * slower(2).most_rows


def test_the_rate_grows_with_the_engines_and_so_do_the_rows_of_a_block() -> None:
    offered = asked(rounds=1, lengths=0.5)
    one, two = (size(offered, CPU, design(rounds=1), slower(1, engines=engines)) for engines in (1, 2))
    assert two.rate == pytest.approx(2 * one.rate, rel=0.1)
    assert two.load.busy == pytest.approx(one.load.busy, abs=0.05)
    rows = [rows_of_block(one, FULL, slower(1, engines=engines), 15.0) for engines in (1, 2)]
    assert rows[1] == pytest.approx(2 * rows[0], abs=2)


def test_load_reads_as_a_phrase() -> None:
    assert str(BlockLoad(0.5, 20.0, 25.0)) == "50% busy"
    assert str(BlockLoad(0.97, 49.9, 25.0)) == "97% busy, with first tokens 25 s after the block's end"


# What the server tells

TOLD: dict[str, Any] = {
    "latency_model": {**MODEL, "coefficients": slower(2).model.coefficients, "scale": 1.25},
    "max_num_seqs": 32,
}


def engine_of(said: dict[str, Any]) -> EngineModel | None:
    async def go() -> EngineModel | None:
        deployment = Deployment(
            "http://host",
            transport=httpx.MockTransport(lambda request: httpx.Response(200, content=answer(**said))),
        )
        try:
            return await deployment.engine()
        finally:
            await deployment.close()

    return asyncio.run(go())


def test_the_engines_speed_is_what_its_server_tells() -> None:
    engine = engine_of(TOLD)
    assert engine is not None
    assert (engine.max_tokens, engine.max_requests, engine.engines) == (512, 32, 1)
    two = engine_of({**TOLD, "max_num_seqs": 64, "engines": 2})
    assert two is not None
    assert (two.max_tokens, two.max_requests, two.engines) == (512, 32, 2)
    batch = Batch.of([Slice(100, 7)])
    assert engine.ms(batch) == pytest.approx(1.25 * slower(2).ms(batch))


@pytest.mark.parametrize(
    "said",
    [
        {**TOLD, "latency_model": {**TOLD["latency_model"], "name": "another"}},
        {**TOLD, "latency_model": {**TOLD["latency_model"], "coefficients": {"compute": 1.0}}},
    ],
)
def test_a_server_that_tells_no_model_we_know_has_no_known_speed(said: dict[str, Any]) -> None:
    assert engine_of(said) is None


def test_a_server_that_has_learned_no_model_yet_is_refused() -> None:
    with pytest.raises(EndpointUnusable, match="conserve profile --served"):
        engine_of({**TOLD, "latency_model": None})


class CoServer(BaseHTTPRequestHandler):
    """Tells its speed, and nothing else."""

    methods: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        models = json.dumps({"data": [{"id": "m"}]}).encode()
        self.reply(answer(**TOLD) if self.path == "/v1/conserve" else models)

    def do_POST(self) -> None:
        self.reply(answer(**TOLD))

    def reply(self, content: bytes) -> None:
        self.methods.append(self.command)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def co_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), CoServer)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_is_asked_too_much_is_left_alone_and_the_command_exits_2(
    co_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "bench",
        "--gamma",
        "50,1,256,48",
        "--policies",
        "online-only",
        "--rounds",
        "1",
        "--block-s",
        "5",
    ]
    monkeypatch.setattr(sys, "argv", ["conserve", *words, "--endpoint", co_server, "-o", str(tmp_path)])
    assert main() == 2
    said = capsys.readouterr().err
    assert "online-only alone would keep the engine" in said
    assert re.search(r"use --gamma [\d.e-]+,1,256,48, or play", said)
    assert "POST" not in CoServer.methods


@pytest.mark.parametrize("words", [["bench", "--gamma", "1,1,9,9"], ["tune", "a/model"]])
def test_a_seed_below_nought_is_refused_in_a_sentence(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["conserve", *words, "--seed", "-1"])
    assert main() == 2
    assert "Invalid value for '--seed'" in capsys.readouterr().err


def test_the_document_says_what_was_set_and_on_which_engine() -> None:
    offered, engine = asked(), slower(5)
    sized = size(offered, CPU, design(), engine)
    said = played_facts(Measurement(offered=offered, engine=engine), sized)
    assert said["arrivals"] == f"--trace {BURSTY} {sized.flags(offered, sized.rate)}"
    assert said["set by"] == "the machine's speed"
    assert said["expected"] == sized.sentence()
    assert said["latency model"].startswith("conserve: compute 3.191, ")
    given_rate = size(asked(rate=0.2), CPU, design(), engine)
    said = played_facts(Measurement(offered=asked(rate=0.2), engine=engine), given_rate)
    assert (said["arrivals"], said["set by"]) == (f"--trace {BURSTY} --rate 0.2", "the command line")
