"""Stock servers seen from outside, and the parameters that the baselines are tuned to."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from conserve.bench import baseline_parameters
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.baseline_parameters import TunedTerms, TuningWorkload
from conserve.bench.compare import Design
from conserve.bench.names import ONLINE_ONLY_PLANNED, alone_of, most_of
from conserve.bench.presets import CPU
from conserve.bench.servers.place import ServerPlace
from conserve.bench.simulate_online import EngineModel, play
from conserve.bench.simulate_with_rows import Sharing, play_with_rows
from conserve.bench.sizing import size
from conserve.bench.slo_search import MOST_RUNS, Promise, RunLatencies, excess, promises, search
from conserve.bench.stock import RowsInFlight, StockServer, in_flight_s, live_tokens, tokens_of
from conserve.bench.traces import Arrival, Trace
from conserve.engine.vllm.server.stock import environment
from conserve.errors import EndpointUnusable, SettingsError
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.worth import Worth
from tests.benchmarks.simulation import DEMO, FASTER
from tests.unit.test_sizing import asked

# A stock server


def answered(sent_s: float, *token_at_s: float, prompt: int = 100) -> LoadAnswer:
    end_s = token_at_s[-1] if token_at_s else sent_s + 1
    times = {"due_s": sent_s, "sent_s": sent_s, "ended_s": end_s, "token_at_s": token_at_s}
    return LoadAnswer(index=0, input_tokens=prompt, status=RequestEnd.OK, **times)


def page(prompts: float, cached: float, answers: float) -> str:
    return (
        "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.\n"
        f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompts}\n'
        f'vllm:prompt_tokens_cached_total{{engine="0"}} {cached}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {answers}\n'
    )


def stock(*pages: str, rows: RowsInFlight | None) -> StockServer:
    left = list(pages)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=left.pop(0)))
    return StockServer("http://host", rows=rows, transport=transport)


def counted(rows: RowsInFlight | None, answers: list[LoadAnswer]) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        server = stock(page(1000, 0, 50), page(4800, 0, 150), rows=rows)
        first, last = await server.counters(), await server.counters()
        await server.close()
        return server.counted(first, last, [(5.0, first), (10.0, last)], answers, 10.0)

    return asyncio.run(go())


def test_offline_tokens_are_the_servers_less_what_clients_got() -> None:
    rows = RowsInFlight(worth=Worth(step=2.0, context=0.01), context=100.0)
    found = counted(rows, [answered(1.0, 2.0, 3.0, 11.0), answered(9.0, 12.0)])
    # 3,800 prompt tokens of which 100 were a client's, 100 answer tokens of which 2 were
    assert found["offline_tokens"] == 3700 + 98
    assert found["offline_work"] == pytest.approx(3700 + 98 * (2.0 + 1.0))
    assert found["busy_s"] == 10.0
    assert not found["tells"], "of iterations that rows left, and of what evicted ones lost"
    assert found["offline_series"] == ((5.0, 0), (10.0, 3798))


def test_what_live_prompts_find_in_the_prefix_cache_is_not_taken_from_the_rows() -> None:
    """Ten live prompts of 600 tokens begin with the same 384 ones, beside rows with 5,000 tokens."""
    rows, answers = RowsInFlight(worth=Worth(), context=100.0), [answered(1.0, 2.0, prompt=600)] * 10

    async def go() -> dict[str, Any]:
        server = stock(page(1000, 0, 50), page(1000 + 6000 + 5000, 10 * 384, 60), rows=rows)
        first, last = await server.counters(), await server.counters()
        await server.close()
        return server.counted(first, last, [(10.0, last)], answers, 10.0)

    found = asyncio.run(go())
    assert (found["offline_tokens"], found["offline_decodes"]) == (5000, 0)
    assert found["offline_series"] == ((10.0, 5000),)


def test_a_server_without_rows_counts_the_time_that_it_has_a_request() -> None:
    found = counted(None, [answered(1.0, 2.0), answered(1.5, 4.0), answered(9.0, 12.0)])
    assert (found["offline_tokens"], found["busy_s"]) == (0, 4.0)


def test_tokens_count_once_the_client_has_them() -> None:
    answers = [answered(0.0, 1.0, 2.0, prompt=7), answered(0.0, 3.0, prompt=9), answered(5.0)]
    assert live_tokens(answers, 2.5) == (7.0, 2.0)
    assert live_tokens(answers, 3.0) == (16.0, 3.0)
    assert in_flight_s([], 10.0) == 0.0


def test_a_server_that_counts_nothing_is_refused_in_one_sentence() -> None:
    with pytest.raises(EndpointUnusable, match="--disable-log-stats"):
        tokens_of("vllm:num_requests_waiting 0")


def test_a_stock_server_has_no_plug_in_of_ours() -> None:
    found = environment("smollm2-demo")
    assert "conserve" not in found["VLLM_PLUGINS"].split(",")
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment("Qwen/Qwen2.5-7B-Instruct")


def test_references_are_the_stock_ones_where_they_were_measured() -> None:
    assert alone_of(["conserve", ONLINE_ONLY_PLANNED, "online-only"]) == "online-only"
    assert alone_of(["conserve", ONLINE_ONLY_PLANNED]) == ONLINE_ONLY_PLANNED
    assert (alone_of(["conserve"]), most_of(["non-preemptive/planned"])) == (None, "non-preemptive/planned")


class Sleeping:
    """A service of one process, for which a child of its own does the work."""

    def __init__(self) -> None:
        code = "import subprocess; subprocess.run(['sleep', '600'])"
        self.process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        while not psutil.Process(self.process.pid).children():
            pass

    def process_ids(self) -> list[int]:
        return [self.process.pid]

    def members(self) -> list[psutil.Process]:
        leader = psutil.Process(self.process.pid)
        return [leader, *leader.children()]


@pytest.fixture
def sleeping() -> Iterator[Sleeping]:
    service = Sleeping()
    yield service
    for member in service.members():
        member.kill()
    service.process.wait()


def states(service: Sleeping) -> set[bool]:
    return {member.status() == psutil.STATUS_STOPPED for member in service.members()}


def until(service: Sleeping, stopped: bool) -> None:
    while states(service) != {stopped}:
        pass


def test_a_server_without_a_turn_is_stopped_in_its_tracks_and_freed_with_this_process(
    sleeping: Sleeping,
) -> None:
    place = ServerPlace("it", None, None, None, url="", preset=CPU, say=print)  # type: ignore[arg-type]

    async def go() -> None:
        place._service = sleeping  # type: ignore[assignment]
        place._running = asyncio.create_task(asyncio.sleep(600))
        place._guard()
        await place.freeze()
        until(sleeping, stopped=True)
        await place.freeze()
        place._signal(signal.SIGCONT)
        until(sleeping, stopped=False)
        place._frozen = False
        await place.freeze()
        until(sleeping, stopped=True)
        assert place._warden is not None
        assert place._warden.stdin is not None
        place._warden.stdin.close()  # as the end of this process does
        until(sleeping, stopped=False)
        place._warden.wait()
        place._running.cancel()

    asyncio.run(go())


# Rows beside live requests, simulated

MODEL = ConServeModel.of(*(ms / FASTER for ms in DEMO))
ENGINE = EngineModel(model=MODEL, max_tokens=512, max_requests=16)
ROWS = [(300, 20), (200, 40)]


def trace(*arrivals: Arrival) -> Trace:
    return Trace(name="t", duration_s=20.0, arrivals=arrivals)


LIVE = trace(*(Arrival(float(n), 120, 8) for n in range(0, 20, 2)))


def test_without_rows_it_is_the_same_as_the_forecast() -> None:
    alone = play(LIVE, ENGINE, 20.0)
    found = play_with_rows(LIVE, ENGINE, 20.0, Sharing(online_first=True, max_tokens=512), ROWS, window=0)
    assert found.offline_tokens == 0
    for one, other in zip(found.requests, alone.requests, strict=True):
        assert one.token_at_s == pytest.approx(other.token_at_s)


def test_a_smaller_budget_does_less_harm_and_harvests_less() -> None:
    budgets = [(budget, beside(budget)) for budget in (60.0, 150.0, 400.0)]
    for (_, (tbt_ms, tokens)), (_, (more_ms, more_tokens)) in pairwise(budgets):
        assert tbt_ms < more_ms
        assert tokens < more_tokens
    for budget, (tbt_ms, _) in budgets:
        assert tbt_ms <= budget * 1.001


def beside(budget_ms: float) -> tuple[float, int]:
    """Longest TBT and the rows' tokens."""
    sharing = Sharing(online_first=True, max_tokens=512, budget_ms=budget_ms)
    found = play_with_rows(LIVE, ENGINE, 20.0, sharing, ROWS, window=16)
    assert all(len(one.token_at_s) == one.output_tokens for one in found.requests)
    return max(float(np.diff(one.token_at_s).max()) * 1e3 for one in found.requests), found.offline_tokens


