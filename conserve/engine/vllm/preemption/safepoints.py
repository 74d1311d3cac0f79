"""Safepoints in vLLM's models: between decoder layers, or in attention calls where layers cannot be wrapped.

A safepoint between layers needs a model that runs as written (eager mode); there, rows can leave while others stay.
So they can between the pieces of a compiled model (`pieces`), if it can be divided. Other compiled models call
attention from Python too, so a safepoint there can abandon the whole iteration. Where a pass is one CUDA graph
(`CUDAGraphMode.FULL`, decode steps only), no Python runs within it and there are no safepoints; no iteration is
shorter than these.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from conserve.engine.runtime.launches import Launches
from conserve.engine.vllm.iteration import Stamp

if TYPE_CHECKING:
    from conserve.engine.runtime.safepoint import Word
    from conserve.engine.vllm.preemption.rows import RunnerRows


class Abandoned(BaseException):
    """Unwinds a forward pass that all requests have left; no `Exception`, so that no model swallows it."""


class Orders(Protocol):
    """Tells every rank the same number of rows that are to leave."""

    def rows_ordered(self, stamp: Stamp) -> int:
        """Number of the stamp's first rows that are to leave, or `ALL_ROWS`."""

    def refused(self, stamp: Stamp) -> bool:
        """Note that an iteration scheduled ahead starts, unless it is to be refused: then return True."""

    def word(self, stamp: Stamp) -> Word | None:
        """The word that the iteration's orders come in; None where they have to be asked for."""

    @property
    def flag_readable(self) -> bool:
        """True if orders can be read."""


class Safepoints:
    """Reads the orders before every N-th layer of a stamped iteration."""

    def __init__(self, orders: Orders, layers: int, launches: Launches | None = None) -> None:
        self.layers = layers
        self.left_before = 0  # layer before which the first row left
        self.stamp: Stamp | None = None
        self._orders = orders
        self._launches = launches  # None where the host itself computes
        self._asked = 0  # rows that were told to leave so far
        self._word: Word | None = None  # that orders for this iteration come in

    def arm(self, stamp: Stamp) -> None:
        """Begin a stamped iteration."""
        self.stamp, self._word = stamp, self._orders.word(stamp)
        self.left_before = self._asked = 0
        if self._launches is not None:
            self._launches.begin()

    def disarm(self) -> None:
        """End the stamped iteration; no safepoint looks until the next `arm`."""
        self.stamp = self._word = None

    def check(self, layer: int) -> int:
        """Check the orders before this layer: the number of first rows that leave, or 0 if it has not grown."""
        stamp = self.stamp
        if stamp is None or layer % stamp.every:
            return 0
        if self._launches is not None:
            self._launches.keep_up()
        word = self._word  # mostly enough, and half of the time: the layers have emptied the caches
        if word is not None and word.words[word.slot] <= word.known:
            return 0
        rows = self._orders.rows_ordered(stamp)
        if rows <= self._asked:
            return 0
        self.finish_launched()
        if not self._asked:
            self.left_before = layer
        self._asked = rows
        return rows

    def order(self) -> Word | None:
        """The word to look at instead of `check`, until an order comes; None if `check` has to be called."""
        return self._word if self._launches is None else None

    def refused(self, stamp: Stamp) -> bool:
        """True if the iteration, which was scheduled ahead, is to be refused before it starts."""
        return self._orders.refused(stamp)

    @property
    def flag_readable(self) -> bool:
        """True if orders can be read."""
        return self._orders.flag_readable

    def finish_launched(self) -> None:
        """Wait for the device, which may still read the buffers that are about to be written."""
        if self._launches is not None:
            self._launches.finish()

    def abandon_if_asked(self, layer: int) -> None:
        """The safepoint where rows cannot leave on their own: raises `Abandoned` if any is to leave."""
        if self.check(layer):
            raise Abandoned


def decoder_layers(model: nn.Module, count: int) -> Sequence[nn.Module] | None:
    """The model's decoder layers: its outermost list of `count` modules with attention; None without one."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(any("att" in name for name, _ in layer.named_modules()) for layer in module)
    ]
    inside = set(found[0].modules()) if found else set()
    return list(found[0]) if found and inside.issuperset(found) else None


def between_layers(layers: Sequence[nn.Module], safepoints: Safepoints, rows: RunnerRows | None) -> None:
    """Put a safepoint before each layer, and run the layer on the rows that are in the pass."""
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
    """Methods under which an attention implementation is called: one, or two with latent attention (MLA)."""
    return [name for name in ("forward", "forward_mqa", "forward_mha") if hasattr(attention, name)]
