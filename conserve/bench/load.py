"""An open-loop load generator: every request is sent when it is due, answered predecessors or not.

`python -m conserve.bench.load PLAN ANSWERS` plays a plan (JSON) in a process of its own, which can be pinned to
cores the engine does not use, and writes the answers as Parquet. With `-` for the plan it reads a line of JSON from
stdin, says that it is ready, and reads when to start.
"""

import asyncio
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import numpy as np

from conserve.bench import raw
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.stream import StreamedReply, port_of, post
from conserve.bench.traces import Arrival, Trace
from conserve.errors import ConserveError, InputError
from conserve.hosts import basic, bearer, server_root, split_login, without_login

SPIN_S = 0.0015  # epoll wakes up to 1 ms late, so the last stretch is spent looking at the clock
HEAD_START_S = 0.05
READY = b"ready\n"
SHARED_SEED = 1
DETAIL_CHARACTERS = 300
CONNECT_S = 1.0  # to an address of several


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """An OpenAI server under load, and the constant parts of its requests.

    `vocab_range` bounds the random prompts' token ids (the upper one excluded); `extra` joins the body.
    """

    base_url: str
    model: str
    api_key: str | None = None
    vocab_range: tuple[int, int] = (100, 20_000)
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Plan of one load generator process; `cores` to pin it to, if any."""

    trace: Trace
    target: LoadTarget
    seed: int
    cores: tuple[int, ...] = ()


class ChunkChoice(msgspec.Struct):
    """A chunk's addition to the answer; `token_ids` only from servers that were asked for them."""

    token_ids: list[int] | None = None


class ChunkUsage(msgspec.Struct):
    """Number of the answer's tokens so far."""

    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """One server-sent event of /v1/completions."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None


CHUNKS = msgspec.json.Decoder(Chunk)


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request under way; times are monotonic, in s."""

    sent_at: float
    ended_at: float = 0.0
    token_at: list[float] = field(default_factory=list)
    status: RequestEnd = RequestEnd.OK
    detail: str = ""

    def fail(self, status: RequestEnd, detail: str) -> None:
        self.status, self.detail = status, detail[:DETAIL_CHARACTERS]


def prompt_ids(
    arrival: Arrival, index: int, vocab_range: tuple[int, int], seed: int = 0, *, shared: int = 0
) -> list[int]:
    """Prompt of random token ids, the same for the same seed and index.

    Its first `shared` ids are those of every other prompt, whatever the seed; beyond them it shares no prefix.
    """
    common = np.random.default_rng(SHARED_SEED).integers(*vocab_range, shared)
    own = np.random.default_rng([seed, index]).integers(*vocab_range, arrival.input_tokens - shared)
    ids: list[int] = [*common.tolist(), *own.tolist()]
    return ids


def request_body(arrival: Arrival, index: int, target: LoadTarget, seed: int, *, shared: int = 0) -> bytes:
    """JSON body of one request, which makes the server generate exactly the arrival's output tokens."""
    body = {
        "model": target.model,
        "prompt": prompt_ids(arrival, index, target.vocab_range, seed, shared=shared),
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        # not return_token_ids, which sends the whole prompt back with the first token
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return msgspec.json.encode({**body, **target.extra})


async def play(
    trace: Trace, target: LoadTarget, *, seed: int, start_at: float | None = None
) -> list[LoadAnswer]:
    """Send the trace's requests, each when it is due, and collect the answers in the trace's order.

    `start_at`, on the monotonic clock that a machine's processes share, is the trace's time 0: now, unless
    given. Returns when the last answer is complete or was given up. Raises `InputError` for a bad URL.
    """
    url = _completions(target.base_url)
    host = await _resolved(url)
    start_at = at_once() if start_at is None else start_at
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, arrival in enumerate(trace):
            shared = trace.cached(arrival)
            # Making a body takes 0.1 ms: before the wait, not after it.
            body = request_body(arrival, index, target, seed, shared=shared)
            await _until(start_at + arrival.at_s)
            tasks.append(group.create_task(_ask(url, host, target, body)))
    return [
        _answer(index, arrival, task.result(), start_at, cached=trace.cached(arrival))
        for index, (arrival, task) in enumerate(zip(trace, tasks, strict=True))
    ]


def at_once() -> float:
    """Start as soon as may be, on the monotonic clock."""
    return time.monotonic() + HEAD_START_S


async def play_apart(plan: LoadPlan, begin: Callable[[], float] = at_once) -> list[LoadAnswer]:
    """Play the plan in a process of its own; raises `ConserveError`.

    The process takes a second to start, and several where its files are no longer in memory. Once it is ready,
    `begin` is asked for the trace's time 0, as in `play`.
    """
    with TemporaryDirectory(prefix="conserve-load-") as folder:
        path = Path(folder) / "answers.parquet"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "conserve.bench.load", "-", str(path)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the benchmark, which ends it
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(plan) + b"\n")
            said = await process.stdout.readline()
            _, complaint = await process.communicate(f"{begin()!r}\n".encode() if said == READY else None)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConserveError(f"the load generator stopped ({last}); run the benchmark again")
        return raw.read_answers(path)


