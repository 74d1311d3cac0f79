"""Owners of leases, and servers: processes of this machine that live."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest

from conserve import hosts, owners
from conserve.config import Settings
from conserve.jobs.harvest import services
from conserve.whole import write_whole


def named(pid: int, started: float | None, host: str | None = None) -> str:
    assert started is not None
    return f"{host or socket.gethostname()}:{pid}:{started:.0f}:abcdef"


def test_this_process_lives_and_has_a_new_name_each_time() -> None:
    one, other = owners.this_process(), owners.this_process()
    assert one != other
    assert one.split(":")[:2] == [socket.gethostname(), str(os.getpid())]
    assert not owners.is_dead(one)


@pytest.mark.parametrize("killed", [True, False])
def test_a_process_that_ended_is_dead_even_before_it_was_waited_for(killed: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    boot = hosts.this_boot()
    since_boot = f"{socket.gethostname()}:{child.pid}:{owners.since_boot(child.pid):.2f}:{boot}.abcdef"
    names = {since_boot, named(child.pid, owners.start_time(child.pid))}
    assert owners.dead(names, one_machine=True) == set()
    if killed:
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # and stays a zombie
        assert owners.dead(names, one_machine=True) == names
    child.communicate(b"\n")
    assert owners.dead([*names, owners.this_process()], one_machine=True) == names
    assert owners.start_time(child.pid) == owners.since_boot(child.pid) == 0


def test_another_process_of_the_same_number_is_another_owner() -> None:
    """Start times move a little with the machine's clock."""
    started = owners.start_time(os.getpid())
    assert started is not None
    assert not owners.is_dead(named(os.getpid(), started + 1.4))
    assert owners.is_dead(named(os.getpid(), started - 60))
    assert owners.is_dead(named(os.getpid(), started + 60))


def test_a_clock_that_is_set_takes_no_process_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    name = owners.this_process()
    real = psutil._pslinux.boot_time
    for by_s in (-3600.0, 3600.0):
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda by_s=by_s: real() + by_s)
        assert not owners.is_dead(name)


def test_owners_of_another_boot_are_dead_where_one_machine_writes_their_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where other machines do too, one of them may have this host's name."""
    name = owners.this_process()
    monkeypatch.setattr(hosts, "BOOT_ID", tmp_path / "boot_id")
    hosts.BOOT_ID.write_text("another boot\n")
    assert owners.is_dead(name)
    assert not owners.is_dead(name, one_machine=False)
    assert owners.pid_here(name) is None, "another machine's process is sent no signals here"


def test_a_process_that_cannot_tell_its_own_boot_knows_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = owners.this_process()
    assert owners.pid_here(name) == os.getpid()
    monkeypatch.setattr(hosts, "BOOT_ID", tmp_path / "missing")
    assert not owners.is_dead(name)
    assert owners.pid_here(name) is None


def test_a_name_without_a_boot_tells_nothing_where_other_machines_write_too() -> None:
    name = named(os.getpid(), 1.0)
    assert owners.dead([name], one_machine=True) == {name}
    assert owners.dead([name], one_machine=False) == set()


def test_an_earlier_process_of_this_boot_is_dead_whoever_writes_names() -> None:
    host, pid, started, nonce = owners.this_process().rsplit(":", 3)
    assert owners.is_dead(f"{host}:{pid}:{float(started) - 9:.2f}:{nonce}", one_machine=False)
    assert not owners.is_dead(f"{host}:{pid}:{started}:{nonce}", one_machine=False)


