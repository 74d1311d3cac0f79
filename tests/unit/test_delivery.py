"""Times at which parts of an answer leave the API server, beside vLLM's own times of their tokens."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.vllm.server import delivery as deliveries
from conserve.engine.vllm.server.delivery import DELIVERY, Delivery, delivering, reporter_of
from tests import virtual_time

REQUEST = "cmpl-1"


class Clock:
    """The time that the module under test reads, in seconds; both clocks agree."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        stand_in = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(deliveries, "time", stand_in)


class FrontEnd:
    """Front end of vLLM as far as it is read, with all that its engines are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Any = None) -> None:
        self.stats = SimpleNamespace(arrival_time=100.0, first_token_ts=0.0, last_token_ts=0.0)
        self.output_processor = SimpleNamespace(
            external_req_ids={REQUEST: ["inner"]}, request_states={"inner": SimpleNamespace(stats=self.stats)}
        )
        self.told: list[Any] = []

        async def ask_engines(client: Any, method: str, server: str, delays: Any) -> list[Any]:
            assert (client, method) == (self, "conserve_delays")
            assert server
            self.told.append(delays)
            if isinstance(answer, Exception):
                raise answer
            return [answer]

        monkeypatch.setattr(deliveries, "ask_engines", ask_engines)

    def token(self, at: float) -> None:
        self.stats.first_token_ts = self.stats.first_token_ts or at
        self.stats.last_token_ts = at


class Noted:
    """Latencies in ms as they are noted, on both clocks."""

    def __init__(self, llm: Any) -> None:
        self.ttft: list[tuple[float, float]] = []
        self.tbt: list[tuple[float, float]] = []
        delays = reporter_of(llm).of_class("default").latencies
        for name, into in (("ttft_ms", self.ttft), ("tbt_ms", self.tbt)):
            delays[name].note = lambda *pair, into=into: into.append(pair)  # type: ignore[method-assign, misc]


PART = {"type": "http.response.body", "body": b"data", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}
START = {"type": "http.response.start", "status": 200}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def passed_on(message: Any) -> None: ...


def test_each_part_with_new_tokens_is_a_latency_on_both_clocks(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer() -> None:
        send = one.watching(passed_on)
        await send(START)
        llm.token(100.050)
        clock.now = 100.060
        await send(PART)  # the role
        await send(PART)  # the first token
        for engine_at, sent_at in ((100.070, 100.075), (100.090, 100.110)):
            llm.token(engine_at)
            clock.now = sent_at
            await send(PART)
        await send(PART)  # the end of the answer
        await send(END)

    llm: Any = FrontEnd(monkeypatch)
    noted = Noted(llm)
    clock.now = 99.990  # the body takes 10 ms
    one = Delivery()
    one.comes_from(llm, REQUEST, 1)
    clock.now = 100.0
    asyncio.run(answer())
    assert noted.ttft == [(pytest.approx(50), pytest.approx(70))]
    assert noted.tbt == [
        (pytest.approx(20), pytest.approx(15)),
        (pytest.approx(20), pytest.approx(35)),
    ]


@pytest.mark.parametrize("why", ["whole", "two parts", "two samples", "over", "no statistics", "no token"])
def test_what_has_no_times_of_its_own_is_not_counted(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def answer() -> None:
        send = one.watching(passed_on)
        for message in (START, PART, PART, END) if why != "whole" else (START, END):
            await send(message)

    llm: Any = FrontEnd(monkeypatch)
    noted = Noted(llm)
    if why != "no token":
        llm.token(100.05)
    if why == "over":
        llm.output_processor.request_states.clear()
    if why == "no statistics":
        llm.output_processor.request_states["inner"].stats = None
    one = Delivery()
    one.comes_from(llm, REQUEST, 2 if why == "two samples" else 1)
    if why == "two parts":
        one.comes_from(llm, "cmpl-2", 1)
    asyncio.run(answer())
    assert (noted.ttft, noted.tbt) == ([], [])


@pytest.mark.parametrize(("priority", "counted"), [(0, True), (OFFLINE_PRIORITY, False)])
def test_the_guards_delivery_is_told_of_live_requests_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, priority: int, counted: bool
) -> None:
    generate = delivering(lambda *given, **named: (given, named))
    llm: Any = FrontEnd(monkeypatch)
    one = Delivery()
    before = DELIVERY.set(one)
    try:
        given, named = generate(llm, "prompt", SimpleNamespace(n=1), REQUEST, priority=priority)
    finally:
        DELIVERY.reset(before)
    assert (given[1:], named) == (("prompt", SimpleNamespace(n=1), REQUEST), {"priority": priority})
    noted = Noted(llm)
    llm.token(100.05)
    asyncio.run(one.watching(passed_on)(PART))
    assert bool(noted.ttft) is counted
    assert generate(llm, "prompt", SimpleNamespace(n=1), REQUEST)[1] == {}, "without a guard nothing is noted"


NAMES = {"default": {"ttft_ms": ["p99"], "tbt_ms": []}}


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def loops_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the module under test read the event loop's time."""
    monkeypatch.setattr(deliveries, "time", SimpleNamespace(monotonic=now))


