"""The checkpoints of an engine as its scheduler finds them, also on a vLLM that checkpoints do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conserve.engine.vllm.compat.internals import Part
from conserve.engine.vllm.compat.trial import lost_parts


@dataclass(slots=True)
class CopyCounts:
    """Counts since the engine started."""

    blocks_saved: int = 0
    blocks_restored: int = 0
    tokens_restored: int = 0
    restores: int = 0
    blocks_failed: int = 0  # failed copies


def checkpoints_of(connector: Any) -> tuple[Any, str | None]:
    """Checkpoints of the engine's KV connector, which may be one of several; or the reason that it has none."""
    for one in getattr(connector, "_connectors", (connector,)):
        if hasattr(one, "checkpoints"):
            return one.checkpoints, one.why_not
    changed = lost_parts().get(Part.CHECKPOINTS)
    return None, None if changed is None else f"vLLM has changed: {changed}"
