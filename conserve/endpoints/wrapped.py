"""Endpoint around another one: a subclass changes what it is there for, and the rest goes through."""

from conserve.endpoints.protocol import Call, Completion, Endpoint, InFlight, KvCache, OnTokens


class WrappedEndpoint(Endpoint):
    """An endpoint that hands everything to another one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @property
    def identity(self) -> str:
        return self._endpoint.identity

    @property
    def capacity(self) -> int:
        return self._endpoint.capacity

    @property
    def model(self) -> str | None:
        return self._endpoint.model

    @property
    def kv_cache(self) -> KvCache:
        return self._endpoint.kv_cache

    @property
    def doing(self) -> str | None:
        return self._endpoint.doing

    @property
    def in_flight(self) -> InFlight:
        return self._endpoint.in_flight

    @property
    def notice(self) -> str | None:
        return self._endpoint.notice

    async def start(self) -> None:
        await self._endpoint.start()

    async def close(self) -> None:
        await self._endpoint.close()

    async def alive(self) -> bool:
        return await self._endpoint.alive()

    async def version(self) -> str | None:
        return await self._endpoint.version()

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        return await self._endpoint.complete(call, on_tokens)


class BorrowedEndpoint(WrappedEndpoint):
    """Endpoint of an engine that is ready, and outlives the harvester that uses it."""

    async def start(self) -> None:
        """Do nothing: the engine is ready."""

    async def close(self) -> None:
        """Do nothing: the engine stays up."""
