"""The comparison: policies take turns on one engine, in short blocks, so that drift hits all of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from conserve.bench.answers import RequestEnd, tbts_ms, ttfts_ms
from conserve.bench.attainment import LatencyLimits
from conserve.bench.field import Field, Turn
from conserve.bench.load import LoadPlan, play, play_apart
from conserve.bench.measure import Block, by_policy, online_only_p99s, percentiles
from conserve.bench.names import alone_of, is_stock
from conserve.bench.traces import Trace
from conserve.names import OFF

STARTING_S = 2.0  # of the load generator's process, about
LEAD_S = 0.5  # from when it is ready to the first moment of a block
T = TypeVar("T")
WARMED_BY, WARM_TOKENS = 3, 8  # requests, and tokens of an answer
WARM_SEED = 1_000_003  # apart from those of all turns, so that no block's prompt is in the prefix cache
PRACTICE_S = 20.0  # of arrivals that a server has met before its first block
FILL_S = 15.0  # for the rows of a server that has begun just now to get beyond their prompts
STARTED_S = 60.0 + FILL_S + PRACTICE_S  # of a server, about, from its start to its first block


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Design of a comparison: policies, rounds, blocks, SLO."""

    policies: Sequence[str]
    rounds: int
    block_s: float
    settle_s: float = 3.0  # time under a policy before its block counts
    warmed_by: int = WARMED_BY  # live requests that count for nothing, before each block
    slo: LatencyLimits | None = None
    slo_scale: float = 1.0  # of online-only's P99s, where no SLO is given
    slo_ahead: bool = False  # these are of a pass of online-only before the rounds
    seed: int = 0
    preemption: str = OFF  # of policies that do not name theirs (`conserve/just-enough`)
    load_cores: tuple[int, ...] = ()  # cores that the load generator is pinned to
    starts_servers: bool = False  # stock ones start in their turns

    @property
    def blocks(self) -> int:
        """Number of blocks of the whole comparison."""
        return self.rounds * len(self.policies)

    @property
    def ahead(self) -> str | None:
        """Online-only by its name here, where it plays before the rounds for the SLO."""
        return alone_of(self.policies) if self.slo_ahead and self.slo is None else None


Source = Callable[[int], Trace]
"""Arrivals of a round, by its number."""


async def alternate(
    field: Field,
    source: Source,
    design: Design,
    *,
    say: Callable[[str], None],
    judged: Callable[[Block], None] | None = None,
) -> AsyncIterator[Block]:
    """Play every round's arrivals under every policy, and yield each block as it ends.

    The order of the policies turns from round to round, since a policy's place in a round may count. Online-only
    comes first in the first one: its latencies are the others' SLO, and each further block of it refines them. Its
    first block is `judged`, which may raise to end the comparison.
    """
    blocks: list[Block] = []
    for number in range(design.rounds):
        trace = source(number)
        for policy in order(design.policies, number):
            block = await one_turn(field, policy, slo_of(design, blocks), trace, design)
            blocks.append(block)
            say(sentence(block, number, design.rounds))
            if judged is not None and policy == alone_of(design.policies) and number == 0:
                judged(block)
            yield block


async def with_slo(field: Field, source: Source, design: Design, *, say: Callable[[str], None]) -> Design:
    """The design with its SLO: where it is `slo_ahead`, online-only plays all arrivals for that, the second time.

    An SLO of the blocks so far changes with each of them: with few requests in a block the first promise is a
    half or twice the last, and policies are then held against another promise than they were given. A started
    server takes longer for prompts of a length that it has not had, so the first pass counts for nothing.
    """
    alone = design.ahead
    if alone is None:
        return design
    for number in range(design.rounds):
        await one_turn(field, alone, None, source(number), design)
    blocks = []
    for number in range(design.rounds):
        blocks.append(await one_turn(field, alone, None, source(number), design))
        say(f"for the SLO, {sentence(blocks[-1], number, design.rounds)}")
    return replace(design, slo=limits(blocks, design.slo_scale))


async def one_turn(
    field: Field, policy: str, slo: LatencyLimits | None, trace: Trace, design: Design
) -> Block:
    """Play the arrivals once under a policy that promises this SLO, after a while without them."""
    turn = await field.turn(policy, slo)
    if turn.first:
        await practised(turn, trace)
    await warmed(turn, trace, design.warmed_by)
    await asyncio.sleep(design.settle_s)
    block = await one_block(turn, trace, design, policy)
    await field.played(policy)
    return block


def order(policies: Sequence[str], number: int) -> list[str]:
    """Policies in another order every round; in the first one the reference comes first."""
    alone = alone_of(policies)
    first = sorted(policies, key=lambda policy: policy != alone)
    turn = number % len(first)
    return [*first[turn:], *first[:turn]]


def turns(design: Design) -> Iterator[str]:
    """Policies in the order of their turns, those before the blocks included."""
    if design.ahead is not None:
        yield from [design.ahead] * 2 * design.rounds  # two passes
    for number in range(design.rounds):
        yield from order(design.policies, number)