def test_live_requests_wait_for_a_place_only_under_vllms_priorities() -> None:
    first, last = (
        play_with_rows(LIVE, ENGINE, 20.0, Sharing(online_first=first, max_tokens=512), ROWS, window=40)
        for first in (True, False)
    )
    ttft_s = [np.mean([one.token_at_s[0] - one.at_s for one in found.requests]) for found in (first, last)]
    assert ttft_s[0] < 0.9 * ttft_s[1]


def test_rows_begin_at_the_fixed_rate() -> None:
    def tokens(rows_per_s: float) -> int:
        sharing = Sharing(online_first=True, max_tokens=512, rows_per_s=rows_per_s)
        return play_with_rows(LIVE, ENGINE, 20.0, sharing, [(100, 10)], window=16, lead_s=0.0).offline_tokens

    assert tokens(0.5) == pytest.approx(0.5 * 20 * 109, rel=0.2)
    assert tokens(0.25) == pytest.approx(0.25 * 20 * 109, rel=0.35)


# HyGen's profiler


def test_promises_are_read_as_they_are_said() -> None:
    assert promises("p99-ttft=5%, mean-tbt=10%") == [
        Promise("p99", "ttft", 0.05),
        Promise("mean", "tbt", 0.1),
    ]
    for wrong in ("", "p99-ttft", "p99-ttft=4%", "p99-ttft=60%", "p50-ttft=5%", "p99-ttft=5%,"):
        with pytest.raises(SettingsError, match="--tolerance takes"):
            promises(wrong)


