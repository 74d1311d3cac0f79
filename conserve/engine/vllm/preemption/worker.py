"""vLLM's worker, whose iterations rows can leave (conserve-2026 section 4.3, conserve-2024 section 4.3)."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from conserve.engine.runtime.launches import Launches
from conserve.engine.runtime.safepoint import LeaveFlag, Word
from conserve.engine.runtime.stopwatch import Lap, Stopwatch
from conserve.engine.vllm.compat.vllms_worker import VllmWorker
from conserve.engine.vllm.iteration import IterationOutcome, Stamp, stamp_of
from conserve.engine.vllm.preemption.cpu_pieces import leave_gpu_pass_out
from conserve.engine.vllm.preemption.outputs import nothing_sampled, with_outcome
from conserve.engine.vllm.preemption.pieces import pieces_of
from conserve.engine.vllm.preemption.rows import RunnerRows
from conserve.engine.vllm.preemption.runner import Runner
from conserve.engine.vllm.preemption.runner_v1 import V1Runner
from conserve.engine.vllm.preemption.runner_v2 import V2Runner
from conserve.engine.vllm.preemption.safepoints import (
    Abandoned,
    Safepoints,
    between_layers,
    decoder_layers,
    in_attention,
)
from conserve.engine.vllm.preemption.segments import NotDivisible, Stitched, recorded

log = logging.getLogger("vllm.conserve")


class TensorParallelOrders:
    """Implements `safepoints.Orders`: the first rank reads the flag and tells the other ranks."""

    def __init__(self) -> None:
        self._group = get_tp_group()
        self._alone = self._group.world_size == 1
        self._flag: LeaveFlag | None = None
        self.flag_readable = True  # the flag could be read, so far
        # Name of a flag that cannot be read: its engine core is on another machine.
        self._lost: str | None = None

    def rows_ordered(self, stamp: Stamp) -> int:
        """Number of rows ordered to leave, equal on every rank: every rank asks at the same safepoints."""
        return int(self._told(self._rows_asked, stamp))

    def refused(self, stamp: Stamp) -> bool:
        """True if the iteration, which was scheduled ahead, is not to start; equal on every rank."""
        return bool(self._told(self._start, stamp))

    def word(self, stamp: Stamp) -> Word | None:
        """The flag's word of this iteration, where no other rank has to be told."""
        flag = self._attached(stamp) if self._alone else None
        return flag.word(stamp.iteration) if flag is not None else None

    def _told(self, ask: Callable[[LeaveFlag, int], int], stamp: Stamp) -> int:
        """Answer of the flag, as the first rank reads it; 0 if it cannot be read."""
        if self._alone:
            return self._read(ask, stamp)
        # vLLM's queue in shared memory: 7 us for two ranks on two cores, where gloo's broadcast takes 100 to 300.
        rows = self._read(ask, stamp) if self._group.rank_in_group == 0 else None
        return int(self._group.broadcast_object(rows))

    def _read(self, ask: Callable[[LeaveFlag, int], int], stamp: Stamp) -> int:
        flag = self._attached(stamp)
        return ask(flag, stamp.iteration) if flag is not None else 0

    def _attached(self, stamp: Stamp) -> LeaveFlag | None:
        """The stamp's flag; None if it cannot be read."""
        if self._flag is None or self._flag.name != stamp.flag:
            if stamp.flag == self._lost:
                return None
            try:
                self._flag = LeaveFlag.attach(stamp.flag)
            except OSError as error:
                self._lost, self.flag_readable = stamp.flag, False
                log.warning("rows do not leave iterations here: the flag cannot be read (%s)", error)
                return None
        return self._flag

    @staticmethod
    def _rows_asked(flag: LeaveFlag, iteration: int) -> int:
        return flag.rows_asked(iteration)

    @staticmethod
    def _start(flag: LeaveFlag, iteration: int) -> int:
        """Note the start before the order is read: the order's writer looks at them the other way round."""
        flag.note_start(iteration, time.monotonic())
        return flag.is_refused(iteration)


