"""Key of a latency profile, read off vLLM's configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from conserve.engine.runtime.machine import BINDING, RESERVED, cores, cpu_model
from conserve.engine.vllm.compat.installed import installed_engine
from conserve.engine.vllm.model.fingerprint import folder_of, model_identity
from conserve.profiles.points import IterationLimits
from conserve.profiles.profile import ProfileKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def key_of(config: VllmConfig) -> ProfileKey:
    """Profile key of an engine with this configuration."""
    from vllm.platforms import current_platform

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    engine = installed_engine()
    # Engines that are independent are alike, however many there are.
    engines = parallel.data_parallel_size
    lockstep = engines if engines > 1 and model.is_moe else 1
    folder = folder_of(model.model, model.revision)
    name = "" if folder is not None else model.model
    flags = {
        "enforce_eager": model.enforce_eager,
        "compilation_mode": config.compilation_config.mode,
        "cudagraph_mode": config.compilation_config.cudagraph_mode,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "expert_parallel": parallel.enable_expert_parallel,
        "quantization": model.quantization,
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
        "prefix_caching": cache.enable_prefix_caching,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "executor": parallel.distributed_executor_backend,
        "attention_backend": config.attention_config.backend,
        "speculative": config.speculative_config.method if config.speculative_config else None,
        "lora": config.lora_config is not None,
    }
    if (v2 := config.use_v2_model_runner) == current_platform.is_cpu():  # not the one that is usual there
        flags["model_runner"] = "V2" if v2 else "V1"  # the host's work in an iteration is another
    if graphs := config.compilation_config.max_cudagraph_capture_size:
        flags["cudagraph_tokens"] = graphs  # larger iterations wait for their launches
    return ProfileKey(
        model=model_identity(name, folder, (model.quantization, model.hf_overrides)).strip("@"),
        dtype=str(model.dtype).removeprefix("torch."),
        device=device(),
        parallelism=f"tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size} dp={lockstep}",
        engine=f"{engine.distribution} {engine.version}" if engine else "none",
        flags={name: str(value) for name, value in flags.items()},
    )


def limits_of(config: VllmConfig) -> IterationLimits:
    """Largest iteration that the started engine can hold."""
    cache, scheduler = config.cache_config, config.scheduler_config
    block_tokens = cache.block_size or 1
    return IterationLimits(
        tokens=scheduler.max_num_batched_tokens,
        requests=scheduler.max_num_seqs,
        context=config.model_config.max_model_len,
        kv_tokens=((cache.num_gpu_blocks or 1) - 1) * block_tokens,
        block_tokens=block_tokens,
    )


def device() -> str:
    """The device and, for a CPU, the part of it that the engine computes on."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    reserved = os.environ.get(RESERVED, "default")
    bind = os.environ.get(BINDING, "auto")
    return f"{cpu_model()}, {cores().usable} cores, {reserved} reserved, threads bound {bind}"
