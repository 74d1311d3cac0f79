"""Stopping a run from outside: signals, a full disk, a store that may not be written."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forks
from tests.acceptance.kill_harness import Harness
from tests.commands import Done, ended
from tests.tiers import in_full

LONG = "token_ms=1&tokens=150&capacity=16"
PAUSES = (
    16 * 20
)  # in lockstep: 16 rows begin and have had about 18 tokens each, too few to be saved by the way
UNDER_WAY = {"at": "conserve.endpoints.fake:FakeEndpoint._pause", "call": PAUSES}


@pytest.mark.parametrize("number", [signal.SIGINT, *in_full(signal.SIGTERM)])
def test_the_first_signal_saves_progress_and_the_next_run_goes_on(
    tmp_path: Path, forks: Forks, number: signal.Signals
) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(16)], script=LONG, forks=forks)
    harness.submit()
    done = ended(harness.fork(Shot(number=number, **UNDER_WAY)))
    assert done.returncode == 130
    assert "saving progress" in done.stderr
    assert "Traceback" not in done.stderr
    assert harness.reading().running == 0
    assert harness.finish() == 0
    harness.check()
    assert harness.reading().resumed_tokens >= PAUSES - 2 * 16, "every token but those on their way"


def test_a_second_ctrl_c_exits_at_once(tmp_path: Path, forks: Forks) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(16)], script=LONG, forks=forks)
    harness.submit()
    saving = Shot(at="conserve.jobs.harvest.ledger:Ledger.give_back", number=signal.SIGINT, holds=True)
    first = Shot(number=signal.SIGINT, **UNDER_WAY)
    done = ended(harness.fork(first, saving, conserve__cli__signals__SAME_S=0.0))
    assert done.returncode == 130, "although saving would have taken for ever"
    assert harness.finish() == 0
    harness.check()


LIMITED = {"tests.acceptance.privations:let_no_file_grow_beyond": "300000"}
"""Limit on the size of files, as a full disk sets one."""


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, forks: Forks) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(5_000)], script="tokens=8", forks=forks)
    harness.submit()
    full = ended(harness.fork(also=LIMITED))
    assert full.returncode == 1
    assert "no space left" in full.stderr
    assert "Traceback" not in full.stderr
    assert harness.finish() == 0
    harness.check()


def test_submit_on_a_full_disk_leaves_nothing_behind(tmp_path: Path, forks: Forks) -> None:
    harness = Harness(tmp_path / "home", ["q"], forks=forks)
    harness.submit()
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"q": os.urandom(100).hex()}) + "\n" for _ in range(5000)))
    submitting = ("submit", "-", "--prompt", "{{ q }}")
    full = ended(harness.fork(words=submitting, also=LIMITED, source=source))
    assert (full.returncode, full.stdout) == (1, "")
    assert "no space left" in full.stderr
    assert [path.name for path in (harness.home / "jobs").iterdir()] == [harness.job_id]


def open_to_others(tmp_path: Path, forks: Forks) -> Harness:
    """A store with a job, in a folder that every user reaches."""
    harness = Harness(tmp_path / "home", ["q"], forks=forks)
    harness.submit()
    for path in (harness.home, tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o055)
    return harness


def as_another_user(harness: Harness, words: Sequence[str], source: Path) -> Done:
    """Run a command without the rights of root; skips the test where that user cannot run Python."""
    other = {"tests.acceptance.privations:become_user": "65534"}
    done = ended(harness.fork(words=words, also=other, source=source))
    if "Permission denied" in done.stderr and "conserve:" not in done.stderr:
        pytest.skip("the other user cannot read the interpreter")
    return done


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_store_that_may_not_be_written_is_one_sentence(tmp_path: Path, forks: Forks) -> None:
    harness = open_to_others(tmp_path, forks)
    source = tmp_path / "rows.jsonl"
    source.write_text('{"q": 1}\n')
    for arguments in (["run", "--endpoint", "fake:"], ["submit", "-", "--prompt", "x"]):
        done = as_another_user(harness, arguments, source)
        assert done.returncode == 1
        assert "CONSERVE_HOME" in done.stderr
        assert "Traceback" not in done.stderr
    assert harness.finish() == 0
    harness.check()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_store_that_may_not_be_entered_is_one_sentence(tmp_path: Path, forks: Forks) -> None:
    harness = open_to_others(tmp_path, forks)
    harness.home.chmod(0o700)
    source = tmp_path / "rows.jsonl"
    source.write_text('{"q": 1}\n')
    for words in (
        *(["status"], ["status", "--json"], ["jobs"], ["results", "last"], ["check"], ["show", "last", "0"]),
        *(["forecast"], ["store", "size"], ["fleet"], ["keys", "list"], ["hooks", "list"], ["pause", "last"]),
        *(["sql", "select 1"], ["top", "--once"], ["run", "--endpoint", "fake:"]),
        ["submit", "-", "--prompt", "{{ q }}"],
    ):
        done = as_another_user(harness, words, source)
        assert (done.returncode, done.stdout) == (1, ""), words
        said = [line for line in done.stderr.splitlines() if line.startswith("conserve:")]
        assert len(said) == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "Permission denied" in said[0]
        assert "CONSERVE_HOME" in said[0]
