"""Weights that are replaced in a running engine (`/start_weight_update` and what follows, `/reload_weights`).

From then on the answers are another model's, and so is the KV. An engine that starts anew has the old weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

UPDATING = ("finish_weight_update", "reload_weights", "update_weights")  # calls of the workers
UPDATES = "conserve_weight_updates"  # attribute of the engine core: such calls since its start
AT_START = "default"  # vLLM's name for weights without a version


def noting_updates(rpc: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineCore.collective_rpc`: count updates of weights, which need no version."""

    @functools.wraps(rpc)
    def wrapped(core: Any, method: Any, *args: Any, **rest: Any) -> Any:
        if method in UPDATING:
            setattr(core, UPDATES, getattr(core, UPDATES, 0) + 1)
        return rpc(core, method, *args, **rest)

    return wrapped


def version_of(core: Any) -> str:
    """Version of the engine core's weights, and how often they were updated, if ever."""
    updates, named = getattr(core, UPDATES, 0), getattr(core, "get_weight_version", None)
    version = str(named()) if named is not None else AT_START  # of an older vLLM
    return f"{version}.{updates}" if updates else version


def updated_version(core: Any) -> str | None:
    """`version_of`; None for the weights that the engine started with."""
    version = version_of(core)
    return None if version == AT_START else version
