"""A server that answers oddly as often as not: garbage, redirects, endless bodies, wrong types in every field."""

import asyncio
import json
import random
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conserve.endpoints.fake import answer_tokens, request_text
from tests.acceptance.scripted_server import Request, ScriptedServer, piece, reply, usage, words

SURROGATE = "cut in half \ud83d"
DEEP = "[" * 100_000
HUGE = (-1, 2**31, 3_000_000_000, 10**20, 10**400, 1.5)
WRONG = (7, 1.5, True, ["x"], {"a": 1})  # where a string belongs
RETRY_AFTER = ("1000000000", "-5", "Fri, 31 Dec 9999 23:59:59 GMT", "soon", "nan", "inf", "1e400", "", "0")
STRINGS: tuple[tuple[Any, ...], ...] = (("choices", 0, "finish_reason"), ("model",))
NUMBERS = (
    ("usage", "prompt_tokens"),
    ("usage", "completion_tokens"),
    ("usage", "prompt_tokens_details", "cached_tokens"),
)
OBJECTS = (("choices",), ("choices", 0), ("usage",), ("usage", "prompt_tokens_details"))
TEXTS = (
    "x" * (10 << 20),
    DEEP,
    '{"a":' * 1000 + "1" + "}" * 1000,
    "nul \0, escape \x1b[31mred\x1b[0m, bell \a",
    "line \u2028 paragraph \u2029 bidi \u202e family \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "",
)

Answer = Callable[["OddServer", asyncio.StreamWriter, "Asked"], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    path: str
    body: dict[str, Any]
    text: str
    dice: random.Random

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def ids(self) -> list[int]:
        return answer_tokens(self.text, 8)


@dataclass(slots=True, eq=False)
class OddServer(ScriptedServer):
    """Gives each row up to `most_odd` odd answers before a good one; to some rows it never gives one."""

    seed: int = 0
    most_odd: int = 2
    hopeless: float = 0.1  # share of rows without a good answer
    good: bool = False  # from here on every answer is
    always: str | None = None  # name of the only answer
    tls: ssl.SSLContext | None = None
    odd: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)  # good answers by request
    _odd_left: dict[str, list[str]] = field(default_factory=dict)
    _turn: int = 0

    @property
    def url(self) -> str:
        scheme = "https" if self.tls else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    async def _up(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._listener.sockets[0].getsockname()[1]

    def is_hopeless(self, text: str) -> bool:
        """True if the row gets odd answers alone."""
        return random.Random(f"{self.seed} {text}").random() < self.hopeless

    def is_special(self, text: str) -> bool:
        """True if the good answer is one of `TEXTS`."""
        return random.Random(f"{self.seed} special {text}").random() < 0.2

    def good_text(self, text: str) -> str:
        """The good answer to a request."""
        if self.is_special(text):
            return random.Random(f"{self.seed} which {text}").choice(TEXTS)
        return words(answer_tokens(text, 8))

    def _next(self, text: str) -> str | None:
        """Name of the next odd answer to a request; None for a good one."""
        if self.good or self.always:
            return self.always
        self._turn += 1
        dice = random.Random(f"{self.seed} {text} {self._turn}")
        if self.is_hopeless(text):
            return dice.choice(FAULTS)
        kinds = (*FAULTS, *WAITS, *STOPS)
        left = self._odd_left.setdefault(text, dice.choices(kinds, k=dice.randint(0, self.most_odd)))
        return left.pop() if left else None

    async def _complete(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], traceparent: str | None
    ) -> bool:
        text = request_text(body)
        self.requests.append(Request(path, body, text, traceparent))
        kind = self._next(text)
        asked = Asked(path, body, text, random.Random(f"{self.seed} {text} {kind} {self._turn}"))
        if kind is None:
            self.served[text] += 1
            return await self._well(writer, asked)
        self.odd[kind] += 1
        return await ODDITIES[kind](self, writer, asked)

    async def _well(self, writer: asyncio.StreamWriter, asked: Asked) -> bool:
        """A good answer."""
        if not asked.streamed:
            return await reply(writer, 200, whole_answer(asked, self.good_text(asked.text)))
        if not self.is_special(asked.text):
            return await self._stream(writer, asked.path, asked.body, asked.ids, None)
        events = stream_of(asked)
        said = self.good_text(asked.text)
        spoken = (
            {"text": said}
            if asked.path.endswith("/completions") and "chat" not in asked.path
            else {"delta": {"content": said}}
        )
        events[0]["choices"][0].update(spoken)
        return await send_stream(writer, events[:1] + events[-2:])


# Good answers, to be spoilt.


def whole_answer(asked: Asked, text: str | None = None) -> dict[str, Any]:
    """A response body."""
    said = words(asked.ids) if text is None else text
    spoken = {"message": {"role": "assistant", "content": said}} if "chat" in asked.path else {"text": said}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None, **spoken}
    return {"id": "one", "choices": [choice], "model": "served", "usage": usage(asked.ids)}


