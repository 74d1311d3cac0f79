"""Reads the tokens of rows in flight off vLLM's own bookkeeping, a few times a second.

Streaming would wake a task for every token of every row, 2-4 % of a run on two cores. vLLM's detokeniser keeps a
row's tokens anyway, so reading them now and then is free; a last look when a row is withdrawn misses none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from conserve.endpoints.protocol import InFlight

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

    from conserve.endpoints.protocol import OnTokens

LOOK_S = 0.25


class Watched:
    """One request whose tokens are reported."""

    def __init__(self, llm: AsyncLLM, key: str, on_tokens: OnTokens) -> None:
        self._llm, self._key, self._on_tokens = llm, key, on_tokens
        self._state: RequestState | None = None  # kept: vLLM drops it when the request is withdrawn
        self._seen = 0

    def look(self) -> None:
        """Report the tokens if there are new ones."""
        if self._state is None:
            self._state = state_of(self._llm, self._key)
        if self._state is None or self._state.detokenizer is None:
            return
        tokens = self._state.detokenizer.output_token_ids
        if len(tokens) > self._seen:
            self._seen = len(tokens)
            self._on_tokens(list(tokens))


def state_of(llm: AsyncLLM, request_id: str) -> RequestState | None:
    """vLLM's bookkeeping of a request in the front end; None before it has one, and once the request has ended."""
    processor = llm.output_processor
    internal = processor.external_req_ids.get(request_id)
    return processor.request_states.get(internal[0]) if internal else None


def in_flight(llm: AsyncLLM) -> InFlight:
    """Tokens of all requests in the engine; a prompt counts from the first token of its answer on."""
    states = llm.output_processor.request_states.values()
    return InFlight(sum(map(_computed, states)), sum(map(_most, states)))


def _computed(state: RequestState) -> int:
    if state.is_prefilling or state.detokenizer is None:
        return 0
    return _prompt(state) + int(state.detokenizer.num_output_tokens())


def _most(state: RequestState) -> int:
    return _prompt(state) + int(state.max_tokens_param or 0)


def _prompt(state: RequestState) -> int:
    """Tokens of the prompt, counted for the first of several answers that share it."""
    return 0 if state.request_index else int(state.prompt_len)


class TokenWatch:
    """All watched requests of one engine, and the task that looks at them."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._watched: set[Watched] = set()
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def on(self, key: str, on_tokens: OnTokens) -> Iterator[None]:
        """Report the tokens of this request while the body runs, and once more if it is withdrawn."""
        watched = Watched(self._llm, key, on_tokens)
        self._watched.add(watched)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield
        except asyncio.CancelledError:
            watched.look()
            raise
        finally:
            self._watched.discard(watched)

    async def _look(self) -> None:
        while self._watched:
            await asyncio.sleep(LOOK_S)
            for watched in list(self._watched):
                watched.look()
