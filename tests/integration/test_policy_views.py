"""Views of vLLM's real scheduler: looking changes nothing, and what was recorded can be planned again."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
    pytest.mark.engine,
]

BLOCK = 16  # tokens
PREFIX = list(range(4 * BLOCK))
SLO = {"ttft_slo_ms": 1500, "tbt_slo_ms": 100}


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Callable[..., Any]:
    def make(*, blocks: int = 96, **section: Any) -> Any:
        from tests.bare_scheduler import BareEngine, engine_config

        flags = {"block_size": BLOCK, "max_num_seqs": 16, "max_num_batched_tokens": 256}
        config = engine_config(tmp_path, section={"policy": "conserve", **SLO, **section}, **flags)
        engine = BareEngine(config, num_blocks=blocks, clock=clock)
        engine.scheduler.structured_output_manager = SimpleNamespace(
            accept_tokens=lambda *_: True, grammar_bitmask=lambda *_: None
        )
        return engine

    return make


class Busy:
    """Random arrivals, some of which begin alike, want a schema or logprobs of their prompt."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine, self.dice = engine, random.Random(seed)

    def step(self) -> None:
        dice = self.dice
        while dice.random() < 0.3:
            tokens = [dice.randrange(900) for _ in range(int(10 ** dice.uniform(0, 2.5)))]
            tokens = PREFIX + tokens if dice.random() < 0.5 else tokens
            params = {"prompt_logprobs": 1} if dice.random() < 0.05 else {}
            request = self.engine.request(tokens, dice.randint(1, 40), offline=dice.random() < 0.7, **params)
            if dice.random() < 0.1:
                wait_for_grammar(request, compiled=dice.random() < 0.5)
            self.engine.scheduler.add_request(request)
        self.engine.step()


def wait_for_grammar(request: Any, *, compiled: bool) -> None:
    from vllm.v1.request import RequestStatus

    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=object() if compiled else None)


def with_checkpoints(engine: Any, host_blocks: int = 200) -> Any:
    """Give its scheduler checkpoints without workers: a copy is there when `save_some` says so."""
    from conserve.engine.runtime.copy_budget import BlockMs
    from conserve.engine.vllm.checkpoint.blocks import Checkpoints

    manager = engine.scheduler.kv_cache_manager
    checkpoints = Checkpoints(
        "eager", host_blocks=host_blocks, block_tokens=BLOCK, block_ms=BlockMs(1.0, 1.0)
    )
    checkpoints.bind(manager.block_pool, lambda name: manager.get_block_ids(name)[0])
    return checkpoints


