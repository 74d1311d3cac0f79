"""The engine's library loads in a process of its own, as `conserve doctor` has it."""

import pytest

from conserve.engine.vllm.launching import loading
from conserve.engine.vllm.launching.loading import Loading


@pytest.mark.engine
def test_the_library_loads_and_names_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOAD_S", 600.0)
    with Loading() as process:
        loaded = process.outcome()
    assert (loaded.problem, loaded.device) == (None, "cpu")


@pytest.mark.engine
@pytest.mark.full
def test_a_library_without_kernels_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself only logs that its kernels are missing."""
    missing = "import sys; sys.modules |= dict.fromkeys(('vllm._C', 'vllm._C_AVX2', 'vllm._C_AVX512'))"
    code = f"{missing}; from conserve.engine.vllm.launching.loading import main; main()"
    monkeypatch.setattr(loading, "WORDS", ("-c", code))
    monkeypatch.setattr(loading, "LOAD_S", 600.0)
    with Loading() as process:
        assert "its kernels are missing" in (process.outcome().problem or "")
