"""Safepoints in vLLM's models: between decoder layers, or in each attention call where there are no others.

Between layers works where the model runs as written (eager mode); there, rows can leave while the others go on.
A compiled model runs in pieces that share one number of tokens; but attention is called from between the pieces,
and so can look at the flag. Where a whole pass is one CUDA graph (`CUDAGraphMode.FULL`, decode steps only), no
Python runs within it: no safepoints, and nothing to do about it, since no iteration is shorter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from conserve.engine.runtime.launches import Launches
from conserve.engine.vllm.iteration import Stamp

if TYPE_CHECKING:
    from conserve.engine.vllm.preemption.rows import Rows


class Abandoned(BaseException):
    """Unwinds a forward pass that nobody wants any more; no `Exception`, so that no model swallows it."""


class Orders(Protocol):
    """Tells all ranks alike who is to leave."""

    def rows_to_leave(self, stamp: Stamp) -> int:
        """How many of the stamp's rows, or `ALL_ROWS`."""

    @property
    def heard(self) -> bool:
        """Whether orders can be heard at all."""


class Safepoints:
    """Looks at the orders before every N-th layer of an iteration that has a stamp."""

    def __init__(self, orders: Orders, layers: int, launches: Launches | None = None) -> None:
        self.layers = layers
        self.left_before = 0  # the layer before which somebody left first
        self.stamp: Stamp | None = None
        self._orders = orders
        self._launches = launches  # None where the host itself computes
        self._asked = 0  # rows that were told to leave

    def arm(self, stamp: Stamp) -> None:
        """An iteration begins."""
        self.stamp = stamp
        self.left_before = self._asked = 0
        if self._launches is not None:
            self._launches.begin()

    def disarm(self) -> None:
        """It is over; the next one has no safepoints until they are armed."""
        self.stamp = None

    def rows_to_leave(self, layer: int) -> int:
        """The safepoint before this layer: how many of the stamp's rows are to leave now, if that is news."""
        stamp = self.stamp
        if stamp is None or layer % stamp.every:
            return 0
        if self._launches is not None:
            self._launches.keep_up()
        rows = self._orders.rows_to_leave(stamp)
        if rows <= self._asked:
            return 0
        self.finish_launched()
        if not self._asked:
            self.left_before = layer
        self._asked = rows
        return rows

    @property
    def heard(self) -> bool:
        """Whether orders can be heard at all."""
        return self._orders.heard

    def finish_launched(self) -> None:
        """Wait for the device before buffers are written that it may still read."""
        if self._launches is not None:
            self._launches.finish()

    def abandon_if_asked(self, layer: int) -> None:
        """The same where rows cannot leave on their own: raises `Abandoned`."""
        if self.rows_to_leave(layer):
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


def between_layers(layers: Sequence[nn.Module], safepoints: Safepoints, rows: Rows | None) -> None:
    """Put a safepoint before each layer, and have it run on the rows that are in."""
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        forward = layer.forward

        @functools.wraps(forward)
        def guarded(*args: Any, _forward: Any = forward, _index: int = index, **kw: Any) -> Any:
            if rows is not None and rows.busy:
                return rows.run(_index, _index == last, _forward, args, kw)
            if safepoints.stamp is not None:
                safepoints.abandon_if_asked(_index)
            return _forward(*args, **kw)

        layer.forward = guarded


def in_attention(context: Mapping[str, Any], safepoints: Safepoints) -> int:
    """Put a safepoint into each attention layer's call; returns how many there are."""
    layers = [layer for layer in context.values() if calls_of(getattr(layer, "impl", None))]
    for index, layer in enumerate(layers):
        for name in calls_of(layer.impl):
            attend = getattr(layer.impl, name)

            @functools.wraps(attend)
            def guarded(*args: Any, _attend: Any = attend, _index: int = index, **kw: Any) -> Any:
                if safepoints.stamp is not None:
                    safepoints.abandon_if_asked(_index)
                return _attend(*args, **kw)

            setattr(layer.impl, name, guarded)
    return len(layers)


def calls_of(attention: Any) -> list[str]:
    """The names under which an attention implementation is called: one, or two with latent attention (MLA)."""
    return [name for name in ("forward", "forward_mqa", "forward_mha") if hasattr(attention, name)]
