"""Parameters of the baselines in one simulated cell, tuned by test runs on the simulation that is reported.

Each keeps the cell's SLO on the first blocks, as its authors would tune it. Or each is given the P99s that ConServe
has on the reported blocks themselves: then its rows are compared at equal P99s, and no setting is better for it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from conserve.bench.baseline_parameters import (
    ROWS,
    TERMS,
    TunedTerms,
    TuningWorkload,
    sentence,
    token_budget,
    tuned_terms,
)
from conserve.bench.beside import rows_beside
from conserve.bench.machine import BenchMachine
from conserve.bench.measure import Block
from conserve.bench.names import SARATHI_P
from conserve.bench.promise_search import latencies
from conserve.bench.simulated import Simulator
from conserve.bench.slo_search import DEFAULT, LEAST, MOST, Promise, RunLatencies
from conserve.bench.traces import Trace
from conserve.names import HYGEN, HYGEN_STAR
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.fit import Samples, fit
from conserve.profiles.hygen import HyGenModel

PREDICTED_OVER = 400  # random batches that HyGen's predictor is fitted to
TUNED_ON = 2  # first blocks of a cell, of test runs


class CellAim(NamedTuple):
    """Latencies that the baselines are to keep, and the blocks on which they are to."""

    traces: Sequence[Trace]
    reference: RunLatencies
    promised: Sequence[Promise]
    told: str  # how a parameter was found, for the user

    @classmethod
    def of_slo(cls, traces: Sequence[Trace], alone: Sequence[Block], scale: float) -> "CellAim":
        """The cell's SLO, so many times the P99s of online-only's blocks, on the first blocks."""
        tolerance = min(MOST, max(LEAST, scale - 1))
        promised = [one._replace(tolerance=tolerance) for one in DEFAULT]
        return cls(traces[:TUNED_ON], latencies(alone[:TUNED_ON]), promised, "simulated")

    @classmethod
    def of_equal(cls, traces: Sequence[Trace], ours: Sequence[Block]) -> "CellAim":
        """P99s at most 5 % above those of ConServe's blocks, on all blocks."""
        return cls(traces, latencies(ours), DEFAULT, "to conserve's, on the reported blocks")


@dataclass(slots=True)
class TunedCell:
    """Parameters that the baselines are played with."""

    predictor: HyGenModel
    tokens: int | None = None  # Sarathi's token budget
    terms: dict[str, Mapping[str, float]] = field(default_factory=dict)
    kept: dict[str, bool] = field(default_factory=dict)  # policy -> it keeps what it was tuned to
    told: list[str] = field(default_factory=list)  # a sentence on each

    def settings(self, name: str) -> dict[str, Any]:
        """Arguments of `Simulator.play` for a policy."""
        return {
            "hygen": self.predictor.coefficients if name in TERMS else None,
            "terms": self.terms.get(name),
            "tokens": self.tokens if name == SARATHI_P else None,
        }


def tuned_cell(policies: Sequence[str], simulator: Simulator, aim: CellAim, seed: int) -> TunedCell:
    """Tune those of the policies that have a parameter."""
    machine = simulator.machine
    found = TunedCell(predictor_of(machine, seed))
    workload = TuningWorkload(
        engine=machine.engine,
        traces=aim.traces,
        block_s=simulator.block_s,
        lengths=machine.rows(ROWS, seed=seed),
        window=machine.window,
    )

    mix = machine.mix(seed=seed)

    def rows_per_s(blocks: Sequence[Block]) -> float:
        return rows_beside(blocks, machine.engine, mix)[0]

    def budgeted(most: int) -> tuple[RunLatencies, float]:
        found.tokens = most
        blocks = simulator.play(SARATHI_P, aim.traces, **found.settings(SARATHI_P))
        return latencies(blocks), rows_per_s(blocks)

    if SARATHI_P in policies:
        budget = token_budget(workload, aim.promised, beside=budgeted, alone=aim.reference)
        found.tokens, found.kept[SARATHI_P] = budget.tokens, budget.kept
        found.told.append(budget.sentence())
    for name in (HYGEN_STAR, HYGEN):
        if name in policies:
            terms = _searched(name, workload, simulator, aim, found, rows_per_s)
            found.terms[name], found.kept[name] = terms.values, terms.kept
            found.told.append(sentence(name, terms, aim.promised, aim.told))
    return found


def _searched(
    name: str,
    workload: TuningWorkload,
    simulator: Simulator,
    aim: CellAim,
    found: TunedCell,
    rows_per_s: Callable[[Sequence[Block]], float],
) -> TunedTerms:
    """HyGen's parameters: of those its searches try and that keep the aim, the ones with the most rows."""

    async def run(terms: Mapping[str, float]) -> tuple[RunLatencies, float]:
        found.terms[name] = terms
        blocks = simulator.play(name, aim.traces, **found.settings(name))
        return latencies(blocks), rows_per_s(blocks)

    return asyncio.run(tuned_terms(name, workload, found.predictor, aim.promised, run, aim.reference))


def predictor_of(machine: BenchMachine, seed: int) -> HyGenModel:
    """HyGen's predictor, fitted to random batches of this engine."""
    batches = batches_of(machine, seed)
    return fit(HyGenModel, Samples.of(batches, [machine.model.predict(batch) for batch in batches]))


def batches_of(machine: BenchMachine, seed: int) -> list[Batch]:
    """Random batches that suit an engine.

    They are those of the demo model's engine, times what this one has more of: tokens in an iteration, requests,
    and KV memory of a request.
    """
    demo = BenchMachine.demo()
    more = machine.flags["max_num_seqs"] / demo.flags["max_num_seqs"]
    longer = machine.kv_tokens / demo.kv_tokens / more
    dice = np.random.default_rng(seed)
    batches = []
    for _ in range(PREDICTED_OVER):
        prompts = np.exp(dice.uniform(2, 7, dice.integers(0, 4)))
        contexts = dice.integers(8, 1000, dice.integers(1, max(2, round(100 * more))))
        batches.append(
            Batch.of(
                [
                    *(Slice(int(machine.times * tokens), 0) for tokens in prompts),
                    *(Slice(1, int(longer * context), True) for context in contexts),
                ]
            )
        )
    return batches
