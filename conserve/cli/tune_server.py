"""Confirmation of a tuned promise on the engine itself: blocks with it beside blocks of live requests alone."""

import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from conserve.bench.names import CONSERVE, HARM, ONLINE_ONLY_PLANNED
from conserve.cli import exits, output
from conserve.cli.bench_server import Servers, own_plan
from conserve.cli.serve import keyed
from conserve.config import Settings

if TYPE_CHECKING:
    from conserve.bench.compare import Design
    from conserve.bench.measure import Block
    from conserve.bench.tune import TriedValue, Tuning
    from conserve.cli.tune import TuneFlags

SMALLER = 0.7  # factor on a value that the engine did not keep
TRIES = 4


def confirm(
    settings: Settings, wanted: "TuneFlags", tuning: "Tuning", found: "TriedValue"
) -> "tuple[TriedValue, bool]":
    """The largest value up to the one found that the engine keeps, and True; the last one tried, and False."""
    from conserve.cli.bench import interruptible, until_stopped

    with TemporaryDirectory(prefix="conserve-tune-") as folder, interruptible():
        sitting = Confirmation(settings, wanted, tuning, Path(folder))
        if asyncio.run(until_stopped(sitting.run(found))):
            return sitting.outcome
    output.say("stopped before it was confirmed: nothing is kept; --simulated-only keeps what was found")
    raise typer.Exit(exits.INTERRUPTED)


class Confirmation:
    """Blocks on a server of its own."""

    def __init__(self, settings: Settings, wanted: "TuneFlags", tuning: "Tuning", folder: Path) -> None:
        from conserve.bench.presets import PRESETS

        self._settings, self._wanted, self._tuning = settings, wanted, tuning
        self._preset = replace(PRESETS[wanted.preset], block_s=tuning.simulator.block_s)
        self._folder = folder
        self.outcome: tuple[TriedValue, bool]

    async def run(self, found: "TriedValue") -> None:
        """Try the value, and smaller ones while they do not keep what may be harmed."""
        wanted = self._wanted
        plan = own_plan(
            self._settings, wanted.flags, [CONSERVE], self._preset, self._folder / "store", seed=wanted.seed
        )
        servers = Servers(replace(plan, settings=keyed(plan.settings)), self._design(found))
        try:
            await servers.start()
            for _ in range(TRIES):
                excess = await self._excess(servers, found)
                self.outcome = found, excess <= 1
                if excess <= 1:
                    return
                output.say(f"on the engine it exceeds what may be harmed by {excess - 1:.0%}; trying less")
                found = replace(found, value=max(found.parameter.low, SMALLER * found.value))
        finally:
            await servers.close()

    async def _excess(self, servers: Servers, found: "TriedValue") -> float:
        """Largest ratio of what may be harmed to its limit, beside blocks of live requests alone."""
        from conserve.bench.playing import Measurement, PlayWishes, measure
        from conserve.bench.profiler import excess
        from conserve.bench.sizing import Offered
        from conserve.bench.tune import latencies, words

        output.say(f"confirming {words(found.promises)} on the engine")
        blocks = self._tuning.blocks
        busiest = blocks[::-1]
        offered = Offered(
            name="",
            source=lambda preset, rate: lambda number: busiest[number % len(busiest)],
            flags=lambda rate: "",
            rate=sum(map(len, blocks)) / len(blocks) / self._preset.block_s,
        )
        measurement = Measurement(offered=offered)
        wishes = PlayWishes(overload=True, say=output.say)
        design = self._design(found)
        await measure(servers.deployment, servers.prepare, self._preset, design, measurement, wishes)

        def of(policy: str) -> "list[Block]":
            return [block for block in measurement.blocks if block.policy == policy]

        alone = latencies(of(ONLINE_ONLY_PLANNED))
        return excess(latencies(of(design.policies[1])), alone, self._tuning.promised)

    def _design(self, found: "TriedValue") -> "Design":
        from conserve.bench.compare import Design
        from conserve.bench.measure import LatencyLimits
        from conserve.engine.vllm.settings import PREEMPTION

        promises = found.promises
        harm = promises.get("harm")
        slo = None if harm is not None else LatencyLimits(promises["ttft_ms"], promises["tbt_ms"])
        name = CONSERVE if harm is None else f"{CONSERVE}/{HARM}-{round(100 * harm)}"
        return Design(
            policies=[ONLINE_ONLY_PLANNED, name],
            rounds=self._wanted.rounds,
            block_s=self._preset.block_s,
            slo=slo,
            seed=self._wanted.seed,
            preemption=PREEMPTION,
            load_cores=self._preset.other_cores,
        )
