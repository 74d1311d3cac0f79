"""The servers of a fleet: those in the list, the model that they are used for, and sentences about them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from conserve.config import model_name
from conserve.endpoints.protocol import Endpoint, KvCache
from conserve.endpoints.roster import Joined
from conserve.errors import EndpointUnavailable
from conserve.jobs.fleet.member import Member
from conserve.store.books.servers import Sighting


class Membership:
    """Servers by address. All rows of a fleet are for one model: the given one, else that of the first server."""

    def __init__(
        self,
        roster: Joined,
        make: Callable[[str], Endpoint],
        *,
        model: str | None,
        say: Callable[[str], None],
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.roster, self._make, self._say, self._warn = roster, make, say, warn or say
        self._given = model is not None
        self.model = model_name(model) if model else ""
        self.by_url: dict[str, Member] = {}
        self.drained: frozenset[str] = frozenset()
        self._said: dict[str, str] = {}  # the last sentence on each server, and on the list
        self._identity: str | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self.by_url.values()))

    def __len__(self) -> int:
        return len(self.by_url)

    def open(self) -> list[Member]:
        """Servers of the model that may get rows."""
        return [member for member in self if member.is_open and member.model == self.model]

    @property
    def identity(self) -> str:
        """Identity that most servers have."""
        found = Counter(member.endpoint.identity for member in self.open())
        if found:
            self._identity = found.most_common(1)[0][0]
        assert self._identity is not None, "not started"
        return self._identity

    @property
    def kv_cache(self) -> KvCache:
        """The largest prefix cache of all servers."""
        caches = [member.endpoint.kv_cache for member in self.open()]
        return max(caches, key=lambda cache: cache.num_blocks or 0, default=KvCache())

    def sightings(self, now: float) -> list[Sighting]:
        """Observations of each server by this harvester."""
        return [
            Sighting(
                url=member.url,
                state=member.state(self.model, now).value,
                model=member.model,
                version=member.version,
                alive=member.ready,
                in_flight=len(member.running),
                waiting=len(member.queue),
                tokens_per_s=member.pace.tokens_per_s if member.running else 0.0,
                why=member.why,
            )
            for member in self
        ]

    async def look(self) -> list[Member]:
        """Read the list of servers; returns those that came back or left."""
        listed = await self.roster.look()
        if (failure := self.roster.failure) is not None:
            self._say_once("", f"{failure}; the servers that are known go on", self._warn)
        else:
            self._said.pop("", None)
        return self._list(listed)

    def _list(self, urls: Sequence[str]) -> list[Member]:
        for url in urls:
            if url not in self.by_url:
                self.by_url[url] = member = Member(url, self._make(url))
                member.drained = member.url in self.drained
        changed = [member for member in self if member.listed != (member.address in urls)]
        for member in changed:
            member.listed = not member.listed
            self._say(f"{member.url} is {'back in' if member.listed else 'no longer in'} the list of servers")
        self._choose_model()
        return changed

    def drain(self, urls: frozenset[str]) -> list[Member]:
        """Mark the servers that are drained; returns those of which that changed."""
        self.drained = urls
        changed = [member for member in self if member.drained != (member.url in urls)]
        for member in changed:
            member.drained = not member.drained
            drained = f"drained; undo it with: conserve fleet undrain {member.url}"
            self._say(f"{member.url} is {drained if member.drained else 'no longer drained'}")
        return changed

    async def reach(self, member: Member, now: float, *, elsewhere: bool = False) -> bool:
        """Find out what a server serves, and say so; returns True if it is ready."""
        if not await member.start(now):
            if elsewhere:
                self.lost(member, member.error)
            elif member.url not in self._said and len(self) > 1:  # of one server the caller is told
                self._say_once(member.url, str(member.error), self._warn)
            return False
        self._choose_model()
        if member.model == self.model:
            self._say_once(member.url, member.endpoint.notice or f"{member.url} is ready")
        else:
            self._say_once(
                member.url,
                f"{member.url} serves {member.model} and gets no rows: those of this harvester are for "
                f"{self.model}; for the others: conserve harvest --model {member.model}",
            )
        return True

    def lost(self, member: Member, why: object) -> None:
        """Say why a server is lost, and that its rows go elsewhere."""
        said = f"{why}; its rows go elsewhere" if member.running else str(why)
        self._say_once(member.url, said, self._warn)

    def _say_once(self, about: str, said: str, say: Callable[[str], None] | None = None) -> None:
        if self._said.get(about) != said:
            self._said[about] = said
            (say or self._say)(said)

    def _choose_model(self) -> None:
        """Take the model of the first server, and another one only once no server in the list has that."""
        models = [member.model for member in self if member.listed and member.model]
        if not self._given and models and self.model not in models:
            if self.model:
                self._say(f"no server in the list serves {self.model} any more; rows are for {models[0]} now")
            self.model = models[0] or ""

    def none_left(self, now: float) -> EndpointUnavailable:
        """The error of a fleet without a server that takes rows."""
        members = list(self)
        if len(members) == 1 and (why := members[0].error) is not None and not members[0].drained:
            return EndpointUnavailable(str(why), status=why.status)
        states = Counter(member.state(self.model, now).value for member in members)
        said = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        return EndpointUnavailable(f"no server takes rows ({said})" if said else "no server is listed")
