"""vLLM's real scheduler with our policy in it and no executor: an engine without weights, on its own clock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from conserve.engine.known_times import KnownTimes
from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.section import EngineSection
from conserve.engine.vllm.scheduling.scheduler import CoServingScheduler
from conserve.engine.vllm.settings import SCHEDULER, entries

VOCABULARY = 1000


def bare_config(
    folder: Path, *, section: EngineSection | None, times: KnownTimes | None = None, **flags: Any
) -> VllmConfig:
    """vLLM's configuration for a model that is nothing but its config.json; with our section, if any."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": flags.get("max_model_len", 8192), "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    chosen = {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "block_size": 128,
        "enable_prefix_caching": True,
    }
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        scheduling_policy="priority",
        kv_cache_memory_bytes=1 << 30,
        **{**chosen, **flags},
    ).create_engine_config()
    if section is not None:
        config.scheduler_config.scheduler_cls = SCHEDULER
        config.additional_config = entries(section, times)
    return config


def spec_of(block_size: int) -> FullAttentionSpec:
    """KV of the model's one layer."""
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)


def block_bytes(block_size: int) -> int:
    """Bytes of a KV block of the model."""
    return int(spec_of(block_size).page_size_bytes)


class Clock:
    """Stands in for the module `time` where the adapter reads it: only iterations take time."""

    READERS: ClassVar = (
        "scheduling.bookkeeping",
        "scheduling.scheduler",
        "scheduling.control",
        "scheduling.iterations",
        "scheduling.observation",
        "scheduling.own_time",
        "scheduling.parking",
        "scheduling.report",
        "scheduling.settlement",
        "preemption.arrivals",
    )  # of the adapter's modules

    def __init__(self) -> None:
        self.now = 1e6  # s

    def monotonic(self) -> float:
        """Seconds on this clock."""
        return self.now

    def time(self) -> float:
        """Seconds on this clock, too: its time of day."""
        return self.now

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the adapter read this clock. One at a time in a process."""
        modules: list[Any] = [import_module(f"conserve.engine.vllm.{name}") for name in self.READERS]
        before = [module.time for module in modules]
        try:
            for module in modules:
                module.time = self
            yield
        finally:
            for module, clock in zip(modules, before, strict=True):
                module.time = clock


class SchedulerAlone:
    """vLLM's scheduler, and the requests for it."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        num_blocks: int = 4096,
        scheduler_class: Any = CoServingScheduler,
        clock: Clock | None = None,
        more_groups: Sequence[Any] = (),
    ) -> None:
        """`more_groups`: specifications of further groups of KV blocks."""
        block_size = config.cache_config.block_size
        config.cache_config.num_gpu_blocks = num_blocks
        spec = spec_of(block_size)
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[SimpleNamespace(size=num_blocks * spec.page_size_bytes)],  # its class varies
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{number}"], one) for number, one in enumerate((spec, *more_groups))
            ],
        )
        self.config = config
        self.clock = clock or Clock()
        self.scheduler = scheduler_class(
            config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._numbers = 0

    def schedule(self) -> SchedulerOutput:
        """Schedule an iteration. vLLM's engine core asks for a grammar bitmask once the workers have it."""
        output: SchedulerOutput = self.scheduler.schedule()
        self.scheduler.get_grammar_bitmask(output)
        return output

    def request(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 16,
        *,
        offline: bool = False,
        age_s: float = 0.0,
        **params: Any,
    ) -> Request:
        """One with so many prompt tokens (no beginning is another's) or these."""
        self._numbers += 1
        return Request(
            request_id=f"{'off' if offline else 'on'}-{self._numbers}",
            prompt_token_ids=self._made_up(prompt) if isinstance(prompt, int) else list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
            pooling_params=None,
            arrival_time=self.clock.time() - age_s,
            priority=OFFLINE_PRIORITY if offline else 0,
            block_hasher=self._hasher,
        )

    def _made_up(self, count: int) -> list[int]:
        again, first = divmod(self._numbers, 997)
        return [first, again, *((first + i * 31) % 997 for i in range(2, count))][:count]
