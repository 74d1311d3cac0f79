"""An arrival that begins beside no row: the policy looks at none, and vLLM goes through none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [pytest.mark.engine, *OF_VLLM]
BLOCK = 16  # tokens


class Seen:
    """An engine of rows that decode, and the running requests that vLLM's `schedule` begins with."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.rows = [engine.add(40, 200, offline=True) for _ in range(5)]
        for _ in range(3):
            engine.step()
        self.running: list[set[str]] = []
        manager = self.scheduler.kv_cache_manager
        starts = manager.new_step_starts

        def seen() -> None:
            self.running.append({request.request_id for request in self.scheduler.running})
            starts()

        monkeypatch.setattr(manager, "new_step_starts", seen)


@pytest.fixture
def make(tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    from tests.bare_scheduler import BareEngine, engine_config

    def make(*, harm: float = 1e-4, blocks: int = 4096) -> Seen:
        section = {"policy": "conserve", "harm": harm}
        config = engine_config(tmp_path, section=section, block_size=BLOCK)
        return Seen(BareEngine(config, num_blocks=blocks, clock=clock), monkeypatch)

    return make


def test_vllm_goes_through_no_row_for_it_and_finds_them_again(make: Callable[..., Seen]) -> None:
    seen = make()
    first, second = seen.engine.add(40, 3), seen.engine.add(40, 3)
    output = seen.engine.step()
    assert output.num_scheduled_tokens == {first.request_id: 40, second.request_id: 40}
    assert seen.running == [set()]
    assert seen.scheduler.running == [first, second, *seen.rows]
    while seen.scheduler.requests:
        seen.engine.step()
    assert all(len(request.output_token_ids) == request.max_tokens for request in (first, second, *seen.rows))


def test_rows_with_a_part_in_the_iteration_are_seen(make: Callable[..., Seen]) -> None:
    seen = make(harm=9.0)
    seen.engine.add(40, 3)
    assert len(seen.engine.step().num_scheduled_tokens) > 1
    assert len(seen.running[0]) == 5


def test_rows_are_seen_where_vllm_may_have_to_evict_one(make: Callable[..., Seen]) -> None:
    seen = make(blocks=5 * 3 + 8)  # of which one is vLLM's own
    arrival = seen.engine.add(6 * BLOCK, 3)
    assert seen.engine.step().num_scheduled_tokens == {arrival.request_id: 6 * BLOCK}
    assert len(seen.running[0]) in (4, 5)


def test_no_waiting_row_is_looked_at_for_it(
    make: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.scheduling.observation import Picture

    seen, looked = make(), []
    found = Picture._found
    for _ in range(3):
        seen.engine.add(40, 200, offline=True)

    def looking(picture: Any, request: Any) -> Any:
        looked.append(request.request_id)
        return found(picture, request)

    monkeypatch.setattr(Picture, "_found", looking)
    arrival = seen.engine.add(40, 3)
    seen.engine.step()
    assert looked == [arrival.request_id]
