"""Uses of vLLM in ConServe's source: imports, dotted names, attributes, keywords of constructors, overrides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.class_index import Index, pairs
from tests.known_names import OURS, VLLM, Environment, Kind

DOTTED = re.compile(r"vllm(\.\w+)+")


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """A place that touches vLLM."""

    path: str
    line: int
    name: str  # dotted, or of an attribute
    classes: frozenset[str] = frozenset()  # that may define the attribute; none: whose it is is not known
    dotted: bool = False

    def __str__(self) -> str:
        owners = "/".join(sorted(one.split(":")[1] for one in self.classes)) or "?"
        return f"{self.path}:{self.line} {self.name if self.dotted else f'{owners}.{self.name}'}"


class Listed:
    """Names of `compat.internals`, in full, and what `compat.calls` says of names that no module has."""

    def __init__(self, names: Iterable[str], habits: Iterable[str], index: Index) -> None:
        self.names, self._index = set(names), index
        self.prefixes = {
            ".".join(parts[:count])
            for parts in (name.split(".") for name in self.names)
            for count in range(1, len(parts) + 1)
        }
        self.prefixes.update(habits)
        self.lasts = {name.rpartition(".")[2] for name in [*self.names, *habits]}
        self._of_class: dict[str, set[str]] = {}
        for name in self.names:
            home, _, last = name.rpartition(".")
            self._of_class.setdefault(f"{VLLM}:{home.rpartition('.')[2]}", set()).add(last)

    def has(self, use: Use) -> bool:
        """True if the use is of a listed name."""
        if use.dotted:
            return use.name in self.prefixes
        if not use.classes:
            return use.name in self.lasts
        return any(use.name in self._of_class.get(one, ()) for one in self._relatives(use.classes))

    def _relatives(self, classes: Iterable[str]) -> Iterator[str]:
        for one in classes:
            yield from self._index.relatives(one)


class Walk(ast.NodeVisitor):
    """Finds the uses in one file, with what is known of each variable where it is used."""

    def __init__(self, path: str, index: Index, common: frozenset[str], hints: Mapping[str, str]) -> None:
        self.uses: set[Use] = set()
        self.words: set[str] = set()  # every name, attribute and word of a string
        self._path, self._index, self._common = path, index, common
        self._names = Environment(index, OURS, hints=hints)

    def walk(self, tree: ast.Module) -> Walk:
        """Go through a file."""
        self._names.take(tree)
        self.visit(tree)
        return self

    def _note(self, node: ast.AST, name: str, classes: Iterable[str] = (), *, dotted: bool = False) -> None:
        self.uses.add(Use(self._path, getattr(node, "lineno", 0), name, frozenset(classes), dotted))

    # Imports and dotted names.

    def visit_Import(self, node: ast.Import) -> None:
        self._names.take(node)
        for alias in node.names:
            if alias.name.split(".")[0] == VLLM:
                self._note(node, alias.name, dotted=True)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._names.take(node)
        for alias in node.names:
            self.words.add(alias.name)
            if (node.module or "").split(".")[0] == VLLM:
                self._note(node, f"{node.module}.{alias.name}", dotted=True)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            if re.fullmatch(r"[\w.]+|--[a-z-]+", node.value):
                self.words.update(node.value.removeprefix("--").replace("-", "_").split("."))
            if DOTTED.fullmatch(node.value):
                self._note(node, node.value, dotted=True)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # no docstring
            self.visit(node.value)

    # Attributes.

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.words.add(node.attr)
        self._touch(node, self._names.kind(node.value), node.attr)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        texts = [
            one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        others = [one for one in node.args if not isinstance(one, ast.Constant)]
        is_named = getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr")
        for text in filter(str.isidentifier, texts):
            for one in others[:1]:
                kind = self._names.kind(one)
                if is_named or kind.classes:
                    self._touch(node, kind, text)
        self._touch_keywords(node)
        self.generic_visit(node)

    def _touch(self, node: ast.AST, kind: Kind, name: str) -> None:
        """Note an attribute if vLLM defines it."""
        if name.startswith("__"):
            return
        if kind.path and kind.path.split(".")[0] != VLLM:
            return  # of another library
        if kind.path:
            self._note(node, f"{kind.path}.{name}", dotted=True)
            return
        definers = {one for cls in kind.classes for one in self._index.definers(cls, name)}
        theirs = {one for one in definers if one.startswith(VLLM)}
        if theirs:
            self._note(node, name, theirs)
        elif not definers and name not in self._common and name in self._index.names_of_vllm:
            self._note(node, name)

    def _touch_keywords(self, node: ast.Call) -> None:
        made = self._names.kind(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
            made = self._names.kind(node.func.value)
        elif made.result is None or made.classes != made.result.classes:  # no constructor
            return
        for keyword in node.keywords:
            theirs = {cls for cls in made.classes for cls in self._index.definers(cls, keyword.arg or "")}
            if theirs and all(one.startswith(VLLM) for one in theirs):
                self.words.add(keyword.arg or "")
                self._note(keyword.value, keyword.arg or "", theirs)

    # Scopes.

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, name = self._names, f"{OURS}:{node.name}"
        for one in [*node.bases, *node.decorator_list, *node.keywords]:
            self.visit(one)
        self._names = outer.within(name)
        above = {base for base in self._index.relatives(name) if base.startswith(VLLM)}
        for one in node.body:
            given = [one.name] if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) else _targets(one)
            for member in given if above else ():
                self.words.add(member)  # an override perhaps of another version's
                theirs = {base for base in above if self._index.defines(base, member)}
                if theirs and not member.startswith("__"):
                    self._note(one, member, theirs)
            self.visit(one)
        self._names = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for one in [*node.decorator_list, node.args]:
            self.visit(one)
        if node.returns is not None:
            self.visit(node.returns)
        self._within(self._names.of_function(node), node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._within(self._names.of_function(node), [node.body])

    def _within(self, names: Environment, body: Iterable[ast.AST]) -> None:
        outer, self._names = self._names, names
        for one in body:
            self.visit(one)
        self._names = outer

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        outer = self._names
        self._names = outer.within("")
        for one in node.generators:
            self.visit(one.iter)
            self._names.bound([one])
            for test in one.ifs:
                self.visit(test)
        for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self.visit(part)
        self._names = outer

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node)

    # Variables.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            each = [(one, self._names.kind(value)) for one, value in pairs(target, node.value)]
            for one, kind in each:
                self._names.bind(one, kind)
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
        kind = self._names.annotated(node.annotation)
        self._names.bind(node.target, kind | self._names.kind(node.value) if node.value else kind)
        self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._names.bind(node.target, self._names.kind(node.value))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._names.bind(node.target, self._names.kind(node.iter).items or Kind())
        self.visit(node.target)
        for one in [*node.body, *node.orelse]:
            self.visit(one)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._names.bind(item.optional_vars, self._names.kind(item.context_expr))
                self.visit(item.optional_vars)
        for one in node.body:
            self.visit(one)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.visit_With(node)


def _targets(node: ast.stmt) -> list[str]:
    """Names that a statement in a class's body gives a value."""
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if node.value is not None and isinstance(node.target, ast.Name) else []
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [one.id for one in targets if isinstance(one, ast.Name)]
