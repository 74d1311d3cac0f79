"""The simulated engine itself: what its figures are worth depends on when rows leave and where they go on."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conserve.bench.traces import Arrival
from conserve.server_report import SpillReport
from tests.server_reports import require_fit
from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
    pytest.mark.engine,
]

LAYERS = 10
PROMPT = 200  # tokens of a live request
ROWS = [(900, 3)] * 40  # prompts of 300 ms each
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Make:
    """Engines without scatter: every figure below is exact."""

    def make(
        preemption: str,
        rows: Sequence[tuple[int, int]] = ROWS,
        *,
        separable: bool = True,
        num_blocks: int = 4096,
        copy_ms: float | None = None,
        **settings: Any,
    ) -> Any:
        """With `copy_ms` KV is checkpointed; a block takes so long."""
        from conserve.engine.vllm.settings import WORKER
        from conserve.engine.vllm.simulation.copies import HostCopies, SimulatedCopies, checkpointing
        from conserve.engine.vllm.simulation.engine import SimulatedEngine
        from tests.bare_scheduler import MODEL, engine_config

        slo = {"ttft_slo_ms": 1000, "tbt_slo_ms": 400}
        section = {"policy": "conserve", "preemption": preemption, "safepoint_every": 1, **slo, **settings}
        flags: dict[str, Any] = {"max_num_batched_tokens": 1024}
        copies = HostCopies(blocks=64, block_ms=copy_ms) if copy_ms is not None else None
        if copies is not None:
            flags["kv_transfer_config"] = checkpointing(copies, 128)
        config = engine_config(tmp_path, section=section, **flags)
        config.parallel_config.worker_cls = WORKER
        return SimulatedEngine(
            config,
            clock=clock,
            model=MODEL,
            layers=LAYERS,
            num_blocks=num_blocks,
            offline=iter(rows),
            window=8,
            scatter=0.0,
            seed=0,
            separable=separable,
            copies=SimulatedCopies(copies) if copies is not None else None,
        )

    return make


def prompt_ms() -> float:
    from conserve.profiles.batch import Batch, Slice
    from tests.bare_scheduler import MODEL

    return MODEL.predict(Batch.of([Slice(PROMPT, 0)]))


def ttft_ms(engine: Any, *, at_s: float) -> float:
    (answer,) = engine.play([Arrival(at_s, PROMPT, 4)])
    assert len(answer.token_at_s) == 4
    assert all(answer.tbts_ms > 0)
    return float(answer.ttft_ms)


def test_an_arrival_alone_takes_as_long_as_its_prompt(make: Make) -> None:
    assert ttft_ms(make("prompt", rows=[]), at_s=0.0) == pytest.approx(prompt_ms(), abs=1.5)


def test_an_arrival_waits_for_a_layer_and_without_preemption_for_the_iteration(make: Make) -> None:
    waits = {}
    for preemption in ("prompt", "never"):
        engine = make(preemption)
        engine.go_on_until(engine.clock.now + 2.0)
        waits[preemption] = ttft_ms(engine, at_s=0.05) - prompt_ms()
    layer_ms = 400 / LAYERS  # of an iteration as long as the TBT allows, at most
    assert 0 <= waits["prompt"] < 2 * layer_ms
    assert waits["never"] > 3 * layer_ms


def test_who_decodes_beside_rows_stays_when_they_leave(make: Make) -> None:
    engine = make("prompt")
    engine.go_on_until(engine.clock.now + 2.0)
    first, second = engine.play([Arrival(0.05, PROMPT, 6), Arrival(0.6, PROMPT, 1)])
    monitor = engine.scheduler.arrival_monitor
    assert (monitor.counts.iterations_left, monitor.counts.abandoned) == (2, 1), (
        "the second one's iteration goes on"
    )
    assert len(first.token_at_s) == 6
    assert second.ttft_ms < 1.1 * prompt_ms() + 2 * 400 / LAYERS, "and with less in it is soon over"


def test_rows_that_leave_go_on_where_they_left(make: Make) -> None:
    """However often they leave, an iteration's time is computed once, and every row ends."""
    took = {}
    for preemption in ("prompt", "never"):
        engine = make(preemption)
        began = engine.clock.now
        engine.play([Arrival(0.4 * n, PROMPT, 1) for n in range(20)])
        while engine.scheduler.requests:
            engine.go_on_until(engine.clock.now + 0.01)
        took[preemption] = engine.clock.now - began
        assert engine.offline_tokens == sum(prompt + answer - 1 for prompt, answer in ROWS)
        assert (engine.scheduler.arrival_monitor.counts.iterations_left > 5) == (preemption == "prompt")
        assert not engine._suspended
    assert took["prompt"] == pytest.approx(took["never"], rel=0.1)
    assert engine.scheduler.arrival_monitor.counts.tokens_wasted == 0


