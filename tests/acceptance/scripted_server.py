"""A real HTTP server that speaks OpenAI's routes as a script says, and answers as the fake endpoint does."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from conserve.endpoints.fake import WORDS, answer_tokens, request_text
from tests.held_port import hold
from tests.server_reports import FRONT_END, SCHEDULER

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(slots=True, kw_only=True)
class Script:
    """Behaviour of the server; a word in a request's text makes it misbehave, the first time if it `excuses`.

    BUSY: 429. FAULT: 500. GARBAGE: no JSON. BREAK: the connection ends half-way. ABORT: the answer is given
    up. DIES: an event says that the engine is dead. DIED: as DIES, and /health says so too from then on. FELLS: the
    whole server goes down, every time.

    Answers stop after `pause_at` tokens, those in one piece before they begin, and go on once it is None or
    larger: a test waits for `paused` and knows how far every row is, however slow the machine. Requests of one
    token never stop.
    """

    models: tuple[str, ...] = ("served",)  # without any it has no list of models
    coserves: bool = True
    identity: str = "scripted"
    max_num_seqs: int = 8
    tokens: int = 8
    token_s: float = 0.0
    pause_at: int | None = None
    metrics: str | None = None
    version: str | None = None  # of vLLM
    priorities: bool = True
    status: int | None = None  # answers everything with it
    healthy: bool = True
    reasons: bool = False
    excuses: bool = True


@dataclass(slots=True)
class Request:
    """A request on a route that completes."""

    path: str
    body: dict[str, Any]
    text: str
    traceparent: str | None = None


@dataclass(slots=True, eq=False)
class ScriptedServer:
    """Runs in a thread of its own; `down` and `up` are a server that dies and comes back on the same port."""

    script: Script = field(default_factory=Script)
    requests: list[Request] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)
    continued: list[int] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    paused: int = 0  # answers that have come to `pause_at`
    port: int = 0
    _excused: set[str] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _listener: asyncio.Server | None = None
    _held_port: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        if not self.port:
            self._held_port = hold()
            self.port = self._held_port.getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        assert self._thread is not None
        self._thread.join()
        self._loop.close()
        if self._held_port is not None:
            self._held_port.close()

    @property
    def is_up(self) -> bool:
        """True if it listens."""
        return self._listener is not None and self._listener.is_serving()

    def up(self) -> None:
        """Listen."""
        self._do(self._up)

    def down(self) -> None:
        """Cut every connection and listen no more."""
        self._do(self._down)

    def _do(self, function: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(function(), self._loop).result()

    async def _up(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _down(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections are closed in the next turn of the loop

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection, and close it even if its task is cancelled before it begins."""
        if not self.is_up:  # the kernel had accepted it before
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._writers.add(writer)
        self._tasks.add(task)

        def ended(_: "asyncio.Task[None]") -> None:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

        task.add_done_callback(ended)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False ends the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        traceparent = next(
            (h.split(": ")[1] for h in head.split("\r\n") if h.startswith("traceparent:")), None
        )
        length = next(
            (int(h.split(":")[1]) for h in head.lower().split("\r\n") if h.startswith("content-length")), 0
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        if self.script.status is not None:
            return await reply(writer, self.script.status, {"error": {"message": "scripted"}})
        if method == "GET":
            self.gets.append(path)
            return await self._get(writer, path)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._complete(writer, path, body, traceparent)
        finally:
            self.in_flight -= 1

    async def _get(self, writer: asyncio.StreamWriter, path: str) -> bool:
        if path == "/v1/models" and self.script.models:
            return await reply(writer, 200, {"data": [{"id": model} for model in self.script.models]})
        if path == "/health":
            return await reply(writer, 200 if self.script.healthy else 503, {})
        if path == "/metrics" and self.script.metrics is not None:
            return await reply(writer, 200, self.script.metrics)
        if path == "/version" and self.script.version is not None:
            return await reply(writer, 200, {"version": self.script.version})
        if path.partition("?")[0] == "/v1/conserve" and self.script.coserves:
            known = {"identity": self.script.identity, "max_num_seqs": self.script.max_num_seqs}
            return await reply(writer, 200, {**FRONT_END, **SCHEDULER, **known})
        return await reply(writer, 404, {"detail": "Not Found"})

    async def _complete(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], traceparent: str | None
    ) -> bool:
        text = request_text(body)
        self.requests.append(Request(path, body, text, traceparent))
        if body.get("priority") and not self.script.priorities:
            return await reply(writer, 400, {"error": {"message": "priority scheduling is not enabled"}})
        if "FELLS" in text:
            falls = asyncio.get_running_loop().create_task(self._down())  # which ends this task
            await asyncio.wait([falls])
        word = self._misbehaviour(text)
        if word in ("BUSY", "FAULT"):
            return await reply(writer, 429 if word == "BUSY" else 500, {"error": {"message": word}})
        ids = answer_tokens(text, int(body.get("max_tokens", self.script.tokens)))
        if body.get("stream"):
            return await self._stream(writer, path, body, ids, word)
        if body.get("max_tokens") != 1:
            await self._pause(0)
        await asyncio.sleep(self.script.token_s * len(ids))
        if word == "GARBAGE":
            return await reply(writer, 200, "<html>")
        if word == "BREAK":
            return False
        if path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [token / 8 for token in ids]}]
            return await reply(writer, 200, {"data": data, "model": "served", "usage": {"prompt_tokens": 1}})
        if path == "/v1/responses":
            output = [{"type": "message", "content": [{"type": "output_text", "text": words(ids)}]}]
            return await reply(writer, 200, {"output": output, "status": "completed", "model": "served"})
        said = {"text": words(ids)} if path == "/v1/completions" else {"message": {"content": words(ids)}}
        choice = {"index": 0, "finish_reason": "abort" if word == "ABORT" else "stop", **said}
        return await reply(writer, 200, {"choices": [choice], "model": "served", "usage": usage(ids)})

    async def _pause(self, tokens: int) -> None:
        """Wait while an answer of so many tokens is not to go on; an engine that dies goes on."""

        def held() -> bool:
            return self.script.healthy and self.script.pause_at is not None and tokens >= self.script.pause_at

        if held():
            self.paused += 1
            try:
                while held():
                    await asyncio.sleep(0.002)
            finally:
                self.paused -= 1

    def _misbehaviour(self, text: str) -> str | None:
        word = next(
            (w for w in ("BUSY", "FAULT", "GARBAGE", "BREAK", "ABORT", "DIES", "DIED") if w in text), None
        )
        if word is None or text in self._excused:
            return None
        if self.script.excuses:
            self._excused.add(text)
        return word

    async def _stream(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], ids: list[int], word: str | None
    ) -> bool:
        saved = (body.get("vllm_xargs") or {}).get("conserve_resume", [])
        assert saved == ids[: len(saved)], "tokens of another request"
        if saved:
            self.continued.append(len(saved))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        start = 0
        for stop in range(len(saved) or 1, len(ids) + 1):
            if word is not None and stop > len(ids) // 2:
                break
            await self._pause(start)
            if not self.script.healthy:
                word = "DIED"
                break
            await asyncio.sleep(self.script.token_s)
            await event(writer, piece(path, ids, start, stop, reasons=self.script.reasons))
            start = stop
        if word == "BREAK":
            return False
        if word == "GARBAGE":
            await raw_event(writer, b"{nonsense")
        if word in ("DIES", "DIED"):
            self.script.healthy = word == "DIES"
            await event(writer, {"error": {"message": DEAD, "type": "InternalServerError", "code": 500}})
        reason = "abort" if word == "ABORT" else "stop"
        await event(writer, piece(path, ids, start, start, reason))
        await event(writer, {"choices": [], "model": "served", "usage": usage(ids)})
        await raw_event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def usage(ids: list[int]) -> dict[str, Any]:
    return {"prompt_tokens": 3, "completion_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": 1}}


def piece(
    path: str, ids: list[int], start: int, stop: int, reason: str | None = None, *, reasons: bool = False
) -> dict[str, Any]:
    """The event that brings tokens `start` to `stop`."""
    text = (" " if start and stop > start else "") + words(ids[start:stop])
    delta = {"reasoning": text} if reasons else {"content": text}
    said = {"text": text} if path == "/v1/completions" else {"delta": delta}
    choice = {"index": 0, "finish_reason": reason, "token_ids": ids[start:stop], **said}
    return {"choices": [choice], "model": "served"}


async def event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    await raw_event(writer, json.dumps(value).encode())


async def raw_event(writer: asyncio.StreamWriter, payload: bytes) -> None:
    line = b"data: " + payload + b"\n\n"
    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
    await writer.drain()


async def reply(writer: asyncio.StreamWriter, status: int, value: Any) -> bool:
    """A whole response; the connection stays open."""
    content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return True
