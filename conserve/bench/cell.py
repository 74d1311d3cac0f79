"""Figures of one cell of a sweep: the policies' blocks at one operating point, as a JSON document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isinf
from typing import Any

from conserve.bench.attainment import LatencyLimits
from conserve.bench.beside import least_room, over, row_rates
from conserve.bench.bound import Mix
from conserve.bench.harm import Change
from conserve.bench.measure import Block, PolicyComparison, PolicyOutcome, RowRates, compare, plain
from conserve.bench.names import alone_of
from conserve.bench.points import Cell
from conserve.names import CONSERVE

RATIOS = ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCell:
    """Blocks of all policies in a cell."""

    cell: Cell
    rate: float  # requests/s
    blocks: Sequence[Block]
    mix: Mix
    left_ms: Mapping[str, float]  # live work that each policy's blocks left behind (`leftover`)
    bound_rows_per_s: float | None  # None where the engine's speed is unknown
    slo: LatencyLimits | None  # that policies promised; None where online-only answered no request
    tuned: Sequence[str] = ()  # sentences on the baselines' parameters
    equal: Mapping[str, bool] | None = None  # baselines tuned to ConServe's P99s: which have them


def document(played: PlayedCell, *, seed: int) -> dict[str, Any]:
    """The cell's figures; latencies are ratios to online-only's with their 95 % intervals."""
    slo, scale = played.slo, played.cell.scale
    reference = LatencyLimits(slo.ttft_ms / scale, slo.tbt_ms / scale) if slo else None
    comparison = compare(played.blocks, reference=reference, seed=seed)
    rates = row_rates(comparison.policies, played.mix, played.left_ms)
    comparison = replace(comparison, rows=rates)
    alone = alone_of([*comparison.policies])
    return {
        **played.cell.document(),
        "rate": played.rate,
        "requests": comparison.policies[alone].requests if alone else 0,
        "online_only_busy": comparison.policies[alone].engine_busy if alone else None,
        "slo_ms": [*slo] if slo else None,
        "bound_rows_per_s": played.bound_rows_per_s,
        "tuned": list(played.tuned),
        "steps": comparison.steps.document() if comparison.steps else None,
        "policies": {name: _policy(name, comparison, played) for name in comparison.policies},
        **({"at_equal_p99": _at_equal(rates, played.equal)} if played.equal is not None else {}),
    }


def _at_equal(rates: Mapping[str, RowRates], kept: Mapping[str, bool]) -> dict[str, Any]:
    """ConServe's rows to those of each baseline that has its P99s; no ratio where that has next to none."""
    ours, least = rates[CONSERVE].rows_per_s, least_room(rates)
    return {
        name: {"kept": has, "times": over(ours, rates[name].rows_per_s, least) if has else None}
        for name, has in kept.items()
    }


def _policy(name: str, comparison: PolicyComparison, played: PlayedCell) -> dict[str, Any]:
    outcome = comparison.policies[name]
    rates = comparison.rows[name]
    return {
        "requests": outcome.requests,
        "failed": outcome.failed,
        "ttft_ms": plain(outcome.ttft_ms),
        "tbt_ms": plain(outcome.tbt_ms),
        "ratios": _ratios(name, comparison),
        "attainment": _attainment(outcome, played.cell.scale),
        "sent_late": outcome.late._asdict(),
        "overruns": asdict(outcome.overruns),
        "computed_twice": _twice(outcome),
        **asdict(rates),
        "prompt_tokens_per_s": outcome.offline_prompt_tokens_per_s,
        "decode_tokens_per_s": outcome.offline_decode_tokens_per_s,
        "of_bound": over(rates.rows_per_s, played.bound_rows_per_s, least_room(comparison.rows)),
    }


def _twice(outcome: PolicyOutcome) -> float | None:
    """Share of offline tokens' worth of computing that was done twice: thrown away, or lost with evicted KV."""
    again = outcome.left.tokens_wasted + outcome.evicted.tokens_recomputed
    tokens = outcome.offline_tokens_per_s * outcome.duration_s
    return again / tokens if tokens and outcome.tells else None


def _ratios(name: str, comparison: PolicyComparison) -> dict[str, Any]:
    """Each latency to online-only's, as `[ratio, low, high]`; the interval is None where it cannot be told."""
    harm = comparison.harm.get(name)
    if harm is None:  # online-only itself, or none to compare with
        known = name == alone_of([*comparison.policies])
        return dict.fromkeys(RATIOS, [1.0, None, None] if known else None)
    return {ratio: _changed(getattr(harm, ratio)) for ratio in RATIOS}


def _changed(change: Change | None) -> list[float | None] | None:
    if change is None or not change.without_ms or isinf(change.with_ms):
        return None
    return [change.with_ms / change.without_ms, *map(plain, change.ratio_ci or (None, None))]


def _attainment(outcome: PolicyOutcome, scale: float) -> Mapping[str, float | None] | None:
    found = outcome.attainment.get(str(scale))
    return {"ttft": found.ttft, "tbt": found.tbt} if found else None


def ratio(measured: Mapping[str, Any], policy: str, name: str) -> float | None:
    """Ratio of a latency to online-only's in a cell's document; infinite for a P99 where a request failed.

    Percentiles of earlier cells are of answers, and a request that failed would have had the longest latency.
    """
    said = measured["policies"].get(policy, {})
    if said.get("failed") and name.endswith("p99"):
        return inf
    found = said.get("ratios", {}).get(name)
    return found[0] if found else None


def worst(measured: Mapping[str, Any], policy: str) -> float:
    """Larger of the two P99s to online-only's; infinite where the policy failed a request or answered none."""
    ttft = ratio(measured, policy, "ttft_p99")
    return inf if ttft is None else max(ttft, ratio(measured, policy, "tbt_p99") or 0.0)
