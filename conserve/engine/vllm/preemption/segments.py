"""The parts of a compiled pass: vLLM's function that calls piece after piece, cut behind each attention call.

vLLM splits a compiled model at its attention calls and writes a function that calls the pieces, with the attention
calls in between (`vllm.compilation.codegen`). All pieces of one pass get the same number of tokens, but each takes
any number. So the function is cut into segments, which share their variables: between two of them the number may
change. Before segment 0 no layer has run; before segment n the attention of n layers has.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

FUNCTION = "execution_fn"  # as vLLM calls it
PIECES = "__vllm_submods__"
ATTENTION = "__vllm_inlined_submods__"
CONSTANTS = "__vllm_consts__"
RESULT = "__conserve_result__"
WORDS, SLOT, KNOWN, REST = (f"__conserve_{name}__" for name in ("words", "slot", "known", "rest"))
ATTENTION_OPS = frozenset({"unified_attention_with_output", "unified_kv_cache_update"})


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


LOOK = f"if {WORDS}[{SLOT}] > {KNOWN}:\n    return {REST}({{index}}, locals())"


@dataclass(frozen=True, slots=True)
class Segments:
    """A pass in parts: each a piece (the first may be several) up to the end of the next attention call."""

    names: tuple[str, ...]  # of the function's arguments
    codes: tuple[CodeType, ...]  # run one after the other in one dictionary of variables
    live: tuple[frozenset[str], ...]  # variables that a segment or one behind it reads, and none of them sets
    globals: dict[str, Any]
    parts: Sequence[Sequence[ast.stmt]]  # the codes' statements

    def run(self, index: int, variables: dict[str, Any]) -> None:
        """Run one segment."""
        exec(self.codes[index], self.globals, variables)  # vLLM's own code, which it runs in the same way

    def watched(self, every: int) -> Callable[..., Any]:
        """The whole pass as one function that looks at an order before every N-th segment but the last.

        Takes the pass's arguments, then `words`, `slot`, `known`, and `rest`. Where `words[slot] > known` before
        segment n, it returns `rest(n, variables)`. A look costs the processor's caches, which the pieces around it
        have filled with weights, a fifth of what asking does.
        """
        body: list[ast.stmt] = []
        for index, part in enumerate(self.parts):
            if index < len(self.parts) - 1 and index % every == 0:
                body += ast.parse(LOOK.format(index=index)).body
            body += part
        body += ast.parse(f"return {RESULT}").body
        arguments = ", ".join([*self.names, WORDS, SLOT, KNOWN, REST])
        module = ast.parse(f"def {FUNCTION}({arguments}): pass")
        function = module.body[0]
        assert isinstance(function, ast.FunctionDef)
        function.body = body
        found: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(module), "<pieces>", "exec"), self.globals, found)
        made: Callable[..., Any] = found[FUNCTION]
        return made


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
    return Segments(
        arguments, tuple(map(compiled, parts)), tuple(one & known for one in live), namespace, parts
    )


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

    places = [place for place in (backends, caching) if hasattr(place, "compile_execution_fn")]
    # A version that runs pieces otherwise: none is noted, and iterations are abandoned whole.
    if len(places) < 2:
        yield
        return
    compile_function = backends.compile_execution_fn

    def recording(
        code: str, submodules: Mapping[str, Any], names: Sequence[str], consts: Sequence[Any] | None = None
    ) -> Stitched:
        whole = compile_function(code, submodules, names, consts)
        found.append(Stitched(whole, code, [submodules.get(name) for name in names], consts))
        return found[-1]

    for place in places:  # each has imported it by name
        place.compile_execution_fn = recording
    try:
        yield
    finally:
        for place in places:
            place.compile_execution_fn = compile_function
