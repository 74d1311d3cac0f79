"""Weights that are replaced in a running engine, and a model's identity by files and flags that few users have."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.vllm.model import fingerprint
from conserve.engine.vllm.model.weights import noting_updates, updated_version, version_of
from tests.installed import needs


class Core:
    """Stands for vLLM's engine core."""

    def __init__(self) -> None:
        self.version, self.calls = "default", list[Any]()

    def get_weight_version(self) -> str:
        return self.version

    @noting_updates
    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> str:
        self.calls.append((method, timeout, args))
        return "done"


def test_weights_of_the_start_have_no_version_of_their_own() -> None:
    core = Core()
    assert core.collective_rpc(print, args=("x",)) == "done"
    assert (version_of(core), updated_version(core)) == ("default", None)
    assert core.calls == [(print, None, ("x",))]


def test_each_update_is_another_version_also_without_a_name() -> None:
    core = Core()
    for _ in range(2):
        core.collective_rpc("start_weight_update")
        core.collective_rpc("finish_weight_update")
    assert (version_of(core), updated_version(core)) == ("default.2", "default.2")


def test_a_named_version_is_told() -> None:
    core = Core()
    core.version = "step-7"
    assert updated_version(core) == "step-7"


def test_an_older_vllm_has_no_versions() -> None:
    assert updated_version(SimpleNamespace()) is None


def config(**changes: Any) -> Any:
    """The parts of vLLM's configuration that make a model's identity."""
    unset = ("quantization", "revision", "hf_config_path", "multimodal_config")
    model: dict[str, Any] = {
        **dict.fromkeys(unset),
        "model": "org/name",
        "tokenizer": "org/name",
        "dtype": "bf16",
    }
    model |= {"hf_overrides": {}, "override_generation_config": {}}
    downloads = changes.pop("download_dir", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **changes}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(download_dir=downloads),
    )


def cached(cache: Path, files: dict[str, bytes]) -> None:
    """Put files of a model into a cache of the hub's."""
    model = cache / "models--org--name"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text("abc")
    for name, content in files.items():
        (snapshot / name).write_bytes(content)


@needs("huggingface_hub")
def test_weights_in_a_folder_of_their_own_are_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path / "hub", {"config.json": b"{}"})
    found = set()
    for weights in (b"old" * 1000, b"new" * 1000):
        cached(tmp_path / "mine", {"model.safetensors": weights})
        found.add(fingerprint.identity_of("m", config(download_dir=str(tmp_path / "mine"))))
    found.add(fingerprint.identity_of("m", config()))
    assert len(found) == 3


def test_a_configuration_from_elsewhere_is_part_of_the_identity(tmp_path: Path) -> None:
    def identity(theta: float | None) -> str:
        shape = SimpleNamespace(to_json_string=lambda: json.dumps({"rope_theta": theta}))
        elsewhere = None if theta is None else str(tmp_path)
        return fingerprint.identity_of(
            "m", config(model=str(tmp_path), hf_config_path=elsewhere, hf_config=shape)
        )

    assert len({identity(None), identity(1e4), identity(5e5)}) == 3


def test_arguments_of_the_image_processor_are_part_of_the_identity(tmp_path: Path) -> None:
    def identity(given: dict[str, Any] | None) -> str:
        images = SimpleNamespace(mm_processor_kwargs=given)
        return fingerprint.identity_of("m", config(model=str(tmp_path), multimodal_config=images))

    assert identity(None) == identity({}) == fingerprint.identity_of("m", config(model=str(tmp_path)))
    assert identity({"a": 1, "b": 2}) == identity({"b": 2, "a": 1}) != identity({"a": 2, "b": 2})
