"""The way of a row: its call, its result, and the decision after an error."""

import asyncio
import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from conserve.endpoints.protocol import Choice, Completion, Url
from conserve.errors import (
    EndpointBusy,
    EndpointFailing,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    RequestRejected,
    ServerLost,
    StoreError,
)
from conserve.jobs.harvest.hold import Hold
from conserve.jobs.harvest.outage import Outage
from conserve.jobs.harvest.outcome import failure, success
from conserve.jobs.harvest.retry import LONGEST_BACKOFF_S, RetryDecision, RowHistory, backoff_s, decide
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.waiting import elapsed_or_set
from conserve.jobs.harvest.workload import OpenJob, ReadyRow, to_work, wants_json_answer
from conserve.jobs.harvest.write_behind import Outcomes, WriteBehind
from conserve.jobs.requests.file import StoredRequest
from conserve.jobs.task import KEEP_LOGPROBS, Kind, Order, Task
from conserve.request_fields import ARGUMENTS
from conserve.store.books.catalog import JobRecord, Source
from conserve.store.books.journal import Committed, Finished
from conserve.store.books.leases import LeasedRow
from conserve.store.books.results import Result
from conserve.store.books.saved_tokens import pack_tokens
from conserve.store.books.states import JobState
from conserve.store.sql.openai_lines import body_of
from tests import virtual_time
from tests.store_rows import result

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
ROW = LeasedRow(4, 2, 1, 11.0)
ANSWER = Completion(
    choices=[Choice(text="yes", finish_reason="stop")],
    prompt_tokens=7,
    completion_tokens=5,
    cached_tokens=3,
    model="m",
)


def work(
    payload: str | None = "hi", *, task: Task = TASK, row: LeasedRow = ROW, url: str | None = None
) -> ReadyRow:
    stored = JobRecord(
        seq=1, id="job-1", state=JobState.QUEUED, error=None, priority=0, submitted_at=10.0, started_at=None,
        finished_at=None, task=task.to_json(), source=Source(path=None, format="jsonl"), num_rows=9,
        next_position=9, succeeded=0, failed=0, retries=0, prompt_tokens=0, completion_tokens=0,
        cached_tokens=0, resumed_tokens=0,
    )  # fmt: skip
    request = StoredRequest(6, "mine", url, payload, None, None)
    return to_work(OpenJob(stored, task), 5, row, request, "model")


def test_a_row_becomes_a_call_under_its_lease() -> None:
    made = work()
    assert (made.job_id, made.epoch, made.row, made.submitted_at) == ("job-1", 5, ROW, 10.0)
    assert made.key == ("job-1", 4)
    assert made.call is not None
    assert (made.call.key, made.call.url, made.call.identity) == ("job-1/4/5", Url.CHAT, "model")
    assert made.call.body == {"messages": [{"role": "user", "content": "hi"}]}
    assert (made.can_resume, made.wants_json, list(made.call.resume_from)) == (True, False, [])


def test_a_row_names_its_own_route_or_gets_the_tasks() -> None:
    task = replace(TASK, url=Url.COMPLETIONS)
    for url, wanted in ((None, Url.COMPLETIONS), (Url.CHAT.value, Url.CHAT)):
        call = work(task=task, url=url).call
        assert call is not None
        assert call.url is wanted


def test_a_row_without_a_payload_has_no_call() -> None:
    made = work(None)
    assert (made.call, made.can_resume, made.wants_json) == (None, False, False)


@pytest.mark.parametrize(
    ("tokens", "made_by", "params", "resumed"),
    [
        ([7, 8], "model", {}, [7, 8]),
        ([7, 8], "another", {}, []),
        ([7, 8], None, {}, []),
        ([], "model", {}, []),
        (None, "model", {}, []),
        ([7, 8], "model", {"seed": 1}, []),
    ],
)
def test_only_tokens_of_this_model_that_can_be_continued_are_continued(
    tokens: list[int] | None, made_by: str | None, params: dict[str, int], resumed: list[int]
) -> None:
    saved = None if tokens is None else pack_tokens(tokens)
    made = work(task=replace(TASK, params=params), row=ROW._replace(tokens=saved, tokens_by=made_by))
    assert made.call is not None
    assert list(made.call.resume_from) == resumed
    assert success(made, ANSWER, now=12.0).resumed_tokens == len(resumed)
    over = structs.replace(ANSWER, started_over=True)
    assert success(made, over, now=12.0).resumed_tokens == 0


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"type": "json_schema"}, True),
        ({"type": "json_object"}, True),
        ({"type": "text"}, False),
        ("x", False),
    ],
)
def test_json_is_wanted_where_the_request_says_so(form: object, wanted: bool) -> None:
    assert wants_json_answer({"response_format": form}) is wanted
    assert not wants_json_answer({})


