"""The adapter to vLLM; nothing outside this package imports vLLM or torch.

Users write three names into vLLM's own flags and configurations. They stay valid here when modules move:
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
    """Import one of the three classes when vLLM asks for it."""
    if name not in NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{NAMED[name]}"), name)
