"""Rows that leave a compiled pass between its pieces, and join a later one at the piece where they left.

vLLM splits a compiled model at its attention calls and writes a function that calls piece after piece, with the
attention calls in between (`vllm.compilation.codegen`). All pieces of one pass get the same number of tokens, but a
piece takes any number. So the function is cut behind each attention call into segments, which share their local
variables. Between two segments rows leave and join as they do between decoder layers: variables with an entry a
token are cut down or filled up, the others stay.

Before segment 0 no layer has run; before segment n the attention of n layers has.
"""

from __future__ import annotations

import ast
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from conserve.engine.vllm.preemption.rows import Key, Rows
from conserve.engine.vllm.preemption.safepoints import Safepoints

log = logging.getLogger("vllm.conserve")
FUNCTION = "execution_fn"  # as vLLM calls it
PIECES = "__vllm_submods__"
ATTENTION = "__vllm_inlined_submods__"
CONSTANTS = "__vllm_consts__"
RESULT = "__conserve_result__"
ATTENTION_OPS = frozenset({"unified_attention_with_output", "unified_kv_cache_update"})
TRIED_TOKENS = (17, 29)  # of the two passes that tell values with an entry a token from others; not round, as
# numbers of tokens that are rounded up would look like the number itself

OF_THE_MODEL = ("_parameters_", "_buffers_", "_closure_")  # in names that Dynamo gives to a model's own tensors


class NotDivisible(Exception):
    """A compiled model whose passes cannot be cut down between pieces; says why."""


class Stitched:
    """The function that runs a compiled model piece by piece; `run` is what vLLM's calls reach."""

    def __init__(
        self, whole: Callable[..., Any], code: str, pieces: Sequence[Any], consts: Sequence[Any] | None
    ) -> None:
        self.run = self.whole = whole
        self._code = code
        self._namespace = {PIECES: pieces, CONSTANTS: consts}

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def segments(self) -> Segments:
        """The function's parts; raises `NotDivisible`."""
        return segments_of(self._code, dict(self._namespace))


@dataclass(frozen=True, slots=True)
class Segments:
    """A pass in parts: each a piece (the first may be several) up to the end of the next attention call."""

    names: tuple[str, ...]  # of the function's arguments
    codes: tuple[CodeType, ...]  # run one after the other in one dictionary of variables
    live: tuple[frozenset[str], ...]  # variables that a segment or one behind it reads, and none of them sets
    globals: dict[str, Any]

    def run(self, index: int, variables: dict[str, Any]) -> None:
        """Run one segment."""
        exec(self.codes[index], self.globals, variables)  # vLLM's own code, which it runs in the same way


def segments_of(code: str, namespace: dict[str, Any]) -> Segments:
    """Cut vLLM's function behind each of its attention calls; raises `NotDivisible`."""
    module = ast.parse(code)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    function = functions[FUNCTION]
    for name in functions.keys() - {FUNCTION}:
        others = operators_of(functions[name]) - ATTENTION_OPS
        if others:
            raise NotDivisible(f"the pieces are split at {', '.join(sorted(others))} too")
    parts = list(divided(function.body))
    exec(compile(module, "<pieces>", "exec"), namespace)
    reads = [names_in(part, ast.Load) for part in parts]
    sets = [names_in(part, ast.Store) for part in parts]
    live = [frozenset(set().union(*reads[n:]) - set().union(*sets[n:])) for n in range(len(parts))]
    arguments = tuple(arg.arg for arg in function.args.args)
    known = set(arguments).union(*sets)
    return Segments(arguments, tuple(map(compiled, parts)), tuple(one & known for one in live), namespace)


def operators_of(function: ast.FunctionDef) -> set[str]:
    """Names of torch's operators that a function calls."""
    return {
        node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    }


