"""Offline work per second beside all live work: less the live work that a policy left behind (`leftover`). Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from conserve.bench.bound import Mix
from conserve.bench.leftover import left_by_policy, left_ms
from conserve.bench.measure import Block, PolicyComparison, PolicyOutcome, RowRates
from conserve.bench.names import most_of, runs_offline
from conserve.bench.simulate_online import EngineModel
from conserve.profiles import worth

LEAST_ROOM = 0.1  # part of the rows in a block that are rows beside all live work; below it, no ratio is told


def with_rows(
    comparison: PolicyComparison,
    blocks: Sequence[Block],
    engine: EngineModel,
    lengths: Sequence[tuple[int, int]] | None,
) -> PolicyComparison:
    """The comparison with the policies' rows beside all live work.

    `lengths` are prompt and answer tokens of offline rows. Without them no row is known: work by the server's own
    count, which is in prompt tokens, is compared instead, and the ratio alone is told.
    """
    left = left_by_policy(blocks, engine)
    if lengths is not None:
        return replace(comparison, rows=row_rates(comparison.policies, Mix.of(lengths, engine), left))
    token_ms = engine.scale * worth.token_ms(engine.model)
    work = {name: one.offline_work_per_s * token_ms for name, one in comparison.policies.items()}
    rates = beside_live(comparison.policies, work, left)
    ratios = {name: RowRates(of_non_preemptive=rate.of_non_preemptive) for name, rate in rates.items()}
    return replace(comparison, rows=ratios)


def row_rates(
    policies: Mapping[str, PolicyOutcome], mix: Mix, left: Mapping[str, float]
) -> dict[str, RowRates]:
    """Rows of each policy, by the mean row of this mix; `left` is live work left behind in ms, by policy."""
    rows = {
        name: mix.rows(one.offline_prompt_tokens_per_s, one.offline_decode_tokens_per_s)
        for name, one in policies.items()
    }
    return beside_live(policies, rows, {name: ms / mix.row_ms for name, ms in left.items()})


def rows_beside(blocks: Sequence[Block], engine: EngineModel, mix: Mix) -> tuple[float, float, float]:
    """Rows of one policy's blocks per second beside all live work, and the prompt tokens and decode steps."""
    seconds = sum(block.engine_s for block in blocks)
    steps = sum(block.offline_decodes for block in blocks)
    prompts = sum(block.offline_tokens for block in blocks) - steps
    left = left_ms(blocks, engine) / mix.row_ms
    return (mix.rows(prompts, steps) - left) / seconds, prompts / seconds, steps / seconds


def beside_live(
    policies: Mapping[str, PolicyOutcome], in_block: Mapping[str, float], left: Mapping[str, float]
) -> dict[str, RowRates]:
    """Rates of offline work, from those in blocks and the live work left behind in the same unit."""
    beside = {name: in_block[name] - left.get(name, 0.0) / one.duration_s for name, one in policies.items()}
    most = most_of([*policies])
    yardstick, least = (beside[most], LEAST_ROOM * in_block[most]) if most is not None else (None, 0.0)
    rates = {}
    for name in policies:
        rate = beside[name] if runs_offline(name) else None
        rates[name] = RowRates(
            rows_per_s=rate,
            rows_in_block_per_s=in_block[name],
            of_non_preemptive=over(rate, yardstick, least),
        )
    return rates


def over(value: float | None, of: float | None, least: float) -> float | None:
    """The ratio; None where live requests leave the yardstick next to nothing."""
    return value / of if value is not None and of is not None and of > least else None


def least_room(rates: Mapping[str, RowRates]) -> float:
    """Rows per second of a yardstick below which no ratio is told."""
    most = most_of([*rates])
    in_block = rates[most].rows_in_block_per_s if most is not None else None
    return LEAST_ROOM * (in_block or 0.0)
