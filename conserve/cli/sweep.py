"""`conserve bench --sweep`: the comparison at operating points, cell by cell, on an engine or on simulated time."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from conserve.bench.names import regime_of
from conserve.cli import exits, output
from conserve.cli.bench_names import which
from conserve.cli.bench_report import measured_with
from conserve.cli.context import Context
from conserve.cli.side_by_side import side_by_side
from conserve.config import Settings
from conserve.engine.policy.checkpointing import ADAPTIVE
from conserve.engine.runtime.machine import compute_threads
from conserve.engine.vllm.compat.installed import require_engine
from conserve.errors import SettingsError
from conserve.names import CONSERVE, ONLINE_ONLY

if TYPE_CHECKING:
    from conserve.bench.disaggregated import EngineSplit
    from conserve.bench.machine import BenchMachine
    from conserve.bench.points import Cell
    from conserve.bench.simulated import PlayedBlock, Simulate, SimulatePool
    from conserve.bench.sweep import CellLedger, Document, SweepPlan
    from conserve.bench.traces import Trace
    from conserve.engine.vllm.simulation.play import SimulatedMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFlags:
    """Flags of a sweep."""

    size: str
    cells: int | None
    cell: str | None
    seed: int
    policies: str | None
    rounds: int | None
    block_s: float | None
    simulated: bool
    processes: int | None
    equal_p99: bool
    preset: str
    folder: Path | None

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Self:
        """Read the flags of `conserve bench` by their names; raises `SettingsError`."""
        if flags["sweep"] is None:
            raise SettingsError(
                "--cells, --cell, --simulated, --processes and --equal-p99 are for --sweep; add --sweep quick"
            )
        if said := [flag for name, (flag, usual) in SETS.items() if flags[name] != usual]:
            raise SettingsError(f"a sweep sets {', '.join(said)} itself; leave it out")
        if flags["cell"] is not None and flags["cells"] is not None:
            raise SettingsError("--cell is one operating point, and --cells are several; give one of the two")
        if flags["processes"] is not None and not flags["simulated"]:
            raise SettingsError("an engine measures one cell at a time; --processes goes with --simulated")
        if flags["equal_p99"] and not flags["simulated"]:
            raise SettingsError("--equal-p99 plays the same blocks again and again; it goes with --simulated")
        own = {name: flags[name] for name in cls.__dataclass_fields__ if name in flags}
        return cls(size=flags["sweep"], folder=flags["out"], **own)


class Size(NamedTuple):
    """A size of sweeps. Without `--cells` a quick one on an engine has as many as half an hour allows."""

    cells: int
    simulated_cells: int
    rounds: int
    simulated_rounds: int


SIZES = {"quick": Size(6, 12, 1, 4), "full": Size(32, 216, 2, 8)}
BLOCK_S, SIMULATED_BLOCK_S = 25.0, 30.0
REQUESTS = 100  # live ones in a simulated cell
CELL_S = 60.0  # of a simulated cell with eight policies, before one was measured
MOST_PROCESSES = 8  # unless more are asked for; each takes 0.7 GB
FILE = "cells.jsonl"
SETS = {
    "trace": ("--trace", None),
    "gamma": ("--gamma", None),
    "on_off": ("--on-off", None),
    "rate": ("--rate", None),
    "speed": ("--speed", None),
    "times": ("--lengths", None),
    "offline": ("--offline", None),
    "ttft_slo": ("--ttft-slo", None),
    "tbt_slo": ("--tbt-slo", None),
    "endpoint": ("--endpoint", None),
    "stock_endpoint": ("--stock-endpoint", None),
    "arms": ("--arms", None),
    "tolerance": ("--tolerance", None),
    "slo_scale": ("--slo-scale", 1.0),
    "overload": ("--allow-overload", False),
    "profiler": ("--profiler", "forecast"),
    "preemption": ("--no-preemption", True),
    "kv_checkpoint": ("--kv-checkpoint", ADAPTIVE),
}  # flags of `conserve bench` that a sweep sets for each cell, and what each is where it is left out


def sweeping(context: Context, words: list[str], wanted: SweepFlags, *, as_json: bool) -> int:
    """Run the sweep, or go on with it; returns the exit code."""
    size = require_size(wanted.size)
    folder = wanted.folder or usual_folder(wanted)
    settings = context.settings(model=words[0] if words else None)
    if not wanted.simulated:
        return on_servers(settings, words[1:], wanted, size, folder, as_json=as_json)
    if words[1:]:
        raise SettingsError("a simulated engine has the flags of its profile; leave vLLM's flags out")
    machine = machine_of(settings, words[0] if words else None)
    plan = replace(plan_of(wanted, size, machine.name), machine=machine.digest)
    return measure_simulated(plan, machine, folder, processes=wanted.processes, as_json=as_json)


def plan_of(wanted: SweepFlags, size: Size, engine: str) -> "SweepPlan":
    """The plan of a sweep by its flags."""
    from conserve.bench.points import named
    from conserve.bench.sweep import SweepPlan

    rounds, cells, block_s = (
        (size.simulated_rounds, size.simulated_cells, SIMULATED_BLOCK_S)
        if wanted.simulated
        else (size.rounds, size.cells, BLOCK_S)
    )
    return SweepPlan(
        anew=wanted.size == "full",
        seed=wanted.seed,
        cells=wanted.cells or cells,
        only=named(wanted.cell) if wanted.cell is not None else None,
        policies=policies_of(wanted),
        blocks=wanted.rounds or rounds,
        block_s=wanted.block_s or block_s,
        requests=REQUESTS if wanted.simulated and wanted.rounds is None else 0,
        simulated=wanted.simulated,
        engine=engine,
        preset=wanted.preset,
        equal_p99=wanted.equal_p99,
    )


def plan_on_servers(settings: Settings, flags: list[str], wanted: SweepFlags, size: Size) -> "SweepPlan":
    """The plan of a sweep on servers, with the flags of settings and files spelled out; raises `SettingsError`."""
    from conserve.bench.presets import PRESETS
    from conserve.cli.bench_plan import all_flags

    words = all_flags(settings, PRESETS[wanted.preset], flags)
    return plan_of(wanted, size, " ".join([settings.engine_model, *words]))


def policies_of(wanted: SweepFlags) -> list[str]:
    """Policies of the sweep; raises `SettingsError` if their yardsticks are not among them."""
    from conserve.bench.names import HARM, HYGENS, USUAL

    if wanted.policies is None:
        more = HYGENS if wanted.simulated or wanted.size == "full" else ()
        return [CONSERVE, f"{CONSERVE}/{HARM}", *USUAL[1:], *more]
    named = which(wanted.policies, simulated=wanted.simulated)
    if ONLINE_ONLY not in named:
        raise SettingsError(f"a sweep compares with {ONLINE_ONLY}; add it to --policies")
    if wanted.equal_p99 and CONSERVE not in named:
        raise SettingsError(f"--equal-p99 tunes baselines to the P99s of {CONSERVE}; add it to --policies")
    if wanted.simulated and (unknown := [name for name in named if not simulable(name)]):
        raise SettingsError(f"{', '.join(unknown)} cannot be simulated; leave it out of --policies")
    return named


def simulable(name: str) -> bool:
    """True unless the policy goes without a mechanism that the simulation does not have."""
    regime = regime_of(name)
    return regime.ordered and regime.full_batches


def require_size(name: str) -> Size:
    """The size of this name; raises `SettingsError`."""
    if name not in SIZES:
        raise SettingsError(f"--sweep takes {' or '.join(SIZES)}, not {name!r}")
    return SIZES[name]


def usual_folder(wanted: SweepFlags) -> Path:
    """Folder of a sweep: the same for the same command, which goes on there; of a single cell a new one."""
    if wanted.cell is not None:
        return Path(f"bench-cell-{time.strftime('%Y%m%d-%H%M%S')}")
    return Path(f"bench-sweep-{wanted.size}{'-simulated' if wanted.simulated else ''}")


def machine_of(settings: Settings, model: str | None) -> "BenchMachine":
    """The engine to simulate: that of the model's profile, or the demo model's; raises `ProfileError`."""
    from conserve.bench.machine import BenchMachine
    from conserve.profiles.book import Book

    if model is None:
        return BenchMachine.demo()
    return BenchMachine.of(Book(settings.profiles_folder).named(model))


def simulator() -> "Simulate":
    """vLLM's scheduler on simulated time. Imports vLLM, which takes seconds."""
    from conserve.engine.vllm.simulation.play import simulate

    def play(
        machine: "BenchMachine", policy: str, blocks: "Iterable[Trace]", **given: Any
    ) -> "Iterator[PlayedBlock]":
        return simulate(sizes_of(machine), policy, blocks, window=machine.window, **given)

    return play


