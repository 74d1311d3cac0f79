"""The prefix tree against the obvious way: look at all requests, again and again."""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve.jobs.window.prefix_tree import Branch, Leaf, PrefixTree
from tests.conftest import examples

Key = tuple[int, ...]
WORDS = st.lists(st.integers(0, 2), max_size=6)


def chained(words: Sequence[int]) -> Key:
    """A number for each beginning, as hashes of blocks would be."""
    key, so_far = [], 0
    for word in words:
        so_far = so_far * 3 + word + 1
        key.append(so_far)
    return tuple(key)


def shared(keys: Sequence[Key], depth: int = 0) -> int:
    """Blocks beyond `depth` less those that are different."""
    return sum(len(key) - depth for key in keys) - len({k for key in keys for k in key[depth:]})


def next_of(waiting: dict[int, Key], cursor: Key) -> int:
    """Depth first from the cursor, block by block, looking at every request each time."""
    left, depth, on_the_way = dict(waiting), 0, True
    while True:
        groups: dict[Any, dict[int, Key]] = {}
        for age, key in left.items():
            groups.setdefault(key[depth] if depth < len(key) else (age,), {})[age] = key
        on_the_way = on_the_way and depth < len(cursor) and cursor[depth] in groups
        if on_the_way:
            left = groups[cursor[depth]]
        else:
            left = min(groups.values(), key=lambda group: (-shared(list(group.values()), depth), min(group)))
        if len(left) == 1:
            return next(iter(left))
        depth += 1


def keys_below(branch: Branch) -> list[Key]:
    """Keys of the requests below a branch."""
    found: list[Key] = []
    for child in branch.children.values():
        found += keys_below(child) if isinstance(child, Branch) else [tuple(child.key)]
    return found


