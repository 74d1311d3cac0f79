"""Jobs of a night are bound to the model that it asks, whose answers alone it scores."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import conserve
from conserve.config import load
from conserve.errors import EvaluationUnready, JobRefused
from conserve.evals.outcome import AnswerOrigins, SuiteOutcome
from conserve.evals.plan import ModelTarget
from conserve.evals.plan_file import plan_of
from conserve.jobs.harvest.services import announce
from conserve.nightly import targets
from conserve.nightly.facts import facts_of
from conserve.nightly.harness.model_access import alone, settings_of_target
from conserve.nightly.run_jobs import AskedJob, SuiteNight
from conserve.nightly.targets import bound_to, model_lookup
from tests import commands, nightly_files
from tests.acceptance.scripted_server import Script, ScriptedServer

MINE, OTHER = "fake:?model=mine", "fake:?model=other"
TARGET = ModelTarget(model="mine", endpoint=MINE)
ROWS = [{"text": "a"}]


@pytest.mark.parametrize(
    ("target", "model"),
    [
        (ModelTarget(), "smollm2-demo"),
        (ModelTarget(model="m"), "m"),
        (ModelTarget(model="m", endpoint="http://127.0.0.1:9"), "m"),
        (ModelTarget(endpoint="http://127.0.0.1:9"), None),
        (ModelTarget(endpoint="fake:"), None),
        (ModelTarget(answered_by="serve"), None),
        (ModelTarget(model="m", answered_by="serve"), "m"),
    ],
)
def test_jobs_are_bound_to_the_model_that_is_asked(target: ModelTarget, model: str | None) -> None:
    assert bound_to(load(), target) == model


def test_the_settings_model_is_no_server_s_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSERVE_MODEL", "of-settings")
    assert bound_to(load(), ModelTarget()) == "of-settings"
    assert bound_to(load(), ModelTarget(answered_by="serve")) is None


def test_an_endpoint_without_a_model_is_asked_which_it_has() -> None:
    with ScriptedServer() as server:
        assert bound_to(load(), ModelTarget(endpoint=server.url)) == "served"
        assert bound_to(load(), ModelTarget(model="m", endpoint=server.url)) == "m"


def test_a_night_on_a_server_of_several_models_begins_only_with_one_of_them(tmp_path: Path) -> None:
    file = nightly_files.written(tmp_path, rows=2)
    with ScriptedServer(Script(models=("a", "b"), coserves=False)) as server:
        done = commands.conserve("eval", "run", str(file), "--endpoint", server.url)
        assert (done.returncode, f"{server.url} serves 2 models (a, b); name" in done.stderr) == (2, True)
        assert "there are no runs" in commands.conserve("eval", "list").stderr
        assert bound_to(load(), ModelTarget(model="b", endpoint=server.url)) == "b"


def suite_night(folder: Path, wait: Callable[..., object], target: ModelTarget = TARGET) -> SuiteNight:
    """A night of one suite whose rounds are this function."""
    (suite,), rounds, settings = plan_of(nightly_files.PLAN).suites, Mock(wait=wait), load()
    return SuiteNight(
        settings,
        rounds,
        run_id="r",
        label="sql",
        suite=suite,
        target=target,
        folder=folder,
        model_asked=model_lookup(settings),
    )


def test_a_night_asks_a_server_once_which_model_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suites whose threads begin at one moment get one answer."""
    asked: list[ModelTarget] = []
    monkeypatch.setattr(targets, "bound_to", lambda settings, target: asked.append(target))
    file = nightly_files.written(tmp_path, suites=["sql", "python", "schema"], rows=4)
    done = commands.conserve("eval", "run", str(file), CONSERVE_ENDPOINT="fake:?tokens=8")
    assert done.returncode == 0, done.stderr
    assert asked == [ModelTarget()]


def test_a_harvester_of_another_model_answers_no_row_of_a_night(tmp_path: Path) -> None:
    def answered(asked: AskedJob) -> None:
        commands.conserve("run", CONSERVE_ENDPOINT=OTHER)
        conserve.open().job(asked.job_id).run(endpoint=MINE, progress=False)

    night = suite_night(tmp_path, answered)
    job = night.submit_once("key", ROWS, prompt="{{ text }}")
    night.await_answers(job)
    assert [row["model"] for row in job.results()] == ["mine"]


def test_a_job_for_a_judge_is_bound_to_the_judge(tmp_path: Path) -> None:
    night = suite_night(tmp_path, Mock(), ModelTarget(answered_by="serve"))
    asked = night.submit_once("key", ROWS, prompt="{{ text }}")
    judged = night.submit_once("judge", ROWS, prompt="{{ text }}", target=ModelTarget(model="judge"))
    assert [job.progress().model for job in (asked, judged)] == [None, "judge"]


