"""Processes that are forked off one that has imported vLLM: when, and what of their starter they take along."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.engine.vllm.compat.installed import InstalledEngine
from conserve.engine.vllm.launching import fork_server
from conserve.engine.vllm.launching.fork_server import (
    ForkServer,
    changed,
    differences,
    recalled,
    remember,
    variables,
)
from conserve.variables import FORK_SERVER

REPOSITORY = Path(__file__).parents[2]
NAMES = st.sampled_from(["OMP_NUM_THREADS", "LD_PRELOAD", "HOME", "LANG"])
ENVIRONMENTS = st.dictionaries(NAMES, st.sampled_from(["", "0", "0 1"]))


@given(before=ENVIRONMENTS, after=ENVIRONMENTS)
def test_remembered_changes_lead_to_the_same_environment(
    before: dict[str, str], after: dict[str, str]
) -> None:
    assert changed(before, differences(before, after)) == after


def test_changes_of_each_kind_of_start_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache" / "fork-server.json"
    monkeypatch.setattr(fork_server, "changes_file", lambda: file)
    kinds: list[dict[str, str]] = [{"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, {"HOME": "/root"}]
    assert recalled() is None
    for number, kind in enumerate(kinds):
        monkeypatch.setattr(fork_server, "_before", kind)
        remember({"OMP_NUM_THREADS": str(number), "GONE": None})
    for number, kind in enumerate(kinds):
        monkeypatch.setattr(fork_server, "_before", kind)
        assert recalled() == {"OMP_NUM_THREADS": str(number), "GONE": None}
    file.write_bytes(b"{")
    assert recalled() is None


def test_a_ctrl_c_does_not_reach_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's resource tracker, which the fork server starts with, lets SIGINT through once it has started."""
    tracked: list[bool] = []
    blocked: list[bool] = []

    def tracker_starts() -> None:
        if not tracked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        tracked.append(True)

    def server_starts() -> None:
        resource_tracker.ensure_running()
        blocked.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(resource_tracker, "ensure_running", tracker_starts)
    monkeypatch.setattr(forkserver, "ensure_running", server_starts)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", list)
    monkeypatch.setattr(fork_server, "pythons_server", lambda: SimpleNamespace(_forkserver_pid=1))
    fork_server.launch(variables())
    assert blocked == [True]


def test_variables_of_ours_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    before = variables()
    monkeypatch.setenv("CONSERVE_HOME", "elsewhere")
    assert variables() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert variables() != before


@pytest.mark.parametrize(
    ("engine", "switch", "allowed"),
    [
        (InstalledEngine("vllm-cpu", "0.32.0"), "", True),
        (InstalledEngine("vllm", "0.32.0+cpu"), "keep", True),
        (InstalledEngine("vllm-cpu", "0.32.0"), "0", False),
        (InstalledEngine("vllm", "0.32.0"), "", False),  # a GPU's processes are started as vLLM does
        (None, "", False),
    ],
)
def test_only_a_cpus_processes_are_forked(
    engine: InstalledEngine | None, switch: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "installed_engine", lambda: engine)
    monkeypatch.setattr(fork_server, "pythons_server", lambda: SimpleNamespace(_forkserver_pid=None))
    monkeypatch.setenv(FORK_SERVER, switch)
    assert ForkServer().allowed is allowed


def test_secrets_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "changes_file", lambda: tmp_path / "changes.json")
    remember({"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "2"})
    assert recalled() == {"OMP_NUM_THREADS": "2"}


def test_an_engine_starts_without_a_fork_server_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(environment: Any) -> int:
        raise FileNotFoundError("/bin/sh")

    monkeypatch.setattr(fork_server, "launch", fails)
    server = ForkServer()
    server.start({})
    assert server.environment is None
    assert not server.fits


def test_processes_take_the_surroundings_of_their_starter_along(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != FORK_SERVER}
    (tmp_path / "msgspec.py").write_text("raise SystemExit('a module of the current folder')")
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "tests.forking"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    *said, last = map(json.loads, ran.stdout.splitlines())
    assert said == [
        {"name": "idle", "forked": True, "threads": None, "blocks Ctrl-C": False},
        {"name": "nested", "forked": True, "threads": "3", "blocks Ctrl-C": True},
        {"name": "computing", "forked": True, "threads": "3", "blocks Ctrl-C": True},
        {"name": "other", "forked": False, "threads": "4", "blocks Ctrl-C": True},
        {"name": "orphan", "forked": False, "threads": "3", "blocks Ctrl-C": True},
    ]
    assert last == {"left": False}
    assert ran.stderr.count("complaint") == len(said)
