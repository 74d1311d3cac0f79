"""The progress of a run: what is said, and when. The clock is the test's."""

import asyncio
import io
import json
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.api import runs
from conserve.api.display import SilentDisplay
from conserve.api.live_endpoint import live_server
from conserve.api.progress import COUNT_S, LINE_S, Progress, ProgressNow, first_step, rounded
from conserve.api.running import ProfileFlags, make_endpoint
from conserve.cli.progress import RunProgress
from conserve.config import load
from conserve.endpoints import http
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.endpoints.protocol import Call, Completion, InFlight, Url
from conserve.endpoints.stream import AnswerPieces
from conserve.engine.vllm.launching import phases
from conserve.engine.vllm.requests.token_watch import in_flight
from conserve.errors import StoreUnreachable
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.time_left import FEW, WINDOW_S, QueueProgress, Rate, left_s, tokens_left
from conserve.store.database.store import Store


class Run:
    """A harvester on the fake endpoint that nothing moves but the test, and its display."""

    def __init__(self, store: Store, *, rows: int, said: str | None = None) -> None:
        self.now = 1000.0
        self.rows = rows
        self.endpoint = FakeEndpoint()
        self.harvester = Harvester(store, self.endpoint)
        self.tally = self.harvester.tally
        self.store_is_gone = False
        self.counted_in: list[threading.Thread] = []
        self.display = RunProgress(
            self.harvester,
            self.rows_left,
            io.StringIO(),
            said=said,
            clock=lambda: self.now,
        )

    def line(self, *, after_s: float = 0.0) -> str | None:
        self.now += after_s
        return asyncio.run(self.display.line())

    def standing(self, *, after_s: float = 0.0) -> ProgressNow:
        self.now += after_s
        return asyncio.run(self.display.standing())

    def rows_left(self) -> int:
        if self.store_is_gone:
            raise StoreUnreachable("the database is starting up")
        self.counted_in.append(threading.current_thread())
        return self.rows - self.tally.done

    def compute(self, rows: int, tokens: int, most: int | None = None) -> None:
        """The endpoint is ready and has computed so much of so many rows in flight."""
        self.endpoint.doing = None
        self.tally.in_flight, self.endpoint.in_flight = rows, InFlight(tokens, most)

    def finish(self, rows: int, tokens: int) -> None:
        """Finish so many rows with as many tokens each; their results are durable."""
        for _ in range(rows):
            answer = Completion(
                choices=(),
                prompt_tokens=tokens // 2,
                completion_tokens=tokens // 2,
                cached_tokens=0,
                model="",
            )
            self.tally.answer(answer)
        self.tally.succeeded += rows


@pytest.fixture
def run(store: Store) -> Run:
    return Run(store, rows=200)


def test_a_step_is_said_when_it_begins_and_every_half_minute(run: Run) -> None:
    assert run.line() == "starting the fake endpoint (0 s)"
    assert run.line(after_s=LINE_S - 1) is None
    assert run.line(after_s=1) == "starting the fake endpoint (30 s)"
    run.endpoint.doing = "loading the weights"
    assert run.line(after_s=1) == "loading the weights (31 s)"
    assert run.line(after_s=1) is None


def test_a_step_that_was_said_is_not_said_again_at_once(store: Store) -> None:
    run = Run(store, rows=200, said="starting the fake endpoint")
    assert run.line() is None
    assert run.line(after_s=LINE_S) == "starting the fake endpoint (30 s)"


@pytest.mark.parametrize("address", [None, "fake:?tokens=4", "http://127.0.0.1:9/v1", "http://127.0.0.1:9"])
def test_the_first_step_is_called_as_the_endpoint_calls_it(address: str | None) -> None:
    settings = load({"endpoint": address})
    endpoint: Any = make_endpoint(settings, [], ProfileFlags(), say=print)
    assert first_step(settings) == endpoint.doing
    asyncio.run(endpoint.close())


@pytest.mark.parametrize("model", [None, "smollm2-demo"])
def test_a_server_is_asked_for_the_model_that_was_given(
    monkeypatch: pytest.MonkeyPatch, model: str | None
) -> None:
    def served(_: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, json={"data": [{"id": "first"}, {"id": "smollm2-demo", "parent": "first"}]}
        )

    def client(*_: Any, **__: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(served), base_url="http://x")

    async def asked(endpoint: Any) -> str:
        await endpoint.start()
        await endpoint.close()
        return str(endpoint.model)

    monkeypatch.setattr(http, "open_client", client)
    settings = load({"model": model, "endpoint": "http://127.0.0.1:9"})
    run: Any = make_endpoint(settings, [], ProfileFlags(), most_rows=3, say=print)
    for endpoint in (run, live_server("http://127.0.0.1:9", settings=settings, window=None)):
        assert asyncio.run(asked(endpoint)) == (model or "first")
    assert run.capacity == 3


