"""Offline requests that may be evicted or parked, and what evicting them costs."""

from collections import UserList
from collections.abc import Iterable, MutableSequence
from functools import cached_property
from operator import attrgetter

from conserve.engine.policy.view import Candidate, View


def last_begun(victims: MutableSequence[Candidate]) -> Candidate:
    """Take the last request out that has computed tokens: the others could not go on where they are in a chunk."""
    begun = (place for place in reversed(range(len(victims))) if victims[place].context)
    return victims.pop(next(begun, -1))


def revocable_blocks(view: View) -> int:
    """KV blocks that can be evicted at no cost: offline rows hold them, and host memory has their contents.

    Rows with equal beginnings share blocks, and evicting one row does not free a block that another holds. So the
    number is at most the used blocks minus the blocks of all other rows.
    """
    if not view.reserved_blocks:
        return 0
    saved = sum(row.blocks for row in (*view.offline, *view.waiting_with_blocks) if row.saved)
    others = sum(
        row.blocks for row in (*view.online, *view.offline, *view.waiting_with_blocks) if not row.saved
    )
    return saved if view.used_blocks is None else min(saved, max(0, view.used_blocks - others))


class Victims(UserList[Candidate]):
    """The requests in their order, those whose KV host memory has at the end: the last one is evicted first.

    They are looked at when one is to be evicted, which is seldom.
    """

    def __init__(self, rows: Iterable[Candidate]) -> None:
        self._rows = rows

    @cached_property
    def data(self) -> list[Candidate]:  # type: ignore[override]
        return sorted(self._rows, key=attrgetter("saved"))
