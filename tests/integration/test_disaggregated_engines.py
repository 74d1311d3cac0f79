"""Prefill and decode on simulated engines of their own: KV is handed over by vLLM's protocol, each token once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conserve.bench.traces import Arrival
from tests.tiers import in_full
from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
    pytest.mark.engine,
]

ROWS = [(300, 20)] * 16
BLOCK = 128  # tokens
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Make:
    """Pools without scatter."""

    def make(
        prefill: int = 1,
        decode: int = 1,
        *,
        decode_blocks: int = 4096,
        rows: Sequence[tuple[int, int]] = ROWS,
    ) -> Any:
        from conserve.engine.vllm.simulation.disaggregated import Disaggregated, PoolEngine, handing_over
        from tests.bare_scheduler import MODEL, known_times, section_of

        section = section_of(policy="priority", preemption="off")
        flags = {"max_num_batched_tokens": 1024, "block_size": BLOCK}
        stages = [
            PoolEngine(
                handing_over(tmp_path, section, known_times(), flags),
                clock=clock,
                model=MODEL,
                layers=4,
                num_blocks=blocks,
                scatter=0.0,
                seed=0,
            )
            for blocks in [4096] * prefill + [decode_blocks] * decode
        ]
        return Disaggregated(stages[:prefill], stages[prefill:], offline=iter(rows), window=12)

    return make


def free_blocks(stage: Any) -> int:
    return int(stage.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def done(pool: Any) -> dict[str, Any]:
    """Run the pool until no row is left; its report."""
    for _ in range(100):
        pool.go_on_until(pool.now + 0.5)
        if not pool._rows:
            return dict(pool.report())
    raise AssertionError(f"{pool._rows} rows are left")


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), *in_full((2, 1), (1, 2))])
def test_every_token_is_computed_once(make: Make, prefill: int, decode: int) -> None:
    pool = make(prefill, decode)
    answers = pool.play([Arrival(0.2, 150, 12), Arrival(0.21, 90, 1), Arrival(0.9, 400, 30)], 1.0)
    assert [len(answer.token_at_s) for answer in answers] == [12, 1, 30]
    assert all(min(answer.tbts_ms, default=1.0) > 0 for answer in answers)
    offline = done(pool)["offline"]
    assert offline["tokens"] == sum(prompt + answer - 1 for prompt, answer in ROWS)
    assert offline["decode_steps"] == sum(answer - 1 for _, answer in ROWS)
    stages = [*pool._prefill, *pool._decode]
    assert all(stage.load == 0 and not stage.senders for stage in stages)
    assert all(stage.connector.leaving == set() == {*stage.connector.brought} for stage in stages)
    assert {free_blocks(stage) for stage in stages} == {4096 - 1}, "one is vLLM's own"


def test_a_live_request_decodes_beside_steps_alone(make: Make) -> None:
    """While rows' prompts take 150 ms an iteration in the prefill engine, gaps stay those of decode steps."""
    pool = make()
    pool.go_on_until(pool.now + 0.3)
    (answer,) = pool.play([Arrival(0.01, 100, 20)], 1.0)
    assert answer.ttft_ms > 100
    assert max(answer.tbts_ms) < 40


def test_kv_stays_with_its_sender_until_there_is_room(make: Make) -> None:
    pool = make(decode_blocks=1 + 3 * 2)  # two rows of 320 tokens
    pool.go_on_until(pool.now + 0.6)
    (prefill,), (decode,) = pool._prefill, pool._decode
    waiting = len(decode.connector.brought)
    assert waiting >= 4
    assert free_blocks(prefill) <= 4095 - 3 * waiting
    report = done(pool)
    assert report["offline"]["tokens"] == sum(prompt + answer - 1 for prompt, answer in ROWS)
    assert free_blocks(prefill) == 4095


def test_a_row_that_loses_its_memory_computes_its_prompt_again_where_it_decodes(make: Make) -> None:
    grows = [(250, 20)] * 12  # from two blocks to three
    pool = make(decode_blocks=1 + 7, rows=grows)
    report = done(pool)
    assert report["checkpoint"]["tokens_recomputed"] >= 250
    assert report["offline"]["tokens"] == sum(prompt + answer - 1 for prompt, answer in grows)
