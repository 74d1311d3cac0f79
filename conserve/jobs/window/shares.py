"""Shares: jobs get tokens by weights, and not strictly by priority (`--share`).

Jobs are in groups: those of one priority, or each one alone. A group's count is the tokens of its rows over its
weight, and the next row is one of the group with the smallest count: stride scheduling (Waldspurger and Weihl,
1995), charged in tokens. A row is charged at its claim with the group's usual tokens, and settled at its end with
its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conserve.errors import SettingsError
from conserve.store.books.shapes import ClaimableJob

JOBS = "jobs"
USUAL_TOKENS = 500.0  # of a row before any has ended
QUANTA = 8  # parts that the rows of a claim are dealt in: each group that gets some costs a transaction
REST = 1.0  # weight of priorities that are not named

RowKey = tuple[str, int]


class Group(NamedTuple):
    """Jobs that share one weight: of a priority, or one job by its number."""

    priority: int
    job: int | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights by priority; None for all jobs alike."""

    by_priority: Mapping[int, float] | None

    @classmethod
    def of(cls, text: str) -> "Weights":
        """Read `10=3,0=1` or `jobs`; raises `SettingsError`."""
        if text.strip() == JOBS:
            return cls(None)
        found: dict[int, float] = {}
        for part in text.split(","):
            name, _, weight = part.partition("=")
            try:
                priority, parts = int(name), float(weight)
            except ValueError:
                raise SettingsError(unreadable(text)) from None
            if not 0 < parts < float("inf"):
                raise SettingsError(unreadable(text))
            if priority in found:
                raise SettingsError(f"--share {text} names the priority {priority} twice; give each once")
            found[priority] = parts
        return cls(found)

    def group_of(self, job: ClaimableJob) -> Group:
        """Group of a runnable job."""
        return Group(0, job.seq) if self.by_priority is None else Group(job.priority)

    def of_group(self, group: Group) -> float:
        """Weight of a group."""
        return 1.0 if self.by_priority is None else self.by_priority.get(group.priority, REST)


def unreadable(text: str) -> str:
    """Sentence for weights that cannot be read."""
    return f"--share takes weights above 0 of priorities, like 10=3,0=1, or jobs for all jobs alike, not {text!r}"


class Charge(NamedTuple):
    """Tokens that a row in flight was charged with."""

    group: Group
    tokens: float
    epoch: int  # of the row's lease


class Shares:
    """Counts of the groups since the start of a run."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._counts: dict[Group, float] = {}
        self._last: set[Group] = set()  # the busy groups, as long as there were any
        self._busy: set[Group] = set()  # groups that had a row at their last claim, or wait for one
        self._in_flight: dict[RowKey, Charge] = {}
        self._ended: dict[Group, tuple[int, float]] = {}  # rows and their tokens

    def groups(self, runnable: Iterable[ClaimableJob]) -> list[Group]:
        """Groups of these jobs, in their order; the others have no rows from now on."""
        found = dict.fromkeys(map(self.weights.group_of, runnable))
        self._stay_busy(self._busy & found.keys())
        return list(found)

    def allot(self, groups: Sequence[Group], rows: int) -> dict[Group, int]:
        """Number of the next `rows` rows that each group gets, the one whose turn it is first.

        They are dealt several at a time; what a group has too many of is in its count at the next claim.
        """
        counts = {group: self._count(group) for group in groups}
        self._counts |= counts
        self._busy |= counts.keys()  # those without a row this time are not levelled again: they come next
        allotted: dict[Group, int] = {}
        quantum, left = max(1, rows // QUANTA), rows if counts else 0
        while left > 0:
            group, dealt = min(counts, key=lambda one: counts[one]), min(quantum, left)
            allotted[group] = allotted.get(group, 0) + dealt
            counts[group] += dealt * self._usual(group) / self.weights.of_group(group)
            left -= dealt
        return allotted

    def claimed(self, group: Group, rows: Mapping[RowKey, int]) -> None:
        """Charge a group for rows that were claimed, with the epochs of their leases.

        A group without any has none for now, and saves nothing up.
        """
        if not rows:
            self._stay_busy(self._busy - {group})
            return
        self._busy.add(group)
        tokens = self._usual(group)
        for row, epoch in rows.items():
            self.settled(row, 0)
            self._in_flight[row] = Charge(group, tokens, epoch)
            self._add(group, tokens)

    def settled(self, row: RowKey, tokens: int) -> None:
        """Count what a row took in place of its charge: nothing if it goes back."""
        charge = self._in_flight.pop(row, None)
        if charge is None:
            return
        self._add(charge.group, tokens - charge.tokens)
        if tokens:
            rows, sum_ = self._ended.get(charge.group, (0, 0.0))
            self._ended[charge.group] = rows + 1, sum_ + tokens

    def stands(self, row: RowKey) -> None:
        """Let the charge of a row stand: its attempt took time, and brought no answer whose tokens would count."""
        self._in_flight.pop(row, None)

    def lost(self, epochs: Collection[int] | None = None) -> None:
        """Take back the charges of rows whose leases are gone, of all rows by default: others compute them."""
        gone = [row for row, charge in self._in_flight.items() if epochs is None or charge.epoch in epochs]
        for row in gone:
            self.settled(row, 0)

    def _add(self, group: Group, tokens: float) -> None:
        self._counts[group] = self._counts.get(group, 0.0) + tokens / self.weights.of_group(group)

    def _count(self, group: Group) -> float:
        """Count of a group; one that had no rows begins level with the smallest of the others."""
        count = self._counts.get(group, 0.0)
        if group in self._busy:
            return count
        return max(count, self._lowest())

    def _stay_busy(self, groups: set[Group]) -> None:
        """Let these groups alone be busy from now on."""
        self._last = self._busy or self._last
        self._busy = groups

    def _lowest(self) -> float:
        """Smallest count of the busy groups, or of those that were it last, so that none comes back in debt."""
        return min((self._counts[one] for one in self._busy or self._last), default=0.0)

    def _usual(self, group: Group) -> float:
        """Mean tokens of the group's rows; of all rows, or `USUAL_TOKENS`, until one has ended."""
        ended = [self._ended[group]] if group in self._ended else [*self._ended.values()]
        rows = sum(rows for rows, _ in ended)
        return sum(tokens for _, tokens in ended) / rows if rows else USUAL_TOKENS