class Worker(VllmWorker):  # type: ignore[misc]
    """The class that `--worker-cls` names. Iterations without a stamp run as in vLLM's own worker."""

    _runner: Runner | None = None
    _safepoints: Safepoints | None = None
    _rows: RunnerRows | None = None
    _abandoned: ModelRunnerOutput | None = None
    _queued = True  # vLLM may begin an iteration before it has the results of the last one
    _outcome: IterationOutcome | None = None
    _stopwatch: Stopwatch | None = None  # where the host's clock mixes iterations up
    _unsettled: Mapping[str, int] = MappingProxyType({})  # row that left -> the last iteration that it left

    def load_model(self, **kwargs: Any) -> None:
        """Load as vLLM does; note what is compiled from here on."""
        self._stitched: list[Stitched] = []
        self._recording = contextlib.ExitStack()
        self._recording.enter_context(recorded(self._stitched))
        leave_gpu_pass_out()
        super().load_model(**kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """Compile and warm up as vLLM does; then put the safepoints into the model."""
        times = super().compile_or_warm_up_model()
        self._recording.close()
        self._install()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the iteration as vLLM does, with safepoints if it has a stamp.

        Where the iteration was abandoned, its output has no tokens. vLLM then asks for no sample, which an arrival
        would wait for; it always does where iterations are queued, so there `sample_tokens` returns that output.
        """
        self._outcome = None
        if self._stopwatch is not None:
            self._stopwatch.begin()
        output = self._run(scheduler_output)
        if output is None and not self._queued:
            output, self._abandoned = self._abandoned, None
        return output if output is None else self._answered(output)  # None: `sample_tokens` has it

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as vLLM does, and attach the outcome."""
        output, self._abandoned = self._abandoned, None
        rows, runner = self._rows, self._runner
        if output is None:
            with runner.discarding(rows.left) if rows and runner else contextlib.nullcontext():
                output = super().sample_tokens(grammar_output)
        return self._answered(output)

    def _answered(self, output: Any) -> Any:
        """Attach the outcome of the iteration that ran last, once, and its time on the device."""
        answer, self._outcome = self._outcome, None
        return with_outcome(output, answer, self._lap(output))

    def _lap(self, output: Any) -> Lap | None:
        """The marks around the iteration; None for one whose results are not on the device, as of one abandoned."""
        if self._stopwatch is None:
            return None
        if isinstance(output, AsyncModelRunnerOutput):
            return self._stopwatch.end()
        self._stopwatch.forget()
        return None

    def _run(self, scheduler_output: Any) -> Any:
        stamp, safepoints, rows = stamp_of(scheduler_output), self._safepoints, self._rows
        if rows is not None:
            rows.begin(scheduler_output, watched=stamp is not None)
        if safepoints is None and stamp is not None:
            self._outcome = IterationOutcome()
        if safepoints is None or (stamp is None and (rows is None or not rows.busy)):
            return super().execute_model(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        if stamp is not None:
            self._unsettled = {name: left for name, left in self._unsettled.items() if left > stamp.settled}
            if stamp.ahead and self._refuses(stamp, scheduled):
                self._refuse(scheduler_output, safepoints)
                return None
            safepoints.arm(stamp)
        left: frozenset[str] | None = None  # known where the iteration was abandoned
        try:
            return super().execute_model(scheduler_output)
        except Abandoned:
            left = frozenset(scheduled)
            self._abandoned = nothing_sampled(list(scheduled))
            assert self._runner is not None
            self._abandoned.kv_connector_output = self._runner.transferred(scheduler_output)
            return None
        finally:
            safepoints.disarm()
            if rows is not None:
                rows.end(scheduled)
                left = rows.left if left is None else left
            self._outcome = outcome(safepoints, rows, left or frozenset())
            if stamp is not None:
                self._unsettled = {**self._unsettled, **dict.fromkeys(self._outcome.left, stamp.iteration)}

    def _refuses(self, stamp: Stamp, scheduled: Collection[str]) -> bool:
        """True if the arrivals want no part of this iteration to start, or it was planned with tokens that left."""
        # Nothing of a refused iteration is computed, and one that is a single CUDA graph has no safepoint.
        assert self._safepoints is not None
        return self._safepoints.refused(stamp) or not self._unsettled.keys().isdisjoint(scheduled)

    def _refuse(self, scheduler_output: Any, safepoints: Safepoints) -> None:
        """Have vLLM take in which requests came and went, and compute nothing."""
        stamp, scheduled = stamp_of(scheduler_output), list(scheduler_output.num_scheduled_tokens)
        assert stamp is not None
        assert self._runner is not None
        with contextlib.suppress(Abandoned), self._runner.refusing():
            super().execute_model(scheduler_output)
        self._abandoned = nothing_sampled(scheduled)
        self._abandoned.kv_connector_output = self._runner.transferred_alone(scheduler_output)
        if self._rows is not None:
            self._rows.busy = False
        told = outcome(safepoints, None, frozenset(scheduled))
        separable = self._rows is not None and self._rows.possible
        self._outcome = replace(told, layers_run=0, refused=True, separable=separable)
        self._unsettled = {**dict.fromkeys(scheduled, stamp.iteration), **self._unsettled}

    def _install(self) -> None:
        runner = self._runner = runner_of(self)
        config = self.vllm_config
        self._queued = config.max_concurrent_batches > 1
        eager = config.model_config.enforce_eager
        count = config.model_config.get_num_layers(config.parallel_config)
        layers = decoder_layers(self.model_runner.get_model(), count) if eager else None
        on_device = self.device.type == "cuda"
        launches = Launches(torch.cuda.Event) if on_device else None
        # Results of a speculating engine may be read before its drafts are made, behind which the mark would be.
        if on_device and config.scheduler_config.async_scheduling and config.speculative_config is None:
            event = functools.partial(torch.cuda.Event, enable_timing=True, blocking=True)
            self._stopwatch = Stopwatch(event)
        safepoints = Safepoints(TensorParallelOrders(), count, launches)
        if layers is not None:
            self._install_between(layers, runner, safepoints)
        elif not self._install_pieces(runner, safepoints):
            self._install_in_attention(
                safepoints, "the model's are not found" if eager else "they are compiled"
            )

    def _install_between(self, layers: Sequence[Any], runner: Runner, safepoints: Safepoints) -> None:
        """Put the safepoints between decoder layers, of which there are as many as the model says."""
        self._safepoints = safepoints
        self._rows = RunnerRows(runner, safepoints) if rows_can_leave(self.vllm_config, runner) else None
        between_layers(layers, safepoints, self._rows)
        how = "rows can leave" if self._rows is not None else "rows cannot leave"
        log.info("%d safepoints between layers, where %s", len(layers), how)

    def _install_in_attention(self, safepoints: Safepoints, why: str) -> None:
        """Put the safepoints into attention calls, where iterations are abandoned whole; `why` is the reason."""
        safepoints.layers = in_attention(
            self.vllm_config.compilation_config.static_forward_context, safepoints
        )
        self._safepoints = safepoints if safepoints.layers else None
        log.info(
            "%d safepoints in attention calls, none between layers (%s): rows cannot leave",
            safepoints.layers,
            why,
        )

    def _install_pieces(self, runner: Runner, safepoints: Safepoints) -> bool:
        """Put the safepoints between compiled pieces; False where rows cannot leave there."""
        if not self._stitched or not rows_can_leave(self.vllm_config, runner):
            return False
        try:
            rows = pieces_of(self._stitched, self.vllm_config, runner, safepoints)
        except NotDivisible as error:
            log.info("rows cannot leave between compiled pieces: %s", error)
            return False
        self._safepoints, self._rows = safepoints, rows
        log.info("%d safepoints between compiled pieces, where rows can leave", safepoints.layers)
        return True


def outcome(safepoints: Safepoints, rows: RunnerRows | None, left: frozenset[str]) -> IterationOutcome:
    """The answer to the scheduler after an iteration that these requests left."""
    kept = rows.suspended if rows is not None and left else {}
    return IterationOutcome(
        left=left,
        kept={name: layer for name, layer in kept.items() if name in left},
        joined=rows.joined if rows is not None else 0,
        layers_run=safepoints.left_before if left else 0,
        layers=safepoints.layers,
        separable=rows is not None and rows.possible,
        safepoints=safepoints.layers,
        flag_readable=safepoints.flag_readable,
    )


def runner_of(worker: Any) -> Runner:
    """The worker's model runner, whichever of vLLM's it is."""
    return V2Runner(worker.model_runner) if worker.use_v2_model_runner else V1Runner(worker.model_runner)


def rows_can_leave(config: Any, runner: Runner) -> bool:
    """True if a batch of this model can be cut down between layers."""
    builders = [builder for group in runner.groups for builder in group.metadata_builders]
    return not (
        config.lora_config is not None  # maps tokens to adapters
        or config.model_config.is_multimodal_model  # some add to hidden states between layers
        or config.parallel_config.use_ubatching
        or config.parallel_config.decode_context_parallel_size > 1
        or config.parallel_config.prefill_context_parallel_size > 1  # spreads a chunk over ranks
        or config.cache_config.kv_sharing_fast_prefill
        or getattr(config.model_config, "rswa_window", None)
        or notes_experts(config)  # by a token's place in the pass
        or shares_indices(config.model_config.hf_text_config)  # by the same
        or (len(builders) > 1 and any(builder.supports_update_block_table for builder in builders))
    )


def notes_experts(config: Any) -> bool:
    """True if answers tell which experts each token had (`--enable-return-routed-experts`)."""
    told = getattr(config, "aux_output_config", None) or config.model_config  # before 0.31 the model's
    return bool(getattr(told, "enable_return_routed_experts", False))


def shares_indices(hf_config: Any) -> bool:
    """True if sparse attention of a layer uses the indices that an earlier layer wrote for the same pass."""
    pattern = getattr(hf_config, "index_topk_pattern", None) or ""
    return "S" in pattern or (getattr(hf_config, "index_topk_freq", None) or 1) > 1
