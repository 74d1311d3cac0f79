"""Server-sent events: a completion put together from its pieces, its tokens seen as they come."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import msgspec

from conserve.endpoints.answers import error_of, with_usage
from conserve.endpoints.protocol import Choice, Completion, OnTokens, Url
from conserve.errors import EndpointUnavailable

DATA = b"data:"
DONE = b"[DONE]"


class NotFaithful(Exception):
    """The pieces hold what a completion in one piece would show otherwise: reasoning, or tool calls."""


class Pieces:
    """One answer of one choice in pieces; rows that can be resumed have no other."""

    def __init__(self, url: Url, on_tokens: OnTokens) -> None:
        self._url, self._on_tokens = url, on_tokens
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_tokens = 0  # known from the first piece on
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._model = ""

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt, once it is computed, and of the answer so far."""
        return self._prompt_tokens + len(self._token_ids)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event; raises what an error event amounts to, or whatever a malformed event raises."""
        if "error" in event:
            error = event["error"]
            raise error_of(int(error.get("code") or 500), str(error.get("message", error)))
        self._model = str(event.get("model") or self._model)
        self._usage = event.get("usage") or self._usage
        if prompt := event.get("prompt_token_ids"):  # of a chat; a completion has them in its choice
            self._prompt_tokens = len(prompt)
        for choice in event["choices"]:
            self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        if choice.get("index"):
            raise ValueError(f"choice {choice['index']} was not asked for")
        if prompt := choice.get("prompt_token_ids"):
            self._prompt_tokens = len(prompt)
        self._texts.append(self._text(choice))
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if token_ids := choice.get("token_ids"):
            self._token_ids += token_ids
            self._on_tokens(self._token_ids)

    def _text(self, choice: Mapping[str, Any]) -> str:
        if self._url is Url.COMPLETIONS:
            return choice["text"] or ""
        delta = choice["delta"]
        if delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls"):
            raise NotFaithful
        return delta.get("content") or ""

    def completion(self) -> Completion:
        """The whole answer; raises `EndpointUnavailable` if its end never came."""
        if self._finish_reason is None or self._usage is None:
            raise EndpointUnavailable("the stream ended before the answer did")
        choice = Choice(text="".join(self._texts), finish_reason=self._finish_reason)
        return with_usage((choice,), self._usage, self._model)


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Mapping[str, Any], None]:
    """The events of a stream until it says that it is done; raises `msgspec.DecodeError` for garbage."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            payload = line[len(DATA) :].strip() if line.startswith(DATA) else b""
            if payload == DONE:
                return
            if payload:
                yield msgspec.json.decode(payload)
