"""CUDA graphs of compiled pieces, played on a CPU: fixed sizes, and memory that the next pass overwrites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from vllm.compilation import backends
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

SIZE = 16  # graphs are of its multiples


class Graph:
    """A piece as a CUDA graph has it, in the place of vLLM's `CUDAGraphWrapper`."""

    def __init__(self, piece: Any) -> None:
        self.piece = piece
        self.replays = 0
        self._memory: dict[int, list[torch.Tensor]] = {}  # results by size

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode == CUDAGraphMode.NONE:
            return self.piece(*args)
        assert context.batch_descriptor is not None
        size = context.batch_descriptor.num_tokens
        assert args[self.piece.sym_shape_indices[0]] == size, "a graph is of one number of tokens"
        self.replays += 1
        results = self.piece(*args)
        memory = self._memory.setdefault(size, [result.clone() for result in results])
        for place, result in zip(memory, results, strict=True):
            place.copy_(result)
        return tuple(memory)

    def overwrite(self) -> None:
        """The pass is over; nothing that is read from its memory from now on is right by chance."""
        for memory in self._memory.values():
            for place in memory:
                place.fill_(1e9 if place.is_floating_point() else 0)


class Graphs:
    """All pieces of a model, and passes padded to a size of graphs, as vLLM's model runner does on a GPU."""

    def __init__(self) -> None:
        self.pieces: list[Graph] = []

    @contextmanager
    def replacing_vllms(self) -> Iterator[None]:
        """Models that are compiled meanwhile have these graphs."""

        def wrapped(piece: Any, *_: Any) -> Graph:
            self.pieces.append(Graph(piece))
            return self.pieces[-1]

        with mock.patch.object(backends, "wrap_with_cudagraph_if_needed", wrapped):
            yield

    @contextmanager
    def installed(self, worker: Any) -> Iterator[None]:
        """Pad each pass meanwhile, and replay graphs."""
        (stitched,) = worker._stitched
        inner, arguments = stitched.run, worker._rows._segments.names
        layout = worker._rows._layouts[0]

        def padded(*args: Any) -> Any:
            given = dict(zip(arguments, args, strict=True))
            tokens = len(given[next(iter(layout.tensors))])
            size = -(-tokens // SIZE) * SIZE
            for name in layout.tensors:
                given[name] = torch.cat([given[name], given[name].new_zeros(size - tokens)])
            given.update(dict.fromkeys(layout.numbers, size))
            context = get_forward_context()
            context.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
            context.batch_descriptor = BatchDescriptor(size)
            assert isinstance(context.slot_mapping, dict)
            context.slot_mapping = {
                name: torch.cat([slots, slots.new_full((size - len(slots),), PAD_SLOT_ID)])
                for name, slots in context.slot_mapping.items()
            }
            result = tuple(one[:tokens].clone() for one in inner(*given.values()))
            for piece in self.pieces:
                piece.overwrite()
            return result

        with mock.patch.object(stitched, "run", padded):
            yield
