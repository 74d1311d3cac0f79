"""Which variables of a compiled pass have an entry a token: what differs between two passes of other sizes.

vLLM loads compiled models from a cache, without the graphs that they were compiled from. So the shapes are noted in
two passes at the start, which attend to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conserve.engine.vllm.preemption.segments import RESULT, NotDivisible, Segments, Stitched

TRIED_TOKENS = (17, 29)  # not round: a number of tokens that is rounded up would look like the number itself
# In names that Dynamo gives to a model's own tensors.
OF_THE_MODEL = ("_parameters_", "_buffers_", "_closure_")


@dataclass(frozen=True, slots=True)
class Layout:
    """Live variables before a segment that change with the number of tokens."""

    tensors: Mapping[str, tuple[int, ...]]  # (tokens, ...) each: its strides
    numbers: Mapping[str, int]  # multiples of the number of tokens


@dataclass(frozen=True, slots=True)
class Seen:
    """The live variables before each segment of one pass, as they were."""

    tokens: int
    variables: Sequence[Mapping[str, Any]]  # shape and strides of a tensor, or the value of an integer


def layouts_of(stitched: Stitched, segments: Segments, run: Callable[[int], Any], most: int) -> list[Layout]:
    """Layouts before each segment, by two passes of other sizes that `run` starts; raises `NotDivisible`.

    `most` is the greatest number of tokens of a pass.
    """
    if most < max(TRIED_TOKENS):
        raise NotDivisible(f"a pass has at most {most} tokens")
    one, other = (seen(stitched, segments, run, tokens) for tokens in TRIED_TOKENS)
    for name, value in one.variables[0].items():
        if is_token_major(value, most) and not any(kind in name for kind in OF_THE_MODEL):
            raise NotDivisible(f"pieces may read {name} token by token")
    return [layout_of(one, other, index, segments.names) for index in range(len(segments.codes))]


def seen(stitched: Stitched, segments: Segments, run: Callable[[int], Any], tokens: int) -> Seen:
    """One pass, watched."""
    passes: list[tuple[Seen, Any]] = []

    def watching(*args: Any) -> Any:
        variables = dict(zip(segments.names, args, strict=True))
        before = []
        for index, live in enumerate(segments.live):
            before.append({name: described(variables[name]) for name in live})
            assert_apart({name: variables[name] for name in live - set(segments.names)})
            segments.run(index, variables)
        passes.append((Seen(tokens, before), variables[RESULT]))
        return variables[RESULT]

    stitched.run = watching
    try:
        run(tokens)
    finally:
        stitched.run = stitched.whole
    if len(passes) != 1:
        raise NotDivisible(f"a pass ran through the pieces {len(passes)} times")
    ((found, result),) = passes
    for value in result if isinstance(result, tuple) else (result,):
        if not is_token_major(described(value), tokens):
            raise NotDivisible(f"the pieces return {described(value)} for {tokens} tokens")
    return found


def described(value: Any) -> Any:
    """Shape and strides of a tensor, an integer itself, or None."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride()
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
        elif is_token_major(before, one.tokens) and (before[0][1:], before[1]) == (now[0][1:], now[1]):
            tensors[name] = before[1]
        else:
            raise NotDivisible(f"pieces pass on {name}, which is {before} for {one.tokens} tokens")
    return Layout(tensors, numbers)


def is_token_major(described: Any, tokens: int) -> bool:
    """True for a tensor whose first dimension is the tokens."""
    return isinstance(described, tuple) and len(described[0]) > 0 and described[0][0] == tokens
