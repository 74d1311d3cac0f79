"""The waiting window: rows that were never leased, and the choice of the next one."""

from typing import NamedTuple

from conserve.jobs.window.prefix_tree import Key, Leaf, PrefixTree

POSITION_BITS = 40  # a trillion rows a job


class WaitingRow(NamedTuple):
    """A waiting row: the number of its job, in order of submission, and its position in the job."""

    job: int
    position: int


class WaitingWindow:
    """Gives rows out: with probability `utility` the one that shares most with the last, else the stalest.

    This is HyGen's Algorithm 4 (appendix A.3). The random choice depends on `seed` and on `turn`, the number of
    rows given out before, and on nothing else.
    """

    def __init__(self, utility: float, *, seed: int = 0, turn: int = 0, cursor: Key = ()) -> None:
        self.utility, self.seed = utility, seed
        self.turn = turn
        self.cursor = cursor  # key of the last row that was taken for its prefix
        self._tree = PrefixTree()
        self._leaves: dict[int, dict[int, Leaf]] = {}
        self._blocks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def shared(self) -> int:
        """Blocks that need not be computed again when all rows are taken depth first."""
        return self._tree.shared

    def waiting(self, job: int) -> int:
        """Number of waiting rows of a job."""
        return len(self._leaves.get(job, ()))

    def blocks(self, job: int) -> int:
        """Number of blocks in the prompts of a job's waiting rows."""
        return self._blocks.get(job, 0)

    def insert(self, row: WaitingRow, key: Key) -> None:
        """Add a row."""
        rows = self._leaves.setdefault(row.job, {})
        assert row.position not in rows, f"{row} waits already"
        rows[row.position] = self._tree.insert(key, age(row))
        self._blocks[row.job] = self.blocks(row.job) + len(key)

    def pop(self) -> WaitingRow:
        """Give out the next row; a stale one does not move the cursor, so that the group it interrupts goes on."""
        if uniform(self.seed, self.turn) < self.utility:
            leaf = self._tree.next(self.cursor)
            self.cursor = leaf.key
        else:
            leaf = self._tree.stalest()
        self.turn += 1
        row = row_of(leaf.age)
        self.discard(row)
        return row

    def discard(self, row: WaitingRow) -> None:
        """Remove a row."""
        rows = self._leaves[row.job]
        leaf = rows.pop(row.position)
        self._tree.remove(leaf)
        self._blocks[row.job] -= len(leaf.key)
        if not rows:
            del self._leaves[row.job], self._blocks[row.job]

    def discard_job(self, job: int) -> None:
        """Remove all rows of a job."""
        self._blocks.pop(job, None)
        for leaf in self._leaves.pop(job, {}).values():
            self._tree.remove(leaf)


def age(row: WaitingRow) -> int:
    """Age of a row, smaller the longer it waits: by its job's order of submission, then by its position."""
    return row.job << POSITION_BITS | row.position


def row_of(row_age: int) -> WaitingRow:
    """The inverse of `age`."""
    return WaitingRow(row_age >> POSITION_BITS, row_age & ((1 << POSITION_BITS) - 1))


def uniform(seed: int, turn: int) -> float:
    """Random number of a turn, at least 0 and below 1: SplitMix64, which needs no turn before it."""
    mask = (1 << 64) - 1
    mixed = (seed * 0xD1342543DE82EF95 + (turn + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
