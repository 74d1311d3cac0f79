"""Bound of a cell: what a scheduler that knows the future would have harvested beside the same arrivals. Pure.

A fluid bound on the latency model. In a block of T ms,

    live_ms + x * row_ms + constant_ms * iterations(x) <= T

and x, the rows' worth of offline work, is as large as that allows. `live_ms` and `row_ms` are what tokens add to an
iteration. Iterations, of which each has the constant part, are at least as many as tokens and decode steps need at
the engine's largest sizes, and as many as the answers need: each request's tokens lie in iterations of their own
between its arrival and the end that the SLO leaves it.

What it relaxes: the work is divisible, KV memory is endless, no prompt waits for an iteration under way, iterations
may be as short and as close as is convenient, and live work that the SLO does not want by the end of the block
needs no iterations. As in a policy's rows, such work is paid for all the same (`leftover`). What it does not relax:
each live request keeps the SLO, not 99 % of them. So a policy that keeps the SLO stays below it, and one that does
not may exceed it.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from conserve.bench.attainment import LatencyLimits
from conserve.bench.simulate_online import EngineModel
from conserve.bench.traces import Arrival, Trace
from conserve.profiles.batch import Batch, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Offline rows on an engine: tokens of a mean row, and the time that each adds to an iteration."""

    prompt: float  # tokens
    steps: float  # decode steps; the first token of an answer comes with the prompt
    token_ms: float  # of a prompt token
    step_ms: float

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], engine: EngineModel) -> "Mix":
        """The mean of these rows' prompt and answer tokens."""
        prompts, steps = sum(prompt for prompt, _ in lengths), sum(answer - 1 for _, answer in lengths)
        prompts_ms = sum(engine.added_ms(Slice(prompt, 0)) for prompt, _ in lengths)
        steps_ms = sum(decodes_ms(engine, prompt, answer, answer - 1) for prompt, answer in lengths)
        return cls(
            prompt=prompts / len(lengths),
            steps=steps / len(lengths),
            token_ms=prompts_ms / max(1, prompts),
            step_ms=steps_ms / max(1, steps),
        )

    @property
    def row_ms(self) -> float:
        """Time that a row adds to the iterations it is in."""
        return self.rows_ms(self.prompt, self.steps)

    def rows_ms(self, prompts: float, steps: float) -> float:
        """Time that so many prompt tokens and decode steps of rows add to iterations."""
        return prompts * self.token_ms + steps * self.step_ms

    def rows(self, prompts: float, steps: float) -> float:
        """Rows' worth of work in so many prompt tokens and decode steps."""
        return self.rows_ms(prompts, steps) / self.row_ms


def rows_per_s(
    blocks: Iterable[Trace], engine: EngineModel, block_s: float, slo: LatencyLimits, mix: Mix
) -> float:
    """Mean of the blocks' bounds, in rows' worth of work per second."""
    found = [_rows(trace, engine, block_s, slo, mix) for trace in blocks]
    return sum(found) / len(found) / block_s


def most_rows_per_s(engine: EngineModel, mix: Mix) -> float:
    """Rows per second of an engine without live requests."""
    iterations = max((mix.prompt + mix.steps) / engine.max_tokens, mix.steps / engine.max_requests)
    return 1e3 / (mix.row_ms + engine.ms(Batch()) * iterations)


def _rows(trace: Trace, engine: EngineModel, block_s: float, slo: LatencyLimits, mix: Mix) -> float:
    """Rows' worth of work in one block; negative where live work alone takes longer."""
    left_ms, constant_ms = 1e3 * block_s - _live_ms(trace, engine), engine.ms(Batch())
    trace = wanted_by(trace, block_s, slo)
    steps = sum(one.output_tokens - 1 for one in trace)
    tokens = steps + sum(one.input_tokens - trace.cached(one) for one in trace)
    kinds = (
        (constant_ms * least_iterations(trace, slo), 0.0),
        (
            constant_ms * tokens / engine.max_tokens,
            constant_ms * (mix.prompt + mix.steps) / engine.max_tokens,
        ),
        (constant_ms * steps / engine.max_requests, constant_ms * mix.steps / engine.max_requests),
    )
    (fixed, _), *_ = kinds
    if left_ms < fixed:  # live work goes beyond the block, as a policy's may
        return (left_ms - fixed) / mix.row_ms
    return min((left_ms - fixed) / (mix.row_ms + each) for fixed, each in kinds)


def wanted_by(trace: Trace, end_s: float, slo: LatencyLimits) -> Trace:
    """The requests with as many tokens as the SLO wants by then; without those that it wants none of."""
    tokens = ((one, _tokens_by(one, end_s, slo)) for one in trace)
    return replace(trace, arrivals=tuple(one._replace(output_tokens=count) for one, count in tokens if count))


def _tokens_by(one: Arrival, end_s: float, slo: LatencyLimits) -> int:
    left_ms = 1e3 * (end_s - one.at_s) - slo.ttft_ms
    return 0 if left_ms < 0 else min(one.output_tokens, 1 + int(left_ms / slo.tbt_ms))


def _live_ms(trace: Trace, engine: EngineModel) -> float:
    """Time that the live requests add to iterations."""
    live_ms = 0.0
    for one in trace:
        cached = trace.cached(one)
        live_ms += engine.added_ms(Slice(one.input_tokens - cached, cached))
        live_ms += decodes_ms(engine, one.input_tokens, one.output_tokens, one.output_tokens - 1)
    return live_ms


def least_iterations(trace: Trace, slo: LatencyLimits) -> int:
    """Fewest iterations that hold each request's tokens between its arrival and its end under the SLO.

    Greedy by the ends, each missing iteration as late as possible, which is optimal.
    """
    at_s: list[float] = []
    for end_s, one in sorted((_end_s(one, slo), one) for one in trace):
        missing = one.output_tokens - sum(one.at_s < at <= end_s for at in at_s)
        for _ in range(missing):
            insort(at_s, end_s)
    return len(at_s)


def _end_s(one: Arrival, slo: LatencyLimits) -> float:
    """Latest time of the last token."""
    return one.at_s + (slo.ttft_ms + (one.output_tokens - 1) * slo.tbt_ms) / 1e3


def decodes_ms(engine: EngineModel, prompt: int, answer: int, steps: int) -> float:
    """Time that so many of an answer's decode steps add to iterations, each in the middle of the answer."""
    return steps * engine.added_ms(Slice(1, prompt + answer // 2, True)) if steps else 0.0
