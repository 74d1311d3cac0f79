"""Schemathesis over the description of the Batch API's routes: whatever it makes up, the answer is no 500."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import commands
from tests.acceptance.test_batch_clients import ENVIRONMENTS
from tests.acceptance.test_batch_kills import serve

pytestmark = [pytest.mark.full, pytest.mark.timeout(7200)]

EXAMPLES = os.environ.get("SCHEMA_EXAMPLES", "100")  # of each operation; 1,000 make more than 10,000 cases
CHECKS = (
    "not_a_server_error,content_type_conformance,response_schema_conformance,response_headers_conformance"
)
STREAMS = "/events$"  # they stay open until their batch ends


def test_no_made_up_request_is_answered_with_a_500(tmp_path: Path, port: int) -> None:
    program = ENVIRONMENTS / "schemathesis" / "bin" / "schemathesis"
    if not program.exists():
        pytest.skip("schemathesis has no environment; run: make test-clients")
    api = serve(tmp_path / "home", port)
    words = ["--exclude-path-regex", STREAMS, "--checks", CHECKS, "-n", EXAMPLES, "--seed", "7", "--no-color"]
    done = subprocess.run(
        [program, "run", f"http://127.0.0.1:{port}/openapi.json", *words, "--continue-on-failure"],
        capture_output=True, text=True, cwd=tmp_path, timeout=7000,
    )  # fmt: skip
    api.send_signal(signal.SIGTERM)
    ended = commands.ended(api)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr[-4000:]
    assert done.returncode == 0, done.stdout[-6000:] + json.dumps(done.stderr[-500:])