def stream_of(asked: Asked) -> list[dict[str, Any]]:
    """The events of a stream: two pieces of the text, its end, and the usage."""
    ids = asked.ids
    events = [
        piece(asked.path, ids, 0, 4),
        piece(asked.path, ids, 4, 8),
        piece(asked.path, ids, 8, 8, "stop"),
        {"choices": [], "model": "served", "usage": usage(ids)},
    ]
    return [{"id": "one", **event} for event in events]


def spoilt(document: Any, place: Sequence[Any], value: Any) -> Any:
    """The document with another value in one place."""
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return document


async def send_stream(
    writer: asyncio.StreamWriter, events: Sequence[dict[str, Any] | bytes], *, end: bool = True
) -> bool:
    """Events as a chunked response; without an `end` the connection is closed."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head)
    for event in events:
        payload = event if isinstance(event, bytes) else json.dumps(event).encode()
        line = b"data: " + payload + b"\n\n"
        writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        await writer.drain()
    if end:
        done = b"data: [DONE]\n\n"
        writer.write(f"{len(done):x}\r\n".encode() + done + b"\r\n0\r\n\r\n")
        await writer.drain()
    return end


async def send_raw(writer: asyncio.StreamWriter, status: int, content: bytes, *headers: str) -> bool:
    """A whole response with these headers."""
    lines = "".join(f"{header}\r\n" for header in headers)
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n{lines}\r\n".encode() + content)
    await writer.drain()
    return True


async def send(writer: asyncio.StreamWriter, asked: Asked, document: Any) -> bool:
    """A spoilt answer: a whole one, or as the events of a stream."""
    if asked.streamed:
        return await send_stream(writer, document)
    return await reply(writer, 200, document)


# Odd answers.


def fresh(asked: Asked, text: str | None = None) -> Any:
    """An answer to be spoilt; `text` is that of a whole one, which an odd usage does not spoil."""
    return stream_of(asked) if asked.streamed else whole_answer(asked, text)


def text_place(asked: Asked) -> tuple[Any, ...]:
    """Place of the text."""
    if not asked.streamed:
        return ("choices", 0, "message", "content") if "chat" in asked.path else ("choices", 0, "text")
    return (1, "choices", 0, "delta", "content") if "chat" in asked.path else (1, "choices", 0, "text")


def any_place(asked: Asked, places: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """One of these places of an answer; of a stream in the last event that has it."""
    place = asked.dice.choice(places)
    if not asked.streamed:
        return place
    return (3, *place) if place[0] == "usage" else (1, *place)


async def garbage(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    content = asked.dice.choice(
        [b"<html>", b"", b"null", b"[]", b"7", b'"x"', b"\xff\xfe\x00", DEEP.encode(), b"{" * 50_000, b"{}"]
    )
    if asked.streamed:
        return await send_stream(writer, [content or b"{nonsense"])
    return await send_raw(writer, 200, content)


async def half(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """Half an answer, as if whole."""
    content = json.dumps(whole_answer(asked)).encode()
    return await send_raw(writer, 200, content[: asked.dice.randrange(1, len(content))])


async def half_a_line(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """A stream that ends in the middle of a line; where nothing is streamed, a connection that breaks."""
    if not asked.streamed:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        return False
    line = b"data: " + json.dumps(stream_of(asked)[0]).encode()[:40]
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n0\r\n\r\n")
    await writer.drain()
    return True


async def wrong_id(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """A piece of another answer; where nothing is streamed, one choice too many."""
    if asked.streamed:
        return await send_stream(writer, spoilt(stream_of(asked), (1, "id"), "another"))
    return await wrong_choices(_, writer, asked)


async def endless(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """A body that goes on for ever, a byte at a time."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    if asked.streamed:
        line = b"data: " + json.dumps(stream_of(asked)[0]).encode() + b"\n\n"
        writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
    while not writer.is_closing():
        writer.write(b"1\r\n \r\n")
        await writer.drain()
        await asyncio.sleep(0.02)
    return False


