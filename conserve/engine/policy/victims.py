"""Offline requests that may be evicted."""

from collections import UserList
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter

from conserve.engine.policy.view import Candidate

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


def least_lost(victims: Sequence[Candidate], half_way: Mapping[str, float], block_tokens: int) -> int:
    """Place of the victim whose eviction loses least where a slot alone is missing; of equal ones the last.

    The prefix cache keeps the full KV blocks of an evicted row for a while, but not what layers have computed of an
    iteration that it left (`half_way`, in tokens' worth): often most of a chunk, of the row that was admitted last.
    """

    def lost(victim: Candidate) -> float:
        """Tokens' worth that are computed again."""
        begun = victim.context % block_tokens
        kv = 0.0 if victim.saved else begun + TAKEN * (victim.context - begun)
        return half_way.get(victim.name, 0.0) + kv

    return min(range(len(victims)), key=lambda place: (lost(victims[place]), -place))