@pytest.mark.parametrize(
    ("task", "payload", "body"),
    [
        (TASK, "hi", {"messages": [{"role": "user", "content": "hi"}]}),
        (
            replace(TASK, system="be brief", params={"n": 2}),
            "hi",
            {
                "n": 2,
                "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            },
        ),
        (replace(TASK, url=Url.COMPLETIONS, params={"n": 2}), "hi", {"n": 2, "prompt": "hi"}),
        (
            Task(kind=Kind.MESSAGES, column="m", system="be brief"),
            '[{"role":"user","content":"x"}]',
            {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]},
        ),
        (
            Task(kind=Kind.OPENAI, params={"n": 2, "top_p": 1}),
            '{"n":3,"prompt":"x"}',
            {"n": 3, "top_p": 1, "prompt": "x"},
        ),
    ],
)
def test_the_body_is_the_tasks_and_what_the_row_says_itself_wins(
    task: Task, payload: str, body: dict[str, object]
) -> None:
    assert task.body(payload) == body


def test_a_task_is_stored_as_it_is() -> None:
    task = replace(TASK, params={"n": 2}, order=Order.RANDOM, order_seed=3, system="s", id_column="i")
    assert Task.from_json(task.to_json()) == task


def test_an_error_is_kept_as_text_that_the_store_can_hold() -> None:
    assert failure(work(), "template", "half \ud800", now=1.0).error == "half \\ud800"
    assert failure(work(), "template", "é" * 20_000, now=1.0).error == "é" * 10_000


def test_an_answer_is_the_result_of_its_row() -> None:
    found = success(work(), ANSWER, now=12.0)
    assert (found.row_index, found.custom_id, found.text, found.finish_reason) == (6, "mine", "yes", "stop")
    assert (found.model, found.prompt_tokens, found.completion_tokens, found.cached_tokens) == ("m", 7, 5, 3)
    assert (found.attempts, found.submitted_at, found.started_at, found.finished_at) == (2, 10.0, 11.0, 12.0)
    assert (found.json, found.choices, found.logprobs, found.failed) == (None, None, None, False)


def test_a_failure_is_one_too() -> None:
    found = failure(work(), "too_long", "9 of 8 tokens", now=12.0)
    assert (found.row_index, found.custom_id, found.failed, found.text) == (6, "mine", True, None)
    assert (found.error_type, found.error, found.attempts) == ("too_long", "9 of 8 tokens", 2)
    assert (found.submitted_at, found.started_at, found.finished_at) == (10.0, 11.0, 12.0)


@pytest.mark.parametrize(("text", "kept"), [(' {"a": 1}\n', '{"a": 1}'), ('{"a": ', None)])
def test_json_is_kept_where_the_answer_is_some(text: str, kept: str | None) -> None:
    task = replace(TASK, params={"response_format": {"type": "json_object"}})
    answer = structs.replace(ANSWER, choices=[Choice(text=text, finish_reason="length")])
    found = success(work(task=task), answer, now=0.0)
    assert (found.text, found.json) == (text, kept)
    assert success(work(), answer, now=0.0).json is None, "the task does not ask for it"


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}, None),
        ({"refusal": "No."}, None),
    ],
)
def test_tool_calls_and_refusals_are_kept_and_come_back_as_openai_has_them(
    beside: dict[str, object], message: None
) -> None:
    choice = Choice(text="", finish_reason="tool_calls", beside=beside)
    found = success(work(), structs.replace(ANSWER, choices=[choice]), now=0.0)
    assert json.loads(found.choices or "") == [{"text": "", "finish_reason": "tool_calls", **beside}]
    row = {
        **{name: getattr(found, name) for name in ("text", "choices", "finish_reason", "model", "engine")},
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 1),
        "job_id": "job-1", "row_index": 0, "finished_at": datetime(2026, 1, 1, tzinfo=UTC), "logprobs": None,
    }  # fmt: skip
    (answer,) = body_of(row, "/v1/chat/completions")["choices"]
    assert answer["message"] == {"role": "assistant", "content": message, **beside}
    output = body_of(row, "/v1/responses")["output"]
    assert len(output) == 1
    assert str(next(iter(beside.values()))).strip("[]{}")[:5] in str(output)


