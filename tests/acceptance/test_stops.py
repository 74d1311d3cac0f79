"""Stopping a run from outside: signals, a full disk, a store that may not be written."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.aimed import Shot
from tests.acceptance.kill_harness import Harness
from tests.commands import ended, process
from tests.tiers import in_full

LONG = "token_ms=1&tokens=150&capacity=16"
PAUSES = (
    16 * 20
)  # in lockstep: 16 rows begin and have had about 18 tokens each, too few to be saved by the way
UNDER_WAY = {"at": "conserve.endpoints.fake:FakeEndpoint._pause", "call": PAUSES}


@pytest.mark.parametrize("number", [signal.SIGINT, *in_full(signal.SIGTERM)])
def test_the_first_signal_saves_progress_and_the_next_run_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(16)], script=LONG)
    harness.submit()
    done = ended(harness.start(Shot(number=number, **UNDER_WAY)))
    assert done.returncode == 130
    assert "saving progress" in done.stderr
    assert "Traceback" not in done.stderr
    assert harness.reading().running == 0
    assert harness.finish() == 0
    harness.check()
    assert harness.reading().resumed_tokens >= PAUSES - 2 * 16, "every token but those on their way"


def test_a_second_ctrl_c_exits_at_once(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(16)], script=LONG)
    harness.submit()
    saving = Shot(at="conserve.jobs.harvest.ledger:Ledger.give_back", number=signal.SIGINT, holds=True)
    done = ended(harness.start(Shot(number=signal.SIGINT, **UNDER_WAY), saving))
    assert done.returncode == 130, "although saving would have taken for ever"
    assert harness.finish() == 0
    harness.check()


def small_files() -> None:
    """Let no file of the child grow beyond what a full disk would allow."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(5_000)], script="tokens=8")
    harness.submit()
    full = process("--home", str(harness.home), "run", "--endpoint", "fake:?tokens=8", preexec_fn=small_files)
    assert full.returncode == 1
    assert "no space left" in full.stderr
    assert "Traceback" not in full.stderr
    assert harness.finish() == 0
    harness.check()


def test_submit_on_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", ["q"])
    harness.submit()
    rows = "".join(json.dumps({"q": os.urandom(100).hex()}) + "\n" for _ in range(5000))
    arguments = ("--home", str(harness.home), "submit", "-", "--prompt", "{{ q }}")
    full = process(*arguments, stdin=rows, preexec_fn=small_files)
    assert (full.returncode, full.stdout) == (1, "")
    assert "no space left" in full.stderr
    assert [path.name for path in (harness.home / "jobs").iterdir()] == [harness.job_id]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_a_store_that_may_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", ["q"])
    harness.submit()
    for path in (tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o055)
    site = [path for path in sys.path if path]
    program = "import sys; sys.argv[0] = 'conserve'; from conserve.__main__ import main; main()"
    for arguments in (["run", "--endpoint", "fake:"], ["submit", "-", "--prompt", "x"]):
        done = subprocess.run(
            ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-c", program, *arguments],
            env={**os.environ, "CONSERVE_HOME": str(harness.home), "PYTHONPATH": ":".join(site)},
            input='{"q": 1}\n',
            capture_output=True,
            text=True,
            check=False,
        )
        if "Permission denied" in done.stderr and "conserve:" not in done.stderr:
            pytest.skip("the other user cannot read the interpreter")
        assert done.returncode == 1
        assert "CONSERVE_HOME" in done.stderr
        assert "Traceback" not in done.stderr
    assert harness.finish() == 0
    harness.check()
