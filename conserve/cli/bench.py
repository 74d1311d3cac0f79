"""`conserve bench`: latency of live clients and throughput of the queue under each policy."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.bench.names import MECHANISMS
from conserve.cli import output
from conserve.cli.bench_flags import (
    known_profiler,
    limits,
    make_design,
    promised,
    refuse_own,
    resized,
    row_lengths,
)
from conserve.cli.bench_names import KNOWN, VARIANTS, which
from conserve.cli.bench_report import conclude
from conserve.cli.context import Context
from conserve.cli.serve_flags import refuse_ours
from conserve.cli.signals import told_to_stop
from conserve.cli.sweep import SweepFlags, sweeping
from conserve.engine.policy.checkpointing import ADAPTIVE
from conserve.engine.vllm.compat.installed import OR_A_SERVER, require_engine
from conserve.errors import ConserveError, SettingsError
from conserve.names import CONSERVE

if TYPE_CHECKING:
    from conserve.bench.playing import Measurement

EXAMPLE = """
conserve bench --trace azure_code_2023_10min_bursty.parquet --policies all --preset cpu
conserve bench --trace azure_conv_2023_10min --policies conserve,online-only --rate 4
conserve bench --gamma 1,1,512,64 --policies online-only,conserve,conserve/all-offline,conserve/off
conserve bench --gamma 1,1,512,64 --arms scheduler,preemption,checkpoints
conserve bench --sweep quick --simulated
conserve bench Qwen/Qwen2.5-72B-Instruct --gamma 2,1,2048,256 --tensor-parallel-size 8
conserve bench --gamma 2,0.5,4096,256 --endpoint http://localhost:8000
"""


def bench(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL [VLLM FLAGS]", help="As for conserve serve; smollm2-demo by default."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Arrivals: a Parquet file, or a bundled trace.")
    ] = None,
    gamma: Annotated[
        str | None, typer.Option(metavar="RATE,CV,IN,OUT", help="Arrivals from a Gamma process instead.")
    ] = None,
    on_off: Annotated[
        str | None, typer.Option(metavar="RATE,ON_S,OFF_S,IN,OUT", help="Arrivals that come and go instead.")
    ] = None,
    offline: Annotated[
        str | None,
        typer.Option(
            metavar="IN,OUT", help="Tokens of offline prompts and answers; as arXiv papers have by default."
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help=f"all, or some of {', '.join(KNOWN)}, or {CONSERVE}/NAME: {', '.join(VARIANTS)}; by default the "
            "first four."
        ),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            metavar="MECHANISM,...",
            help=f"Also {CONSERVE} with every subset of these off: {', '.join(MECHANISMS)}.",
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="LATENCY=SHARE,...",
            help="What the tuned baselines keep: mean or p99 of ttft or tbt, such as mean-tbt=10%; by default both "
            "P99s, by 5% or as --slo-scale allows.",
        ),
    ] = None,
    profiler: Annotated[
        str,
        typer.Option(
            help="Where HyGen's profiler has its test runs: forecast (seconds) or engine (minutes)."
        ),
    ] = "forecast",
    preemption: Annotated[
        bool, typer.Option(help="Let offline rows leave an iteration when a live request arrives.")
    ] = True,
    kv_checkpoint: Annotated[
        str, typer.Option(metavar="POLICY", help="As for conserve serve; off leaves the connector out.")
    ] = ADAPTIVE,
    preset: Annotated[
        str,
        typer.Option(
            help="cpu (two cores, about 20 minutes, sized to the machine's speed) or full (five blocks of 120 s of "
            "each policy)."
        ),
    ] = "full",
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second: of a thinned trace with cpu, of one stretched in time with full."
        ),
    ] = None,
    times: Annotated[
        float | None,
        typer.Option(
            "--lengths", metavar="TIMES", help="Live prompts and answers so many times the preset's."
        ),
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="How many times faster than recorded to play it.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Blocks of each policy.")] = None,
    block_s: Annotated[float | None, typer.Option(min=1, help="Seconds of a block.")] = None,
    ttft_slo: Annotated[
        str | None, typer.Option(metavar="TIME", help="Instead of online-only's P99.")
    ] = None,
    tbt_slo: Annotated[str | None, typer.Option(metavar="TIME", help="Instead of online-only's P99.")] = None,
    slo_scale: Annotated[float, typer.Option(help="Times online-only's P99s, where no SLO is given.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, prompts and the bootstrap.")] = 0,
    overload: Annotated[
        bool,
        typer.Option("--allow-overload", help="Play also what online-only alone cannot keep up with."),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="quick|full",
            help="Over a grid of operating points instead: load, bursts, lengths, SLO, bundled traces.",
        ),
    ] = None,
    cells: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Operating points of the sweep, spread evenly.")
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="One operating point, by its name in the tables, to play it again."
        ),
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="Sweep on simulated time, by the model's profile; without a MODEL by the demo model's.",
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Simulated cells at a time; by default one a core, up to eight."
        ),
    ] = None,
    equal_p99: Annotated[
        bool,
        typer.Option(
            "--equal-p99",
            help="Tune the baselines of a simulated sweep to conserve's P99s, within 5%, on the blocks that "
            "are reported.",
        ),
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A server under `conserve serve --allow-control`, with its own harvester."
        ),
    ] = None,
    stock_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Stock vLLM with the same model beside --endpoint, for online-only."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for page, JSON and raw Parquet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Play live traffic under each policy in turn, on one engine that also has offline rows to run."""
    from conserve.api.running import flags_as_given
    from conserve.bench.arrivals import arrivals
    from conserve.bench.playing import Measurement, PlayWishes, on_server
    from conserve.bench.presets import PRESETS

    words = model or []
    if words and words[0].startswith("-"):
        raise SettingsError(
            "name the model before vLLM's flags: conserve bench smollm2-demo --trace FILE FLAGS"
        )
    if preset not in PRESETS:
        raise SettingsError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    context: Context = ctx.obj
    if endpoint is None and not simulated:
        refuse_ours(flags_as_given(context.settings(), words[1:]), "conserve bench")
    if any(value is not None for value in (sweep, cells, cell, processes)) or simulated or equal_p99:
        raise typer.Exit(sweeping(context, words, SweepFlags.of(ctx.params), as_json=as_json))
    if endpoint is None:
        require_engine(OR_A_SERVER)
    else:
        refuse_own(words, offline, kv_checkpoint)
    chosen = resized(PRESETS[preset], rounds, block_s, offline)
    folder = out or Path(f"bench-{time.strftime('%Y%m%d-%H%M%S')}")
    settings = context.settings(model=words[0] if words else None)
    given = {"rounds": rounds, "block_s": block_s}
    offered = arrivals(chosen, trace, gamma, on_off, rate, speed, times, seed, given=given)
    measurement = Measurement(
        offered=offered, lengths=row_lengths(chosen, seed) if endpoint is None else None
    )
    at = {"endpoint": endpoint is not None, "stock": stock_endpoint is not None}
    names = which(policies, arms, preemption=preemption, **at)
    failed: ConserveError | None = None
    design = make_design(chosen, names, limits(ttft_slo, tbt_slo), slo_scale, seed)
    wishes = PlayWishes(
        overload=overload,
        promised=promised(tolerance, slo_scale),
        profiler=known_profiler(profiler),
        stock_endpoint=stock_endpoint,
        say=output.say,
    )
    with made(folder):
        with interruptible():
            if endpoint is None:
                from conserve.bench.servers.rows import new_store
                from conserve.bench.servers.servers import on_own_server
                from conserve.cli.bench_plan import own_plan

                plan = own_plan(
                    settings, words[1:], names, chosen, new_store(folder), kv_checkpoint, seed=seed
                )
                work = on_own_server(plan, design, measurement, wishes)
            else:
                work = on_server(endpoint, settings, chosen, design, measurement, wishes)
            failed = played(work, measurement)
        said = {"offline rows": f"{offline} tokens"} if offline is not None else {}
        named = {"preset": preset, **said}
        raise typer.Exit(conclude(measurement, folder, named, as_json=as_json, failed=failed))


def played(work: Coroutine[Any, Any, None], measurement: "Measurement") -> ConserveError | None:
    """Run the comparison; returns the error that ended it after a block, and raises one that came before any."""
    try:
        asyncio.run(until_stopped(work))
    except ConserveError as error:
        if not measurement.blocks:
            raise
        return error
    return None


async def until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Run the work until Ctrl-C or SIGTERM; True if it ended by itself.

    Stopped work is cancelled, once; errors while it ends come from ended processes.
    """
    task, stopped = asyncio.ensure_future(work), False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            output.say("stopping: the block under way is dropped")
            stopped = task.cancel()

    with told_to_stop(stop):
        try:
            await task
        except (asyncio.CancelledError, ConserveError):
            if not stopped:
                raise
    return not stopped


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make the folder; at the end, remove those that were made and are still empty."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            for place in new:
                place.rmdir()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the block, and go on after it. The event loop takes the signals over later."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
