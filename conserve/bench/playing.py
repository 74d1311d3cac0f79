"""A comparison: the load is sized to the engine, the baselines are tuned, then policies take turns."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from conserve.bench.baseline_parameters import TuningWorkload, token_budget, tuned_hygen
from conserve.bench.compare import Design, alternate, with_slo
from conserve.bench.deployment import Deployment, OneServer
from conserve.bench.field import Field
from conserve.bench.load import LoadTarget
from conserve.bench.measure import Block
from conserve.bench.names import SARATHI_P, TUNED, regime_of
from conserve.bench.presets import Preset
from conserve.bench.simulate_online import EngineModel
from conserve.bench.sizing import Offered, Sized, judge, size
from conserve.bench.slo_search import DEFAULT, Promise
from conserve.bench.stock import StockServer
from conserve.bench.stock_beside import StockBeside
from conserve.config import Settings
from conserve.endpoints.roster import server_url
from conserve.errors import EndpointUnusable, InputError
from conserve.hosts import without_login
from conserve.names import CONSERVE
from conserve.regime_change import RegimeChange

VOCABULARY = (100, 20_000)  # token ids of prompts
RESTORE_S = 5.0  # time-out for giving a server its policy back

Say = Callable[[str], None]
Prepare = Callable[[Sized, EngineModel | None, int | None], Awaitable[Field]]
"""Makes the field for a comparison of this size; the last is the token budget of `sarathi-p`, if that is tuned."""


@dataclass(slots=True, kw_only=True)
class Measurement:
    """Blocks of a comparison as they end, and the arrivals they play."""

    offered: Offered
    blocks: list[Block] = field(default_factory=list)
    sized: Sized | None = None  # None before the engine's speed was asked for
    engine: EngineModel | None = None  # None if the server does not tell its latency model
    model: str = ""  # the server's name for it
    tuned: list[str] = field(default_factory=list)  # sentences on the baselines' parameters
    lengths: Sequence[tuple[int, int]] | None = None  # of offline rows' prompts and answers; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayWishes:
    """Wishes of the user that the size of the comparison does not say."""

    overload: bool = False  # play also what online-only alone cannot keep up with
    promised: Sequence[Promise] = DEFAULT  # latencies that the tuned baselines keep
    profiler: Literal["forecast", "engine"] = "forecast"  # where their test runs are
    stock_endpoint: str | None = None  # stock vLLM with the same model beside the server, for `online-only`
    say: Say


async def on_server(
    endpoint: str,
    settings: Settings,
    preset: Preset,
    design: Design,
    measurement: Measurement,
    wishes: PlayWishes,
) -> None:
    """Compare on a server that runs already, and restore its policy, preemption and SLO."""
    endpoint = server_url(endpoint)
    deployment = Deployment(endpoint, api_key=settings.harvest_key or settings.api_key)
    stock = None
    if wishes.stock_endpoint is not None:
        stock_url = server_url(wishes.stock_endpoint, given_as="--stock-endpoint")
        stock = StockServer(stock_url, rows=None, api_key=settings.api_key)

    async def prepare(sized: Sized, engine: EngineModel | None, tokens: int | None) -> Field:
        target = LoadTarget(
            base_url=endpoint, model=measurement.model, api_key=settings.api_key, vocab_range=VOCABULARY
        )
        plugged = OneServer(deployment=deployment, target=target, preemption=design.preemption)
        if stock is None:
            return plugged
        beside = replace(target, base_url=stock.url, model=stock_model)
        return StockBeside(plugged=plugged, stock=stock, target=beside)

    try:
        stock_model = await stock.model() if stock is not None else ""
        before = await deployment.regime()
        try:
            await measure(deployment, prepare, preset, design, measurement, wishes)
        finally:
            if measurement.sized is not None:  # otherwise nothing was changed
                await give_back(deployment, before, without_login(endpoint), wishes.say)
    finally:
        await deployment.close()
        if stock is not None:
            await stock.close()


async def measure(
    deployment: Deployment,
    prepare: Prepare,
    preset: Preset,
    design: Design,
    measurement: Measurement,
    wishes: PlayWishes,
) -> None:
    """Size the load, play it under each policy, and add the blocks to `measurement` as they end.

    Raises `Overloaded` if online-only alone cannot keep up, unless `wishes` allow that, and `InputError` if a round
    has no arrival, or online-only no latency for the SLO.
    """
    offered, engine = measurement.offered, await deployment.engine()
    if CONSERVE in design.policies and (why := await deployment.why_rows_stay()):
        wishes.say(f"live requests wait for the iteration under way, which rows cannot leave: {why}")
    measurement.model = await deployment.model()
    sized = drawn(size(offered, preset, design, engine, overload=wishes.overload))
    require_gaps(sized)
    measurement.sized, measurement.engine = sized, engine
    wishes.say(sized.sentence())
    play = await ready(deployment, prepare, preset, measurement, wishes)
    design = await with_slo(play, sized.source, sized.design, say=wishes.say)
    measurement.sized = sized = replace(sized, design=design)
    judged = None if wishes.overload else partial(judge, sized=sized, offered=offered, engine=engine)
    async for block in alternate(play, sized.source, sized.design, say=wishes.say, judged=judged):
        measurement.blocks.append(block)


def drawn(sized: Sized) -> Sized:
    """Draw the arrivals of all rounds at once; raises `InputError` if a round has none."""
    rounds = [sized.source(number) for number in range(sized.design.rounds)]
    return replace(sized, source=rounds.__getitem__)


def require_gaps(sized: Sized) -> None:
    """Raise `InputError` if a promise is to follow from online-only's TBT, and no answer has a second token."""
    design, regimes = sized.design, map(regime_of, sized.design.policies)
    promising = any(one.policy == CONSERVE and one.harm is None for one in regimes)
    if design.slo is not None or not promising:
        return
    first = range(design.rounds if design.slo_ahead else 1)  # those that the first promise follows from
    if all(one.output_tokens == 1 for number in first for one in sized.source(number)):
        raise InputError(
            "live answers of one token have no time between tokens, from which the SLO of conserve would follow; "
            "give --ttft-slo and --tbt-slo, or longer answers"
        )


