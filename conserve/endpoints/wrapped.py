"""Endpoint around another one: a subclass changes what it is there for, and the rest goes through."""

from typing import Any

from conserve.endpoints.protocol import Call, Completion, Endpoint, OnTokens


class WrappedEndpoint:
    """An endpoint that hands everything to another one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    @property
    def identity(self) -> str:
        return self._endpoint.identity

    @property
    def capacity(self) -> int:
        return self._endpoint.capacity

    async def start(self) -> None:
        await self._endpoint.start()

    async def close(self) -> None:
        await self._endpoint.close()

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        return await self._endpoint.complete(call, on_tokens)


class BorrowedEndpoint(WrappedEndpoint):
    """Endpoint of an engine that is ready, and outlives the harvester that uses it."""

    async def start(self) -> None:
        """Do nothing: the engine is ready."""

    async def close(self) -> None:
        """Do nothing: the engine stays up."""
