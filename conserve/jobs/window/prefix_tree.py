"""A prefix tree over waiting requests, to find the one that shares most with the request before it.

A key is a sequence of numbers, one for each block of the prompt, which stands for that block and all before it.
Two requests share as many blocks as their keys have in common from the start.
"""

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

Key = Sequence[int]

SPARE = 16  # a heap is rebuilt once its outdated entries outnumber the others by this


class Node:
    """A node below a branch: another branch, or a request.

    `age` is the age of its oldest request. `shared` counts the blocks, from the branch above on, that need not be
    computed again when all its requests are taken depth first.
    """

    __slots__ = ("age", "key", "listed", "parent", "shared")

    def __init__(self, key: Key, age: int) -> None:
        self.key, self.age = key, age
        self.shared = 0
        self.parent: Branch | None = None
        self.listed = False  # among its parent's news

    def __lt__(self, other: object) -> bool:
        return False  # heaps compare nodes only where all else is equal, so any order will do


class Leaf(Node):
    """One waiting request; the smaller its `age`, the longer it has waited."""

    __slots__ = ()


class Branch(Node):
    """Two or more children whose keys agree in the first `end` blocks, and in no further one.

    Heaps keep the best and the oldest child. Their entries may have become too good, and are compared with the
    children when they come to the top. So the removal of a request costs nothing here.
    """

    __slots__ = ("ages", "best", "children", "count", "edge", "end", "news")

    def __init__(self, key: Key, age: int, *, end: int, edge: int) -> None:
        super().__init__(key, age)
        self.end, self.edge = end, edge  # `edge`: blocks between the parent's end and this
        self.count = 0  # requests below
        self.children: dict[Hashable, Node] = {}
        self.best: list[tuple[int, int, Node]] = []
        self.ages: list[tuple[int, Node]] = []
        self.news: list[Node] = []  # children that came or became better since `choose`

    def put(self, child: Node) -> None:
        """Add a child, in place of one whose key continues with the same block."""
        self.children[head(child, self.end)] = child
        child.parent, child.listed = self, False
        self.see(child)
        self.see_age(child)

    def see(self, child: Node) -> None:
        """Note that a child has come or become better."""
        if not child.listed:
            child.listed = True
            self.news.append(child)
        if len(self.news) > 2 * len(self.children) + SPARE:
            self.news = [child for child in self.news if child.parent is self]

    def see_age(self, child: Node) -> None:
        """Note that a child has come or become older."""
        heappush(self.ages, (child.age, child))
        if len(self.ages) > 2 * len(self.children) + SPARE:
            self.ages = [(child.age, child) for child in self.children.values()]
            heapify(self.ages)

    def choose(self) -> Node:
        """The child with most blocks to share, the oldest of several."""
        for child in self.news:
            if child.parent is self:
                child.listed = False
                heappush(self.best, (-child.shared, child.age, child))
        self.news.clear()
        if len(self.best) > 2 * len(self.children) + SPARE:
            self.best = [(-child.shared, child.age, child) for child in self.children.values()]
            heapify(self.best)
        while True:
            shared, age, child = self.best[0]
            if child.parent is not self:
                heappop(self.best)
            elif shared != -child.shared or age != child.age:
                heapreplace(self.best, (-child.shared, child.age, child))
            else:
                return child

    def eldest(self) -> Node:
        """The child with the oldest request."""
        while True:
            age, child = self.ages[0]
            if child.parent is not self:
                heappop(self.ages)
            elif age != child.age:
                heapreplace(self.ages, (child.age, child))
            else:
                return child


