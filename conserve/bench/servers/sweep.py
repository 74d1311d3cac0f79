"""A sweep on servers of its own: every cell is a comparison on them, and they start anew for each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conserve.bench import cell as cells
from conserve.bench import raw
from conserve.bench.bound import Mix, rows_per_s
from conserve.bench.cell import PlayedCell
from conserve.bench.compare import STARTED_S, Design
from conserve.bench.leftover import left_by_policy
from conserve.bench.measure import Block
from conserve.bench.names import SARATHI_P, is_stock
from conserve.bench.offline import lengths_of
from conserve.bench.playing import Measurement, PlayWishes, Say, measure
from conserve.bench.points import Cell, arrivals, rate_of
from conserve.bench.presets import Preset
from conserve.bench.servers.rows import new_store
from conserve.bench.servers.servers import Servers, ServersPlan
from conserve.bench.simulate_online import EngineModel
from conserve.bench.sizing import Offered, size
from conserve.bench.slo_search import DEFAULT, LEAST, MOST
from conserve.bench.sweep import CellLedger, SweepPlan, sentence_on
from conserve.errors import EndpointUnusable
from conserve.names import PROMPT
from conserve.units import duration

MakePlan = Callable[[Sequence[str], Preset, Path], ServersPlan]
QUICK_S = 1800.0  # of a sweep that has as many cells as fit


class OnServers:
    """A sweep on servers of its own."""

    def __init__(
        self,
        made: MakePlan,
        plan: SweepPlan,
        ledger: CellLedger,
        preset: Preset,
        folder: Path,
        *,
        say: Say,
    ) -> None:
        """`made` gives the servers of these policies, with this preset and a store at this place."""
        self._plan, self.ledger = plan, ledger
        self._preset = replace(preset, block_s=plan.block_s)
        self._made, self._folder, self._say = made, folder, say

    async def run(self, *, as_many_as_fit: bool) -> None:
        """Start the servers, say how long it takes, and measure cell by cell."""
        plan = self._made(self._plan.policies, self._preset, new_store(self._folder))
        servers = Servers(plan, self._design(1.0))
        try:
            await servers.start()
            engine = await servers.deployment.engine()
            if engine is None:
                raise EndpointUnusable("the server tells no latency model, by which a sweep sets its rates")
            if as_many_as_fit:
                self._fit(engine)
            await self._cells(servers, engine)
        finally:
            await servers.close()

    async def _cells(self, servers: Servers, engine: EngineModel) -> None:
        missing, known = self.ledger.missing, len(self.ledger.done)
        takes_s = {cell: self._takes_s(cell, engine) for cell in missing}
        self._say(sentence_on(self.ledger, self._starts_s() + sum(takes_s.values()), known))
        for number, cell in enumerate(missing):
            if number and self._plan.anew:
                await servers.end()
            self.ledger.keep(await self._measure(cell, servers, engine))
            left = missing[number + 1 :]
            left_s = sum(takes_s[other] for other in left) + STARTED_S * self._started_each * len(left)
            self._say(
                f"{known + number + 1} of {len(missing) + known}: {cell.name}; about {duration(left_s)} left"
            )

    async def _measure(self, cell: Cell, servers: Servers, engine: EngineModel) -> dict[str, Any]:
        """Play one cell."""
        self._say(f"{cell.name}:")
        await servers.start()  # anew, or another one may have had the last turn of the cell before
        tolerance = min(MOST, max(LEAST, cell.scale - 1))
        measurement = Measurement(offered=self._offered(cell, engine))
        wishes = PlayWishes(
            overload=True, promised=[one._replace(tolerance=tolerance) for one in DEFAULT], say=self._say
        )
        await measure(
            servers.deployment, servers.prepare, self._preset, self._design(cell.scale), measurement, wishes
        )
        self._keep_raw(cell, measurement.blocks)
        return cells.document(self._played(cell, measurement, engine), seed=self._plan.seed)

    def _keep_raw(self, cell: Cell, blocks: Sequence[Block]) -> None:
        """Write the cell's requests and counts, by which a ratio out of the ordinary can be looked into."""
        folder = self._folder / "raw"
        folder.mkdir(exist_ok=True)
        number = self._plan.wanted().index(cell) + 1
        raw.write(blocks, folder, f"{number:03}-")

    def _played(self, cell: Cell, measurement: Measurement, engine: EngineModel) -> PlayedCell:
        """The cell's blocks, with the bound by the latency model."""
        sized = measurement.sized
        assert sized is not None
        mix = Mix.of(list(lengths_of(replace(self._preset, offline_rows=1000), self._plan.seed)), engine)
        slo = sized.design.slo
        traces = [sized.source(number) for number in range(self._plan.blocks)]
        bound = rows_per_s(traces, engine, self._plan.block_s, slo, mix) if slo else None
        return PlayedCell(
            cell=cell,
            rate=sized.rate,
            blocks=measurement.blocks,
            mix=mix,
            left_ms=left_by_policy(measurement.blocks, engine),
            bound_rows_per_s=bound,
            slo=slo,
            tuned=measurement.tuned,
        )

    def _offered(self, cell: Cell, engine: EngineModel) -> Offered:
        """Arrivals of a cell, at the rate that this engine's speed sets."""
        plan = self._plan
        rate = rate_of(cell, engine, plan.block_s, seed=plan.seed)
        source = arrivals(cell, rate, plan.block_s, seed=plan.seed)
        return Offered(
            name=cell.name, source=lambda preset, rate: source, flags=lambda rate: f"{rate:g}/s", rate=rate
        )

    def _takes_s(self, cell: Cell, engine: EngineModel) -> float:
        offered = self._offered(cell, engine)
        sized = size(offered, self._preset, self._design(cell.scale), engine, overload=True)
        return sized.takes_s + sized.begins_s

    def _starts_s(self) -> float:
        """Time of servers that start between cells; the plug-in's runs when this is told."""
        stock = 0 if self._starts_in_turns else sum(map(is_stock, self._plan.policies))
        return STARTED_S * (stock + self._started_each * (len(self.ledger.missing) - 1))

    @property
    def _starts_in_turns(self) -> bool:
        """True if stock servers start in the turns of each cell, whose time has theirs."""
        return self._plan.anew or not self._preset.resident

    @property
    def _started_each(self) -> int:
        """Number of servers that start for each further cell; `sarathi-p` has a token budget of its own in each."""
        return 1 if self._starts_in_turns else int(SARATHI_P in self._plan.policies)

    def _fit(self, engine: EngineModel) -> None:
        """Cut the sweep to the cells that half an hour allows, before the first one is measured."""
        left_s = QUICK_S - self._starts_s()
        cells = 0
        for cell in self._plan.wanted():
            left_s -= self._takes_s(cell, engine)
            cells += left_s >= 0 or not cells
        self._plan = replace(self._plan, cells=cells)
        self.ledger.plan = self._plan

    def _design(self, scale: float) -> Design:
        return Design(
            policies=self._plan.policies,
            rounds=self._plan.blocks,
            block_s=self._plan.block_s,
            slo_scale=scale,
            slo_ahead=True,
            seed=self._plan.seed,
            preemption=PROMPT,
            load_cores=self._preset.other_cores,
            starts_servers=self._starts_in_turns,
        )
