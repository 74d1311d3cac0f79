"""Dispatch: rows wait for the server that the placement chose, and are sent as it has places for them."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from conserve.errors import EndpointUnavailable
from conserve.jobs.fleet.member import Errand, Member
from conserve.jobs.fleet.membership import Membership
from conserve.jobs.fleet.pieces import Piece, pieces
from conserve.jobs.fleet.placement import ServerLoad, pays, place


class Dispatch:
    """Rows on their way to the servers."""

    def __init__(self, servers: Membership) -> None:
        self._servers = servers
        self._arrived: list[Errand] = []
        self._pieces = count()
        self._due = False
        self._model = servers.model  # that rows wait for

    @property
    def waits(self) -> bool:
        """True if a row waits for a server."""
        return bool(self._arrived) or any(member.queue for member in self._servers)

    def add(self, *errands: Errand) -> None:
        """Take rows that are to be placed."""
        self._arrived += errands
        self.soon()

    def soon(self) -> None:
        """Dispatch once the rows that come at the same time are here."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Place the rows that came, and send as many as the servers have places for."""
        self._due = False
        now = asyncio.get_running_loop().time()
        switched, self._model = self._model != self._servers.model, self._servers.model
        takers = [member for member in self._servers.open() if now >= member.held_until]
        for member in self._servers:
            if member.queue:
                left = member not in takers and (takers or not member.is_open)
                if switched or left:
                    self._arrived += member.give_up_queue()
        self._turn_away()
        arrived, self._arrived = [errand for errand in self._arrived if not errand.turn.done()], []
        if arrived and takers:
            self._place(arrived, takers)
        elif arrived and self._servers.open():
            self._arrived = arrived  # until a server that is held takes rows again
        else:
            for errand in arrived:
                errand.turn.set_exception(self._servers.none_left(now))
        for member in takers:
            self._send(member, now)
        idle = [member for member in takers if member.free and not member.queue]
        if idle and any(member.queue for member in takers):
            self._take_over(idle, takers, now)

    def _turn_away(self) -> None:
        """End the turns of rows that are for another model than the servers are used for by now."""
        for errand in self._arrived:
            model = errand.call.model
            if model not in (None, self._model) and not errand.turn.done():
                errand.turn.set_exception(
                    EndpointUnavailable(f"the servers answer for {self._model} now; rows for {model} go back")
                )

    def _place(self, errands: Sequence[Errand], takers: Sequence[Member]) -> None:
        """Let each row wait for the server where its piece is done soonest, other than those that it avoids."""
        if len(takers) == 1:
            for errand in errands:
                takers[0].enqueue(errand, errand.asked.tokens, 0)
            return
        block_tokens = self._servers.kv_cache.block_tokens
        by_number = {errand.asked.number: errand for errand in errands}
        usual = usual_pace(takers)
        loads = {member: load_of(member, usual) for member in takers}
        for avoided in {errand.avoid for errand in errands}:
            allowed = [member for member in takers if member not in avoided] or list(takers)
            some = [errand.asked for errand in errands if errand.avoid == avoided]
            found = pieces(some, servers=len(allowed), block_tokens=block_tokens)
            chosen = place(found, [loads[member] for member in allowed], block_tokens=block_tokens)
            for piece, index in zip(found, chosen, strict=True):
                rows = [by_number[row.number] for row in piece.rows]
                self._enqueue(piece, rows, allowed[index], block_tokens)

    def _enqueue(self, piece: Piece, errands: Sequence[Errand], member: Member, block_tokens: int) -> None:
        """Let the rows of a piece wait for a server, each charged with its part of the piece's prefixes."""
        number = next(self._pieces)
        shared = block_tokens * sum(len(row.key) - begin for begin, row in piece.branches()) / len(errands)
        for errand in errands:
            member.enqueue(errand, errand.asked.tokens + shared, number)

    def _send(self, member: Member, now: float) -> None:
        """Send rows that wait for a server, as many as it has places for."""
        while member.free and (errand := member.next()) is not None:
            member.pace.elapse(now, len(member.running))
            if not member.running:
                member.seen_at = now  # silence counts from its first row
            member.running.add(errand)
            member.cached.add(errand.asked.key)
            errand.turn.set_result(member)

    def _take_over(self, idle: Sequence[Member], takers: Sequence[Member], now: float) -> None:
        """Let servers with places to spare take the last pieces of the slowest ones, where that pays."""
        # Hundreds of servers may be idle, and few of them take anything: an offer stands until one does.
        usual, block_tokens = usual_pace(takers), self._servers.kv_cache.block_tokens
        offer: Offer | None = None
        for member in idle:
            if offer is not None and offer.single != member.suspected:
                self._enqueue(offer.piece, offer.errands, offer.slow, block_tokens)
                offer = None
            if offer is None:
                slow = slowest(takers, usual)
                if slow is None:
                    return
                offer = offer_of(slow, usual, single=member.suspected)
            if offer is None:
                continue
            spare = load_of(member, usual)
            if offer.single or pays(offer.piece, offer.load, spare, block_tokens=block_tokens):
                self._enqueue(offer.piece, offer.errands, member, block_tokens)
                self._send(member, now)
                offer = None
        if offer is not None:
            self._enqueue(offer.piece, offer.errands, offer.slow, block_tokens)


class Offer(NamedTuple):
    """Rows that waited last for a slow server, of one piece."""

    slow: Member
    load: ServerLoad  # of the slow server without them
    errands: list[Errand]
    piece: Piece
    single: bool  # one row


def slowest(takers: Sequence[Member], usual: float) -> Member | None:
    """The server whose rows are done last, among those that rows wait for."""
    waited_for = (one for one in takers if one.queue)
    return max(waited_for, key=lambda one: load_of(one, usual, with_queue=False).wait_s, default=None)


def offer_of(slow: Member, usual: float, *, single: bool) -> Offer | None:
    """Take rows from a slow server's queue for another one; None if there are none to be had.

    A suspected server takes a `single` row, to show what it can do: none that left a server already, which would be
    the same one time and again.
    """
    if single and slow.queue[-1].moves:
        return None
    errands = slow.last_piece(1 if single else max(1, len(slow.queue) // 2))
    if not errands:
        return None
    piece = Piece.of(errand.asked for errand in errands)
    return Offer(slow, load_of(slow, usual), errands, piece, single)


def usual_pace(takers: Sequence[Member]) -> float:
    """Mean pace of a place of these servers, as far as it is known."""
    known = [pace for one in takers if (pace := one.pace.of_a_place) is not None]
    return sum(known) / len(known) if known else 1.0


def load_of(member: Member, usual: float, *, with_queue: bool = True) -> ServerLoad:
    """A server as a placement sees it; `with_queue`: with the blocks of rows that wait, which takes time."""
    return ServerLoad(
        tokens_per_s=member.pace.believed(usual) * max(1, member.places),
        tokens=max(0.0, member.tokens),
        cached=member.cached,
        coming={block for errand in member.queue for block in errand.asked.key} if with_queue else set(),
    )
