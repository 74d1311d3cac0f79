"""Blocks of a comparison on a simulated engine, in the form of measured ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any, Protocol

from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.attainment import LatencyLimits
from conserve.bench.beside import rows_beside
from conserve.bench.deployment import SchedulerCounters
from conserve.bench.disaggregated import BestSplit, EngineSplit, best_split, pooled
from conserve.bench.machine import BenchMachine
from conserve.bench.measure import Block
from conserve.bench.names import DISTSERVE_P, SARATHI_P, regime_of
from conserve.bench.traces import Trace
from conserve.names import CONSERVE, ONLINE_ONLY, PRIORITY, PROMPT
from conserve.server_report import SchedulerReport

ROWS = 4096  # different rows of a simulation, over and over


class TimedAnswer(Protocol):
    """A live request's answer; times are of the simulation's clock."""

    @property
    def token_at_s(self) -> Sequence[float]:
        """Times of its tokens."""


class PlayedBlock(Protocol):
    """A simulated block, and the scheduler's reports at its begin and at its end."""

    @property
    def began_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...
    @property
    def answers(self) -> Sequence[TimedAnswer]: ...
    @property
    def first(self) -> SchedulerReport: ...
    @property
    def last(self) -> SchedulerReport: ...


class Simulate(Protocol):
    """Plays blocks one after the other on one engine, beside these rows."""

    def __call__(
        self,
        machine: BenchMachine,
        policy: str,
        blocks: Iterable[Trace],
        *,
        block_s: float,
        rows: Iterator[tuple[int, int]],
        promises: Mapping[str, Any],
        hygen: Mapping[str, float] | None,
        terms: Mapping[str, float] | None,
        checkpoints: bool,
        shared_tokens: int,
    ) -> Iterator[PlayedBlock]: ...


class SimulatePool(Protocol):
    """Plays blocks one after the other on prefill and decode engines, beside these rows."""

    def __call__(
        self,
        machine: BenchMachine,
        split: EngineSplit,
        blocks: Iterable[Trace],
        *,
        block_s: float,
        rows: Iterator[tuple[int, int]],
        shared_tokens: int,
    ) -> Iterator[PlayedBlock]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """A simulated engine, on which policies play the same blocks."""

    machine: BenchMachine
    simulate: Simulate
    block_s: float
    seed: int
    simulate_pool: SimulatePool | None = None  # for distserve-p

    def play(
        self,
        name: str,
        blocks: Sequence[Trace],
        slo: LatencyLimits | None = None,
        *,
        promises: Mapping[str, Any] | None = None,
        hygen: Mapping[str, float] | None = None,
        terms: Mapping[str, float] | None = None,
        tokens: int | None = None,
    ) -> list[Block]:
        """Play these blocks under a policy by its name, with an SLO or other promises.

        `hygen` are coefficients of HyGen's predictor, `terms` are parameters of its policies, `tokens` is the token
        budget of `sarathi-p`.
        """
        machine = self.machine if tokens is None else self.machine.limited(tokens)
        rows = self.machine.rows(ROWS, seed=self.seed)
        played = self.simulate(
            machine,
            _policy(name),
            blocks,
            block_s=self.block_s,
            rows=cycle(rows) if name != ONLINE_ONLY else iter(()),
            promises=_promises(name, slo) if promises is None else promises,
            hygen=hygen,
            terms=terms,
            checkpoints=regime_of(name).checkpoint,
            shared_tokens=blocks[0].shared_tokens if blocks else 0,
        )
        return [self._block(name, *pair) for pair in zip(blocks, played, strict=True)]

    def play_pool(self, blocks: Sequence[Trace], slo: LatencyLimits) -> tuple[list[Block], BestSplit]:
        """Play these blocks on prefill and decode engines, of which the best split is found first.

        Figures per second are those of one engine.
        """
        assert self.simulate_pool is not None
        simulate_pool, mix = self.simulate_pool, self.machine.mix(seed=self.seed)
        found: dict[EngineSplit, list[Block]] = {}

        def play(split: EngineSplit) -> list[Block]:
            traces = pooled(blocks, split.engines)
            played = simulate_pool(
                self.machine,
                split,
                traces,
                block_s=self.block_s,
                rows=cycle(self.machine.rows(ROWS, seed=self.seed)),
                shared_tokens=traces[0].shared_tokens,
            )
            found[split] = [
                self._block(DISTSERVE_P, *pair, engines=split.engines)
                for pair in zip(traces, played, strict=True)
            ]
            return found[split]

        best = best_split(
            self.machine, play, slo, lambda played: rows_beside(played, self.machine.engine, mix)[0]
        )
        return found[best.split], best

    def _block(self, name: str, trace: Trace, played: PlayedBlock, *, engines: int = 1) -> Block:
        first, last = SchedulerCounters.of(played.first), SchedulerCounters.of(played.last)
        answers = [
            LoadAnswer(
                index=number,
                due_s=arrival.at_s,
                sent_s=arrival.at_s,
                ended_s=timed.token_at_s[-1] - played.began_s,
                input_tokens=arrival.input_tokens,
                token_at_s=tuple(at - played.began_s for at in timed.token_at_s),
                status=RequestEnd.OK,
                cached_tokens=trace.cached(arrival),
            )
            for number, arrival, timed in zip(count(), trace, played.answers, strict=False)
        ]
        return Block(
            policy=name,
            started_s=played.began_s,
            duration_s=played.ended_s - played.began_s,
            answers=tuple(answers),
            engines=engines,
            **last.since(first),
        )


def _policy(name: str) -> str:
    """Name of the plug-in's policy that stands for it: the schedules of stock vLLM's are vLLM's own."""
    if name == SARATHI_P:
        return PRIORITY
    regime = regime_of(name)
    preemption = regime.preemption
    if preemption is None and regime.policy != CONSERVE and _ours(name):
        preemption = PROMPT  # an arm without our schedule keeps the other mechanisms
    return f"{regime.policy}/{preemption}" if preemption else regime.policy


def _promises(name: str, slo: LatencyLimits | None) -> dict[str, Any]:
    """Entries of the engine's section."""
    regime = regime_of(name)
    if regime.harm is not None:
        return {"harm": regime.harm}
    if slo is None or not _ours(name):
        return {}
    return {"ttft_slo_ms": slo.ttft_ms, "tbt_slo_ms": slo.tbt_ms}


def _ours(name: str) -> bool:
    """True for `conserve` and its variants, also for arms without our schedule."""
    return name.partition("/")[0] == CONSERVE
