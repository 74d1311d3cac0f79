"""Modes of vLLM beside the usual one: rows and live requests answer as they would alone, and the report says why.

docs/reference/modes.md lists them. `wanted` is always the same engine's answer to each request on its own, with
nothing cached.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_kinds
from tests.integration.test_checkpoints import transfer
from tests.tiny_models import LAYERS, build_tiny_model
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    *OF_VLLM,
]

PROMISES: tuple[dict[str, float], ...] = ({}, {"harm": 0.1}, {"tbt_ms": 3.0})
"""The last two cut prompts small."""
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
STATE = "its state is not only KV blocks"


@contextmanager
def checkpointed(model: Path, **flags: Any) -> Iterator[Any]:
    """An engine with the connector of checkpoints, as `conserve serve` starts one."""
    from tests.preempted_engine import started

    settings = {"policy": "eager", "host_bytes": 16 << 20}
    with started(model, kv_transfer_config=transfer(settings), **flags) as engine:
        yield engine


def mixed() -> list[Any]:
    """Rows, and two live requests."""
    from tests.preempted_engine import Ask, greedy, prompt

    asked = [Ask(f"off{n}", prompt(30 + n * 67 % 290, n), greedy(16)) for n in range(5)]
    return [
        *asked,
        *(Ask(f"on{n}", prompt(20 + n * 31, 50 + n), greedy(24), offline=False) for n in range(2)),
    ]


def assert_undisturbed(engine: Any, asked: list[Any], *, losses: int = 5, kinds: int = 10) -> dict[str, Any]:
    """Check answers beside each other, with orders to leave, losses of memory and three promises; the report."""
    from tests.preempted_engine import Dice

    wanted = engine.undisturbed(asked)
    assert len({token for answer in wanted.values() for token in answer.tokens}) >= kinds, (
        "nothing to compare"
    )
    for seed, promise in enumerate(PROMISES):
        engine.scheduler.conserve({"slo": promise})
        engine.orders.follow(Dice(seed, LAYERS))
        engine.add(*(ask for ask in asked if not ask.offline))
        engine.step()
        engine.add(*(ask for ask in asked if ask.offline))
        answers = engine.drain_losing(random.Random(seed), 0.2)
        engine.orders.follow(None)
        assert answers == wanted, promise
        engine.assert_nothing_is_left()
        engine.forget()
    assert engine.lost >= losses
    said: dict[str, Any] = engine.scheduler.conserve({"slo": {}})
    return said


def test_vllms_own_worker(six_layers: Path) -> None:
    """Your own `vllm serve` without `--worker-cls`: rows stay, and host memory brings their KV back."""
    with checkpointed(six_layers, worker="auto") as engine:
        said = assert_undisturbed(engine, mixed())
    assert said["preemption"]["why_off"] == "the worker is not ConServe's (--worker-cls)"
    assert said["preemption"]["iterations_left"] == 0
    assert said["checkpoint"]["why_off"] is None
    assert said["checkpoint"]["tokens_restored"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "why_no_kv"),
    [
        ("Mamba2", "its layers do not keep KV of the whole context"),
        ("FalconH1", "its layers keep KV in different ways"),
        ("GraniteMoeHybrid", "its layers keep KV in different ways"),
    ],
)
def test_states_are_computed_again(kind: str, why_no_kv: str, demo_model: Path, tmp_path: Path) -> None:
    """vLLM's CPU kernels keep no state at a prefix's end, so `conserve serve` turns its prefix cache off."""
    from conserve.engine.vllm.launching.flags import caches_prefixes

    settings = tiny_kinds.STATES[kind]
    model = build_tiny_model(
        tmp_path / "model", tokenizer_from=demo_model, layers=LAYERS, kind=kind, **settings
    )
    assert caches_prefixes(str(model)) == (kind == "Mamba2"), "which has none by vLLM's own choice"
    with checkpointed(model, enable_prefix_caching=False) as engine:
        said = assert_undisturbed(engine, mixed())
    assert said["preemption"]["why_off"] == STATE
    assert said["checkpoint"]["why_off"] == why_no_kv
    assert said["checkpoint"]["tokens_recomputed"]


@pytest.mark.full
def test_gated_delta_nets_run_beside_live_requests(demo_model: Path, tmp_path: Path) -> None:
    """In bfloat16 alone, where stock vLLM's text too depends on what runs beside: every request ends."""
    from conserve.engine.vllm.launching.number_format import format_of

    model = build_tiny_model(
        tmp_path / "model",
        tokenizer_from=demo_model,
        layers=LAYERS,
        kind="Qwen3Next",
        **tiny_kinds.STATES["Qwen3Next"],
    )
    assert format_of(str(model)) is None, "vLLM is to decide"
    with checkpointed(model, dtype="bfloat16") as engine:
        assert_each_ends(engine, mixed(), seed=0)
        assert engine.scheduler.conserve()["preemption"]["why_off"] == STATE


