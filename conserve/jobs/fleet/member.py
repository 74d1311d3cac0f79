"""One server of a fleet: its endpoint, the rows that it runs, and the rows that wait for it."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from conserve.endpoints.protocol import Call, Completion, Endpoint, OnTokens, model_of, said_model
from conserve.errors import EndpointError, EndpointUnusable, one_line
from conserve.hosts import split_login
from conserve.jobs.fleet.pace import Pace
from conserve.jobs.fleet.pieces import UnplacedRow
from conserve.jobs.fleet.prefixes import CachedPrefixes

# Time for a server to say what it serves: under load each of its first answers may wait for seconds.
START_S = 60.0
LONGEST_WAIT_S = 5.0  # between two tries to reach a server
MOST_DOUBLINGS = 10  # of half a second
LONGEST_HOLD_S = 60.0  # in which a server that is busy or suspected gets no row
RECENT = 64  # rows whose times are remembered


class MemberState(StrEnum):
    """State of a server, as a harvester treats it."""

    STARTING = "starting"
    """Server has not answered yet."""
    SERVING = "serving"
    """Server gets rows."""
    BUSY = "busy"
    """Server asked to slow down."""
    SUSPECTED = "suspected"
    """Server fell silent, or gave no usable answer; one row at a time goes there until one is answered."""
    DOWN = "down"
    """Server cannot be reached, or refuses every row."""
    DRAINED = "drained"
    """Server gets no rows, by `conserve fleet drain`."""
    LEAVING = "leaving"
    """Server is no longer in the list; the last rows there end."""
    OTHER_MODEL = "other model"
    """Server has another model than this harvester's."""


@dataclass(slots=True, eq=False)
class Errand:
    """One call on its way through the fleet."""

    call: Call
    on_tokens: OnTokens | None
    asked: UnplacedRow
    turn: "asyncio.Future[Member]"
    tokens: Sequence[int] = ()  # seen so far, under the call's identity
    piece: int = 0  # number of the piece that it was placed with
    charge: float = 0.0  # tokens that the server is charged with
    sent_at: float = 0.0
    begun_with: int = 0  # tokens that it was sent with
    moves: int = 0  # away from servers that were slow
    losses: int = 0  # servers that went down with it
    refusals: int = 0  # by servers that were busy
    avoid: frozenset["Member"] = frozenset()  # servers that it comes from
    task: "asyncio.Task[Completion] | None" = None
    recalled: bool = False  # it is to be asked elsewhere


