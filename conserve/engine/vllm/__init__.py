"""The adapter to vLLM; nothing outside this package imports vLLM or torch.

Users write three names into vLLM's own flags and configurations. They stay valid here when modules move:
`conserve.engine.vllm.CoServingScheduler`, `Worker` and `CheckpointConnector`.
"""

from importlib import import_module
from typing import Any

from conserve.errors import EndpointUnusable

NAMED = {
    "CoServingScheduler": "scheduling.scheduler",
    "Worker": "preemption.worker",
    "CheckpointConnector": "checkpoint.connector",
}


def __getattr__(name: str) -> Any:
    """Import one of the three classes when vLLM asks for it."""
    if name not in NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Worker" and _is_lost("LEAVING"):
        return _vllms_worker()
    if name == "CheckpointConnector" and (cause := _is_lost("CHECKPOINTS")):
        raise EndpointUnusable(
            f"vLLM has changed: {cause}; leave CheckpointConnector out of --kv-transfer-config"
        )
    return getattr(import_module(f"{__name__}.{NAMED[name]}"), name)


def _is_lost(part: str) -> str | None:
    """Cause for which the installed vLLM does without a part; None if it has the part."""
    from conserve.engine.vllm.compat import internals, trial

    return trial.lost_parts().get(internals.Part[part])


def _vllms_worker() -> Any:
    """vLLM's own worker, in whose iterations rows stay."""
    from vllm.platforms import current_platform

    kind = "cpu_worker.CPUWorker" if current_platform.is_cpu() else "gpu_worker.Worker"
    module, _, name = f"vllm.v1.worker.{kind}".rpartition(".")
    return getattr(import_module(module), name)
