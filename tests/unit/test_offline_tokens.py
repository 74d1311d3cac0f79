"""Worth of offline tokens, and the tokens that count."""

from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.vllm.scheduling.offline_tokens import OfflineTokens
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel
from conserve.profiles.worth import Worth

MADE_UP = {"compute": 0.7, "memory": 0.001, "attention": 1e-5, "request": 2.0, "constant": 15.0}  # ms
WORTH = Worth(step=4.0, context=0.01)


def request(name: str, computed: int, prompt: int = 100) -> Any:
    """After an iteration was scheduled, which has moved its counter on."""
    return SimpleNamespace(request_id=name, num_computed_tokens=computed, num_prompt_tokens=prompt)


def part(row: Any, tokens: int) -> Slice:
    """A part of an iteration as the scheduler sees it."""
    context = row.num_computed_tokens - tokens
    return Slice(tokens, context, tokens == 1 and context >= row.num_prompt_tokens)


def batch(requests: dict[str, Any], scheduled: dict[str, int]) -> Batch:
    return Batch.of(part(requests[name], tokens) for name, tokens in scheduled.items())


def count(counted: OfflineTokens, row: Any, tokens: int) -> int:
    scheduled, rows = {"row": tokens}, {"row": row}
    return counted.count(scheduled, rows, {"row"}, batch(rows, scheduled), WORTH)


class Constant:
    """Takes the same time whatever is computed."""

    def predict(self, batch: Batch) -> float:
        return 20.0

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        return 0


@pytest.mark.parametrize("several", [0.0, 1.5])
def test_a_decode_step_is_worth_what_it_takes_in_tokens_of_a_prompt(several: float) -> None:
    model = ConServeModel(dict.fromkeys(ConServeModel.terms, 0.0) | MADE_UP | {"several": several})
    worth = Worth.by(model)
    step = Slice(1, 700, True)
    more_ms = model.predict(Batch.of([step] * 9)) - model.predict(Batch.of([step] * 8))
    token_ms = (model.predict(Batch.of([Slice(512, 0)])) - model.predict(Batch.of([Slice(256, 0)]))) / 256
    assert worth.of(1, 700) == pytest.approx(more_ms / token_ms)
    assert worth.of(3, 2100) == pytest.approx(3 * worth.of(1, 700))
    corrected = CorrectedModel(model)
    for _ in range(200):
        corrected.observe(Batch.of([step] * 8), 1000.0)
    assert Worth.by(corrected) == pytest.approx(worth), "a slower machine is slower at both"
    assert Worth.by(Constant()) == Worth(1.0, 0.0)


def test_prompts_count_as_they_are_and_decode_steps_as_what_they_cost() -> None:
    counted = OfflineTokens()
    requests = {
        "chunk": request("chunk", 80),
        "last": request("last", 100),
        "step": request("step", 151),
        "live": request("live", 151),
    }
    scheduled = {"chunk": 80, "last": 1, "step": 1, "live": 1}
    assert (
        counted.count(scheduled, requests, {"chunk", "last", "step"}, batch(requests, scheduled), WORTH) == 82
    )
    assert counted.work == pytest.approx(80 + 1 + 4 + 0.01 * 150), "a prompt's last token is no decode step"


def test_who_leaves_an_iteration_takes_back_what_it_counted() -> None:
    counted = OfflineTokens()
    rows = {name: request(name, computed) for name, computed in (("chunk", 64), ("step", 131), ("late", 70))}
    rows["late"].num_computed_tokens = 50
    counted.loses(rows["late"])
    rows["late"].num_computed_tokens = 70  # 70 tokens from the first on, 50 of them for the second time
    scheduled = {"chunk": 64, "step": 1, "late": 70}
    assert counted.count(scheduled, rows, set(rows), batch(rows, scheduled), WORTH) == 64 + 1 + 20
    assert counted.again == 50
    left = [counted.left(name, part(rows[name], tokens), WORTH) for name, tokens in scheduled.items()]
    assert left == [64, 1, 20]
    assert counted.work == pytest.approx(0)
    assert counted.again == 0


def test_what_is_computed_again_is_worth_nothing() -> None:
    counted = OfflineTokens()
    row = request("row", 140)
    counted.loses(row)
    row.num_computed_tokens = 120
    assert count(counted, row, 120) == 0
    assert (counted.work, counted.again) == (0, 120)
    row.num_computed_tokens = 141  # the rest of what it had, and one more
    assert count(counted, row, 21) == 1
    assert (counted.work, counted.again) == (1, 140)
    counted.forget("row")
    row.num_computed_tokens = 142
    assert count(counted, row, 1) == 1
    assert counted.work == pytest.approx(1 + 4 + 0.01 * 141)