class Member:
    """A server, known by its URL, which is shown; its `address` in the list may have a password in it."""

    def __init__(self, address: str, endpoint: Endpoint) -> None:
        self.address, self.endpoint = address, endpoint
        self.url, _ = split_login(address)
        self.ready = self.drained = self.suspected = False
        self.listed = True
        self.error: EndpointError | None = None  # why it is not ready, or is suspected
        self.refuses = False  # it answers, and no row of ours
        self.version: str | None = None
        self.seen_at: float | None = None  # last sign of life
        self.running: set[Errand] = set()
        self.queue: deque[Errand] = deque()
        self.tokens = 0.0  # of both
        self.pace, self.cached = Pace(), CachedPrefixes()
        self.times_s: deque[float] = deque(maxlen=RECENT)  # that its last rows took
        self.starting: asyncio.Task[bool] | None = None
        self.try_at = 0.0  # when it is to be reached, or looked at, next
        self.held_until = 0.0
        self.recall_at: float | None = None  # when the rows of a server that is drained or leaves go back
        self.misses = 0  # signs of life that it owes
        self._said: str | None = None
        self._model: str | None = None
        self._failures = 0  # since its last answer
        self._faults = 0

    @property
    def model(self) -> str | None:
        """Model that it serves, or served when it was last reached."""
        try:
            if (said := said_model(self.endpoint)) != self._said:  # looked up once, since each dispatch asks
                self._said, self._model = said, model_of(self.endpoint)
        except AssertionError:  # never reached
            return None
        return self._model

    @property
    def is_open(self) -> bool:
        """True if it may get rows of its model."""
        return self.ready and self.listed and not self.drained

    @property
    def places(self) -> int:
        """Number of rows that it runs at a time; one while it is suspected."""
        return min(self.endpoint.capacity, 1) if self.suspected else self.endpoint.capacity

    @property
    def free(self) -> int:
        """Number of rows that may be sent now."""
        return max(0, self.places - len(self.running))

    def owes_sign(self, now: float, within_s: float, *, idle_s: float) -> bool:
        """True if it brought nothing for this long: with rows in flight, or without any."""
        return self.ready and now - (self.seen_at or 0.0) > (within_s if self.running else idle_s)

    def state(self, model: str | None, now: float) -> MemberState:
        """State of the server, to a harvester for this model."""
        if not self.listed:
            return MemberState.LEAVING
        if self.drained:
            return MemberState.DRAINED
        if not self.ready:
            return MemberState.DOWN if self.error else MemberState.STARTING
        if self.model != model:
            return MemberState.OTHER_MODEL
        if self.suspected:
            return MemberState.SUSPECTED
        return MemberState.BUSY if now < self.held_until else MemberState.SERVING

    # Being reached.

    async def start(self, now: float) -> bool:
        """Find out what the server serves; returns True if it is ready. Calls at the same time share one try."""
        if self.starting is None or self.starting.done():
            self.starting = asyncio.create_task(self._start(now))
        return await asyncio.shield(self.starting)

    async def outcome(self) -> bool:
        """Wait for the try to reach it that is under way, if there is one; returns True if it is ready."""
        if self.starting is not None and not self.starting.done():
            await asyncio.shield(self.starting)
        return self.ready

    async def _start(self, now: float) -> bool:
        try:
            async with asyncio.timeout(START_S):
                await self.endpoint.start()
                self.version = await self.endpoint.version()
        except (EndpointError, TimeoutError) as error:
            self.fail(error, now)
            return False
        self.ready, self.error, self.pace, self.misses = True, None, Pace(), 0
        self.seen_at = asyncio.get_running_loop().time()
        self.cached = CachedPrefixes(self.endpoint.kv_cache.num_blocks)
        return True

    def fail(self, error: EndpointError | TimeoutError, now: float) -> None:
        """Note that the server is out of reach; the next try comes after 1, 2, 4 ... s."""
        said = f"{self.url} does not answer" if isinstance(error, TimeoutError) else str(error)
        self.error = error if isinstance(error, EndpointError) else EndpointUnusable(said)
        self.ready = False
        self.cached.clear()
        self.try_at = now + min(self._longer_s(), LONGEST_WAIT_S)
        self._failures += 1

    def hold(self, wish_s: float | None, now: float) -> None:
        """Send the server no row for `wish_s`, longer after each failure; rows that fail meanwhile count as one."""
        if now < self.held_until:
            self.held_until = max(self.held_until, now + min(wish_s or 0.0, LONGEST_HOLD_S))
            return
        self.held_until = now + min(max(wish_s or 1.0, self._longer_s()), LONGEST_HOLD_S)
        self._failures += 1

    def _longer_s(self) -> float:
        """Seconds that double with each failure, up to more than any limit."""
        return 0.5 * 2.0 ** min(self._failures, MOST_DOUBLINGS)

    def suspect(self, error: EndpointError, now: float) -> None:
        """Send the server no row for a while, then one at a time until it answers."""
        self.suspected, self.error, self.seen_at = True, error, now
        self.hold(2.0, now)

    def fault(self) -> int:
        """Count an answer that is of no use; returns how many came one after the other."""
        self._faults += 1
        return self._faults

    def answered(self, now: float, took_s: float) -> None:
        """Note that the server has answered a row in this time."""
        self.times_s.append(took_s)
        if self.suspected:
            self.pace = Pace()  # what was measured before says nothing any more
        self._failures = self._faults = self.misses = 0
        self.suspected = self.refuses = False
        self.error, self.seen_at = None, now

    # Rows of the server.

    def enqueue(self, errand: Errand, charge: float, piece: int) -> None:
        """Queue a row at the server."""
        errand.charge, errand.piece = charge, piece
        self.tokens += charge
        self.queue.append(errand)

    def next(self) -> Errand | None:
        """Take the next row that waits; None if there is none."""
        while self.queue:
            errand = self.queue.popleft()
            if not errand.turn.done():
                return errand
            self.tokens -= errand.charge
        return None

    def last_piece(self, most: int) -> list[Errand]:
        """Take the last rows that wait, of one piece and at most so many."""
        taken: list[Errand] = []
        while self.queue and len(taken) < most:
            if taken and self.queue[-1].piece != taken[0].piece:
                break
            errand = self.queue.pop()
            self.tokens -= errand.charge
            if not errand.turn.done():
                taken.append(errand)
        return taken[::-1]

    def give_up_queue(self) -> list[Errand]:
        """Take all rows that wait."""
        taken = []
        while (errand := self.next()) is not None:
            self.tokens -= errand.charge
            taken.append(errand)
        return taken

    def recall(self, errands: Sequence[Errand]) -> None:
        """Withdraw rows from the server; each is asked elsewhere."""
        for errand in errands:
            if errand.task is not None and not errand.task.done():
                errand.recalled = True
                errand.avoid = frozenset({self})
                errand.task.cancel()

    @property
    def why(self) -> str | None:
        """Sentence on its last error."""
        return one_line(self.error) if self.error else None

    async def close(self) -> None:
        """Free the resources of the endpoint."""
        if self.starting is not None:
            self.starting.cancel()
            await asyncio.gather(self.starting, return_exceptions=True)
        await self.endpoint.close()
