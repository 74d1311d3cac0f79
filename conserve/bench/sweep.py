"""A sweep over operating points: cells one after the other, each kept as soon as it is measured."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from conserve.bench import cell as cells
from conserve.bench import points
from conserve.bench.bound import Mix, rows_per_s
from conserve.bench.cell import PlayedCell
from conserve.bench.compare import limits
from conserve.bench.leftover import left_by_policy
from conserve.bench.measure import Block
from conserve.bench.names import CONSERVE, DISTSERVE_P, HYGEN, HYGEN_STAR, ONLINE_ONLY, SARATHI_P
from conserve.bench.points import Cell
from conserve.bench.profiler import DEFAULT, LEAST, MOST, RunLatencies, TestRun
from conserve.bench.simulated import Simulator
from conserve.bench.traces import Trace
from conserve.bench.tune import latencies
from conserve.bench.tuning import TERMS, TuningWorkload, sentence, token_budget, tuned_term
from conserve.errors import InputError
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.fit import Samples, fit
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.model import LinearModel
from conserve.words import count, duration

FIRST_CELL_S = 60.0  # of a simulated cell with all policies and four blocks, before the first one is over
MOST_BLOCKS = 16
AHEAD = "of the second pass before the blocks"  # the SLO of a cell on an engine
PREDICTED_OVER = 400  # random batches that HyGen's predictor is fitted to
TUNED_ON = 2  # first blocks of a cell, of test runs
FIGURES = (
    2  # of cells: one more with each change of what is played or counted, so that none is beside another's
)
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Cells of a sweep, and how each is played. The same plan goes on in the same file."""

    seed: int
    cells: int
    policies: Sequence[str]
    blocks: int  # of each policy in a cell, at least
    requests: int = 0  # live ones in a cell, at least: a P99 of forty is the slowest one
    block_s: float
    simulated: bool
    engine: str  # what is measured
    anew: bool = False  # servers start for each cell: the same server started twice differs by some percent
    machine: str = ""  # digest of a simulated engine: a profile that is measured again keeps its name

    def wanted(self) -> list[Cell]:
        """The cells, in their order."""
        return list(islice(points.spread(self.seed), self.cells))

    def document(self) -> Document:
        """Everything that two runs must have in common for their cells to be compared."""
        return {
            "seed": self.seed,
            "policies": list(self.policies),
            "blocks": self.blocks,
            "block_s": self.block_s,
            "requests": self.requests,
            "simulated": self.simulated,
            "engine": self.engine,
            "figures": FIGURES,
            **({"machine": self.machine} if self.simulated else {"slo": AHEAD, "servers": self._servers}),
        }

    @property
    def _servers(self) -> str:
        return "started for each cell" if self.anew else "started once"


@dataclass(slots=True)
class CellLedger:
    """Measured cells in a file of lines, the plan first. A line that was cut short is measured again."""

    path: Path
    plan: SweepPlan
    measured: dict[Cell, Document] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, plan: SweepPlan) -> "CellLedger":
        """Go on with the file, or begin it; raises `InputError` if it is another sweep's."""
        ledger = cls(path, plan)
        lines = list(documents(path.read_text())) if path.exists() else []
        if lines and lines[0] != plan.document():
            said = [name for name, value in plan.document().items() if lines[0].get(name) != value]
            raise InputError(
                f"{path} is a sweep with other {', '.join(said)}; name another folder with --output"
            )
        ledger.measured = {Cell.of(one): one for one in lines[1:]}
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plan.document()) + "\n")
        return ledger

    def keep(self, document: Document) -> None:
        """Append a cell, behind a line that may have been cut short."""
        before = self.path.read_bytes()
        cut = before and not before.endswith(b"\n")
        with self.path.open("a") as opened:
            opened.write(("\n" if cut else "") + json.dumps(document) + "\n")
        self.measured[Cell.of(document)] = document

    @property
    def missing(self) -> list[Cell]:
        """Cells that are not measured yet, in their order."""
        return [cell for cell in self.plan.wanted() if cell not in self.measured]

    @property
    def done(self) -> list[Document]:
        """Measured cells of the plan, in its order."""
        return [self.measured[cell] for cell in self.plan.wanted() if cell in self.measured]


def documents(text: str) -> Iterator[Document]:
    """The plan of a ledger, and its cells; a line that was cut short is left out."""
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