def latencies(ttft_ms: float, tbt_ms: float) -> RunLatencies:
    return RunLatencies(np.full(9, ttft_ms), np.full(9, tbt_ms))


def test_several_promises_have_to_be_kept_at_once() -> None:
    both, alone = promises("p99-ttft=10%,mean-tbt=50%"), latencies(100, 10)
    assert excess(latencies(110, 15), alone, both) == pytest.approx(1.0)
    assert excess(latencies(121, 15), alone, both) == pytest.approx(1.1)
    assert excess(latencies(110, 30), alone, both) == pytest.approx(2.0)
    assert excess(RunLatencies(np.zeros(0), np.zeros(0)), alone, both) == 0.0
    assert excess(alone, RunLatencies(np.zeros(0), np.zeros(0)), both) == float("inf")


@pytest.mark.parametrize(("harm_ms", "found"), [(0.25, 200.0), (1.0, 55.0), (3.0, 55 / 3), (1e3, 2.0)])
def test_the_largest_budget_that_keeps_the_promises_is_found(harm_ms: float, found: float) -> None:
    runs: list[float] = []

    async def run(budget_ms: float) -> RunLatencies:
        runs.append(budget_ms)
        return latencies(100, 50 + harm_ms * budget_ms)

    got = asyncio.run(search(2.0, 200.0, run, latencies(100, 100), [Promise("p99", "tbt", 0.05)]))
    assert got.value == pytest.approx(found, rel=0.06)
    assert got.value <= found * 1.0001
    assert got.runs == len(runs)
    assert got.kept == (harm_ms < 1e3)


def test_a_budget_that_is_too_small_does_harm_too() -> None:
    """Prompts in slivers below 30 ms, long iterations above 120: the search goes between."""

    async def run(budget_ms: float) -> RunLatencies:
        return latencies(3000 / budget_ms, budget_ms)

    alone = latencies(100, 120)
    got = asyncio.run(search(2.0, 2000.0, run, alone, promises("p99-ttft=5%,p99-tbt=5%")))
    assert got.kept
    assert got.value == pytest.approx(126, rel=0.06)
    strict = asyncio.run(search(2.0, 2000.0, run, latencies(10, 20), promises("p99-ttft=5%,p99-tbt=5%")))
    assert not strict.kept
    assert strict.value == pytest.approx((3000 / 10 * 20) ** 0.5, rel=0.8)


