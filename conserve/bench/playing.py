"""A comparison on one server: the load is sized to the engine, then every policy plays it in turn."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conserve.bench.compare import Design, alternate
from conserve.bench.deployment import Deployment
from conserve.bench.forecast import Engine
from conserve.bench.load import Target
from conserve.bench.measure import CONSERVE, Block
from conserve.bench.presets import Preset
from conserve.bench.sizing import Offered, Sized, judge, size
from conserve.config import Settings
from conserve.errors import EndpointUnusable

VOCABULARY = (100, 20_000)  # token ids of prompts
RESTORE_S = 5.0  # time-out for giving a server its policy back

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Measurement:
    """Blocks of a comparison as they end, and the arrivals they play."""

    offered: Offered
    blocks: list[Block] = field(default_factory=list)
    sized: Sized | None = None  # None before the engine's speed was asked for
    engine: Engine | None = None  # None if the server does not tell its latency model
    model: str = ""  # the server's name for it


async def on_server(
    endpoint: str,
    settings: Settings,
    preset: Preset,
    design: Design,
    measurement: Measurement,
    *,
    overload: bool,
    say: Say,
) -> None:
    """Compare on a server that runs already, and restore its policy, preemption and SLO."""
    endpoint = endpoint.rstrip("/").removesuffix("/v1")
    deployment = Deployment(endpoint, api_key=settings.harvest_key or settings.api_key)
    try:
        before = await deployment.regime()
        try:
            await measure(
                deployment, endpoint, settings, preset, design, measurement, overload=overload, say=say
            )
        finally:
            if measurement.sized is not None:  # otherwise nothing was changed
                await give_back(deployment, before, endpoint, say)
    finally:
        await deployment.close()


async def measure(
    deployment: Deployment,
    endpoint: str,
    settings: Settings,
    preset: Preset,
    design: Design,
    measurement: Measurement,
    *,
    overload: bool,
    say: Say,
) -> None:
    """Size the load, play it under each policy, and add the blocks to `measurement` as they end.

    Raises `Overloaded` if online-only alone cannot keep up, unless `overload` allows that.
    """
    offered, engine = measurement.offered, await deployment.engine()
    if CONSERVE in design.policies and (why := await deployment.why_not_preempted()):
        say(f"live requests wait for the iteration under way, which rows cannot leave: {why}")
    measurement.model = await deployment.model()
    target = Target(
        base_url=endpoint, model=measurement.model, api_key=settings.api_key, vocab_range=VOCABULARY
    )
    sized = size(offered, preset, design, engine, overload=overload)
    measurement.sized, measurement.engine = sized, engine
    say(sized.sentence())
    judged = None if overload else partial(judge, sized=sized, offered=offered, engine=engine)
    async for block in alternate(deployment, target, sized.source, sized.design, say=say, judged=judged):
        measurement.blocks.append(block)


async def give_back(deployment: Deployment, regime: dict[str, Any], endpoint: str, say: Say) -> None:
    """Restore the server's policy, preemption and SLO, or say that they are not."""
    try:
        async with asyncio.timeout(RESTORE_S):
            await deployment.restore(regime)
    except (EndpointUnusable, TimeoutError):
        say(f"{endpoint} did not take its policy {regime['policy']} back; start it again to have it")
