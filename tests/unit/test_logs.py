"""Structured logs: every line is one JSON object, whatever wrote it."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve import logs
from conserve.cli import output, serve
from conserve.config import load
from conserve.engine.section import EngineSection
from conserve.engine.service import ProcessCommand, SupervisedProcess, why_ended
from conserve.engine.vllm.launching.environment import JSON_LOGGING
from tests.acceptance.scripted_server import ScriptedServer
from tests.commands import conserve, process
from tests.conftest import WriteInput


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def parsed(stderr: str) -> list[dict[str, Any]]:
    """Documents of the lines; fails for a line that is none."""
    found = [json.loads(line) for line in stderr.splitlines()]
    assert all({"time", "level", "logger", "message"} <= one.keys() for one in found)
    return found


@pytest.mark.parametrize("command", [("run",), ("harvest", "--until-empty")])
def test_a_run_says_everything_in_json(
    server: ScriptedServer, write_input: WriteInput, command: tuple[str, ...]
) -> None:
    job_id = conserve("submit", str(write_input(q=["a", "GARBAGE"])), "--prompt", "{{ q }}").stdout.strip()
    server.script.excuses = False
    flags = ("--endpoint", server.url, "--max-attempts", "1", "--log-format", "json", "--json")
    done = process(*command, *flags)
    assert done.returncode == 5, done.stderr
    said = parsed(done.stderr)
    (ended,) = [one for one in said if "completed, 2 of 2 rows done, 1 failed" in one["message"]]
    assert ended["job"] == job_id
    assert json.loads(done.stdout)["failed"] == 1, "data stay data"


def test_the_variable_asks_for_it_and_an_error_is_a_line(write_input: WriteInput) -> None:
    conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}")
    done = process("run", "--endpoint", "nowhere", env={**os.environ, "CONSERVE_LOG_FORMAT": "json"})
    (said,) = parsed(done.stderr)
    assert (said["level"], said["logger"], said["event"]) == ("error", "conserve", "SettingsError")
    assert "http://" in said["message"]
    assert conserve("run", "--log-format", "xml").returncode == 2


def test_records_have_the_job_and_the_row() -> None:
    record = logging.makeLogRecord(
        {
            "name": "conserve.jobs",
            "levelname": "WARNING",
            "msg": "%s failed",
            "args": ("it",),
            "created": 0.25,
        }
        | {"job": "gsm8k-k3f9", "row": 17}
    )
    assert json.loads(logs.JsonFormatter().format(record)) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "conserve.jobs",
        "message": "it failed",
        "job": "gsm8k-k3f9",
        "row": 17,
    }


OTHERS = """
import logging, logging.config, json, sys, warnings
from conserve import logs
logs.take_over()
logging.config.dictConfig(json.load(open(sys.argv[1])))
logging.getLogger("vllm.engine").info("loaded\\nin two lines")
logging.getLogger("uvicorn.error").info("started")
print("printed"); print("an", "unfinished", end=" ", file=sys.stderr); print("line", file=sys.stderr)
warnings.warn("careful")
logging.getLogger("httpx").info("a line for each request")
raise ValueError("odd")
"""


def test_a_process_of_other_programs_code_writes_lines_alone() -> None:
    done = subprocess.run([sys.executable, "-c", OTHERS, str(JSON_LOGGING)], capture_output=True, text=True)
    assert done.stdout == "", "data of a server are its answers"
    said = parsed(done.stderr)
    assert [(one["logger"], one["message"]) for one in said[:4]] == [
        ("vllm.engine", "loaded\nin two lines"),
        ("uvicorn.error", "started"),
        ("stdout", "printed"),
        ("stderr", "an unfinished line"),
    ]
    assert (said[4]["logger"], said[4]["level"]) == ("py.warnings", "warning")
    assert said[5]["message"] == "ValueError: odd"
    assert said[5]["exception"].endswith("ValueError: odd")
    assert len(said) == 6


@pytest.mark.parametrize("wanted", ["json", "text"])
def test_a_server_and_its_harvester_are_told_the_format(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(output, "json_lines", wanted == "json")
    settings = load({"metrics_port": 9090, "otlp_endpoint": "http://c:4318"})
    server = serve.server_command(settings, EngineSection(), [], 8000).environment
    assert server.get("VLLM_LOGGING_CONFIG_PATH") == (str(JSON_LOGGING) if wanted == "json" else None)
    harvester = serve.harvester_command(settings, "http://127.0.0.1:8000").environment
    told = {"CONSERVE_METRICS_PORT": "9090", "CONSERVE_METRICS_HOST": "127.0.0.1"}
    assert {**told, "CONSERVE_OTLP_ENDPOINT": "http://c:4318"}.items() <= harvester.items()
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "mine.json")
    assert (
        "VLLM_LOGGING_CONFIG_PATH"
        not in serve.server_command(settings, EngineSection(), [], 8000).environment
    )


def test_why_a_server_ended_is_read_from_json_too(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    child = SupervisedProcess(ProcessCommand(name="server", words=(), log=log))
    line = logs.document(level="info", logger="stderr", message="conserve: there is no such model")
    log.write_text(f'{{"time": "cut\n{line}\n')
    assert why_ended(child, 1) == "there is no such model"
    trace = "Traceback (most recent call last):\n  ...\nRuntimeError: out of memory"
    log.write_text(logs.document(level="error", logger="vllm", message="failed", exception=trace))
    assert "RuntimeError: out of memory" in why_ended(child, 1)
