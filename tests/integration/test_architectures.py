"""Models built otherwise than Llama: rows leave at any layer, lose their memory, and answer as if undisturbed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_checkpoints import transfer
from tests.tiers import named
from tests.tiny_models import FEW_LAYERS as LAYERS
from tests.tiny_models import OTHERS, build_tiny_model
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]

ABANDONED_WHOLE = {"Phi"}  # vLLM runs it as transformers builds it, whose layers get positions as a pair
NOT_SAVED = {"Gemma2"}  # every other layer keeps a window of KV


IN_MINUTES = {"Gemma2"}  # of two kinds of KV; the others before a release


@pytest.fixture(params=named({kind: kind for kind in OTHERS}, in_minutes=IN_MINUTES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["v1", pytest.param("v2", marks=pytest.mark.full)])
def engine(kind: str, few_words: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.preempted_engine import started
    from tests.triton_on_cpu import v2_runner

    model = build_tiny_model(
        tmp_path / "model", tokenizer_from=few_words, layers=LAYERS, kind=kind, **OTHERS[kind]
    )
    settings = {"policy": "eager", "host_bytes": 16 << 20}
    with (
        v2_runner() if request.param == "v2" else nullcontext(),
        started(model, kv_transfer_config=transfer(settings)) as engine,
    ):
        assert engine.worker.use_v2_model_runner is (request.param == "v2")
        yield engine


def test_rows_leave_and_lose_their_memory(engine: Any, kind: str) -> None:
    from tests.preempted_engine import Ask, Dice, greedy, prompt

    assert engine.layers == LAYERS
    # No row leaves an iteration that is abandoned whole while online requests are in it.
    live, rows = (2, 60) if kind in ABANDONED_WHOLE else (30, 16)
    asked = [Ask(f"off{n}", prompt(30 + n * 67 % 290, n), greedy(rows)) for n in range(5)]
    asked += [Ask(f"on{n}", prompt(20 + n * 31, 50 + n), greedy(live), offline=False) for n in range(2)]
    wanted = engine.undisturbed(asked)
    assert len({token for answer in wanted.values() for token in answer.tokens}) > 10, "nothing to compare"
    engine.orders.follow(Dice(1, LAYERS))
    engine.add(*(ask for ask in asked if not ask.offline))
    engine.step()
    engine.add(*(ask for ask in asked if ask.offline))
    answers = engine.drain_losing(random.Random(2), 0.25)
    assert answers == wanted
    engine.orders.follow(None)
    engine.assert_nothing_is_left()
    said = engine.scheduler.conserve()
    assert said["preemption"]["iterations_left"] > 20
    assert said["preemption"]["rows_go_on"] == (kind not in ABANDONED_WHOLE)
    assert engine.lost > 5
    assert bool(said["checkpoint"]["tokens_restored"]) == (kind not in NOT_SAVED)
    assert bool(said["checkpoint"]["why_off"]) == (kind in NOT_SAVED)


def test_experts_are_told_of_the_tokens_that_they_computed(few_words: Path, tmp_path: Path) -> None:
    """vLLM notes each layer's choice of experts by a token's place in the pass, which no row may change."""
    from tests.integration.test_preemption import counts, mixed, offline_rows
    from tests.preempted_engine import started
    from tests.triton_on_cpu import v2_runner

    model = build_tiny_model(
        tmp_path / "model", tokenizer_from=few_words, layers=LAYERS, kind="Mixtral", **OTHERS["Mixtral"]
    )
    told: dict[str, Any] = {}
    with v2_runner(), started(model, enable_return_routed_experts=True) as engine:
        step = engine.llm.step

        def telling() -> Any:
            outputs = step()
            told.update({one.request_id: one.outputs[0].routed_experts for one in outputs if one.finished})
            return outputs

        engine.llm.step = telling
        for asked in (mixed(60), offline_rows(61)):
            wanted, before = engine.undisturbed(asked), counts(engine)
            alone = {ask.name: told.pop(ask.name) for ask in asked}
            assert engine.scripted(asked, {n: [(3, 1)] for n in (1, 2, 4)}) == wanted
            for name, experts in alone.items():
                assert experts.shape[1:] == (LAYERS, 2)
                assert told[name].tolist() == experts.tolist(), name
        assert (counts(engine) - before)["abandoned"] == 3