def test_several_choices_are_kept_with_their_logprobs() -> None:
    first = Choice(text="a", finish_reason="stop", logprobs={"tokens": ["a"]})
    found = success(
        work(), structs.replace(ANSWER, choices=[first, Choice(text="b", finish_reason="length")]), now=0.0
    )
    assert (found.text, json.loads(found.logprobs or "")) == ("a", {"tokens": ["a"]})
    assert json.loads(found.choices or "") == [
        {"text": "a", "finish_reason": "stop", "logprobs": {"tokens": ["a"]}},
        {"text": "b", "finish_reason": "length"},
    ]


def echoing(tokens: list[str], **others: object) -> Choice:
    logprobs = {"tokens": tokens, "token_logprobs": [-0.1 * n for n in range(len(tokens))], **others}
    return Choice(text="".join(tokens), finish_reason="length", logprobs=logprobs)


def scored(keep: object, *choices: Choice, prompt_tokens: int = 3) -> Result:
    """Result of a row that asks for the log probabilities of its prompt's last tokens alone."""
    task = replace(TASK, params={"echo": True, KEEP_LOGPROBS: keep})
    return success(
        work(task=task), structs.replace(ANSWER, choices=choices, prompt_tokens=prompt_tokens), now=0.0
    )


@pytest.mark.parametrize(
    ("keep", "kept"), [(0, []), (2, ["b", "c"]), ("2.0", ["b", "c"]), (3, ["a", "b", "c"])]
)
def test_of_an_echoed_prompt_the_last_tokens_are_kept_alone(keep: object, kept: list[str]) -> None:
    found = scored(keep, echoing(["a", "b", "c", "d"], top_logprobs=None, note="as sent"))
    logprobs = json.loads(found.logprobs or "")
    assert (found.text, found.finish_reason, logprobs["tokens"]) == ("", "length", kept)
    assert len(logprobs["token_logprobs"]) == len(kept)
    assert (logprobs["top_logprobs"], logprobs["note"]) == (None, "as sent")


@pytest.mark.parametrize(("keep", "prompt_tokens"), [(4, 3), (1, 5)])
def test_an_answer_that_echoes_no_such_prompt_is_kept_as_it_is(keep: int, prompt_tokens: int) -> None:
    found = scored(keep, echoing(["a", "b", "c", "d"]), prompt_tokens=prompt_tokens)
    assert (found.text, json.loads(found.logprobs or "")["tokens"]) == ("abcd", ["a", "b", "c", "d"])


def test_each_of_several_answers_is_shortened_if_it_has_log_probabilities() -> None:
    found = scored(
        1, echoing(["a", "b", "c"]), echoing(["a", "b", "d"]), Choice(text="x", finish_reason="stop")
    )
    choices = json.loads(found.choices or "")
    assert [choice["text"] for choice in choices] == ["", "", "x"]
    assert [choice["logprobs"]["tokens"] for choice in choices[:2]] == [["c"], ["d"]]


def test_a_row_that_keeps_log_probabilities_asks_its_server_for_no_such_thing() -> None:
    made = work(task=replace(TASK, params={"echo": True, KEEP_LOGPROBS: 2}))
    assert made.call is not None
    assert made.call.body.keys() == {"echo", "messages"}


@pytest.mark.parametrize(
    ("asked", "sent"), [(-1000, None), ("-1", None), (-0.5, None), (0, 0), (7, 7), (None, None)]
)
def test_no_row_asks_to_overtake_live_requests(asked: object, sent: object) -> None:
    made = work(task=replace(TASK, params={"priority": asked}))
    assert made.call is not None
    assert made.call.body.get("priority") == sent


