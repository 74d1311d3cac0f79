"""Rows that leave a compiled pass between its pieces, and join a later one at the piece where they left.

Between two segments of the pass rows leave and join as they do between decoder layers: variables with an entry a
token are cut down or filled up, the others stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from conserve.engine.vllm.preemption.layouts import Layout, layouts_of, results_in
from conserve.engine.vllm.preemption.rows import Key, RunnerRows
from conserve.engine.vllm.preemption.runner import Runner
from conserve.engine.vllm.preemption.safepoints import Safepoints
from conserve.engine.vllm.preemption.segments import RESULT, NotDivisible, Segments, Stitched


def pieces_of(found: Sequence[Stitched], config: Any, runner: Runner, safepoints: Safepoints) -> Pieces:
    """Prepare the compiled model of a worker for rows that leave; raises `NotDivisible`."""
    if len(found) != 1:
        raise NotDivisible(f"{len(found)} parts of the model are compiled on their own")
    if config.compilation_config.fast_moe_cold_start:
        raise NotDivisible("experts are counted as they are called (fast_moe_cold_start)")
    segments = found[0].segments()
    if len(segments.codes) != safepoints.layers + 1:
        raise NotDivisible(f"{len(segments.codes)} segments in {safepoints.layers} layers")
    layouts = layouts_of(found[0], segments, runner.run_dummy, runner.most_tokens)
    rows = Pieces(runner, safepoints, segments, layouts)
    rows.install(found[0])
    return rows


class Pieces(RunnerRows):
    """Rows of vLLM's model runner while the pieces of a compiled model run."""

    def __init__(
        self, runner: Runner, safepoints: Safepoints, segments: Segments, layouts: Sequence[Layout]
    ) -> None:
        super().__init__(runner, safepoints)
        self._segments = segments
        self._layouts = layouts
        self._watched: dict[int, Callable[..., Any]] = {}  # by layers between safepoints
        name, axis = next(iter(layouts[0].tensors.items()))
        self._tokens_of = segments.names.index(name), axis.dimension  # an argument with an entry a token

    def install(self, stitched: Stitched) -> None:
        """Run passes that rows may leave or join in segments, and all others as vLLM does."""

        def guarded(*args: Any) -> Any:
            return self.forward(args) if self.busy else stitched.whole(*args)

        stitched.run = guarded

    def forward(self, args: Sequence[Any]) -> Any:
        """Run the pass in one go until an order comes, and from there on segment by segment."""
        argument, dimension = self._tokens_of
        self._total = args[argument].shape[dimension]  # with vLLM's padding
        order = None if self._suspended else self._safepoints.order()
        if order is None:
            return self._by_segments(0, dict(zip(self._segments.names, args, strict=True)))
        assert self._safepoints.stamp is not None
        every = self._safepoints.stamp.every
        if every not in self._watched:
            self._watched[every] = self._segments.watched(every)
        return self._watched[every](*args, *order, self._by_segments)

    def _by_segments(self, first: int, variables: dict[str, Any]) -> Any:
        """Run the segments from the `first` one on, each on the rows that are in the pass by then."""
        segments = self._segments
        last = len(segments.codes) - 1
        for index in range(first, last + 1):
            if index < last:  # as many safepoints as layers
                self._change_at(index, variables)
            if self._in is None or len(self._in):  # else all rows of the pass join later
                segments.run(index, variables)
        return variables[RESULT] if self._in is None else self._results(variables)

    def _results(self, variables: Mapping[str, Any]) -> Any:
        """The pass's results in their full size."""
        axes = self._layouts[-1].tensors
        found = enumerate(results_in(variables))
        whole = tuple(axes[str(n)].back(self._whole(axes[str(n)].forwards(value))) for n, value in found)
        return whole if isinstance(variables[RESULT], tuple) else whole[0]

    def _change_at(self, index: int, variables: dict[str, Any]) -> None:
        """Let rows leave and join before a segment."""
        rows = self._safepoints.check(index)
        if not rows and index not in self._joining and (index or not self._suspended):
            return
        layout = self._layouts[index]
        inputs: dict[Key, Any] = {
            name: axis.forwards(variables[name]) for name, axis in layout.tensors.items() if name in variables
        }
        self._exchange(rows, index, inputs)
        if self._in is None:
            return
        for name, value in inputs.items():
            assert isinstance(name, str)
            variables[name] = layout.tensors[name].back(value)
        variables.update({name: times * len(self._in) for name, times in layout.numbers.items()})

    def _change(self, inputs: dict[Key, Any], coming: Any = None) -> None:
        super()._change(inputs, coming)
        # A CUDA graph is of one number of tokens. From here on the compiled pieces run without, on any number.
        get_forward_context().cudagraph_runtime_mode = CUDAGraphMode.NONE

    def _is_per_token(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)