def pool_simulator() -> "SimulatePool":
    """Several of vLLM's schedulers on simulated time, for prefill and for decode."""

    def play(
        machine: "BenchMachine", split: "EngineSplit", blocks: "Iterable[Trace]", **given: Any
    ) -> "Iterator[PlayedBlock]":
        from conserve.engine.vllm.simulation.play import simulate_pool

        return simulate_pool(
            sizes_of(machine),
            blocks,
            prefill=split.prefill,
            decode=split.decode,
            prefill_tokens=split.tokens,
            window=machine.window,
            **given,
        )

    return play


def sizes_of(machine: "BenchMachine") -> "SimulatedMachine":
    """The machine for the simulation."""
    from conserve.engine.vllm.simulation.copies import HostCopies
    from conserve.engine.vllm.simulation.play import SimulatedMachine

    return SimulatedMachine(
        model=machine.model,
        layers=machine.layers,
        flags=machine.flags,
        num_blocks=machine.num_blocks,
        copies=HostCopies(blocks=machine.host_blocks, block_ms=machine.copy_ms),
    )


def open_ledger(folder: Path, plan: "SweepPlan") -> "CellLedger":
    """The sweep's ledger. Where it lacks cells, this says what is mixed in it, and raises without an engine."""
    from conserve.bench.sweep import CellLedger

    ledger = CellLedger.open(folder / FILE, plan, measured_with(simulated=plan.simulated))
    if ledger.missing:
        require_engine()
        if (sentence := ledger.mixed()) is not None:
            output.say(sentence)
    return ledger


