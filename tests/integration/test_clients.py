"""Programs that people point at an OpenAI-compatible server, against `conserve serve`, with rows in the queue."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_serve import KEY, MODEL, Service, rows_file

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)  # of requirements/clients.txt
SCRIPTS = Path(__file__).parent / "clients"
NEEDS = {
    "openai_sdk": "openai",
    "litellm_sdk": "litellm",
    "inspect_evals": "inspect_ai",
    "lm_evaluation": "lm_eval",
}


@pytest.fixture(scope="module")
def busy(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """A server with rows to run, and their job."""
    started = Service(tmp_path_factory.mktemp("clients") / "home", demo_cache)
    try:
        started.until(lambda: started.says(f"serving {MODEL}"))
        rows = rows_file(started.home.parent, 2000, max_tokens=60, ignore_eos=True)
        job_id = started.conserve("submit", str(rows))
        started.until(lambda: started.job(job_id)["running"])
        yield started, job_id
    finally:
        started.kill()


@pytest.mark.parametrize("script", NEEDS)
def test_it_is_served_as_by_vllm_while_rows_run(
    busy: tuple[Service, str], demo_model: Path, script: str
) -> None:
    if subprocess.run([PYTHON, "-c", f"import {NEEDS[script]}"], capture_output=True).returncode:
        pytest.skip(f"{NEEDS[script]} is not installed: see requirements/clients.txt")
    service, job_id = busy
    before = service.report()["offline"]["tokens"]
    done = subprocess.run(
        [PYTHON, str(SCRIPTS / f"{script}.py"), f"{service.url}/v1", KEY, MODEL, str(demo_model)],
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert service.report()["offline"]["tokens"] > before, "no row ran meanwhile"
    job = service.job(job_id)
    assert (job["failed"], job["state"]) == (0, "running")
