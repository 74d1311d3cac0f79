"""The files and commands of docs/how-to/deploy.md: they parse, and they ask the programs for what exists."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve.cli.app import LazyCommands
from conserve.cli.serve import SPILL_S
from conserve.engine.service import DRAIN_S, HARVESTER_S
from tools.docs.generated import DOCS

yaml = pytest.importorskip("yaml")

PAGE = (DOCS / "how-to/deploy.md").read_text()
FENCED = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SHELL = [line.strip() for line in PAGE.splitlines() if re.match(r" {4}\S.*\bconserve ", line)]
PROGRAM = "/srv/conserve/.venv/bin/conserve"
OPERATORS = {"<", ">", ">>", "|", "||", "&&"}
STOP_S = HARVESTER_S + DRAIN_S + SPILL_S  # the longest stop, with --kv-spill


def blocks(language: str) -> list[str]:
    return [body for found, body in FENCED if found == language]


def documents() -> list[dict[str, Any]]:
    return [document for body in blocks("yaml") for document in yaml.safe_load_all(body)]


def service(text: str) -> configparser.SectionProxy:
    """The section `Service` of a unit; a fragment is one."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # systemd's names have capitals
    unit.read_string(text.replace("\\\n", "") if text.startswith("[") else f"[Service]\n{text}")
    return unit["Service"]


def pods() -> Iterator[dict[str, Any]]:
    """The specification of each pod."""
    for document in documents():
        spec = document.get("spec", {})
        for template in (spec.get("template"), spec.get("jobTemplate", {}).get("spec", {}).get("template")):
            if template:
                yield template["spec"]


def asked_of_conserve() -> list[list[str]]:
    """Words behind `conserve` of each command on the page."""
    (compose,) = (document for document in documents() if "services" in document)
    commands = [shlex.split(one["command"]) for one in compose["services"].values()]
    commands += [container["args"] for pod in pods() for container in pod["containers"]]
    lines = [service(text)["ExecStart"] for text in blocks("ini")] + SHELL
    for line in lines:
        words = shlex.split(line)
        for at, word in enumerate(words):
            if word in ("conserve", PROGRAM) and words[at - 1] not in ("-u", "-s"):
                rest = words[at + 1 :]
                ends = [n for n, other in enumerate(rest) if other in OPERATORS]
                commands.append(rest[: ends[0]] if ends else rest)
    return commands


@pytest.mark.parametrize("words", asked_of_conserve(), ids=lambda words: " ".join(words[:2]))
def test_every_command_is_one_of_conserves(words: list[str], tmp_path: Path) -> None:
    with LazyCommands()[words[0]].make_context(words[0], words[1:]) as context:
        assert context.command.name == words[0]


def test_the_page_has_commands_of_every_kind() -> None:
    assert {words[0] for words in asked_of_conserve()} == {"serve", "harvest", "submit", "status", "check"}
    assert len(asked_of_conserve()) >= 10


def test_an_unknown_flag_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        LazyCommands()["harvest"].make_context("harvest", ["--endpint", "http://gpu1:8000"])


@pytest.mark.parametrize("line", SHELL)
def test_every_line_for_a_shell_is_one(line: str) -> None:
    command = re.sub(r"^(?:[\d*]+ ){5}", "", line)  # of a crontab
    assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0


def test_every_service_has_the_time_that_a_stop_takes() -> None:
    unit, harvester = map(service, blocks("ini"))
    (compose,) = (document for document in documents() if "services" in document)
    server, job = pods()
    graces = [
        unit["TimeoutStopSec"],
        *(one["stop_grace_period"].removesuffix("s") for one in compose["services"].values()),
        server["terminationGracePeriodSeconds"],
    ]
    assert all(float(grace) >= STOP_S for grace in graces)
    assert len(set(map(float, graces))) == 1
    assert min(float(harvester["TimeoutStopSec"]), job["terminationGracePeriodSeconds"]) > HARVESTER_S


def test_no_pod_gets_variables_that_vllm_takes_for_settings() -> None:
    """A Kubernetes Service called vllm would set VLLM_PORT to a URL, at which vLLM ends."""
    assert [pod.get("enableServiceLinks") for pod in pods()] == [False, False]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("text", blocks("ini"))
def test_systemd_has_nothing_to_say_against_a_unit(text: str, tmp_path: Path) -> None:
    path = tmp_path / "conserve.service"
    path.write_text((text if text.startswith("[") else f"[Service]\n{text}").replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
