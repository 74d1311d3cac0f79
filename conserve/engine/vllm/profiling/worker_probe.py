"""Probes of the profiler in vLLM's workers, added to them by `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

from conserve.engine.runtime.copies import CopyTimes, time_copies
from conserve.engine.runtime.safepoint import check_us


class WorkerProbe:
    """Mixed into vLLM's worker class; `collective_rpc` calls its methods."""

    model_runner: Any
    vllm_config: Any

    def conserve_copies(self, num_blocks: int, counts: list[int]) -> list[CopyTimes]:
        """Times of KV copies (see `time_copies`), without state of other shapes such as that of Mamba layers."""
        state = self.model_runner.kv_caches
        caches = [cache for cache in state if hasattr(cache, "shape") and num_blocks in cache.shape]
        return time_copies(caches, num_blocks, counts) if caches else []

    def conserve_safepoint(self) -> tuple[float, int]:
        """Time of a look at the flag in microseconds, and the number of layers, of which each has a safepoint."""
        config = self.vllm_config
        return check_us(), config.model_config.get_num_layers(config.parallel_config)