@pytest.mark.parametrize(
    ("answer", "times"), [(NAMES, 2), (None, 1), (RuntimeError("the engine is gone"), 2)]
)
@pytest.mark.usefixtures("loops_clock")
def test_engines_are_told_once_a_second_of_what_they_promise(
    monkeypatch: pytest.MonkeyPatch, answer: Any, times: int
) -> None:
    async def report() -> None:
        for wait_s in (0.0, 0.5, 1.0):
            await asyncio.sleep(wait_s)
            reporter.noted(now())
        await asyncio.sleep(0.1)

    llm: Any = FrontEnd(monkeypatch, answer)
    reporter = reporter_of(llm)
    assert reporter_of(llm) is reporter
    for _ in range(50):
        reporter.of_class("default").latencies["ttft_ms"].note(10.0, 30.0)
    virtual_time.run(report())
    assert len(llm.told) == times
    assert llm.told[0] == {"default": {"ttft_ms": {}, "tbt_ms": {}}}, "the names are the engine's to say"
    if isinstance(answer, dict):
        assert llm.told[1] == {"default": {"ttft_ms": {"p99": pytest.approx(20, rel=0.05)}, "tbt_ms": {}}}


@pytest.mark.usefixtures("loops_clock")
def test_engines_are_told_until_a_delay_has_faded_though_no_answer_is_streamed_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a server whose answers come whole from now on would keep promises earlier for ever."""

    async def report() -> None:
        reporter.noted(now())
        await asyncio.sleep(1.1)
        reporter.noted(now())  # the engine has said what it promises
        await asyncio.sleep(3600)
        assert reporter._reporting is not None
        assert reporter._reporting.done()

    llm: Any = FrontEnd(monkeypatch, NAMES)
    reporter = reporter_of(llm)
    for _ in range(50):
        reporter.of_class("default").latencies["ttft_ms"].note(10.0, 30.0)
    virtual_time.run(report())
    told = [one["default"]["ttft_ms"].get("p99") for one in llm.told]
    assert told[1] == pytest.approx(20, rel=0.05)
    assert told[-1] == 0.0
    assert 60 < len(told) < 600


def test_each_class_has_a_way_of_its_own(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer() -> None:
        llm.token(100.050)
        clock.now = 100.060
        await one.watching(passed_on)(PART)

    generate = delivering(lambda *given, **named: None)
    for classes, live_class in ({"chat": object()}, "chat"), ({}, "default"):
        clock.now = 100.0
        llm: Any = FrontEnd(monkeypatch)
        llm.conserve_classes = classes
        one = Delivery()
        before = DELIVERY.set(one)
        params = SimpleNamespace(n=1, extra_args={"conserve_class": "chat"})
        generate(llm, "prompt", params, REQUEST)
        DELIVERY.reset(before)
        asyncio.run(answer())
        assert list(reporter_of(llm).delays) == [live_class], (
            "a name means nothing where there are no classes"
        )
