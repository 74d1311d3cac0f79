"""lm-eval over the durable queue scores as lm-eval does without one, and goes on after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-evals")

import conserve
from conserve.config import load
from conserve.errors import EvaluationUnready, PackageMissing, RowsFailed, SettingsError, UsageError
from conserve.evals.paired import Standard
from conserve.evals.plan import ModelTarget, SuitePlan
from conserve.nightly.harness import lm_eval_suite
from conserve.nightly.harness.libraries import require
from conserve.nightly.harness.lm_eval_model import ConserveLM
from conserve.nightly.harness.lm_eval_suite import LmEvalSuite
from tests.evals.evaluating import evaluated, scores
from tests.evals.reference import Reference

FAKE = "fake:?tokens=6"
STANDARD = Standard(effect=0.05)
ALL = ["knows", "says", "counts", "reads"]


def queued(characters: Path, *, run: str = "night", endpoint: str = FAKE, **more: Any) -> ConserveLM:
    return ConserveLM(endpoint=endpoint, tokenizer=str(characters), run=run, **more)


def reference(characters: Path) -> Reference:
    from transformers import AutoTokenizer

    return Reference(AutoTokenizer.from_pretrained(characters), window=2048)


@pytest.mark.parametrize("scoring", ["auto", "echo"])
@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_those_of_a_model_without_a_queue(
    characters: Path, tasks: Path, scoring: Any, *, chat: bool
) -> None:
    names = ["knows", "says", "counts"] if chat else ALL
    more = {"apply_chat_template": chat, "fewshot_as_multiturn": chat}
    found = scores(evaluated(queued(characters, scoring=scoring), tasks, names, **more))
    wanted = scores(evaluated(reference(characters), tasks, names, **more))
    assert found["samples"].keys() == set(names)
    assert found == wanted


def test_all_tasks_of_a_call_are_one_job_in_prefix_order_and_a_second_try_asks_nothing(
    characters: Path, tasks: Path
) -> None:
    first = scores(evaluated(queued(characters), tasks, ["knows", "says", "counts"]))
    jobs = {job.id: job.progress() for job in conserve.open().jobs()}
    assert len(jobs) == 2  # of log-likelihoods and of texts
    assert {job.row_order for job in jobs.values()} == {"prefix"}
    assert scores(evaluated(queued(characters), tasks, ["knows", "says", "counts"])) == first
    assert {job.id: job.progress() for job in conserve.open().jobs()} == jobs


def test_choices_of_one_token_are_one_row_a_question(characters: Path, tasks: Path) -> None:
    evaluated(queued(characters), tasks, ["knows"])
    (job,) = conserve.open().jobs()
    assert job.progress().rows == 4


def test_a_limit_and_repeats_ask_as_many_rows(characters: Path, tasks: Path) -> None:
    evaluated(queued(characters), tasks, ["dreams"], limit=3)
    (job,) = conserve.open().jobs()
    assert job.progress().rows == 3 * 2


def test_a_context_that_is_too_long_loses_its_beginning(characters: Path, tasks: Path) -> None:
    found = scores(evaluated(queued(characters, max_length=30), tasks, ["knows", "counts"]))
    bodies = [
        json.loads(row["prompt"]) for job in conserve.open().jobs() for row in job.results(with_prompts=True)
    ]
    assert max(map(len, bodies)) <= 29
    assert found["results"]["knows"]["alias"] == "knows"


def test_a_row_that_fails_ends_the_evaluation_in_one_sentence(characters: Path, tasks: Path) -> None:
    with pytest.raises(RowsFailed, match=r"6 rows of job lm-eval-.* failed, row 0 .* start the same run"):
        evaluated(queued(characters, endpoint=f"{FAKE}&reject=%5B"), tasks, ["counts"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"scoring": "guess"}, "scoring is auto, echo or next-token"),
        ({"tokenizer": "nowhere/at/all"}, "there is no tokenizer of nowhere/at/all"),
    ],
)
def test_a_mistake_is_one_sentence(characters: Path, arguments: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ConserveLM(**{"endpoint": FAKE, "tokenizer": str(characters), **arguments})


def test_a_library_that_is_missing_is_named_with_its_command() -> None:
    with pytest.raises(PackageMissing, match=r"no_such_harness is not installed; run: .*evals"):
        require("lm_eval", "no_such_harness")


def command(characters: Path, tasks: Path, output: Path, endpoint: str) -> list[str]:
    return [
        sys.executable, "-m", "tests.evals.evaluating", endpoint, str(characters), str(tasks), ",".join(ALL),
        str(output),
    ]  # fmt: skip


def answered() -> int:
    """Rows that have a result."""
    return sum(job.progress().done for job in conserve.open().jobs())


def kept() -> dict[tuple[str, int], tuple[Any, ...]]:
    """Rows that have a result, and when they got it."""
    return {
        (job.id, row["row_index"]): (row["finished_at"], row["attempts"], row["text"])
        for job in conserve.open().jobs()
        for row in job.results()
    }


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_killed_it_has_the_same_scores_and_asks_nothing_again(
    characters: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    wanted = scores(evaluated(reference(characters), tasks, ALL))
    monkeypatch.setenv("CONSERVE_LEASE_S", "1")
    before: dict[tuple[str, int], tuple[Any, ...]] = {}
    for _ in range(kills):
        slow = command(characters, tasks, tmp_path / "none", "fake:?tokens=6&capacity=1&request_ms=300")
        running = subprocess.Popen(slow, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while running.poll() is None and answered() <= len(before):
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        now = kept()
        assert before.items() <= now.items()
        before = now
    subprocess.run(command(characters, tasks, tmp_path / "scores", FAKE), check=True, capture_output=True)
    after = kept()
    assert before.items() <= after.items()
    assert len({job for job, _ in after}) == 3, "log-likelihoods, rolling ones, texts"
    assert json.loads((tmp_path / "scores").read_text()) == json.loads(json.dumps(wanted, default=str))


def test_beside_a_server_the_settings_model_is_not_taken_for_its_own() -> None:
    suite = SuitePlan(name="sums", kind="lm-eval", options={"tasks": ["counts"]}, standard=STANDARD)
    night = Mock(suite=suite, settings=load(), target=ModelTarget(answered_by="serve"))
    with pytest.raises(EvaluationUnready, match="no `conserve serve` over this store says which model"):
        LmEvalSuite().run(night)


def test_a_file_that_is_missing_is_named(characters: Path, tasks: Path, tmp_path: Path) -> None:
    gone = (tasks / "counts.yaml").read_text().replace("counts.jsonl", "gone.jsonl")
    (tmp_path / "gone.yaml").write_text(gone.replace('"counts"', '"gone"'))
    suite = SuitePlan(
        name="sums", kind="lm-eval", options={"tasks": ["gone"], "include": "."}, standard=STANDARD
    )
    LmEvalSuite().check(suite, tmp_path)
    with pytest.raises(EvaluationUnready, match=r"suites.sums: the data of gone cannot be read .*gone.jsonl"):
        lm_eval_suite.evaluation_results(queued(characters), suite, suite.options, tmp_path)
    with pytest.raises(SettingsError, match="there is no task 'mmlu_of_ours'"):
        LmEvalSuite().check(
            SuitePlan(name="s", kind="lm-eval", options={"tasks": ["mmlu_of_ours"]}, standard=STANDARD),
            tmp_path,
        )
