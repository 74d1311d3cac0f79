"""Offline requests that may be evicted."""

from collections import UserList
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from operator import attrgetter

from conserve.engine.policy.view import Candidate

LATEST = 16  # rows of the later half among which one is chosen
TAKEN = 0.25  # of an evicted row's full KV blocks, those that others take before it is back: a guess


class Victims(UserList[Candidate]):
    """The requests in their order, those whose KV host memory has at the end: the last one is evicted first.

    They are looked at when one is to be evicted, which is seldom.
    """

    def __init__(self, rows: Iterable[Candidate]) -> None:
        self._rows = rows

    @cached_property
    def data(self) -> list[Candidate]:  # type: ignore[override]
        return sorted(self._rows, key=attrgetter("saved"))


def for_a_slot(victims: Sequence[Candidate], half_way: Mapping[str, float], block_tokens: int) -> int:
    """Place of the victim for a slot alone: the last one, unless that is half-way and a row before it loses less.

    The row that was admitted last has often left an iteration just then, with most of a chunk computed in its
    layers (`half_way`, in tokens' worth). These are lost with it, while the prefix cache keeps full KV blocks for a
    while. Few rows are looked at, for an arrival waits for the choice, and early rows do not pay for late ones.
    """

    def lost(place: int) -> float:
        """Tokens' worth that are computed again."""
        victim = victims[place]
        begun = victim.context % block_tokens
        kv = 0.0 if victim.saved else begun + TAKEN * (victim.context - begun)
        return half_way.get(victim.name, 0.0) + kv

    def is_half_way(place: int) -> bool:
        return half_way.get(victims[place].name, 0.0) > block_tokens

    last = len(victims) - 1
    if not is_half_way(last):
        return last
    others = (place for place in range(last - 1, len(victims) // 2 - 1, -1) if not is_half_way(place))
    return min((last, *islice(others, LATEST)), key=lost)
