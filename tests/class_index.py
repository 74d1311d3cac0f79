"""Classes and functions of parsed source: bases, attributes, and kinds of what these hold, found when asked for."""

from __future__ import annotations

import ast
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from tests.known_names import OURS, RECORDS, UNKNOWN, VLLM, Environment, Kind, last_part

BODIES = ("body", "handlers", "orelse", "finalbody", "cases")  # where statements have others


@dataclass(slots=True)
class Found:
    """A class: its bases, and for each attribute ways to find out what it holds."""

    named: list[Callable[[], Iterable[str]]] = field(
        default_factory=list
    )  # the bases, once all files are read
    members: dict[str, list[Callable[[], Kind]]] = field(default_factory=dict)

    def add(self, name: str, held: Callable[[], Kind]) -> None:
        """Note an attribute."""
        self.members.setdefault(name, []).append(held)


class Index:
    """Classes and functions of many files."""

    def __init__(self) -> None:
        self.classes: dict[str, Found] = {}
        self.functions: dict[str, Callable[[], Kind]] = {}
        self.aliases: dict[str, str] = {}  # conserve:VllmWorker -> vllm:Worker
        self._lines: dict[str, frozenset[str]] = {}
        self._looking: set[tuple[str, str]] = set()
        self._held: dict[tuple[str, str], Kind] = {}

    def add(self, path: Path, owner: str) -> ast.Module:
        """Read a file; returns what it says."""
        with warnings.catch_warnings(action="ignore"):  # of escapes in vLLM's strings
            tree = ast.parse(path.read_text())
        names = Environment(self, owner)
        names.take(tree)
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                self._add_class(node, owner, names)
            elif isinstance(node, ast.ImportFrom) and owner == OURS and (node.module or "").startswith(VLLM):
                for alias in node.names:
                    self.aliases[f"{OURS}:{alias.asname or alias.name}"] = f"{VLLM}:{alias.name}"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[f"{owner}:{node.name}"] = lambda node=node: names.returned(node)
        return tree

    def _add_class(self, node: ast.ClassDef, owner: str, names: Environment) -> None:
        found = self.classes.setdefault(f"{owner}:{node.name}", Found())
        bases = [last_part(base) for base in node.bases]
        found.named.append(lambda: filter(None, map(names.class_named, bases)))
        is_record = bool(node.decorator_list) or not RECORDS.isdisjoint(bases)
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                if owner == VLLM or is_record or one.value is not None:
                    found.add(one.target.id, lambda one=one: names.annotated(one.annotation))
            elif isinstance(one, ast.Assign):
                for target in one.targets:
                    if isinstance(target, ast.Name):
                        found.add(target.id, lambda one=one: names.kind(one.value))
            elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                self._add_method(found, one, names.within(f"{owner}:{node.name}"))

    def _add_method(
        self, found: Found, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Environment
    ) -> None:
        read = any("property" in last_part(one) for one in node.decorator_list)
        returned = lambda: names.returned(node)  # noqa: E731
        found.add(node.name, returned if read else lambda: Kind(result=returned()))
        inner = cache(lambda: names.of_function(node))  # when all classes are read
        for one in statements(node):
            if isinstance(one, ast.AnnAssign):
                for name in _own(one.target):
                    found.add(name, lambda one=one: inner().annotated(one.annotation))
            elif isinstance(one, ast.Assign):
                for target, value in (pair for given in one.targets for pair in pairs(given, one.value)):
                    for name in _own(target):
                        found.add(name, lambda value=value: inner().kind(value))

    def line(self, name: str) -> frozenset[str]:
        """The class and all its bases."""
        if name not in self._lines:
            self._lines[name] = frozenset(
                {name}
            )  # two classes of one name may seem to inherit from each other
            named = self.classes[name].named if name in self.classes else []
            bases = {base for bases in named for base in bases()}
            self._lines[name] |= {above for base in bases for above in self.line(base)}
        return self._lines[name]

    @cached_property
    def _below(self) -> dict[str, set[str]]:
        below: dict[str, set[str]] = {}
        for name in self.classes:
            for base in self.line(name):
                below.setdefault(base, set()).add(name)
        return below

    def relatives(self, name: str) -> set[str]:
        """The class, its bases, its subclasses, and the bases of those: what an object of it may be."""
        return {above for below in self._below.get(name, {name}) for above in self.line(below)}

    def definers(self, name: str, attribute: str) -> set[str]:
        """Classes with this attribute that an object of the class may be of: its own line, or else relatives."""
        own = {one for one in self.line(name) if attribute in self._members(one)}
        if any(one.startswith(VLLM) for one in own):
            return own
        return own | {one for one in self.relatives(name) if attribute in self._members(one)}

    def _members(self, name: str) -> Mapping[str, list[Callable[[], Kind]]]:
        return self.classes[name].members if name in self.classes else {}

    def held(self, name: str, attribute: str) -> Kind:
        """Kind of what an attribute of a class holds."""
        key = (name, attribute)
        if key in self._held or key in self._looking:
            return self._held.get(key, UNKNOWN)
        self._looking.add(key)
        found = UNKNOWN
        for definer in self.definers(name, attribute):
            for held in self._members(definer)[attribute]:
                found = found | held()
        self._looking.discard(key)
        if not self._looking:  # else it may lack what is being looked for
            self._held[key] = found
        return found

    def defines(self, name: str, attribute: str) -> bool:
        """True if this class, and not only a base of it, has the attribute."""
        return attribute in self._members(name)

    def members_of(self, owner: str) -> frozenset[str]:
        """All attributes that classes of vLLM, or ours, define."""
        classes = (found for name, found in self.classes.items() if name.startswith(f"{owner}:"))
        return frozenset(member for found in classes for member in found.members)

    @cached_property
    def names_of_vllm(self) -> frozenset[str]:
        """All attributes that classes of vLLM define."""
        return self.members_of(VLLM)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements in a tree, as `ast.walk` comes by them; the expressions are ten times as many."""
    found = deque([tree])
    while found:
        node = found.popleft()
        yield node
        for name in BODIES:
            found.extend(getattr(node, name, ()))


def _own(target: ast.expr) -> Iterator[str]:
    """Attributes of `self` among assignment targets."""
    if isinstance(target, ast.Tuple):
        for one in target.elts:
            yield from _own(one)
    elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
        yield target.attr


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of target and value: `a, b = c, d` is two assignments."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value