def test_evicted_rows_get_their_kv_back_where_it_is_copied(make: Make) -> None:
    """Live requests take memory from rows with long answers again and again."""
    rows = [(900, 100)] * 12
    computed, restored, took, saved = {}, {}, {}, {}
    for copy_ms in (None, 0.1, 5.0):
        engine = make("prompt", rows, num_blocks=40, copy_ms=copy_ms)
        began = engine.clock.now
        engine.go_on_until(began + 1.0)
        for _ in range(6):
            engine.play([Arrival(0.01 * n, 900, 8) for n in range(4)], 1.0)
        while engine.scheduler.requests:
            engine.go_on_until(engine.clock.now + 0.01)
        told = engine.scheduler.conserve()["checkpoint"]
        computed[copy_ms], restored[copy_ms] = told["tokens_recomputed"], told.get("tokens_restored", 0)
        took[copy_ms], saved[copy_ms] = engine.clock.now - began, told.get("tokens_saved", 0)
        assert engine.offline_tokens == sum(prompt + answer - 1 for prompt, answer in rows)
        assert not engine.scheduler.checkpoints or not engine.scheduler.checkpoints.copying
    assert computed[None] > 1000
    assert restored[0.1] > 1000
    assert computed[0.1] == 0
    assert took[0.1] < took[None]
    assert saved[5.0] < saved[0.1], "copies that take long are fewer"
    assert took[0.1] < took[5.0]


def test_where_rows_leave_together_no_online_request_leaves_with_them(make: Make) -> None:
    engine = make("prompt", separable=False)
    engine.go_on_until(engine.clock.now + 2.0)
    answers = engine.play([Arrival(0.37 * n, PROMPT, 12) for n in range(12)])
    monitor = engine.scheduler.arrival_monitor
    assert monitor.counts.iterations_left == monitor.counts.abandoned >= 2
    assert monitor.counts.live_tokens_recomputed == 0
    for answer in answers:
        assert len(answer.token_at_s) == 12
        assert answer.ttft_ms <= 1000
        assert max(answer.tbts_ms) <= 400 * 1.01, "decodes wait for a turn of rows, not longer than promised"
    assert engine.offline_tokens > 5000


def test_a_view_says_how_long_decodes_waited_also_where_rows_cannot_leave_just_then(make: Make) -> None:
    """Rows cannot leave while an online request's grammar is compiled, for example."""
    from conserve.engine.vllm.scheduling.observation import Picture

    engine = make("prompt", separable=False)
    scheduler, waited = engine.scheduler, []

    def looks(*args: Any) -> Any:
        scheduler.books.catch_up()
        if scheduler._last_was_a_turn and scheduler.running:
            with mock.patch.object(type(scheduler.arrival_monitor), "may_leave_next", False):
                view = Picture(scheduler, scheduler.traffic, surcharge_ms=0.0).view(*args)
            waited.append((view.online_waited_ms, scheduler.last_iteration.took_s * 1e3))
        return Picture(scheduler, scheduler.traffic, surcharge_ms=0.0)

    plan = scheduler._plan_by_policy
    with mock.patch.object(
        scheduler, "_plan_by_policy", lambda model: looks(scheduler.slo, model) and plan(model)
    ):
        engine.go_on_until(engine.clock.now + 2.0)
        engine.play([Arrival(0.31 * n, PROMPT, 30) for n in range(4)])
    assert len(waited) > 10
    assert all(said == took > 0 for said, took in waited)


def test_an_iteration_with_online_requests_is_not_left_as_a_whole(make: Make) -> None:
    """Each iteration is looked at as the scheduler stamps it."""
    engine = make("prompt", separable=False)
    stamped = []
    monitor, begin = engine.scheduler.arrival_monitor, engine.scheduler.arrival_monitor.begin

    def watched(iteration: Any, **named: Any) -> None:
        begin(iteration, **named)
        offline = {request.request_id for request, _ in named["offline"]}
        stamped.append((bool(iteration.rows), iteration.tokens.keys() <= offline))

    monitor.begin = watched
    engine.go_on_until(engine.clock.now + 0.5)
    engine.play([Arrival(0.3 * n, PROMPT, 8) for n in range(8)])
    assert {alone for rows, alone in stamped if rows} == {True}


