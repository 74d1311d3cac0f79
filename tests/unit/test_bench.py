"""The comparison's client side: traces, the load generator, statistics, reports."""

import asyncio
import base64
import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
import xml.dom.minidom
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

from conserve.bench import raw, traces
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.attainment import LatencyLimits, attainment
from conserve.bench.compare import Design, sentence
from conserve.bench.deployment import Deployment, SchedulerCounters
from conserve.bench.load import (
    LoadPlan,
    LoadTarget,
    go_first,
    headers_of,
    play,
    play_apart,
    prompt_ids,
    request_body,
)
from conserve.bench.measure import Block, compare, lateness
from conserve.bench.names import MECHANISMS, regime_of
from conserve.bench.offline import like_papers, rows
from conserve.bench.pages import report, svg
from conserve.bench.pages.figures import colours
from conserve.bench.traces import Arrival, Trace
from conserve.cli.bench_flags import lengths
from conserve.cli.bench_names import rows_leave, which
from conserve.cli.bench_report import facts
from conserve.engine.policy.preemption import LEAVE_RULES
from conserve.errors import ConserveError, EndpointUnusable, InputError, SettingsError
from conserve.names import OFF
from tests import server_reports, virtual_time
from tests.commands import HANGS_S
from tests.conftest import WriteInput

AZURE_CODE = "azure_code_2023_10min_bursty.parquet"

# Traces


def test_a_bundled_trace_is_found_by_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert traces.find_trace(AZURE_CODE) == traces.find_trace(AZURE_CODE.removesuffix(".parquet"))
    assert traces.find_trace(AZURE_CODE).parent == traces.BUNDLED
    (tmp_path / AZURE_CODE).touch()
    assert traces.find_trace(AZURE_CODE) == Path(AZURE_CODE)
    with pytest.raises(InputError, match="azure_conv_2023_10min"):
        traces.find_trace("nothing.parquet")


def test_the_bursty_trace_is_as_its_readme_says() -> None:
    trace = traces.read(traces.find_trace(AZURE_CODE))
    per_minute = np.bincount([int(arrival.at_s // 60) for arrival in trace], minlength=10)
    assert per_minute.tolist() == [0, 531, 187, 130, 15, 42, 38, 476, 421, 63]
    assert 556 < trace.duration_s < 600


GOOD: dict[str, list[Any]] = {"arrival_s": [0.0, 1.0], "input_tokens": [1, 2], "output_tokens": [3, 4]}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"arrival_s": [0.0, 1.0]}, "lacks input_tokens, output_tokens"),
        ({name: [] for name in GOOD}, "no request|cannot be read"),
        ({**GOOD, "arrival_s": [0.0, -1.0]}, "negative times"),
        ({**GOOD, "arrival_s": [0.0, float("nan")]}, "missing or negative"),
        ({**GOOD, "arrival_s": [0.0, None]}, "missing or negative"),
        ({**GOOD, "arrival_s": [1.7e12, 1.7e12 + 900]}, "divide milliseconds by 1000"),
        ({**GOOD, "arrival_s": ["soon", "later"]}, "cannot be read"),
        ({**GOOD, "input_tokens": [0, 1]}, "input_tokens below 1"),
        ({**GOOD, "output_tokens": [1, None]}, "output_tokens below 1"),
    ],
)
def test_a_bad_trace_is_refused_in_one_sentence(
    write_input: WriteInput, columns: dict[str, list[Any]], says: str
) -> None:
    with pytest.raises(InputError, match=says) as error:
        traces.read(write_input(**columns))
    assert "\n" not in str(error.value)


def test_only_traces_with_times_are_offered() -> None:
    with pytest.raises(InputError) as refused:
        traces.find_trace("azure_cod")
    offered = str(refused.value).rpartition(": ")[2].split(", ")
    assert offered
    for name in offered:
        assert traces.read(traces.find_trace(name)).arrivals


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no trace"):
        traces.read(tmp_path / "missing.parquet")
    (tmp_path / "text.parquet").write_text("not Parquet")
    with pytest.raises(InputError, match="cannot be read"):
        traces.read(tmp_path / "text.parquet")