def on_servers(
    settings: Settings, flags: list[str], wanted: SweepFlags, size: Size, folder: Path, *, as_json: bool
) -> int:
    """Measure the missing cells on an engine, and report; returns the exit code."""
    from conserve.bench.presets import PRESETS
    from conserve.bench.servers.sweep import OnServers
    from conserve.cli.bench import interruptible, until_stopped
    from conserve.cli.bench_plan import own_plan

    preset, plan = PRESETS[wanted.preset], plan_on_servers(settings, flags, wanted, size)
    ledger = open_ledger(folder, plan)
    if ledger.missing:
        made = partial(own_plan, settings, flags, seed=plan.seed)
        sweep = OnServers(made, plan, ledger, preset, folder, say=output.say)
        quick = wanted.size == "quick" and wanted.cells is None and wanted.cell is None
        with interruptible():
            asyncio.run(until_stopped(sweep.run(as_many_as_fit=quick)))
        ledger = sweep.ledger
    return conclude(ledger, folder, as_json=as_json)


def measure_simulated(
    plan: "SweepPlan", machine: "BenchMachine", folder: Path, *, processes: int | None = None, as_json: bool
) -> int:
    """Measure the missing cells on simulated engines, and report; returns the exit code."""
    from conserve.cli.bench import interruptible

    ledger = open_ledger(folder, plan)
    most = processes or min(compute_threads(), MOST_PROCESSES)
    with interruptible():  # the cells under way are dropped
        if ledger.missing:
            fill(ledger, partial(measuring, plan, machine), min(most, len(ledger.missing)))
    return conclude(ledger, folder, as_json=as_json)