class Trees(RuleBasedStateMachine):
    """Any requests come and go in any order; the tree says what the obvious way says."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.waiting: dict[int, Key] = {}
        self.leaves: dict[int, Leaf] = {}
        self.cursor: Key = ()
        self.used: set[int] = set()

    @rule(words=WORDS, age=st.integers(0, 200))
    def insert(self, words: list[int], age: int) -> None:
        if age in self.used:
            return
        self.used.add(age)
        self.waiting[age] = chained(words)
        self.leaves[age] = self.tree.insert(self.waiting[age], age)

    @precondition(lambda self: self.waiting)
    @rule()
    def take_next(self) -> None:
        leaf = self.tree.next(self.cursor)
        assert leaf.age == next_of(self.waiting, self.cursor)
        self.cursor = self.waiting[leaf.age]
        self.take(leaf)

    @precondition(lambda self: self.waiting)
    @rule()
    def take_stalest(self) -> None:
        leaf = self.tree.stalest()
        assert leaf.age == min(self.waiting)
        self.take(leaf)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.take(self.leaves[data.draw(st.sampled_from(sorted(self.waiting)))])

    @rule(words=WORDS)
    def go_elsewhere(self, words: list[int]) -> None:
        self.cursor = chained(words)

    def take(self, leaf: Leaf) -> None:
        assert leaf is self.leaves[leaf.age]
        self.tree.remove(leaf)
        del self.waiting[leaf.age]

    @invariant()
    def it_holds_what_waits(self) -> None:
        assert len(self.tree) == len(self.waiting)
        assert self.tree.shared == shared(list(self.waiting.values()))

    @invariant()
    def a_branch_has_two_children_and_knows_what_is_below(self) -> None:
        branches = [self.tree._root]
        while branches:
            branch = branches.pop()
            above = branch.parent.end if branch.parent else 0
            keys = keys_below(branch)
            assert branch.edge == branch.end - above
            assert (branch.count, branch.shared) == (len(keys), shared(keys, above))
            if branch.parent is not None:
                assert len(branch.children) >= 2
                assert branch.age == min(child.age for child in branch.children.values())
            for child in branch.children.values():
                assert child.parent is branch
                if isinstance(child, Branch):
                    branches.append(child)
            for heap in (branch.best, branch.ages, branch.news):
                assert len(heap) <= 2 * len(branch.children) + 40, "what is gone is forgotten"

    def teardown(self) -> None:
        while self.waiting:
            self.take_next()


TestTrees = Trees.TestCase
TestTrees.settings = hypothesis_settings(max_examples=examples(200), stateful_step_count=60)


def test_a_long_walk_among_long_prompts_agrees_with_the_obvious_way() -> None:
    """Prompts part rarely, so that branches are many blocks long."""
    dice, trees = Random(3), Trees()
    for age in dice.sample(range(1000), 400):
        stem = dice.choice([[0] * 6, [0, 0, 0, 1, 1], [1] * 5])
        words = [*stem[: dice.randint(0, 6)], *[dice.choice([0, 0, 2])] * dice.randint(0, 3)]
        trees.insert(words=words, age=age)
        trees.it_holds_what_waits()
        if len(trees.waiting) > 25 or dice.random() < 0.3:
            leave = dice.choice([trees.take_next, trees.take_next, trees.take_stalest, None])
            if leave is not None:
                leave()
            else:
                trees.take(trees.leaves[dice.choice(sorted(trees.waiting))])
            if dice.random() < 0.2:
                trees.go_elsewhere(words=words)
        trees.it_holds_what_waits()
        trees.a_branch_has_two_children_and_knows_what_is_below()
    trees.teardown()
    assert (len(trees.tree), trees.tree.shared) == (0, 0)


@given(rows=st.lists(WORDS, min_size=1, max_size=40), spare=st.integers(0, 3))
def test_every_shared_block_is_computed_once_where_the_cache_holds_one_prompt(
    rows: list[list[int]], spare: int
) -> None:
    """However much larger than the cache a group is, depth first it stays in it."""
    keys = [chained(words) for words in rows]
    cache = Cache(max(map(len, keys)) + spare)
    computed = sum(cache.compute(keys[age]) for age in depth_first(keys))
    assert computed == len({block for key in keys for block in key})


def test_other_orders_compute_a_group_larger_than_the_cache_again() -> None:
    keys = [chained([group, row % 3, row // 3]) for row in range(9) for group in range(3)]
    orders = {"depth first": depth_first(keys), "as they came": list(range(len(keys)))}
    computed = {}
    for name, order in orders.items():
        cache = Cache(4)
        computed[name] = sum(cache.compute(keys[age]) for age in order)
    assert computed == {"depth first": 3 + 9 + 27, "as they came": 3 * 27}


def depth_first(keys: Sequence[Key]) -> list[int]:
    tree, cursor, order = PrefixTree(), (), []
    for age, key in enumerate(keys):
        tree.insert(key, age)
    while len(tree):
        leaf = tree.next(cursor)
        tree.remove(leaf)
        cursor = tuple(leaf.key)
        order.append(leaf.age)
    return order


class Cache:
    """A prefix cache that forgets the block used least recently, of one request the last one first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held: OrderedDict[int, None] = OrderedDict()

    def compute(self, key: Key) -> int:
        """Number of this prompt's blocks that the cache lacks."""
        missing = next((len(key) - depth for depth, block in enumerate(key) if block not in self.held), 0)
        for block in reversed(key):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)
        return missing


def test_a_deep_tree_needs_no_recursion() -> None:
    """Each prompt goes on where another ends, as the turns of a long chat do."""
    tree = PrefixTree()
    key = chained([0] * 3000)
    leaves = [tree.insert(key[: turn + 1], turn) for turn in range(0, 3000, 2)]
    assert tree.stalest() is leaves[0]
    assert tree.next(()) is leaves[-2]
    assert tree.next(leaves[9].key) is leaves[-2]
    for leaf in leaves:
        tree.remove(leaf)
    assert tree.shared == 0
