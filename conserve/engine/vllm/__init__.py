"""vLLM with ConServe in it; nothing outside this package imports vLLM or torch.

What vLLM is told by name, in flags and configurations that users write too, stands here under a name that lasts:
`conserve.engine.vllm.CoServingScheduler`, `Worker` and `CheckpointConnector`.
"""

from importlib import import_module
from typing import Any

NAMED = {
    "CoServingScheduler": "scheduling.scheduler",
    "Worker": "preemption.worker",
    "CheckpointConnector": "checkpoint.connector",
}


def __getattr__(name: str) -> Any:
    """Import what vLLM asks for, once it asks."""
    if name not in NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{NAMED[name]}"), name)