def assert_each_ends(engine: Any, asked: list[Any], seed: int) -> None:
    """Check that each request gets all of its tokens, with orders to leave and losses of memory."""
    from tests.preempted_engine import Dice

    engine.orders.follow(Dice(seed, LAYERS))
    engine.add(*asked)
    answers = engine.drain_losing(random.Random(seed), 0.2)
    engine.orders.follow(None)
    assert {name: len(answer.tokens) for name, answer in answers.items()} == {
        ask.name: ask.params.max_tokens for ask in asked
    }
    engine.assert_nothing_is_left()
    engine.forget()


def has_tiles() -> bool:
    """True with AMX, whose kernels for numbers of 8 bits take and give no float32."""
    from torch.cpu import _is_amx_tile_supported

    return bool(_is_amx_tile_supported())


def require_wide_vectors() -> None:
    """Skip the test where vLLM has no kernel for it: for some it wants AVX-512."""
    from torch.backends import cpu

    if cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        pytest.skip("vLLM's kernel for this wants AVX-512, which this processor lacks")


@pytest.mark.full
@pytest.mark.parametrize("method", ["int8", "gptq", "awq"])
def test_quantised_weights(method: str, demo_model: Path, tmp_path: Path) -> None:
    if method != "int8":
        require_wide_vectors()
    dtype = "float16" if method != "int8" else "bfloat16" if has_tiles() else "float32"
    model = tiny_kinds.build_quantised(tmp_path / "model", tokenizer_from=demo_model, method=method)
    with checkpointed(model, dtype=dtype) as engine:
        assert_rows_leave_and_come_back(assert_undisturbed(engine, mixed()))


@pytest.mark.full
def test_fp8_weights_run_beside_live_requests(demo_model: Path, tmp_path: Path) -> None:
    """In bfloat16 alone, where stock vLLM's text too depends on what runs beside: every request ends."""
    if not has_tiles():
        pytest.skip("vLLM's kernel for FP8 weights wants AMX, which this processor lacks")
    model = tiny_kinds.build_quantised(tmp_path / "model", tokenizer_from=demo_model, method="fp8")
    asked = mixed()
    with checkpointed(model, dtype="bfloat16") as engine:
        for seed in range(3):
            assert_each_ends(engine, asked, seed)
        assert_rows_leave_and_come_back(engine.scheduler.conserve())


@pytest.mark.full
def test_a_quantised_kv_cache(six_layers: Path) -> None:
    require_wide_vectors()
    with checkpointed(six_layers, kv_cache_dtype="fp8") as engine:
        assert_rows_leave_and_come_back(assert_undisturbed(engine, mixed()))


def assert_rows_leave_and_come_back(said: Mapping[str, Any]) -> None:
    """Check that rows left one by one, and that host memory brought KV back."""
    assert said["preemption"]["rows_go_on"]
    assert said["preemption"]["iterations_left"] > said["preemption"]["abandoned"] > 0
    assert said["checkpoint"]["tokens_restored"]


