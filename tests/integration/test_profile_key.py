"""Key of a profile: what an engine's iterations depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]


def test_a_profile_is_of_one_size_of_the_largest_graph(tmp_path: Path) -> None:
    """An iteration without a CUDA graph waits for the launches of its kernels."""
    from conserve.engine.vllm.model.profile_key import key_of
    from tests.bare_scheduler import engine_config

    config: Any = engine_config(tmp_path, section=None)
    without = key_of(config)
    assert "cudagraph_tokens" not in without.flags, "a CPU has none, and keeps its profiles"
    config.compilation_config.max_cudagraph_capture_size = 512
    assert key_of(config).flags == {**without.flags, "cudagraph_tokens": "512"}


def test_a_profile_is_of_one_model_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's work in an iteration is another under the other one."""
    from vllm.platforms import current_platform

    from conserve.engine.vllm.model.profile_key import key_of
    from tests.bare_scheduler import engine_config

    def runner(uses_v2: str, *, on_cpu: bool) -> str | None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", uses_v2)
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)
        return key_of(config).flags.get("model_runner")

    config: Any = engine_config(tmp_path, section=None)
    assert [runner(uses_v2, on_cpu=True) for uses_v2 in "01"] == [None, "V2"], "V1 is usual on a CPU"
    assert [runner(uses_v2, on_cpu=False) for uses_v2 in "01"] == ["V1", None], "and V2 on a GPU"


def test_a_mixture_of_experts_has_one_safepoint_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.profiling import worker_probe
    from tests.bare_scheduler import engine_config

    monkeypatch.setattr(worker_probe, "check_us", lambda: 0.1)
    probe = worker_probe.WorkerProbe()
    probe.vllm_config = config = engine_config(tmp_path, section=None)
    layers = range(config.model_config.hf_config.num_hidden_layers)
    kinds = ("self_attn.attn", "mlp.experts")
    named = {f"model.layers.{layer}.{kind}": None for layer in layers for kind in kinds}
    config.compilation_config.static_forward_context = named
    assert probe.conserve_safepoint() == (0.1, len(layers))