async def flood(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """A body that goes on for ever, as fast as it is taken."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    block = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    while not writer.is_closing():
        writer.write(block)
        await writer.drain()
    return False


async def wrong_choices(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """Too many choices, or none; of a stream a choice that was not asked for."""
    if asked.streamed:
        return await send_stream(writer, spoilt(stream_of(asked), (1, "choices", 0, "index"), 1))
    answer = whole_answer(asked)
    answer["choices"] = answer["choices"] * asked.dice.choice([0, 2, 3])
    return await reply(writer, 200, answer)


async def odd_types(server: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    places = [*STRINGS, *OBJECTS]
    place = text_place(asked) if asked.dice.random() < 0.4 else any_place(asked, places)
    value: Any = asked.dice.choice(WRONG)
    if place[-1] in ("choices", 0, "usage", "prompt_tokens_details"):
        value = asked.dice.choice([7, True, "x"])
    answer = fresh(asked, server.good_text(asked.text))
    return await send(writer, asked, spoilt(answer, place, value))


async def surrogates(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    kind = asked.dice.randrange(3)
    if kind == 0:
        return await send(writer, asked, spoilt(fresh(asked), text_place(asked), SURROGATE))
    if kind == 1 and not asked.streamed:
        logprobs = {"content": [{"token": SURROGATE, "logprob": -1.0}]}
        return await send(writer, asked, spoilt(fresh(asked), ("choices", 0, "logprobs"), logprobs))
    return await send(writer, asked, spoilt(fresh(asked), any_place(asked, STRINGS), SURROGATE))


async def huge_numbers(server: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    value = asked.dice.choice(HUGE)
    answer = fresh(asked, server.good_text(asked.text))
    return await send(writer, asked, spoilt(answer, any_place(asked, NUMBERS), value))


async def deep(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """An answer with a value nested deeper than any reader goes."""
    marker = "HERE"
    place = (
        (1, "unknown") if asked.streamed else asked.dice.choice([("unknown",), ("choices", 0, "logprobs")])
    )
    document = spoilt(fresh(asked), place, marker)
    levels = asked.dice.choice([2_000, 100_000])
    nested = "[" * levels + "]" * levels if place[-1] == "unknown" else '{"a":' * levels + "1" + "}" * levels
    if asked.streamed:
        spoilt_event = json.dumps(document[1]).replace(f'"{marker}"', nested).encode()
        return await send_stream(writer, [document[0], spoilt_event, *document[2:]])
    return await send_raw(writer, 200, json.dumps(document).replace(f'"{marker}"', nested).encode())


async def wrong_encoding(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """A body that says it is compressed, and is not."""
    return await send_raw(writer, 200, json.dumps(whole_answer(asked)).encode(), "content-encoding: gzip")


async def status(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    code = asked.dice.choice([201, 206, 500, 501, 599])
    error = {"error": {"message": SURROGATE, "code": ["x"]}}
    said = [json.dumps(SURROGATE).encode(), json.dumps(error).encode()]
    content = asked.dice.choice([b"", b"<html>" * 10_000, DEEP.encode(), *said])
    return await send_raw(writer, code, content)


async def error_event(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """An error in the middle of a stream, of any form; elsewhere an answer that is an error."""
    error = asked.dice.choice([{"message": SURROGATE[:-1], "code": ["x"]}, "x", ["x"], {"code": "many"}, 7])
    document: Any = [stream_of(asked)[0], {"error": error}] if asked.streamed else {"error": error}
    return await send(writer, asked, document)


async def busy(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    code = asked.dice.choice([429, 503])
    return await send_raw(writer, code, b"{}", f"retry-after: {asked.dice.choice(RETRY_AFTER)}")


async def away(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    return await send_raw(writer, asked.dice.choice([502, 504]), b"")


async def given_up(_: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    place = (2, "choices", 0, "finish_reason") if asked.streamed else ("choices", 0, "finish_reason")
    return await send(writer, asked, spoilt(fresh(asked), place, asked.dice.choice(["abort", "error"])))


async def redirect(server: OddServer, writer: asyncio.StreamWriter, asked: Asked) -> bool:
    where = asked.dice.choice(
        ["", "/", "//", "http://x:port", f"{server.url}{asked.path}/", "https://other/v1"]
    )
    headers = [f"location: {where}"] if where else []
    return await send_raw(writer, asked.dice.choice([301, 302, 303, 307, 308, 304]), b"", *headers)


ENDLESS = "endless"  # only time ends it, and good answers may not be late, so that it is given alone
FAULTS = ("garbage", "half an answer", "wrong id", "flood", "wrong choices", "odd types",
          "lone surrogates", "huge numbers", "deep nesting", "wrong encoding", "status", "error event")  # fmt: skip
"""Faulty answers: tried again, and in the end the row fails."""
WAITS = ("busy", "away", "given up", "half a line")
"""The row waits."""
STOPS = ("redirect",)
"""The address is wrong: the run ends, and no row is blamed."""

ODDITIES: dict[str, Answer] = {
    "garbage": garbage,
    "half an answer": half,
    "half a line": half_a_line,
    "wrong id": wrong_id,
    ENDLESS: endless,
    "flood": flood,
    "wrong choices": wrong_choices,
    "odd types": odd_types,
    "lone surrogates": surrogates,
    "huge numbers": huge_numbers,
    "deep nesting": deep,
    "wrong encoding": wrong_encoding,
    "status": status,
    "error event": error_event,
    "busy": busy,
    "away": away,
    "given up": given_up,
    "redirect": redirect,
}
