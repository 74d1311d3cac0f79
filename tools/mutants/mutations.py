"""The mutants of a module: each one small change of its text, found in the syntax tree."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NEGATION = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "int", "floor": "int"}
IDENTITIES = ("sorted", "reversed", "abs", "list")  # calls that their argument can stand in for
NOTHING = {"bool": ("True", "False"), "int": ("0",), "float": ("0.0",), "str": ("''",), "None": ("None",)}
EMPTY = {
    "list": "[]", "List": "[]", "Sequence": "()", "tuple": "()", "Iterable": "()", "Iterator": "iter(())",
    "dict": "{}", "Mapping": "{}", "set": "set()", "frozenset": "frozenset()",
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    start: int  # byte of the file at which the change begins
    end: int
    text: str  # that stands there instead
    line: int
    lines: tuple[int, int]  # first and last line of the statement: a test that runs one of them may notice
    function: str | None  # qualified name of the outermost function; None: outside of functions
    names: frozenset[str]  # that code uses which depends on it
    kind: str

    def source(self) -> bytes:
        """The file with the change."""
        source = source_of(self.path)
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Place of the walk through the tree."""

    function: str | None = None
    scope: str = ""
    names: frozenset[str] = frozenset()
    lines: tuple[int, int] = (0, 0)


@cache
def source_of(path: str) -> bytes:
    """The file as it was when the run began: it may be edited meanwhile."""
    return Path(path).read_bytes()


