"""Whatever workers tell the scheduler of an iteration arrives, with each of vLLM's model runners."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_models import LAYERS

# As in test_embedded_engine.py.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:builtin type [sS]wig.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

PATIENCE_S = 240.0  # reached by a hang alone


@pytest.fixture(scope="class")
def engine(six_layers: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One start per class, never two engines at once: they would share vLLM's globals."""
    from tests.preempted_engine import started
    from tests.triton_on_cpu import v2_runner

    runner = v2_runner() if request.cls.v2 else nullcontext()
    ahead = scheduled_ahead() if request.cls.ahead else nullcontext()
    flags = request.cls.flags() if hasattr(request.cls, "flags") else {}
    with runner, ahead, started(six_layers, **flags) as engine:
        assert engine.worker.use_v2_model_runner is request.cls.v2
        assert engine.core.async_scheduling is request.cls.ahead
        yield engine
        engine.assert_nothing_is_left()


@contextmanager
def scheduled_ahead() -> Iterator[None]:
    """Engines that start meanwhile schedule an iteration before the last one's results are in, and stamp it.

    vLLM never does so on a CPU, and rows do not leave such iterations.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(checked))
        patch.setattr("conserve.engine.vllm.preemption.arrivals.why_not", lambda config: None)
        yield


@pytest.fixture
def settled(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records of the iterations as they are settled."""
    records: list[Any] = []
    settle = engine.scheduler._settle

    def settling(iteration: Any) -> None:
        records.append(iteration)
        settle(iteration)

    monkeypatch.setattr(engine.scheduler, "_settle", settling)
    return records


def rows(seed: int, count: int = 4) -> list[Any]:
    from tests.preempted_engine import Ask, greedy, prompt

    return [
        Ask(f"off{n}", prompt(30 + n * 67 % 190, seed * 100 + n), greedy(5 + n % 4)) for n in range(count)
    ]


def mixed(seed: int) -> list[Any]:
    from tests.preempted_engine import Ask, greedy, prompt

    live = [
        Ask(f"on{n}", prompt(20 + n * 31, seed * 100 + 50 + n), greedy(9), offline=False) for n in range(2)
    ]
    return [*rows(seed), *live]


