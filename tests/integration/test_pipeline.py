"""Stages of a pipeline, a process each: rows and live requests answer as they would alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.test_modes import PROMISES
from tests.integration.test_parallel import SETTINGS, Ranks, rows
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(600),
    *OF_VLLM,
]


@pytest.fixture
def ranks(six_layers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """An engine with two stages, a process each."""
    from tests.preempted_engine import ENVIRONMENT

    for name, value in {**ENVIRONMENT, **SETTINGS}.items():
        monkeypatch.setenv(name, value)
    # vLLM on a CPU makes room for what a stage gets from the one before it while it compiles, and only then.
    made = Ranks(six_layers, eager=False, pipeline_parallel_size=2)
    yield made
    made.close()


def test_a_parallel_pipeline(ranks: Ranks) -> None:
    """Two iterations are under way at once: rows stay, are evicted, and answer as alone."""
    asked, scheduler, dice, lost = rows(1), ranks.core.scheduler, random.Random(3), 0
    wanted: Mapping[str, Sequence[int]] = {}
    for ask in asked:
        wanted |= ranks.answers([ask])
    assert ranks.core.batch_queue_size == 2

    def lose() -> None:
        nonlocal lost
        running = [row for row in scheduler.running if row.request_id in scheduler.offline]
        if running and dice.random() < 0.2:
            ranks.take_memory(dice.choice(running))
            lost += 1

    for promise in PROMISES:
        scheduler.conserve({"slo": promise})
        assert ranks.answers(asked) == wanted, promise
        assert ranks.answers(asked, lose) == wanted, promise
    assert lost > 5
    said = scheduler.conserve()
    assert said["preemption"]["why_off"] == said["checkpoint"]["why_off"] == "the pipeline is parallel"
    assert said["checkpoint"]["tokens_recomputed"]
