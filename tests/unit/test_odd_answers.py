"""The harvester against an endpoint that returns or raises anything: each row ends, alone, with what it got."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import text

from conserve.endpoints.fake import FakeEndpoint, Script, request_text
from conserve.endpoints.protocol import Call, Choice, Completion, OnTokens
from conserve.errors import EndpointBusy, EndpointFault, EndpointUnusable
from conserve.jobs.harvest import flights
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.store.books import shards
from conserve.store.database.store import Store
from conserve.store.sql.query import views
from tests import virtual_time
from tests.conftest import WriteInput
from tests.submitting import submit
from tests.tiers import in_full, named

JSON_TASK = Task(kind=Kind.PROMPT, template="{{ q }}", params={"response_format": {"type": "json_object"}})
GOOD = Completion(
    choices=[Choice(text="yes", finish_reason="stop")],
    prompt_tokens=3,
    completion_tokens=2,
    cached_tokens=1,
    model="m",
)
SURROGATE = "half \ud83d"


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def choice(**values: Any) -> Completion:
    return replace(GOOD, choices=[replace(GOOD.choices[0], **values)])


class Odd(FakeEndpoint):
    """Answers rows called ODD with what it was given, or raises it, and all others well."""

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        if "ODD" not in request_text(call.body):
            return GOOD
        self.calls += 1
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        outcome: Completion = self.outcome
        return outcome


@pytest.fixture
def queue_up(store: Store, write_input: WriteInput) -> Callable[..., str]:
    def queue_up(*prompts: str) -> str:
        return submit(store, str(write_input(q=list(prompts))), JSON_TASK).job_id

    return queue_up


def drain(store: Store, endpoint: FakeEndpoint, **named: Any) -> Tally:
    async def run() -> Tally:
        clock = asyncio.get_running_loop().time
        harvester = Harvester(store, endpoint, clock=clock, **named)
        return await asyncio.wait_for(harvester.run(asyncio.Event()), 3600)

    return virtual_time.run(run())


def results(store: Store, job_id: str) -> list[tuple[Any, ...]]:
    with views(store, now=0.0, only=[job_id], sealed=False, uses=lambda empty: {"results"}) as opened:
        return opened.duck.execute(
            "select text, error_type, error from results order by row_index"
        ).fetchall()


def check(store: Store, job_id: str, error_type: str) -> None:
    """The good rows have their answers, the odd one its error."""
    found = results(store, job_id)
    assert [row[:2] for row in found] == [("yes", None), (None, error_type), ("yes", None)]
    found[1][2].encode()
    with store.read() as tx:
        assert tx.scalar(text("select count(*) from lease")) == 0


ODD = {
    "a surrogate in the log probabilities": choice(logprobs={"content": [{"token": SURROGATE}]}),
    "a surrogate in the second choice": replace(
        GOOD, choices=[GOOD.choices[0], Choice(text=SURROGATE, finish_reason="stop")]
    ),
    "log probabilities without a bottom": choice(logprobs=deep(50_000)),
    "log probabilities of no JSON": choice(logprobs={"a": object()}),
    "no choices": replace(GOOD, choices=[]),
    "no completion": None,
}


@pytest.mark.parametrize(
    "completion", named(ODD, in_minutes=ODD.keys() - {"log probabilities of no JSON", "no choices"})
)
def test_an_answer_that_cannot_be_a_result_is_a_faulty_one(
    store: Store, queue_up: Callable[..., str], completion: Any
) -> None:
    job_id = queue_up("a", "ODD", "b")
    endpoint = Odd(completion)
    tally = drain(store, endpoint, max_attempts=3)
    check(store, job_id, "endpoint_fault")
    assert (tally.succeeded, tally.failed, tally.retried, endpoint.calls) == (2, 1, 2, 3)


UNWRITABLE = {
    "a surrogate in the text": choice(text=SURROGATE),
    "a surrogate in the model": replace(GOOD, model=SURROGATE),
    "a surrogate in the finish reason": choice(finish_reason=SURROGATE),
    "a list as the text": choice(text=["x"]),
    "an object as the text": choice(text={"a": 1}),
    "a number as the text": choice(text=7),
    "three thousand million tokens": replace(GOOD, prompt_tokens=3_000_000_000),
    "more tokens than a database counts": replace(GOOD, prompt_tokens=10**20),
    "fewer tokens than none": replace(GOOD, completion_tokens=-1),
    "a part of a token": replace(GOOD, cached_tokens=1.5),
}


IN_FULL = {
    "a surrogate in the finish reason",
    "an object as the text",
    "a number as the text",
    "more tokens than a database counts",
}


@pytest.mark.parametrize("completion", named(UNWRITABLE, in_minutes=UNWRITABLE.keys() - IN_FULL))
def test_a_result_that_cannot_be_written_takes_no_other_with_it(
    store: Store, queue_up: Callable[..., str], completion: Any
) -> None:
    job_id = queue_up("a", "ODD", "b")
    tally = drain(store, Odd(completion), max_attempts=1)
    found = results(store, job_id)[1][1]
    assert found in ("invalid_answer", "endpoint_fault")
    check(store, job_id, found)
    assert (tally.succeeded, tally.failed) == (2, 1)
    assert shards.retry_failed(store, job_id, now=0.0) == 1
    assert drain(store, Odd(GOOD)).succeeded == 1
    assert [row[0] for row in results(store, job_id)] == ["yes"] * 3


@pytest.mark.parametrize(
    "said",
    [
        *("[" * 100_000, "[" * 5000 + "]" * 5000, '"half \\ud83d"', "1e999"),
        *in_full('{"a":' * 100_000, "9" * 5000),
    ],
)
def test_an_answer_that_no_reader_parses_is_kept_as_text(
    store: Store, queue_up: Callable[..., str], said: str
) -> None:
    job_id = queue_up("a", "ODD")
    assert drain(store, Odd(choice(text=said))).succeeded == 2
    assert results(store, job_id)[1] == (said, None, None)
    with views(store, now=0.0, only=[job_id], sealed=False, uses=lambda empty: {"results"}) as opened:
        parsed = opened.duck.execute("select json from results where row_index = 1").fetchone()
    assert parsed == (None,)


@pytest.mark.parametrize(
    "error",
    [ValueError(SURROGATE), EndpointFault(SURROGATE), *in_full(RecursionError("deep"), KeyError("x"))],
)
def test_whatever_an_endpoint_raises_ends_its_row(
    store: Store, queue_up: Callable[..., str], error: Exception
) -> None:
    job_id = queue_up("a", "ODD", "b")
    drain(store, Odd(error), max_attempts=2)
    check(store, job_id, "endpoint_fault")


@pytest.mark.parametrize("broken", ["success", "decide", "failure"])
def test_whatever_breaks_the_task_of_a_row_ends_the_row(
    store: Store,
    queue_up: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    """The harvester itself is at fault: the row fails, it is said, and the run ends."""
    job_id = queue_up("a", "ODD", "b")
    original = getattr(flights, broken)
    calls: list[object] = []

    def breaks_for_odd(*arguments: Any, **named: Any) -> Any:
        work = arguments[0]
        if broken == "decide" or "ODD" in str(work.call.body):
            calls.append(work)
            if broken != "failure" or len(calls) == 1:
                raise ZeroDivisionError(broken)
        return original(*arguments, **named)

    monkeypatch.setattr(flights, broken, breaks_for_odd)
    monkeypatch.setattr(flights.log, "disabled", False)  # as logging set up by others may leave it
    caplog.set_level(logging.WARNING, flights.log.name)
    outcome = GOOD if broken == "success" else EndpointFault("no")
    tally = drain(store, Odd(outcome), max_attempts=1)
    check(store, job_id, "endpoint_fault")
    assert tally.failed == 1
    assert [r.levelname for r in caplog.records if "ZeroDivisionError" in r.getMessage()] == ["WARNING"]
    assert not any(r.exc_info for r in caplog.records if r.levelno >= logging.WARNING), (
        "no traceback is shown"
    )


def test_each_kind_of_error_is_said_once(
    store: Store, queue_up: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    job_id = queue_up("ODD 1", "ODD 2", "ODD 3")
    drain(store, Odd(ValueError("of this kind")), max_attempts=2)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1
    assert f"of {job_id} has no usable answer (ValueError: of this kind)" in said[0]


def test_a_row_that_the_interpreters_end_broke_goes_back(store: Store, queue_up: Callable[..., str]) -> None:
    job_id = queue_up("ODD")
    with pytest.raises(KeyboardInterrupt):
        drain(store, Odd(KeyboardInterrupt()))
    assert results(store, job_id) == []


@pytest.mark.parametrize("wish_s", [float("inf"), *in_full(1e9, 61.0)])
def test_no_endpoint_is_waited_for_longer_than_a_minute(
    store: Store, queue_up: Callable[..., str], wish_s: float
) -> None:
    job_id = queue_up("ODD")

    class Busy(Odd):
        times: Sequence[float] = ()

        async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
            self.times = (*self.times, asyncio.get_running_loop().time())
            if len(self.times) < 4:
                raise EndpointBusy("slow down", retry_after_s=wish_s)
            return GOOD

    endpoint = Busy(None)
    drain(store, endpoint)
    assert results(store, job_id)[0][0] == "yes"
    waits = [later - earlier for earlier, later in zip(endpoint.times, endpoint.times[1:], strict=False)]
    assert waits == pytest.approx([60.0] * 3, abs=1.0)


def test_an_endpoint_that_starts_and_refuses_rows_is_said_once(
    store: Store, queue_up: Callable[..., str]
) -> None:
    """An endpoint whose address redirects seems to be back at each start, until a row is answered."""
    job_id = queue_up("a", "b")
    said: list[str] = []

    class Redirecting(FakeEndpoint):
        tries = 0

        async def start(self) -> None:
            self.tries += 1

        async def complete(self, *arguments: Any) -> Completion:
            if self.tries < 6:
                raise EndpointUnusable("it redirects")
            return await super().complete(*arguments)

    async def run() -> float:
        loop = asyncio.get_running_loop()
        begun, stop = loop.time(), asyncio.Event()
        endpoint = Redirecting(Script())
        following = Harvester(store, endpoint, clock=loop.time, follow=True, say=said.append)
        task = asyncio.create_task(following.run(stop))
        while not following.tally.completed:
            await asyncio.sleep(0.1)
        stop.set()
        await task
        return loop.time() - begun

    took_s = virtual_time.run(run())
    assert said == [
        "the endpoint cannot be reached (it redirects); harvesting waits",
        "the endpoint is back; harvesting goes on",
    ]
    assert took_s > 1 + 2 + 4 + 8 + 16, "each wait is twice as long as the last"
    assert [row[1] for row in results(store, job_id)] == [None, None]