def save(engine: Any, checkpoints: Any, request: Any, blocks: int) -> None:
    """Host memory has so many more of the request's KV blocks."""
    (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    for copy in checkpoints.saved.extend(request, ids, blocks):
        checkpoints.memory.written(copy.host)


def save_some(engine: Any, checkpoints: Any) -> None:
    """Host memory has the KV of every running offline request as far as it is computed, and of no finished one."""
    for request in [*checkpoints.saved.requests()]:
        if request.request_id not in engine.scheduler.requests:
            checkpoints.finished(request)
    for request in engine.scheduler.running:
        if request.priority:
            full = request.num_computed_tokens // BLOCK - len(checkpoints.saved.blocks(request.request_id))
            save(engine, checkpoints, request, max(0, full))


def contents(thing: Any) -> dict[str, Any]:
    """Attributes of an object, containers by what is in them."""
    return {
        name: type(value)(value) if isinstance(value, list | dict | set | frozenset) else value
        for name, value in vars(thing).items()
    }


def state(scheduler: Any) -> dict[str, Any]:
    """All that looking could change: queues, requests, KV blocks in their order, and host memory."""
    manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
    kind = manager.coordinator.single_type_managers[0]
    lanes = (scheduler.running, scheduler.waiting.online, scheduler.waiting.offline)
    checkpoints = scheduler.checkpoints
    return {
        "scheduler": {name: value for name, value in contents(scheduler).items() if name != "waiting"},
        "queues": [[*lane] for lane in (*lanes, scheduler.kv_holding_waiting)],
        "requests": {name: contents(request) for name, request in scheduler.requests.items()},
        "blocks": [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "cached": dict(pool.cached_block_hash_to_block._cache),
        "held": {name: [*blocks] for name, blocks in kind.req_to_blocks.items()},
        "registered": dict(kind.num_cached_block),
        "host": None
        if checkpoints is None
        else (
            {number: (block.holders, block.written) for number, block in checkpoints.memory._blocks.items()},
            list(checkpoints.memory._released),
            {name: [*row.blocks] for name, row in checkpoints.saved._rows.items()},
        ),
    }


def picture(scheduler: Any) -> Any:
    from conserve.engine.vllm.scheduling.observation import Picture
    from tests.bare_scheduler import MODEL

    return Picture(scheduler, scheduler.traffic, surcharge_ms=0.1).view(scheduler.slo, MODEL)


def read_nothing(view: Any) -> None:
    pass


def read_all_twice(view: Any) -> None:
    for _ in range(2):
        list(view.waiting_online)
        list(view.waiting_offline)


def read_backwards_in_turns(view: Any) -> None:
    for one, other in zip(view.waiting_offline, view.waiting_offline, strict=True):
        assert one is other
    online: Iterator[Any] = iter(view.waiting_online)
    list(islice(online, 2))
    read_all_twice(view)
    list(online)


@pytest.mark.parametrize("saved", [False, True])
def test_looking_at_the_scheduler_changes_nothing(make: Any, saved: bool) -> None:
    engine = make(blocks=40)
    busy = Busy(engine, seed=7)
    if saved:
        engine.scheduler.checkpoints = with_checkpoints(engine)
    restorable = 0
    for _ in range(150):
        busy.step()
        if saved:
            save_some(engine, engine.scheduler.checkpoints)
        before = state(engine.scheduler)
        for read in (read_nothing, read_all_twice, read_backwards_in_turns):
            view = picture(engine.scheduler)
            read(view)
            assert state(engine.scheduler) == before, read
        restorable += any(candidate.restorable for candidate in view.waiting_offline)
        assert state(engine.scheduler) == before
    assert saved == (restorable > 0)


def test_two_pictures_of_one_moment_are_the_same(make: Any) -> None:
    engine = make()
    busy = Busy(engine, seed=8)
    for _ in range(60):
        busy.step()
        views = [picture(engine.scheduler) for _ in range(2)]
        for name in (
            "online",
            "offline",
            "waiting_online",
            "waiting_offline",
            "waiting_with_blocks",
            "free_blocks",
        ):
            one, other = (getattr(view, name) for view in views)
            assert one == other if isinstance(one, int) else [*one] == [*other]
        assert [*views[0].waiting_offline] == [*views[0].waiting_offline]


def test_a_request_is_ready_when_its_grammar_is_though_its_view_is_not_read(make: Any) -> None:
    from vllm.v1.request import RequestStatus

    engine = make()
    engine.add(50, 20, offline=True)
    late, ready = engine.request(50, 4), engine.request(50, 4)
    wait_for_grammar(late, compiled=False)
    wait_for_grammar(ready, compiled=True)
    for request in (late, ready):
        engine.scheduler.add_request(request)
    assert not [*picture(engine.scheduler).waiting_online], "asking vLLM would have made one of them ready"
    assert engine.scheduler.online_grammars_compile
    output = engine.scheduler.schedule()
    assert ready.request_id in output.num_scheduled_tokens
    assert late.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.execute(output)
    engine.finish(output)
    late.structured_output_request.grammar = object()
    assert late.request_id in engine.step().num_scheduled_tokens
    assert not engine.scheduler.online_grammars_compile


def test_rows_that_were_looked_at_keep_what_host_memory_has_of_them(make: Any) -> None:
    """Only the plan's application writes: while the policy reads, the blocks belong to no other row."""
    engine = make(blocks=24)
    scheduler = engine.scheduler
    scheduler.checkpoints = checkpoints = with_checkpoints(engine)
    first = engine.add([*PREFIX, *range(500, 600)], 40, offline=True)
    engine.step()
    save_some(engine, checkpoints)
    alike = [engine.add([*PREFIX, 700 + n, *range(BLOCK)], 4, offline=True) for n in range(2)]
    engine.abort([first])
    checkpoints.finished(first)
    scheduler.kv_cache_manager.reset_prefix_cache()
    scheduler.restores_pause = 100  # they are looked at, and nothing is restored
    view = picture(scheduler)
    assert not [*view.waiting_offline]
    assert not any(request.request_id in checkpoints.saved for request in alike)
    engine.step()
    assert all(len(checkpoints.saved.blocks(request.request_id)) == 4 for request in alike)


def test_a_live_request_can_come_back_while_no_row_does(make: Any) -> None:
    """After a restore that vLLM had no room for."""
    engine = make()
    scheduler = engine.scheduler
    scheduler.checkpoints = checkpoints = with_checkpoints(engine)
    lost = [engine.add([*PREFIX, *range(n, n + 60)], 40, offline=n > 500) for n in (500, 600)]
    engine.step()
    for request in lost:
        save(engine, checkpoints, request, 6)
        scheduler.running.remove(request)
        scheduler._preempt_request(request, engine.clock.now)
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    scheduler.restores_pause = 100
    view = picture(scheduler)
    assert [(one.name, one.restorable) for one in view.waiting_online] == [(lost[0].request_id, 6 * BLOCK)]
    assert not [*view.waiting_offline]


@pytest.mark.parametrize("policy", ["conserve", "online-only", "paced"])
def test_recorded_views_are_planned_the_same_by_their_policy_and_planned_by_every_other(
    make: Any, tmp_path: Path, policy: str
) -> None:
    from conserve.engine.policy.policies import POLICIES
    from conserve.engine.policy.recorded import read

    file = tmp_path / "views.jsonl"
    engine = make(policy=policy, blocks=40, record_views=str(file))
    engine.scheduler.checkpoints = with_checkpoints(engine)
    busy, planned = Busy(engine, seed=9), []
    plan = engine.scheduler.chosen_policy.plan

    def remembered(view: Any) -> Any:
        planned.append(plan(view))
        return planned[-1]

    engine.scheduler.chosen_policy.plan = remembered
    for _ in range(150):
        busy.step()
        save_some(engine, engine.scheduler.checkpoints)
    engine.scheduler.checkpoints = None
    engine.scheduler.shutdown()
    lines = [*read(file)]
    assert [one.plan for one in lines] == [plan for plan in planned if plan.changes_something]
    assert len(lines) > 100
    restored = 0
    for one in lines:
        assert one.policy == policy
        assert POLICIES[policy]().plan(one.view) == one.plan
        assert one.plan is not None
        restored += len(one.plan.restored)
        for other in POLICIES:
            other_plan = POLICIES[other]().plan(one.view)
            assert other_plan is None or other_plan.total <= one.view.max_tokens
    assert policy != "conserve" or restored


def test_nothing_is_recorded_and_no_thread_runs_unless_asked(make: Any) -> None:
    import threading

    engine = make()
    Busy(engine, seed=1).step()
    assert "conserve-recording" not in [thread.name for thread in threading.enumerate()]
