"""Names that users write into vLLM's own flags. They stay valid while the modules behind them move.

    --scheduler-cls conserve.vllm.Scheduler
    --worker-cls conserve.vllm.Worker
    --kv-transfer-config '{"kv_connector": "CheckpointConnector", "kv_connector_module_path": "conserve.vllm", ...}'
    --middleware conserve.vllm.Guard

`conserve serve MODEL --print-flags` prints the whole command for a `vllm serve` of the user's own.
"""

from importlib import import_module
from typing import Any

from conserve.errors import EndpointUnusable

ROOMS = "conserve.engine.vllm"
NAMED = {
    "Scheduler": ("scheduling.scheduler", "CoServingScheduler"),
    "Worker": ("preemption.worker", "Worker"),
    "CheckpointConnector": ("checkpoint.connector", "CheckpointConnector"),
    "Guard": ("server.guard", "RequestGuard"),
}


def __getattr__(name: str) -> Any:
    """Import one of the classes when vLLM asks for it."""
    if name not in NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Worker" and _is_lost("LEAVING"):
        from conserve.engine.vllm.compat.vllms_worker import VllmWorker

        return VllmWorker
    if name == "CheckpointConnector" and (cause := _is_lost("CHECKPOINTS")):
        raise EndpointUnusable(
            f"vLLM has changed: {cause}; leave CheckpointConnector out of --kv-transfer-config"
        )
    module, cls = NAMED[name]
    return getattr(import_module(f"{ROOMS}.{module}"), cls)


def _is_lost(part: str) -> str | None:
    """Cause for which the installed vLLM does without a part; None if it has the part."""
    from conserve.engine.vllm.compat import internals, trial

    return trial.lost_parts().get(internals.Part[part])
