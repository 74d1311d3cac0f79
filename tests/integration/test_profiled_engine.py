"""Profiles of the real engine, and the real engine on a profile."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.section import EngineSection
from conserve.engine.vllm.launching.environment import engine_log, prepare_environment
from conserve.engine.vllm.launching.flags import parse_flags
from conserve.engine.vllm.model.demo_model import DEMO_MODEL, resolve_model
from conserve.engine.vllm.model.profile_key import key_of
from conserve.engine.vllm.profiling.rig import EngineRig, build_core
from conserve.engine.vllm.settings import RequestedSettings
from conserve.errors import ProfileDerived, ProfileMissing
from conserve.names import PACED
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.book import Book
from conserve.profiles.correction import Correction
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    *OF_VLLM,
]

FLAGS = ["--max-num-seqs", "32", "--kv-cache-memory-bytes", str(1 << 30)]
MODELS = Path(__file__).parents[2] / ".demo" / "models"
COMMAND = "conserve profile smollm2-demo"
CHUNK = 400  # tokens that an iteration of an idle engine is to have time for, of 2,048 that it would take


def conserve(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conserve", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "CONSERVE_HOME": str(home), "CONSERVE_MODELS": str(MODELS)},
        check=False,
        timeout=1800,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a short profile of the demo model served with `FLAGS`."""
    home = tmp_path_factory.mktemp("profiled")
    budget = ("--budget", "15", "--max-context", "2048")
    done = conserve(home, "profile", DEMO_MODEL, *budget, "--json", "--", *FLAGS)
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert 0 < profile["models"]["conserve"]["mape"] < 1
    assert profile["safepoint"]["per_iteration"] == 30
    assert [copy["blocks"] for copy in profile["kv_copies"]][:3] == [1, 2, 4]
    number_bytes = {"bfloat16": 2, "float32": 4}[profile["key"]["dtype"]]
    # Layers, K and V, heads, size, bytes, block.
    assert profile["kv_copies"][0]["bytes"] == 30 * 2 * 3 * 64 * number_bytes * 128
    assert profile["empty_iteration_ms"] > 0
    shown = conserve(home, "profile", "show", DEMO_MODEL)
    assert "AMD" in shown.stdout or "Intel" in shown.stdout or "cores" in shown.stdout
    return home


def test_the_engine_on_a_profile_cuts_its_iterations_to_the_time(home: Path) -> None:
    path = resolve_model(DEMO_MODEL, MODELS)
    prepare_environment(offline=True)
    config = parse_flags(path, FLAGS).create_engine_config()
    key = key_of(config)
    tbt_ms = Book(home / "profiles").find(key, command=COMMAND).model().predict(Batch.of([Slice(CHUNK, 0)]))
    section = EngineSection(policy=PACED, tbt_slo_ms=tbt_ms, harm=None, profiles=str(home / "profiles"))
    RequestedSettings(section=section, command=COMMAND).install(config)
    core = asyncio.run(build_core(config, engine_log().fileno()))
    rig = EngineRig(DEMO_MODEL, key, core)
    scheduler: Any = core.scheduler
    try:
        assert type(scheduler).__name__ == "Synchronous"
        for n in range(3):
            rig._add(1500 + n, 0, max_tokens=8)
        tokens, schedule = [], scheduler.schedule

        def counted(*args: Any) -> Any:
            output = schedule(*args)
            tokens.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = counted
        while scheduler.has_unfinished_requests():
            core.step()
    finally:
        rig.close()
    learned = scheduler.iterations.model.correction  # with the last iteration, which is learned at the end
    assert max(tokens) < 1000, "the prompts were not cut"
    assert learned.seen == len(tokens)
    saved = Correction.load(Book(home / "profiles").correction_path(DEMO_MODEL, key), of=learned.of)
    assert saved is not None
    assert saved.seen == learned.seen
    shown = json.loads(conserve(home, "profile", "show", "--json").stdout)
    assert shown["correction"]["iterations"] == learned.seen


def test_an_engine_without_a_profile_says_how_to_make_one(home: Path, tmp_path: Path) -> None:
    path = resolve_model(DEMO_MODEL, MODELS)
    for folder, flags in ((tmp_path, FLAGS), (home / "profiles", [*FLAGS, "--block-size", "64"])):
        config = parse_flags(path, flags).create_engine_config()
        with pytest.raises(ProfileMissing, match=f"run: {COMMAND}"):
            RequestedSettings(section=EngineSection(profiles=str(folder)), command=COMMAND).install(config)
    derived = EngineSection(profiles=str(tmp_path), profile="llama-3.1-8b-h100")
    with pytest.raises(ProfileDerived, match="simulation only"):
        RequestedSettings(section=derived, command=COMMAND).install(config)


def test_run_paces_the_engine_by_a_model_learned_in_the_warm_up(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"Count to {n}."}) + "\n" for n in range(3, 9)))
    home = tmp_path / "home"
    job_id = conserve(home, "submit", str(rows), "--prompt", "{{ q }}", "--max-tokens", "8").stdout.strip()
    refused = conserve(home, "run", "--tbt-ms", "200", "--", *FLAGS)
    assert refused.returncode == 1
    assert "run: conserve profile smollm2-demo -- --max-num-seqs 32" in refused.stderr
    done = conserve(home, "run", "--tbt-ms", "200", "--profile", "auto", "--json", "--", *FLAGS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["jobs"] == {job_id: "completed"}
