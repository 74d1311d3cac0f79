"""Programs that use OpenAI's batches, unchanged, while the API and the harvester are killed under them."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conserve.config import load
from conserve.jobs.hooks import signature
from conserve.store.books.hooks import new_secret
from conserve.store.books.readings import read_jobs
from tests import commands
from tests.acceptance.test_batch_kills import kill, serve

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
def test_it_gets_every_answer_through_kills(tmp_path: Path, script: str, port: int) -> None:
    python = ENVIRONMENTS / script / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{script} has no environment; run: make test-clients")
    home = tmp_path / "home"
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


VERIFY = """
import json, sys
from standardwebhooks import Webhook, WebhookVerificationError
secret, body, headers = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
assert Webhook(secret).verify(body, headers)["type"] == "batch.completed"
try:
    Webhook(secret).verify(body + " ", headers)
except WebhookVerificationError:
    print("DONE")
"""


def test_the_library_of_standard_webhooks_accepts_a_message() -> None:
    python = ENVIRONMENTS / "standardwebhooks" / "bin" / "python"
    if not python.exists():
        pytest.skip("standardwebhooks has no environment; run: make test-clients")
    secret, body = new_secret(), '{"type": "batch.completed"}'
    headers = signature.headers(secret, "msg_1", body, now=time.time())
    words = [python, "-c", VERIFY, secret, body, json.dumps(headers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "DONE\n", done.stderr