def measuring(plan: "SweepPlan", machine: "BenchMachine") -> "Callable[[Cell], Document]":
    """Make the function that measures a cell in this process."""
    import os

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from conserve.bench import sweep
    from conserve.bench.simulated import Simulator

    engine = Simulator(
        machine=machine,
        simulate=simulator(),
        simulate_pool=pool_simulator(),
        block_s=plan.block_s,
        seed=plan.seed,
    )
    return partial(sweep.simulated, plan=plan, simulator=engine)


def fill(ledger: "CellLedger", make: "Callable[[], Callable[[Cell], Document]]", processes: int) -> None:
    """Measure the missing cells, so many at a time, and say how long the others will take."""
    from conserve.bench.sweep import SweepTimeLeft, sentence_on

    missing, known = ledger.missing, len(ledger.done)
    estimate = SweepTimeLeft(CELL_S * len(ledger.plan.policies) / 8 / processes)
    output.say(sentence_on(ledger, estimate.left_s(len(missing)), known))
    with contextlib.closing(side_by_side(missing, make, processes)) as found:
        for number, (cell, document) in enumerate(found, 1):
            ledger.keep(document)
            estimate.measured()
            left = output.duration(estimate.left_s(len(missing) - number))
            output.say(f"{known + number} of {len(missing) + known}: {cell.name}; {left} left")


def conclude(ledger: "CellLedger", folder: Path, *, as_json: bool) -> int:
    """Print the tables and write the page, Markdown and JSON; returns the exit code."""
    from conserve.bench.pages import sweep_report as reports
    from conserve.whole import write_whole

    measured, missing = ledger.done, len(ledger.missing)
    if not measured:
        output.say("stopped before the first cell was measured: there is no page")
        return exits.INTERRUPTED
    said, policies = facts(ledger), list(ledger.plan.policies)
    stopped = f"Stopped after {len(measured)} of {len(measured) + missing} cells." if missing else None
    document = {"design": said, "cells": measured, **({"stopped": stopped} if stopped else {})}
    write_whole(folder / "sweep.json", json.dumps(document, indent=2).encode())
    write_whole(folder / "sweep.md", reports.markdown(measured, policies, said).encode())
    write_whole(folder / "page.html", reports.page(measured, policies, said, stopped=stopped).encode())
    if as_json:
        output.data_json(document)
    else:
        show(measured, policies)
    if stopped:
        output.say(f"{stopped} The same command goes on")
    if "machine" in said and not as_json:
        output.say(said["machine"])
    output.say(f"the page: {folder / 'page.html'}")
    return exits.INTERRUPTED if missing else exits.DONE


def show(measured: Any, policies: list[str]) -> None:
    """Print the answer and the first table."""
    from conserve.bench.pages import sweep_report as reports

    table = reports.first_table(measured, policies)
    output.data(f"{reports.sentence(measured, policies)}\n")
    output.data("\n".join(output.columns(table.header, table.rows, right=range(2, len(table.header)))))
    if (equal := reports.equal_table(measured)) is not None:
        output.data(
            "\n" + "\n".join(output.columns(equal.header, equal.rows, right=range(1, len(equal.header))))
        )


def facts(ledger: "CellLedger") -> dict[str, str]:
    """Facts that stand beside the figures."""
    from conserve import __version__
    from conserve.bench.pages.sweep_report import machine
    from conserve.bench.points import grid

    plan = ledger.plan
    with_what = [f"{name} ({output.count(n, 'cell')})" for name, n in ledger.measured_with.items()]
    restless = None if plan.simulated else machine(ledger.done)
    how = ", simulated: the scheduler is real, the time is a latency model's" if plan.simulated else ""
    return {
        "engine": f"{plan.engine}{how}",
        "version": __version__,
        "measured with": "; ".join(with_what) or "unknown",
        "measured": time.strftime("%Y-%m-%d %H:%M"),
        "cells": f"{len(ledger.done)} of {len(grid())}, in the order of a Sobol sequence; none is left out",
        "seed": str(plan.seed),
        "policies": ", ".join(plan.policies),
        "blocks": f"{plan.blocks} of {plan.block_s:g} s for each policy, more where they have few requests",
        "SLO": "so many times online-only's P99s in the cell",
        **({"machine": restless} if restless else {}),
    }
