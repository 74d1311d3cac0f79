"""Rows and live requests with LoRA adapters: iterations are abandoned whole, and answers stay what they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_checkpoints import transfer
from tests.tiny_models import LAYERS, build_tiny_adapter, build_tiny_model, word_tokenizer
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]
ADAPTERS = ("poet", "clerk", "guide")
SLOTS = 2  # adapters that an iteration may use


@pytest.fixture
def engine(demo_model: Path, tmp_path: Path) -> Iterator[Any]:
    from tests.preempted_engine import started

    model = build_tiny_model(tmp_path / "model", tokenizer_from=demo_model, layers=LAYERS)
    settings = {"policy": "eager", "host_bytes": 16 << 20}
    with started(
        model,
        kv_transfer_config=transfer(settings),
        enable_lora=True,
        max_loras=SLOTS,
        max_lora_rank=8,
        max_cpu_loras=len(ADAPTERS),
    ) as engine:
        yield engine


@pytest.fixture
def adapters(engine: Any, tmp_path: Path) -> dict[str, Any]:
    """Adapters of the model by name."""
    from vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(name, number, str(build_tiny_adapter(tmp_path / name, seed=number, layers=LAYERS)))
        for number, name in enumerate(ADAPTERS, start=1)
    }


@pytest.mark.full
def test_rows_of_three_adapters_are_abandoned_and_lose_their_memory(
    engine: Any, adapters: dict[str, Any]
) -> None:
    from tests.preempted_engine import Ask, Dice, greedy, prompt

    rows = [
        Ask(f"off-{name}{n}", prompt(40 + 70 * n, n), greedy(20), adapter=adapters[name])
        for n in range(2)
        for name in ADAPTERS  # vLLM on a CPU computes rows of the base model beside them with an adapter
    ]
    live = [Ask("on-poet", prompt(20, 9), greedy(8), offline=False, adapter=adapters["poet"])]
    wanted = engine.undisturbed(rows + live)
    assert len({wanted[f"off-{name}0"].tokens for name in ADAPTERS}) == 3, "adapters do nothing"

    engine.orders.follow(Dice(1, LAYERS))
    engine.add(*rows)
    answers = engine.drain_losing(random.Random(2), 0.1, {10: live})
    assert answers == wanted
    engine.orders.follow(None)
    engine.assert_nothing_is_left()
    said = engine.scheduler.conserve()
    assert said["preemption"]["iterations_left"] > 5
    assert not said["preemption"]["rows_go_on"]
    assert said["preemption"]["live_tokens_recomputed"] == 0
    assert engine.lost > 2
    assert said["checkpoint"]["tokens_restored"]


def test_a_start_with_adapters_on_a_cpu_warns_of_the_base_model(tmp_path: Path) -> None:
    from conserve.engine.vllm.launching.flags import parse_flags, said_of_adapters

    model = str(word_tokenizer(tmp_path, context=64))
    with_adapters = parse_flags(model, ["--enable-lora", "--max-loras", "3"])
    warning = said_of_adapters(with_adapters)
    assert warning is not None
    assert "(now 3); set --max-loras above" in warning
    assert said_of_adapters(parse_flags(model, [])) is None
