"""Sizing: rate, lengths and blocks of a comparison on an engine of known speed. Pure.

The rate is the one at which online-only alone keeps the engine busy for a preset's share of the time, found by
bisection over `simulate_online.play` of the very arrivals that the rounds will play. Where that makes a comparison
too long, or a block too empty, prompts and answers are shortened first, then blocks stretched, then rounds left
out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

from conserve.bench.compare import (
    LEAD_S,
    STARTED_S,
    STARTING_S,
    WARM_TOKENS,
    Design,
    Source,
    started,
    turns,
)
from conserve.bench.measure import Block
from conserve.bench.names import NON_PREEMPTIVE_PLANNED, ONLINE_ONLY_PLANNED, SARATHI_P
from conserve.bench.presets import Preset
from conserve.bench.simulate_online import BlockForecast, EngineModel, p99s_ms, play
from conserve.errors import InputError, Overloaded
from conserve.names import NON_PREEMPTIVE, ONLINE_ONLY, PRIORITY, SARATHI_PP

BUSY = 0.52  # share of the time; the idle half is for offline rows, and lets bursts end
BUSIEST = 0.9  # share of the time; above it, queues grow for as long as requests arrive
QUEUED = 0.25  # share of a block; first tokens owed so long after its end mean an endless queue
IDLE = 0.4  # share of the time; beside an engine that idles more, the machine causes the queue
LENGTHS = (1.0, 0.5, 0.25, 0.125)  # times the preset's
LEAST_REQUESTS = 16  # in a block; fewer give no percentiles
MOST_STRETCH = 8.0
MEAN_BLOCK_S = 90.0  # including its answers: four policies and two rounds take twelve minutes
LONGEST_S = 720.0  # of a comparison without given rounds
STEPS = 16  # of a bisection: a rate to three digits
DOUBLINGS = 24
ALONE = (ONLINE_ONLY, ONLINE_ONLY_PLANNED)
UNBOUNDED = (
    NON_PREEMPTIVE,
    NON_PREEMPTIVE_PLANNED,
    SARATHI_P,
    PRIORITY,
    SARATHI_PP,
)  # no SLO shortens iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Arrivals of the command line, which can also be played at other rates."""

    name: str  # flags of the arrivals, without the rate
    source: Callable[[Preset, float | None], Source]  # at so many requests/s; None: as the command line says
    flags: Callable[[float], str]  # flags that set this rate
    rate: float  # requests/s, as the command line says
    sizable: bool = False  # True if the preset may set the rate
    given: frozenset[str] = frozenset()  # of rate, lengths, block_s and rounds: the ones that sizing keeps
    lengths: float = 1.0  # of prompts and answers, times the preset's
    trace_s: float | None = None  # duration of a trace that blocks play whole; None if it is not compressed
    requests: int | None = None  # of such a trace, if it is thinned: no block has more
    on_ticks: bool = False  # times of the trace were rounded to ticks, and are spread over them

    def most(self, block_s: float) -> float:
        """Largest rate in blocks of so many seconds, to three digits."""
        return inf if self.requests is None else _digits(self.requests / block_s)


