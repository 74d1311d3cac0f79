"""The measurements for a GPU machine run on this machine's CPU, each to its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.results import FAILED, LEFT_OUT
from tools.gpu.steps import STEPS

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[2]


def test_every_step_is_rehearsed(demo_cache: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tools.gpu.rehearse", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "CONSERVE_MODELS": str(demo_cache)},
        check=True,
    )
    document = json.loads((tmp_path / "out/results.json").read_text())
    assert document["rehearsal"] is True
    steps = document["steps"]
    assert steps.keys() == STEPS.keys()
    assert {name: found for name, found in steps.items() if {FAILED, LEFT_OUT} & found.keys()} == {}

    for kind in ("default", "eager-v1", "eager-v2", "sync", "plain"):
        told = steps[f"serve-{kind}"]["after"]
        assert told["policy"] == "conserve"
        assert told["runner"] == "V1"  # a CPU has no Triton
        assert told["versions"]["vllm"].startswith("0.32")
        assert told["preemption"]["live_tokens_recomputed"] == 0
    assert steps["serve-plain"]["after"]["preemption"]["policy"] == "off"
    assert steps["serve-eager-v1"]["after"]["preemption"]["policy"] != "off"
    assert steps["offline-default"]["tokens_per_s"].keys() == {"conserve", "conserve/off"}
    assert steps["copies-saving"]["checkpoint"]["tokens_saved"] > 0
    assert len(steps["copies-saving"]["saved_gb_per_s"]) == len(
        steps["copies-saving"]["readings"]["conserve"]
    )
    assert steps["ablation-default"]["at 2/s"]["policies"].keys() >= {
        "conserve",
        "conserve/off",
        "conserve/never",
    }