@pytest.mark.parametrize(
    ("kept", "largest"),
    [((600.0, 780.0), 780), ((8.0, 30.0), 30), ((60.0, 200.0), 200), ((900.0, 1300.0), 1300)],
)
def test_a_valley_between_the_values_of_the_scan_is_found(kept: tuple[float, float], largest: float) -> None:
    """Latencies are longer on both sides of it, in proportion to the square root of the distance."""
    low, high = kept

    async def run(budget_ms: float) -> RunLatencies:
        beyond = max(low / budget_ms, budget_ms / high, 1.0)
        return latencies(105, 105 * beyond**0.5)

    alone = latencies(100, 100)
    got = asyncio.run(search(14.8, 1738.0, run, alone, promises("p99-ttft=5%,p99-tbt=5%")))
    assert got.kept
    assert 0.93 * largest <= got.value <= largest
    assert got.runs <= MOST_RUNS


def test_a_larger_value_that_keeps_is_found_above_ones_that_do_not() -> None:
    """Budgets up to 100 ms keep the promise, those from 900 to 1,300 do, and the others nearly do."""

    async def run(budget_ms: float) -> RunLatencies:
        return latencies(100, 104 if budget_ms <= 100 or 900 <= budget_ms <= 1300 else 107)

    got = asyncio.run(search(14.8, 1738.0, run, latencies(100, 100), promises("p99-tbt=5%")))
    assert got.kept
    assert 1200 <= got.value <= 1300


def test_a_search_ends_where_every_value_nearly_keeps() -> None:
    tried: list[float] = []

    async def run(budget_ms: float) -> RunLatencies:
        tried.append(budget_ms)
        return latencies(100, 106)

    got = asyncio.run(search(14.8, 1738.0, run, latencies(100, 100), promises("p99-tbt=5%")))
    assert not got.kept
    assert got.runs == len(tried) == len(set(tried)) == MOST_RUNS


@pytest.fixture(scope="module")
def workload() -> TuningWorkload:
    engine = EngineModel(model=MODEL, max_tokens=1024, max_requests=32)
    preset = replace(CPU, offline_window=40)
    design = Design(policies=["online-only", "hygen"], rounds=1, block_s=10.0, settle_s=0.0)
    sized = size(asked(preset, block_s=10.0, rounds=1), preset, design, engine)
    return TuningWorkload.of(sized, preset, engine, seed=0)


def test_a_tuned_budget_keeps_what_a_full_one_breaks(workload: TuningWorkload) -> None:
    promised = promises("mean-tbt=30%")
    alone = workload.alone()
    found = asyncio.run(baseline_parameters.tuned_terms("hygen", workload, MODEL, promised, None, alone))
    assert found.kept
    budget_ms = found.values["budget_ms"]
    sharing = Sharing(online_first=True, max_tokens=1024, budget_ms=budget_ms, predictor=MODEL)
    inside, tokens = workload.beside(sharing)
    assert excess(inside, alone, promised) <= 1
    assert tokens > 0
    assert excess(workload.beside(replace(sharing, budget_ms=float("inf")))[0], alone, promised) > 1
    assert "mean TBT +30%" in baseline_parameters.sentence("hygen", found, promised, "simulated")


def test_a_live_prompt_alone_is_cut_to_the_budget_as_in_the_policy_that_is_tuned() -> None:
    """Computed whole it would keep promises in the forecast that the policy breaks."""
    trace = Trace(name="one", duration_s=1.0, arrivals=(Arrival(0.0, 500, 2),))
    budget_ms = MODEL.predict(Batch.of([Slice(100, 0)]))

    def ttft_ms(budget_ms: float) -> float:
        sharing = Sharing(online_first=True, max_tokens=512, budget_ms=budget_ms)
        (request,) = play_with_rows(trace, ENGINE, 1.0, sharing, ROWS, window=0).requests
        return request.token_at_s[0] * 1e3

    pieces_ms = sum(MODEL.predict(Batch.of([Slice(100, context)])) for context in range(0, 500, 100))
    assert ttft_ms(budget_ms) == pytest.approx(pieces_ms, rel=0.05)
    assert ttft_ms(MODEL.predict(Batch()) / 2) == pytest.approx(MODEL.predict(Batch.of([Slice(500, 0)])))