@pytest.fixture
def numba() -> Iterator[None]:
    """Numba, which vLLM's proposer imports, leaves an object behind that has an attribute of any name.

    vLLM looks at each object of each module when it starts, and would take that attribute for a dictionary.
    """
    yield
    from llvmlite.binding import ffi

    library: Any = type(ffi.lib)
    plain = library.__getattr__

    def attribute(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return plain(self, name)

    library.__getattr__ = attribute


@pytest.mark.full
@pytest.mark.usefixtures("numba")
@pytest.mark.filterwarnings("ignore:[\\s\\S]*reflected list")  # numba's, of vLLM's proposer
def test_speculated_tokens(six_layers: Path) -> None:
    with checkpointed(six_layers, speculative_config=SPECULATION) as engine:
        said = assert_undisturbed(engine, mixed(), losses=1)
    assert said["preemption"]["why_off"] == said["checkpoint"]["why_off"] == "tokens are speculated"


@pytest.mark.full
def test_a_model_that_hears(demo_model: Path, tmp_path: Path) -> None:
    """A multi-modal one, of sound: vLLM's models with images want torchvision."""
    model = tiny_kinds.build_tiny_listener(tmp_path / "model", tokenizer_from=demo_model)
    with checkpointed(model) as engine:
        sign = engine.worker.vllm_config.model_config.hf_config.audio_token_index
        asked = [
            ask._replace(
                prompt=[*ask.prompt[:7], sign, *ask.prompt[7:]], media={"audio": tiny_kinds.sound(n)}
            )
            if n % 2 == 0
            else ask
            for n, ask in enumerate(mixed())
        ]
        said = assert_undisturbed(engine, asked)
    assert said["preemption"]["abandoned"] == said["preemption"]["iterations_left"] > 0
    assert said["checkpoint"]["tokens_restored"]


def test_no_client_sends_embeddings_for_the_sake_of_checkpoints(demo_model: Path, tmp_path: Path) -> None:
    """vLLM takes them from everyone, missing ones too, on an engine that gets KV from another."""
    from vllm.engine.arg_utils import EngineArgs

    model = tiny_kinds.build_tiny_listener(tmp_path / "model", tokenizer_from=demo_model)
    config = EngineArgs(
        model=str(model), kv_transfer_config=transfer({"policy": "eager"})
    ).create_engine_config()
    taken = config.model_config.multimodal_config
    assert not taken.enable_mm_embeds
    assert not getattr(taken, "allow_missing_mm_embeddings", False)


@pytest.mark.full
def test_an_encoder_and_a_decoder(demo_model: Path, tmp_path: Path) -> None:
    from tests.preempted_engine import Ask, greedy, prompt, started

    model = tiny_kinds.build_tiny_whisper(tmp_path / "model", tokenizer_from=demo_model)
    limits = {"max_model_len": 448, "max_num_batched_tokens": 2048, "enable_prefix_caching": None}
    with started(model, **limits) as engine:
        begin = engine.worker.vllm_config.model_config.hf_config.decoder_start_token_id
        asked = [
            Ask(
                f"row{n}",
                [begin, *prompt(3 + 20 * n, n)],
                greedy(20),
                offline=n < 5,
                media={"audio": tiny_kinds.sound(n)},
            )
            for n in range(7)
        ]
        said = assert_undisturbed(engine, asked)
    assert said["preemption"]["why_off"] == "it has an encoder"


def test_a_model_with_an_encoder_starts_without_checkpoints(tmp_path: Path) -> None:
    """VLLM starts no such model with a KV connector; another's connector stays, for vLLM to refuse."""
    from conserve.engine.vllm.checkpoint.kv_transfer import FLAG, with_checkpoints
    from conserve.engine.vllm.server.process import command_line

    def words(model: Path) -> list[str]:
        flags = with_checkpoints(["--max-model-len", "64", "--dtype", "float32"], {"policy": "eager"})
        return command_line(str(model), flags, models_folder=tmp_path)

    whisper = configured(tmp_path / "whisper", model_type="whisper", is_encoder_decoder=True)
    assert FLAG not in words(whisper)
    assert "64" in words(whisper)
    assert FLAG in words(configured(tmp_path / "llama", model_type="llama"))


OFF = "--no-enable-prefix-caching"


@pytest.mark.parametrize(
    ("config", "off"),
    [
        ({"model_type": "llama", "hidden_size": 64}, False),
        ({"model_type": "falcon_h1", "mamba_n_heads": 4}, True),
        ({"model_type": "nemotron_h", "mamba_num_heads": 4}, True),
        ({"model_type": "qwen3_5", "text_config": {"linear_key_head_dim": 128}}, False),
        ({"model_type": "nano", "text_config": {"mamba_num_heads": 4}}, True),
    ],
)
def test_prefix_caching_is_vllms_choice_but_for_mamba_2_on_a_cpu(
    config: dict[str, Any], off: bool, tmp_path: Path
) -> None:
    from conserve.engine.vllm.launching.flags import cpu_defaults
    from conserve.engine.vllm.server.process import command_line

    model = configured(tmp_path / "model", **config)
    assert (OFF in cpu_defaults(str(model), ["--dtype", "float32"])) == off
    words = command_line(str(model), ["--dtype", "float32"], models_folder=tmp_path)
    assert (OFF in words) == off
    assert "--enable-prefix-caching" not in words


@pytest.mark.parametrize("theirs", [[], ["--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}']])
def test_kv_on_a_cpu_leaves_room_for_its_copies(
    theirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take their memory only under load: one that is not there ends the server hours after its start."""
    from conserve.engine.vllm.checkpoint.kv_transfer import with_checkpoints
    from conserve.engine.vllm.launching import flags as launching
    from conserve.engine.vllm.server.process import command_line

    def kv(flags: list[str]) -> int:
        words = command_line(model, ["--dtype", "float32", *flags], models_folder=tmp_path)
        return int(words[words.index("--kv-cache-memory-bytes") + 1])

    gib = 1 << 30
    monkeypatch.setattr(launching, "_available_bytes", lambda: 7 * gib)
    model = str(configured(tmp_path / "model", model_type="llama"))
    assert kv(theirs) == (7 * gib - launching.PROCESS_BYTES) // 2
    copied = with_checkpoints(theirs, {"policy": "adaptive", "host_bytes": 2 * gib})
    assert kv(copied) == (7 * gib - launching.PROCESS_BYTES - 2 * gib) // 2


@pytest.mark.parametrize("flag", ["--pipeline-parallel-size", "--pipeline_parallel_size=2", "-pp"])
def test_stages_of_a_pipeline_are_compiled_on_a_cpu(flag: str, tmp_path: Path) -> None:
    from conserve.engine.vllm.launching.flags import cpu_defaults

    model = str(configured(tmp_path / "model", model_type="llama"))
    assert "--enforce-eager" in cpu_defaults(model, ["--dtype", "float32"])
    assert "--enforce-eager" not in cpu_defaults(model, ["--dtype", "float32", flag])


def configured(folder: Path, **config: Any) -> Path:
    """A model that is nothing but its configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_on_several_engines_are_refused_on_a_cpu() -> None:
    """vLLM would end at the first request: its CPU kernels have no exchange between the engines."""
    from types import SimpleNamespace

    from conserve.engine.vllm.launching.flags import require_exchange
    from conserve.errors import SettingsError

    def config(engines: int, experts: bool) -> Any:
        return SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=engines),
            model_config=SimpleNamespace(is_moe=experts),
        )

    for fine in (config(1, True), config(2, False)):
        require_exchange(fine)
    with pytest.raises(SettingsError) as refused:
        require_exchange(config(2, True))
    page = (Path(__file__).parents[2] / "docs/reference/modes.md").read_text()
    assert str(refused.value) in " ".join(page.split())
