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
