"""A server in memory with places, a speed and a prefix cache, for fleets: it dies, slows down and comes back."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from conserve.endpoints.fake import WORDS, answer_tokens, num_tokens, request_text
from conserve.endpoints.protocol import Call, Choice, Completion, Endpoint, InFlight, KvCache, OnTokens
from conserve.endpoints.roster import Given, Joined
from conserve.errors import EndpointUnavailable, EndpointUnusable
from conserve.jobs.fleet.fleet import Fleet
from conserve.jobs.window.prompt_key import prompt_key

BLOCK_TOKENS = 16


class ModelledServer(Endpoint):
    """Answers as the fake endpoint does; a token takes `1 / tokens_per_s`, computed or generated."""

    capacity, model, identity = 8, "m", "m"
    kv_cache, in_flight, notice = KvCache(), InFlight(), None

    def __init__(
        self,
        url: str = "http://one:8000",
        *,
        places: int = 8,
        tokens_per_s: float = 200.0,
        num_blocks: int = 4096,
        model: str = "m",
        identity: str = "m",
        streams: bool = True,
    ) -> None:
        self.url, self.capacity, self.tokens_per_s = url, places, tokens_per_s
        self.model, self.identity, self.streams = model, identity, streams
        self.kv_cache = KvCache(block_tokens=BLOCK_TOKENS, num_blocks=num_blocks)
        self.up = self.responds = self.counts = True
        self.failing: Callable[[], Exception] | None = None
        self.texts: list[str] = []  # of the rows that it answered
        self.begun = 0
        self.continued: list[int] = []
        self.cached_tokens = self.prompt_tokens = self.computed_tokens = 0
        self.in_flight = InFlight()
        self.running = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._computing: dict[asyncio.Future[None], None] = {}

    def die(self) -> None:
        """Cut every row, and be out of reach from now on."""
        self.up = False
        for computed in self._computing:
            if not computed.done():
                computed.set_exception(EndpointUnavailable(f"the connection to {self.url} broke"))
        self._cache.clear()

    async def start(self) -> None:
        if not self.up:
            raise EndpointUnusable(f"{self.url} does not answer")

    async def close(self) -> None:
        pass

    async def alive(self) -> bool:
        return self.up and self.responds

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        if not self.up:
            raise EndpointUnavailable(f"cannot reach {self.url}")
        if self.failing is not None:
            raise self.failing()
        assert call.identity == self.identity, "a call for another server"
        assert call.model in (None, self.model), "a row of another model"
        self.begun += 1
        self.running += 1
        try:
            return await self._complete(call, on_tokens if self.streams else None)
        finally:
            self.running -= 1

    async def _complete(self, call: Call, on_tokens: OnTokens | None) -> Completion:
        text = request_text(call.body)
        prompt_tokens = len(text) // 4
        cached = self._look_up(call)
        ids = answer_tokens(text, num_tokens(call.body, 8))
        already = len(call.resume_from)
        if already:
            assert list(call.resume_from) == ids[:already]
            self.continued.append(already)
        if on_tokens is None:
            await self._compute(prompt_tokens - cached + len(ids) - already)
        else:
            await self._compute(prompt_tokens - cached)
            for count in range(already + 1, len(ids) + 1):
                await self._compute(1)
                on_tokens(ids[:count])
        self.texts.append(text)
        self.cached_tokens += cached
        self.prompt_tokens += prompt_tokens
        return Completion(
            choices=(Choice(text=" ".join(WORDS[t] for t in ids), finish_reason="stop"),),
            prompt_tokens=prompt_tokens if self.counts else 0,
            completion_tokens=len(ids) if self.counts else 0,
            cached_tokens=cached if self.counts else 0,
            model=self.model,
        )

    def _look_up(self, call: Call) -> int:
        """Tokens of the prompt that the cache holds; the prompt is in it from now on."""
        key = prompt_key(call.url, call.body, self.kv_cache)
        held = next((n for n, block in enumerate(key) if block not in self._cache), len(key))
        for block in reversed(key):
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > (self.kv_cache.num_blocks or 0):
            self._cache.popitem(last=False)
        return held * BLOCK_TOKENS

    async def _compute(self, tokens: int) -> None:
        self.computed_tokens += tokens
        computed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._computing[computed] = None
        timer = computed.get_loop().call_later(tokens / self.tokens_per_s, end, computed)
        try:
            await computed
        finally:
            timer.cancel()
            del self._computing[computed]


def end(computed: "asyncio.Future[None]") -> None:
    """End a computation that no death has cut."""
    if not computed.done():
        computed.set_result(None)


class ChangingList:
    """A list of servers that a test changes."""

    every_s: float | None = 1.0

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)

    async def look(self) -> list[str]:
        return list(self.urls)


def fleet_of(*servers: ModelledServer, changing: ChangingList | None = None, **named: object) -> Fleet:
    """A fleet of these servers, or of those in a list."""
    by_url = {server.url: server for server in servers}
    roster = Joined([changing or Given(list(by_url))])
    return Fleet(roster, by_url.__getitem__, **named)  # type: ignore[arg-type]
