"""Tokens of live requests leave first: no text of a row is made before them."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [pytest.mark.engine, *OF_VLLM]


def test_outputs_of_live_requests_are_the_first(tmp_path: Path, clock: Any) -> None:
    from tests.bare_scheduler import BareEngine, engine_config

    engine = BareEngine(
        engine_config(tmp_path, section={"policy": "conserve", "harm": 9.0}), num_blocks=4096, clock=clock
    )
    for length in range(4, 20):
        engine.add(40, length, offline=True)
    for _ in range(3):
        engine.step()
    live = engine.add(40, 30)
    overtook = ended = 0
    while not live.is_finished():
        output = engine.start()
        scheduled = list(output.num_scheduled_tokens)
        answered = [one for outputs in engine.finish(output).values() for one in outputs.outputs]
        names = [one.request_id for one in answered]
        if live.request_id in names:
            assert names[0] == live.request_id
            overtook += scheduled[0] != live.request_id
            ended += any(one.finish_reason is not None for one in answered[1:])
    assert overtook
    assert ended, "rows that end have their place among the others"


def test_the_front_end_sends_them_before_it_makes_the_text_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from conserve.engine.vllm.launching.environment import OUTPUTS, prepare_environment

    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop(OUTPUTS, None)
    prepare_environment(offline=True, served=True)

    async def processed_at_the_live_token() -> int:
        """Number of outputs that vLLM's handler has processed by when the consumer of the first one has it."""
        processed, came = 0, asyncio.Event()

        def process(outputs: Sequence[int], *args: Any, **rest: Any) -> Any:
            nonlocal processed
            processed += len(outputs)
            came.set()
            return SimpleNamespace(request_outputs=[], reqs_to_abort=[])

        async def get() -> Any:
            if processed:
                await asyncio.Event().wait()
            outputs = [SimpleNamespace(mm_cache_miss_hashes=None)] * 256
            return SimpleNamespace(
                outputs=outputs, timestamp=0.0, scheduler_stats=None, engine_index=0, weight_version=None
            )

        async def consume() -> int:
            await came.wait()
            return processed

        llm = SimpleNamespace(
            output_handler=None,
            engine_core=SimpleNamespace(get_output_async=get),
            output_processor=SimpleNamespace(
                process_outputs=process, update_scheduler_stats=lambda stats: None, propagate_error=print
            ),
            log_stats=False,
            logger_manager=None,
            renderer=SimpleNamespace(mm_processor_cache=None, stat_mm_cache=lambda: None),
        )
        consuming = asyncio.create_task(consume())
        await asyncio.sleep(0)
        AsyncLLM._run_output_handler(llm)
        try:
            return await consuming
        finally:
            llm.output_handler.cancel()

    assert asyncio.run(processed_at_the_live_token()) == 32