@pytest.mark.parametrize("url", Url)
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_no_row_speaks_in_the_harvesters_place(url: Url, name: str) -> None:
    task = replace(TASK, url=url, params={"vllm_xargs": {name: [1, 2], "other": 2}})
    call = work(task=task).call
    assert call is not None
    assert call.body["vllm_xargs"] == {"other": 2}
    made = work(task=replace(task, params={"vllm_xargs": {name: 1}}))
    assert made.call is not None
    assert "vllm_xargs" not in made.call.body
    assert made.can_resume


@pytest.mark.parametrize("said", [{}, {"other": 2}, [1], "x", None])
def test_what_a_row_says_to_vllm_alone_is_sent_as_it_is(said: object) -> None:
    call = work(task=replace(TASK, params={"vllm_xargs": said})).call
    assert call is not None
    assert call.body["vllm_xargs"] == said


ALONE = RowHistory(alone=True)


@pytest.mark.parametrize(
    ("error", "decision"),
    [
        (RequestRejected("no", kind="too_long"), RetryDecision(error_type="too_long")),
        (EndpointBusy("wait"), RetryDecision(hold_s=1.0)),
        (EndpointBusy("wait", retry_after_s=7.0), RetryDecision(hold_s=7.0)),
        (EndpointUnavailable("gone"), RetryDecision(hold_s=1.0)),
        (EndpointFailing("500"), RetryDecision(hold_s=1.0)),
        (ServerLost("gone"), RetryDecision(after_s=1.0, lost=True)),
        (EndpointFault("garbage"), RetryDecision(after_s=1.0, is_failure=True)),
    ],
)
def test_an_error_is_judged_by_what_it_says_about_the_row(
    error: RequestRejected | EndpointFault, decision: RetryDecision
) -> None:
    assert decide(error, ALONE, max_attempts=2) == decision


def test_a_row_that_is_refused_as_busy_beside_others_waits_alone() -> None:
    busy = EndpointBusy("wait", retry_after_s=7.0)
    decisions = [decide(busy, replace(ALONE, refusals=n), max_attempts=2) for n in (2, 3, 6, 7, 99)]
    assert [one.hold_s for one in decisions] == [7.0, 0, 0, 0, 0]
    assert [one.after_s for one in decisions] == [0, 7.0, 8.0, 16.0, 60.0]
    assert not any(one.is_failure or one.error_type for one in decisions)


def test_as_many_faults_fail_a_row_as_it_has_attempts() -> None:
    decisions = [decide(EndpointFault("x"), RowHistory(faults=n), max_attempts=3) for n in range(3)]
    assert [decision.error_type for decision in decisions] == [None, None, "endpoint_fault"]
    assert [decision.after_s for decision in decisions] == [1.0, 2.0, 0.0]


def test_a_fault_of_an_attempt_that_got_on_does_not_count() -> None:
    decision = decide(EndpointFault("cut"), replace(ALONE, faults=99, gained=True), max_attempts=1)
    assert decision == RetryDecision(after_s=1.0)
    later = decide(EndpointFault("cut"), replace(ALONE, gained=True, attempts=4), max_attempts=1)
    assert later == RetryDecision(after_s=8.0)
    for error in (EndpointBusy("x"), EndpointUnavailable("x"), EngineDied("x")):
        unlike = decide(error, RowHistory(), max_attempts=1)
        assert decide(error, RowHistory(gained=True, attempts=4), max_attempts=1) == unlike
    refused = decide(RequestRejected("no", kind="too_long"), replace(ALONE, gained=True), max_attempts=1)
    assert refused.error_type == "too_long"


def test_only_an_answer_clears_a_suspect() -> None:
    """Else the row that kills a server would run beside others again, as soon as the server is back."""
    for error in (EndpointBusy("x"), EndpointUnavailable("x"), EngineDied("x")):
        for suspect in (True, False):
            decision = decide(error, replace(ALONE, suspect=suspect), max_attempts=2)
            assert decision.suspect == (suspect or isinstance(error, EngineDied))
    assert not decide(EndpointFault("x"), replace(ALONE, suspect=True), max_attempts=2).suspect


