"""Safepoints in vLLM's models: between decoder layers, or in each attention call where there are no others.

Between layers works where the model runs as written (eager mode); there, rows can leave while the others go on.
A compiled model runs in pieces that share one number of tokens; but attention is called from between the pieces,
in every mode, and so can look at the flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from conserve.engine.runtime.safepoint import EVERYBODY
from conserve.engine.vllm.stamp import Stamp


class Abandoned(BaseException):
    """Unwinds a forward pass that nobody wants any more; no `Exception`, so that no model swallows it."""


class Orders(Protocol):
    """Tells all ranks alike who is to leave."""

    def rows_to_leave(self, stamp: Stamp) -> int:
        """How many of the stamp's rows, or `EVERYBODY`."""


class Rows(Protocol):
    """Takes rows out of the forward pass that is under way."""

    @property
    def left(self) -> int:
        """How many of the stamp's rows have left."""

    def leave(self, rows: int) -> bool:
        """Let the first so many leave before the layer that comes next; False if nobody would be left."""


class Safepoints:
    """Looks at the orders before every N-th layer of an iteration that has a stamp."""

    def __init__(self, orders: Orders, layers: int, rows: Rows | None) -> None:
        self.layers = layers
        self.rows = rows
        self.left_before = 0  # the layer before which somebody left first
        self.stamp: Stamp | None = None
        self._orders = orders

    def arm(self, stamp: Stamp) -> None:
        """An iteration begins."""
        self.stamp = stamp
        self.left_before = 0

    def disarm(self) -> None:
        """It is over; the next one has no safepoints until they are armed."""
        self.stamp = None

    def before(self, layer: int) -> None:
        """The safepoint: raises `Abandoned`, or takes rows out."""
        stamp = self.stamp
        if stamp is None or layer % stamp.every:
            return
        wanted = self._orders.rows_to_leave(stamp)
        rows = self.rows
        if not wanted or (rows is not None and wanted <= rows.left):
            return
        if rows is None or not rows.left:
            self.left_before = layer
        if wanted == EVERYBODY or rows is None or not rows.leave(wanted):
            raise Abandoned


def decoder_layers(model: nn.Module, count: int) -> Sequence[nn.Module] | None:
    """The model's decoder layers in order: the one list of that length whose members hold attention."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(any("att" in name for name, _ in layer.named_modules()) for layer in module)
    ]
    inside = set(found[0].modules()) if found else set()
    return list(found[0]) if found and inside.issuperset(found) else None


def between_layers(
    layers: Sequence[nn.Module], safepoints: Safepoints, wrap: Callable[..., Callable[..., Any]]
) -> None:
    """Put a safepoint before each layer; `wrap(forward, index)` makes the layer run on the rows that are left."""
    for index, layer in enumerate(layers):
        forward = wrap(layer.forward, index)

        @functools.wraps(layer.forward)
        def guarded(
            *args: Any, _plain: Any = layer.forward, _forward: Any = forward, _i: int = index, **kw: Any
        ) -> Any:
            if safepoints.stamp is None:
                return _plain(*args, **kw)
            safepoints.before(_i)
            return _forward(*args, **kw)

        layer.forward = guarded


def in_attention(context: Mapping[str, Any], safepoints: Safepoints) -> int:
    """Put a safepoint into each attention layer's call; returns how many there are."""
    layers = [layer for layer in context.values() if hasattr(getattr(layer, "impl", None), "forward")]
    for index, layer in enumerate(layers):
        attend = layer.impl.forward

        @functools.wraps(attend)
        def guarded(*args: Any, _attend: Any = attend, _i: int = index, **kw: Any) -> Any:
            if safepoints.stamp is not None:
                safepoints.before(_i)
            return _attend(*args, **kw)

        layer.impl.forward = guarded
    return len(layers)