class SweepTimeLeft:
    """Time that the missing cells will take, from those that were measured just now."""

    def __init__(self, each_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`each_s` is the time of a cell for as long as none is measured."""
        self._each_s, self._clock, self._began, self._cells = each_s, clock, clock(), 0

    def measured(self) -> None:
        """Count a cell as measured."""
        self._cells += 1

    def left_s(self, cells: int) -> float:
        """Seconds for so many cells."""
        each_s = (self._clock() - self._began) / self._cells if self._cells else self._each_s
        return each_s * cells


def sentence_on(ledger: CellLedger, left_s: float, known: int) -> str:
    """Sentence on the cells that are to come, and how long they take; `known` were measured earlier."""
    plan = ledger.plan
    earlier = f" ({known} measured earlier)" if known else ""
    return (
        f"{count(len(ledger.missing), 'cell')} to measure{earlier}, {len(plan.policies)} policies in each, "
        f"chosen by seed {plan.seed}; about {duration(left_s)}. Ctrl-C keeps the cells that are done, and the same "
        "command goes on"
    )


def simulated(cell: Cell, plan: SweepPlan, simulator: Simulator) -> Document:
    """Measure a cell on a simulated engine."""
    engine, mix = simulator.machine.engine, _mix(simulator)
    rate, traces = arrivals(cell, plan, simulator)
    alone = simulator.play(ONLINE_ONLY, traces)
    slo = limits(alone, cell.scale)
    tokens, terms, told = _tuned(cell, plan, simulator, traces, alone)
    blocks: list[Block] = [*alone]
    for name in plan.policies:
        if name == DISTSERVE_P:
            if slo is not None:
                played, best = simulator.play_pool(traces, slo)
                blocks += played
                told.append(best.sentence())
        elif name != ONLINE_ONLY:
            blocks += simulator.play(
                name,
                traces,
                slo,
                promises={"hygen": terms["predictor"].coefficients} if name in TERMS else None,
                terms=terms.get(name),
                tokens=tokens if name == SARATHI_P else None,
            )
    bound = rows_per_s(traces, engine, plan.block_s, slo, mix) if slo else None
    found = PlayedCell(
        cell=cell,
        rate=rate,
        blocks=blocks,
        mix=mix,
        left_ms=left_by_policy(blocks, engine, shared_tokens=traces[0].shared_tokens),
        bound_rows_per_s=bound,
        slo=slo,
        tuned=told,
    )
    return cells.document(found, seed=plan.seed)


def arrivals(cell: Cell, plan: SweepPlan, simulator: Simulator) -> tuple[float, list[Trace]]:
    """Rate of a cell on this engine, and the arrivals of its blocks."""
    machine = simulator.machine
    rate = points.rate_of(cell, machine.engine, plan.block_s, times=machine.times, seed=plan.seed)
    source = points.arrivals(cell, rate, plan.block_s, times=machine.times, seed=plan.seed)
    blocks = max(plan.blocks, min(MOST_BLOCKS, ceil(plan.requests / (rate * plan.block_s))))
    return rate, [source(number) for number in range(blocks)]


def _mix(simulator: Simulator) -> Mix:
    return Mix.of(simulator.machine.rows(1000, seed=simulator.seed), simulator.machine.engine)


def _tuned(
    cell: Cell, plan: SweepPlan, simulator: Simulator, traces: Sequence[Trace], alone: Sequence[Block]
) -> tuple[int | None, dict[str, Any], list[str]]:
    """Parameters of the baselines in this cell: Sarathi's token budget, HyGen's terms; and sentences on them.

    Test runs are first blocks of the cell, simulated as those that are reported. `alone` are online-only's blocks.
    """
    machine, first = simulator.machine, traces[:TUNED_ON]
    predictor = predictor_of(machine.model, plan.seed)
    workload = TuningWorkload(
        engine=machine.engine,
        traces=first,
        block_s=plan.block_s,
        lengths=machine.rows(512, seed=plan.seed),
        window=machine.window,
    )
    promised = [one._replace(tolerance=min(MOST, max(LEAST, cell.scale - 1))) for one in DEFAULT]
    told, tokens, reference = [], None, latencies(alone[:TUNED_ON])

    def budgeted(most: int) -> tuple[RunLatencies, float]:
        blocks = simulator.play(SARATHI_P, first, tokens=most)
        rate = sum(one.offline_tokens for one in blocks) / sum(one.duration_s for one in blocks)
        return latencies(blocks), rate

    def run_of(name: str) -> TestRun:
        async def run(value: float) -> RunLatencies:
            promises = {"hygen": predictor.coefficients}
            return latencies(simulator.play(name, first, promises=promises, terms={TERMS[name]: value}))

        return run

    if SARATHI_P in plan.policies:
        budget = token_budget(workload, promised, beside=budgeted, alone=reference)
        tokens, told = budget.tokens, [budget.sentence()]
    terms: dict[str, Any] = {"predictor": predictor}
    for name in (HYGEN_STAR, HYGEN):
        if name in plan.policies:
            found = asyncio.run(tuned_term(name, workload, predictor, promised, run_of(name), reference))
            terms[name] = {TERMS[name]: found.value}
            told.append(sentence(name, found, promised, "simulated"))
    return tokens, terms, told


def predictor_of(model: LinearModel, seed: int) -> HyGenModel:
    """HyGen's predictor, fitted to random batches of this engine."""
    import numpy as np

    dice = np.random.default_rng(seed)
    batches = []
    for _ in range(PREDICTED_OVER):
        prompts = [Slice(int(n), 0) for n in np.exp(dice.uniform(2, 7, dice.integers(0, 4)))]
        steps = [Slice(1, int(c), True) for c in dice.integers(8, 1000, dice.integers(1, 100))]
        batches.append(Batch.of([*prompts, *steps]))
    return fit(HyGenModel, Samples.of(batches, [model.predict(batch) for batch in batches]))


def ranked(measured: Iterable[Mapping[str, Any]], policy: str = CONSERVE) -> list[Mapping[str, Any]]:
    """Cells by the larger P99 of this policy to online-only's, the worst first."""
    return sorted(measured, key=lambda one: cells.worst(one, policy), reverse=True)
