"""Host memory's bookkeeping against the obvious one, under any sequence of events."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve.engine.runtime.host_memory import HostMemory
from tests.conftest import examples
from tests.reach import reached

CAPACITY = 5
keys = st.integers(0, 6)


class Memory(RuleBasedStateMachine):
    """Rows and copies hold blocks, give them up, and look for what others left."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = HostMemory(CAPACITY)
        self.holds: list[int] = []  # one entry a holder
        self.content: dict[int, int] = {}  # block -> key
        self.written: set[int] = set()
        self.forgotten: set[int] = set()

    @rule(key=keys, at_once=st.booleans())
    def allocate(self, key: int, at_once: bool) -> None:
        """Have a row hold a new block, which may be written at once."""
        if self.memory.find(key) is not None:
            return
        room = self.memory.room
        block = self.memory.allocate(key)
        assert (block is None) == (room == 0)
        if not reached("a block is allocated", block is not None):
            return
        assert block is not None
        assert block not in self.holds, "the block is held"
        self.holds.append(block)
        self.content[block] = key
        self.written.discard(block)
        self.forgotten.discard(block)
        if at_once:
            self.memory.written(block)
            self.written.add(block)

    @precondition(lambda self: self.holds)
    @rule(pick=st.randoms(use_true_random=False))
    def write(self, pick: Callable[..., int]) -> None:
        block = pick.choice(self.holds)  # type: ignore[attr-defined]
        self.memory.written(block)
        self.written.add(block)

    @precondition(lambda self: self.holds)
    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick: Callable[..., int]) -> None:
        block = pick.choice(self.holds)  # type: ignore[attr-defined]
        self.holds.remove(block)
        self.memory.release([block])
        if reached("its last holder releases it", block not in self.holds):
            found = self.memory.find(self.content[block])
            assert (found == block) == (block in self.written and block not in self.forgotten)

    @precondition(lambda self: self.holds)
    @rule(pick=st.randoms(use_true_random=False))
    def forget(self, pick: Callable[..., int]) -> None:
        block = pick.choice(self.holds)  # type: ignore[attr-defined]
        self.memory.forget(block)
        self.forgotten.add(block)
        assert self.memory.find(self.content[block]) != block

    @rule(key=keys)
    def find(self, key: int) -> None:
        self.hold(self.memory.find(key), key)

    @precondition(lambda self: self.written - self.forgotten)
    @rule(pick=st.randoms(use_true_random=False))
    def find_what_was_written(self, pick: Callable[..., int]) -> None:
        there = sorted(self.written - self.forgotten)
        key = self.content[pick.choice(there)]  # type: ignore[attr-defined]
        block = self.memory.find(key)
        if reached("a block is found", block is not None):
            self.hold(block, key)

    def hold(self, block: int | None, key: int) -> None:
        """Have a row hold the block that was found for a key."""
        if block is None:
            return
        assert self.content[block] == key
        assert block in self.holds or block in self.written
        self.memory.hold(block)
        self.holds.append(block)

    @precondition(lambda self: len(self.written) >= CAPACITY // 2)
    @rule()
    def clear(self) -> None:
        self.memory.clear()
        assert self.memory.used == len(set(self.holds))

    @invariant()
    def room_is_the_blocks_that_are_not_held(self) -> None:
        assert self.memory.room == CAPACITY - len(set(self.holds))
        assert self.memory.used <= CAPACITY


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


def test_what_was_released_first_goes_first() -> None:
    memory = HostMemory(3)
    blocks = [memory.allocate(key) for key in "abc"]
    for block in blocks:
        assert block is not None
        memory.written(block)
    memory.release(block for block in reversed(blocks) if block is not None)
    memory.allocate("d")
    assert memory.find("c") is None, "the end of a row goes before its beginning"
    assert memory.find("a") == blocks[0]