def test_tokens_show_before_any_row_is_answered(run: Run) -> None:
    run.compute(rows=0, tokens=0)
    assert run.line(after_s=10) is None  # nothing has been sent yet
    run.compute(rows=128, tokens=0, most=128 * 150)
    assert run.line() == "0/200 rows, first wave of 128: 0 tokens so far"
    run.compute(rows=128, tokens=39, most=128 * 150)
    assert run.line(after_s=30) == "0/200 rows, first wave of 128: 39 tokens so far", (
        "no rate of one iteration"
    )
    for tokens in (700, 1400, 2100):
        run.compute(rows=128, tokens=tokens, most=128 * 150)
        assert run.line(after_s=7) is None
    run.compute(rows=128, tokens=6000, most=128 * 150)
    assert run.line(after_s=9) == (
        "0/200 rows, first wave of 128: 6,000 tokens so far, 100 tokens/s, about 4 min left"
    )


def test_answered_rows_make_the_forecast_firm(run: Run) -> None:
    run.compute(rows=128, tokens=0, most=128 * 150)
    run.line()
    for tokens in range(FEW):
        run.compute(rows=128, tokens=tokens, most=128 * 150)
        run.line()
    run.finish(50, 100)
    run.compute(rows=128, tokens=1000, most=128 * 150)
    assert run.line(after_s=30) == "50/200 rows, 200 tokens/s, 128 running, about 2 min left"


def test_trouble_is_said_when_it_begins(run: Run) -> None:
    run.compute(rows=1, tokens=0)
    run.line()
    run.tally.failed, run.tally.waiting_for = 3, "the endpoint is busy"
    assert run.line(after_s=1) == (
        "3/200 rows, first wave of 1: 0 tokens so far, 3 failed (the endpoint is busy)"
    )


def test_rows_left_are_counted_once_a_second_in_another_thread(run: Run) -> None:
    run.compute(rows=8, tokens=0)
    stands = []
    for _ in range(9):
        stands.append(run.standing(after_s=COUNT_S / 4))
        run.finish(10, 100)
    assert [(now.done, now.total) for now in stands] == [(done, 200) for done in range(0, 90, 10)]
    assert len(run.counted_in) == 3
    assert threading.current_thread() not in run.counted_in


def test_rows_left_are_none_until_the_count_knows_of_later_ones(run: Run) -> None:
    run.rows = 3
    run.compute(rows=8, tokens=0)
    assert run.standing().total == 3
    run.finish(5, 100)
    assert run.standing() == ProgressNow(None, 5, 5, "8 running")
    run.rows = 9
    assert run.standing(after_s=COUNT_S).total == 9


def test_the_last_count_stands_while_the_store_is_out_of_reach(run: Run) -> None:
    run.compute(rows=8, tokens=0)
    assert run.standing().total == 200
    run.store_is_gone = True
    run.finish(5, 100)
    assert run.standing(after_s=COUNT_S)[:3] == (None, 5, 200)
    assert run.line(after_s=LINE_S) is not None
    run.store_is_gone, run.rows = False, 300
    assert run.standing(after_s=COUNT_S).total == 300


def test_a_display_goes_on_after_the_store_was_out_of_reach(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SHOW_S", 0)
    run.compute(rows=8, tokens=0)
    shown: list[int] = []

    class Shown(SilentDisplay):
        async def show(self, progress: Progress) -> None:
            run.store_is_gone = not run.store_is_gone
            run.now += COUNT_S
            shown.append((await progress.standing()).total)
            if len(shown) == 2:
                raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(runs.show(Shown(), run.display))
    assert shown == [0, 200]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "5 s"),
        (22, "20 s"),
        (54, "55 s"),
        (56, "1 min"),
        (200, "3 min"),
        (3570, "1 h"),
        (7800, "2 h 10 min"),
    ],
)
def test_a_forecast_claims_no_more_than_it_knows(seconds: float, words: str) -> None:
    assert rounded(seconds) == words


# The forecast.

LENGTH = 120


@given(st.integers(0, 500), st.integers(0, 100), st.integers(0, 500), st.floats(0, 1))
def test_the_forecast_is_exact_where_all_answers_have_full_length(
    done: int, flying: int, waiting: int, share: float
) -> None:
    computed = int(flying * LENGTH * share)
    seen = QueueProgress(
        rows_done=done,
        rows_in_flight=flying,
        rows_waiting=waiting,
        tokens_done=done * LENGTH,
        tokens_in_flight=computed,
        most_in_flight=flying * LENGTH,
    )
    expected = (flying + waiting) * LENGTH - computed
    if done or flying:
        assert tokens_left(seen) == pytest.approx(expected)
        assert left_s(seen, 10.0) == pytest.approx(expected / 10)
    else:
        assert tokens_left(seen) is None
    assert left_s(seen, 0.0) is None


@given(st.integers(1, 500), st.integers(0, 100), st.integers(0, 500))
def test_rows_alone_forecast_where_no_tokens_are_seen(done: int, flying: int, waiting: int) -> None:
    seen = QueueProgress(
        rows_done=done,
        rows_in_flight=flying,
        rows_waiting=waiting,
        tokens_done=done * LENGTH,
        tokens_in_flight=0,
    )
    assert tokens_left(seen) == pytest.approx((flying + waiting) * LENGTH)


