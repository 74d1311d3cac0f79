"""Programs that use OpenAI's batches, unchanged, while the API and the harvester are killed under them."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from conserve.config import load
from conserve.store.books.readings import read_jobs
from tests import commands
from tests.acceptance.test_batch_kills import free_port, kill, serve

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ENVIRONMENTS = commands.REPOSITORY / ".batch-clients"  # of requirements/batch-clients: make test-clients
SCRIPTS = Path(__file__).parent / "clients"
NAMES = ("litellm_batches", "inspect_batch", "curator_batch")
ROWS = 24
SLOW = "fake:request_ms=400&capacity=4"


def harvest(home: Path) -> "subprocess.Popen[str]":
    return commands.start(["-m", "conserve", "--home", str(home), "harvest", "--endpoint", SLOW])


def rows_done(home: Path) -> int:
    return sum(job.succeeded + job.failed for job in read_jobs(load({"home": home}), now=0.0))


@pytest.mark.parametrize("script", NAMES)
def test_it_gets_every_answer_through_kills(tmp_path: Path, script: str) -> None:
    python = ENVIRONMENTS / script / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{script} has no environment; run: make test-clients")
    home, port = tmp_path / "home", free_port()
    api, working = serve(home, port), harvest(home)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    client = subprocess.Popen(
        [python, str(SCRIPTS / f"{script}.py"), f"http://127.0.0.1:{port}/v1", str(ROWS), str(tmp_path / "files")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment,
        start_new_session=True,
    )  # fmt: skip
    commands.STARTED.append(client)
    for done in (1, ROWS // 2):
        commands.until(lambda done=done: rows_done(home) >= done, client)  # type: ignore[misc]
        kill(api)
        kill(working)
        api, working = serve(home, port), harvest(home)
    said, _ = client.communicate(timeout=600)
    assert (client.returncode, f"DONE {ROWS}" in said) == (0, True), said[-4000:]
    (job,) = read_jobs(load({"home": home}), now=0.0)
    assert (job.succeeded, job.failed) == (ROWS, 0), "one batch is one job"
    for running in (api, working):
        running.send_signal(signal.SIGTERM)
        assert "Traceback" not in commands.ended(running).stderr
