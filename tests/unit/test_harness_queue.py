"""Requests of a harness become durable jobs: found again by what they ask, answered once, scored alike."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import conserve
from conserve.api.job import Job
from conserve.endpoints.fake_logprobs import likeliest_after, logprob
from conserve.endpoints.protocol import Url
from conserve.errors import EndpointFault, RequestRejected, RowsFailed
from conserve.jobs.task import KEEP_LOGPROBS
from conserve.nightly.harness import gathering
from conserve.nightly.harness.gathering import Gatherer
from conserve.nightly.harness.model_access import engine_flags
from conserve.nightly.harness.request_jobs import RUN, Alone, Asker, HarnessAnswer, Line
from conserve.nightly.harness.scoring import MOST_TOKENS, ByEcho, ByNextToken, ContinuationScore, cheaper_plan
from conserve.store.books.results import Result
from tests.commands import HANGS_S

FAKE = "fake:?tokens=4"
CONTEXT = tuple(range(100, 300))
CHOICES = [(7,), (8,), (9, 10), (9, 11, 12)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> conserve.Store:
    monkeypatch.setenv("CONSERVE_FAKE", "1")
    return conserve.open()


def alone(store: conserve.Store, run: str = "night", endpoint: str = FAKE) -> Alone:
    engine = conserve.Engine(endpoint=endpoint, progress=False)
    return Alone(store, run, engine, name="test", progress=False)


def chat(text: str, name: str | None = None, **more: Any) -> Line:
    return Line(Url.CHAT, {"messages": [{"role": "user", "content": text}], **more}, name)


def expected(context: Sequence[int], continuation: Sequence[int]) -> ContinuationScore:
    places = [([*context, *continuation[:place]], token) for place, token in enumerate(continuation)]
    greedy = all(token == likeliest_after(before) for before, token in places)
    return ContinuationScore(sum(logprob(before, token) for before, token in places), greedy)


def scored(
    store: conserve.Store, *, next_token: bool, context: Sequence[int] = CONTEXT
) -> tuple[object, list[ContinuationScore]]:
    choices = [*CHOICES, (likeliest_after(context),)]
    plan, lines = cheaper_plan(context, choices, next_token=next_token)
    return plan, plan.scores(Asker(alone(store)).ask(lines))


@pytest.mark.parametrize("next_token", [True, False])
def test_a_continuation_has_the_same_score_by_next_tokens_and_by_echo(
    store: conserve.Store, *, next_token: bool
) -> None:
    plan, scores = scored(store, next_token=next_token)
    assert isinstance(plan, ByNextToken if next_token else ByEcho)
    assert scores == [expected(CONTEXT, one) for one in [*CHOICES, (likeliest_after(CONTEXT),)]]
    assert [score.is_greedy for score in scores][-1]


def test_choices_of_one_token_are_one_request_and_long_ones_are_echoed() -> None:
    plan, lines = cheaper_plan(CONTEXT, [(1,), (2,), (3,), (4,)], next_token=True)
    (line,) = lines
    assert isinstance(plan, ByNextToken)
    assert line.body["logprob_token_ids"] == [1, 2, 3, 4]
    plan, lines = cheaper_plan((1, 2), [tuple(range(90))], next_token=True)
    (line,) = lines
    assert isinstance(plan, ByEcho)
    assert line.body["echo"] is True


def test_more_tokens_than_a_request_may_ask_for_are_several_requests(store: conserve.Store) -> None:
    context = tuple(range(2000))
    choices = [(token,) for token in range(MOST_TOKENS + 5)]
    plan, lines = cheaper_plan(context, choices, next_token=True)
    asked = list(lines)
    assert [len(line.body["logprob_token_ids"]) for line in asked] == [MOST_TOKENS, 5]
    assert plan.scores(Asker(alone(store)).ask(asked)) == [expected(context, one) for one in choices]


def test_an_empty_continuation_is_certain_and_asks_nothing() -> None:
    plan, lines = cheaper_plan(CONTEXT, [()], next_token=False)
    assert list(lines) == []
    assert plan.scores(iter(())) == [ContinuationScore(0.0, True)]


def test_the_store_keeps_an_echo_without_its_context(store: conserve.Store) -> None:
    scored(store, next_token=False)
    (job,) = store.jobs(tags={RUN: "night"})
    for result, choice in zip(job.results(), [*CHOICES, (1,)], strict=True):
        assert len(result["logprobs"]["token_logprobs"]) == len(choice)
        assert result["text"] == ""


def answer(logprobs: str | None) -> Iterator[HarnessAnswer]:
    return iter([HarnessAnswer("said", "length", logprobs, None, 3, 1)])


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        (None, "no log probabilities"),
        ('{"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}', "does not echo"),
    ],
)
def test_a_server_that_cannot_score_is_named(logprobs: str | None, says: str) -> None:
    with pytest.raises(EndpointFault, match=says):
        ByEcho([2]).scores(answer(logprobs))


def test_a_server_without_logprob_token_ids_is_told_from_one_with() -> None:
    told = '{"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}'
    with pytest.raises(EndpointFault, match="scoring=echo"):
        ByNextToken([(5,)]).scores(answer(told))


def test_an_echo_that_the_queue_has_not_shortened_is_read_too() -> None:
    told = (
        '{"tokens": ["a", "b", "c", "d"], "token_logprobs": [null, -1.0, -2.0, -9.0],'
        ' "top_logprobs": [null, {"b": -1.0}, {"c": -2.0, "x": -1.5}, {"d": -9.0}]}'
    )
    assert ByEcho([2]).scores(answer(told)) == [ContinuationScore(-3.0, False)]


def test_the_same_requests_of_a_run_are_the_same_job(store: conserve.Store) -> None:
    lines = [chat(f"question {number}") for number in range(3)]
    first = list(Asker(alone(store)).ask(lines))
    assert list(Asker(alone(store)).ask(lines)) == first
    assert len(store.jobs()) == 1
    list(Asker(alone(store, run="another night")).ask(lines))
    list(Asker(alone(store)).ask(lines[:2]))
    assert len(store.jobs()) == 3


def test_sampled_answers_are_asked_anew_within_a_process_and_found_again_by_the_next(
    store: conserve.Store,
) -> None:
    lines = [chat("question", temperature=1.0)]
    for _ in range(2):
        asker = Asker(alone(store))
        for _ in range(2):
            list(asker.ask(lines, sampled=True))
    assert len(store.jobs()) == 2


def test_rows_that_failed_are_told_and_asked_again_by_the_next_try(
    store: conserve.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [chat("good"), chat("REJECT this")]
    with pytest.raises(RowsFailed, match=r"1 rows of job .* failed, row 1 .*scripted rejection"):
        list(Asker(alone(store)).ask(lines))
    answers = list(Asker(alone(store, endpoint="fake:?tokens=4&reject=NEVER")).ask(lines))
    assert len(answers) == 2
    assert len(store.jobs()) == 1


def asked(gatherer: Gatherer, names: Sequence[str]) -> list[HarnessAnswer]:
    futures = [gatherer.ask(chat(name, name)) for name in names]
    answers = [future.result(timeout=HANGS_S) for future in futures]
    gatherer.close()
    return answers


def test_requests_that_come_together_are_one_job(
    store: conserve.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for waits in ("QUIET_S", "LONGEST_S"):
        monkeypatch.setattr(gathering, waits, HANGS_S)
    gatherer = Gatherer(alone(store), name="gathered")
    names = [f"question {number}" for number in range(20)]
    futures = [gatherer.ask(chat(name, name)) for name in names]
    gatherer.close()
    assert len({future.result().text for future in futures}) > 10
    assert [job.progress().rows for job in store.jobs()] == [20]


def test_answers_of_an_earlier_try_are_not_asked_for_again(store: conserve.Store) -> None:
    names = [f"question {number}" for number in range(6)]

    def one_by_one() -> Gatherer:
        """Gather into jobs that are asked one after the other, however many there are on a slow machine."""
        return Gatherer(alone(store), name="gathered", jobs=1)

    asked(one_by_one(), names[:2])
    first = asked(one_by_one(), names[:4][::-1])
    assert asked(one_by_one(), names[:4][::-1]) == first
    rows = list(itertools.chain.from_iterable(job.results() for job in store.jobs()))
    assert sorted(row["custom_id"] for row in rows) == names[:4]


def test_a_sample_that_is_cancelled_takes_no_answer_from_others(store: conserve.Store) -> None:
    gatherer = Gatherer(alone(store), name="gathered")
    futures = [gatherer.ask(chat(name, name)) for name in ("first", "second")]
    assert not futures[0].cancel()
    assert all(future.result(timeout=HANGS_S).text for future in futures)
    gatherer.close()


def test_a_request_that_can_never_succeed_fails_alone(store: conserve.Store) -> None:
    gatherer = Gatherer(alone(store), name="gathered")
    bad, good = gatherer.ask(chat("REJECT", "bad")), gatherer.ask(chat("good", "good"))
    with pytest.raises(RequestRejected):
        bad.result(timeout=HANGS_S)
    assert good.result(timeout=HANGS_S).text
    gatherer.close()


def test_the_next_try_hands_out_the_new_answer_of_a_request_that_failed(
    store: conserve.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are looked for while the job begins to run again."""
    gatherer = Gatherer(alone(store), name="gathered")
    with pytest.raises(RequestRejected):
        gatherer.ask(chat("REJECT", "REJECT")).result(timeout=HANGS_S)
    gatherer.close()
    looked, new_results, answered = threading.Event(), Job.new_results, Alone.await_answers

    def noted(job: Job) -> Iterator[list[Result]]:
        with closing(new_results(job)) as looks:
            for found in looks:
                looked.set()
                yield found

    def answered_after_a_look(queue: Alone, *jobs: Job) -> None:
        assert looked.wait(HANGS_S)
        answered(queue, *jobs)

    monkeypatch.setattr(Job, "new_results", noted)
    monkeypatch.setattr(Alone, "await_answers", answered_after_a_look)
    again = Gatherer(alone(store, endpoint="fake:?tokens=4&reject=NEVER"), name="gathered")
    (answer,) = asked(again, ["REJECT"])
    assert answer.text
    assert len(store.jobs()) == 1


def test_an_engine_that_cannot_start_fails_every_request(store: conserve.Store) -> None:
    gatherer = Gatherer(alone(store, endpoint="http://127.0.0.1:1"), name="gathered")
    with pytest.raises(conserve.errors.EndpointUnusable):
        gatherer.ask(chat("good", "good")).result(timeout=HANGS_S)
    gatherer.close()


def test_flags_of_vllm_go_by_their_names() -> None:
    flags = engine_flags(
        "--seed 3", {"dtype": "float32", "enforce_eager": True, "enable_chunked": False, "x": None}
    )
    assert flags == ["--seed", "3", "--dtype", "float32", "--enforce-eager", "--no-enable-chunked"]


def test_a_line_may_not_ask_to_keep_no_log_probability(store: conserve.Store, tmp_path: Path) -> None:
    lines = [Line(Url.COMPLETIONS, {"prompt": [1, 2], "logprobs": 1, "echo": True, KEEP_LOGPROBS: 0})]
    with pytest.raises(conserve.errors.InputError, match=KEEP_LOGPROBS):
        list(Asker(alone(store)).ask(lines))
