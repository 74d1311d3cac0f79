"""Outcomes of iterations arrive with each of vLLM's model runners, and rows leave with the V2 runner too.

`test_preemption.py` has more of the latter, with V1 in `make test` and with V2 in `make test-full`.
"""

from __future__ import annotations

import inspect
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.vllm.compat.versions import minor_of
from tests.few_slots import keep_no_slot, parked_under_way
from tests.integration.test_preemption import CLOSE, assert_close, counts, shared_prefixes, storm
from tests.tiny_models import FEW_LAYERS as LAYERS
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]

PATIENCE_S = 240.0  # reached by a hang alone
PATTERN = "[a-f]{4}-[0-9]{5}"


@pytest.fixture(scope="class")
def engine(few_layers: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One start per class, never two engines at once: they would share vLLM's globals."""
    from tests.preempted_engine import started
    from tests.triton_on_cpu import v2_runner

    runner = v2_runner() if request.cls.v2 else nullcontext()
    always = getattr(request.cls, "always", False)
    ahead = scheduled_ahead(always=always) if request.cls.ahead else nullcontext()
    flags = request.cls.flags() if hasattr(request.cls, "flags") else {}
    with runner, ahead, started(few_layers, **flags) as engine:
        assert engine.worker.use_v2_model_runner is request.cls.v2
        assert engine.core.async_scheduling is request.cls.ahead
        assert engine.worker._queued is request.cls.ahead
        yield engine
        engine.assert_nothing_is_left()


@contextmanager
def scheduled_ahead(*, always: bool = False) -> Iterator[None]:
    """Engines that start meanwhile schedule an iteration before the last one's results are in, and stamp it.

    vLLM never does so on a CPU. `always`: beside online requests too.
    """
    from vllm.platforms.cpu import CpuPlatform

    from conserve.engine.vllm.scheduling.scheduler import CoServing

    check = CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(checked))
        patch.setattr("conserve.engine.vllm.preemption.arrivals.why_not", lambda config: None)
        if always:
            patch.setattr(
                CoServing, "offline_alone", property(lambda self: self.arrival_monitor.workers_read_flag)
            )
        yield


@pytest.fixture
def settled(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records of the iterations as they are settled."""
    records: list[Any] = []
    from conserve.engine.vllm.scheduling import scheduler
    from conserve.engine.vllm.scheduling.settlement import settle

    def settling(of: Any, iteration: Any) -> None:
        records.append(iteration)
        settle(of, iteration)

    monkeypatch.setattr(scheduler, "settle", settling)
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


def of_all_kinds() -> list[Any]:
    """Rows with all that a sampler may be asked for, and two live requests."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    from tests.preempted_engine import Ask, greedy, prompt

    kinds = {
        "seed": (110, SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)),
        "grammar": (
            60,
            SamplingParams(
                temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=PATTERN)
            ),
        ),
        "logprobs": (90, greedy(6, logprobs=2)),
        "prompt": (120, greedy(3, prompt_logprobs=1, logprobs=1)),
    }
    named = SamplingParams.__annotations__.get("prompt_logprob_token_ids", "")
    if "ndarray" in str(named):  # before vLLM 0.32 not for each token of the prompt
        kinds["scores"] = (110, greedy(3, prompt_logprob_token_ids=[[7 + n, 9] for n in range(109)]))
    asked = [
        Ask(name, prompt(tokens, 40 + n), params) for n, (name, (tokens, params)) in enumerate(kinds.items())
    ]
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=2, ignore_eos=True)
    live = {"live": greedy(12, prompt_logprobs=1), "live-seed": seeded}
    return [*asked, *(Ask(name, prompt(30, len(name)), params, False) for name, params in live.items())]


def assert_alike(got: Any, wanted: Any) -> None:
    assert (got.tokens, got.text, got.reason) == (wanted.tokens, wanted.text, wanted.reason)
    assert_close(got.logprobs, wanted.logprobs)
    assert_close(got.prompt_logprobs, wanted.prompt_logprobs)
    assert len(got.scores) == len(wanted.scores)
    for one, other in zip(got.scores, wanted.scores, strict=True):
        assert one == pytest.approx(other, abs=CLOSE)


