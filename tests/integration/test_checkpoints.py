"""Rows lose their memory and go on from what host memory has of it, and every answer is what it would have been."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from tests.tiers import in_full
from tests.tiny_models import FEW_LAYERS as LAYERS
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]

BLOCK = 32  # tokens
BLOCK_BYTES = 2 * BLOCK * 64 * 4  # of a layer: keys and values, 64 float32 a token
PATIENCE_S = 240.0  # reached by a hang alone


@pytest.fixture(scope="class")
def engine(few_layers: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One start per class, never two engines at once: they would share vLLM's globals."""
    from tests.preempted_engine import started

    settings = {"policy": "eager", "host_bytes": 64 << 20, **getattr(request.cls, "settings", {})}
    flags = {**getattr(request.cls, "flags", {}), "kv_transfer_config": transfer(settings)}
    with started(few_layers, **flags) as engine:
        yield engine
        asked = rows(90)
        assert engine.together(asked) == engine.undisturbed(asked), "a test has broken it for the next"


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.assert_nothing_is_left()
        engine.forget()


@pytest.fixture(autouse=True)
def copied_at_once() -> Iterator[pytest.MonkeyPatch]:
    """Let copies take no time that is counted, and let each end before the iteration beside it begins.

    Where a test undoes it, copies have the share of an iteration that they have in a server, and end when they end.
    """
    from conserve.engine.runtime.copy_thread import CopyThread, Done
    from conserve.engine.vllm.checkpoint.blocks import Checkpoints

    begin = CopyThread.copy

    def copy(thread: CopyThread, source: list[int], target: list[int], *, is_store: bool) -> Done:
        done = begin(thread, source, target, is_store=is_store)
        done.synchronize()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_budget_ms", lambda checkpoints: inf)
        patch.setattr(CopyThread, "copy", copy)
        yield patch


def transfer(settings: dict[str, Any], *others: dict[str, Any]) -> Any:
    """The configuration that `conserve serve` writes."""
    import json

    from vllm.config import KVTransferConfig

    from conserve.engine.vllm.checkpoint.kv_transfer import FLAG, with_checkpoints

    theirs = [word for other in others for word in (FLAG, json.dumps(other))]
    return KVTransferConfig(**json.loads(with_checkpoints(theirs, settings)[-1]))


def rows(seed: int, count: int = 5, tokens: int = 24) -> list[Any]:
    from tests.preempted_engine import Ask, greedy, prompt

    return [Ask(f"row{n}", prompt(50 + n * 83 % 300, seed * 100 + n), greedy(tokens)) for n in range(count)]


def counts(engine: Any) -> dict[str, int]:
    return dict(engine.scheduler.conserve()["checkpoint"])


def until(engine: Any, true: Callable[[], bool]) -> None:
    """Step until it is true."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, counts(engine)
        engine.step()


def request_of(engine: Any, name: str) -> Any:
    return engine.scheduler.requests[engine.internal(name)]


def has_output(engine: Any, name: str, tokens: int) -> Callable[[], bool]:
    return lambda: request_of(engine, name).num_output_tokens >= tokens


def saved(engine: Any, name: str) -> int:
    return int(engine.scheduler.checkpoints.saved.tokens(engine.internal(name)))


def worker_copies() -> Any:
    """Those of the worker, which is in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().copies


def copy_thread() -> Any:
    return worker_copies()._backend.thread