def started(design: Design, *, resident: bool) -> list[str]:
    """Policies of the turns for which a server starts; one that is `resident` stays while others have theirs.

    The plug-in's server is up when the first turn begins.
    """
    plugged = ""
    found, up = list[str](), {plugged}
    for policy in turns(design) if design.starts_servers else ():
        place = policy if is_stock(policy) else plugged
        if place not in up:
            found.append(policy)
        up = up | {place} if resident else {place}
    return found


def slo_of(design: Design, blocks: Sequence[Block]) -> LatencyLimits | None:
    """The SLO that was given, else so many times online-only's P99s of these blocks; None before there are any."""
    return design.slo or limits(blocks, design.slo_scale)


def limits(blocks: Sequence[Block], scale: float) -> LatencyLimits | None:
    """SLO after conserve-2026, section 6.2: `scale` times the P99s of online-only so far."""
    p99s = online_only_p99s(by_policy(blocks))
    return LatencyLimits(scale * p99s.ttft_ms, scale * p99s.tbt_ms) if p99s is not None else None


async def practised(turn: Turn, trace: Trace) -> None:
    """Play the block's first arrivals to a server that has just started, uncounted, with other prompts.

    A started server takes longer for each number of tokens that it computes for the first time, and for a prefix
    that live requests share. In the pass that sets the SLO such requests would be the P99, and so the promise.
    """
    early = trace.cut(trace.arrivals[0].at_s, PRACTICE_S)
    await play(early, turn.target, seed=turn.seed + WARM_SEED * (WARMED_BY + 1))


async def warmed(turn: Turn, trace: Trace, requests: int) -> None:
    """Send live requests as long as the first of the block's, whose answers count for nothing.

    A server whose turn begins was stopped or has just started. The block's first request would be its slowest,
    which of few requests is their P99, and so the SLO; and a server that had no turn for a minute expects none.
    """
    if not requests:
        return
    first = trace.arrivals[0]
    short = first._replace(at_s=0.0, output_tokens=min(WARM_TOKENS, first.output_tokens))
    one = replace(trace, duration_s=1.0, arrivals=(short,))
    for number in range(requests):
        await play(one, turn.target, seed=turn.seed + WARM_SEED * (number + 1))


async def one_block(turn: Turn, trace: Trace, design: Design, policy: str) -> Block:
    """Play the arrivals once. Offline tokens count while requests arrive, answers until the last is complete."""
    loop, server = asyncio.get_running_loop(), turn.server
    plan = LoadPlan(trace=trace, target=turn.target, seed=turn.seed, cores=design.load_cores)
    beginning: asyncio.Future[float] = loop.create_future()

    def begin() -> float:
        beginning.set_result(loop.time() + LEAD_S)
        return beginning.result()

    async with beside(play_apart(plan, begin)) as playing:
        either: set[asyncio.Future[Any]] = {playing, beginning}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not beginning.done():
            playing.result()  # raises what ended it early
        start_at = beginning.result()
        await asyncio.sleep(max(0.0, start_at - loop.time()))
        first, began = await server.counters(), loop.time()
        async with beside(server.watch(start_at)) as watching:
            done, _ = await asyncio.wait({playing}, timeout=max(0.0, start_at + design.block_s - loop.time()))
            if done:
                playing.result()  # raises what ended it early
                await asyncio.sleep(max(0.0, start_at + design.block_s - loop.time()))
            last, ended = await server.counters(), loop.time()
        seen = watching.result()
        answers = await playing
    return Block(
        policy=policy,
        started_s=time.time() - (loop.time() - start_at),
        duration_s=ended - began,
        answers=tuple(answers),
        **server.counted(first, last, seen, answers, ended - began),
    )


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator["asyncio.Task[T]"]:
    """Run `work` beside the block of the `with`, and cancel it at its end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved


def sentence(block: Block, number: int, rounds: int) -> str:
    """Line of progress on a block."""
    ttft_ms, tbt_ms = percentiles(ttfts_ms(block.answers)), percentiles(tbts_ms(block.answers))
    latency = (
        f"TTFT P50 {ttft_ms.p50:,.0f} and P99 {ttft_ms.p99:,.0f} ms, TBT {tbt_ms.p50:,.0f} and {tbt_ms.p99:,.0f} ms"
        if ttft_ms and tbt_ms
        else "no answers"
    )
    offline, busy = block.offline_tokens / block.duration_s, block.busy_s / block.duration_s
    failed = sum(answer.status is not RequestEnd.OK for answer in block.answers)
    requests = f"{len(block.answers)} requests" + (f", {failed} failed" if failed else "")
    left = f", rows left {block.iterations_left:,} iterations" if block.iterations_left else ""
    return (
        f"round {number + 1}/{rounds} {block.policy}: {requests}, {latency}, "
        f"{offline:,.0f} offline tokens/s, engine busy {busy:.0%}{left}"
    )


def relative(blocks: Sequence[Block]) -> list[Block]:
    """Blocks on a clock that starts with the first one."""
    zero = min(block.started_s for block in blocks)
    return [replace(block, started_s=block.started_s - zero) for block in blocks]
