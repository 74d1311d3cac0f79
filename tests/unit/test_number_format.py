"""The number format of a CPU engine, measured on made-up machines of each kind."""

from pathlib import Path

import pytest

from conserve.engine.runtime.number_format import (
    DECODE_TOKENS,
    LAYER_WEIGHTS,
    Build,
    Products,
    Shapes,
    Speed,
    choose,
    measure,
)
from conserve.engine.vllm.launching import number_format
from conserve.engine.vllm.launching.flags import KV_BYTES_MIN, PROCESS_BYTES, affordable
from conserve.engine.vllm.launching.number_format import Chosen, names_format, own_format, recall, remember
from tests.warned import OF_VLLM

DEMO = Shapes(products=((576, 960), (576, 576), (576, 3072), (1536, 576)))
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
Rates = dict[str, tuple[float, float]]  # format -> GFLOP/s of prefill-sized and of decode-sized products

# Measured on two cores each, but for the last two: ARM servers with and without BF16 instructions.
AMX: Rates = {"bfloat16": (1500.0, 400.0), "float32": (150.0, 90.0)}
AVX512_BF16: Rates = {"bfloat16": (185.0, 123.0), "float32": (95.0, 71.0)}
AVX512_BF16_SLOW: Rates = {"bfloat16": (54.0, 31.0), "float32": (121.0, 80.0)}
AVX2: Rates = {"bfloat16": (19.0, 18.0), "float32": (84.0, 51.0)}
ARM_BF16: Rates = {"bfloat16": (200.0, 60.0), "float32": (60.0, 30.0)}
ARM: Rates = {"float16": (9.0, 9.0), "float32": (40.0, 20.0)}


class Machine:
    """A processor of given speeds, and the clock that only its work moves."""

    def __init__(self, rates: Rates, *, disturbed: int = 0) -> None:
        self.rates, self.now, self.calls = rates, 0.0, 0
        self.disturbed = disturbed  # of its first products, which other work makes ten times slower

    def clock(self) -> float:
        return self.now

    @property
    def build(self) -> Build:
        def made(name: str, shapes: Shapes, layers: int) -> Products:
            if name not in self.rates:
                raise RuntimeError("no such primitive")

            def run(tokens: int, layers: int) -> None:
                self.calls += 1
                prefill, decode = self.rates[name]
                rate = decode if tokens == DECODE_TOKENS else prefill
                slow = 10.0 if self.calls <= self.disturbed else 1.0
                self.now += slow * 2.0 * shapes.weights * tokens * layers / (rate * 1e9)

            return run

        return made

    def choose(self, own: str = "bfloat16", shapes: Shapes = DEMO) -> str:
        return choose(measure(self.build, shapes, (own, "float32"), clock=self.clock), own)


@pytest.mark.parametrize(
    ("rates", "own", "chosen"),
    [
        (AMX, "bfloat16", "bfloat16"),
        (AVX512_BF16, "bfloat16", "bfloat16"),
        (AVX512_BF16_SLOW, "bfloat16", "float32"),
        (AVX2, "bfloat16", "float32"),
        (ARM_BF16, "bfloat16", "bfloat16"),
        (ARM, "float16", "float32"),
        (ARM, "bfloat16", "float32"),  # no such products there
    ],
)
def test_the_faster_format_is_chosen_on_each_kind_of_machine(rates: Rates, own: str, chosen: str) -> None:
    machine = Machine(rates)
    assert machine.choose(own) == chosen
    assert machine.now < 1.0, "seconds that a start may take for it"


def test_speeds_are_those_of_the_machine() -> None:
    machine = Machine(AVX2)
    speeds = measure(machine.build, DEMO, ("bfloat16", "float32"), clock=machine.clock)
    assert {name: (speed.prefill, speed.decode) for name, speed in speeds.items()} == {
        name: (pytest.approx(prefill), pytest.approx(decode)) for name, (prefill, decode) in AVX2.items()
    }


def test_a_disturbance_that_passes_does_not_decide() -> None:
    assert Machine(AMX, disturbed=8).choose() == "bfloat16"
    assert Machine(AVX2, disturbed=8).choose() == "float32"


def test_float32_must_be_worth_twice_the_memory() -> None:
    def at(float32: float) -> dict[str, Speed]:
        return {
            "bfloat16": Speed(prefill=100, decode=50),
            "float32": Speed(prefill=float32, decode=float32 / 2),
        }

    assert choose(at(104.0), "bfloat16") == "bfloat16"
    assert choose(at(106.0), "bfloat16") == "float32"


def test_prompts_and_answers_both_count() -> None:
    halves = Speed(prefill=100, decode=10)
    assert choose({"bfloat16": halves, "float32": Speed(prefill=80, decode=40)}, "bfloat16") == "float32"
    assert choose({"bfloat16": halves, "float32": Speed(prefill=50, decode=12)}, "bfloat16") == "bfloat16"