def test_a_suspect_fails_for_the_servers_that_it_had_alone() -> None:
    def judged(**named: Any) -> RetryDecision:
        return decide(ServerLost("gone"), replace(ALONE, **named), max_attempts=1, max_deaths=3)

    assert judged(deaths=9, suspect=False) == RetryDecision(after_s=1.0, lost=True)
    again = judged(deaths=1, suspect=True, attempts=4)
    assert again == RetryDecision(after_s=1.0, lost=True, suspect=True, is_failure=True)
    assert judged(deaths=2, suspect=True) == RetryDecision(error_type="engine_died")
    faulty = ServerLost("500", kind="endpoint_fault")
    found = decide(faulty, replace(ALONE, deaths=2, suspect=True), max_attempts=9, max_deaths=3)
    assert found == RetryDecision(error_type="endpoint_fault")
    for suspect in (True, False):
        further = judged(deaths=2, suspect=suspect, gained=True)
        assert further == RetryDecision(after_s=1.0, suspect=suspect), "it gets done by pieces"


def test_an_endpoint_that_is_out_of_reach_never_fails_a_row() -> None:
    for error in (EndpointBusy("x"), EndpointUnavailable("x")):
        decision = decide(error, replace(ALONE, faults=99), max_attempts=1)
        assert (decision.error_type, decision.is_failure) == (None, False)


@pytest.mark.parametrize(
    ("deaths", "alone", "decision"),
    [
        (0, False, RetryDecision(suspect=True)),
        (9, False, RetryDecision(suspect=True)),
        (0, True, RetryDecision(suspect=True, is_failure=True)),
        (1, True, RetryDecision(error_type="engine_died")),
    ],
)
def test_only_a_row_that_was_alone_is_blamed_for_an_engines_death(
    deaths: int, alone: bool, decision: RetryDecision
) -> None:
    died, row = EngineDied("gone"), RowHistory(faults=9, deaths=deaths, alone=alone)
    assert decide(died, row, max_attempts=1) == decision
    blamed = decide(died, row, max_attempts=1, max_deaths=deaths + 2)
    assert blamed.error_type is None