def test_prompts_of_as_many_tokens_share_nothing(make: Make) -> None:
    engine = make("never", rows=[])
    firsts = {tuple(engine.request(PROMPT).prompt_token_ids[:2]) for _ in range(3000)}
    assert len(firsts) == 3000


def test_a_server_measures_its_harm_in_pauses(make: Make) -> None:
    from conserve.engine.runtime.receipt import Receipt

    engine = make("prompt", rows=[(900, 3)] * 400)
    turns = mock.Mock(side_effect=cycle([0.0, 0.5]))  # a pause, then a slot for comparison
    receipt = engine.scheduler.traffic.receipt = Receipt(share=0.2, dice=mock.Mock(random=turns))
    engine.play([Arrival(0.6 * n, PROMPT, 5) for n in range(30)])
    said = receipt.report()
    assert said["pauses"]
    assert said["tbt_ms"]["p50"]["with_ms"] > 5 * said["tbt_ms"]["p50"]["without_ms"]


def test_a_report_is_what_its_readers_take_it_for(make: Make) -> None:
    from conserve.engine.runtime.receipt import Receipt
    from conserve.engine.vllm.requests.data_parallel import together

    begun = make("off", rows=[]).scheduler.conserve()
    require_fit(begun)
    agents = {"tbt_slo_ms": {"p50": 400, "p99": 2000}, "models": ["agents"]}
    engine = make("prompt", rows=[(900, 3)] * 400, copy_ms=0.5, classes={"agents": agents})
    turns = mock.Mock(side_effect=cycle([0.0, 0.5]))  # a pause, then a slot for comparison
    engine.scheduler.traffic.receipt = Receipt(share=0.2, dice=mock.Mock(random=turns))
    engine.play([Arrival(0.6 * n, PROMPT, 5) for n in range(30)])
    said = engine.scheduler.conserve()
    read = require_fit(said)
    assert read.classes is not None
    assert read.harm.tbt_ms.p50 is not None
    assert read.latency_model is not None
    assert (read.checkpoint.block_ms, read.online.tbt_ms.p99) != (None, None)
    require_fit(together([said, said]))
    require_fit(together([begun, begun]))


def test_the_report_of_a_spill_has_its_counts() -> None:
    from conserve.engine.vllm.checkpoint.spill import SpillCounts

    counts = {field.name for field in fields(SpillCounts)}
    assert {*SpillReport.__struct_fields__} == {"why_off", "refused", *counts}


@pytest.mark.parametrize(("terms", "most"), [({"tokens": 64}, 64), ({}, 1024)])
def test_a_policy_of_hygens_has_iterations_of_the_tokens_that_it_is_given(
    make: Make, terms: dict[str, int], most: int
) -> None:
    engine = make("off", rows=[(900, 3)] * 400)
    engine.scheduler.conserve({"policy": "hygen-star", "hygen": {"offline_per_s": 100.0, **terms}})
    engine.go_on_until(engine.clock.now + 20.0)
    said = engine.scheduler.conserve()
    assert 0.9 * most < said["offline"]["tokens"] / said["iterations"] <= most


def test_a_policy_of_hygens_has_the_predictor_that_it_is_given() -> None:
    from conserve.engine.vllm.simulation.play import SimulatedMachine, simulate
    from conserve.profiles.hygen import HyGenModel
    from tests.bare_scheduler import MODEL

    machine = SimulatedMachine(model=MODEL, layers=LAYERS, flags={"block_size": 128}, num_blocks=4096)
    hygen = dict.fromkeys(HyGenModel.terms, 1e-3)
    told = {"budget_ms": 200.0}
    arrivals = [Arrival(0.5 * n, PROMPT, 5) for n in range(4)]
    rows = cycle(ROWS)
    (block,) = simulate(
        machine, "hygen", [arrivals], block_s=2.0, rows=rows, window=8, hygen=hygen, terms=told
    )
    assert (block.last.hygen.coefficients, block.last.hygen.budget_ms) == (hygen, 200.0)
    assert block.last.offline.tokens > block.first.offline.tokens


def test_rows_pause_where_a_promise_leaves_no_time_for_them(make: Make) -> None:
    from conserve.engine.runtime.class_traffic import WINDOW_S

    engine = make("prompt", rows=[(900, 3)] * 4000)
    promise_ms = prompt_ms() + 2.0  # a layer of the rows takes longer
    engine.scheduler.conserve({"slo": {"ttft_ms": promise_ms, "tbt_ms": 400}})
    engine.go_on_until(engine.clock.now + 2.0)

    def late(requests: int) -> int:
        answers = engine.play([Arrival(0.2 * n, PROMPT, 2) for n in range(requests)])
        return sum(answer.ttft_ms > promise_ms for answer in answers)

    assert 0 < late(60) < 30
    assert engine.scheduler.conserve()["online"]["paused_for"] == ["ttft_ms"]
    tokens = engine.offline_tokens
    assert late(100) == 0
    assert engine.offline_tokens == tokens
    engine.clock.now += WINDOW_S
    engine.go_on_until(engine.clock.now + 2.0)
    assert engine.offline_tokens > tokens, "no live request is expected any more"


