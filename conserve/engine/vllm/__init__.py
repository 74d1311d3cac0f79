"""The adapter to vLLM; nothing outside this package and `conserve.vllm` imports vLLM or torch."""

import warnings
from importlib import import_module
from typing import Any

RENAMED = {
    "CoServingScheduler": "Scheduler",
    "Worker": "Worker",
    "CheckpointConnector": "CheckpointConnector",
}


def __getattr__(name: str) -> Any:
    """Give one of the classes of `conserve.vllm` under its former name, for one more release."""
    if name not in RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = f"conserve.vllm.{RENAMED[name]}"
    warnings.warn(
        f"{__name__}.{name} is now called {new}; write that into vLLM's flags", FutureWarning, stacklevel=2
    )
    return getattr(import_module("conserve.vllm"), RENAMED[name])
