"""An endpoint in memory with scripted latencies and failures, for tests.

With CONSERVE_FAKE=1, `conserve run --endpoint "fake:?token_ms=1"` drains a queue without a model. An answer depends
on its request alone, so that two runs of a job must agree to the byte.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from conserve.endpoints.fake_logprobs import likeliest, logprobs_of
from conserve.endpoints.protocol import Call, Choice, Completion, Endpoint, InFlight, OnTokens, Url
from conserve.errors import (
    EndpointBusy,
    EndpointFault,
    EndpointUnavailable,
    EngineDied,
    RequestRejected,
    SettingsError,
)

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty")
MOST_TOKENS = 1_000_000  # in an answer
in_order = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` would make an encoder for each request


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Behaviour of the fake. A request whose text contains a trigger word misbehaves, every time."""

    start_ms: float = 0.0  # until it is ready
    request_ms: float = 0.0  # before the first token
    token_ms: float = 0.0  # between tokens
    tokens: int = 8  # in each answer, unless the request sets max_tokens
    capacity: int = 1024
    identity: str = "fake"
    model: str = "fake"
    reject: str = "REJECT"  # -> RequestRejected
    fault: str = "FAULT"  # -> EndpointFault
    busy: str = "BUSY"  # -> EndpointBusy, the first time only
    unavailable: str = "UNAVAILABLE"  # -> EndpointUnavailable, the first time only
    kill: str = "KILL"  # -> EngineDied for all calls in flight

    @classmethod
    def from_url(cls, url: str) -> "Script":
        """Parse ``fake:?token_ms=1&tokens=20``; raises `SettingsError`."""
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True):
            if name not in kinds:
                raise SettingsError(f"the fake endpoint has no {name!r}; there are: {', '.join(kinds)}")
            try:
                values[name] = kinds[name](value)
            except ValueError as error:
                raise SettingsError(f"{name} of the fake endpoint is a number, not {value!r}") from error
        return cls(**values)


class FakeEndpoint(Endpoint):
    """The fake endpoint. `calls` counts its calls; `continued` lists the number of saved tokens in resumed ones."""

    doing: str | None = "starting the fake endpoint"
    in_flight = InFlight(0, 0)

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.continued: list[int] = []
        self.calls = 0
        self.deaths = 0
        self._excused: set[str] = set()
        self._in_flight: set[asyncio.Future[None]] = set()

    @property
    def identity(self) -> str:
        return self.script.identity

    @property
    def model(self) -> str:
        return self.script.model

    @property
    def capacity(self) -> int:
        return self.script.capacity

    async def start(self) -> None:
        await asyncio.sleep(self.script.start_ms / 1e3)
        self.doing = None

    async def close(self) -> None:
        pass

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        self.calls += 1
        text = request_text(call.body)
        self._misbehave(text)
        token_ids = answer_tokens(text, num_tokens(call.body, self.script.tokens))
        if call.resume_from:
            assert list(call.resume_from) == token_ids[: len(call.resume_from)], "tokens of another request"
            self.continued.append(len(call.resume_from))
        if self.script.request_ms or self.script.token_ms or self.script.kill in text:
            await self._generate(text, token_ids, len(call.resume_from), on_tokens)
        said = " ".join(WORDS[t] for t in token_ids)
        logprobs = None
        if asks_for_logprobs(call):
            token_ids = likeliest(call.body["prompt"], len(token_ids))
            logprobs = logprobs_of(call.body, token_ids)
        return Completion(
            choices=(Choice(text=said, finish_reason="stop", logprobs=logprobs),),
            prompt_tokens=num_prompt_tokens(call.body, text),
            completion_tokens=len(token_ids),
            cached_tokens=0,
            model=self.script.model,
        )

    def _misbehave(self, text: str) -> None:
        """Raise the error of a trigger word in the request."""
        script = self.script
        if script.reject in text:
            raise RequestRejected("scripted rejection")
        if script.fault in text:
            raise EndpointFault("scripted fault")
        if script.busy in text and self._is_first(text):
            raise EndpointBusy("scripted: busy", retry_after_s=0.05)
        if script.unavailable in text and self._is_first(text):
            raise EndpointUnavailable("scripted: unavailable")

    def _is_first(self, text: str) -> bool:
        """True the first time that this request comes."""
        first = text not in self._excused
        self._excused.add(text)
        return first

    async def _generate(
        self, text: str, token_ids: Sequence[int], already: int, on_tokens: OnTokens | None
    ) -> None:
        """Take the scripted time; with the `kill` word, fail all calls in flight."""
        died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight.add(died)
        most = len(text.split()) + len(token_ids)
        computed = 0
        self._count(0, most)
        try:
            await self._pause(self.script.request_ms, died)
            if self.script.kill in text:
                self._die()
            computed = len(text.split()) + already
            self._count(computed)
            for count in range(already + 1, len(token_ids) + 1):
                await self._pause(self.script.token_ms, died)
                computed += 1
                self._count(1)
                if on_tokens is not None:
                    on_tokens(token_ids[:count])
        finally:
            self._in_flight.discard(died)
            self._count(-computed, -most)

    def _count(self, computed: int, most: int = 0) -> None:
        """Add to the tokens in flight."""
        self.in_flight = InFlight(self.in_flight.computed + computed, (self.in_flight.most or 0) + most)

    async def _pause(self, ms: float, died: asyncio.Future[None]) -> None:
        if ms:
            await asyncio.wait({died}, timeout=ms / 1e3)
        if died.done():
            raise EngineDied("scripted: the engine died")

    def _die(self) -> None:
        self.deaths += 1
        for future in self._in_flight:
            if not future.done():
                future.set_result(None)
        raise EngineDied("scripted: the engine died")


def asks_for_logprobs(call: Call) -> bool:
    """True for a completion of token ids that asks for log probabilities."""
    prompt = call.body.get("prompt")
    return call.body.get("logprobs") is not None and isinstance(prompt, list) and call.url is Url.COMPLETIONS


def request_text(body: Mapping[str, Any]) -> str:
    """The part of a request that its answer depends on; raises `RequestRejected` if there is none."""
    if "prompt" in body:
        return str(body["prompt"])
    for name in ("messages", "input"):
        if name in body:
            return in_order(body[name])
    raise RequestRejected("the body has neither messages nor a prompt")


def num_prompt_tokens(body: Mapping[str, Any], text: str) -> int:
    """Length of the prompt: its token ids, or its words."""
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) else len(text.split())


def num_tokens(body: Mapping[str, Any], default: int) -> int:
    """Length of the answer; raises `RequestRejected` for a length that a server would reject."""
    for name in ("max_completion_tokens", "max_tokens"):
        wanted = body.get(name)
        if wanted is not None:
            if not isinstance(wanted, int) or not 0 <= wanted <= MOST_TOKENS:
                raise RequestRejected(f"{name} must be a whole number up to {MOST_TOKENS:,}, not {wanted!r}")
            return wanted
    return default


def answer_tokens(text: str, count: int) -> list[int]:
    """`count` token ids that depend on the text alone."""
    digest = hashlib.shake_128(text.encode()).digest(count)
    return [byte % len(WORDS) for byte in digest]
