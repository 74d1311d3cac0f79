"""The waiting window: rows that were never leased, and the choice of the next one."""

from collections.abc import Sequence
from typing import NamedTuple

from conserve.jobs.deadlines.slack import SlackOrder, is_others_turn
from conserve.jobs.window.prefix_tree import Key, Leaf, PrefixTree, common

POSITION_BITS = 40  # a trillion rows a job
OTHERS = -1  # the lane of all jobs without a deadline


class WaitingRow(NamedTuple):
    """A waiting row: the number of its job, in order of submission, and its position in the job."""

    job: int
    position: int


class WaitingWindow:
    """Gives rows out: with probability `utility` the one that shares most with the last, else the stalest.

    This is HyGen's Algorithm 4 (appendix A.3). The random choice depends on `seed` and on `turn`, the number of
    rows given out before, and on nothing else. Jobs with a deadline have a lane each, which `arrange` orders; the
    algorithm chooses among the jobs without one.
    """

    def __init__(self, utility: float, *, seed: int = 0, turn: int = 0, cursor: Key = ()) -> None:
        self.utility, self.seed = utility, seed
        self.turn = turn
        self.cursor = cursor  # key of the last row that was taken for its prefix
        self._order = SlackOrder()
        self._lanes: dict[int, PrefixTree] = {OTHERS: PrefixTree()}  # only `OTHERS` may be empty
        self._others_cursor: Key = ()  # while jobs with a deadline move `cursor`
        self._leaves: dict[int, dict[int, Leaf]] = {}
        self._blocks: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    @property
    def shared(self) -> int:
        """Blocks that need not be computed again when all rows are taken depth first, lane by lane."""
        return sum(tree.shared for tree in self._lanes.values())

    def arrange(self, order: SlackOrder) -> None:
        """Give rows out in this order from now on; rows of jobs that came into it, or left it, change lanes."""
        moved = {
            job: {position: leaf.key for position, leaf in self._leaves.get(job, {}).items()}
            for job in set(self._order.urgent) ^ set(order.urgent)
        }
        for job in moved:
            self.discard_job(job)
        self._order = order
        for job, keys in moved.items():
            for position, key in keys.items():
                self.insert(WaitingRow(job, position), key)

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
        lane = self._lanes.setdefault(self._lane_of(row.job), PrefixTree())
        rows[row.position] = lane.insert(key, age(row))
        self._blocks[row.job] = self.blocks(row.job) + len(key)

    def pop(self) -> WaitingRow:
        """Give out the next row of the lane whose turn it is."""
        urgent = [job for job in self._order.urgent if job in self._lanes]
        waiting = len(self._lanes[OTHERS]) > 0
        if urgent and not (waiting and is_others_turn(self.turn, self._order.share)):
            leaf = self._urgent(urgent)
            self.cursor = leaf.key
        else:
            leaf = self._undated(beside=bool(urgent))
        self.turn += 1
        row = row_of(leaf.age)
        self.discard(row)
        return row

    def _undated(self, *, beside: bool) -> Leaf:
        """Next row without a deadline; a stale one moves no cursor, so that the group it interrupts goes on."""
        # Beside jobs with a deadline such rows have a cursor of their own.
        tree = self._lanes[OTHERS]
        if uniform(self.seed, self.turn) >= self.utility:
            return tree.stalest()
        leaf = tree.next(self._others_cursor if beside else self.cursor)
        if beside:
            self._others_cursor = leaf.key
        else:
            self.cursor = leaf.key
        return leaf

    def _urgent(self, urgent: Sequence[int]) -> Leaf:
        """Next row of the first job, or a rider's that shares more blocks with the last row than any before it."""
        found = self._lanes[urgent[0]].next(self.cursor)
        most = shared_blocks(found.key, self.cursor)
        riders = [job for job in urgent[1:] if job in self._order.riders]
        for lane in (*riders, *([OTHERS] if self._order.others_ride else [])):
            if not self._lanes[lane].continues(self.cursor):
                continue
            leaf = self._lanes[lane].next(self.cursor)
            if (shared := shared_blocks(leaf.key, self.cursor)) > most:
                found, most = leaf, shared
        return found

    def _lane_of(self, job: int) -> int:
        return job if job in self._order.urgent else OTHERS

    def discard(self, row: WaitingRow) -> None:
        """Remove a row."""
        rows = self._leaves[row.job]
        leaf = rows.pop(row.position)
        self._remove(row.job, leaf)
        self._blocks[row.job] -= len(leaf.key)
        if not rows:
            del self._leaves[row.job], self._blocks[row.job]

    def discard_job(self, job: int) -> None:
        """Remove all rows of a job."""
        self._blocks.pop(job, None)
        for leaf in self._leaves.pop(job, {}).values():
            self._remove(job, leaf)

    def _remove(self, job: int, leaf: Leaf) -> None:
        lane = self._lane_of(job)
        self._lanes[lane].remove(leaf)
        if lane != OTHERS and not len(self._lanes[lane]):
            del self._lanes[lane]


def shared_blocks(one: Key, other: Key) -> int:
    """Number of blocks that two keys have in common from the start."""
    return common(one, other, 0, min(len(one), len(other)))


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
