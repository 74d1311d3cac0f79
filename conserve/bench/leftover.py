"""Live work that a block leaves behind when its time is over. Pure.

A block begins without live requests, and its rows are counted until its time is over. A policy that lets live
requests wait has more rows by then, and the work of these requests still before it: rows that no longer stretch of
such blocks would give. So this work is taken off the rows, and all policies have the same live work.
"""

from collections.abc import Iterable, Sequence

from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.bound import decodes_ms
from conserve.bench.measure import Block, by_policy
from conserve.bench.simulate_online import EngineModel
from conserve.profiles.batch import Slice


def left_by_policy(blocks: Sequence[Block], engine: EngineModel) -> dict[str, float]:
    """`left_ms` of each policy's blocks."""
    return {name: left_ms(of, engine) for name, of in by_policy(blocks).items()}


def left_ms(blocks: Iterable[Block], engine: EngineModel) -> float:
    """Time that live tokens which came after the end of their block's time add to iterations.

    A prompt without its first token counts whole, but for what the prefix cache had: also that of a request that
    failed, and so do the tokens that a failed one lacks. A request that was refused within the block's time is no
    work.
    """
    return sum(_left_ms(answer, block.duration_s, engine) for block in blocks for answer in block.answers)


def _left_ms(answer: LoadAnswer, end_s: float, engine: EngineModel) -> float:
    """Time that the late tokens of one answer add to iterations."""
    if answer.status is RequestEnd.REFUSED and answer.ended_s <= end_s:
        return 0.0
    done, prompt = sum(at_s <= end_s for at_s in answer.token_at_s), answer.input_tokens
    cached = answer.cached_tokens
    prompt_ms = 0.0 if done else engine.added_ms(Slice(prompt - cached, cached))
    failed = answer.status is not RequestEnd.OK
    tokens = max(answer.tokens, answer.output_tokens) if failed else answer.tokens
    return prompt_ms + decodes_ms(engine, prompt, tokens, max(0, tokens - max(1, done)))
