"""Rows that give their slot to a live request: they go on where they were, and hold no other request up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from conserve.bench.traces import Arrival
from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
    pytest.mark.engine,
]

BLOCK = 16  # tokens
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Make:
    """Engines of four slots, whose rows are these prompts and answers."""

    def make(
        rows: Sequence[tuple[int, int]],
        *,
        blocks: int = 4096,
        chunk: int = 256,
        copies: bool = False,
        **settings: Any,
    ) -> Any:
        from conserve.engine.vllm.settings import WORKER
        from conserve.engine.vllm.simulation.copies import HostCopies, SimulatedCopies, checkpointing
        from conserve.engine.vllm.simulation.engine import SimulatedEngine
        from tests.bare_scheduler import MODEL, engine_config, known_times

        host = HostCopies(blocks=500, block_ms=1.0) if copies else None
        times = known_times()
        section = {"policy": "conserve", "preemption": "prompt", "harm": 0.1, "live_prefixes": 0, **settings}
        flags = {
            "block_size": BLOCK,
            "max_num_seqs": 4,
            "max_num_batched_tokens": chunk,
            "max_model_len": 4096,
        }
        if host is not None:
            times = replace(times, block_ms=[1.0, 1.0])
            flags["kv_transfer_config"] = checkpointing(host, BLOCK)
        config = engine_config(tmp_path, section=section, times=times, **flags)
        config.scheduler_config.async_scheduling = False
        config.parallel_config.worker_cls = WORKER
        return SimulatedEngine(
            config,
            clock=clock,
            model=MODEL,
            layers=8,
            num_blocks=blocks,
            offline=iter(rows),
            window=4,
            scatter=0.0,
            seed=0,
            copies=SimulatedCopies(host) if host is not None else None,
        )

    return make


def parked(engine: Any, live: int = 4, answer: int = 30) -> Any:
    """The scheduler of an engine whose rows have just given their slots to live requests."""
    scheduler = engine.scheduler
    while len(scheduler.running) < 4:
        engine._iterate()
    engine._iterate()
    for _ in range(live):
        scheduler.add_request(engine.request(20, answer))
    while not scheduler.parking.names:
        engine._iterate()
    return scheduler


def until(engine: Any, condition: Callable[[], bool], most: int = 4000) -> None:
    for _ in range(most):
        if condition():
            return
        engine._iterate()
    raise AssertionError(f"{len(engine.scheduler.requests)} requests are left")


def drain(engine: Any) -> None:
    until(engine, lambda: not engine.scheduler.requests)


def test_they_go_on_where_they_were(make: Make) -> None:
    engine = make([(100, 60)] * 4)
    scheduler = parked(engine)
    waiting = list(scheduler.kv_holding_waiting)
    assert {row.request_id for row in waiting} == scheduler.parking.names
    computed = {row.request_id: row.num_computed_tokens for row in waiting}
    assert all(computed.values())
    while scheduler.parking.names:
        engine._iterate()
        for row in scheduler.kv_holding_waiting:
            assert row.num_computed_tokens == computed[row.request_id]
    drain(engine)
    assert not scheduler.offline_tokens.again
    assert scheduler.arrival_monitor.counts.tokens_wasted == 0


@pytest.mark.parametrize("seed", [39, 42, 54])
def test_one_in_the_middle_of_its_prompt_gets_on_whatever_others_hold(make: Make, seed: int) -> None:
    """Bursts, long prompts and little memory: a row left with a part of a chunk, and lacks blocks for the rest."""
    dice = random.Random(seed)
    long = dice.choice([900, 1200, 1500])
    blocks = (long + 10) // BLOCK + 2 + dice.randint(0, 25)
    rows = [(long, 10)] + [(dice.choice([100, 250]), 300) for _ in range(3)]
    engine = make(rows, blocks=blocks)
    arrivals, at_s = [], 0.05
    for _ in range(dice.randint(1, 40)):
        at_s += dice.uniform(0.005, 0.06)
        arrivals.append(Arrival(at_s, 20, dice.randint(1, 4)))
    at_s += dice.uniform(0, 0.1)
    arrivals += [Arrival(at_s + dice.uniform(0, 0.02), 20, 20) for _ in range(8)]
    engine.play(arrivals, 0)
    assert engine.scheduler.parking.count
    drain(engine)


def test_one_that_left_a_chunk_goes_on_with_the_part_that_it_kept() -> None:
    """Otherwise the workers would compute the part's layers again."""
    from conserve.engine.policy.plan import Plan
    from conserve.engine.vllm.scheduling.application import in_parts
    from conserve.profiles.batch import Batch

    kept = {"left": 5, "left-all": 100, "runs": 3}
    scheduler = SimpleNamespace(
        parking=SimpleNamespace(names={"left", "left-all", "stopped", "waits"}),
        arrival_monitor=SimpleNamespace(chunk=kept.get),
    )
    tokens = {"runs": 3, "left": 60, "left-all": 60, "stopped": 70, "new": 80}
    plan = Plan(tokens=tokens, batch=Batch(), admitted=["left", "left-all", "stopped", "new"])
    assert in_parts(scheduler, plan) == {**tokens, "left": 5}


