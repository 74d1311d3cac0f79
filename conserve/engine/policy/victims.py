"""Offline requests that may be evicted or parked."""

from collections import UserList
from collections.abc import Iterable, MutableSequence
from functools import cached_property
from operator import attrgetter

from conserve.engine.policy.view import Candidate


def last_begun(victims: MutableSequence[Candidate]) -> Candidate:
    """Take the last request out that has computed tokens: the others could not go on where they are in a chunk."""
    begun = (place for place in reversed(range(len(victims))) if victims[place].context)
    return victims.pop(next(begun, -1))


class Victims(UserList[Candidate]):
    """The requests in their order, those whose KV host memory has at the end: the last one is evicted first.

    They are looked at when one is to be evicted, which is seldom.
    """

    def __init__(self, rows: Iterable[Candidate]) -> None:
        self._rows = rows

    @cached_property
    def data(self) -> list[Candidate]:  # type: ignore[override]
        return sorted(self._rows, key=attrgetter("saved"))