class BlockLoad(NamedTuple):
    """Load of a block under online-only, predicted or measured."""

    busy: float  # share of the block
    last_first_token_s: float  # since the block's start
    block_s: float
    roomy: bool = False  # an engine that is busy with a few requests computes more tokens in the same time

    @property
    def too_much(self) -> bool:
        """True if queues grow as long as requests arrive, or outlast the block by a quarter of it.

        An engine with room in its iterations may be busy all the time, and has no queue yet.
        """
        late = self.last_first_token_s > (1 + QUEUED) * self.block_s
        return late or (self.busy > BUSIEST and not self.roomy)

    def __str__(self) -> str:
        late_s = self.last_first_token_s - self.block_s
        late = f", with first tokens {late_s:.0f} s after the block's end" if late_s >= 1 else ""
        return f"{self.busy:.0%} busy{late}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """Arrivals that are played, and the busy share and latencies expected of online-only."""

    preset: Preset  # with the played lengths
    design: Design
    source: Source
    rate: float
    lengths: float  # times the preset's
    chosen: bool  # True if the machine's speed decided
    forecasts: Sequence[BlockForecast]  # one a round; none if the engine's speed is unknown
    takes_s: float = 0.0  # of the blocks
    begins_s: float = 0.0  # before blocks: servers that start, and live requests that count for nothing
    trace_s: float | None = None  # as in `Offered`
    on_ticks: bool = False  # as in `Offered`

    @property
    def load(self) -> BlockLoad:
        """Expected load."""
        return _load(self.forecasts, self.design.block_s)

    def flags(self, offered: Offered, rate: float) -> str:
        """Flags that play these arrivals at that rate on any machine."""
        words = [offered.flags(rate)]
        if self.lengths != 1:
            words.append(f"--lengths {self.lengths:g}")
        if self.chosen:
            words.append(f"--block-s {self.design.block_s:g} --rounds {self.design.rounds}")
        return " ".join(words)

    def _changed(self) -> str:
        """Words for what is changed of a trace: how much faster it is played, and requests that are spread."""
        ticks = ", the requests of each tick of its times spread over the tick" if self.on_ticks else ""
        if self.trace_s is None:
            return ticks
        times = self.trace_s / self.design.block_s
        return f" that play the trace's {self.trace_s:.0f} s {times:.3g} times as fast as recorded{ticks}"

    def sentence(self) -> str:
        """Line on the arrivals and the load expected of them."""
        design, how = self.design, "set by the machine's speed" if self.chosen else "as asked"
        blocks = f"{design.rounds} x {len(design.policies)} blocks of {design.block_s:g} s{self._changed()}"
        if not self.forecasts:
            return f"{self.rate:.3g} requests/s, {blocks}; the server tells no latency model to foretell the load"
        requests = [one for forecast in self.forecasts for one in forecast.requests]
        prompt = _mean([one.input_tokens for one in requests])
        answer = _mean([one.output_tokens for one in requests])
        ttft_ms, tbt_ms = p99s_ms(self.forecasts)
        ahead = " of a pass before them" if design.slo_ahead else ""
        slo = "given" if design.slo else f"{design.slo_scale:g} x online-only's P99s{ahead}"
        takes = f"about {max(1, round((self.takes_s + self.begins_s) / 60))} min"
        return (
            f"{how}: {self.rate:.3g} requests/s, prompts of {prompt:.0f} and answers of {answer:.0f} tokens on "
            f"average, {blocks}, SLO {slo}; expected of online-only: engine busy {self.load.busy:.0%}, "
            f"P99 TTFT {ttft_ms:,.0f} ms, TBT {tbt_ms:,.0f} ms; takes {takes}"
        )


def size(
    offered: Offered, preset: Preset, design: Design, engine: EngineModel | None, *, overload: bool = False
) -> Sized:
    """Choose rate, lengths and blocks for this engine; `engine` is None if its speed is unknown.

    Raises `Overloaded` if online-only alone cannot keep up with the arrivals, unless `overload` is allowed.
    """
    as_named = Sized(
        preset=preset.times(offered.lengths),
        design=design,
        source=offered.source(preset.times(offered.lengths), None),
        rate=min(offered.rate, offered.most(design.block_s)),
        lengths=offered.lengths,
        chosen=False,
        forecasts=(),
        trace_s=offered.trace_s,
        on_ticks=offered.on_ticks,
    )
    if engine is None:
        return as_named
    if preset.busy is not None and offered.sizable and "rate" not in offered.given:
        return _chosen(offered, preset, design, engine)
    found = _with_forecasts(as_named, engine)
    if found.load.too_much and not overload:
        raise Overloaded(advice(found.load, found, offered, engine, "would keep"))
    return found


def judge(block: Block, *, sized: Sized, offered: Offered, engine: EngineModel | None) -> None:
    """Raise `Overloaded` if online-only alone could not keep up in this block."""
    load = measured(block, sized.design.block_s, roomy=engine is not None and engine.roomy)
    if load.too_much and load.busy < IDLE:
        raise Overloaded(
            f"online-only alone kept the engine {load}: it was not the engine that held them up but the server "
            "before it, or other work on the machine; run it again with nothing beside it, or play it all the same "
            "with --allow-overload"
        )
    if load.too_much:
        slower = engine and replace(engine, scale=engine.scale * _slowdown(block, sized))
        work_s = _work_s(block, load.block_s)
        raise Overloaded(advice(load, sized, offered, slower, "kept", work_s=work_s))


def measured(block: Block, block_s: float, *, roomy: bool = False) -> BlockLoad:
    """Load of a played block. A request without a token counts as owed until it was given up."""
    firsts = [one.token_at_s[0] if one.token_at_s else one.ended_s for one in block.answers]
    return BlockLoad(block.busy_s / block.duration_s, max(firsts, default=0.0), block_s, roomy)


def advice(
    load: BlockLoad,
    sized: Sized,
    offered: Offered,
    engine: EngineModel | None,
    verb: str,
    *,
    work_s: float = 0.0,
) -> str:
    """Sentence on too many arrivals, with the rate to use.

    `work_s` is the engine's time for a block, for where no `engine` tells it.
    """
    if engine is not None:
        rate = _rate(sized.preset, offered, sized.design, engine, BUSY)
    else:
        rate = _digits(sized.rate * BUSY * load.block_s / work_s)
    use = f"use {sized.flags(offered, rate)}"
    if offered.sizable and not sized.chosen:
        use += ", leave --rate out to have it set by the machine's speed"
    return (
        f"at {sized.rate:.3g} requests/s online-only alone {verb} the engine {load}, which leaves offline work "
        f"nothing; {use}, or play it all the same with --allow-overload"
    )


def _chosen(offered: Offered, preset: Preset, design: Design, engine: EngineModel) -> Sized:
    """Sizing with the longest prompts and answers that keep the comparison short and its blocks full enough."""
    options = (offered.lengths,) if "lengths" in offered.given else LENGTHS
    for lengths in options:
        found = _at_lengths(offered, preset, design, engine, lengths)
        if _requests(found) >= LEAST_REQUESTS and found.takes_s <= MEAN_BLOCK_S * _blocks(found):
            break
    if "block_s" not in offered.given and (few := _requests(found)) < LEAST_REQUESTS:
        block_s = design.block_s * min(MOST_STRETCH, LEAST_REQUESTS / max(few, 1.0))
        design = replace(design, block_s=5.0 * ceil(block_s / 5))
        found = _at_lengths(offered, preset, design, engine, found.lengths)
    if "rounds" not in offered.given and found.takes_s > LONGEST_S and design.rounds > 1:
        found = _at_lengths(offered, preset, replace(design, rounds=1), engine, found.lengths)
    return found


def _at_lengths(
    offered: Offered, preset: Preset, design: Design, engine: EngineModel, lengths: float
) -> Sized:
    """Sizing at the rate that keeps the engine as busy as the preset says."""
    shortened = replace(preset.times(lengths), block_s=design.block_s)
    rate = min(_rate(shortened, offered, design, engine, preset.busy or BUSY), offered.most(design.block_s))
    found = Sized(
        preset=shortened,
        design=design,
        source=offered.source(shortened, rate),
        rate=rate,
        lengths=lengths,
        chosen=True,
        forecasts=(),
        trace_s=offered.trace_s,
        on_ticks=offered.on_ticks,
    )
    return _with_forecasts(found, engine)


def _with_forecasts(sized: Sized, engine: EngineModel) -> Sized:
    """Copy with a forecast of each round."""
    forecasts = _forecasts(sized.source, sized.design, engine)
    design, resident = sized.design, sized.preset.resident
    tails_s = _tails_s(design, forecasts, engine)
    return replace(
        sized,
        forecasts=forecasts,
        takes_s=_takes_s(design, tails_s),
        begins_s=_begins_s(design, forecasts, tails_s, resident=resident),
    )


def _forecasts(
    source: Source, design: Design, engine: EngineModel, *, until_s: float = inf
) -> list[BlockForecast]:
    """Forecast of each round's arrivals under online-only."""
    found = []
    for number in range(design.rounds):
        try:
            trace = source(number)
        except InputError:  # no arrival is left at this rate
            trace = None
        found.append(play(trace, engine, design.block_s, until_s=until_s))
    return found