def test_what_vllm_would_not_go_on_with_is_evicted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from conserve.engine.vllm.scheduling.parking import Parking, can_park

    engine = make([(100, 60)] * 4)
    scheduler = parked(engine)
    row = next(iter(scheduler.kv_holding_waiting))
    assert scheduler.parking.keeps(row)
    for name, value in {
        "skip_reading_prefix_cache": True,  # it wants logprobs of its prompt
        "mm_features": ["an image"],
        "pooling_params": object(),
        "num_computed_tokens": 0,
        "num_stale_output_tokens": 1,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(row, name, value)
            assert not scheduler.parking.keeps(row), name
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.parking, "on", False)
        assert not scheduler.parking.keeps(row), "whoever plans it"
    with monkeypatch.context() as patch:
        patch.setattr(row, "num_in_flight_tokens", 1)
        assert scheduler.parking.keeps(row), "of an iteration that no row leaves"
        assert not Parking(scheduler, settles=False).keeps(row)
        patch.setattr(scheduler.ahead, "_in_flight", [SimpleNamespace(registers_late=True)])
        assert not scheduler.parking.keeps(row)
    assert can_park(scheduler)
    for owner, name, value in (
        (scheduler, "kv_groups", ["a window"]),
        (scheduler, "num_spec_tokens", 2),
        (scheduler, "aux_output_connector", object()),  # it forgets what a preempted request had
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)  # vLLM 0.30 has no such connector
            assert not can_park(scheduler), name


def test_none_is_parked_for_requests_that_a_paused_engine_takes_in_later(make: Make) -> None:
    """vLLM lets what runs end (`/pause`), parked rows too."""
    from vllm.v1.core.sched.interface import PauseState

    engine = make([(100, 60)] * 4)
    scheduler = parked(engine, live=2, answer=5)
    count = scheduler.parking.count
    arrivals = [engine.request(20, 5) for _ in range(3)]
    for request in arrivals:
        scheduler.add_request(request)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    iterations = 0
    while scheduler.get_num_unfinished_requests():
        engine._iterate()
        iterations += 1
        assert iterations < 200
    assert scheduler.parking.count == count
    assert set(arrivals) <= set(scheduler.waiting)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    drain(engine)


@pytest.mark.parametrize("copies", [False, True])
def test_a_reset_of_the_cache_and_an_abort_leave_none(make: Make, copies: bool) -> None:
    from vllm.v1.request import RequestStatus

    engine = make([(20, 300)] * 4, blocks=200, copies=copies)
    scheduler = parked(engine)
    gone = min(scheduler.parking.names)
    scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED)
    assert gone not in scheduler.parking.names
    assert scheduler.parking.names
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not scheduler.parking.names
    assert not scheduler.kv_holding_waiting
    drain(engine)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("comes", [True, False])
