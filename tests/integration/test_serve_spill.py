"""`conserve serve --kv-spill`: rows under way at SIGTERM go on after the next start with the KV they had."""

import json
import signal
from pathlib import Path

import pytest

from conserve.engine.runtime.spill_file import INDEX, LOCK
from tests import patient
from tests.integration.test_serve import KEY, MODEL, Service

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

ROWS = 4
PROMPT_TOKENS = 600  # at least: each word is one or more
MAX_TOKENS = 240


def long_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for row in range(ROWS):
            words = " ".join(str(row * 1000 + number) for number in range(PROMPT_TOKENS // 3))
            body = {
                "messages": [{"role": "user", "content": f"Go on counting: {words}"}],
            }
            body |= {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            line = {"custom_id": str(row), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def test_a_restarted_server_takes_in_what_rows_had(demo_cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    # Not the policy that goes by predictions: where others compute too, what it learns may hold rows back for long.
    flags = ("--policy", "priority", "--kv-checkpoint", "adaptive", "--kv-spill", str(folder))
    service = Service(tmp_path / "home", demo_cache, *flags)
    try:
        service.until(lambda: service.says(f"serving {MODEL}"))
        (tmp_path / "second").mkdir()
        second = Service(tmp_path / "second" / "home", demo_cache, *flags)
        assert second.process.wait(600) == 2
        assert second.says("is in use by another server; name another folder")
        second.kill()
        job_id = service.conserve("submit", str(long_rows(tmp_path)))
        # All prompts are through, and hardly any answer.
        service.until(lambda: service.report()["offline"]["tokens"] > ROWS * (PROMPT_TOKENS + 20))
        headers = {"Authorization": f"Bearer {KEY}"}
        asked = patient.post(f"{service.url}/v1/conserve/spill", headers=headers, trust_env=False)
        assert asked.status_code == 403, "a client cannot have it done"
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(600) == 0
        assert service.says("KV of rows in flight is kept: "), service.said.read_text()
    finally:
        service.kill()
    waiting = service.job(job_id)["waiting"]
    assert waiting, "rows were done before the server was stopped"
    assert (folder / INDEX).exists()
    service = Service(tmp_path / "home", demo_cache, *flags)
    try:
        service.until(lambda: service.says(f"serving {MODEL}"))
        taken = service.report()["checkpoint"]["spill"]
        assert (taken["refused"], taken["why_off"]) == (None, None)
        assert taken["tokens_taken_in"] >= PROMPT_TOKENS * waiting // 2
        assert [path.name for path in folder.iterdir()] == [LOCK]
        service.until(lambda: service.job(job_id)["state"] == "completed")
        restored = service.report()["checkpoint"]["tokens_restored"]
        assert restored >= PROMPT_TOKENS * waiting // 2
        results = [json.loads(line) for line in service.conserve("results", job_id).splitlines()]
        assert [row["completion_tokens"] for row in results] == [MAX_TOKENS] * ROWS
    finally:
        service.kill()
