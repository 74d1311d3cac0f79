"""Statistics of a comparison of policies, from its measured blocks. Pure.

A percentile is the smallest measured value that at least so many values do not exceed. A request that failed counts
as an infinite latency, so that no policy's percentiles gain by what it does not answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from conserve.bench.answers import Floats, LoadAnswer, RequestEnd, tbts_ms, ttfts_ms
from conserve.bench.attainment import Attainment, LatencyLimits, attainments
from conserve.bench.harm import Harm, harm
from conserve.bench.names import ALL, SARATHI_P, alone_of, most_of
from conserve.bench.restless import StepTimes, step_times
from conserve.bench.slo_search import RunLatencies
from conserve.names import PRIORITY

ORDER = (*ALL, PRIORITY)
LATE_MS = 5.0  # a request sent later than this was held up by the generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of time under one policy.

    `started_s` is on the clock that the blocks share; `answers` and `offline_series` (seconds, offline tokens so
    far) count from there. `iterations` were the engine's, of which `planned` had a time limit and `overruns`
    exceeded it; offline rows left `iterations_left` of them, with `tokens_redone` tokens, and `tokens_wasted`
    tokens' worth of computing was thrown away. `live_tokens_recomputed` counts the tokens of online requests in
    such iterations. Counts are of all `engines`, `busy_s` is their mean. An engine that does not tell (`tells`) of
    iterations and evictions, as stock vLLM, leaves these at nought.
    """

    policy: str
    started_s: float
    duration_s: float
    answers: tuple[LoadAnswer, ...]
    offline_tokens: int
    iterations: int
    planned: int
    overruns: int
    offline_work: float = 0.0  # offline tokens weighted by their cost, see `profiles.worth`
    offline_decodes: int = 0  # decode steps among the offline tokens; the others are prompts'
    busy_s: float = 0.0  # time that the engine spent in iterations
    iterations_left: int = 0
    tokens_redone: int = 0
    tokens_wasted: float = 0.0
    live_tokens_recomputed: int = 0
    tokens_saved: int = 0  # to host memory
    tokens_restored: int = 0  # from there
    tokens_recomputed: int = 0  # of evicted rows
    offline_series: tuple[tuple[float, int], ...] = ()
    engines: int = 1
    tells: bool = True

    @property
    def engine_s(self) -> float:
        """Seconds of all engines together."""
        return self.duration_s * self.engines


class Percentiles(NamedTuple):
    """Percentiles of latencies, in ms; infinite where so many requests failed."""

    p50: float
    p90: float
    p99: float
    max: float


class Spread(NamedTuple):
    """Spread of a figure over the blocks of one policy."""

    min: float
    median: float
    max: float