def test_the_largest_budget_that_is_tried_cuts_nothing(workload: TuningWorkload) -> None:
    low, high = baseline_parameters._range("hygen", workload, MODEL)
    sharing = Sharing(online_first=True, max_tokens=1024, budget_ms=high, predictor=MODEL)
    assert workload.beside(sharing)[1] == workload.beside(replace(sharing, budget_ms=float("inf")))[1]
    assert workload.beside(replace(sharing, budget_ms=low))[1] == 0.0


def test_a_fixed_rate_is_tuned_at_each_token_budget(workload: TuningWorkload) -> None:
    promised, alone = promises("mean-tbt=30%"), workload.alone()
    tuned = partial(baseline_parameters.tuned_terms, "hygen-star", workload, MODEL, promised, None, alone)
    found = asyncio.run(tuned())
    each = [asyncio.run(tuned(tokens=[tokens])) for tokens in (128, 256, 512, 1024)]
    assert found.runs == sum(one.runs for one in each) <= 4 * MOST_RUNS

    def beside(one: TunedTerms) -> tuple[RunLatencies, float]:
        rows_per_s = one.values["offline_per_s"]
        return workload.beside(Sharing(online_first=True, max_tokens=one.tokens, rows_per_s=rows_per_s))

    assert found.kept
    assert excess(beside(found)[0], alone, promised) <= 1
    assert beside(found)[1] == max(beside(one)[1] for one in each if one.kept)
    said = baseline_parameters.sentence("hygen-star", found, promised, "simulated")
    assert f"rows/s in iterations of at most {found.tokens} tokens for mean TBT +30% (" in said


def test_small_iterations_keep_what_no_rate_keeps_in_large_ones(workload: TuningWorkload) -> None:
    """A row's prompt in one piece is a gap that every live request hears of, however seldom a row begins."""
    promised, alone = [Promise("p99", "tbt", 0.5)], latencies(1e9, 60.0)

    async def run(terms: Mapping[str, float]) -> tuple[RunLatencies, float]:
        return latencies(1.0, terms["tokens"] / 2), terms["offline_per_s"]

    tuned = partial(baseline_parameters.tuned_terms, "hygen-star", workload, MODEL, promised, run, alone)
    assert not asyncio.run(tuned(tokens=[1024])).kept
    found = asyncio.run(tuned())
    assert (found.kept, found.tokens) == (True, 128)


def test_of_settings_that_all_lose_requests_the_gentlest_is_taken(workload: TuningWorkload) -> None:
    """A mean with a request that failed exceeds each promise infinitely, whatever the setting."""
    values: list[float] = []

    async def run(terms: Mapping[str, float]) -> tuple[RunLatencies, float]:
        values.append(terms["budget_ms"])
        return latencies(1.0, inf), 1.0

    alone = latencies(1e9, 60.0)
    promised = [Promise("mean", "tbt", 0.5)]
    found = asyncio.run(baseline_parameters.tuned_terms("hygen", workload, MODEL, promised, run, alone))
    assert not found.kept
    assert len(values) > 1
    assert found.values == {"budget_ms": min(values)}


def test_the_token_budget_is_one_of_those_it_names(workload: TuningWorkload) -> None:
    loose = baseline_parameters.token_budget(workload, promises("p99-ttft=50%,p99-tbt=50%"))
    assert loose.tokens in loose.tried
    assert loose.tried == [128, 256, 512, 1024]
    assert f"sarathi-p: {loose.tokens} tokens" in loose.sentence()
    strict = baseline_parameters.token_budget(workload, promises("mean-tbt=5%"))
    assert not strict.kept
    assert strict.tokens <= loose.tokens


def test_an_empty_iteration_takes_no_row_beyond_its_budget() -> None:
    """The constant part alone exceeds the budget: rows never run, live requests do."""
    sharing = Sharing(online_first=True, max_tokens=512, budget_ms=MODEL.predict(Batch()) / 2)
    found = play_with_rows(LIVE, ENGINE, 20.0, sharing, ROWS, window=4)
    assert found.offline_tokens == 0
    assert all(one.token_at_s for one in found.requests)


def test_the_package_names_every_stock_variable(tmp_path: Path) -> None:
    assert int(environment(str(tmp_path))["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) >= 3600
