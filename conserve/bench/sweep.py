"""A sweep over operating points: cells one after the other, each kept as soon as it is measured."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from conserve.bench import cell as cells
from conserve.bench import points
from conserve.bench.bound import rows_per_s
from conserve.bench.cell import PlayedCell
from conserve.bench.cell_baselines import CellAim, tuned_cell
from conserve.bench.compare import limits
from conserve.bench.leftover import left_by_policy
from conserve.bench.measure import Block
from conserve.bench.names import DISTSERVE_P
from conserve.bench.points import Cell
from conserve.bench.simulated import Simulator
from conserve.bench.traces import Trace
from conserve.errors import InputError
from conserve.names import CONSERVE, HYGEN, HYGEN_STAR, ONLINE_ONLY
from conserve.units import count, duration

MOST_BLOCKS = 16
AHEAD = "of the second pass before the blocks"  # the SLO of a cell on an engine
# Figures of cells: one more with each change of what is played or counted, so that none is beside another's.
FIGURES = 3
TUNED_ANEW = frozenset({HYGEN, HYGEN_STAR, DISTSERVE_P})
TUNING = 2  # the same for how these policies are tuned
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Cells of a sweep, and how each is played. The same plan goes on in the same file."""

    seed: int
    cells: int
    only: Cell | None = None  # this cell in place of them
    policies: Sequence[str]
    blocks: int  # of each policy in a cell, at least
    requests: int = 0  # live ones in a cell, as its rate expects: a P99 of forty is the slowest one
    block_s: float
    simulated: bool
    engine: str  # what is measured: a model with all of vLLM's flags
    preset: str = ""  # which says more than flags: lengths of rows, cores
    anew: bool = False  # servers start for each cell: the same server started twice differs by some percent
    machine: str = ""  # digest of a simulated engine: a profile that is measured again keeps its name
    equal_p99: bool = False  # baselines are tuned to ConServe's P99s on the reported blocks

    def wanted(self) -> list[Cell]:
        """The cells, in their order."""
        if self.only is not None:
            return [self.only]
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
            **({"machine": self.machine} if self.simulated else self._on_servers()),
            **({"equal_p99": True} if self.equal_p99 else {}),
            **({"tuning": TUNING} if TUNED_ANEW & {*self.policies} else {}),
        }

    def _on_servers(self) -> Document:
        started = "started for each cell" if self.anew else "started once"
        return {"preset": self.preset, "slo": AHEAD, "servers": started}


@dataclass(slots=True)
class CellLedger:
    """Measured cells in a file of lines, the plan first. A line that was cut short is measured again.

    Cells may be of several versions and machines: each says what it was `measured_with`.
    """

    path: Path
    plan: SweepPlan
    measured: dict[Cell, Document] = field(default_factory=dict)
    here: str = ""  # versions and the machine of this process; unknown where empty

    @classmethod
    def open(cls, path: Path, plan: SweepPlan, here: str = "") -> "CellLedger":
        """Go on with the file, or begin it; raises `InputError` if it is another sweep's.

        A single cell is played anew, so a file with measured cells is another's.
        """
        ledger = cls(path, plan, here=here)
        lines = list(documents(path.read_text())) if path.exists() else []
        if lines and lines[0] != plan.document():
            before, now = lines[0], plan.document()
            said = [name for name in {**now, **before} if before.get(name) != now.get(name)]
            raise InputError(
                f"{path} is a sweep with other {', '.join(said)}; name another folder with --output"
            )
        ledger.measured = {Cell.of(one): one for one in lines[1:]}
        if ledger.measured and plan.only is not None:
            raise InputError(
                f"{path} has {count(len(ledger.measured), 'measured cell')}, and a single one is played anew; name "
                "another folder with --output"
            )
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plan.document()) + "\n")
        return ledger

    def keep(self, document: Document) -> None:
        """Append a cell, behind a line that may have been cut short."""
        document = {**document, **({"measured_with": self.here} if self.here else {})}
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

    @property
    def measured_with(self) -> Counter[str]:
        """Number of the plan's cells by what they were measured with, as far as that is known."""
        return Counter(one["measured_with"] for one in self.done if "measured_with" in one)

    def mixed(self) -> str | None:
        """Sentence on cells of other versions or another machine beside those to come; None if there are none."""
        others = [name for name in self.measured_with if name != self.here]
        if not others or not self.missing:
            return None
        return (
            f"cells in {self.path.parent} were measured with {'; '.join(others)}, and the others will be with "
            f"{self.here}; to have all of one, name another folder with --output"
        )


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
    engine, mix = simulator.machine.engine, simulator.machine.mix(seed=simulator.seed)
    rate, traces = arrivals(cell, plan, simulator)
    alone = simulator.play(ONLINE_ONLY, traces)
    slo = limits(alone, cell.scale)
    ours = simulator.play(CONSERVE, traces, slo) if CONSERVE in plan.policies else []
    aim = CellAim.of_equal(traces, ours) if plan.equal_p99 else CellAim.of_slo(traces, alone, cell.scale)
    baselines = tuned_cell(plan.policies, simulator, aim, plan.seed)
    blocks: list[Block] = [*alone, *ours]
    for name in plan.policies:
        if name == DISTSERVE_P:
            if slo is not None:
                played, best = simulator.play_pool(traces, slo)
                blocks += played
                baselines.told.append(best.sentence())
        elif name not in (ONLINE_ONLY, CONSERVE):
            blocks += simulator.play(name, traces, slo, **baselines.settings(name))
    bound = rows_per_s(traces, engine, plan.block_s, slo, mix) if slo else None
    found = PlayedCell(
        cell=cell,
        rate=rate,
        blocks=blocks,
        mix=mix,
        left_ms=left_by_policy(blocks, engine),
        bound_rows_per_s=bound,
        slo=slo,
        tuned=baselines.told,
        equal=baselines.kept if plan.equal_p99 else None,
    )
    return cells.document(found, seed=plan.seed)


def arrivals(cell: Cell, plan: SweepPlan, simulator: Simulator) -> tuple[float, list[Trace]]:
    """Rate of a cell on this engine, and the arrivals of its blocks."""
    machine = simulator.machine
    rate = points.rate_of(cell, machine.engine, plan.block_s, times=machine.times, seed=plan.seed)
    source = points.arrivals(cell, rate, plan.block_s, times=machine.times, seed=plan.seed)
    blocks = max(plan.blocks, min(MOST_BLOCKS, ceil(plan.requests / (rate * plan.block_s))))
    return rate, [source(number) for number in range(blocks)]


def ranked(measured: Iterable[Mapping[str, Any]], policy: str = CONSERVE) -> list[Mapping[str, Any]]:
    """Cells by the larger P99 of this policy to online-only's, the worst first."""
    return sorted(measured, key=lambda one: cells.worst(one, policy), reverse=True)