def _load(forecasts: Sequence[BlockForecast], block_s: float) -> BlockLoad:
    """Load with the mean of the rounds' busy shares and the longest of their queues."""
    last_s = max(one.last_first_token_s for one in forecasts)
    return BlockLoad(_mean([one.busy for one in forecasts]), last_s, block_s, forecasts[0].roomy)


def _rate(preset: Preset, offered: Offered, design: Design, engine: EngineModel, busy: float) -> float:
    """Rate, to three digits, that keeps the engine busy for this share, or as near as the arrivals allow."""

    until_s = (1 + QUEUED) * design.block_s

    def off(rate: float) -> float:
        found = _forecasts(offered.source(preset, rate), design, engine, until_s=until_s)
        load = _load(found, design.block_s)
        return inf if load.too_much else load.busy - busy

    low = high = offered.rate
    tried = {_digits(low): off(_digits(low))}
    for _ in range(DOUBLINGS):
        if tried[_digits(high)] >= 0:
            break
        low, high = high, high * 2
        tried[_digits(high)] = off(_digits(high))
    for _ in range(DOUBLINGS):
        if tried[_digits(low)] <= 0:
            break
        low, high = low / 2, low
        tried[_digits(low)] = off(_digits(low))
    for _ in range(STEPS):
        middle = _digits((low * high) ** 0.5)
        if middle in tried:
            break
        tried[middle] = off(middle)
        low, high = (middle, high) if tried[middle] < 0 else (low, middle)
    return min(tried, key=lambda rate: abs(tried[rate]))