def test_a_large_model_is_measured_in_its_proportions() -> None:
    shapes = Shapes.of(LLAMA_8B)
    assert shapes.products == ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    small = shapes.measurable()
    assert small.weights <= LAYER_WEIGHTS
    ratios = [
        (given / small_given, wanted / small_wanted)
        for (given, wanted), (small_given, small_wanted) in zip(shapes.products, small.products, strict=True)
    ]
    assert max(max(pair) for pair in ratios) / min(min(pair) for pair in ratios) < 1.05
    assert DEMO.measurable() == DEMO
    machine = Machine(AVX2)
    assert machine.choose(shapes=shapes) == "float32"
    assert machine.now < 1.5


@pytest.mark.parametrize(
    ("config", "first", "up"),
    [
        ({"n_embd": 768, "n_head": 12}, (768, 2304), (768, 3072)),  # GPT-2
        ({"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 100}, (64, 192), (64, 100)),  # OPT
        ({"text_config": LLAMA_8B}, (4096, 6144), (4096, 28672)),  # the text part of a multi-modal model
    ],
)
def test_shapes_are_read_from_any_configuration(
    config: dict[str, object], first: tuple[int, int], up: tuple[int, int]
) -> None:
    products = Shapes.of(config).products
    assert (products[0], products[2]) == (first, up)


def test_the_models_own_half_format_competes() -> None:
    assert own_format({"dtype": "float16"}) == "float16"
    assert own_format({"torch_dtype": "torch.bfloat16"}) == "bfloat16"
    assert own_format({"dtype": "float32"}) == "bfloat16"
    assert own_format({"text_config": {"dtype": "float16"}}) == "float16"
    assert own_format({}) == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dtype", "float16"], True),
        (["--dtype=auto"], True),
        (["-q", "awq"], True),
        (["--quantization", "awq"], True),
        (["--max-num-seqs", "4"], False),
        ([], False),
    ],
)
def test_the_users_format_wins(flags: list[str], named: bool) -> None:
    assert names_format(flags) == named


def test_a_choice_is_kept_for_this_machine_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert recall(LLAMA_8B) is None
    chosen = Chosen("float32", {"float32": Speed(prefill=84.0, decode=51.0)})
    remember(LLAMA_8B, chosen)
    assert recall(LLAMA_8B) == chosen
    assert recall({**LLAMA_8B, "hidden_size": 2048}) is None
    assert recall({**LLAMA_8B, "dtype": "float16"}) is None
    for name in number_format.VARIABLES:
        with monkeypatch.context() as other:
            other.setenv(name, "another")
            assert recall(LLAMA_8B) is None
    with monkeypatch.context() as other:
        other.setattr(number_format, "cpu_model", lambda: "another processor")
        assert recall(LLAMA_8B) is None
    with monkeypatch.context() as other:
        other.setattr(number_format, "installed_version", lambda _: "99.0")
        assert recall(LLAMA_8B) is None


def test_a_damaged_file_of_choices_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = Chosen("bfloat16", {})
    remember(LLAMA_8B, chosen)
    number_format.formats_file().write_text("{")
    assert recall(LLAMA_8B) is None
    remember(LLAMA_8B, chosen)
    assert recall(LLAMA_8B) == chosen


def test_a_cache_folder_that_cannot_be_written_costs_a_measurement_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conserve").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remember(LLAMA_8B, Chosen("bfloat16", {}))
    assert recall(LLAMA_8B) is None


def test_quantised_models_are_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 64, "quantization_config": {"quant_method": "awq"}}'
    )
    assert number_format.format_of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    assert number_format.format_of(str(tmp_path)) is None
    (tmp_path / "weights.gguf").write_text("")
    assert number_format.format_of(str(tmp_path / "weights.gguf")) is None


@pytest.mark.parametrize(
    "threads", [pytest.param(n, marks=(pytest.mark.engine, *OF_VLLM)) for n in (1, 2, 3)]
)
def test_weights_are_packed_for_the_threads_that_multiply(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.model_executor.layers import utils

    packed_on, multiplied_on = [], []

    def dispatch(layer: torch.nn.Linear, *, remove_weight: bool) -> None:
        packed_on.append(torch.get_num_threads())
        layer.cpu_linear = lambda *_: multiplied_on.append(torch.get_num_threads())

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", dispatch)
    monkeypatch.setattr(number_format, "compute_threads", lambda: threads)
    before = torch.get_num_threads()
    number_format.vllms_products("float32", Shapes(products=((8, 16), (16, 8))), layers=2)(4, 1)
    assert torch.get_num_threads() == before
    assert (packed_on, multiplied_on) == ([threads] * 4, [threads] * 2)


def test_float32_gives_way_where_its_weights_leave_no_room() -> None:
    speeds = {"bfloat16": Speed(prefill=19, decode=18), "float32": Speed(prefill=84, decode=51)}
    weights = 3 << 30
    enough = 2 * weights + PROCESS_BYTES + KV_BYTES_MIN
    assert affordable(Chosen("float32", speeds), available=enough, weights=weights) == "float32"
    assert affordable(Chosen("float32", speeds), available=enough - 1, weights=weights) == "bfloat16"
    assert affordable(Chosen("bfloat16", speeds), available=0, weights=weights) == "bfloat16"
    alone = {"float32": speeds["float32"]}
    assert affordable(Chosen("float32", alone), available=0, weights=weights) == "float32"