def test_a_backoff_doubles_up_to_a_minute() -> None:
    assert [backoff_s(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S]
    assert backoff_s(5000) == LONGEST_BACKOFF_S, "a weekend without a database"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_hold_doubles_until_something_answers() -> None:
    clock, said = Clock(), []
    hold = Hold(clock, said.append)
    assert hold.left_s <= 0
    lengths = []
    for _ in range(3):
        waits = hold.begin(EndpointBusy("busy"), 2.0)
        lengths.append(hold.left_s)
        assert waits == f"busy; trying again in {lengths[-1]:.0f} s"
        assert hold.begin(EndpointBusy("busy"), 2.0) is None, "others failed for the same reason"
        clock.now += lengths[-1]
        assert hold.left_s <= 0
    assert lengths == [2.0, 4.0, 8.0]
    hold.end()
    hold.begin(EndpointBusy("busy"), 1.0)
    assert hold.left_s == 1.0
    assert said == [], "a busy endpoint is none that is out of reach"


def test_a_hold_is_as_long_as_was_asked_for_and_a_minute_at_most() -> None:
    clock = Clock()
    hold = Hold(clock, lambda _: None)
    assert hold.begin(EndpointFault("x"), 0.0) is None
    assert hold.left_s <= 0
    for wish_s, length_s in ((1.0, 1.0), (50.0, 50.0), (1.0, LONGEST_BACKOFF_S), (900.0, LONGEST_BACKOFF_S)):
        hold.begin(EndpointBusy("x"), wish_s)
        assert hold.left_s == length_s
        clock.now += length_s


def test_a_hold_grows_to_the_longest_wish_of_a_burst() -> None:
    clock = Clock()
    hold = Hold(clock, lambda _: None)

    def refused(retry_after_s: float | None) -> str | None:
        error = EndpointBusy("x", retry_after_s=retry_after_s)
        wish_s = decide(error, RowHistory(), max_attempts=1).hold_s
        return hold.begin(error, wish_s)

    assert [refused(s) for s in (1.0, 30.0, 20.0)] == [*(f"x; trying again in {s} s" for s in (1, 30)), None]
    clock.now += 29.5
    assert refused(None) is None, "nothing is asked for"
    assert hold.left_s == 0.5
    refused(2.0)
    assert hold.left_s == 2.0
    clock.now += 2.0
    refused(1.0)
    assert hold.left_s == LONGEST_BACKOFF_S, "a burst is one failure, of its longest wish"


def test_that_an_endpoint_is_out_of_reach_and_back_is_said_once() -> None:
    clock, said = Clock(), []
    hold = Hold(clock, said.append)
    for _ in range(2):
        for _ in range(2):
            hold.begin(EndpointUnavailable("no route"), 1.0)
        hold.end()
        hold.end()
    assert said == ["no route; harvesting waits", "the endpoint answers again; harvesting goes on"] * 2


def test_an_endpoint_that_is_busy_for_more_than_a_minute_is_said_once() -> None:
    """Without a terminal nothing else tells that no row is sent."""
    clock, said = Clock(), []
    hold = Hold(clock, said.append)
    for _ in range(2):
        for wait_s in (40.0, 30.0, 600.0):
            hold.begin(EndpointBusy("HTTP 429: slow down"), 1.0)
            clock.now += wait_s
        hold.begin(EndpointBusy("HTTP 429: slow down"), 1.0)
        hold.end()
    back = "the endpoint answers again; harvesting goes on"
    assert said == ["HTTP 429: slow down; harvesting waits", back] * 2
    for _ in range(9):
        hold.begin(EndpointBusy("a limit of requests a minute"), 60.0)
        clock.now += 60.0
        hold.end()
    assert len(said) == 4


def test_an_outage_is_said_once_and_waited_for_longer_each_time() -> None:
    said: list[str] = []
    outage = Outage(said.append)
    outage.end()
    assert [outage.begin(StoreError("gone")) for _ in range(3)] == [1.0, 2.0, 4.0]
    assert outage.begin(EndpointUnusable("no GPU")) == 8.0
    outage.end()
    outage.end()
    assert said == [
        "the store cannot be reached (gone); harvesting waits",
        "the endpoint cannot be reached (no GPU); harvesting waits",
        "the endpoint is back; harvesting goes on",
    ]
    assert outage.begin(StoreError("gone")) == 16.0, "it has proved nothing yet"
    outage.forget()
    assert outage.begin(StoreError("gone")) == 1.0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "refuses requests"),
        (307, "refuses requests"),
        (None, "cannot be reached"),
        (502, "cannot be reached"),
    ],
)
def test_of_an_endpoint_that_answers_it_is_said_that_it_refuses(status: int | None, words: str) -> None:
    said: list[str] = []
    Outage(said.append).begin(EndpointUnusable("why", status=status))
    assert said == [f"the endpoint {words} (why); harvesting waits"]


def test_trouble_goes_to_the_warnings_and_its_end_does_not() -> None:
    said: list[str] = []
    warned: list[str] = []
    outage, hold = Outage(said.append, warn=warned.append), Hold(Clock(), said.append, warn=warned.append)
    outage.begin(StoreError("gone"))
    hold.begin(EndpointUnavailable("no route"), 1.0)
    assert warned == ["the store cannot be reached (gone); harvesting waits", "no route; harvesting waits"]
    assert said == []
    outage.end()
    hold.end()
    assert len(warned) == len(said) == 2


def test_a_write_proves_that_the_store_works() -> None:
    outage = Outage(lambda _: None)
    written: list[Outcomes] = []

    async def write(outcomes: Outcomes) -> None:
        written.append(outcomes)

    async def run() -> list[float]:
        writer, waits = WriteBehind(write, outage), []
        for _ in range(2):
            waits += [outage.begin(StoreError("gone")) for _ in range(2)]
            await writer.flush()
        writer.put_back(work(), RetryDecision())
        await writer.flush()
        return [*waits, outage.begin(StoreError("gone"))]

    assert asyncio.run(run()) == [1.0, 2.0, 4.0, 8.0, 1.0], "no outcome proves nothing"
    assert len(written) == 1