def _takes_s(design: Design, tails_s: Mapping[str, float]) -> float:
    """Estimate the seconds of all blocks, and of their longest answers after the last arrival."""
    before_s = STARTING_S + LEAD_S + design.settle_s
    return sum(before_s + design.block_s + tails_s[policy] for policy in turns(design))


def _begins_s(
    design: Design, forecasts: Sequence[BlockForecast], tails_s: Mapping[str, float], *, resident: bool
) -> float:
    """Estimate the seconds before blocks: of servers that start, and of live requests that count for nothing."""
    share = min(1.0, WARM_TOKENS / max(1, _longest(forecasts)))  # of the longest answer
    warmed_s = sum(design.warmed_by * share * tails_s[policy] for policy in turns(design))
    return warmed_s + sum(STARTED_S + tails_s[policy] for policy in started(design, resident=resident))


def _tails_s(design: Design, forecasts: Sequence[BlockForecast], engine: EngineModel) -> dict[str, float]:
    """Seconds of a block's longest answer after the last arrival, by policy."""
    # Beside unbounded offline rows each token of an answer takes a full iteration, under ConServe one of the SLO.
    tbt_s = (design.slo.tbt_ms if design.slo else p99s_ms(forecasts)[1]) / 1e3
    longest = _longest(forecasts)
    alone_s = max(0.0, _mean([forecast.ended_s for forecast in forecasts]) - design.block_s)
    known = dict.fromkeys(ALONE, alone_s) | dict.fromkeys(UNBOUNDED, longest * engine.full_s())
    return {policy: known.get(policy, max(alone_s, longest * tbt_s)) for policy in design.policies}


def _longest(forecasts: Sequence[BlockForecast]) -> int:
    """Tokens of the longest answer."""
    return max((one.output_tokens for forecast in forecasts for one in forecast.requests), default=0)


def _slowdown(block: Block, sized: Sized) -> float:
    """Ratio of the block's measured work to the predicted one."""
    if not sized.forecasts:
        return 1.0
    first = sized.forecasts[0]
    foretold_s = first.busy_s + max(0.0, first.ended_s - first.block_s)
    return max(1.0, _work_s(block, first.block_s) / foretold_s) if foretold_s else 1.0


def _work_s(block: Block, block_s: float) -> float:
    """Engine time for all requests of the block, in s, until the last is answered."""
    ended_s = max((one.ended_s for one in block.answers), default=0.0)
    return block.busy_s + max(0.0, ended_s - block_s)


def _requests(sized: Sized) -> float:
    return _mean([len(one.requests) for one in sized.forecasts])


def _blocks(sized: Sized) -> int:
    return sized.design.rounds * len(sized.design.policies)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _digits(rate: float) -> float:
    """Rate rounded to three digits, as a command line shows it."""
    return float(f"{rate:.3g}")
