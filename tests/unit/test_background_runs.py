"""Runs that `Job.start` began: how they end, and what later waits learn of them."""

from typing import Any

import pytest

import conserve
from conserve.api import runs
from conserve.errors import SettingsError

QUESTIONS = [{"q": "a"}, {"q": "b"}]
NOWHERE = "ftp://nowhere"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> conserve.Job:
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?tokens=4")
    return conserve.open().submit(QUESTIONS, prompt="{{ q }}")


def run_of(job: conserve.Job) -> Any:
    return runs.under_way[job._settings.store_url, job.id]


def test_a_run_that_was_stopped_leaves_no_error_to_later_waits(job: conserve.Job) -> None:
    job.start(endpoint="fake:?start_ms=600000")
    job.stop()
    job.run(progress=False)
    assert job.wait() == "completed"
    assert len(list(job)) == 2


def test_a_later_run_makes_an_earlier_error_void(job: conserve.Job) -> None:
    job.start(endpoint=NOWHERE)
    assert isinstance(run_of(job).done.exception(), SettingsError)
    job.run(progress=False)
    assert job.wait() == "completed"
    assert len(list(job)) == 2


def test_every_wait_under_way_learns_of_an_error_and_later_ones_do_not(job: conserve.Job) -> None:
    first, second, later = (runs.Watch(job._settings, job.id) for _ in range(3))
    job.start(endpoint="fake:?start_ms=600000")
    for watch in (first, second):
        watch.look()
    run = run_of(job)
    job.stop()
    run.done = type(run.done)()
    run.done.set_exception(SettingsError("wrong"))
    for watch in (first, second):
        with pytest.raises(SettingsError, match="wrong"):
            watch.look()
        watch.look()
    later.look()