def test_a_write_that_failed_is_repeated_once_before_newer_outcomes() -> None:
    """It may have been durable. One that fails again is given up, since it may never succeed."""
    written: list[tuple[bool, int]] = []
    failing = {0, 2, 3}

    async def write(outcomes: Outcomes) -> None:
        written.append((outcomes.repeated, outcomes.finished[0].position))
        if len(written) - 1 in failing:
            raise StoreError("the connection broke")

    async def run() -> None:
        writer = WriteBehind(write, Outage(lambda _: None))
        for position in range(3):
            writer.outcomes.finished.append(Finished(5, "job-1", position, result(position)))
            with contextlib.suppress(StoreError):
                await writer.flush()
        assert writer.is_at_work
        await writer.flush()
        assert not writer.is_at_work

    asyncio.run(run())
    assert written == [(False, 0), (True, 0), (False, 1), (True, 1), (False, 2)]


def test_a_write_that_fails_under_a_stop_is_repeated() -> None:
    written: list[Outcomes] = []
    goes_on = asyncio.Event()

    async def write(outcomes: Outcomes) -> None:
        written.append(outcomes)
        await goes_on.wait()
        if len(written) == 1:
            raise StoreError("the connection broke")

    async def run() -> None:
        writer = WriteBehind(write, Outage(lambda _: None))
        writer.put_back(work(), RetryDecision())
        flushing = asyncio.create_task(writer.flush())
        await asyncio.sleep(0)
        flushing.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        await writer.flush()

    asyncio.run(run())
    assert [outcomes.repeated for outcomes in written] == [False, True]
    assert written[0].returned == written[1].returned


def test_a_wait_says_whether_the_event_or_the_time_ended_it() -> None:
    async def run() -> list[bool]:
        event = asyncio.Event()
        found = [await elapsed_or_set(event, 5.0)]
        asyncio.get_running_loop().call_later(1.0, event.set)
        return [*found, await elapsed_or_set(event, 5.0)]

    assert virtual_time.run(run()) == [False, True]


def test_an_endpoint_that_refuses_rows_is_back_with_its_first_answer() -> None:
    said: list[str] = []
    outage = Outage(said.append)
    for wait_s in (1.0, 2.0, 4.0):
        assert outage.begin(EndpointUnusable("it redirects"), until_answer=True) == wait_s
        outage.end()  # it starts
        outage.forget()  # rows were put back: that proves the store, not the endpoint
    outage.answered()
    assert said == [
        "the endpoint cannot be reached (it redirects); harvesting waits",
        "the endpoint is back; harvesting goes on",
    ]
    assert outage.begin(EndpointUnusable("it redirects")) == 1.0
    outage.answered()
    assert len(said) == 3, "an answer says nothing of an outage of the start"


def test_the_tally_is_a_recount_of_what_was_committed() -> None:
    tally = Tally()
    results = [
        result(
            n,
            failed=n == 1,
            prompt_tokens=n + 1,
            completion_tokens=10 * n,
            resumed_tokens=100 * n,
            cached_tokens=n,
        )
        for n in range(4)
    ]
    finished = [Finished(1, "job-1", n, r) for n, r in enumerate(results)]
    tally.count(Committed(finished[:2], finished[3:], []))
    tally.count(Committed(finished[2:3], [], ["job-1"]))
    assert (tally.succeeded, tally.failed, tally.late, tally.done) == (2, 1, 1, 3)
    assert (tally.prompt_tokens, tally.completion_tokens, tally.resumed_tokens) == (6, 30, 300)
    assert tally.cached_tokens == 3
    assert [*tally.completed] == ["job-1"]


def test_a_job_that_had_ended_and_comes_back_has_ended_no_more() -> None:
    seen, completed, cancelled = (dict.fromkeys(jobs) for jobs in ("ab", "ab", "de"))
    tally = Tally(jobs=seen, completed=completed, cancelled=cancelled)
    for job_id in ("a", "c", "c", "d"):
        tally.begin(job_id)
    assert ([*tally.jobs], [*tally.completed], [*tally.cancelled]) == (["a", "b", "c", "d"], ["b"], ["e"])
