"""vLLM's own worker on this platform, in whose iterations rows stay."""

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker

__all__ = ["VllmWorker"]
