"""`conserve doctor` says what the engine computes on, and in which format."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conserve.cli import doctor_engine as doctor
from conserve.config import Settings
from conserve.engine.runtime.machine import Cores
from conserve.engine.runtime.number_format import Speed
from conserve.engine.vllm.launching import number_format
from conserve.engine.vllm.launching.number_format import Chosen
from conserve.engine.vllm.model import demo_model

SPEEDS = {"bfloat16": Speed(prefill=19.4, decode=18.0), "float32": Speed(prefill=84.0, decode=51.0)}
CONFIG = {"hidden_size": 64, "num_attention_heads": 4}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def made(**fields: object) -> Settings:
        return Settings(home=tmp_path / "home", models=tmp_path / "models", **fields)  # type: ignore[arg-type]

    return made


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_the_format_stands_with_the_speeds_that_decided(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    number_format.remember(CONFIG, Chosen("float32", SPEEDS))
    named = settings(model=str(model_folder(tmp_path / "mine")))
    expected = "float32 (bfloat16: prefill 19, decode 18 GFLOP/s; float32: prefill 84, decode 51 GFLOP/s)"
    assert doctor.number_format(named).value == expected
    model_folder(tmp_path / "models" / demo_model.FOLDER)
    assert doctor.number_format(settings()).value == expected


def test_a_format_that_was_not_measured_is_not_guessed(settings: Callable[..., Settings]) -> None:
    said = "measured when the engine first starts with smollm2-demo"
    assert doctor.number_format(settings()).value == said


def test_the_users_format_is_named(settings: Callable[..., Settings]) -> None:
    assert "--dtype float16" in doctor.number_format(settings(engine_args="--dtype float16")).value


def test_cores_say_what_limits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conserve.engine.runtime.machine.cores", lambda: Cores(64, 32, 2.5))
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    said = "64 in the machine, 32 by affinity, 2.5 by control group; 2 threads compute"
    assert doctor.cores().value.endswith(said)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-7")
    assert doctor.cores().value.endswith("bound by VLLM_CPU_OMP_THREADS_BIND=0-7")


def test_memory_says_what_the_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr("conserve.engine.runtime.machine.memory_bytes", lambda: (8 * gib, 6 * gib))
    monkeypatch.setattr("conserve.engine.runtime.machine.memory_limit", lambda: 8 * gib)
    said = "8.0 GiB, by control group, 6.0 free; up to 2.0 GiB of KV cache"
    assert doctor.memory().value == said
    monkeypatch.setattr("conserve.engine.runtime.machine.memory_limit", lambda: None)
    assert doctor.memory().value == "8.0 GiB, 6.0 free; up to 2.0 GiB of KV cache"
