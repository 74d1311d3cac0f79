"""The run that `conserve eval run` goes on with, and what it gives up."""

import json
import os
from pathlib import Path

import pytest

import conserve
from conserve.evals.plan import ModelTarget
from conserve.evals.plan_file import plan_of
from conserve.evals.records import RunState
from conserve.nightly import keeping
from conserve.nightly.beginning import begun
from conserve.nightly.holding import held
from conserve.nightly.running import Asking, overridden, plan_of_file
from conserve.store.files import nights
from tests import commands, nightly_files
from tests.commands import Done

GOOD, NOWHERE = "fake:?tokens=8", "http://127.0.0.1:9"
ROWS = 6


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONSERVE_FAKE", "1")
    return nightly_files.written(tmp_path, rows=ROWS)


def home() -> Path:
    return conserve.open().path


def night(file: Path, *flags: str) -> Done:
    return commands.conserve("eval", "run", str(file), *flags)


def states() -> list[str]:
    """States of the runs as `eval list` and SQL show them."""
    listed = json.loads(commands.conserve("eval", "list", "--json").stdout)[::-1]
    asked = conserve.open().sql("select state from eval_runs order by began_at, run_id").fetchall()
    assert [run["state"] for run in listed] == [state for (state,) in asked]
    return [run["state"] for run in listed]


def test_an_unfinished_run_that_is_too_old_is_given_up(file: Path) -> None:
    settings = conserve.open()._settings
    asking = Asking(file=file, overrides={})
    plan, text = plan_of_file(file)
    old = begun(settings, asking, plan, text, now=1e9, say=print)
    assert begun(settings, asking, plan, text, now=1e9 + plan.resume_s, say=print) == old
    new = begun(settings, asking, plan, text, now=1e9 + plan.resume_s + 1, say=print)
    assert new.id != old.id
    assert keeping.read(home(), old.id).state is RunState.GIVEN_UP
    anew = Asking(file=file, overrides={}, anew=True)
    assert begun(settings, anew, plan, text, now=2e9, say=print) != new


def test_a_night_at_a_wrong_address_does_not_keep_it(file: Path) -> None:
    wrong = night(file, "--endpoint", NOWHERE)
    assert wrong.returncode == 1, wrong.stderr
    assert states() == ["stopped"]
    right = night(file, "--endpoint", GOOD)
    assert right.returncode == 0, right.stderr
    assert "is given up; its open jobs are cancelled" in right.stderr
    assert "going on with" not in right.stderr
    assert states() == ["given up", "finished"]
    assert [job.status for job in conserve.open().jobs()] == ["cancelled", "completed"]


def test_the_same_night_at_an_address_that_answers_again_goes_on(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSERVE_ENDPOINT", NOWHERE)
    assert night(file).returncode == 1
    monkeypatch.setenv("CONSERVE_ENDPOINT", GOOD)
    done = night(file)
    assert done.returncode == 0, done.stderr
    assert "going on with" in done.stderr
    assert states() == ["finished"]


def test_a_night_with_answers_keeps_its_file_and_flags(file: Path) -> None:
    settings, asking = conserve.open()._settings, Asking(file=file, overrides={"endpoint": GOOD})
    plan, text = plan_of_file(file)
    run = begun(settings, asking, plan, text, now=1e9, say=print)
    job = conserve.open().submit([{"q": "x"}, {"q": "y"}], prompt="{{ q }}", tags={"eval": run.id})
    changed = Asking(file=file, overrides={"endpoint": "fake:"})
    said: list[str] = []
    job.run(endpoint=GOOD, progress=False)
    assert begun(settings, changed, plan, text, now=1e9 + 1, say=said.append) == run
    assert "begin another with: --new" in said[-1]


def test_a_state_is_running_while_a_process_is_at_it(file: Path) -> None:
    settings, asking = conserve.open()._settings, Asking(file=file, overrides={})
    plan, text = plan_of_file(file)
    begun(settings, asking, plan, text, now=1e9, say=print)
    with held(home(), plan.name, "queue", print):
        assert nights.signed_by(home(), plan.name)[1] == os.getpid()
        assert states() == ["running"]
    assert states() == ["stopped"]
    lock = nights.lock_file(home(), plan.name)
    for signed, state in (("elsewhere 1", "running"), ("elsewhere", "stopped"), ("", "stopped")):
        lock.write_text(signed)
        assert states() == [state]


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({"model": "x"}, ("x", "http://a", (), "run")),
        ({"endpoint": "http://b"}, ("m", "http://b", (), "run")),
        ({"model": "x", "endpoint": "http://b"}, ("x", "http://b", (), "run")),
    ],
)
def test_a_flag_replaces_what_it_names_alone(
    flags: dict[str, str | int], asked: tuple[str, str, tuple[str, ...], str]
) -> None:
    plan = plan_of(f'{nightly_files.PLAN}[model]\nmodel = "m"\nendpoint = "http://a"\n')
    (target,) = overridden(plan, flags).targets
    assert (target.model, target.endpoint, target.engine_args, target.answered_by) == asked


def test_an_endpoint_needs_no_flags_of_an_engine() -> None:
    top = '[model]\nmodel = "m"\nengine_args = ["--max-model-len", "512"]\n'
    plan = plan_of(f"{nightly_files.PLAN}{top}")
    assert overridden(plan, {"model": "x"}).targets[0].engine_args == ("--max-model-len", "512")
    assert overridden(plan, {"endpoint": "http://b"}).targets == (
        ModelTarget(model="m", endpoint="http://b"),
    )


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ('endpoint = "localhost:8000"', "model.endpoint: 'localhost:8000' is no address"),
        ('endpoint = "http://a"\nengine_args = ["--seed", "1"]', "model.engine_args are for an engine"),
    ],
)
def test_a_check_finds_an_endpoint_that_cannot_be_asked(file: Path, entries: str, fault: str) -> None:
    file.write_text(f"{file.read_text()}\n[model]\n{entries}\n")
    done = night(file, "--check")
    assert done.returncode == 2
    assert fault in done.stderr