async def ready(
    deployment: Deployment, prepare: Prepare, preset: Preset, measurement: Measurement, wishes: PlayWishes
) -> Field:
    """The field with the baselines tuned to the load; each tuned parameter is said."""
    sized, engine, tokens = measurement.sized, measurement.engine, None
    assert sized is not None

    def told(sentence: str) -> None:
        measurement.tuned.append(sentence)
        wishes.say(sentence)

    if engine is None:
        if untuned := [name for name in sized.design.policies if name in TUNED]:
            told(f"{', '.join(untuned)}: not tuned, since the server tells no latency model")
        return await prepare(sized, None, None)
    workload = TuningWorkload.of(sized, preset, engine, sized.design.seed)
    if SARATHI_P in sized.design.policies:
        budget = await asyncio.to_thread(token_budget, workload, wishes.promised)
        told(budget.sentence())
        tokens = budget.tokens
    playing = await prepare(sized, engine, tokens)
    measures = wishes.profiler == "engine"
    for sentence in await tuned_hygen(
        playing, deployment, workload, sized, wishes.promised, measures=measures
    ):
        told(sentence)
    return playing


async def give_back(deployment: Deployment, regime: RegimeChange, endpoint: str, say: Say) -> None:
    """Restore the server's policy, preemption and SLO, or say that they are not."""
    try:
        async with asyncio.timeout(RESTORE_S):
            await deployment.restore(regime)
    except (EndpointUnusable, TimeoutError):
        say(f"{endpoint} did not take its policy {regime.policy} back; start it again to have it")
