"""A real vLLM engine that runs exactly the given batches, to time them.

The engine core (scheduler and executor) lives in this process, its workers where the deployment has them. The
timed step is the core's own: schedule, execute on the model runner, sample, update. Requests come in the usual way,
but their context is not computed: KV blocks are allocated and counted as computed, as after a transfer from
another engine, since the contents of KV do not change how long attention takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from conserve.engine.vllm.compat import trial
from conserve.engine.vllm.compat.installed import require_engine
from conserve.engine.vllm.compat.internals import Part
from conserve.engine.vllm.launching import fork_server
from conserve.engine.vllm.launching.environment import (
    engine_log,
    prepare_environment,
    quiet_warnings,
    why_not_started,
)
from conserve.engine.vllm.launching.flags import ahead_under_v1, configured, names_scheduling, parse_flags
from conserve.engine.vllm.launching.launch import on_thread, output_to
from conserve.engine.vllm.model.demo_model import resolve_model
from conserve.engine.vllm.model.hub import require_on_hub
from conserve.engine.vllm.model.profile_key import key_of, limits_of
from conserve.errors import ConserveError, EndpointUnusable, ProfilingFailed, SettingsError
from conserve.profiles.batch import Slice
from conserve.profiles.profile import KVCopy, ProfileKey, Safepoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore

EMPTY_REPEATS = 20
EMPTY_S = 2.0  # a slow engine has fewer repeats
PROBE = "conserve.engine.vllm.profiling.worker_probe.WorkerProbe"


class EngineRig:
    """The `Rig` protocol on vLLM's engine core."""

    def __init__(self, name: str, key: ProfileKey, core: EngineCore) -> None:
        self.name = name
        self.key = key
        self.limits = limits_of(core.vllm_config)
        self._core = core
        self._ids = (f"profile-{number}" for number in itertools.count())
        self._dice = random.Random(0)
        self._vocabulary = core.vllm_config.model_config.get_vocab_size()

    @classmethod
    def start(cls, model: str, *, engine_flags: Sequence[str], cache_dir: Path, served: bool = False) -> Self:
        """Start an engine with the flags of the deployment; raises `EndpointUnusable`.

        `served`: as `conserve serve` runs it, else as `conserve run` does.
        """
        require_engine()
        path = resolve_model(model, cache_dir)
        prepare_environment(offline=Path(path).exists(), served=served)
        require_on_hub(path)
        fork_server.start_early("the rig")
        quiet_warnings()
        trial.require(Part.ENGINE, Part.PROFILING, say=logging.getLogger(__name__).warning)
        arguments = parse_flags(path, [*engine_flags, "--worker-extension-cls", PROBE], served=served)
        log = engine_log()
        log.capture_loggers()
        log.mark()
        try:
            config = configured(arguments, served=served)
            if served and ahead_under_v1(config) and not names_scheduling(engine_flags):
                arguments.async_scheduling = False
                config = configured(arguments, served=served)
            key = key_of(config)  # before the engine starts, as when profiles are looked up
            keep_one_engine(config)
            core = asyncio.run(build_core(config, log.fileno()))
        except ConserveError:
            raise
        except Exception as error:
            raise EndpointUnusable(why_not_started(model, error)) from error
        log.capture_loggers()
        return cls(model, key, core)

    def close(self) -> None:
        """Stop the engine and its workers."""
        with contextlib.suppress(Exception):
            self._core.shutdown()
        fork_server.release("the rig")

    def measure(self, slices: Sequence[Slice], repeats: int) -> list[float]:
        """Run this batch `repeats` times and return each time in ms; decode steps advance by a token each time."""
        with self._alive():
            decodes = [s for s in slices if s.decode]
            for step in decodes:
                self._add(1, step.context - 1, max_tokens=repeats + 2)
            if decodes:
                self._step()  # their first iteration, in which workers register them
            times = [self._run(slices) for _ in range(repeats)]
            self._core.abort_requests(list(self._core.scheduler.requests))
            self._step()  # in which workers drop them
            return times

    def empty_iteration_ms(self) -> float:
        """Median time of an iteration without tokens: the cost of scheduler, executor and workers."""
        with self._alive():
            times: list[float] = []
            ends_at = time.perf_counter() + EMPTY_S
            while len(times) < EMPTY_REPEATS and (time.perf_counter() < ends_at or not times):
                self._add(1, 0, max_tokens=2)
                self._step()
                self._core.abort_requests(list(self._core.scheduler.requests))
                times.append(self._step())
            return sorted(times)[len(times) // 2]

    def kv_copies(self, blocks: Sequence[int]) -> list[KVCopy]:
        """Time copies of scattered blocks; with several workers, the slowest one's times and the bytes of all."""
        with self._alive():
            num_blocks = self._core.vllm_config.cache_config.num_gpu_blocks
            answers = self._core.collective_rpc("conserve_copies", args=(num_blocks, list(blocks)))
            return [
                KVCopy(
                    blocks=same[0][0],
                    bytes=sum(times[1] for times in same),
                    to_host_ms=max(times[2] for times in same),
                    to_device_ms=max(times[3] for times in same),
                )
                for same in zip(*answers, strict=True)
            ]

    def safepoint(self) -> Safepoint:
        """The time of a look at the flag in the slowest worker, and the number of safepoints."""
        with self._alive():
            answers = self._core.collective_rpc("conserve_safepoint")
            return Safepoint(check_us=max(us for us, _ in answers), per_iteration=max(n for _, n in answers))

    def _run(self, slices: Sequence[Slice]) -> float:
        """Time one iteration of the batch, whose decode steps are running already."""
        for tokens, context, decode in slices:
            if not decode:
                self._add(tokens, context, max_tokens=1)
        ms = self._step()
        if len(self._core.scheduler.requests) != sum(s.decode for s in slices):
            raise ProfilingFailed(
                "the engine did not run a batch as it was told to; profile without the last engine flags"
            )
        return ms

    def _add(self, tokens: int, context: int, *, max_tokens: int) -> None:
        """Queue a request with `context` tokens in KV blocks and `tokens` tokens to compute."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        # Random first tokens, so that no prompt hits the prefix cache of another.
        start = [self._dice.randrange(self._vocabulary) for _ in range(min(8, tokens + context))]
        request, _ = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=next(self._ids),
                prompt_token_ids=start + start[:1] * (tokens + context - len(start)),
                mm_features=None,
                sampling_params=SamplingParams(
                    max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        if context > 0:
            blocks = self._core.scheduler.kv_cache_manager.allocate_slots(
                request, context, delay_cache_blocks=True
            )
            if blocks is None:
                raise ProfilingFailed(
                    "the KV cache is too small for the batches of a profile; give it more memory with: "
                    "-- --kv-cache-memory-bytes BYTES"
                )
            request.num_computed_tokens = context
        self._core.add_request(request)

    def _step(self) -> float:
        begun = time.perf_counter()
        self._core.step()
        return (time.perf_counter() - begun) * 1e3

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except ConserveError:
            raise
        except Exception as error:
            gone = str(error) in ("", "cancelled")  # vLLM's message for a worker that has ended
            cause = engine_log().last_error() or ("one of its processes is gone" if gone else str(error))
            raise ProfilingFailed(
                f"the engine died while it was measured ({cause.splitlines()[0][:200]}); an older profile is "
                "kept; run the command again to go on from there"
            ) from error


def keep_one_engine(config: VllmConfig) -> None:
    """Leave one data parallel engine, as vLLM does in each; raises `SettingsError` if it needs the others."""
    if config.parallel_config.data_parallel_size == 1:
        return
    if config.model_config.is_moe:
        raise SettingsError(
            "engines of a mixture of experts wait for each other, and a profile is of one engine; "
            "leave out --data-parallel-size"
        )
    config.parallel_config.reconfigure_for_independent_dp_rank()


async def build_core(config: VllmConfig, log_descriptor: int) -> EngineCore:
    """The engine core with its workers, which ignore Ctrl-C and write to the log."""

    def build() -> EngineCore:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        if config.max_concurrent_batches > 1:
            # Overlapping batches would make a step more than one iteration.
            config.scheduler_config.async_scheduling = False
        fork_server.prepare(config)
        return EngineCore(config, Executor.get_class(config), log_stats=False)

    with output_to(log_descriptor):
        return await on_thread(build)