class PrefixTree:
    """All waiting requests. Adding or removing one takes time by the length of its key, not by their number."""

    def __init__(self) -> None:
        self._root = Branch((), 0, end=0, edge=0)

    def __len__(self) -> int:
        return self._root.count

    @property
    def shared(self) -> int:
        """Blocks that need not be computed again when all requests are taken depth first."""
        return self._root.shared

    def insert(self, key: Key, age: int) -> Leaf:
        """Add a request; no two may have one age."""
        leaf = Leaf(key, age)
        branch = self._root
        while (child := branch.children.get(head(leaf, branch.end))) is not None:
            if isinstance(child, Branch) and leads_along(child, key):
                branch = child
            else:
                branch = split(branch, child, key)
        branch.put(leaf)
        self._grow(branch, age)
        return leaf

    def _grow(self, branch: Branch, age: int) -> None:
        """Update the branches above a new request."""
        gained = 0
        while (parent := branch.parent) is not None:
            gained += branch.edge
            branch.shared += gained
            branch.count += 1
            parent.see(branch)
            if age < branch.age:
                branch.age = age
                parent.see_age(branch)
            branch = parent
        branch.shared += gained
        branch.count += 1

    def remove(self, leaf: Leaf) -> None:
        """Remove a request."""
        branch = leaf.parent
        assert branch is not None, "it is out already"
        del branch.children[head(leaf, branch.end)]
        leaf.parent = None
        self._shrink(branch, leaf.age)
        if len(branch.children) == 1 and branch.parent is not None:
            dissolve(branch)

    def _shrink(self, branch: Branch, age: int) -> None:
        """Update the branches above a request that was removed."""
        lost = 0
        above: Branch | None = branch
        while above is not None:
            lost += above.edge
            above.shared -= lost
            above.count -= 1
            if age == above.age and above.children:
                above.age = above.eldest().age
            above = above.parent

    def next(self, cursor: Key) -> Leaf:
        """The request that comes depth first after the one with the key `cursor`.

        No other request shares more blocks with that one; among equals, subtrees with more to share come first.
        """
        found: Node = self._root
        on_the_way = True
        while isinstance(found, Branch):
            on_the_way = on_the_way and found.end < len(cursor)
            child = found.children.get(cursor[found.end]) if on_the_way else None
            if child is None:
                on_the_way, child = False, found.choose()
            elif isinstance(child, Branch):
                on_the_way = leads_along(child, cursor)
            found = child
        assert isinstance(found, Leaf)
        return found

    def continues(self, cursor: Key) -> bool:
        """True if a request shares a block with the one with the key `cursor`."""
        return bool(cursor) and cursor[0] in self._root.children

    def stalest(self) -> Leaf:
        """The request that has waited longest."""
        found: Node = self._root
        while isinstance(found, Branch):
            found = found.eldest()
        assert isinstance(found, Leaf)
        return found


def head(child: Node, depth: int) -> Hashable:
    """Key of a child among its siblings: its block at this depth, or its age if it ends there."""
    return child.key[depth] if depth < len(child.key) else (child.age,)


def leads_along(branch: Branch, key: Key) -> bool:
    """True if a key whose next block is the branch's agrees with the branch's key up to its end."""
    return branch.end <= len(key) and key[branch.end - 1] == branch.key[branch.end - 1]


def split(parent: Branch, child: Node, key: Key) -> Branch:
    """Put a new branch between parent and child, where the child's key and `key` part."""
    limit = min(child.end if isinstance(child, Branch) else len(child.key), len(key))
    end = common(child.key, key, parent.end + 1, limit)
    between = Branch(child.key, child.age, end=end, edge=end - parent.end)
    between.shared = child.shared
    between.count = 1
    if isinstance(child, Branch):
        between.count = child.count
        child.edge -= between.edge
        child.shared -= (child.count - 1) * between.edge
    parent.put(between)
    between.put(child)
    return between


def common(one: Key, other: Key, low: int, high: int) -> int:
    """Number of blocks that two keys have in common, known to be from `low` to `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def dissolve(branch: Branch) -> None:
    """Replace a branch by the only child that it has left."""
    (child,) = branch.children.values()
    parent = branch.parent
    assert parent is not None
    if isinstance(child, Branch):
        child.edge += branch.edge
        child.shared = branch.shared
    branch.parent = None
    parent.put(child)