def test_times_on_ticks_are_spread_until_the_next_tick(write_input: WriteInput) -> None:
    ticks = [3.0 * (n // 5) for n in range(50)]
    lengths = list(range(1, 51))
    path = write_input(arrival_s=ticks, input_tokens=lengths, output_tokens=lengths)
    trace = traces.read(path, seed=1)
    assert [arrival.input_tokens for arrival in trace] == lengths
    assert [arrival.at_s // 3 * 3 for arrival in trace] == ticks
    assert len({arrival.at_s for arrival in trace}) == 50
    assert traces.read(path, seed=1) == trace != traces.read(path, seed=2)


def test_times_of_a_calendar_count_from_the_first(write_input: WriteInput) -> None:
    """From 1970 on, all of a recording would fall into the last moment of a block."""
    tokens = {"input_tokens": [9] * 3, "output_tokens": [2] * 3}
    trace = traces.read(write_input(arrival_s=[1.76e9 + 30, 1.76e9, 1.76e9 + 60], **tokens))
    assert [one.at_s for one in trace] == [0.0, 30.0, 60.0]
    assert trace.duration_s == 90.0
    for kept in ([3600.0, 3601.0, 3602.0], [100_000.0, 150_000.0, 200_000.0]):
        assert [one.at_s for one in traces.read(write_input(arrival_s=kept, **tokens))] == kept


@pytest.mark.parametrize("cv", [0, 0.5, 1, 2, 4])
def test_short_blocks_have_as_many_arrivals_as_the_rate_says_at_any_of_their_times(cv: float) -> None:
    """Blocks that began with an arrival would have twice as many at a CV of 4, and most of these at once."""
    at_s = np.concatenate(
        [[one.at_s for one in found] for seed in range(4000) if (found := drawn(0.5, cv, 10.0, seed))]
    )
    assert len(at_s) / 4000 == pytest.approx(5.0, rel=0.1)
    assert sum(at_s < 1.0) / 4000 == pytest.approx(0.5, rel=0.25)
    assert sum(at_s >= 9.0) / 4000 == pytest.approx(0.5, rel=0.25)


def drawn(rate: float, cv: float, block_s: float, seed: int) -> Sequence[traces.Arrival]:
    """Arrivals of a block, which may have none."""
    try:
        return traces.gamma(rate, cv, block_s, 10, 5, seed).arrivals
    except InputError:
        return ()


def test_gamma_arrivals_have_the_rate_and_the_burstiness() -> None:
    for cv in (0.0, 1.0, 4.0):
        trace = traces.gamma(20, cv, 2000, 10, 5, seed=3)
        gaps_s = np.diff([arrival.at_s for arrival in trace])
        assert trace.rate == pytest.approx(20, rel=0.1)
        assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(cv, abs=0.05 + cv / 8)
    assert traces.gamma(20, 2, 50, 10, 5, seed=3) == traces.gamma(20, 2, 50, 10, 5, seed=3)


def test_nothing_arrives_in_the_off_phases() -> None:
    trace = traces.on_off(20, 10, 30, 400, 10, 5, seed=0)
    assert all(arrival.at_s % 40 < 10 for arrival in trace)
    assert len(trace) == pytest.approx(20 * 100, rel=0.15)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: traces.gamma(0, 1, 10, 1, 1, 0),
        lambda: traces.gamma(1, -1, 10, 1, 1, 0),
        lambda: traces.gamma(1, float("nan"), 10, 1, 1, 0),
        lambda: traces.gamma(1, 1, 10, 0, 1, 0),
        lambda: traces.gamma(0.001, 0, 1, 1, 1, 0),
        lambda: traces.on_off(1, 0, 10, 10, 1, 1, 0),
        lambda: traces.on_off(1, 10, -1, 10, 1, 1, 0),
        lambda: even(3).scaled(0),
        lambda: even(3).at_rate(float("inf")),
        lambda: even(3).cut(100, 1),
        lambda: even(3).cut(-1, 2),
        lambda: even(3).shortened(input_factor=-1),
        lambda: even(3).shortened(max_input=0),
    ],
)
def test_senseless_numbers_are_refused(wrong: Callable[[], Trace]) -> None:
    with pytest.raises(InputError):
        wrong()


# The load generator

Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
BASIC = f"Basic {base64.b64encode(b'ann:secret').decode()}"


def even(number: int, *, gap_s: float = 0.02, tokens: int = 3) -> Trace:
    arrivals = tuple(Arrival(n * gap_s, 5, tokens) for n in range(number))
    return Trace(name="even", duration_s=number * gap_s, arrivals=arrivals)


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(**more: Any) -> bytes:
    return event(choices=[{"text": " a", **more}])


async def send(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    for piece in pieces:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()


async def serve(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the one request of a connection as the handler does."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length
        await handler(json.loads(await reader.readexactly(int(length[1]))), writer)
    except (ConnectionError, EOFError, asyncio.CancelledError):
        pass
    finally:
        writer.transport.abort()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server that answers every request as the handler does, on a port of its own."""
    under_way: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        under_way.add(task)
        await serve(handler, reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def load(handler: Handler, trace: Trace, *, late_s: float = 0.0, timeout_s: float = 30.0) -> list[LoadAnswer]:
    """Play a trace in virtual time, over socket pairs: on these what one end sends is at the other at once."""
    under_way: list[asyncio.Task[None]] = []
    open_connection = asyncio.open_connection

    async def connect(*_: Any, limit: int, **__: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        under_way.append(asyncio.create_task(serve(handler, *await open_connection(sock=theirs))))
        return await open_connection(sock=ours, limit=limit)

    async def go() -> list[LoadAnswer]:
        clock = asyncio.get_running_loop().time
        target = LoadTarget(base_url="http://127.0.0.1:1", model="m", timeout_s=timeout_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "open_connection", connect)
            patch.setattr("conserve.bench.load.time", SimpleNamespace(monotonic=clock))
            answers = await play(trace, target, seed=0, start_at=clock() - late_s if late_s else None)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way)
        await asyncio.sleep(0)
        return answers

    return virtual_time.run(go())


async def three_tokens(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    for _ in range(3):
        await asyncio.sleep(0.05)
        await send(writer, token())
    await send(writer, DONE, b"")


def test_tokens_are_timed_from_when_the_request_was_due() -> None:
    answers = load(three_tokens, even(5))
    assert [answer.index for answer in answers] == [0, 1, 2, 3, 4]
    for answer in answers:
        assert (answer.status, answer.tokens) == (RequestEnd.OK, 3)
        assert answer.due_s <= answer.sent_s < answer.token_at_s[0] < answer.token_at_s[-1] <= answer.ended_s
        assert answer.ttft_ms == pytest.approx(50, abs=2)
        assert answer.ttft_ms == pytest.approx((answer.token_at_s[0] - answer.due_s) * 1e3)
        assert list(answer.tbt_ms) == pytest.approx([50, 50], abs=2)


def test_answers_tell_what_the_prefix_cache_had_of_their_prompts() -> None:
    trace = even(3)
    first, second, third = trace.arrivals
    assert first.input_tokens > 4
    recorded = (first, second._replace(cached_tokens=4), third._replace(cached_tokens=10_000))
    answers = load(three_tokens, replace(trace, arrivals=recorded, shared_tokens=2))
    assert [answer.cached_tokens for answer in answers] == [2, 4, third.input_tokens - 1]


def test_a_server_that_never_answers_holds_up_no_later_request() -> None:
    came: list[float] = []

    async def never(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        came.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    answers = load(never, even(40), timeout_s=2.0)
    assert [answer.status for answer in answers] == [RequestEnd.TIMEOUT] * 40
    assert len(came) == 40
    assert [at - came[0] for at in came] == pytest.approx([n * 0.02 for n in range(40)], abs=0.002)
    assert all(answer.sent_s == pytest.approx(answer.due_s, abs=0.002) for answer in answers)
    assert all(answer.ended_s - answer.sent_s == pytest.approx(2.0, abs=0.002) for answer in answers)


def test_a_late_generator_says_so_and_its_lateness_counts() -> None:
    answers = load(three_tokens, even(3), late_s=5.0)
    assert [answer.late_ms for answer in answers] == pytest.approx([5000, 4980, 4960], abs=2)
    assert [answer.ttft_ms for answer in answers] == pytest.approx([5050, 5030, 5010], abs=2)
    assert lateness(answers).share == 1.0
    assert lateness(answers).max_ms == pytest.approx(5000, abs=2)


def test_tokens_are_counted_as_the_server_says_and_lines_may_come_in_pieces() -> None:
    async def packed(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        usage = event(choices=[{"text": "abc"}], usage={"completion_tokens": 3})
        await send(writer, b": a comment\n\n", token(token_ids=[7, 8]), usage[:20], usage[20:])
        closing = event(choices=[{"text": "", "finish_reason": "length"}], usage={"completion_tokens": 3})
        await send(writer, closing + event(choices=[], usage={"completion_tokens": 3}) + DONE, b"")

    (answer,) = load(packed, even(1))
    assert (answer.status, answer.tokens) == (RequestEnd.OK, 3)
    assert answer.token_at_s[0] == answer.token_at_s[1] <= answer.token_at_s[2]


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\nslow down")
    await writer.drain()


async def drop(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    return


async def break_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    await send(writer, token())
    await asyncio.sleep(0.1)


async def end_early(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    await send(writer, token(), b"")


async def say_nothing(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    await send(writer, DONE, b"")


async def fail_halfway(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    await send(writer, token(), event(error={"message": "out of memory"}), DONE, b"")


async def babble(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    await send(writer, b"data: {nonsense\n\n", b"")


async def greet(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\r\n\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("handler", "status", "tokens", "detail"),
    [
        (refuse, RequestEnd.REFUSED, 0, "503 slow down"),
        (drop, RequestEnd.BROKEN, 0, ""),
        (break_off, RequestEnd.BROKEN, 1, ""),
        (end_early, RequestEnd.BROKEN, 1, "broke off"),
        (say_nothing, RequestEnd.BROKEN, 0, "no token"),
        (fail_halfway, RequestEnd.REFUSED, 1, "out of memory"),
        (babble, RequestEnd.BROKEN, 0, "DecodeError"),
        (greet, RequestEnd.BROKEN, 0, ""),
    ],
)
def test_a_failed_request_is_recorded_with_what_came(
    handler: Handler, status: RequestEnd, tokens: int, detail: str
) -> None:
    answers = load(handler, even(3))
    assert len(answers) == 3
    for answer in answers:
        assert (answer.status, answer.tokens) == (status, tokens)
        assert detail in answer.detail
        assert answer.ended_s >= answer.sent_s
        assert answer.output_tokens == 3, "as asked"


def test_a_server_that_is_not_there_fails_every_request(port: int) -> None:
    target = LoadTarget(base_url=f"http://127.0.0.1:{port}", model="m")
    answers = asyncio.run(play(even(3), target, seed=0))
    assert [answer.status for answer in answers] == [RequestEnd.BROKEN] * 3


@pytest.mark.parametrize("addresses", [("::1", "127.0.0.1"), ("127.0.0.1", "::1")])
def test_a_name_with_several_addresses_is_asked_where_it_answers(
    addresses: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look_up(*_: Any, **__: Any) -> list[Any]:
        kinds = {"::1": socket.AF_INET6, "127.0.0.1": socket.AF_INET}
        return [(kinds[one], socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    monkeypatch.setattr("conserve.bench.load.CONNECT_S", HANGS_S)

    async def go() -> list[LoadAnswer]:
        async with serving(three_tokens) as base_url:
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
            target = LoadTarget(base_url=base_url.replace("127.0.0.1", "localhost"), model="m")
            return await play(even(3), target, seed=0)

    assert [answer.status for answer in asyncio.run(go())] == [RequestEnd.OK] * 3


def test_a_login_in_the_url_is_sent_and_not_shown() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == BASIC
        return httpx.Response(403)

    async def go() -> None:
        url = "http://ann:secret@host"
        deployment = Deployment(url, api_key="key", transport=httpx.MockTransport(refuse))
        for ask in (deployment.counters, deployment.model):
            with pytest.raises(EndpointUnusable, match="http://host/") as refused:
                await ask()
            assert "secret" not in str(refused.value)
        await deployment.close()

    asyncio.run(go())
    target = LoadTarget(base_url="http://ann:secret@host", model="m", api_key="key")
    assert headers_of(target)["Authorization"] == BASIC
    with pytest.raises(InputError, match=r"^host:1 is no") as refused:
        asyncio.run(play(even(1), LoadTarget(base_url="ann:secret@host:1", model="m"), seed=0))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("base_url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_a_bad_url_is_refused(base_url: str) -> None:
    with pytest.raises(InputError, match="URL"):
        asyncio.run(play(even(1), LoadTarget(base_url=base_url, model="m"), seed=0))


def test_a_request_asks_for_exactly_its_tokens() -> None:
    target = LoadTarget(base_url="http://host", model="m", extra={"priority": 5})
    body = json.loads(request_body(Arrival(0.0, 50, 7), 3, target, seed=1))
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["priority"]) == (7, True, True, 5)
    assert body["prompt"] == prompt_ids(Arrival(9.9, 50, 1), 3, target.vocab_range, seed=1)
    assert len(body["prompt"]) == 50
    assert all(100 <= token_id < 20_000 for token_id in body["prompt"])
    prompts = [prompt_ids(Arrival(0.0, 16, 1), n, (0, 20_000), seed) for n in range(20) for seed in (1, 2)]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 40


def test_a_plan_is_played_in_a_process_of_its_own() -> None:
    async def go() -> list[LoadAnswer]:
        async with serving(three_tokens) as base_url:
            target = LoadTarget(base_url=base_url, model="m", extra={"priority": 0})
            plan = LoadPlan(trace=even(4), target=target, seed=0, cores=(0,))
            return await play_apart(plan)

    answers = asyncio.run(go())
    assert [(answer.status, answer.tokens) for answer in answers] == [(RequestEnd.OK, 3)] * 4
    assert [answer.output_tokens for answer in answers] == [3] * 4
    assert [answer.due_s for answer in answers] == [arrival.at_s for arrival in even(4)]


def test_a_process_says_that_it_is_ready_before_it_is_told_when_to_start() -> None:
    told, came = list[float](), list[float]()

    def begin() -> float:
        told.append(time.monotonic() + 0.2)
        return told[0]

    async def noted(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        came.append(time.monotonic())
        await three_tokens(body, writer)

    async def go() -> list[LoadAnswer]:
        async with serving(noted) as base_url:
            plan = LoadPlan(trace=even(4), target=LoadTarget(base_url=base_url, model="m"), seed=0)
            return await play_apart(plan, begin)

    assert [answer.status for answer in asyncio.run(go())] == [RequestEnd.OK] * 4
    assert len(told) == 1
    assert min(came) >= told[0]


@pytest.mark.parametrize("allowed", [True, False])
def test_the_load_generator_goes_first_where_it_may(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    asked = []

    def set_scheduler(pid: int, policy: int, param: os.sched_param) -> None:
        asked.append((pid, policy, param.sched_priority))
        if not allowed:
            raise PermissionError(errno.EPERM, "not for you")

    monkeypatch.setattr(os, "sched_setscheduler", set_scheduler)
    go_first()
    assert asked == [(0, os.SCHED_RR, 1)]


def test_a_process_that_fails_says_why() -> None:
    plan = LoadPlan(trace=even(1), target=LoadTarget(base_url="nowhere", model="m"), seed=0)
    with pytest.raises(ConserveError, match="nowhere is no server's URL"):
        asyncio.run(play_apart(plan))


def test_the_load_generator_needs_no_engine() -> None:
    code = "import sys, conserve.bench.load, conserve.bench.pages.report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"vllm", "torch", "transformers", "typer", "rich", "duckdb"} & set(done.stdout.split())


# Statistics


def answer(
    ttft_ms: float,
    tbt_ms: float = 10.0,
    *,
    due_s: float = 0.0,
    status: RequestEnd = RequestEnd.OK,
    tokens: int = 4,
) -> LoadAnswer:
    times = due_s + ttft_ms / 1e3 + tbt_ms / 1e3 * np.arange(tokens)
    return LoadAnswer(
        index=0,
        due_s=due_s,
        sent_s=due_s,
        ended_s=due_s + 1,
        input_tokens=9,
        token_at_s=tuple(times.tolist()),
        status=status,
    )


def failed(due_s: float = 0.0) -> LoadAnswer:
    return answer(0, due_s=due_s, status=RequestEnd.REFUSED, tokens=0)


def block(
    policy: str, answers: list[LoadAnswer], *, started_s: float = 0.0, offline_tokens: int = 0, **more: Any
) -> Block:
    counts = {"iterations": 0, "planned": 0, "overruns": 0, **more}
    return Block(
        policy=policy,
        started_s=started_s,
        duration_s=10.0,
        answers=tuple(answers),
        offline_tokens=offline_tokens,
        **counts,
    )


def four_policies(blocks_each: int = 1) -> list[Block]:
    """TTFT 1 to 100 ms alone, 2, 50 and 10 times that with offline work."""
    slower = {"conserve": 2, "online-only": 1, "non-preemptive": 50, "priority": 10}
    offline = {"conserve": 800, "online-only": 0, "non-preemptive": 1000, "priority": 900}
    work = {"conserve": 2000.0, "online-only": 0.0, "non-preemptive": 1600.0, "priority": 2000.0}
    return [
        block(
            policy,
            [answer(float(factor * ms), 10.0 * factor, due_s=ms / 11) for ms in range(1, 101)],
            started_s=10.0 * (4 * n + place),
            offline_tokens=offline[policy],
            offline_work=work[policy],
            planned=100,
            overruns=1,
        )
        for n in range(blocks_each)
        for place, (policy, factor) in enumerate(slower.items())
    ]


def test_policies_are_compared_with_their_references() -> None:
    found = compare(four_policies()).document()
    conserve = found["policies"]["conserve"]
    assert conserve["ttft_ms"] == pytest.approx({"p50": 100, "p90": 180, "p99": 198, "max": 200})
    assert conserve["tbt_ms"] == pytest.approx({"p50": 20, "p90": 20, "p99": 20, "max": 20})
    assert (conserve["offline_tokens_per_s"], conserve["offline_work_per_s"]) == (80, 200)
    assert conserve["online_tokens_per_s"] == 40
    assert (conserve["requests"], conserve["failed"]) == (100, 0)
    assert conserve["overruns"] == {"count": 1, "share": 0.01}
    assert conserve["late"] == {"share": 0.0, "max_ms": 0.0}
    assert list(conserve["attainment"]) == ["1.0", "1.25", "1.5", "2.0"]
    assert conserve["attainment"]["1.0"] == pytest.approx({"ttft": 0.49, "tbt": 0, "attainment": 0})
    assert found["ratios"]["conserve"] == pytest.approx(
        {
            "ttft_p50_to_online_only": 2,
            "ttft_p99_to_online_only": 2,
            "tbt_p50_to_online_only": 2,
            "tbt_p99_to_online_only": 2,
            "offline_tokens_to_non_preemptive": 0.8,
            "offline_work_to_non_preemptive": 1.25,
            "offline_work_to_priority": 1.0,
            "ttft_p99_priority_over_this": 5,
        }
    )
    assert set(found["harm"]) == {"conserve", "non-preemptive", "priority"}
    json.dumps(found)


def test_a_missing_reference_leaves_ratios_open() -> None:
    comparison = compare(four_policies()[:1])
    found = comparison.document()
    assert set(found["ratios"]["conserve"].values()) == {None}
    assert (found["reference"], found["harm"]) == (None, {})
    assert report.attainment_rows(comparison).rows == []
    given = compare(four_policies()[:1], reference=LatencyLimits(151, 20.5)).document()
    assert given["policies"]["conserve"]["attainment"]["1.0"] == {
        "ttft": 0.75,
        "tbt": 1.0,
        "attainment": 0.75,
    }


def test_a_failed_request_is_a_miss_and_counted() -> None:
    answers = [answer(10), answer(10), answer(10), failed()]
    assert attainment(answers, LatencyLimits(100, 100), 1.0) == (0.75, 0.9, 0.75)
    assert attainment([failed()], LatencyLimits(100, 100), 2.0) == (0.0, 0.0, 0.0)
    assert attainment([], LatencyLimits(100, 100), 2.0) == (None, None, None)
    outcome = compare([block("conserve", answers)]).policies["conserve"]
    assert (outcome.requests, outcome.failed, outcome.failures) == (4, 1, {"http_error": 1})


def test_the_line_of_a_block_counts_failed_requests() -> None:
    some, none = block("conserve", [answer(30.0), failed()]), block("conserve", [answer(30.0)])
    assert "round 1/2 conserve: 2 requests, 1 failed, TTFT" in sentence(some, 0, 2)
    assert "round 1/2 conserve: 1 requests, TTFT" in sentence(none, 0, 2)


def test_a_policy_without_an_answer_is_still_reported() -> None:
    comparison = compare([block("online-only", [failed()]), block("conserve", [])])
    found = comparison.document()
    assert found["policies"]["online-only"]["ttft_ms"] is None
    assert found["harm"]["conserve"]["ttft_p99"] is None
    assert len(report.table_rows(comparison).rows) == 2
    assert "nothing to compare" in report.receipts(comparison)[0]


def test_harm_says_what_was_resampled_and_whether_it_is_certain() -> None:
    few, many = compare(four_policies(3)), compare(four_policies(4))
    assert few.harm["conserve"].resampled == "requests"
    assert many.harm["conserve"].resampled == "blocks"
    change = few.harm["conserve"].ttft_p99
    assert change is not None
    assert change.difference_ms == pytest.approx(99)
    assert 80 < change.difference_ci_ms.low <= 99 <= change.difference_ci_ms.high < 120
    assert compare(four_policies(3), seed=0).document() == few.document()
    blocks = [block("online-only", [answer(ms)]) for ms in (10, 20, 30, 40)]
    blocks += [block("conserve", [answer(ms)]) for ms in (10, 20, 30, 40)]
    same = compare(blocks).harm["conserve"].ttft_p99
    assert same is not None
    assert same.difference_ms == 0
    assert same.difference_ci_ms.low < 0 < same.difference_ci_ms.high


def test_spread_keeps_the_blocks_apart() -> None:
    blocks = [block("conserve", [answer(ms)], offline_tokens=int(ms)) for ms in (10.0, 40.0, 20.0)]
    spread = compare(blocks).document()["policies"]["conserve"]["spread"]
    assert spread["ttft_p99_ms"] == pytest.approx({"min": 10, "median": 20, "max": 40})
    assert spread["offline_tokens_per_s"] == pytest.approx({"min": 1, "median": 2, "max": 4})


def test_raw_numbers_survive_the_disk(tmp_path: Path) -> None:
    blocks = [*four_policies(), block("conserve", [failed()], started_s=50.0)]
    raw.write_blocks(blocks, tmp_path / "raw.parquet")
    table = pq.read_table(tmp_path / "raw.parquet")
    assert table.num_rows == 401
    assert table["policy"].to_pylist()[100] == "online-only"
    assert table["block"].to_pylist()[-1] == 4
    assert table["ttft_ms"].to_pylist()[-1] is None
    answers = [replace(one, output_tokens=9, cached_tokens=4) for one in blocks[0].answers]
    raw.write_answers(answers, tmp_path / "answers.parquet")
    for read, written in zip(raw.read_answers(tmp_path / "answers.parquet"), answers, strict=True):
        assert (read.output_tokens, read.cached_tokens) == (9, 4)
        assert read.token_at_s == pytest.approx(written.token_at_s, abs=1e-9)
        assert (read.due_s, read.status, read.ttft_ms) == pytest.approx(
            (written.due_s, written.status, written.ttft_ms)
        )


def test_counts_of_blocks_survive_the_disk(tmp_path: Path) -> None:
    blocks = [
        *four_policies(),
        block("conserve/off", [], iterations_left=2, live_tokens_recomputed=9, tokens_wasted=7.5),
    ]
    raw.write_counts(blocks, tmp_path / "blocks.parquet")
    rows = pq.read_table(tmp_path / "blocks.parquet").to_pylist()
    assert [row["block"] for row in rows] == [0, 1, 2, 3, 4]
    last = {
        "policy": "conserve/off",
        "iterations_left": 2,
        "live_tokens_recomputed": 9,
        "tokens_wasted": 7.5,
    }
    assert rows[-1].items() >= last.items()
    assert (rows[0]["offline_tokens"], rows[0]["iterations_left"]) == (800, 0)


def test_what_leaving_cost_is_pooled_and_shown_next_to_the_worst_case() -> None:
    blocks = four_policies()
    more = {"iterations_left": 3, "tokens_redone": 30, "tokens_wasted": 2.0, "offline_tokens": 200}
    more |= {"tokens_restored": 500, "tokens_recomputed": 7, "live_tokens_recomputed": 5}
    blocks += [block("conserve", [answer(250.0)], **more), block("conserve", [answer(1.0)], **more)]
    comparison = compare(blocks)
    found = comparison.document()["policies"]["conserve"]
    evicted = {"tokens_restored": 1000, "tokens_recomputed": 14}
    costs = {
        "tokens_redone": 60,
        "tokens_wasted": 4.0,
        "wasted_share": 4 / 1200,
        "live_tokens_recomputed": 10,
    }
    assert (found["left"], found["evicted"]) == ({"iterations": 6, **costs}, evicted)
    table = report.table_rows(comparison)
    shown = dict(zip(table.header, table.rows[0], strict=True))
    assert (shown["TTFT max"], shown["iterations left"], shown["wasted"]) == ("250", "6", "0.33%")
    assert (shown["restored"], shown["recomputed"]) == ("1,000", "14")
    assert dict(zip(table.header, table.rows[1], strict=True))["wasted"] == "-"  # nothing offline


# Variants of conserve


VARIANTS = [f"conserve/{name}" for name in (*LEAVE_RULES, OFF)]


def test_policies_are_named_with_their_preemption() -> None:
    assert which(None) == ["conserve", "online-only", "non-preemptive", "sarathi-p"]
    assert which("all") == [*which(None), "sarathi++", "hygen-star", "hygen"]
    assert which(" online-only, " + ",".join(VARIANTS)) == ["online-only", *VARIANTS]
    assert which("online-only,conserve,conserve/prompt", preemption=False) == [
        "online-only",
        "conserve/off",
        "conserve/prompt",
    ]
    for wrong in ("conserve/", "conserve/now", "priority/off", "fair", "conserve/-", "conserve/-speed"):
        with pytest.raises(SettingsError, match="there is no"):
            which(wrong)


def test_arms_are_a_product_of_mechanisms() -> None:
    assert which(None, "scheduler,order") == [
        "online-only",
        "conserve",
        "conserve/-scheduler",
        "conserve/-order",
        "conserve/-scheduler-order",
    ]
    assert len(which("online-only", ",".join(MECHANISMS))) == 1 + 2 ** len(MECHANISMS)
    assert which("conserve/-order,conserve", "order,order") == ["conserve/-order", "conserve"]
    with pytest.raises(SettingsError, match="there is no mechanism 'speed'"):
        which(None, "speed")


def test_every_arm_changes_one_setting() -> None:
    whole = regime_of("conserve")
    assert (whole.policy, whole.preemption, whole.checkpoint) == ("conserve", None, True)
    found = {name: asdict(regime_of(f"conserve/-{name}")) for name in MECHANISMS}
    changed = {
        name: {key: value for key, value in said.items() if value != asdict(whole)[key]}
        for name, said in found.items()
    }
    assert changed == {
        "scheduler": {"policy": "sarathi++"},
        "preemption": {"preemption": "off"},
        "checkpoints": {"checkpoint": False},
        "order": {"ordered": False},
        "batching": {"full_batches": False},
    }
    assert regime_of("conserve/recompute") == regime_of("conserve/-checkpoints")
    assert regime_of("hygen").preemption == "off"


def test_a_variant_promises_a_harm_instead_of_the_slo() -> None:
    assert which("conserve/harm,conserve/harm-25") == ["conserve/harm", "conserve/harm-25"]
    assert [regime_of(f"conserve/{name}").harm for name in ("harm", "harm-25", "never", "-order")] == [
        0.1,
        0.25,
        None,
        None,
    ]
    assert regime_of("conserve/harm") == replace(regime_of("conserve"), harm=0.1)
    for name in ("harm-", "harm-0", "harm-x", "harm-2.5", "harmful"):
        with pytest.raises(SettingsError, match=f"there is no 'conserve/{name}'"):
            which(f"conserve/{name}")


def test_on_a_server_that_runs_stock_policies_are_the_plug_ins() -> None:
    assert which("conserve,online-only", endpoint=True) == ["conserve", "online-only/planned"]
    assert which(None, endpoint=True) == [
        "conserve",
        "online-only/planned",
        "non-preemptive/planned",
        "priority",
    ]
    with pytest.raises(SettingsError, match="leave --endpoint out"):
        which("sarathi-p", endpoint=True)


def test_a_stock_server_beside_one_that_runs_has_the_turns_of_online_only() -> None:
    assert which("online-only,online-only/planned,non-preemptive", endpoint=True, stock=True) == [
        "online-only",
        "online-only/planned",
        "non-preemptive/planned",
    ]
    assert which(None, endpoint=True, stock=True) == [
        "conserve",
        "online-only",
        "non-preemptive/planned",
        "priority",
    ]
    assert which("all", endpoint=True, stock=True)[:2] == ["conserve", "online-only"]
    with pytest.raises(SettingsError, match="add it to --policies"):
        which("conserve,online-only/planned", endpoint=True, stock=True)
    with pytest.raises(SettingsError, match="--stock-endpoint goes with --endpoint"):
        which("conserve,online-only", stock=True)


def test_the_engine_is_prepared_for_preemption_where_a_policy_needs_it() -> None:
    assert rows_leave(["online-only", "conserve"])
    assert rows_leave(["conserve/off", "conserve/never"])
    assert rows_leave(["conserve/-scheduler"])
    assert not rows_leave(["online-only", "priority", "conserve/off", "conserve/-preemption", "hygen"])


def test_facts_say_what_plain_conserve_was() -> None:
    design = Design(policies=["conserve", "conserve/off"], rounds=1, block_s=1.0, preemption="prompt")
    assert facts(design, None)["preemption"] == "prompt"
    assert facts(design, None)["policies"] == "conserve, conserve/off"


def test_the_report_counts_the_cores_of_the_command_though_it_pins_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    design = Design(policies=["conserve"], rounds=1, block_s=1.0)
    before = facts(design, None)["machine"]
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(77)))
    assert facts(design, None)["machine"] == before


def test_variants_stand_after_their_policy_in_colours_of_their_own() -> None:
    blocks = [block(name, []) for name in ("zz", *VARIANTS, "priority", "conserve", "online-only")]
    names = list(compare(blocks).policies)
    assert names == ["conserve", *sorted(VARIANTS), "online-only", "priority", "zz"]
    shown = colours(names)
    assert len(set(shown.values())) == len(names)
    assert (shown["conserve"], shown["online-only"], shown["priority"]) == ("p0", "p1", "p7")
    assert colours(["conserve/off", "conserve/prompt"]) == {"conserve/off": "p0", "conserve/prompt": "p8"}
    page = report.page(compare(blocks), blocks)
    assert len(drawings(page)) == 1
    for name, colour in shown.items():
        assert f'<span class="key {colour}"></span>{name}<' in page
        assert f"svg .{colour} {{" in page


REPORT: dict[str, Any] = {
    "slo": {"ttft_ms": 9.0, "promises": {"ttft_ms": {"p99": 9.0}}},
    "offline": {"tokens": 7, "rows": 3},
    "iterations": 5,
    "planned": 4,
    "overruns": 1,
    "busy_s": 0.5,
}


class CoServer:
    """Answers `/v1/conserve` and keeps what it was sent."""

    def __init__(self, *, why_off: str | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._preemption = {"policy": "off" if why_off else "all-offline", "why_off": why_off}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.sent.append(json.loads(request.content))
            if not self._preemption["why_off"]:
                self._preemption["policy"] = self.sent[-1]["preemption"]
        return httpx.Response(200, content=server_reports.answer(**REPORT, preemption=self._preemption))


def deployed(server: CoServer) -> Deployment:
    return Deployment("http://host", transport=httpx.MockTransport(server))


def test_every_block_says_policy_and_preemption_and_the_end_restores_them() -> None:
    server = CoServer()

    async def go() -> None:
        deployment = deployed(server)
        before = await deployment.regime()
        for name in ("conserve/just-enough", "online-only", "conserve", "conserve/off", "conserve/harm"):
            await deployment.follow(name, LatencyLimits(5.0, 6.0), preemption="prompt")
        await deployment.restore(before)
        await deployment.close()

    asyncio.run(go())
    assert [(sent["policy"], sent["preemption"]) for sent in server.sent] == [
        ("conserve", "just-enough"),
        ("online-only", "prompt"),
        ("conserve", "prompt"),
        ("conserve", "off"),
        ("conserve", "prompt"),
        ("conserve", "all-offline"),
    ]
    assert server.sent[4]["slo"] == {"harm": 0.1}
    assert server.sent[0]["slo"] == {"ttft_ms": 5.0, "tbt_ms": 6.0}
    promises = {"ttft_ms": {"p99": 9.0}, "tbt_ms": {}}
    assert server.sent[-1]["slo"] == {**server_reports.SLO, "ttft_ms": 9.0, "promises": promises}


def test_several_engines_are_busy_for_their_mean_share() -> None:
    one, two = (server_reports.report(**{**REPORT, "busy_s": busy_s}) for busy_s in (0.5, 1.0))
    assert SchedulerCounters.of(two, engines=2) == SchedulerCounters.of(one)


def test_a_server_of_another_version_is_named_with_what_its_report_lacks() -> None:
    def older(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=server_reports.FRONT_END)

    async def go() -> None:
        deployment = Deployment("http://host", transport=httpx.MockTransport(older))
        with pytest.raises(EndpointUnusable, match=r"`policy`.*; update it, or the server"):
            await deployment.counters()
        await deployment.close()

    asyncio.run(go())


def test_a_variant_that_the_engine_cannot_run_is_refused_and_says_why() -> None:
    async def go() -> None:
        deployment = deployed(CoServer(why_off="the pipeline is parallel"))
        await deployment.follow("conserve", preemption="prompt")
        await deployment.follow("conserve/off", preemption="prompt")
        assert await deployment.why_rows_stay() == "the pipeline is parallel"
        with pytest.raises(EndpointUnusable, match=r"preemption is off \(the pipeline is parallel\)"):
            await deployment.follow("conserve/all-offline")
        await deployment.close()

    asyncio.run(go())


def test_arms_and_hygens_terms_reach_the_server() -> None:
    server = CoServer()

    async def go() -> None:
        deployment = deployed(server)
        await deployment.follow("conserve/-checkpoints-batching", preemption="prompt")
        deployment.terms["hygen"] = {"budget_ms": 80.0}
        await deployment.follow("hygen", preemption="prompt")
        await deployment.follow("conserve/-scheduler", preemption="prompt")
        await deployment.close()

    asyncio.run(go())
    assert server.sent == [
        {"policy": "conserve", "preemption": "prompt", "checkpoint": "off", "batching": "off"},
        {
            "policy": "hygen",
            "preemption": "off",
            "checkpoint": "off",
            "batching": "on",
            "hygen": {"budget_ms": 80.0},
        },
        {
            "policy": "sarathi++",
            "preemption": "prompt",
            "checkpoint": "on",
            "batching": "on",
            "hygen": {},
        },
    ]


def test_a_block_counts_what_its_time_added() -> None:
    first = SchedulerCounters.of(server_reports.report(busy_s=0.5, preemption={"iterations_left": 3}))
    last = SchedulerCounters.of(server_reports.report(busy_s=2.0, preemption={"iterations_left": 10}))
    added = last.since(first)
    assert added["iterations_left"] == 7
    assert added["busy_s"] == 1.5
    assert added["tokens_redone"] == added["offline_tokens"] == 0
    assert Block(policy="conserve", started_s=0.0, duration_s=1.0, answers=(), **added).iterations_left == 7


# Reports


def drawings(page: str) -> list[str]:
    found = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for drawing in found:
        xml.dom.minidom.parseString(drawing)
    return found


def test_the_page_holds_everything_it_shows() -> None:
    blocks = four_policies(2)
    sampled = block("conserve", [failed(1.0)], started_s=80.0, offline_tokens=9)
    blocks.append(sampled)
    page = report.page(
        compare(blocks), blocks, slo=LatencyLimits(1500, 100), facts={"command": "conserve bench <x>"}
    )
    assert len(drawings(page)) == 1
    assert not re.findall(r"(?:src|href|url)\s*[=(]", page)
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    for words in ("Online requests per second", "TTFT of each request (ms), limit 1,500 ms", "time (s)"):
        assert words in page
    assert page.count('class="cross p0"') == 1
    assert page.count('class="slo"') == 2
    assert "conserve bench &lt;x&gt;" in page
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("answers", [[], [failed()], [answer(5, tokens=1)], [answer(0.0)], [answer(1e7)]])
@pytest.mark.parametrize("series", [(), ((0.0, 5),), ((0.0, 0), (0.1, 5)), ((0.0, 0), (5.0, 10), (10.0, 20))])
def test_a_page_of_very_little_can_be_drawn(
    answers: list[LoadAnswer], series: tuple[tuple[float, int], ...]
) -> None:
    blocks = [block("my <policy>", answers, offline_series=series)]
    page = report.page(compare(blocks), blocks)
    assert "nan" not in "".join(drawings(page))
    assert "<policy>" not in page


def test_table_rows_fill_their_header() -> None:
    table = report.table_rows(compare(four_policies()))
    assert {len(row) for row in table.rows} == {len(table.header)}
    assert [row[0] for row in table.rows] == ["conserve", "online-only", "non-preemptive", "priority"]
    assert table.rows[1][-1] == "1.00%"


def test_receipts_and_warnings_are_plain_sentences() -> None:
    late = LoadAnswer(
        index=0, due_s=0.0, sent_s=0.02, ended_s=1.0, input_tokens=1, token_at_s=(0.5,), status=RequestEnd.OK
    )
    comparison = compare([*four_policies(), block("priority", [failed(), late])])
    assert report.receipts(comparison)[0].startswith(
        "With offline work under conserve, online P99 TTFT went from 99 to 198 ms (+99 ms ["
    )
    assert report.warnings(comparison) == [
        "priority: 1 of 102 requests failed (1 http_error).",
        "The load generator itself sent requests over 5 ms late (priority 0.98%), 20 ms at most; "
        "their TTFT includes that.",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234.5, "1,234"), (99.96, "100"), (3.14159, "3.14"), (0.05, "0.05"), (-7.25, "-7.25")],
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert svg.figure(value) == shown


@pytest.mark.parametrize("text", ["", "128", "128,", "0,8", "0.5,8", "inf,8", "-1,8", "1,2,3"])
def test_lengths_are_whole_numbers_of_tokens(text: str) -> None:
    with pytest.raises(SettingsError, match="--offline takes two whole numbers"):
        lengths(text)


def test_offline_rows_are_as_long_as_said() -> None:
    assert lengths("128,384") == (128, 384)
    lines = [json.loads(line) for line in rows([(5, 3), (7, 2)], vocab_range=(100, 20_000), seed=1)]
    assert [(len(one["body"]["prompt"]), one["body"]["max_tokens"]) for one in lines] == [(5, 3), (7, 2)]
    assert [one["custom_id"] for one in lines] == ["row-0", "row-1"]
    papers = list(like_papers(200, factor=0.125, most=1024, seed=1))
    assert all(prompt >= 1 <= answer and prompt + answer <= 1024 for prompt, answer in papers)
    assert len(set(papers)) > 100
