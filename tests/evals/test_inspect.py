"""inspect_ai over the durable queue: chats, tools, epochs, choices; a second try of a run asks nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="inspect_ai is not installed: make test-evals")

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Solver, generate, solver, use_tools
from inspect_ai.tool import Tool, tool

import conserve
from conserve.endpoints.answers import beside
from conserve.endpoints.fake import FakeEndpoint
from conserve.endpoints.protocol import Call, Choice, Completion
from conserve.nightly.harness import inspect_provider
from conserve.nightly.harness.inspect_model import body_of, completion_of, with_seed
from conserve.nightly.harness.request_jobs import HarnessAnswer

FAKE = "fake:?tokens=6"


def capitals(count: int = 6) -> list[Sample]:
    return [Sample(input=f"What is question {n}?", target="amber", id=n) for n in range(count)]


def asked(work: Task, folder: Path, *, run: str = "night", **more: Any) -> Any:
    """Log of an evaluation by a model of its own, as in a process of its own."""
    given = {"endpoint": FAKE, "run": run} | more.pop("model_args", {})
    (log,) = evaluate(
        work, model=get_model("conserve/fake", memoize=False, **given), display="none", log_dir=str(folder),
        max_connections=100, max_samples=100, **more,
    )  # fmt: skip
    assert log.status == "success", log.error
    return log


def rows() -> list[dict[str, Any]]:
    return [row for job in conserve.open().jobs() for row in job.results(with_prompts=True)]


def told(log: Any) -> list[tuple[Any, int, str]]:
    return sorted((sample.id, sample.epoch, sample.output.completion) for sample in log.samples)


def test_a_second_try_of_a_run_asks_nothing_and_another_run_asks_all(tmp_path: Path) -> None:
    work = lambda: Task(dataset=capitals(), solver=generate(), scorer=includes(), epochs=2)  # noqa: E731
    first = asked(work(), tmp_path)
    assert len(rows()) == 12
    assert asked(work(), tmp_path).results.scores[0].metrics == first.results.scores[0].metrics
    assert len(rows()) == 12
    asked(work(), tmp_path, run="next night", limit=2)
    assert len(rows()) == 16


def test_rows_of_a_killed_try_are_not_asked_again_whatever_the_order(tmp_path: Path) -> None:
    asked(Task(dataset=capitals(4), solver=generate()), tmp_path)
    kept = {row["custom_id"]: row["finished_at"] for row in rows()}
    log = asked(Task(dataset=capitals(6)[::-1], solver=generate()), tmp_path)
    found = {row["custom_id"]: row["finished_at"] for row in rows()}
    assert len(found) == len(rows()) == 6
    assert kept.items() <= found.items()
    assert len(log.samples) == 6


@solver
def twice() -> Solver:
    async def solve(state: Any, generate: Any) -> Any:
        state = await generate(state)
        state.messages.append(state.messages[0])
        return await generate(state)

    return solve


def test_a_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    first = asked(Task(dataset=capitals(3), solver=twice()), tmp_path)
    assert len(rows()) == 6
    assert told(asked(Task(dataset=capitals(3), solver=twice()), tmp_path)) == told(first)
    assert len(rows()) == 6


@tool
def doubled() -> Tool:
    async def execute(number: int) -> str:
        """Double a number.

        Args:
            number: The number.
        """
        return str(2 * number)

    return execute


async def calls_a_tool(self: FakeEndpoint, call: Call, on_tokens: Any = None) -> Completion:
    """Answer as a server that parses tool calls: call the tool first, then say what it returned."""
    messages = call.body["messages"]
    if messages[-1]["role"] == "tool":
        return Completion(
            choices=(Choice(text=f"It is {messages[-1]['content']}.", finish_reason="stop"),),
            prompt_tokens=3, completion_tokens=2, cached_tokens=0, model="fake",
        )  # fmt: skip
    assert call.body["tools"][0]["function"]["name"] == "doubled"
    called = {"id": "c1", "type": "function", "function": {"name": "doubled", "arguments": '{"number": 21}'}}
    return Completion(
        choices=(Choice(text="", finish_reason="tool_calls", beside=beside([called], None)),),
        prompt_tokens=3, completion_tokens=2, cached_tokens=0, model="fake",
    )  # fmt: skip


def test_tools_are_called_and_their_answers_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEndpoint, "complete", calls_a_tool)
    work = Task(
        dataset=[Sample(input="Double 21.", target="42", id=1)],
        solver=[use_tools(doubled()), generate()],
        scorer=includes(),
    )
    log = asked(work, tmp_path)
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert [message.role for message in log.samples[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert len(rows()) == 2


def test_parameters_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []
    complete = FakeEndpoint.complete

    async def noted(self: FakeEndpoint, call: Call, on_tokens: Any = None) -> Completion:
        bodies.append(call.body)
        return await complete(self, call, on_tokens)

    monkeypatch.setattr(FakeEndpoint, "complete", noted)
    config = GenerateConfig(temperature=0.5, max_tokens=3, stop_seqs=["x"], seed=7, extra_body={"top_k": 5})
    asked(Task(dataset=capitals(1), solver=generate(), config=config), tmp_path)
    (body,) = bodies
    assert body.pop("messages") == [{"role": "user", "content": "What is question 0?"}]
    assert body == {"temperature": 0.5, "max_tokens": 3, "stop": ["x"], "seed": 7, "top_k": 5}


def test_each_epoch_has_a_seed_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    complete = FakeEndpoint.complete

    async def noted(self: FakeEndpoint, call: Call, on_tokens: Any = None) -> Completion:
        seeds.append(call.body.get("seed"))
        return await complete(self, call, on_tokens)

    monkeypatch.setattr(FakeEndpoint, "complete", noted)
    work = lambda: Task(dataset=capitals(1), solver=generate(), epochs=3)  # noqa: E731
    asked(work(), tmp_path, seed=7)
    assert sorted(seeds) == [7, 8, 9]
    asked(work(), tmp_path, run="without")
    assert seeds[3:] == [None] * 3
    assert with_seed({"seed": 7}, None) == {"seed": 7}


def test_several_choices_with_log_probabilities_are_an_output_of_inspect() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    choices = [{"text": text, "finish_reason": "length", "logprobs": logprobs} for text in ("a", "b")]
    answer = HarnessAnswer("a", "length", None, json.dumps(choices), 3, 2)
    found = completion_of(answer, "name", "model")
    assert [(choice.index, choice.message.content) for choice in found.choices] == [(0, "a"), (1, "b")]
    assert found.choices[1].logprobs.content[0].logprob == -0.5
    assert found.usage.total_tokens == 5


def test_a_body_holds_what_a_server_takes_and_nothing_of_the_package() -> None:
    from openai import NOT_GIVEN

    request = {
        "model": "m",
        "messages": [],
        "tools": NOT_GIVEN,
        "timeout": 3,
        "extra_headers": {},
        "extra_body": {"top_k": 1},
    }
    assert body_of(request) == {"messages": [], "top_k": 1}


def test_a_prompt_beyond_the_context_is_an_output_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.errors import RequestRejected

    async def too_long(self: FakeEndpoint, call: Call, on_tokens: Any = None) -> Completion:
        raise RequestRejected("the prompt has 9 tokens", kind="too_long")

    monkeypatch.setattr(FakeEndpoint, "complete", too_long)
    log = asked(Task(dataset=capitals(1), solver=generate()), tmp_path)
    assert log.samples[0].output.stop_reason == "model_length"


def test_the_entry_point_is_where_inspect_looks(pytestconfig: pytest.Config) -> None:
    import importlib
    import tomllib

    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["inspect_ai"]["conserve"]
    assert importlib.import_module(named) is inspect_provider
