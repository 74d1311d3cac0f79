"""The scheduler's half of checkpoints against made-up workers that are late, fail, and copy what is there then."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs

pytestmark = needs("vllm")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model() -> Any:
    """Module of the world, which imports vLLM."""
    return importlib.import_module("tests.checkpoint_world")


@pytest.mark.parametrize("losses", [1_000, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("policy", ["eager", "adaptive"])
def test_what_comes_back_is_right_and_losses_leak_nothing(
    model: Any, policy: str, shared: bool, losses: int
) -> None:
    world = model.World(len(policy), policy=policy, shared=shared)
    while world.lost < losses:
        world.step()
        assert world.checkpoints.memory.used <= model.HOST
    assert world.restored > losses // 10
    world.finish()


class Greedy:
    """A user's policy that copies more blocks than any row has computed, also of rows that it was not told of."""

    def wants_marks(self, pressure: Any) -> bool:
        return True

    def checkpoint(self, rows: Any) -> None: ...

    def blocks_to_checkpoint(self, pressure: Any) -> dict[str, int]:
        return {f"row{number}": 1000 for number in range(600)}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("policy", [f"{__name__}.Greedy", "longest_checkpoints.Longest"])
def test_what_a_users_policy_has_copied_is_right_too(
    model: Any, policy: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    world = model.World(3, policy=policy, shared=shared)
    while world.lost < 200:
        world.step()
        for name, row in world.rows.items() if not shared else ():  # a row may find more of another's KV
            computed = row.num_computed_tokens if row.status.name == "RUNNING" else row.num_tokens
            assert len(world.checkpoints.saved.blocks(name)) <= computed // model.SIZE
    assert world.restored > 50
    assert not world.checkpoints.report()["refused_choices"]["count"]
    world.finish()


@pytest.mark.parametrize("answer", [None, ["row1"], {"row1": 2.5}, {"row1": -1}, {"row1": "x"}])
def test_a_users_policy_that_answers_nonsense_ends_no_engine(model: Any, answer: Any) -> None:
    world = model.World(4, policy=f"{__name__}.Greedy", shared=True)
    world.checkpoints.policy._own.blocks_to_checkpoint = lambda pressure: answer  # type: ignore[attr-defined]
    while world.lost < 50:
        world.step()
    refused = world.checkpoints.report()["refused_choices"]
    assert refused["count"] > 50
    assert len(refused["reasons"]) == 1
    assert world.restored, "the built-in policy chose meanwhile"
    world.finish()


@pytest.mark.parametrize("seed", range(40))
def test_from_any_beginning(model: Any, seed: int) -> None:
    world = model.World(seed, policy="eager", shared=bool(seed % 2))
    for _ in range(150):
        world.step()
    world.finish()
