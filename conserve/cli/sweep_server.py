"""`conserve bench --sweep` on servers of its own: they start once, and every cell is a comparison on them."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conserve.bench.names import SARATHI_P
from conserve.cli import output
from conserve.cli.bench_server import Servers, own_plan
from conserve.cli.serve import keyed
from conserve.config import Settings
from conserve.errors import EndpointUnusable

if TYPE_CHECKING:
    from conserve.bench.compare import Design
    from conserve.bench.forecast import EngineModel
    from conserve.bench.playing import Measurement
    from conserve.bench.points import Cell
    from conserve.bench.presets import Preset
    from conserve.bench.sizing import Offered
    from conserve.bench.sweep import CellLedger, SweepPlan
    from conserve.cli.sweep import Size, SweepFlags

START_S = 60.0  # of a server
MOST_ROWS_PER_S = 5.0


def on_servers(
    settings: Settings, flags: list[str], wanted: "SweepFlags", size: "Size", folder: Path, *, as_json: bool
) -> int:
    """Measure the missing cells on an engine, and report; returns the exit code."""
    from conserve.bench.presets import PRESETS
    from conserve.bench.sweep import CellLedger
    from conserve.cli.bench import interruptible, until_stopped
    from conserve.cli.sweep import FILE, conclude, plan_of

    preset = PRESETS[wanted.preset]
    plan = plan_of(wanted, size, " ".join([settings.model, *preset.engine_flags, *flags]))
    ledger = CellLedger.open(folder / FILE, plan)
    if ledger.missing:
        sweep = OnServers(settings, flags, plan, ledger, preset, folder)
        quick = wanted.size == "quick" and wanted.cells is None
        with interruptible():
            asyncio.run(until_stopped(sweep.run(as_many_as_fit=quick)))
        ledger = sweep.ledger
    return conclude(ledger, folder, as_json=as_json)


class OnServers:
    """A sweep on servers of its own."""

    def __init__(
        self,
        settings: Settings,
        flags: list[str],
        plan: "SweepPlan",
        ledger: "CellLedger",
        preset: "Preset",
        folder: Path,
    ) -> None:
        self._plan, self.ledger = plan, ledger
        rows = plan.cells * plan.blocks * len(plan.policies) * plan.block_s * MOST_ROWS_PER_S
        self._preset = replace(
            preset, block_s=plan.block_s, offline_rows=max(preset.offline_rows, math.ceil(rows))
        )
        self._settings, self._flags, self._folder = settings, flags, folder

    async def run(self, *, as_many_as_fit: bool) -> None:
        """Start the servers, say how long it takes, and measure cell by cell."""
        plan = own_plan(
            self._settings,
            self._flags,
            self._plan.policies,
            self._preset,
            self._store(),
            seed=self._plan.seed,
        )
        servers = Servers(replace(plan, settings=keyed(plan.settings)), self._design(1.0))
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

    async def _cells(self, servers: Servers, engine: "EngineModel") -> None:
        from conserve.bench.sweep import SweepTimeLeft
        from conserve.cli.sweep import say_plan

        missing, known = self.ledger.missing, len(self.ledger.done)
        takes_s = {cell: self._takes_s(cell, engine) for cell in missing}
        estimate = SweepTimeLeft(1.0)
        say_plan(self.ledger, self._starts_s() + sum(takes_s.values()), known)
        for number, cell in enumerate(missing):
            self.ledger.keep(await self._measure(cell, servers, engine))
            estimate.measured()
            left = output.duration(sum(takes_s[other] for other in missing[number + 1 :]))
            output.say(f"{known + number + 1} of {len(missing) + known}: {cell.name}; about {left} left")

    async def _measure(self, cell: "Cell", servers: Servers, engine: "EngineModel") -> dict[str, Any]:
        """Play one cell."""
        from conserve.bench import cell as cells
        from conserve.bench.playing import Measurement, PlayWishes, measure
        from conserve.bench.profiler import DEFAULT, LEAST, MOST

        output.say(f"{cell.name}:")
        tolerance = min(MOST, max(LEAST, cell.scale - 1))
        measurement = Measurement(offered=self._offered(cell, engine))
        wishes = PlayWishes(
            overload=True, promised=[one._replace(tolerance=tolerance) for one in DEFAULT], say=output.say
        )
        await measure(
            servers.deployment, servers.prepare, self._preset, self._design(cell.scale), measurement, wishes
        )
        return cells.document(self._played(cell, measurement, engine), seed=self._plan.seed)

    def _played(self, cell: "Cell", measurement: "Measurement", engine: "EngineModel") -> Any:
        """The cell's blocks, with the bound by the latency model."""
        from conserve.bench import cell as cells
        from conserve.bench.bound import Mix, rows_per_s
        from conserve.bench.offline import lengths_of

        sized = measurement.sized
        assert sized is not None
        mix = Mix.of(list(lengths_of(replace(self._preset, offline_rows=1000), self._plan.seed)), engine)
        slo = cells.limits(measurement.blocks, cell.scale)
        traces = [sized.source(number) for number in range(self._plan.blocks)]
        bound = rows_per_s(traces, engine, self._plan.block_s, slo, mix) if slo else None
        return cells.PlayedCell(
            cell=cell,
            rate=sized.rate,
            blocks=measurement.blocks,
            mix=mix,
            bound_rows_per_s=bound,
            tuned=measurement.tuned,
        )

    def _offered(self, cell: "Cell", engine: "EngineModel") -> "Offered":
        """Arrivals of a cell, at the rate that this engine's speed sets."""
        from conserve.bench.points import arrivals, rate_of
        from conserve.bench.sizing import Offered

        plan = self._plan
        rate = rate_of(cell, engine, plan.block_s, seed=plan.seed)
        source = arrivals(cell, rate, plan.block_s, seed=plan.seed)
        return Offered(
            name=cell.name, source=lambda preset, rate: source, flags=lambda rate: f"{rate:g}/s", rate=rate
        )

    def _takes_s(self, cell: "Cell", engine: "EngineModel") -> float:
        from conserve.bench.sizing import size

        offered = self._offered(cell, engine)
        return size(offered, self._preset, self._design(cell.scale), engine, overload=True).takes_s

    def _starts_s(self) -> float:
        """Time that the stock servers take to start; `sarathi-p` starts anew with each token budget."""
        from conserve.bench.names import is_stock

        stock = sum(map(is_stock, self._plan.policies))
        again = len(self.ledger.missing) - 1 if SARATHI_P in self._plan.policies else 0
        return START_S * (stock + again)

    def _fit(self, engine: "EngineModel") -> None:
        """Cut the sweep to the cells that half an hour allows, before the first one is measured."""
        from conserve.cli.sweep import QUICK_S

        left_s = QUICK_S - self._starts_s()
        cells = 0
        for cell in self._plan.wanted():
            left_s -= self._takes_s(cell, engine)
            cells += left_s >= 0 or not cells
        self._plan = replace(self._plan, cells=cells)
        self.ledger.plan = self._plan

    def _design(self, scale: float) -> "Design":
        from conserve.bench.compare import Design
        from conserve.engine.vllm.settings import PREEMPTION

        return Design(
            policies=self._plan.policies,
            rounds=self._plan.blocks,
            block_s=self._plan.block_s,
            slo_scale=scale,
            seed=self._plan.seed,
            preemption=PREEMPTION,
            load_cores=self._preset.other_cores,
        )

    def _store(self) -> Path:
        """A store that no earlier sitting of this sweep has used: its rows may have run out."""
        folder = self._folder.absolute()
        sitting = sum(1 for _ in folder.glob("store-*")) + 1
        return folder / f"store-{sitting}"
