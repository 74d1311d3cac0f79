"""Server-sent events: put a completion together from its pieces, and report its tokens as they come."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from conserve.endpoints.answers import Count, TokenUsage, with_usage
from conserve.endpoints.protocol import Choice, Completion, OnTokens, Url
from conserve.endpoints.refusals import error_in_stream
from conserve.errors import EndpointUnavailable

DATA = b"data:"
DONE = b"[DONE]"


class NotFaithful(Exception):
    """The pieces hold content that a whole completion would show in another way: reasoning, or tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of the answer to a chat."""

    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePiece:
    """A piece of one of the answers; a chat's text is in the `delta`."""

    index: Count | None = None
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One event of a stream: pieces of answers, the usage at the end, or an error."""

    id: str | None = None
    choices: list[ChoicePiece] | None = None
    usage: TokenUsage | None = None
    model: str | None = None
    prompt_token_ids: list[Count] | None = None
    error: Any = None


decode = msgspec.json.Decoder(StreamEvent).decode


class AnswerPieces:
    """One answer in pieces, of one choice: rows that can be resumed have no more."""

    def __init__(self, url: Url, on_tokens: OnTokens, *, saved: int = 0) -> None:
        """`saved`: tokens that the server was sent, and sends back at once."""
        self._url, self._on_tokens, self._saved = url, on_tokens, saved
        self._id: str | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_tokens = 0  # known from the first piece on
        self._finish_reason: str | None = None
        self._usage: TokenUsage | None = None
        self._model: str | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt, once it is computed, and of the answer so far."""
        return self._prompt_tokens + len(self._token_ids)

    @property
    def begun(self) -> bool:
        """True once a part of the answer has come that was not saved before."""
        return self.gained or (not self._saved and any(self._texts))

    @property
    def gained(self) -> bool:
        """True once the answer has more tokens than were saved before."""
        return self.tokens > self._saved

    @property
    def ended(self) -> bool:
        """True once the end of the answer has come."""
        return self._finish_reason is not None and self._usage is not None

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far, those that were saved before included."""
        return len(self._token_ids)

    def add(self, payload: bytes) -> None:
        """Take one event; raises the error that it reports, or one of `UNREADABLE` if it is malformed."""
        event = decode(payload)
        if event.error:
            raise error_in_stream(event.error)
        if event.choices is None:
            raise ValueError("an event without choices")
        self._id = self._id or event.id
        if event.id not in (None, self._id):
            raise ValueError("a piece of another answer")
        self._model = event.model or self._model
        self._usage = event.usage or self._usage
        if event.prompt_token_ids:  # of a chat; a completion has them in its choice
            self._prompt_tokens = len(event.prompt_token_ids)
        for choice in event.choices:
            self._add_choice(choice)

    def _add_choice(self, choice: ChoicePiece) -> None:
        if choice.index:
            raise ValueError(f"choice {choice.index} was not asked for")
        if choice.prompt_token_ids:
            self._prompt_tokens = len(choice.prompt_token_ids)
        self._texts.append(self._text(choice))
        self._finish_reason = choice.finish_reason or self._finish_reason
        if choice.token_ids:
            self._token_ids += choice.token_ids
            self._on_tokens(self._token_ids)

    def _text(self, choice: ChoicePiece) -> str:
        if self._url is Url.COMPLETIONS:
            if choice.text is None:
                raise ValueError("a choice without a text")
            return choice.text
        if choice.delta is None:
            raise ValueError("a choice without a delta")
        delta = choice.delta
        if delta.reasoning or delta.reasoning_content or delta.tool_calls:
            raise NotFaithful
        return delta.content or ""

    def completion(self) -> Completion:
        """The whole answer; raises `EndpointUnavailable` if the stream ended before it."""
        if self._finish_reason is None or self._usage is None:
            raise EndpointUnavailable("the stream ended before the answer did")
        choice = Choice(text="".join(self._texts), finish_reason=self._finish_reason)
        return with_usage((choice,), self._usage, self._model)


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the payloads of a stream's events until its end mark."""
    begun: list[bytes] = []  # pieces of a line, joined once at its end
    async for chunk in chunks:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            full = b"".join([*begun, line])
            begun.clear()
            payload = full[len(DATA) :].strip() if full.startswith(DATA) else b""
            if payload == DONE:
                return
            if payload:
                yield payload
        begun.append(rest)