class Arriving:
    """The outcome of each iteration comes with its own results."""

    v2: bool
    ahead: bool

    def test_an_iteration_that_was_computed_has_its_own_outcome(
        self, engine: Any, settled: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from conserve.engine.vllm.iteration import Outcome
        from conserve.engine.vllm.preemption import worker

        stamps: list[Any] = []
        arm = engine.worker._safepoints.arm

        def arming(stamp: Any) -> None:
            stamps.append(stamp)
            arm(stamp)

        def numbered(*_: Any) -> Outcome:
            return Outcome(layers_run=stamps[-1].iteration, layers=LAYERS, safepoints=LAYERS)

        monkeypatch.setattr(engine.worker._safepoints, "arm", arming)
        monkeypatch.setattr(worker, "outcome", numbered)
        asked = rows(1)
        engine.add(*asked)
        answers = engine.drain()
        assert {name: len(answer.tokens) for name, answer in answers.items()} == {
            ask.name: ask.params.max_tokens for ask in asked
        }
        stamped = [one for one in settled if one.stamp is not None]
        assert len(stamped) > 5
        assert [one.outcome and one.outcome.layers_run for one in stamped] == [
            one.stamp.iteration for one in stamped
        ]
        assert all(one.outcome is None for one in settled if one.stamp is None), "nobody asked"

    def test_the_scheduler_learns_what_the_worker_can(self, engine: Any) -> None:
        engine.add(*rows(2))
        engine.drain()
        assert engine.preemptions.acts
        assert engine.preemptions.layers == LAYERS
        assert engine.preemptions.separable is (not self.v2)


class TestV1(Arriving):
    v2, ahead = False, False


class TestV2(Arriving):
    """Its results are on the device when `sample_tokens` returns."""

    v2, ahead = True, False

    def test_iterations_are_abandoned_at_any_layer(self, engine: Any, settled: list[Any]) -> None:
        asked = rows(3, 6)
        wanted = engine.undisturbed(asked)
        for layer in range(LAYERS):
            settled.clear()
            assert engine.scripted(asked, {n: [(layer, 1)] for n in (1, 2, 4)}) == wanted
            left = [one for one in settled if one.left]
            assert len(left) == 3
            assert all(one.outcome.layers_run == layer and one.left == one.tokens.keys() for one in left)
            assert not any(one.left for one in settled if one not in left)

    def test_at_random(self, engine: Any) -> None:
        from tests.preempted_engine import Dice

        asked = mixed(4)
        wanted = engine.undisturbed(asked)
        for seed in range(3):
            assert engine.preempted(asked, Dice(seed, LAYERS)) == wanted


class TestV2WithCheckpoints:
    """What the KV connector's workers say comes along, also from iterations that were abandoned."""

    v2, ahead = True, False

    @staticmethod
    def flags() -> dict[str, Any]:
        from tests.integration.test_checkpoints import transfer

        return {"kv_transfer_config": transfer({"policy": "eager", "host_bytes": 64 << 20})}

    def test_rows_of_abandoned_iterations_are_saved_and_restored(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, Dice, greedy, prompt

        asked = [Ask(f"off{n}", prompt(50 + n * 83, 500 + n), greedy(24)) for n in range(4)]
        wanted = engine.undisturbed(asked)
        abandoned = engine.preemptions.abandoned
        before = engine.scheduler.conserve()["checkpoint"]
        engine.orders.follow(Dice(5, LAYERS))
        engine.add(*asked)
        dice, end = random.Random(5), time.monotonic() + PATIENCE_S
        while engine.busy:
            assert time.monotonic() < end
            engine.step()
            if dice.random() < 0.2:
                engine.lose_memory(dice)
        answers = engine.drain()
        engine.orders.follow(None)
        after = engine.scheduler.conserve()["checkpoint"]
        assert answers == wanted
        assert engine.preemptions.abandoned - abandoned > 10
        assert after["blocks_saved"] > before["blocks_saved"]
        assert after["tokens_restored"] > before["tokens_restored"]
        engine.assert_nothing_is_left()
        engine.forget()


class TestV1ScheduledAhead(Arriving):
    """The next iteration runs before these results are asked for."""

    v2, ahead = False, True


class TestV2ScheduledAhead(Arriving):
    v2, ahead = True, True


class TestOutputs:
    """Attaching an outcome to each kind of output that vLLM's workers return."""

    def test_a_promise_that_is_read_late_in_another_thread_brings_its_own_outcome(self) -> None:
        from conserve.engine.vllm.iteration import Outcome, outcome_of
        from conserve.engine.vllm.preemption.outputs import with_outcome

        promises = [with_outcome(promise(n), Outcome(layers_run=n)) for n in range(3)]
        with ThreadPoolExecutor(1) as thread:
            results = [thread.submit(one.get_output).result(timeout=120) for one in reversed(promises)]
        found = [(result.sampled_token_ids, outcome_of(result)) for result in results]
        assert found == [([[n]], Outcome(layers_run=n)) for n in (2, 1, 0)]

    def test_iterations_share_no_outcome_through_the_output_that_they_share(self) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        from conserve.engine.vllm.iteration import Outcome, outcome_of
        from conserve.engine.vllm.preemption.outputs import with_outcome

        output = with_outcome(EMPTY_MODEL_RUNNER_OUTPUT, Outcome(joined=1))
        assert outcome_of(output) == Outcome(joined=1)
        assert outcome_of(EMPTY_MODEL_RUNNER_OUTPUT) is None

    def test_where_there_is_no_output_or_no_outcome_nothing_changes(self) -> None:
        from conserve.engine.vllm.iteration import Outcome
        from conserve.engine.vllm.preemption.outputs import with_outcome

        promised = promise(0)
        assert with_outcome(promised, None) is promised
        assert with_outcome(None, Outcome()) is None

    def test_results_that_come_without_sampling_bring_the_outcome_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM then asks for no sample, and the next iteration is another's."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        from conserve.engine.vllm.iteration import Outcome, Stamp, outcome_of
        from conserve.engine.vllm.preemption.worker import VllmWorker, Worker

        monkeypatch.setattr(VllmWorker, "execute_model", lambda *_: EMPTY_MODEL_RUNNER_OUTPUT)
        monkeypatch.setattr(VllmWorker, "sample_tokens", lambda *_: promise(7).get_output())
        worker = object.__new__(Worker)  # without safepoints, as a model where none are found
        stamp = Stamp(iteration=1, flag="psm_1", rows=["a"], every=1)
        output = worker.execute_model(SimpleNamespace(conserve=SimpleNamespace(stamp=stamp)))
        assert outcome_of(output) == Outcome()
        assert outcome_of(worker.sample_tokens(None)) is None
        assert outcome_of(worker.execute_model(SimpleNamespace())) is None


def promise(token: int) -> Any:
    """The V2 runner's own promise of one token of one request."""
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401 - streams and events of a CPU
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    ones = torch.ones(1, dtype=torch.int32)
    return AsyncOutput(
        model_runner_output=ModelRunnerOutput(req_ids=["row"], req_id_to_index={"row": 0}),
        sampler_output=SamplerOutput(
            sampled_token_ids=torch.tensor([[token]]),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=ones,
            num_rejected=torch.zeros_like(ones),
            sampling_mask_tensors=None,
        ),
        num_sampled_tokens=ones,
        main_stream=torch.cuda.current_stream(),
        copy_stream=torch.cuda.Stream(),
        check_ep_fault=False,
        pending_aux_output=None,
    )
