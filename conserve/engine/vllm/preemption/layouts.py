"""Variables of a compiled pass that have an entry a token: those that differ between passes of two sizes.

vLLM loads compiled models from a cache, without the graphs that they were compiled from. So the shapes are noted in
two passes at the start, which attend to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from conserve.engine.vllm.preemption.segments import RESULT, NotDivisible, Segments, Stitched

TRIED_TOKENS = (17, 29)  # not round: a number of tokens that is rounded up would look like the number itself
# In names that Dynamo gives to a model's own tensors.
OF_THE_MODEL = ("_parameters_", "_buffers_", "_closure_")


class Shape(NamedTuple):
    """A tensor's sizes, and how they lie in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous


class Axis(NamedTuple):
    """The dimension of a tensor that is the tokens."""

    dimension: int
    strides: tuple[int, ...] | None  # of the tensor, whatever the number of tokens; None: contiguous

    def forwards(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor with the tokens in front."""
        return value.movedim(self.dimension, 0)

    def back(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor with the tokens in their place, laid out as compiled code expects it."""
        value = value.movedim(0, self.dimension)
        if self.strides is None:
            return value.contiguous().flatten().view(value.shape)  # a dimension of one entry has a stride too
        laid_out = torch.empty_strided(value.shape, self.strides, dtype=value.dtype, device=value.device)
        return laid_out.copy_(value)


@dataclass(frozen=True, slots=True)
class Layout:
    """Live variables before a segment that change with the number of tokens."""

    tensors: Mapping[str, Axis]
    numbers: Mapping[str, int]  # multiples of the number of tokens


@dataclass(frozen=True, slots=True)
class Seen:
    """One pass: the live variables before each segment as they were, and at the end the results."""

    tokens: int
    variables: Sequence[Mapping[str, Any]]  # `Shape` of a tensor, or the value of an integer


def layouts_of(stitched: Stitched, segments: Segments, run: Callable[[int], Any], most: int) -> list[Layout]:
    """Layouts before each segment and of the results (named by their places); raises `NotDivisible`.

    `run` starts a pass of so many tokens; `most` is the greatest number.
    """
    if most < max(TRIED_TOKENS):
        raise NotDivisible(f"a pass has at most {most} tokens")
    one, other = (seen(stitched, segments, run, tokens) for tokens in TRIED_TOKENS)
    if not layout_of(one, other, 0, segments.names).tensors:
        raise NotDivisible("no argument has an entry a token")
    for name, value in one.variables[0].items():
        if (
            isinstance(value, Shape)
            and most in value.sizes
            and not any(kind in name for kind in OF_THE_MODEL)
        ):
            raise NotDivisible(f"pieces may read {name} token by token")
    return [layout_of(one, other, index, segments.names) for index in range(len(one.variables))]


def seen(stitched: Stitched, segments: Segments, run: Callable[[int], Any], tokens: int) -> Seen:
    """Run one pass of so many tokens, and note its variables."""
    passes: list[Seen] = []

    def watching(*args: Any) -> Any:
        variables = dict(zip(segments.names, args, strict=True))
        before = []
        for index, live in enumerate(segments.live):
            before.append({name: described(variables[name]) for name in live})
            assert_apart({name: variables[name] for name in live - set(segments.names)})
            segments.run(index, variables)
        before.append({str(n): described(value) for n, value in enumerate(results_in(variables))})
        passes.append(Seen(tokens, before))
        return variables[RESULT]

    stitched.run = watching
    try:
        run(tokens)
    finally:
        stitched.run = stitched.whole
    if len(passes) != 1:
        raise NotDivisible(f"a pass ran through the pieces {len(passes)} times")
    return passes[0]


def results_in(variables: Mapping[str, Any]) -> tuple[Any, ...]:
    """The pass's results, be it one alone."""
    result = variables[RESULT]
    return result if isinstance(result, tuple) else (result,)


def described(value: Any) -> Any:
    """Shape of a tensor, an integer itself, or None."""
    if isinstance(value, torch.Tensor):
        return Shape(tuple(value.shape), None if value.is_contiguous() else value.stride())
    return value if isinstance(value, int) else None


def assert_apart(computed: Mapping[str, Any]) -> None:
    """Raise `NotDivisible` if two variables share memory: a piece may write to one and read the other."""
    tensors = [value for value in computed.values() if isinstance(value, torch.Tensor)]
    if len({value.untyped_storage().data_ptr() for value in tensors}) < len(tensors):
        raise NotDivisible("pieces pass on tensors that share memory")


def layout_of(one: Seen, other: Seen, index: int, arguments: Sequence[str]) -> Layout:
    """Compare two passes before a segment: what differs has an entry a token; raises `NotDivisible`."""
    tensors, numbers = {}, {}
    for name, before in one.variables[index].items():
        now = other.variables[index][name]
        if before == now:
            if name not in arguments:
                raise NotDivisible(f"pieces pass on {name}, which is computed and has no entry a token")
        elif (
            isinstance(before, int) and before % one.tokens == 0 == now - before // one.tokens * other.tokens
        ):
            numbers[name] = before // one.tokens
        elif (axis := axis_of(before, now, one.tokens, other.tokens)) is not None:
            tensors[name] = axis
        else:
            raise NotDivisible(f"pieces pass on {name}, which is {before} for {one.tokens} tokens")
    return Layout(tensors, numbers)


def axis_of(before: Any, now: Any, tokens_before: int, tokens_now: int) -> Axis | None:
    """Dimension of a tensor in which two passes differ, if that is the tokens."""
    if not isinstance(before, Shape) or before.strides != now.strides or len(before.sizes) != len(now.sizes):
        return None
    if 0 in (before.strides or ()):  # entries that share memory cannot be filled one by one
        return None
    pairs = list(zip(before.sizes, now.sizes, strict=True))
    differing = [n for n, (size, other) in enumerate(pairs) if size != other]
    if len(differing) != 1 or pairs[differing[0]] != (tokens_before, tokens_now):
        return None
    return Axis(differing[0], before.strides)