def pause(engine: Any) -> None:
    """Rows have just made TTFTs late."""
    from conserve.engine.runtime.pausing import DEBT

    for one in engine.scheduler.traffic._classes.values():
        pausing = one.accountant.ttft.pausing
        pausing._since, pausing._account._credit = engine.clock.now, -DEBT
        one.arrived_at = engine.clock.now


@pytest.mark.parametrize("preemption", ["prompt", "off"])
@pytest.mark.parametrize("paused", [False, True])
def test_a_pause_for_the_ttft_keeps_the_tbt(make: Make, *, paused: bool, preemption: str) -> None:
    engine = make(preemption, rows=[(900, 3)] * 400, ttft_slo_ms=2000, tbt_slo_ms=100)
    engine.go_on_until(engine.clock.now + 1.0)
    if paused:
        pause(engine)
    tokens = engine.offline_tokens
    long = [Arrival(0.5 + 1.5 * n, 900, 1) for n in range(6)]
    answers = engine.play([Arrival(0.01, 50, 150), *long])
    assert answers[0].tbts_ms.max() <= 100 + 1e-6
    if paused:
        assert engine.offline_tokens == tokens


def test_a_pause_looks_at_nothing_where_rows_are_alone(make: Make) -> None:
    engine = make("off", rows=[(900, 3)] * 400)
    engine.go_on_until(engine.clock.now + 1.0)
    engine.play([Arrival(0.0, PROMPT, 2)])
    pause(engine)
    with mock.patch.object(engine.scheduler, "_plan_by_policy") as planned:
        engine.go_on_until(engine.clock.now + 1.0)
    planned.assert_not_called()


@pytest.mark.parametrize("rows", [0, 400])
def test_a_pause_keeps_what_is_promised_to_other_classes(make: Make, rows: int) -> None:
    """Agents' prompts would be computed whole beside chats, be there a row in the engine or none."""
    agents = {"tbt_slo_ms": 2000, "ttft_slo_ms": 20_000, "models": ["agents"]}
    engine = make("prompt", rows=[(900, 3)] * rows, tbt_slo_ms=100, classes={"agents": agents})
    engine.go_on_until(engine.clock.now + 1.0)
    pause(engine)
    request = engine.request

    def of_its_class(prompt: int, *rest: Any, **named: Any) -> Any:
        made = request(prompt, *rest, **named)
        made.sampling_params.extra_args = (
            {"conserve_class": "agents"} if prompt == 900 and not named else None
        )
        return made

    tokens = engine.offline_tokens
    with mock.patch.object(engine, "request", of_its_class):
        answers = engine.play([Arrival(0.0, 50, 120), *[Arrival(0.5 + 1.5 * n, 900, 1) for n in range(3)]])
    assert engine.scheduler.conserve()["classes"]["agents"]["requests"] == 3
    assert answers[0].tbts_ms.max() <= 100 + 1e-6
    assert engine.offline_tokens == tokens


def test_a_first_token_is_held_against_the_request_s_own_promise(make: Make) -> None:
    engine = make("never", rows=[], ttft_slo_ms=prompt_ms() / 2)
    request = engine.request

    def of_its_own(*given: Any, **named: Any) -> Any:
        made = request(*given, **named)
        made.sampling_params.extra_args = {"conserve_ttft_ms": 30_000}
        return made

    patient = mock.patch.object(engine, "request", of_its_own)
    for asking, held_back in (patient, []), (nullcontext(), ["ttft_ms"]):
        with asking:
            engine.play([Arrival(0.5 * n, PROMPT, 2) for n in range(20)])
        assert engine.scheduler.conserve()["online"]["held_back"] == held_back


def test_a_burst_counts_where_it_meets_a_quiet_iteration(make: Make) -> None:
    engine = make("never")
    engine.go_on_until(engine.clock.now + 2.0)
    traffic = engine.scheduler.traffic
    assert traffic.planned_quiet
    engine.play([Arrival(0.05, PROMPT, 4) for _ in range(3)])
    assert [*traffic._starts] == [True] * 3
    assert not traffic.planned_quiet, "the last minute had requests"
    assert not traffic.rare_starts