async def _until(due: float) -> None:
    """Sleep until `SPIN_S` before `due`, then yield to the other tasks until then."""
    await asyncio.sleep(max(0.0, due - time.monotonic() - SPIN_S))
    while time.monotonic() < due:
        await asyncio.sleep(0)


async def _ask(url: SplitResult, host: str, target: LoadTarget, body: bytes) -> Exchange:
    """Send one request and time its tokens; faults of the server or network are noted, not raised."""
    exchange = Exchange(sent_at=time.monotonic())
    try:
        async with asyncio.timeout(target.timeout_s), post(url, host, headers_of(target), body) as reply:
            await (_take(reply, exchange) if reply.status == 200 else _take_refusal(reply, exchange))
    except TimeoutError:
        exchange.fail(RequestEnd.TIMEOUT, f"the answer was not complete within {target.timeout_s:g} s")
    except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
        exchange.fail(RequestEnd.BROKEN, f"{type(error).__name__}: {error}")
    exchange.ended_at = time.monotonic()
    return exchange


async def _take(reply: StreamedReply, exchange: Exchange) -> None:
    """Note the time of each token until the server ends the answer."""
    async for line in reply.lines():
        if not line.startswith(b"data:"):
            continue
        now, event = time.monotonic(), line[5:].strip()
        if event == b"[DONE]":
            if not exchange.token_at:
                exchange.fail(RequestEnd.BROKEN, "the answer has no token")
            return
        chunk = CHUNKS.decode(event)
        if chunk.error is not None:
            exchange.fail(RequestEnd.REFUSED, str(chunk.error))
            return
        exchange.token_at += [now] * _new_tokens(chunk, len(exchange.token_at))
    exchange.fail(RequestEnd.BROKEN, "the answer broke off")


def _new_tokens(chunk: Chunk, known: int) -> int:
    """Number of tokens in this chunk: by its token ids or usage, else one."""
    if not chunk.choices:
        return 0
    if chunk.choices[0].token_ids is not None:
        return len(chunk.choices[0].token_ids)
    return chunk.usage.completion_tokens - known if chunk.usage else 1


async def _take_refusal(reply: StreamedReply, exchange: Exchange) -> None:
    said = [str(reply.status)]
    with suppress(EOFError, ValueError):
        said += [line.decode(errors="replace") async for line in reply.lines()]
    exchange.fail(RequestEnd.REFUSED, " ".join(said))


def _answer(index: int, arrival: Arrival, exchange: Exchange, start_at: float, *, cached: int) -> LoadAnswer:
    return LoadAnswer(
        index=index,
        due_s=arrival.at_s,
        sent_s=exchange.sent_at - start_at,
        ended_s=exchange.ended_at - start_at,
        input_tokens=arrival.input_tokens,
        token_at_s=tuple(at - start_at for at in exchange.token_at),
        status=exchange.status,
        detail=exchange.detail,
        output_tokens=arrival.output_tokens,
        cached_tokens=cached,
    )


def headers_of(target: LoadTarget) -> Mapping[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if (login := split_login(target.base_url)[1]) is not None:
        return {**headers, "Authorization": basic(login)}
    return headers | bearer(target.api_key)


def _completions(base_url: str) -> SplitResult:
    """URL of /v1/completions; raises `InputError`."""
    try:
        url = urlsplit(server_root(base_url) + "/v1/completions")
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{without_login(base_url)} is no server's URL; give one like http://127.0.0.1:8000")
    return url


async def _resolved(url: SplitResult) -> str:
    """Address of the server, looked up once: a look-up per request would take a thread each.

    Of several addresses it is the first that takes a connection: `localhost` may name one on which none listens.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.hostname, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(f"there is no host {url.hostname} ({error}); correct the URL") from error
    addresses = [str(address[0]) for *_, address in found]
    for address in addresses if len(addresses) > 1 else []:
        with suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(address, port_of(url))
            writer.close()
            return address
    return addresses[0]


def go_first() -> None:
    """Have each token's time taken as it comes, where the user may: else another process ends its slice before.

    On a core that a server shares, whose engine spins while it waits, that is up to 5 ms.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def agreed() -> float:
    """Say that this process is ready, and read when to start."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    return float(sys.stdin.buffer.readline())


def main(plan_name: str, answers_name: str) -> None:
    """Play the plan in the file of this name, `-` for stdin, and write the answers."""
    apart = plan_name == "-"
    content = sys.stdin.buffer.readline() if apart else Path(plan_name).read_bytes()
    plan = msgspec.json.decode(content, type=LoadPlan)
    if plan.cores:
        os.sched_setaffinity(0, plan.cores)
        go_first()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection per request under way
    start_at = agreed() if apart else None
    answers = asyncio.run(play(plan.trace, plan.target, seed=plan.seed, start_at=start_at))
    raw.write_answers(answers, Path(answers_name))


if __name__ == "__main__":
    main(*sys.argv[1:])
