"""A fleet: many servers of one model as one endpoint.

    complete ──> dispatch: pieces, placed ──> a queue a server ──> running, as many as the server has places
       ^                                          │ a server with nothing to run takes the last piece of the slowest
       └── asked elsewhere: the server cannot be reached, fell silent, was drained or left the list

A row that goes elsewhere keeps its lease, and its tokens where both servers have one identity. The harvester sees
only errors that say something about the row, as that a server was lost with it, or that no other server is there to
mend.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from itertools import count
from typing import Any

from msgspec.structs import replace

from conserve.endpoints.protocol import Call, Completion, Endpoint, InFlight, KvCache, OnTokens
from conserve.endpoints.roster import Joined
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFailing,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    ModelUnnamed,
    ServerLost,
)
from conserve.jobs.deadlines.work import computed_tokens
from conserve.jobs.fleet.care import CHECK_S, IDLE_S, Care
from conserve.jobs.fleet.dispatch import Dispatch
from conserve.jobs.fleet.estimate import AnswerLength
from conserve.jobs.fleet.member import Errand, Member
from conserve.jobs.fleet.membership import Membership
from conserve.store.books.servers import Sighting

log = logging.getLogger(__name__)

TICK_S = 0.5  # how soon silence, a server that is back and a change of the list are noticed
AHEAD = 2.0  # rows that wait for a server, for each row that it runs: groups are seen before they are split
LOOK_S = 10.0  # longest time that a look at the list of servers takes
MOST_LOSSES = 3  # servers that went down with a row until the row is taken for the reason
MOST_REFUSALS = 3  # as busy, of one row, until the harvester lets it wait
MOST_FAULTS = 3  # useless answers one after the other until a server is suspected


class Fleet(Endpoint):
    """The `Endpoint` protocol over the servers of a list, which may change."""

    def __init__(
        self,
        roster: Joined,
        make: Callable[[str], Endpoint],
        *,
        model: str | None = None,
        patient: bool = False,
        say: Callable[[str], None] = log.info,
        warn: Callable[[str], None] | None = None,  # of lost servers; `say` by default
    ) -> None:
        self.servers = Membership(roster, make, model=model, say=say, warn=warn)
        self._dispatch = Dispatch(self.servers)
        self._care = Care(self.servers, self._dispatch)
        self._patient, self._warn = patient, warn or say
        self._estimate, self._numbers = AnswerLength(), count()
        self._keeper: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._look_at = 0.0
        self._some_ready = asyncio.Event()

    @property
    def model(self) -> str:
        """Model that all rows are for."""
        return self.servers.model

    @property
    def identity(self) -> str:
        """Identity that most servers have; rows on the others start over."""
        return self.servers.identity

    @property
    def capacity(self) -> int:
        """Places of all servers, and rows that wait for them; 0 while there is no server."""
        places = sum(member.places for member in self.servers.open())
        return places if len(self.servers) == 1 else int(places * (1 + AHEAD))

    @property
    def kv_cache(self) -> KvCache:
        """The largest prefix cache of all servers."""
        return self.servers.kv_cache

    @property
    def doing(self) -> str | None:
        """Step of the start; None once a server is ready."""
        if self._some_ready.is_set():
            return None
        urls = [member.url for member in self.servers]
        if not urls:
            return "waiting for a first server"
        return (
            f"asking {urls[0]} what it serves"
            if len(urls) == 1
            else f"asking {len(urls)} servers what they serve"
        )

    @property
    def in_flight(self) -> InFlight:
        """Tokens that the servers tell of."""
        told = [member.endpoint.in_flight for member in self.servers]
        most = [one.most for one in told if one.most is not None]
        return InFlight(sum(one.computed for one in told), sum(most) if len(most) == len(told) else None)

    def sightings(self) -> list[Sighting]:
        """Observations of each server by this harvester."""
        return self.servers.sightings(now_s())

    def drain(self, urls: Collection[str]) -> None:
        """Give these servers no rows from now on, and all others rows again."""
        for member in self.servers.drain(frozenset(urls)):
            self._care.release(member, now_s())
            self._dispatch.soon()

    @property
    def _any_ready(self) -> bool:
        """True if a server of the model is ready."""
        return any(member.ready and member.model == self.model for member in self.servers)

    # Start and end.

    async def start(self) -> None:
        """Reach the servers; returns once one is ready, raises `EndpointUnusable` if none is."""
        await self._look()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        starts = {asyncio.create_task(self._reach(member)) for member in self.servers if not member.ready}
        self._tasks |= starts
        while starts and not self._some_ready.is_set():
            _, starts = await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
        if self._any_ready:
            return
        error = self.servers.roster.failure or self.servers.none_left(now_s())
        if not self._patient:
            unnamed = next((one.error for one in self.servers if isinstance(one.error, ModelUnnamed)), None)
            raise (unnamed or EndpointUnusable(str(error), status=error.status)) from error
        self._warn(f"{error}; waiting for one")
        await self._some_ready.wait()

    async def close(self) -> None:
        tasks = [task for task in (self._keeper, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self.servers))

    # A call.

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer one call by any server; raises the `EndpointError` that is the row's, or that no server mends."""
        block_tokens = self.kv_cache.block_tokens if len(self.servers) > 1 else None
        errand = Errand(
            call=call,
            on_tokens=on_tokens,
            asked=self._estimate.asked(next(self._numbers), call, block_tokens),
            turn=asyncio.get_running_loop().create_future(),
            tokens=call.resume_from,
        )
        while True:
            self._dispatch.add(errand)
            member = await self._turn(errand)
            try:
                return await self._ask(errand, member)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not errand.recalled or (task is not None and task.cancelling()):
                    raise
            except EndpointError as error:
                await self._judge(errand, member, error)
            finally:
                self._land(errand, member)
            errand.turn = asyncio.get_running_loop().create_future()

    async def _turn(self, errand: Errand) -> Member:
        """Wait for a server; a row that is withdrawn in the instant of its turn frees its place again."""
        turn = errand.turn
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._land(errand, turn.result())
            raise

    async def _ask(self, errand: Errand, member: Member) -> Completion:
        """Send a row to a server; it continues from its tokens if the server has their identity."""
        endpoint, same = member.endpoint, errand.call.identity in (None, member.endpoint.identity)
        call = replace(errand.call, identity=endpoint.identity, resume_from=errand.tokens if same else ())

        def on_tokens(tokens: Sequence[int]) -> None:
            errand.tokens, member.seen_at = tokens, now_s()
            if errand.on_tokens is not None:
                errand.on_tokens(tokens)

        errand.recalled, errand.sent_at, errand.begun_with = False, now_s(), len(errand.tokens)
        watched = on_tokens if same and errand.on_tokens is not None else None
        errand.task = asyncio.ensure_future(endpoint.complete(call, watched))
        completion = await errand.task
        now = now_s()
        member.answered(now, now - errand.sent_at)
        member.pace.elapse(now, len(member.running))
        if completion.tells_tokens:
            member.pace.add(computed_tokens(completion, completion.resumed_tokens(call)))
            self._estimate.answered(completion)
        else:  # tokens of no row would make it the slowest server
            member.pace.add(errand.charge)
        return replace(completion, engine=call.identity, started_over=completion.started_over or not same)

    def _land(self, errand: Errand, member: Member) -> None:
        """Free the place of a row."""
        member.pace.elapse(now_s(), len(member.running))
        member.running.discard(errand)
        member.tokens -= errand.charge
        self._dispatch.soon()

    async def _judge(self, errand: Errand, member: Member, error: EndpointError) -> None:
        """Return if the row is to be asked elsewhere; raises an error that is the row's, or that nothing mends."""
        others = [one for one in self.servers.open() if one is not member]
        useless = isinstance(error, EndpointFault) and len(errand.tokens) <= errand.begun_with
        if useless and member.fault() >= MOST_FAULTS and others:
            member.suspect(error, now_s())
        if isinstance(error, EndpointBusy) and others:
            errand.refusals += 1
            if errand.refusals > MOST_REFUSALS:  # as it seems, it is this row that no server takes
                raise error
            member.hold(error.retry_after_s, now_s())
        if isinstance(error, EndpointUnusable | EngineDied):
            member.refuses = isinstance(error, EndpointUnusable)
            if member.ready:  # one incident, however many rows it takes
                member.fail(error, now_s())
                if others:
                    self.servers.lost(member, error)
        if isinstance(error, EndpointUnavailable | ServerLost):
            await self._see_what_is_lost(errand, member, error, elsewhere=bool(others))
        if isinstance(error, ServerLost):
            raise error  # a loss that the store counts
        if others and isinstance(error, EndpointBusy | EndpointUnavailable | EndpointUnusable):
            errand.avoid = frozenset({member})
            return
        if isinstance(error, EndpointUnusable) and not all(one.refuses for one in self.servers):
            raise EndpointUnavailable(str(error)) from error
        raise error

    async def _see_what_is_lost(
        self, errand: Errand, member: Member, error: EndpointError, *, elsewhere: bool
    ) -> None:
        """See if a server is gone; raises `EngineDied` for a row with which several servers went down."""
        if member.ready:
            member.fail(error, now_s())
            ready = await self._reach(member, elsewhere=elsewhere)
        else:
            ready = await member.outcome()
        if ready and elsewhere:
            if isinstance(error, EndpointFailing | ServerLost):
                member.suspect(error, now_s())
            else:
                member.hold(None, now_s())
        if ready:
            return
        if elsewhere:  # as after a sign of life that it owes: its other rows wait for nothing
            member.recall([one for one in member.running if one is not errand])
        errand.losses += 1
        if errand.losses >= MOST_LOSSES:
            raise EngineDied(f"{errand.losses} servers went down with this row in flight: {error}") from error

    # The servers.

    async def _keep(self) -> None:
        """Look after the servers until the fleet is closed."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(now_s())
            except Exception:  # a fault here must not end the feeding of all servers
                log.exception("looking after the servers failed")

    def _tick(self, now: float) -> None:
        self._tasks = {task for task in self._tasks if not task.done()}
        if (every_s := self.servers.roster.every_s) is not None and now >= self._look_at:
            self._look_at = now + max(LOOK_S, every_s)
            self._in_background(self._look())
        for member in self.servers:
            member.pace.elapse(now, len(member.running))
            if not member.listed and not member.running and not member.queue:
                del self.servers.by_url[member.address]
                self._in_background(member.close())
            elif now >= member.try_at and not member.ready and member.listed:
                member.try_at = now + CHECK_S
                self._in_background(self._reach(member))
            elif now >= member.try_at and member.owes_sign(now, CHECK_S, idle_s=IDLE_S):
                member.try_at = now + CHECK_S
                self._in_background(self._care.check(member))
            self._care.tend(member, now)
        self._care.hurry(now)
        self._dispatch.soon()

    async def _look(self) -> None:
        """Read the list of servers."""
        for member in await self.servers.look():
            self._care.release(member, now_s())
        self._look_at = now_s() + (self.servers.roster.every_s or 0.0)
        self._feed()

    async def _reach(self, member: Member, *, elsewhere: bool = False) -> bool:
        """Try to use a server, whose rows go `elsewhere` if it is gone; returns True if it is ready."""
        ready = await self.servers.reach(member, now_s(), elsewhere=elsewhere)
        self._feed()
        return ready

    def _feed(self) -> None:
        """Send rows to the servers that are ready by now."""
        if self._any_ready:
            self._some_ready.set()
        self._dispatch.soon()

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        self._tasks.add(asyncio.create_task(work))


def now_s() -> float:
    """Time on the clock of the running loop."""
    return asyncio.get_running_loop().time()
