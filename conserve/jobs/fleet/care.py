"""Care: which servers fell silent or are slow, and which of their rows are asked elsewhere."""

import asyncio
from collections.abc import Sequence

from conserve.errors import EndpointUnavailable
from conserve.jobs.fleet.dispatch import Dispatch
from conserve.jobs.fleet.member import Errand, Member
from conserve.jobs.fleet.membership import Membership

CHECK_S = 5.0  # without a sign of life until a server is asked for one
IDLE_S = 30.0  # the same of a server without rows
DRAIN_S = 10.0  # for rows that cannot continue elsewhere to end on a server that is drained
SILENT_S = 10.0  # least time without tokens after which a server is suspected; they come several at a time
SILENT_TIMES = 3.0  # the time that the slowest of others' last rows took
SLOWER = 2.0  # a row goes elsewhere if it would be done there in this part of the time
MARGIN_S = 1.0
MOST_MOVES = 2  # of one row, away from slow servers that are not silent: a long one would never end
MOST_MISSES = 2  # signs of life that a server may owe


class Care:
    """Looks after the servers of a fleet."""

    def __init__(self, servers: Membership, dispatch: Dispatch) -> None:
        self._servers, self._dispatch = servers, dispatch

    def release(self, member: Member, now: float) -> None:
        """Let the rows of a server that gets no more go elsewhere: at once, or at their end if that comes soon.

        Rows with tokens lose a few of them at most by going on elsewhere.
        """
        if member.listed and not member.drained:
            member.recall_at = None
            return
        member.recall_at = now + DRAIN_S
        if member.model == self._servers.model and self._servers.open():
            member.recall([errand for errand in member.running if errand.tokens])

    def tend(self, member: Member, now: float) -> None:
        """Withdraw rows that have to leave a server, and suspect one that is silent."""
        if member.recall_at is not None and now >= member.recall_at:
            member.recall(list(member.running))
        elif silent := self._silent_rows(member, now):
            error = EndpointUnavailable(f"{member.url} fell silent with {len(member.running)} rows in flight")
            member.suspect(error, now)
            self._servers.lost(member, error)
            move(member, silent)

    def _silent_rows(self, member: Member, now: float) -> list[Errand]:
        """Rows of a server that has brought nothing for far longer than rows take elsewhere.

        Each move doubles the silence that a row is left in: one that is long ends, and one on a server that hangs
        leaves it.
        """
        silence_s = now - member.seen_at if member.ready and member.seen_at is not None else 0.0
        if silence_s <= SILENT_S:  # the least limit, before all other servers are looked through
            return []
        others = [one for one in self._servers.open() if one is not member and not one.suspected]
        slowest_s = max((time_s for one in others for time_s in one.times_s), default=None)
        if slowest_s is None:
            return []
        limit_s = max(SILENT_S, SILENT_TIMES * slowest_s)
        return [errand for errand in member.running if silence_s > limit_s * 2.0**errand.moves]

    async def check(self, member: Member) -> None:
        """Ask a server for a sign of life; one that gives none is out of reach, and its rows go elsewhere.

        Its rows stay if there is no other server.
        """
        if await member.endpoint.alive():
            member.misses = 0
            if not member.running:
                member.seen_at = asyncio.get_running_loop().time()
            return
        member.misses += 1
        leaves = not member.running or any(one is not member for one in self._servers.open())
        if member.misses >= MOST_MISSES and member.ready and leaves:
            error = EndpointUnavailable(f"{member.url} does not answer")
            member.fail(error, asyncio.get_running_loop().time())
            self._servers.lost(member, error)
            member.recall(list(member.running))

    def hurry(self, now: float) -> None:
        """Take rows from a slow server for one with nothing to run, once no row waits anywhere."""
        found = self._servers.open()
        if self._dispatch.waits or len(found) < 2:
            return
        for idle in found:
            pace = idle.pace.of_a_place
            if pace is None or idle.running or idle.suspected or now < idle.held_until:
                continue
            for slow in found:
                if late := late_rows(slow, pace, now):
                    move(slow, late[: idle.free])
                    break


def move(member: Member, errands: Sequence[Errand]) -> None:
    """Ask rows elsewhere since their server is slow."""
    for errand in errands:
        errand.moves += 1
    member.recall(errands)


def late_rows(member: Member, pace: float, now: float) -> list[Errand]:
    """Rows of a server that would be done far sooner on one with this pace, although they begin anew there."""
    own = member.pace.of_a_place
    if own is None:
        return []
    return [
        errand
        for errand in member.running
        if errand.moves < MOST_MOVES
        and not errand.recalled
        and errand.charge / own - (now - errand.sent_at) > SLOWER * errand.charge / pace + MARGIN_S
    ]