def mutants_of(path: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    source = source_of(path)
    return sorted(_Walk(path, source).body(ast.parse(source).body, _Place()), key=lambda m: (m.start, m.end))


class _Walk:
    """Yields the mutants below a node; what decorates, annotates or explains is passed over."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def body(self, statements: Sequence[ast.stmt], place: _Place) -> Iterator[Mutant]:
        for statement in statements:
            yield from self._statement(statement, place)

    def _mutant(
        self, node: ast.AST, text: str, place: _Place, kind: str, last: ast.AST | None = None
    ) -> Mutant:
        last = last or node
        return Mutant(
            path=self._path,
            start=self._starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            end=self._starts[last.end_lineno - 1] + last.end_col_offset,  # type: ignore[attr-defined]
            text=text,
            line=node.lineno,  # type: ignore[attr-defined]
            lines=place.lines,
            function=place.function,
            names=place.names,
            kind=kind,
        )

    # Statements.

    def _statement(self, node: ast.stmt, place: _Place) -> Iterator[Mutant]:
        if isinstance(node, FUNCTIONS):
            yield from self._function(node, place)
        elif isinstance(node, ast.ClassDef):
            inner = f"{place.scope}{node.name}."
            yield from self.body(
                node.body, _Place(function=place.function, scope=inner, names=place.names | {node.name})
            )
        elif isinstance(
            node, ast.Import | ast.ImportFrom | ast.Assert | ast.Pass | ast.Global | ast.Nonlocal
        ):
            return
        else:
            yield from self._simple_or_compound(node, place)

    def _simple_or_compound(self, node: ast.stmt, place: _Place) -> Iterator[Mutant]:
        inner = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)]
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        statements = [statement for block in blocks for statement in block]
        last = statements[0].lineno - 1 if statements else node.end_lineno or node.lineno
        here = _Place(
            function=place.function,
            scope=place.scope,
            names=place.names if place.function else place.names | _assigned(node),
            lines=(node.lineno, max(node.lineno, last)),
        )
        if _is_type_checking(node) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return  # a docstring, say
        if _deletable(node):
            yield self._mutant(node, "pass", here, "delete statement")
        if isinstance(node, ast.If):
            yield from self._condition(node.test, here, ("True", "False"))
        elif isinstance(node, ast.While):
            yield from self._condition(node.test, here, ("False",))
        elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            swapped = ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
            yield self._mutant(node, ast.unparse(swapped), here, "arithmetic")
        for part in inner:
            if isinstance(part, ast.ExceptHandler):
                yield from self._handler(part, here)
            elif isinstance(part, ast.match_case):
                yield from self._case(part, here)
            elif isinstance(part, ast.expr | ast.withitem):
                if isinstance(node, ast.AnnAssign) and part is node.annotation:
                    continue
                if isinstance(node, ast.If | ast.While) and part is node.test:
                    continue
                yield from self._expression(part, here, text=not isinstance(node, ast.Raise))
        yield from self.body(statements, place)

    def _handler(self, node: ast.ExceptHandler, place: _Place) -> Iterator[Mutant]:
        first = node.body[0]
        reached = _Place(
            function=place.function, scope=place.scope, names=place.names, lines=(first.lineno, first.lineno)
        )
        if not isinstance(first, ast.Raise):
            yield self._mutant(first, "raise", reached, "error not handled", last=node.body[-1])
        yield from self.body(node.body, place)

    def _case(self, node: ast.match_case, place: _Place) -> Iterator[Mutant]:
        if node.guard is not None:
            yield from self._condition(node.guard, place, ("True", "False"))
        yield from self.body(node.body, place)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, place: _Place) -> Iterator[Mutant]:
        qualname = f"{place.scope}{node.name}"
        if any(
            isinstance(d, ast.Name) and d.id in ("overload", "abstractmethod") for d in node.decorator_list
        ):
            return
        defined = _Place(
            function=place.function,
            scope=place.scope,
            names=place.names | {node.name},
            lines=place.lines if place.function else (node.body[0].lineno, node.end_lineno or node.lineno),
        )
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                yield from self._expression(default, defined)
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body:
            return
        inside = _Place(
            function=place.function or qualname,
            scope=f"{qualname}.<locals>.",
            names=defined.names,
            lines=(body[0].lineno, node.end_lineno or node.lineno),
        )
        if node.name != "__init__":
            for text in _trivial_bodies(node):
                if text != ast.unparse(body[0]):
                    yield self._mutant(body[0], text, inside, "empty body", last=body[-1])
        yield from self.body(body, inside)

    # Expressions.

    def _condition(self, node: ast.expr, place: _Place, values: Sequence[str]) -> Iterator[Mutant]:
        if not isinstance(node, ast.Constant):
            for value in values:
                yield self._mutant(node, value, place, "condition")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._children(node, place, text=True)
        elif isinstance(node, ast.Compare):
            yield from self._compare(node, place, (BOUNDARY,))
            yield from self._children(node, place, text=True)
        else:
            yield from self._expression(node, place)

    def _expression(self, node: ast.AST, place: _Place, *, text: bool = True) -> Iterator[Mutant]:
        """Yield the mutants of an expression and its parts; `text` False: strings are for people to read."""

        def instead(new: ast.AST | str, kind: str) -> Mutant:
            return self._mutant(node, new if isinstance(new, str) else f"({ast.unparse(new)})", place, kind)

        match node:
            case ast.JoinedStr():
                return  # Python 3.11 does not say where in an f-string its parts are
            case ast.Constant():
                if (changed := _other_constant(node.value, text=text)) is not None:
                    yield instead(changed, "constant")
            case ast.Compare():
                yield from self._compare(node, place, (BOUNDARY, NEGATION))
            case ast.BoolOp():
                for index in range(len(node.values)):
                    kept = [value for n, value in enumerate(node.values) if n != index]
                    yield instead(kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept), "drop operand")
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield instead(node.operand, "drop operator")
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                yield instead(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right), "arithmetic")
            case ast.IfExp():
                yield from self._condition(node.test, place, ("True", "False"))
                for part in (node.body, node.orelse):
                    yield from self._expression(part, place, text=text)
                return
            case ast.Slice():
                if node.lower is not None:
                    yield self._mutant(
                        node, ast.unparse(ast.Slice(None, node.upper, node.step)), place, "slice"
                    )
                if node.upper is not None:
                    yield self._mutant(
                        node, ast.unparse(ast.Slice(node.lower, None, node.step)), place, "slice"
                    )
            case ast.Call():
                yield from self._call(node, place)
        yield from self._children(node, place, text=text)

    def _children(self, node: ast.AST, place: _Place, *, text: bool) -> Iterator[Mutant]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                yield from self._expression(child.iter, place)
                for test in child.ifs:
                    yield from self._condition(test, place, ("True", "False"))
            elif isinstance(child, ast.arguments):
                for default in (*child.defaults, *child.kw_defaults):
                    if default is not None:
                        yield from self._expression(default, place)
            elif isinstance(child, ast.expr | ast.keyword | ast.withitem):
                yield from self._expression(child, place, text=text)

    def _compare(
        self, node: ast.Compare, place: _Place, tables: Sequence[dict[type, type]]
    ) -> Iterator[Mutant]:
        for index, operator in enumerate(node.ops):
            for table in tables:
                if type(operator) in table:
                    operators = [*node.ops]
                    operators[index] = table[type(operator)]()
                    changed = ast.unparse(ast.Compare(node.left, operators, node.comparators))
                    yield self._mutant(node, f"({changed})", place, "comparison")

    def _call(self, node: ast.Call, place: _Place) -> Iterator[Mutant]:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name in CALLS:
            yield self._mutant(node.func, CALLS[name], place, "call")
        elif name in IDENTITIES and len(node.args) == 1:
            yield self._mutant(node, f"({ast.unparse(node.args[0])})", place, "call")
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                kept = [other for n, other in enumerate(node.keywords) if n != index]
                text = ast.unparse(ast.Call(node.func, node.args, kept))
                yield self._mutant(node, text, place, f"drop argument {keyword.arg}")


def _assigned(node: ast.stmt) -> frozenset[str]:
    """Names that a statement outside of functions gives a value to."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    parts = [part for target in targets if target is not None for part in ast.walk(target)]
    return frozenset(part.id for part in parts if isinstance(part, ast.Name))


def _deletable(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Break | ast.Continue)


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _trivial_bodies(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Bodies that could replace the whole one if no test looked at what the function does."""
    if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node)):
        yield "return; yield"
        return
    annotation = node.returns
    if isinstance(annotation, ast.BinOp):  # X | None
        yield "return None"
        return
    if isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    name = ast.unparse(annotation) if annotation is not None else ""
    values = NOTHING.get(name) or ((EMPTY[name],) if name in EMPTY else ())
    for value in values:
        yield f"return {value}"


def _other_constant(value: object, *, text: bool) -> str | None:
    match value:
        case bool():
            return repr(not value)
        case int():
            return repr(value + 1)
        case float():
            return repr(2 * value if value else 1.0)
        case str() if text and value:
            return repr(f"mutant {value}")
    return None