def test_a_suite_that_another_model_has_answered_fails(tmp_path: Path) -> None:
    night = suite_night(tmp_path, Mock())
    job = night.submit_once("key", ROWS, prompt="{{ text }}")
    job.run(endpoint=OTHER, rebind=True, progress=False)
    said = rf"^other answered job {job.id}, and this run has mine; .* FILE --new$"
    with pytest.raises(JobRefused, match=said):
        night.await_answers(job)


@pytest.mark.parametrize("wait", [False, True])
def test_jobs_of_a_harness_are_bound_to_its_model(wait: bool) -> None:
    queue, other = (alone("test", model=model, run="night", wait=wait) for model in ("mine", "other"))
    job = queue.submit_once("key", ROWS, prompt="{{ text }}")
    assert job.progress().model == "mine"
    assert queue.submit_once("key", ROWS, prompt="{{ text }}") == job
    with pytest.raises(JobRefused, match=r"the run night has asked mine, and this is other; .* run=NAME"):
        other.submit_once("key", ROWS, prompt="{{ text }}")


def test_a_harness_that_names_no_model_waits_for_any() -> None:
    job = alone("test", run="night", wait=True).submit_once("key", ROWS, prompt="{{ text }}")
    assert job.progress().model is None


BESIDE = ModelTarget(answered_by="serve")


def test_where_a_server_of_the_store_answers_its_tokens_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSERVE_MODEL", "of-settings")
    conserve.open()
    with ScriptedServer() as server, announce(load(), server.url):
        asked = settings_of_target(load(), BESIDE)
        assert (asked.model, asked.endpoint) == (None, server.url)
        with ScriptedServer(Script(models=("other",))) as other, announce(load(), other.url):
            with pytest.raises(EvaluationUnready, match="have the models other, served; name the one"):
                settings_of_target(load(), BESIDE)
            for model, at in (("served", server.url), ("other", other.url)):
                asked = settings_of_target(load(), ModelTarget(model=model, answered_by="serve"))
                assert (asked.model, asked.endpoint) == (model, at)


def test_tokens_of_an_adapter_are_those_of_the_server_that_has_it() -> None:
    conserve.open()
    with (
        ScriptedServer(Script(models=("base", "first"))) as one,
        ScriptedServer(Script(models=("base", "second"))) as other,
        announce(load(), one.url),
        announce(load(), other.url),
    ):
        for model, at in (("first", one.url), ("second", other.url), ("third", None)):
            asked = settings_of_target(load(), ModelTarget(model=model, answered_by="serve"))
            assert (asked.model, asked.endpoint) == (model, at)
        assert one.gets == other.gets == ["/v1/models"] * 3, "once each time"


def test_without_a_server_the_model_of_the_settings_is_not_taken_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONSERVE_MODEL", "of-settings")
    conserve.open()
    with announce(load(), "http://127.0.0.1:9"), pytest.raises(EvaluationUnready, match="start one, or name"):
        settings_of_target(load(), BESIDE)
    named = settings_of_target(load(), ModelTarget(model="m", answered_by="serve"))
    assert (named.model, named.endpoint) == ("m", None)
    assert settings_of_target(load(), BESIDE, tokenizer="folder").endpoint is None


def test_facts_of_a_server_of_the_store_are_those_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSERVE_MODEL", "of-settings")
    monkeypatch.setenv("CONSERVE_ENGINE_ARGS", "--seed 3")
    outcome = SuiteOutcome(items=(), origins=AnswerOrigins({"digest"}, {"served"}))
    told = {"conserve": conserve.__version__, "engine": "digest", "served_model": "served"}
    assert facts_of(load(), BESIDE, outcome) == told
    assert facts_of(load(), ModelTarget(model="m", answered_by="serve"), outcome) == {"model": "m", **told}
    asked = {"endpoint": "fake:", "flags": "--seed 3"}
    assert facts_of(load(), ModelTarget(endpoint="fake:"), outcome) == {**asked, **told}


@pytest.mark.parametrize(("version", "told"), [("0.31.0", {"vllm": "0.31.0"}), (None, {})])
def test_a_server_of_this_machine_tells_its_version_whatever_the_proxy(
    version: str | None, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with ScriptedServer(Script(version=version)) as server:
        found = facts_of(load(), ModelTarget(endpoint=f"{server.url}/v1/"), SuiteOutcome(items=()))
        assert {name: value for name, value in found.items() if name == "vllm"} == told
