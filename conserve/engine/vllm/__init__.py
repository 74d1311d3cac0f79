"""The adapter to vLLM; nothing outside this package and `conserve.vllm` imports vLLM or torch."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

STABLE = "conserve.vllm"


def former(place: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` for the module `place`: names of `conserve.vllm` under former ones, for one release."""

    def give(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {place!r} has no attribute {name!r}")
        told = f"{place}.{name} is now called {STABLE}.{renamed[name]}; write that into vLLM's flags"
        warnings.warn(told, FutureWarning, stacklevel=2)  # Python hides a DeprecationWarning from users
        return getattr(import_module(STABLE), renamed[name])

    return give


__getattr__ = former(
    __name__,
    {"CoServingScheduler": "Scheduler", "Worker": "Worker", "CheckpointConnector": "CheckpointConnector"},
)
