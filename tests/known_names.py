"""Knowledge of variables and expressions in a piece of source, as far as annotations tell.

Classes are called `vllm:Request` and `conserve:Iteration`, whatever their module: two of one name count as one.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.class_index import Index

VLLM, OURS = "vllm", "conserve"
RECORDS = {"NamedTuple", "Protocol", "Struct", "TypedDict", "BaseModel"}  # their fields are given no value
INNER = {"Optional", "ClassVar", "Final", "Annotated", "type", "Type", "Awaitable", "Required", "NotRequired"}
MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}
CONTEXTS = {"contextmanager", "asynccontextmanager"}
PASS_ON = {
    "list",
    "sorted",
    "set",
    "tuple",
    "reversed",
    "iter",
    "frozenset",
    "deque",
    "chain",
    "cast",
    "copy",
}
TAKES = {"get", "pop", "popleft", "peek", "setdefault", "popitem"}


@dataclass(frozen=True, slots=True)
class Kind:
    """Knowledge of a value; usually there is none."""

    classes: frozenset[str] = frozenset()
    items: Kind | None = None  # of a container
    result: Kind | None = None  # of a call
    path: str = ""  # of a module, or of an object in it: vllm.platforms.current_platform
    foreign: bool = False  # neither vLLM's nor ours

    def __or__(self, other: Kind) -> Kind:
        return Kind(
            self.classes | other.classes,
            _either(self.items, other.items),
            _either(self.result, other.result),
            self.path or other.path,
            self.foreign or other.foreign,
        )


UNKNOWN, FOREIGN = Kind(), Kind(foreign=True)


def _either(first: Kind | None, second: Kind | None) -> Kind | None:
    return first | second if first is not None and second is not None else first or second


def last_part(node: ast.expr) -> str:
    if isinstance(node, ast.Call | ast.Subscript):
        return last_part(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class Environment:
    """Names that a piece of code knows, and what they stand for."""

    def __init__(
        self, index: Index, owner: str, *, hints: Mapping[str, str] | None = None, self_class: str = ""
    ) -> None:
        self.index, self.owner, self.self_class = index, owner, self_class
        self.hints = hints or {}  # variable -> class, where nothing else is known
        self.known: dict[str, Kind] = {}

    def within(self, self_class: str) -> Environment:
        """Copy of these names, within a class."""
        inner = Environment(
            self.index, self.owner, hints=self.hints, self_class=self_class or self.self_class
        )
        inner.known = dict(self.known)
        return inner

    def of_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Environment:
        """Copy of these names, with a function's parameters."""
        inner = self.within("")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for number, one in enumerate(arguments):
            inner.known[one.arg] = self.annotated(one.annotation) if one.annotation else UNKNOWN
            if not number and one.arg in ("self", "cls") and self.self_class:
                inner.known[one.arg] = Kind(frozenset({self.self_class}))
        for rest in (node.args.vararg, node.args.kwarg):
            if rest is not None:
                held = self.annotated(rest.annotation) if rest.annotation else UNKNOWN
                inner.known[rest.arg] = Kind(items=held, foreign=True)
        return inner

    def take(self, tree: ast.Module | ast.stmt) -> None:
        """Take in the imports of a module, or one statement's."""
        for node in [tree, *tree.body] if isinstance(tree, ast.Module) else [tree]:
            bodies = node.body if isinstance(node, ast.If) else [node]  # TYPE_CHECKING
            for one in bodies:
                if isinstance(one, ast.Import):
                    for alias in one.names:
                        self._import(alias.asname or alias.name.split(".")[0], alias.name, alias.asname)
                elif isinstance(one, ast.ImportFrom):
                    module = "" if one.level else one.module or ""
                    for alias in one.names:
                        self.known[alias.asname or alias.name] = self._imported(module, alias.name)

    def _import(self, name: str, module: str, renamed: str | None) -> None:
        self.known[name] = Kind(path=module if renamed else module.split(".")[0])

    def _imported(self, module: str, name: str) -> Kind:
        if self.owner == VLLM and module.split(".")[0] in ("", VLLM):
            return UNKNOWN  # found by its name, when all files are read
        if module.split(".")[0] == VLLM:
            cls = self.index.classes.get(f"{VLLM}:{name}")
            return self._class(f"{VLLM}:{name}") if cls else Kind(path=f"{module}.{name}")
        if module.split(".")[0] == OURS:
            return UNKNOWN
        return UNKNOWN if name == "Any" else Kind(path=f"{module}.{name}", foreign=True)

    def _class(self, name: str) -> Kind:
        made = Kind(frozenset({name}))
        return replace(made, result=made)

    def class_named(self, name: str) -> str:
        """The class of this name, in full; empty if there is none."""
        known = self.known.get(name, UNKNOWN)
        if known != UNKNOWN:  # imported
            return next(iter(known.classes), "") if known.result is not None else ""
        own = f"{self.owner}:{name}"
        full = self.index.aliases.get(own, own)
        return full if full in self.index.classes else ""

    # Annotations.

    def annotated(self, node: ast.expr | None) -> Kind:
        """Kind of a variable with this annotation."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left) | self.annotated(node.right)
        if isinstance(node, ast.Subscript):
            return self._generic(node)
        if not isinstance(node, ast.Name | ast.Attribute):
            return UNKNOWN
        name = last_part(node)
        full = self.class_named(name)
        if full:
            return Kind(frozenset({full}))
        if name == "Self" and self.self_class:
            return Kind(frozenset({self.self_class}))
        is_foreign = name in dir(builtins) or name in self.known or isinstance(node, ast.Attribute)
        return FOREIGN if is_foreign and name not in ("Any", "object") else UNKNOWN

    def _generic(self, node: ast.Subscript) -> Kind:
        name = last_part(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in INNER:
            return self.annotated(parts[0])
        if name in ("Callable", "Generator", "Literal", "Union", "Optional"):
            return Kind(result=self.annotated(parts[-1])) if name == "Callable" else UNKNOWN
        items = self.annotated(parts[-1]) if name in MAPPINGS else self._any(map(self.annotated, parts))
        return Kind(items=items, foreign=True)

    def returned(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Kind:
        """Kind of a call's result."""
        kind = self.annotated(node.returns) if node.returns else UNKNOWN
        is_context = any(last_part(one) in CONTEXTS for one in node.decorator_list)
        return (kind.items or UNKNOWN) if is_context else kind

    @staticmethod
    def _any(kinds: Iterable[Kind]) -> Kind:
        found = UNKNOWN
        for kind in kinds:
            found = found | kind
        return found

    # Expressions.

    def kind(self, node: ast.expr | None) -> Kind:
        """Kind of an expression."""
        match node:
            case ast.Name():
                return self._named(node.id)
            case ast.Attribute():
                return self.attribute(self.kind(node.value), node.attr)
            case ast.Call():
                return self._called(node)
            case ast.Subscript():
                whole = self.kind(node.value)
                return whole if isinstance(node.slice, ast.Slice) else whole.items or UNKNOWN
            case ast.IfExp():
                return self.kind(node.body) | self.kind(node.orelse)
            case ast.BoolOp():
                return self._any(map(self.kind, node.values))
            case ast.Await() | ast.NamedExpr() | ast.Starred():
                return self.kind(node.value)
            case ast.List() | ast.Set() | ast.Tuple():
                return Kind(items=self._any(map(self.kind, node.elts)), foreign=True)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return Kind(items=self.within("").bound(node.generators).kind(node.elt), foreign=True)
            case ast.DictComp():
                return Kind(items=self.within("").bound(node.generators).kind(node.value), foreign=True)
            case ast.Dict():
                return Kind(items=self._any(map(self.kind, node.values)), foreign=True)
            case ast.Constant() | ast.JoinedStr() | ast.Compare():
                return UNKNOWN if getattr(node, "value", "") is None else FOREIGN
        return UNKNOWN

    def bound(self, generators: list[ast.comprehension]) -> Environment:
        """Add the variables of a comprehension; returns the names."""
        for one in generators:
            self.bind(one.target, self.kind(one.iter).items or UNKNOWN)
        return self

    def bind(self, target: ast.expr, kind: Kind) -> None:
        """Give variables what they are assigned."""
        if isinstance(target, ast.Name):
            self.known[target.id] = kind
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self.bind(one, kind.items or UNKNOWN)

    def _named(self, name: str) -> Kind:
        kind = self.known.get(name, UNKNOWN)
        if kind != UNKNOWN:
            return kind
        if name in self.hints and name != "self":
            return Kind(frozenset({self.hints[name]}))
        full = self.class_named(name)
        if full:
            return self._class(full)
        function = self.index.functions.get(f"{self.owner}:{name}")
        if function is not None:
            return Kind(result=function())
        return FOREIGN if name in dir(builtins) else UNKNOWN

    def attribute(self, kind: Kind, name: str) -> Kind:
        """Kind of an attribute."""
        found = self._any(self.index.held(one, name) for one in sorted(kind.classes))
        if kind.path:
            found = found | Kind(path=f"{kind.path}.{name}")
        if found == UNKNOWN and name.lstrip("_") in self.hints:
            return Kind(frozenset({self.hints[name.lstrip("_")]}))
        return FOREIGN if found == UNKNOWN and kind.foreign and not kind.classes else found

    def _called(self, node: ast.Call) -> Kind:
        name = last_part(node.func)
        if name == "super":
            return Kind(frozenset(self.index.relatives(self.self_class)) if self.self_class else frozenset())
        if name == "internal" and node.args and isinstance(node.args[0], ast.Constant):
            home, _, last = str(node.args[0].value).rpartition(".")
            return self._imported(home, last)
        if name in PASS_ON and node.args:
            return self._any(map(self.kind, node.args))
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return self.attribute(self.kind(node.args[0]), str(node.args[1].value))
        if name == "next" and node.args:
            return self.kind(node.args[0]).items or UNKNOWN
        if isinstance(node.func, ast.Attribute):
            items = self.kind(node.func.value).items
            if items is not None and name in TAKES:
                return items
            if items is not None and name in ("values", "copy"):
                return Kind(items=items, foreign=True)
        func = self.kind(node.func)
        if func.path and f"{VLLM}:{name}" in self.index.functions:
            return self.index.functions[f"{VLLM}:{name}"]()
        return func.result or (FOREIGN if func.foreign else UNKNOWN)
