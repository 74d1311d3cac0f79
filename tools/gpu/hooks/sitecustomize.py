"""Hooks in the servers of a measurement, by the module that Python imports at its start.

No other process has this folder in its path. `KIT_NOTES` names a file for a line of JSON on each iteration.
`KIT_BESIDE` names the log of a stock server on the same GPU, whose start the warm-up waits for.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

NOTES, BESIDE = "KIT_NOTES", "KIT_BESIDE"
ANSWERS = "Application startup complete"
WAIT_S, LOOK_S = 90.0, 0.3
FLUSH_EACH = 100  # iterations
FIELDS = (
    *("started", "took_ms", "lasted_ms", "batch_ms", "device_ms", "batch"),
    *("cold", "follows", "ahead", "overlapped", "stamped"),
    *("planned_ms", "online_ms", "limit_ms", "left", "refused", "predicted_ms", "scale"),
)


def note_iterations(module: Any) -> None:
    """Have every iteration that the scheduler learns from noted, behind what it learns."""
    learn = module.Iterations.learn
    place = Path(f"{os.environ[NOTES]}.{os.getpid()}")
    file = place.open("a", buffering=1 << 16)
    print(json.dumps(FIELDS), file=file)

    def noted(self: Any, iteration: Any) -> None:
        learn(self, iteration)
        print(json.dumps(line(self.model, iteration)), file=file)
        if self.counted % FLUSH_EACH == 0:
            file.flush()

    module.Iterations.learn = noted


def line(model: Any, one: Any) -> list[Any]:
    """One iteration, by `FIELDS`."""
    batch, plan, device = one.batch, one.plan, one.device
    return [
        *(round(one.started, 5), round(1e3 * one.took_s, 3), short(one.lasted_ms), short(one.batch_ms)),
        [short(device.own_ms), short(device.since_last_ms)] if device is not None else None,
        [*astuple(batch)] if batch is not None else None,
        *(one.cold, one.follows, one.ahead, one.overlapped, one.stamp is not None),
        *([short(plan.predicted_ms), short(plan.online_ms), short(plan.limit_ms)] if plan else [None] * 3),
        *(len(one.left), one.refused),
        short(model.predict(batch)) if model is not None and batch is not None else None,
        short(model.scale) if model is not None else None,
    ]


def short(value: float | None) -> float | None:
    """A figure that JSON has; infinity is none."""
    return round(value, 3) if value is not None and abs(value) < 1e9 else None


def wait_for_stock(module: Any) -> None:
    """Have the warm-up wait until the stock server answers, whose start takes time of the GPU."""
    learn, log = module.learn, Path(os.environ[BESIDE])

    async def waited(*given: Any, **named: Any) -> None:
        began = time.monotonic()
        while time.monotonic() - began < WAIT_S and not (
            log.exists() and ANSWERS in log.read_text(errors="replace")
        ):
            await asyncio.sleep(LOOK_S)
        print(f"the warm-up waited {time.monotonic() - began:.1f} s for stock vLLM", flush=True)
        await learn(*given, **named)

    module.learn = waited


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "conserve.engine.vllm.scheduling.iterations": (NOTES, note_iterations),
    "conserve.engine.vllm.profiling.learning": (BESIDE, wait_for_stock),
}


class Changer(importlib.abc.MetaPathFinder):
    """Finds the modules that a hook changes, each once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, whose loader changes the module behind its code."""
        variable, change = CHANGES.pop(name, ("", None))
        if change is None or variable not in os.environ:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def then_change(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = then_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Changer())