class Arriving:
    """The outcome of each iteration comes with its own results."""

    v2: bool
    ahead: bool

    def test_an_iteration_that_was_computed_has_its_own_outcome(
        self, engine: Any, settled: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from conserve.engine.vllm.iteration import IterationOutcome
        from conserve.engine.vllm.preemption import worker

        stamps: list[Any] = []
        arm = engine.worker._safepoints.arm

        def arming(stamp: Any) -> None:
            stamps.append(stamp)
            arm(stamp)

        def numbered(*_: Any) -> IterationOutcome:
            return IterationOutcome(layers_run=stamps[-1].iteration, layers=LAYERS, safepoints=LAYERS)

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
        assert all(one.outcome is None for one in settled if one.stamp is None), "no stamp, no answer"

    def test_the_scheduler_learns_what_the_worker_can(self, engine: Any) -> None:
        engine.add(*rows(2))
        engine.drain()
        assert engine.preemptions.may_leave_next
        assert engine.preemptions.layers == LAYERS
        assert engine.preemptions.report()["rows_go_on"]


class TestV1(Arriving):
    v2, ahead = False, False


class TestV2(Arriving):
    """V2's results are on the device when `sample_tokens` returns, and its counters of tokens for good."""

    v2, ahead = True, False

    @staticmethod
    def flags() -> dict[str, Any]:
        return {"max_num_batched_tokens": 96}  # prompts are cut into chunks; logprobs are slow in Python

    def test_iterations_that_all_rows_leave_are_abandoned(self, engine: Any, settled: list[Any]) -> None:
        from tests.preempted_engine import ALL

        asked = rows(3)
        wanted = engine.undisturbed(asked)
        for layer in (0, 1, LAYERS - 1):
            settled.clear()
            assert engine.scripted(asked, {n: [(layer, ALL)] for n in (1, 2, 4)}) == wanted
            left = [one for one in settled if one.left and not one.outcome.refused]
            assert len(left) == 3
            assert all(one.outcome.layers_run == layer and one.left == one.tokens.keys() for one in left)

    def test_rows_leave_at_any_layer_and_join_a_later_iteration_there(
        self, engine: Any, settled: list[Any]
    ) -> None:
        from tests.preempted_engine import ALL

        asked = mixed(4)
        wanted = engine.undisturbed(asked)
        for layer in range(LAYERS):
            before = counts(engine)
            settled.clear()
            script = {1: [(layer, 1)], 2: [(layer, ALL)], 4: [(layer, 2), (LAYERS - 1, ALL)]}
            with engine.counting_tokens() as computed:
                assert engine.scripted(asked, script) == wanted
            tokens = sum(len(ask.prompt) + ask.params.max_tokens - 1 for ask in asked)
            assert computed == [tokens] * LAYERS, "no layer computes a token twice"
            new = counts(engine) - before
            assert [new["iterations_left"], new["layers_run"]] == [3, 3 * layer]
            assert not any(new[name] for name in ("abandoned", "tokens_redone", "live_tokens_recomputed"))
            joined = sum(one.outcome.joined for one in settled if one.outcome is not None)
            assert joined >= (3 if layer else 1), "before the first layer there is nothing to keep"

    @pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
    def test_requests_of_all_kinds(self, engine: Any) -> None:
        """Seeds, logprobs of samples, of prompts and of tokens named in the request, a grammar; long prompts."""
        import vllm

        from tests.preempted_engine import ALL, Dice

        asked = of_all_kinds()
        wanted = engine.undisturbed(asked)
        assert len({answer.tokens for answer in wanted.values()}) == len(asked)
        assert re.fullmatch(PATTERN, wanted["grammar"].text)
        assert len(wanted["prompt"].prompt_logprobs) == 119
        if minor_of(vllm.__version__) >= (0, 32):
            assert len(wanted["scores"].scores) == 109
        before = counts(engine)
        each = engine.orders.script({n: [(n % LAYERS, ALL)] for n in range(1, 40, 2)})  # last chunks too
        for decide in (each, Dice(5, LAYERS)):
            answers = engine.disturbed(asked, decide)
            for ask in asked:
                assert_alike(answers[ask.name], wanted[ask.name])
        assert (counts(engine) - before)["iterations_left"] > 20

    def test_rows_share_prefixes_with_those_that_left(self, engine: Any) -> None:
        answers, wanted = shared_prefixes(engine)
        assert answers == wanted

    @pytest.mark.full
    def test_a_storm_of_rows_that_leave(self, engine: Any) -> None:
        """At random, with evictions and aborts."""
        assert storm(engine, 100, kinds=12, losing=0.1)


class TestV2WithCheckpoints:
    """Rows that leave and rows that are evicted; what the KV connector's workers say comes from every iteration."""

    v2, ahead = True, False

    @staticmethod
    def flags() -> dict[str, Any]:
        from tests.integration.test_checkpoints import transfer

        return {"kv_transfer_config": transfer({"policy": "eager", "host_bytes": 64 << 20})}

    def test_rows_that_leave_are_saved_and_restored(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, Dice, greedy, prompt

        asked = [Ask(f"off{n}", prompt(50 + n * 83, 500 + n), greedy(48)) for n in range(4)]
        wanted = engine.undisturbed(asked)
        counted = counts(engine)
        before = engine.scheduler.conserve()["checkpoint"]
        engine.orders.follow(Dice(5, LAYERS, often=0.5))
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
        new = counts(engine) - counted
        assert new["abandoned"] > 5
        assert new["iterations_left"] - new["abandoned"] > 5
        assert after["blocks_saved"] > before["blocks_saved"]
        assert after["tokens_restored"] > before["tokens_restored"]
        engine.assert_nothing_is_left()
        engine.forget()


class TestV1ScheduledAhead(Arriving):
    """The next iteration runs before these results are asked for."""

    v2, ahead = False, True


class TestV2ScheduledAhead(TestV2):
    """An iteration that was planned with tokens of rows that left is refused, and planned again."""

    ahead = always = True
    refusals = (LAYERS, 20)  # at least: rows at any layer, and a storm

    def test_rows_leave_at_any_layer_and_join_a_later_iteration_there(
        self, engine: Any, settled: list[Any]
    ) -> None:
        before, ahead = counts(engine), engine.scheduler.ahead.count
        super().test_rows_leave_at_any_layer_and_join_a_later_iteration_there(engine, settled)
        new = counts(engine) - before
        assert engine.scheduler.ahead.count - ahead >= new["refused"] >= self.refusals[0]

    @pytest.mark.full
    @pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
    def test_requests_of_all_kinds(self, engine: Any) -> None:
        super().test_requests_of_all_kinds(engine)

    @pytest.mark.full
    def test_a_storm_of_rows_that_leave(self, engine: Any) -> None:
        """At random, with evictions and aborts; arrivals refuse one in ten of the iterations that wait."""
        dice = random.Random(7)
        engine.orders.refuse = lambda stamp: dice.random() < 0.1
        before = counts(engine)
        assert storm(engine, 400, kinds=16, losing=0.1)
        engine.orders.refuse = None
        assert (counts(engine) - before)["refused"] >= self.refusals[1]


@pytest.mark.full
class TestV2ScheduledAheadOfOfflineRowsAlone(TestV2ScheduledAhead):
    """The rule of `scheduling.ahead` decides; most of these iterations have online requests."""

    always = False
    refusals = (0, 3)


@pytest.mark.full
class TestV2ScheduledAheadWithCheckpoints(TestV2WithCheckpoints):
    ahead = always = True


class FewSlots:
    """Iterations overlap beside live requests, and none leaves them: rows give slots up with tokens under way."""

    v2: bool
    ahead = True

    @staticmethod
    def flags() -> dict[str, Any]:
        return {"max_num_seqs": 4}

    def test_rows_go_on_with_the_tokens_that_were_under_way(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from conserve.engine.vllm.scheduling import ahead
        from tests.preempted_engine import Ask, greedy, prompt

        scheduler, under_way = engine.scheduler, parked_under_way(monkeypatch)
        keep_no_slot(scheduler, monkeypatch)
        monkeypatch.setattr(ahead, "pays", lambda *_: True)
        lengths = [300 if n == 3 else 40 + 7 * n for n in range(12)]
        rows = [
            Ask(f"off{n}", prompt(tokens, 900 + n), greedy(12 + 9 * n)) for n, tokens in enumerate(lengths)
        ]
        live = [Ask(f"on{n:02}", prompt(20, 950 + n), greedy(9), offline=False) for n in range(24)]
        wanted = engine.undisturbed([*rows, *live])
        before, again = scheduler.parking.count, scheduler.offline_tokens.again
        with engine.counting_tokens() as computed:
            engine.add(*rows)
            for n, ask in enumerate(live):
                for _ in range(4 if n % 2 else 14):  # the second one of two finds iterations that overlap
                    engine.step()
                engine.add(ask)
            assert engine.drain() == wanted
        assert (
            computed == [sum(len(ask.prompt) + ask.params.max_tokens - 1 for ask in (*rows, *live))] * LAYERS
        )
        assert scheduler.parking.count - before >= len(under_way) > 5
        assert scheduler.offline_tokens.again == again


class TestV1FewSlots(FewSlots):
    v2 = False


class TestV2FewSlots(FewSlots):
    v2 = True


class TestOutputs:
    """Attaching an outcome to each kind of output that vLLM's workers return."""

    def test_a_promise_that_is_read_late_in_another_thread_brings_its_own_outcome(self) -> None:
        from conserve.engine.vllm.iteration import IterationOutcome, outcome_of
        from conserve.engine.vllm.preemption.outputs import with_outcome

        promises = [with_outcome(promise(n), IterationOutcome(layers_run=n)) for n in range(3)]
        with ThreadPoolExecutor(1) as thread:
            results = [thread.submit(one.get_output).result(timeout=120) for one in reversed(promises)]
        found = [(result.sampled_token_ids, outcome_of(result)) for result in results]
        assert found == [([[n]], IterationOutcome(layers_run=n)) for n in (2, 1, 0)]

    def test_a_promise_brings_its_own_iteration_s_time(self) -> None:
        from conserve.engine.runtime.stopwatch import DeviceTime, Lap
        from conserve.engine.vllm.iteration import IterationOutcome, device_time_of, outcome_of
        from conserve.engine.vllm.preemption.outputs import with_outcome

        read = []

        def lap(ms: float) -> Any:
            mark = SimpleNamespace(synchronize=lambda: read.append(ms), elapsed_time=lambda _: ms)
            return Lap(None, mark, mark)

        alone, both = (
            with_outcome(promise(0), None, lap(5.0)),
            with_outcome(promise(1), IterationOutcome(joined=1), lap(40.0)),
        )
        assert not read, "the device has not got there"
        later, first = both.get_output(), alone.get_output()
        times = [device_time_of(first), device_time_of(later)]
        assert times == [DeviceTime(5.0, None), DeviceTime(40.0, None)]
        assert [outcome_of(first), outcome_of(later)] == [None, IterationOutcome(joined=1)]
        results = promise(0).get_output()
        assert with_outcome(results, None, lap(5.0)) is results, "the host's clock times what is read at once"
        assert device_time_of(results) is None

    def test_iterations_share_no_outcome_through_the_output_that_they_share(self) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        from conserve.engine.vllm.iteration import IterationOutcome, outcome_of
        from conserve.engine.vllm.preemption.outputs import with_outcome

        output = with_outcome(EMPTY_MODEL_RUNNER_OUTPUT, IterationOutcome(joined=1))
        assert outcome_of(output) == IterationOutcome(joined=1)
        assert outcome_of(EMPTY_MODEL_RUNNER_OUTPUT) is None

    def test_where_there_is_no_output_or_no_outcome_nothing_changes(self) -> None:
        from conserve.engine.vllm.iteration import IterationOutcome
        from conserve.engine.vllm.preemption.outputs import with_outcome

        promised = promise(0)
        assert with_outcome(promised, None) is promised
        assert with_outcome(None, IterationOutcome()) is None

    def test_results_that_come_without_sampling_bring_the_outcome_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM then asks for no sample, and the next iteration is another's."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        from conserve.engine.vllm.iteration import IterationOutcome, Stamp, outcome_of
        from conserve.engine.vllm.preemption.worker import VllmWorker, Worker

        monkeypatch.setattr(VllmWorker, "execute_model", lambda *_: EMPTY_MODEL_RUNNER_OUTPUT)
        monkeypatch.setattr(VllmWorker, "sample_tokens", lambda *_: promise(7).get_output())
        worker = object.__new__(Worker)  # without safepoints, as a model where none are found
        stamp = Stamp(iteration=1, flag="psm_1", rows=["a"], every=1)
        output = worker.execute_model(SimpleNamespace(conserve=SimpleNamespace(stamp=stamp)))
        assert outcome_of(output) == IterationOutcome()
        assert outcome_of(worker.sample_tokens(None)) is None
        assert outcome_of(worker.execute_model(SimpleNamespace())) is None


class TestRejecting:
    """On the V2 runner, a row that left has its whole chunk rejected."""

    def test_other_requests_keep_their_counts(self) -> None:
        import torch

        from conserve.engine.vllm.preemption.runner_v2 import reject

        gone = torch.tensor([False, True, True, False])
        starts = torch.tensor([0, 1, 8, 9, 40], dtype=torch.int32)
        sampled, rejected = torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 0, 3])
        reject(gone, starts, sampled, rejected)
        assert sampled.tolist() == [1, 0, 0, 0]
        assert rejected.tolist() == [0, 7, 1, 3]

    def test_no_value_is_read_from_the_device(self) -> None:
        """A tensor without values has nothing to read, and reading it is an error."""
        import torch

        from conserve.engine.vllm.preemption.runner_v2 import reject

        def on_meta(length: int, dtype: Any = torch.int32) -> Any:
            return torch.empty(length, dtype=dtype, device="meta")

        with pytest.raises(RuntimeError):
            on_meta(1).item()
        reject(on_meta(4, torch.bool), on_meta(5), on_meta(4), on_meta(4))


def promise(token: int) -> Any:
    """The V2 runner's own promise of one token of one request."""
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401 - streams and events of a CPU
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    ones = torch.ones(1, dtype=torch.int32)
    later = {"pending_aux_output": None}  # not in vLLM 0.30
    taken = inspect.signature(AsyncOutput).parameters
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
        **{name: value for name, value in later.items() if name in taken},
    )
