"""Reuse of live prompts: what a prefix cache would hold for these alone, and how far back they reach. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from math import ceil, inf, log
from typing import NamedTuple

STEP = 1.25  # of the buckets that distances and ages are counted in
MOST = 1 << 14  # reused blocks after which all counts are halved: traffic changes


class Reach(NamedTuple):
    """Distance back to the KV that live requests find, in blocks and in time."""

    blocks: int  # used since, at most
    age_s: float


class _Use(NamedTuple):
    """The last use of some blocks: by one request."""

    at_s: float
    before: int  # uses of blocks before it


class PrefixReuse:
    """A prefix cache of so many blocks as live requests alone would have it: names of blocks, the last used ones.

    A block is named by its hash, as vLLM names it.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[Hashable, _Use] = OrderedDict()  # the longest unused first
        self._uses = 0  # of blocks
        self._distances, self._ages_s = BucketCounts(), BucketCounts()

    def found(self, names: Iterable[Hashable], *, now: float) -> int:
        """Number of first blocks of a prompt that the cache holds; notes how far back they reach."""
        held = self._held
        uses = []
        for name in names:
            if (use := held.get(name)) is None:
                break
            uses.append(use)
        for use, of in groupby(uses):
            times = sum(1 for _ in of)
            self._distances.note(self._uses - use.before, times)
            self._ages_s.note(now - use.at_s, times)
        return len(uses)

    def used(self, names: Sequence[Hashable], *, now: float) -> None:
        """Take in the blocks of a request that ended; its last block is dropped before its first one."""
        held, use = self._held, _Use(now, self._uses)
        self._uses += len(names)
        for name in reversed(names):
            held[name] = use
            held.move_to_end(name)
        while len(held) > self._blocks:
            held.popitem(last=False)

    def reach(self, share: float) -> Reach:
        """Distance and age below which this share of reused blocks were found; zeros while none was."""
        return Reach(ceil(self._distances.quantile(share)), self._ages_s.quantile(share))

    @property
    def early(self) -> bool:
        """True until live requests have used as many blocks as the cache has: long reuses cannot have been seen."""
        return self._uses < self._blocks

    def forget(self) -> None:
        """Empty the cache; what was learned stays."""
        self._held.clear()


class BucketCounts:
    """Counts of values in buckets that grow by `STEP`; old ones fade."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0

    def note(self, value: float, times: int) -> None:
        """Count a value."""
        self._counts[ceil(log(value, STEP)) if value > 1 else 0] += times
        self._total += times
        if self._total > MOST:
            self._counts = Counter({bucket: half for bucket, n in self._counts.items() if (half := n // 2)})
            self._total = sum(self._counts.values())

    def quantile(self, share: float) -> float:
        """Upper bound of the bucket below which this share of values is; 0 without any."""
        if not self._total:
            return 0.0
        left = share * self._total
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return float(STEP**bucket)
        return inf
