"""Simulation of online-only alone on a trace, by the engine's latency model. Pure.

A discrete-event loop over iterations: vLLM's batching (running requests first, then waiting ones in their order,
prompts in chunks of what is left of the iteration's tokens), each iteration as long as the model says. It knows
nothing of KV memory, of the front end and of the machine's noise.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from conserve.bench.measure import percentiles
from conserve.bench.traces import Trace
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LinearModel, added_ms

STEP, MANY = Slice(1, 256, True), 64  # decode steps beside each other, which tell whether an engine has room
FULL_PROMPT = 256  # tokens of each prompt in an iteration that offline rows fill


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Latency model of an engine, the tokens and sequences one iteration holds, and the engines at one address."""

    model: LinearModel
    max_tokens: int  # vLLM's max_num_batched_tokens: of one iteration
    max_requests: int  # vLLM's max_num_seqs
    scale: float = 1.0  # factor on predictions: how much slower the machine was of late
    engines: int = 1  # alike, each with a part of the requests: vLLM's data parallel engines

    def ms(self, batch: Batch) -> float:
        """Predicted time of an iteration, in ms."""
        return self.scale * self.model.predict(batch)

    def added_ms(self, part: Slice) -> float:
        """Predicted time that this part adds to an iteration that holds others, in ms."""
        return self.scale * added_ms(self.model, part)

    @property
    def roomy(self) -> bool:
        """True if a decode step takes hardly longer beside many others: busy with a few, the engine has room."""
        one, many = (self.model.predict(Batch.of([STEP] * count)) for count in (1, MANY))
        return many < 2 * one

    @property
    def most_rows(self) -> int:
        """Rows in flight that keep the batches of all engines full."""
        return 2 * self.max_requests * self.engines

    def description(self) -> str:
        """Words for the model in a report."""
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.model.coefficients.items())
        return f"{self.model.name}: {terms} ms; times {self.scale:.3f}"

    def full_s(self) -> float:
        """Predicted time of an iteration that offline prompts fill, in s."""
        chunk = min(FULL_PROMPT, self.max_tokens)
        return self.ms(Batch.of([Slice(chunk, 0)] * (self.max_tokens // chunk))) / 1e3


@dataclass(slots=True)
class Request:
    """A simulated request."""

    at_s: float
    input_tokens: int
    output_tokens: int
    computed: int = 0
    token_at_s: list[float] = field(default_factory=list)

    def tokens(self, room: int) -> int:
        """Tokens of this request in an iteration that has room for `room` tokens."""
        return min(room, max(1, self.input_tokens - self.computed))

    def advance(self, tokens: int, now_s: float) -> bool:
        """Count the tokens of an iteration that ended; True if the answer is complete."""
        self.computed += tokens
        if self.computed >= self.input_tokens:
            self.token_at_s.append(now_s)
        return len(self.token_at_s) >= self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForecast:
    """Simulation of one block under online-only."""

    block_s: float
    requests: Sequence[Request]
    busy_s: float  # within the block; the mean of several engines
    ended_s: float  # end of the last answer, or of a simulation that was cut short
    roomy: bool = False  # as of the engine

    @property
    def busy(self) -> float:
        """Share of the block that the engine spends in iterations."""
        return self.busy_s / self.block_s

    @property
    def last_first_token_s(self) -> float:
        """Time of the last request's first token, in s since the block's start; infinite if one has none."""
        return max((one.token_at_s[0] if one.token_at_s else inf for one in self.requests), default=0.0)


def requests_of(trace: Trace | None) -> list[Request]:
    """The trace's requests; what their prompts share is in the prefix cache."""
    if trace is None:
        return []
    return [Request(one.at_s, one.input_tokens, one.output_tokens, trace.cached(one)) for one in trace]


def share_of(trace: Trace | None, engines: int, number: int = 0) -> Trace | None:
    """Arrivals at one of several engines, to which they go in turn."""
    arrivals = () if trace is None else trace.arrivals[number::engines]
    return replace(trace, arrivals=arrivals) if trace is not None and arrivals else None


def play(trace: Trace | None, engine: EngineModel, block_s: float, *, until_s: float = inf) -> BlockForecast:
    """Simulate the answers to these arrivals; without a trace the engine is idle."""
    shares = [share_of(trace, engine.engines, number) for number in range(engine.engines)]
    played = [_on_one(share, engine, block_s, until_s) for share in shares]
    return BlockForecast(
        block_s=block_s,
        requests=[one for part in played for one in part.requests],
        busy_s=sum(part.busy_s for part in played) / len(played),
        ended_s=max(part.ended_s for part in played),
        roomy=engine.roomy,
    )


def _on_one(trace: Trace | None, engine: EngineModel, block_s: float, until_s: float) -> BlockForecast:
    """Simulate one of the engines."""
    requests = requests_of(trace)
    due, running = deque(requests), list[Request]()
    waiting = deque[Request]()
    now_s, busy_s = 0.0, 0.0
    while (due or waiting or running) and now_s < until_s:
        while due and due[0].at_s <= now_s:
            waiting.append(due.popleft())
        if not (waiting or running):
            now_s = due[0].at_s
            continue
        scheduled = _schedule(running, waiting, engine)
        took_s = engine.ms(_batch(scheduled)) / 1e3
        busy_s += max(0.0, min(now_s + took_s, block_s) - now_s)
        now_s += took_s
        for one, tokens in scheduled:
            if one.advance(tokens, now_s):
                running.remove(one)
    return BlockForecast(block_s=block_s, requests=requests, busy_s=busy_s, ended_s=now_s)


def _schedule(
    running: list[Request], waiting: deque[Request], engine: EngineModel
) -> list[tuple[Request, int]]:
    """Requests and tokens of the next iteration, as vLLM schedules them; admitted requests move to `running`."""
    room, scheduled = engine.max_tokens, []
    for one in running:
        if room:
            scheduled.append((one, one.tokens(room)))
            room -= scheduled[-1][1]
    while waiting and room and len(running) < engine.max_requests:
        one = waiting.popleft()
        running.append(one)
        scheduled.append((one, one.tokens(room)))
        room -= scheduled[-1][1]
    return scheduled


def _batch(scheduled: Iterable[tuple[Request, int]]) -> Batch:
    batch, decodes = Batch(), []
    for one, tokens in scheduled:
        if one.computed >= one.input_tokens:
            decodes.append(one.computed)
        else:
            batch.add(tokens, one.computed)
    batch.add_decodes(len(decodes), sum(decodes))
    return batch


def p99s_ms(forecasts: Iterable[BlockForecast]) -> tuple[float, float]:
    """P99 TTFT and TBT over all blocks, in ms; 0 without answers."""
    answered = [one for forecast in forecasts for one in forecast.requests if one.token_at_s]
    ttft_ms = np.array([(one.token_at_s[0] - one.at_s) * 1e3 for one in answered])
    tbt_ms = np.concatenate([np.diff(one.token_at_s) * 1e3 for one in answered] or [np.array([])])
    ttft, tbt = percentiles(ttft_ms), percentiles(tbt_ms)
    return (ttft.p99 if ttft else 0.0), (tbt.p99 if tbt else 0.0)