class Checkpointed:
    """Properties with and without cached prefixes."""

    def test_the_cache_can_be_reset_while_blocks_are_being_saved(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch, copied_at_once: pytest.MonkeyPatch
    ) -> None:
        """Reset as vLLM does for weights that change: all running requests lose their KV, and begin anew."""
        copied_at_once.undo()
        asked = rows(3)
        wanted = engine.undisturbed(asked)
        before = counts(engine)
        thread, goes_on = copy_thread(), threading.Event()
        move = thread._move
        monkeypatch.setattr(thread, "_move", lambda *pieces: (goes_on.wait(PATIENCE_S), move(*pieces)))
        engine.add(*asked)
        until(engine, lambda: bool(engine.scheduler.checkpoints._stores))
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.overwrite_free()
        goes_on.set()
        assert engine.drain() == wanted
        new = counts(engine)
        assert new["blocks_failed"] == before["blocks_failed"]
        assert new["blocks_saved"] > before["blocks_saved"], "blocks are saved again"

    def test_no_copy_of_before_a_reset_comes_back(self, engine: Any) -> None:
        """Weights may have been replaced before it; vLLM does not ask connectors unless told so."""
        asked = rows(4, count=3, tokens=30)
        wanted = engine.undisturbed(asked)
        before = counts(engine)
        engine.add(*asked)
        until(engine, lambda: saved(engine, "row2") >= BLOCK)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert not engine.scheduler.checkpoints.any_saved
        for host in worker_copies().cpu_kv_caches.values():
            host.fill_(7)
        assert engine.drain() == wanted
        assert counts(engine)["tokens_restored"] == before["tokens_restored"]

    def test_what_comes_back_is_what_was_there_and_the_row_goes_on_where_it_stopped(
        self, engine: Any
    ) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        asked = [Ask("row", prompt(300, 1), greedy(40)), Ask("beside", prompt(40, 2), greedy(60))]
        wanted = engine.undisturbed(asked)
        before = counts(engine)
        engine.add(*asked)
        until(engine, has_output(engine, "row", 10))
        until(engine, lambda: saved(engine, "row") >= 288)
        computed = request_of(engine, "row").num_computed_tokens
        old = [[part.clone() for part in engine.bytes_of(block)] for block in engine.blocks_of("row")]
        engine.take_memory("row")
        blocks = -(-computed // BLOCK)
        until(engine, lambda: request_of(engine, "row").status.name == "RUNNING")
        assert request_of(engine, "row").num_computed_tokens - computed in (0, 1), "nothing is computed again"
        whole = computed // BLOCK
        for index, (block, parts) in enumerate(
            zip(engine.blocks_of("row")[:whole], old[:whole], strict=True)
        ):
            for now, then in zip(engine.bytes_of(block), parts, strict=True):
                assert now.equal(then), f"block {index} of {blocks}"
        assert engine.drain() == wanted
        after = counts(engine)
        assert after["tokens_restored"] - before["tokens_restored"] == computed
        assert after["tokens_recomputed"] == before["tokens_recomputed"]

    @pytest.mark.parametrize("seed", [0, *in_full(1, 2)])
    def test_rows_lose_their_memory_at_any_moment(self, engine: Any, seed: int) -> None:
        asked = rows(seed)
        wanted = engine.undisturbed(asked)
        before, dice = counts(engine), random.Random(seed)
        engine.add(*asked)
        while engine.busy:
            engine.step()
            running = [request.request_id.rpartition("-")[0] for request in engine.scheduler.running]
            if running and dice.random() < 0.3:
                engine.take_memory(dice.choice(running))
        answers, engine.answers = engine.answers, {}
        assert answers == wanted
        assert counts(engine)["tokens_restored"] > before["tokens_restored"]

    def test_rows_that_begin_alike_share_their_copies(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        prefix = prompt(4 * BLOCK, 5)
        asked = [Ask(f"row{n}", prompt(40 + n, 50 + n, prefix), greedy(30)) for n in range(4)]
        wanted = engine.undisturbed(asked)
        before = counts(engine)
        engine.add(asked[0])
        until(engine, has_output(engine, "row0", 2))
        engine.add(*asked[1:])
        until(engine, has_output(engine, "row3", 8))
        until(engine, lambda: min(saved(engine, f"row{n}") for n in range(4)) >= 5 * BLOCK)
        copied = counts(engine)["blocks_saved"] - before["blocks_saved"]
        own = 4 * 1  # blocks behind the prefix
        if engine.scheduler.kv_cache_manager.enable_caching:
            assert 4 + own <= copied <= 4 + 2 * own, "the prefix once"
        engine.take_memory("row1")  # others run on with the blocks that it shared
        assert engine.drain() == wanted

    @pytest.mark.parametrize("moment", ["copied", "losing", "restored"])
    def test_a_row_is_aborted_while_it_is(
        self, engine: Any, moment: str, monkeypatch: pytest.MonkeyPatch, copied_at_once: pytest.MonkeyPatch
    ) -> None:
        asked = rows(7, count=3, tokens=30)
        wanted = engine.undisturbed(asked)
        checkpoints = engine.scheduler.checkpoints
        engine.add(*asked)
        until(engine, has_output(engine, "row2", 3))
        if moment != "copied":
            until(engine, lambda: saved(engine, "row2") >= BLOCK)
        copied_at_once.undo()
        copies = copy_thread()
        real = copies._copy
        gone = threading.Event()  # no copy ends before the row has

        def copy(source: Any, target: Any, is_store: bool) -> None:
            if is_store == (moment != "restored"):
                gone.wait(PATIENCE_S)
            real(source, target, is_store)

        monkeypatch.setattr(copies, "_copy", copy)
        if moment == "copied":
            until(engine, lambda: bool(checkpoints._stores))
        else:
            engine.take_memory("row2")
            if moment == "restored":
                until(engine, lambda: engine.internal("row2") in checkpoints._restores)
        finish = engine.scheduler.finish_requests

        def finishing(*args: Any) -> Any:
            try:
                return finish(*args)
            finally:
                gone.set()

        monkeypatch.setattr(engine.scheduler, "finish_requests", finishing)
        engine.abort("row2")
        answers = engine.drain()
        answers.pop("row2", None)
        assert answers == {name: wanted[name] for name in ("row0", "row1")}

    def test_a_restore_takes_many_iterations_and_is_cancelled_half_way(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        asked = [Ask("row", prompt(400, 11), greedy(40)), Ask("beside", prompt(30, 12), greedy(100))]
        wanted = engine.undisturbed(asked[1:])
        checkpoints = engine.scheduler.checkpoints
        engine.add(*asked)
        until(engine, lambda: saved(engine, "row") >= 384)
        monkeypatch.setattr(checkpoints, "_budget_ms", lambda: 0.0)
        engine.take_memory("row")
        name = engine.internal("row")
        until(engine, lambda: name in checkpoints._restores)
        steps = engine.steps
        until(engine, lambda: len(checkpoints._restores[name].left) < 8)
        assert engine.steps - steps >= 3
        assert not worker_copies()._pending_load_event_indices, "the parts so far are there, and reported"
        assert checkpoints._restores[name].left
        engine.abort("row")
        answers = engine.drain()
        assert answers["beside"] == wanted["beside"]
        assert name not in checkpoints._restores

    @pytest.mark.parametrize("way", ["store", "load"])
    def test_copies_that_fail_are_computed_again(
        self, engine: Any, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copies = copy_thread()
        asked = rows(13, count=3, tokens=20)
        wanted = engine.undisturbed(asked)
        before = counts(engine)
        real = copies._copy

        def failing(source: list[int], target: list[int], is_store: bool) -> None:
            if is_store == (way == "store"):
                raise OSError("the bus is on strike")
            real(source, target, is_store)

        engine.add(*asked)
        if way == "load":
            until(engine, lambda: saved(engine, "row2") >= BLOCK)
        monkeypatch.setattr(copies, "_copy", failing)
        until(engine, has_output(engine, "row2", 5))
        engine.take_memory("row2")
        assert engine.drain() == wanted
        after = counts(engine)
        assert after["blocks_failed"] > before["blocks_failed"]
        assert after["tokens_recomputed"] > before["tokens_recomputed"]
        monkeypatch.undo()

    def test_rows_also_leave_iterations_in_the_middle(
        self, engine: Any, copied_at_once: pytest.MonkeyPatch
    ) -> None:
        """A row whose chunk is cut short at a layer has no checkpoint of what that chunk did not write."""
        from tests.preempted_engine import Dice

        copied_at_once.undo()
        asked = [*rows(21, count=4, tokens=12)]
        asked[0] = asked[0]._replace(name="live", offline=False)
        wanted = engine.undisturbed(asked)
        dice = random.Random(3)
        for seed in range(2):
            engine.orders.follow(Dice(seed, LAYERS, often=0.7))
            engine.add(*asked)
            while engine.busy:
                engine.step()
                running = [r.request_id.rpartition("-")[0] for r in engine.scheduler.running if r.priority]
                if running and dice.random() < 0.3:
                    engine.take_memory(dice.choice(running))
            engine.orders.follow(None)
            answers, engine.answers = engine.answers, {}
            assert answers == wanted


class TestWithPrefixCaching(Checkpointed):
    """Blocks are known by their contents."""

    def test_what_rows_leave_behind_is_found_by_others(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        first = Ask("first", prompt(200, 31), greedy(20))
        second = Ask("second", prompt(20, 32, first.prompt[:160]), greedy(6))
        wanted = engine.undisturbed([first, second])
        engine.add(first)
        engine.drain()
        before = counts(engine)
        engine.overwrite_free()
        engine.add(second)
        assert engine.drain() == {"second": wanted["second"]}
        assert counts(engine)["tokens_restored"] - before["tokens_restored"] == 160

    def test_live_requests_never_wait_for_what_others_left(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        asked = Ask("first", prompt(200, 33), greedy(4))
        wanted = engine.undisturbed([asked])["first"]
        engine.add(asked)
        engine.drain()
        before = counts(engine)
        engine.overwrite_free()
        engine.add(asked._replace(name="live", offline=False))
        assert engine.drain() == {"live": wanted}
        assert counts(engine)["tokens_restored"] == before["tokens_restored"]

    @pytest.mark.parametrize(
        "losses",
        [100, *in_full(200, 1500), pytest.param(10_000, marks=pytest.mark.soak)],
    )
    def test_losses_leak_nothing(self, engine: Any, losses: int, copied_at_once: pytest.MonkeyPatch) -> None:
        copied_at_once.undo()
        asked = rows(41, count=6, tokens=12)
        wanted = engine.undisturbed(asked)
        dice, resident, lost = random.Random(0), [], engine.lost
        while engine.lost - lost < losses:
            engine.add(*asked)
            while engine.busy:
                engine.step()
                if dice.random() < 0.5:
                    engine.lose_memory(dice)
            answers, engine.answers = engine.answers, {}
            assert answers == wanted
            engine.assert_nothing_is_left()
            engine.forget()
            resident.append(psutil.Process().memory_info().rss)
        late = resident[
            len(resident) * 2 // 3 :
        ]  # an engine takes a hundred MB before it has seen everything
        assert max(late) - late[0] < 24 << 20, [size >> 20 for size in resident]


@pytest.mark.full
class TestWithoutPrefixCaching(Checkpointed):
    """Blocks are known by their row."""

    flags: ClassVar = {"enable_prefix_caching": False}


class TestLittleHostMemory:
    """A checkpoint ends where host memory does."""

    settings: ClassVar = {"host_bytes": 6 * LAYERS * BLOCK_BYTES}

    def test_what_does_not_fit_is_computed_again(self, engine: Any) -> None:
        asked = rows(51)
        wanted = engine.undisturbed(asked)
        before, dice = counts(engine), random.Random(5)
        engine.add(*asked)
        while engine.busy:
            engine.step()
            memory = engine.scheduler.checkpoints.memory
            assert memory.used <= memory.capacity == 6
            running = [request.request_id.rpartition("-")[0] for request in engine.scheduler.running]
            if running and dice.random() < 0.3:
                engine.take_memory(dice.choice(running))
        answers, engine.answers = engine.answers, {}
        assert answers == wanted
        after = counts(engine)
        assert after["tokens_restored"] > before["tokens_restored"]
        assert after["tokens_recomputed"] > before["tokens_recomputed"]


class TestLittleMemory:
    """vLLM itself and plans take memory from rows, live ones among them."""

    flags: ClassVar = {"kv_cache_memory_bytes": 26 * LAYERS * BLOCK_BYTES, "max_model_len": 512}

    def test_offline_rows_give_way_and_come_back(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        offline = [Ask(f"off{n}", prompt(150, 60 + n), greedy(40)) for n in range(4)]
        online = [Ask(f"on{n}", prompt(200, 70 + n), greedy(30), offline=False) for n in range(2)]
        wanted = engine.undisturbed([*offline, *online])
        before, lost = counts(engine), engine.lost
        engine.add(*offline)
        until(engine, has_output(engine, "off2", 12))
        engine.add(*online)
        assert engine.drain() == wanted
        after = counts(engine)
        assert engine.lost > lost
        assert after["tokens_restored"] - before["tokens_restored"] >= 128
        assert after["tokens_recomputed"] - before["tokens_recomputed"] < 64

    def test_live_requests_that_lose_their_memory_come_back_too(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        asked = [Ask(f"on{n}", prompt(180, 80 + n), greedy(80), offline=False) for n in range(4)]
        asked.append(Ask("off", prompt(40, 89), greedy(4)))
        wanted = engine.undisturbed(asked)
        before, lost = counts(engine), engine.lost
        engine.add(*asked)
        assert engine.drain() == wanted
        assert engine.lost > lost
        assert counts(engine)["tokens_restored"] > before["tokens_restored"]


class TestAdaptive:
    """Nothing is copied while memory is plentiful."""

    settings: ClassVar = {"policy": "adaptive"}
    flags: ClassVar = {"kv_cache_memory_bytes": 40 * LAYERS * BLOCK_BYTES, "max_model_len": 512}

    def test_copying_begins_when_memory_is_short(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        few = [Ask("few", prompt(200, 1), greedy(20))]
        many = [Ask(f"many{n}", prompt(200, 2 + n), greedy(40)) for n in range(4)]
        before = counts(engine)
        wanted = engine.undisturbed(many)
        engine.add(*few)
        engine.drain()
        assert counts(engine)["blocks_saved"] == before["blocks_saved"]
        engine.add(*many)
        until(engine, has_output(engine, "many3", 20))
        assert counts(engine)["blocks_saved"] > before["blocks_saved"]
        engine.take_memory("many3")
        assert engine.drain() == wanted


class TestBesideAnotherConnector:
    """vLLM's multi-connector asks both."""

    def test_both_take_part(self, few_layers: Path) -> None:
        from tests.preempted_engine import started

        other = {
            "kv_connector": "WitnessConnector",
            "kv_connector_module_path": "tests.witness_connector",
            "kv_role": "kv_both",
        }
        config = transfer({"policy": "eager", "host_bytes": 64 << 20}, other)
        with started(few_layers, kv_transfer_config=config) as engine:
            _, witness = engine.scheduler.connector._connectors
            assert engine.scheduler.conserve()["preemption"]["why_off"] == "another KV connector takes part"
            asked = rows(95, count=3)
            wanted = engine.undisturbed(asked)
            before = counts(engine)
            engine.add(*asked)
            until(engine, lambda: saved(engine, "row1") >= BLOCK)
            engine.take_memory("row1")
            assert engine.drain() == wanted
            assert counts(engine)["tokens_restored"] > before["tokens_restored"]
            assert len(witness.finished) == 6
            engine.assert_nothing_is_left()