def test_a_process_that_is_hidden_is_dead_once_the_kernel_has_none_of_its_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """/proc hides processes of other users with `hidepid=2`, and in services with `ProtectProc=invisible`."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since_boot = f"{owners.since_boot(child.pid):.2f}:{hosts.this_boot()}.abcdef"
    names = {
        f"{socket.gethostname()}:{child.pid}:{since_boot}",
        named(child.pid, owners.start_time(child.pid)),
    }
    monkeypatch.setattr(owners, "PROC", tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert owners.dead(names, one_machine=True) == set()
    assert owners.start_time(child.pid) is owners.since_boot(child.pid) is None
    child.communicate(b"\n")
    assert owners.dead(names, one_machine=True) == names


def test_a_process_of_another_user_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not owners.is_gone(os.getpid())


def test_a_process_that_has_a_recycled_number_is_another_owner() -> None:
    host, pid, started, nonce = owners.this_process().split(":")
    assert not owners.is_dead(f"{host}:{pid}:{started}:{nonce}")
    assert owners.is_dead(f"{host}:{pid}:{float(started) - 0.02:.2f}:{nonce}")


def test_where_the_boot_has_no_name_the_start_is_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts, "BOOT_ID", tmp_path / "missing")
    name = owners.this_process()
    assert name.split(":")[2] == f"{owners.start_time(os.getpid()):.0f}"
    assert not owners.is_dead(name)


def test_of_other_machines_nothing_is_known() -> None:
    assert not owners.is_dead(named(os.getpid(), 0, host="elsewhere"))
    assert not owners.is_dead(named(os.getpid(), 0, host="fe80::1"))


def test_a_server_is_found_while_it_serves(settings: Settings) -> None:
    assert services.running(settings) == []
    with services.announce(settings, "http://here"):
        (found,) = services.running(settings)
        assert found.url == "http://here"
        assert not owners.is_dead(found.owner)
    assert services.running(settings) == []


def test_what_dead_servers_left_is_swept_up(settings: Settings) -> None:
    with services.announce(settings, "http://here"):
        folder = settings.home / services.FOLDER
        dead = services.RunningServer(url="http://dead", owner=named(1, 1.0), network="", elsewhere="")
        (folder / "1.json").write_bytes(msgspec.json.encode(dead))
        (folder / "2.json").write_bytes(b"no record")
        (folder / "notes.txt").write_bytes(b"not ours")
        assert [found.url for found in services.running(settings)] == ["http://here"]
        left = sorted(path.name for path in folder.iterdir())
        assert [name.partition("-")[0] for name in left] == [str(os.getpid()), "notes.txt"]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have this process be the first one of a container with this host name."""

    def become(host: str) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        monkeypatch.setattr(owners, "this_namespace", lambda: host)
        monkeypatch.setattr(hosts, "this_network", lambda: host)

    return become


def test_servers_of_two_containers_are_both_found_and_asked_at_their_own_address(
    settings: Settings, enter: Callable[[str], None]
) -> None:
    here, bare = "http://127.0.0.1:8000", settings.home / services.FOLDER / "1.json"
    with ExitStack() as serving:
        enter("pod-a")
        serving.enter_context(services.announce(settings, here, elsewhere="http://10.0.0.1:8000"))
        nameless = services.RunningServer(url=here, owner=owners.this_process(), network="", elsewhere="")
        enter("pod-b")
        with services.announce(settings, here):
            assert sorted(found.url for found in services.running(settings)) == ["http://10.0.0.1:8000", here]
            enter("pod-c")
            seen = [found.url for found in services.running(settings)]
            assert sorted(seen) == ["http://10.0.0.1:8000", "http://pod-b:8000"]
        assert [found.url for found in services.running(settings)] == ["http://10.0.0.1:8000"]
        bare.write_bytes(msgspec.json.encode(nameless))
        (found,) = {found.url for found in services.running(settings)} - {"http://10.0.0.1:8000"}
        assert found == "http://pod-a:8000", "its network has no name"


def test_a_server_of_another_container_that_was_killed_is_forgotten(
    settings: Settings, enter: Callable[[str], None]
) -> None:
    enter("pod-a")
    with services.announce(settings, "http://10.0.0.1:8000") as announced:
        enter("pod-b")
        silent = time.time() - services.STALE_S
        os.utime(announced.path, (silent, silent))
        assert services.running(settings) == []
        announced.touch()
        assert [found.url for found in services.running(settings)] == ["http://10.0.0.1:8000"]
        os.utime(announced.path, (silent, silent))
        announced.touch()
        assert len(services.running(settings)) == 1


def test_two_writers_with_one_process_id_mix_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Path.replace

    def after_another(partial: Path, path: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replaced)
        write_whole(tmp_path / "record", b"of the other container")
        return replaced(partial, path)

    monkeypatch.setattr(Path, "replace", after_another)
    write_whole(tmp_path / "record", b"ours")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("record", b"ours")]


def test_of_another_container_with_this_hosts_name_nothing_is_known() -> None:
    host, pid, started, nonce = owners.this_process().rsplit(":", 3)
    token, _, namespace = nonce.rpartition("-")
    assert namespace == owners.this_namespace()
    assert owners.is_dead(f"{host}:{pid}:{float(started) + 5:.2f}:{nonce}")
    assert not owners.is_dead(f"{host}:{pid}:{float(started) + 5:.2f}:{token}-{namespace}f")
    assert owners.is_dead(f"{host}:{pid}:{float(started) + 5:.2f}:{token}"), "its namespace has no name"
    assert owners.is_dead(f"{host}:{pid}:{started}:ff{token[2:]}-{namespace}f"), "of an earlier boot"
    assert not owners.is_dead(f"{host}:{pid}:{started}:ff{token[2:]}-{namespace}", one_machine=False)