def divided(body: Sequence[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Statements up to each call of a piece that follows an attention call; the result is set, not returned."""
    part: list[ast.stmt] = []
    attended = False
    for statement in body:
        if attended and PIECES in names_in([statement], ast.Load):
            yield part
            part, attended = [], False
        attended |= any(name.startswith(ATTENTION) for name in names_in([statement], ast.Load))
        if isinstance(statement, ast.Return):
            assert statement.value is not None
            statement = ast.Assign([ast.Name(RESULT, ast.Store())], statement.value)
        part.append(statement)
    yield part


def names_in(statements: Sequence[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    """Variables that statements read or set."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def compiled(statements: list[ast.stmt]) -> CodeType:
    """Code of one segment."""
    return compile(ast.fix_missing_locations(ast.Module(statements, [])), "<pieces>", "exec")


@contextlib.contextmanager
def recorded(found: list[Stitched]) -> Iterator[None]:
    """Meanwhile, note the function of each model that vLLM compiles or loads from its cache."""
    from vllm.compilation import backends, caching

    compile_function = backends.compile_execution_fn

    def recording(
        code: str, submodules: Mapping[str, Any], names: Sequence[str], consts: Sequence[Any] | None = None
    ) -> Stitched:
        whole = compile_function(code, submodules, names, consts)
        found.append(Stitched(whole, code, [submodules.get(name) for name in names], consts))
        return found[-1]

    places = (backends, caching)  # each has imported it by name
    for place in places:
        place.compile_execution_fn = recording
    try:
        yield
    finally:
        for place in places:
            place.compile_execution_fn = compile_function


# Which variables have an entry a token.


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


def layouts_of(
    stitched: Stitched, segments: Segments, run: Callable[[int], Any], most: int
) -> list[Layout]:
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
    for value in result if isinstance(result, tuple | list) else (result,):
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
            if before is not None and name not in arguments:
                raise NotDivisible(f"pieces pass on {name}, which is computed and has no entry a token")
        elif isinstance(before, int) and before * other.tokens == now * one.tokens and not before % one.tokens:
            numbers[name] = before // one.tokens
        elif is_token_major(before, one.tokens) and (before[0][1:], before[1]) == (now[0][1:], now[1]):
            tensors[name] = before[1]
        else:
            raise NotDivisible(f"pieces pass on {name}, which is {before} for {one.tokens} tokens")
    return Layout(tensors, numbers)


def is_token_major(described: Any, tokens: int) -> bool:
    """True for a tensor whose first dimension is the tokens."""
    return isinstance(described, tuple) and len(described[0]) > 0 and described[0][0] == tokens


def pieces_of(found: Sequence[Stitched], runner: Any, safepoints: Safepoints) -> Pieces:
    """Prepare the compiled model of this worker for rows that leave; raises `NotDivisible`."""
    if len(found) != 1:
        raise NotDivisible(f"{len(found)} parts of the model are compiled on their own")
    if runner.vllm_config.compilation_config.fast_moe_cold_start:
        raise NotDivisible("experts are counted as they are called (fast_moe_cold_start)")
    segments = found[0].segments()
    if len(segments.codes) != safepoints.layers + 1:
        raise NotDivisible(f"{len(segments.codes)} segments in {safepoints.layers} layers")

    def run(tokens: int) -> None:
        runner._dummy_run(tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)

    rows = Pieces(runner, safepoints, segments, layouts_of(found[0], segments, run, runner.max_num_tokens))
    rows.install(found[0])
    return rows


class Pieces(Rows):
    """Rows of vLLM's model runner (V1) while the pieces of a compiled model run."""

    def __init__(
        self, runner: Any, safepoints: Safepoints, segments: Segments, layouts: Sequence[Layout]
    ) -> None:
        super().__init__(runner, safepoints)
        self._segments = segments
        self._layouts = layouts

    def install(self, stitched: Stitched) -> None:
        """Run passes that rows may leave or join in segments, and all others as vLLM does."""

        def guarded(*args: Any) -> Any:
            return self.forward(args) if self.busy else stitched.whole(*args)

        stitched.run = guarded

    def forward(self, args: Sequence[Any]) -> Any:
        """Run all segments, each on the rows that are in the pass by then."""
        segments = self._segments
        variables: dict[str, Any] = dict(zip(segments.names, args, strict=True))
        self._total = len(variables[next(iter(self._layouts[0].tensors))])  # with vLLM's padding
        last = len(segments.codes) - 1
        for index in range(last + 1):
            if index < last:  # as many safepoints as layers
                self._change_at(index, variables)
            if self._in is None or len(self._in):  # else all rows of the pass join later
                segments.run(index, variables)
        result = variables[RESULT]
        if self._in is None:
            return result
        return type(result)(map(self._whole, result)) if isinstance(result, tuple | list) else self._whole(result)

    def _change_at(self, index: int, variables: dict[str, Any]) -> None:
        """Let rows leave and join before a segment."""
        rows = self._safepoints.check(index)
        if not rows and index not in self._joining and (index or not self._suspended):
            return
        layout = self._layouts[index]
        inputs: dict[Key, Any] = {name: variables[name] for name in layout.tensors if name in variables}
        if index == 0:
            self._settle_joining(inputs)
        if index in self._joining:
            self._join(self._joining.pop(index), inputs)
        if rows:
            self._leave(rows, index, inputs)
        if self._in is None:
            return
        for name, value in inputs.items():
            assert isinstance(name, str)
            variables[name] = strided(value, layout.tensors[name])
        variables.update({name: times * len(self._in) for name, times in layout.numbers.items()})

    def _change(self, inputs: dict[Key, Any], coming: Any = None) -> None:
        super()._change(inputs, coming)
        # A CUDA graph is of one number of tokens. From here on the compiled pieces run without, on any number.
        get_forward_context().cudagraph_runtime_mode = CUDAGraphMode.NONE

    def _is_per_token(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)


def strided(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with the strides that compiled code expects."""
    if value.stride() == strides:
        return value
    laid_out = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return laid_out.copy_(value)
