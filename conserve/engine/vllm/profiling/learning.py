"""The latency model of an engine: asking the scheduler for it, learning it, and requiring it for an SLO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conserve.engine.vllm.profiling.warm_up import seconds_asked_for, warm_up
from conserve.engine.vllm.requests.data_parallel import ask_engines, together
from conserve.engine.vllm.settings import PROFILE_COMMAND
from conserve.errors import ProfileMissing

SLO_FLAGS = {"ttft_ms": "--ttft-slo", "tbt_ms": "--tbt-slo", "harm": "--harm"}
PACE_FLAGS = {"tbt_ms": "--tbt-ms"}


async def scheduler_says(
    engine_client: Any, change: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The report of all engines' schedulers, after `change` if one is given; None if another scheduler runs."""
    answers = await ask_engines(engine_client, "conserve", change)
    return None if None in answers else together(answers)


async def learn(engine_client: Any, *, say: Callable[[str], None]) -> None:
    """Warm the engine up until its scheduler has a latency model; nothing for a model that only embeds."""

    async def known() -> bool:
        # This question ends the warm-up, as a request from outside would.
        said = await scheduler_says(engine_client, {})
        return said is None or said["latency_model"] is not None

    if engine_client.vllm_config.model_config.runner_type != "generate":
        return
    await warm_up(engine_client, say=say, seconds=seconds_asked_for(), known=known)
    if not await known():
        say("the warm-up taught too little; the first requests go on with it")


def require_model(
    said: Mapping[str, Any],
    slo: Mapping[str, Any],
    command: str = PROFILE_COMMAND,
    *,
    flags: Mapping[str, str] = SLO_FLAGS,
) -> None:
    """Raise `ProfileMissing` for an SLO if the engine has no latency model: it could only break it silently."""
    promised = " and ".join(flag for name, flag in flags.items() if slo.get(name) is not None)
    if promised and said["latency_model"] is None:
        raise ProfileMissing(
            f"{promised} cannot be kept: this engine has no latency model, and its warm-up taught it none; "
            f"measure one with: {command}"
        )