class Lateness(NamedTuple):
    """Delay of the load generator itself."""

    share: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overruns:
    """Iterations that took longer than planned, and their share of the planned ones."""

    count: int
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Iterations that offline rows left, and their cost; the share is of offline tokens."""

    iterations: int
    tokens_redone: int
    tokens_wasted: float
    wasted_share: float | None
    live_tokens_recomputed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """KV of evicted rows that was restored from host memory, and KV that was computed again."""

    tokens_restored: int
    tokens_recomputed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Ratios of one policy to others; None if the other was not measured."""

    ttft_p50_to_online_only: float | None
    ttft_p99_to_online_only: float | None
    tbt_p50_to_online_only: float | None
    tbt_p99_to_online_only: float | None
    offline_tokens_to_non_preemptive: float | None
    offline_work_to_non_preemptive: float | None
    offline_work_to_priority: float | None
    ttft_p99_priority_over_this: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """Figures of one policy over its pooled blocks; `spread` compares the blocks."""

    blocks: int
    duration_s: float  # of all engines together
    tells: bool  # of iterations that rows left, and of evictions
    requests: int
    failed: int
    failures: Mapping[str, int]
    ttft_ms: Percentiles | None
    tbt_ms: Percentiles | None
    offline_tokens_per_s: float
    offline_work_per_s: float
    offline_prompt_tokens_per_s: float
    offline_decode_tokens_per_s: float
    online_tokens_per_s: float
    attainment: Mapping[str, Attainment]
    engine_busy: float  # share of the time
    overruns: Overruns
    left: Left
    evicted: Evicted
    late: Lateness
    spread: Mapping[str, Spread | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRates:
    """Rows' worth of one policy's offline work per second (`beside`); None where it cannot be known."""

    rows_per_s: float | None = None  # beside all live work
    rows_in_block_per_s: float | None = None  # as counted while the blocks' time ran
    of_non_preemptive: float | None = None  # beside all live work


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyComparison:
    """Figures of all policies; attainment is relative to `reference`."""

    reference: LatencyLimits | None
    given: bool  # the reference is an SLO of the user's, not online-only's P99s
    policies: Mapping[str, PolicyOutcome]
    ratios: Mapping[str, Ratios]
    harm: Mapping[str, Harm]
    steps: StepTimes | None = None  # of online-only's blocks; None where they tell none
    rows: Mapping[str, RowRates] = field(default_factory=dict)  # empty where the engine's speed is unknown

    def document(self) -> dict[str, Any]:
        """Comparison as JSON."""
        return {
            "reference": plain(self.reference),
            "policies": {
                name: {**plain(asdict(outcome)), **asdict(self.rows.get(name, RowRates()))}
                for name, outcome in self.policies.items()
            },
            "ratios": {name: plain(asdict(ratios)) for name, ratios in self.ratios.items()},
            "harm": {name: plain(asdict(harm)) for name, harm in self.harm.items()},
            "steps": self.steps.document() if self.steps else None,
        }


def compare(
    blocks: Sequence[Block], *, reference: LatencyLimits | None = None, seed: int = 0
) -> PolicyComparison:
    """Compare the policies of these blocks.

    Attainment is relative to `reference`: the P99s of online-only, unless given. The seed is the bootstrap's.
    """
    named, given = by_policy(blocks), reference is not None
    reference = reference or online_only_p99s(named)
    policies = {name: outcome(of, reference) for name, of in named.items()}
    alone = alone_of([*named])
    quiet = named.get(alone or "", [])
    without = [block.answers for block in quiet]
    return PolicyComparison(
        reference=reference,
        given=given,
        policies=policies,
        ratios={name: ratios(name, policies) for name in policies},
        harm={
            name: harm([block.answers for block in of], without, seed=seed)
            for name, of in named.items()
            if without and name != alone
        },
        steps=step_times(quiet),
    )


def by_policy(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """Blocks of each policy, the policies in the order in which they are shown."""
    names = sorted({block.policy for block in blocks}, key=rank)
    return {name: [block for block in blocks if block.policy == name] for name in names}


def rank(name: str) -> tuple[int, str]:
    """Sort key of a policy: variants (`conserve/off`) after the plain one, unknown policies at the end."""
    policy = name.partition("/")[0]
    return (ORDER.index(policy) if policy in ORDER else len(ORDER), name)


def outcome(blocks: Sequence[Block], reference: LatencyLimits | None) -> PolicyOutcome:
    """Figures of one policy's pooled blocks."""
    answers = [answer for block in blocks for answer in block.answers]
    failures = [answer.status.value for answer in answers if answer.status is not RequestEnd.OK]
    duration_s = sum(block.engine_s for block in blocks)
    heard = RunLatencies.heard(answers)
    return PolicyOutcome(
        blocks=len(blocks),
        duration_s=duration_s,
        tells=all(block.tells for block in blocks),
        requests=len(answers),
        failed=len(failures),
        failures={status: failures.count(status) for status in sorted(set(failures))},
        ttft_ms=percentiles(heard.ttft_ms),
        tbt_ms=percentiles(heard.tbt_ms),
        offline_tokens_per_s=sum(block.offline_tokens for block in blocks) / duration_s,
        offline_work_per_s=sum(block.offline_work for block in blocks) / duration_s,
        offline_prompt_tokens_per_s=sum(one.offline_tokens - one.offline_decodes for one in blocks)
        / duration_s,
        offline_decode_tokens_per_s=sum(block.offline_decodes for block in blocks) / duration_s,
        online_tokens_per_s=sum(map(tokens_within, blocks)) / duration_s,
        attainment=attainments(answers, reference),
        engine_busy=sum(block.busy_s for block in blocks) / sum(block.duration_s for block in blocks),
        overruns=overruns(blocks),
        left=left(blocks),
        evicted=evicted(blocks),
        late=lateness(answers),
        spread=spreads(blocks),
    )


def tokens_within(block: Block) -> int:
    """Tokens of live answers that came while the block's time ran; answers may go on after it."""
    return sum(at <= block.duration_s for answer in block.answers for at in answer.token_at_s)


def percentiles(values_ms: Floats) -> Percentiles | None:
    """Percentiles of these latencies; None without a finite one."""
    if not np.isfinite(values_ms).any():
        return None
    p50, p90, p99, most = np.percentile(values_ms, [50, 90, 99, 100], method="inverted_cdf")
    return Percentiles(float(p50), float(p90), float(p99), float(most))


def lateness(answers: Sequence[LoadAnswer]) -> Lateness:
    """Share of requests that the generator sent late, and the largest delay."""
    late_ms = np.array([answer.late_ms for answer in answers])
    if not len(late_ms):
        return Lateness(0.0, 0.0)
    return Lateness(float(np.mean(late_ms > LATE_MS)), float(late_ms.max()))


def overruns(blocks: Sequence[Block]) -> Overruns:
    """Number and share of iterations that exceeded their limit."""
    count, planned = sum(block.overruns for block in blocks), sum(block.planned for block in blocks)
    return Overruns(count=count, share=count / planned if planned else None)


def left(blocks: Sequence[Block]) -> Left:
    """Sums over the blocks, of the iterations that offline rows left."""
    wasted, offline = sum(block.tokens_wasted for block in blocks), sum(b.offline_tokens for b in blocks)
    return Left(
        iterations=sum(block.iterations_left for block in blocks),
        tokens_redone=sum(block.tokens_redone for block in blocks),
        tokens_wasted=wasted,
        wasted_share=wasted / offline if offline > 0 and all(block.tells for block in blocks) else None,
        live_tokens_recomputed=sum(block.live_tokens_recomputed for block in blocks),
    )


def evicted(blocks: Sequence[Block]) -> Evicted:
    """Sums over the blocks, of evicted rows' tokens."""
    return Evicted(
        tokens_restored=sum(block.tokens_restored for block in blocks),
        tokens_recomputed=sum(block.tokens_recomputed for block in blocks),
    )


def spreads(blocks: Sequence[Block]) -> dict[str, Spread | None]:
    """Spread of each figure over the blocks of one policy."""
    heard = [RunLatencies.heard(block.answers) for block in blocks]
    ttft = [percentiles(one.ttft_ms) for one in heard]
    tbt = [percentiles(one.tbt_ms) for one in heard]
    return {
        "ttft_p99_ms": _spread([p.p99 for p in ttft if p]),
        "tbt_p99_ms": _spread([p.p99 for p in tbt if p]),
        "offline_tokens_per_s": _spread([block.offline_tokens / block.engine_s for block in blocks]),
        "offline_work_per_s": _spread([block.offline_work / block.engine_s for block in blocks]),
    }


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread(min(values), float(np.median(values)), max(values)) if values else None


def online_only_p99s(named: Mapping[str, Sequence[Block]]) -> LatencyLimits | None:
    """P99s of online-only's answers, the reference that the comparison measures itself: a promise is finite."""
    answers = [answer for block in named.get(alone_of([*named]) or "", ()) for answer in block.answers]
    ttft, tbt = percentiles(ttfts_ms(answers)), percentiles(tbts_ms(answers))
    return LatencyLimits(ttft.p99, tbt.p99) if ttft and tbt else None


def ratios(name: str, policies: Mapping[str, PolicyOutcome]) -> Ratios:
    """Ratios of this policy to the ones that the papers compare with."""
    this, names = policies[name], [*policies]
    prioritised = next((other for other in (SARATHI_P, PRIORITY) if other in policies), None)
    yardsticks = (alone_of(names), most_of(names), prioritised)
    alone, most, priority = (policies.get(other or "") for other in yardsticks)

    def to(other: PolicyOutcome | None, figure: Callable[[PolicyOutcome], float | None]) -> float | None:
        return _ratio(figure(this), figure(other)) if other is not None else None

    return Ratios(
        ttft_p50_to_online_only=to(alone, lambda one: _p50(one.ttft_ms)),
        ttft_p99_to_online_only=to(alone, lambda one: _p99(one.ttft_ms)),
        tbt_p50_to_online_only=to(alone, lambda one: _p50(one.tbt_ms)),
        tbt_p99_to_online_only=to(alone, lambda one: _p99(one.tbt_ms)),
        offline_tokens_to_non_preemptive=to(most, lambda one: one.offline_tokens_per_s),
        offline_work_to_non_preemptive=to(most, lambda one: one.offline_work_per_s),
        offline_work_to_priority=to(priority, lambda one: one.offline_work_per_s),
        ttft_p99_priority_over_this=_ratio(_p99(priority.ttft_ms) if priority else None, _p99(this.ttft_ms)),
    )


def _p50(latencies: Percentiles | None) -> float | None:
    return latencies.p50 if latencies else None


def _p99(latencies: Percentiles | None) -> float | None:
    return latencies.p99 if latencies else None


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value is not None and to and isfinite(to) else None


def plain(value: Any) -> Any:
    """Convert named tuples to dictionaries, and what is infinite to None, recursively: JSON has neither."""
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