def test_rows_that_go_on_and_on_are_expected_to_go_on() -> None:
    """Two of 35 rows have no limit; what the others took says nothing about them."""
    seen = QueueProgress(
        rows_done=33,
        rows_in_flight=2,
        rows_waiting=0,
        tokens_done=33 * 20,
        tokens_in_flight=2600,
        most_in_flight=2 * 8192,
    )
    assert tokens_left(seen) == 2600


def test_the_first_answers_do_not_pass_for_the_mean() -> None:
    """One short answer of 100 rows in flight: the others are not expected to end at its length."""
    seen = QueueProgress(
        rows_done=1,
        rows_in_flight=99,
        rows_waiting=0,
        tokens_done=10,
        tokens_in_flight=99 * 10,
        most_in_flight=99 * LENGTH,
    )
    assert tokens_left(seen) == 99 * (LENGTH - 10)


def test_nothing_is_forecast_before_a_row_is_in_flight_or_answered() -> None:
    idle = {"rows_in_flight": 0, "tokens_done": 0, "tokens_in_flight": 0}
    for most in (None, 0, 100):
        progress = QueueProgress(rows_done=0, rows_waiting=5, most_in_flight=most, **idle)
        assert tokens_left(progress) is None
        assert left_s(progress, 10.0) is None


def test_the_rate_is_that_of_the_last_minute() -> None:
    rate = Rate()
    assert rate.look(0.0, 0) == 0.0
    assert rate.look(10.0, 1000) == 100.0
    for second in range(11, 200):
        last = rate.look(float(second), 1000)
    assert last == 0.0
    assert rate.look(200.0, 1000 + int(WINDOW_S)) == pytest.approx(1.0, rel=0.05)


def test_tokens_of_withdrawn_rows_make_no_negative_rate() -> None:
    rate = Rate()
    rate.look(0.0, 0)
    rate.look(1.0, 500)
    rate.look(1.0 + WINDOW_S, 500)  # the rate is since the look at 1.0 from here on
    assert rate.look(2.0 + WINDOW_S, 100) == 0.0
    assert rate.look(3.0 + WINDOW_S, 200) == 100.0


# Tokens in flight.


def test_the_fake_counts_prompts_once_they_are_computed_and_forgets_rows_that_end() -> None:
    async def go() -> list[InFlight]:
        endpoint, seen = FakeEndpoint(Script(token_ms=1, tokens=4)), []
        call = Call(key="a", url=Url.COMPLETIONS, body={"prompt": "one two three"})
        await endpoint.complete(call, lambda _: seen.append(endpoint.in_flight))
        return [*seen, endpoint.in_flight]

    assert asyncio.run(go()) == [*(InFlight(3 + done, 7) for done in range(1, 5)), InFlight(0, 0)]


@pytest.mark.parametrize("url", [Url.CHAT, Url.COMPLETIONS])
def test_a_stream_tells_prompt_and_answer(url: Url) -> None:
    pieces = AnswerPieces(url, lambda _: None)
    text = {"delta": {"content": "a"}} if url is Url.CHAT else {"text": "a"}
    prompt = {"prompt_token_ids": [1, 2, 3]}
    first = {**text, "token_ids": [7], "finish_reason": None}
    outer, inner = (prompt, {}) if url is Url.CHAT else ({}, prompt)
    pieces.add(json.dumps({**outer, "choices": [{**first, **inner}]}).encode())
    pieces.add(json.dumps({"choices": [{**first, "token_ids": [8, 9]}]}).encode())
    assert pieces.computed_tokens == 6


def request(prefilling: bool, prompt: int, output: int, *, index: int = 0) -> Any:
    detokenizer = SimpleNamespace(num_output_tokens=lambda: output)
    return SimpleNamespace(
        is_prefilling=prefilling,
        prompt_len=prompt,
        detokenizer=detokenizer,
        max_tokens_param=50,
        request_index=index,
    )


def test_the_engines_bookkeeping_counts_a_prompt_once_with_its_first_token() -> None:
    states = [
        request(True, 100, 0),
        request(False, 10, 3),
        request(False, 20, 4),
        request(False, 20, 5, index=1),  # the second answer to the same prompt
    ]
    processor = SimpleNamespace(request_states=dict(enumerate(states)))
    assert in_flight(SimpleNamespace(output_processor=processor)) == InFlight(  # type: ignore[arg-type]
        10 + 3 + 20 + 4 + 5, 150 + 60 + 70 + 50
    )


# Steps of the engine's start.


def test_the_last_telling_line_of_the_log_is_the_step() -> None:
    log = ["INFO nothing of interest"]
    start = phases.Phases()
    assert start.now is None
    start.begin(phases.PROCESSES, lambda: "\n".join(log))
    assert start.now == "starting its processes"
    log.append("(Worker) INFO Starting to load model /models/x...")
    assert start.now == "loading the weights"
    log += ["INFO Warming up model for the compilation...", "INFO something else"]
    assert start.now == "compiling"
    start.begin(phases.LEARNING)
    assert start.now == "learning the machine's speed"
    start.end()
    assert start.now is None
