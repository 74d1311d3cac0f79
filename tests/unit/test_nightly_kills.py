"""kill -9 in the middle of `conserve eval run`: the same scores to the last digit, no answer asked for twice."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import conserve
from conserve.config import load
from conserve.evals.records import RunRecord, RunState
from conserve.nightly import keeping
from conserve.store.books.readings import read_jobs
from tests import commands, nightly_files
from tests.conftest import StartForked

ROWS = 15
SUITES = ("sql", "judge")


def answers() -> dict[tuple[str, int], Any]:
    """Results that are kept, and when each was finished."""
    rows = conserve.open().sql("select job_id, row_index, finished_at from results").fetchall()
    return {(job_id, row_index): finished_at for job_id, row_index, finished_at in rows}


def done() -> int:
    return sum(job.done for job in read_jobs(load(), now=time.time()))


def scores(run: RunRecord) -> dict[str, Any]:
    return {suite.name: suite.scores for suite in run.suites}


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.full)])
def test_a_killed_night_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, forked: StartForked
) -> None:
    monkeypatch.setenv("CONSERVE_FAKE", "1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?tokens=8")
    file = nightly_files.written(tmp_path, suites=SUITES, rows=ROWS)
    first = commands.conserve("--home", str(whole), "eval", "run", str(file))
    assert first.returncode == 0, first.stderr
    expected = scores(keeping.resolve(whole, "last"))

    monkeypatch.setenv("CONSERVE_HOME", str(killed))
    rng = random.Random(kills)
    in_all = 3 * ROWS  # the judge asks once more about each answer of its suite
    for kill in range(kills):
        before = answers() if killed.exists() else {}
        enough = min(in_all - 10, len(before) + rng.randint(0, 2 * in_all // kills))
        slow = {"CONSERVE_ENDPOINT": "fake:?tokens=8&token_ms=20&capacity=4"}
        running = forked("eval", "run", str(file), **slow)
        enough_done = lambda enough=enough: bool(keeping.runs(killed)) and done() >= enough  # noqa: E731
        commands.until(enough_done, running, every_s=0.05)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        kept = answers()
        assert before.items() <= kept.items(), f"kill {kill}: an answer that was kept was asked for again"
    before = answers()
    last = commands.conserve("eval", "run", str(file))
    assert last.returncode == 0, last.stderr
    assert "going on with" in last.stderr
    (run,) = keeping.runs(killed)
    assert run.state is RunState.FINISHED
    assert scores(run) == expected
    assert before.items() <= answers().items()
    assert len(answers()) == in_all
    assert len(conserve.open().jobs()) == 3, "a job for each question, not for each try"