def test_a_pause_that_resets_the_cache_takes_the_blocks_of_restored_rows(make: Make, comes: bool) -> None:
    """The engine steps until it has nothing to do, then resets, for `/pause?mode=keep` and `/sleep?mode=keep`."""
    from vllm.v1.core.sched.interface import PauseState

    engine = make([(200, 300)] * 4, blocks=70, copies=True)
    scheduler = engine.scheduler
    restores = scheduler.checkpoints._restores
    until(engine, lambda: len(restores) > 0)
    row = scheduler.requests[next(iter(restores._rows))]
    if comes:  # and waits with its KV, since live requests have all slots
        for _ in range(4):
            scheduler.add_request(engine.request(20, 30))
        until(engine, lambda: row.request_id not in restores)
        assert row in list(scheduler.kv_holding_waiting)
        assert row.request_id not in scheduler.parking.names
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    until(engine, lambda: not scheduler.has_requests())
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    drain(engine)


def test_one_that_comes_back_leaves_its_slot_to_live_requests(make: Make) -> None:
    """vLLM counts it once it runs again."""
    from conserve.engine.vllm.scheduling.observation import Picture
    from tests.bare_scheduler import MODEL

    engine = make([(200, 300)] * 4, blocks=70, copies=True)
    scheduler = engine.scheduler
    until(engine, lambda: len(scheduler.checkpoints._restores) > 0)
    view = Picture(scheduler, scheduler.traffic, surcharge_ms=0.0).view(scheduler.slo, MODEL)
    coming = len(scheduler.checkpoints._restores)
    assert (view.free_slots, view.reserved_slots) == (4 - len(scheduler.running), coming)


@pytest.mark.parametrize(("policy", "left"), [("priority", 0), ("non-preemptive", 0), ("online-only", 4)])
def test_where_no_policy_plans_they_hold_no_live_request_up(make: Make, policy: str, left: int) -> None:
    """vLLM runs what waits with KV blocks before all arrivals."""
    engine = make([(100, 60)] * 4)
    scheduler = parked(engine)
    assert len(scheduler.parking.names) == 4
    scheduler.conserve({"policy": policy})
    engine._iterate()
    assert len(scheduler.parking.names) == left


def test_nor_does_one_that_a_pause_of_the_receipt_has_parked(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.runtime.traffic import Pause

    engine = make([(100, 60)] * 4, policy="priority")
    scheduler = engine.scheduler
    while len(scheduler.running) < 4:
        engine._iterate()
    for _ in range(4):
        scheduler.add_request(engine.request(20, 30))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.traffic, "pauses", lambda **_: Pause.RECEIPT)
        until(engine, lambda: bool(scheduler.parking.names))
    engine._iterate()
    assert not scheduler.parking.names


def test_a_step_of_live_requests_alone_is_repeated_while_they_wait(make: Make) -> None:
    engine = make([(100, 60)] * 4)
    scheduler = parked(engine, answer=60)
    for _ in range(6):
        engine._iterate()
    assert len(scheduler.running) == 4
    plans = []
    for _ in range(4):
        engine._iterate()
        plans.append(scheduler.repetition._left)
    assert plans != [plans[0]] * 4, "plans are repeated"


def test_copies_of_their_kv_are_made_while_they_wait(make: Make) -> None:
    """Memory is short, and they are the next to lose theirs."""
    engine = make([(200, 300)] * 4, blocks=62, copies=True)
    scheduler = parked(engine, answer=60)
    names = set(scheduler.parking.names)
    saved = {name: len(scheduler.checkpoints.saved.blocks(name)) for name in names}
    for _ in range(20):
        engine._iterate()
    still = names & scheduler.parking.names
    assert any(len(scheduler.checkpoints.saved.blocks(name)) > saved[name] for name in still)
