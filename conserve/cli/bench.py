"""`conserve bench`: latency of live clients and throughput of the queue under each policy."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.bench_server import enqueue_rows, on_own_server
from conserve.cli.context import Context, engine_flags
from conserve.cli.serve import checkpointing, milliseconds
from conserve.config import Settings
from conserve.engine.policy.checkpointing import ADAPTIVE
from conserve.engine.policy.policies import CONSERVE, SERVING
from conserve.engine.policy.preemption import LEAVE_RULES, OFF
from conserve.errors import ConserveError, SettingsError, UsageError

if TYPE_CHECKING:
    from conserve.bench.compare import Design
    from conserve.bench.measure import Block, Comparison, LatencyLimits
    from conserve.bench.playing import Measurement
    from conserve.bench.presets import Preset
    from conserve.bench.sizing import Sized

EXAMPLE = """
conserve bench --trace azure_code_2023_10min_bursty.parquet --policies all --preset cpu
conserve bench --trace azure_conv_2023_10min --policies conserve,online-only --rate 4
conserve bench --gamma 1,1,512,64 --policies online-only,conserve,conserve/all-offline,conserve/off
conserve bench --gamma 2,0.5,4096,256 --endpoint http://localhost:8000
"""
RECOMPUTE = "recompute"  # what the engine's memory loses
VARIANTS = (*LEAVE_RULES, OFF, RECOMPUTE)


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
        str,
        typer.Option(
            help=f"all, or some of {', '.join(SERVING)}; {CONSERVE}/NAME names its preemption: "
            f"{', '.join((*LEAVE_RULES, OFF))}; {CONSERVE}/{RECOMPUTE} goes without KV checkpoints."
        ),
    ] = "all",
    preemption: Annotated[
        bool, typer.Option(help="Let offline rows leave an iteration when a live request arrives.")
    ] = True,
    kv_checkpoint: Annotated[
        str, typer.Option(metavar="POLICY", help="As for conserve serve; off leaves the connector out.")
    ] = ADAPTIVE,
    preset: Annotated[
        str, typer.Option(help="cpu (two cores, about ten minutes, sized to the machine's speed) or full.")
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
    seed: Annotated[int, typer.Option(help="Of arrivals, prompts and the bootstrap.")] = 0,
    overload: Annotated[
        bool,
        typer.Option("--allow-overload", help="Play also what online-only alone cannot keep up with."),
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A server under `conserve serve --allow-control`, with its own harvester."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for page, JSON and raw Parquet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Play live traffic under each policy in turn, on one engine that also has offline rows to run."""
    from conserve.bench.arrivals import arrivals
    from conserve.bench.playing import Measurement, on_server
    from conserve.bench.presets import PRESETS

    words = model or []
    if words and words[0].startswith("-"):
        raise SettingsError(
            "name the model before vLLM's flags: conserve bench smollm2-demo --trace FILE FLAGS"
        )
    if preset not in PRESETS:
        raise SettingsError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    if offline is not None and endpoint is not None:
        raise SettingsError(
            "--offline goes with a server of the benchmark's own; submit rows to that one's queue"
        )
    chosen = resized(PRESETS[preset], rounds, block_s, offline)
    folder = out or Path(f"bench-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.mkdir(parents=True, exist_ok=True)
    context: Context = ctx.obj
    settings = context.settings(model=words[0] if words else None)
    given = {"rounds": rounds, "block_s": block_s}
    offered = arrivals(chosen, trace, gamma, on_off, rate, speed, times, seed, given=given)
    measurement = Measurement(offered=offered)
    names, failed = which(policies, preemption=preemption), None
    design = make_design(chosen, names, limits(ttft_slo, tbt_slo), slo_scale, seed)
    with interruptible():
        if endpoint is None:
            flags = [*chosen.engine_flags, *engine_flags(settings, words[1:])]
            if CONSERVE in {name.partition("/")[0] for name in names}:
                flags = checkpointing(flags, kv_checkpoint, None)
            own = replace(settings, home=folder.absolute() / "store", store=None)  # never the user's queue
            enqueue_rows(own, chosen, seed)
            engine = section(settings, names)
            work = on_own_server(own, engine, flags, chosen, design, measurement, overload=overload)
        else:
            work = on_server(
                endpoint, settings, chosen, design, measurement, overload=overload, say=output.say
            )
        try:
            asyncio.run(until_stopped(work))
        except UsageError:
            raise
        except ConserveError as error:
            if not measurement.blocks:
                raise
            failed = error
    said = {"offline rows": f"{offline} tokens"} if offline is not None else {}
    named = {"preset": preset, **said}
    raise typer.Exit(conclude(measurement, folder, named, as_json=as_json, failed=failed))


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

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await task
    except (asyncio.CancelledError, ConserveError):
        if not stopped:
            raise
    return not stopped


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the block, and go on after it. The event loop takes the signals over later."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def conclude(
    measurement: "Measurement",
    folder: Path,
    said: Mapping[str, str],
    *,
    as_json: bool,
    failed: ConserveError | None = None,
) -> int:
    """Report the measured blocks, if there are any; returns the exit code.

    `failed` is the error that ended the comparison, said last.
    """
    if measurement.sized is None or not measurement.blocks:
        output.say("stopped before the first block was measured: there is no page")
        return exits.INTERRUPTED
    design = measurement.sized.design
    stopped = missing(measurement.blocks, design)
    if stopped and failed is not None:
        stopped += f" The cause: {failed}"
    said = {**facts(design), **played(measurement, measurement.sized), **said}
    report(measurement.blocks, design, folder, said, stopped=stopped, as_json=as_json)
    if failed is not None:
        return output.failed(failed)
    return exits.INTERRUPTED if stopped else exits.DONE


def missing(blocks: Sequence["Block"], design: "Design") -> str | None:
    """Sentence on the blocks that were not measured; None if all were."""
    if len(blocks) == design.blocks:
        return None
    counts = Counter(block.policy for block in blocks)
    each = ", ".join(f"{counts[policy]} of {policy}" for policy in design.policies)
    return f"Stopped after {len(blocks)} of {design.blocks} blocks: {each}."


def resized(preset: "Preset", rounds: int | None, block_s: float | None, offline: str | None) -> "Preset":
    """Preset with the values that the command line gives."""
    said = {
        "rounds": rounds,
        "block_s": block_s,
        "offline_lengths": lengths(offline) if offline is not None else None,
    }
    return replace(preset, **{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]


def lengths(text: str) -> tuple[int, int]:
    """Tokens of an offline row's prompt and of its answer."""
    found = [int(part) for part in text.split(",") if part.isdecimal() and int(part)]
    if len(found) != 2 or text.count(",") != 1:
        raise SettingsError(f"--offline takes two whole numbers of tokens, IN,OUT, not {text!r}")
    return found[0], found[1]


def which(names: str, *, preemption: bool = True) -> list[str]:
    """Names of the policies to compare; without preemption `conserve` is `conserve/off`."""
    chosen = list(SERVING) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        policy, slash, variant = name.partition("/")
        if policy not in SERVING:
            raise SettingsError(f"there is no policy {name!r}; give all, or some of {', '.join(SERVING)}")
        if slash and (policy != CONSERVE or variant not in VARIANTS):
            variants = ", ".join(f"{CONSERVE}/{known}" for known in VARIANTS)
            raise SettingsError(f"there is no {name!r}; there are {variants}")
    return [f"{CONSERVE}/{OFF}" if name == CONSERVE and not preemption else name for name in chosen]


def preempts(policies: Sequence[str]) -> bool:
    """True if the engine needs ConServe's worker and no asynchronous scheduling, as preemption does."""
    return any(name.partition("/")[0] == CONSERVE and name != f"{CONSERVE}/{OFF}" for name in policies)


def section(settings: Settings, policies: Sequence[str]) -> dict[str, Any]:
    """Section `conserve` of the engine's configuration: no offline work at first, and control by each block."""
    from conserve.bench.measure import ONLINE_ONLY

    preemption = {} if preempts(policies) else {"preemption": OFF}
    profiles = str(settings.profiles_folder)
    return {"policy": ONLINE_ONLY, "profile": None, "profiles": profiles, "control": True, **preemption}


def limits(ttft_slo: str | None, tbt_slo: str | None) -> "LatencyLimits | None":
    """SLO of the flags, if they give one."""
    from conserve.bench.measure import LatencyLimits

    if (ttft_slo is None) != (tbt_slo is None):
        raise SettingsError("give --ttft-slo and --tbt-slo together, or neither for online-only's P99s")
    ttft_ms, tbt_ms = milliseconds("--ttft-slo", ttft_slo), milliseconds("--tbt-slo", tbt_slo)
    return LatencyLimits(ttft_ms, tbt_ms) if ttft_ms is not None and tbt_ms is not None else None


def make_design(
    preset: "Preset", policies: list[str], slo: "LatencyLimits | None", slo_scale: float, seed: int
) -> "Design":
    """Design of the comparison, from the flags."""
    from conserve.bench.compare import Design
    from conserve.bench.measure import ONLINE_ONLY
    from conserve.engine.vllm.settings import PREEMPTION

    if slo_scale <= 0:
        raise SettingsError(f"--slo-scale {slo_scale:g} is no SLO; give a number above 0")
    if slo is None and ONLINE_ONLY not in policies:
        raise SettingsError(
            f"without {ONLINE_ONLY} there is no SLO; add it to --policies, or give --ttft-slo and --tbt-slo"
        )
    return Design(
        policies=policies,
        rounds=preset.rounds,
        block_s=preset.block_s,
        slo=slo,
        slo_scale=slo_scale,
        seed=seed,
        preemption=PREEMPTION,
        load_cores=preset.other_cores,
    )


def report(
    blocks: Sequence["Block"],
    design: "Design",
    folder: Path,
    said: Mapping[str, str],
    *,
    stopped: str | None,
    as_json: bool,
) -> None:
    """Print the tables, and write the page and the raw numbers into the folder.

    `said` are facts about the measurement; `stopped` says which blocks are missing, if any.
    """
    from conserve.bench import raw
    from conserve.bench import report as reports
    from conserve.bench.compare import relative
    from conserve.bench.measure import compare

    placed = relative(blocks)
    comparison = compare(placed, seed=design.seed)
    document = {**comparison.document(), "design": {**said, **({"stopped": stopped} if stopped else {})}}
    raw.write_blocks(placed, folder / "answers.parquet")
    raw.write_counts(placed, folder / "blocks.parquet")
    (folder / "comparison.json").write_text(json.dumps(document, indent=2))
    page = reports.page(comparison, placed, slo=comparison.reference, facts=said, stopped=stopped)
    (folder / "page.html").write_text(page)
    if as_json:
        output.data_json(document)
    else:
        show(comparison)
    if stopped:
        output.say(stopped)
    output.say(f"the page: {folder / 'page.html'}")


def show(comparison: "Comparison") -> None:
    """Print the answer, then the tables and sentences behind it."""
    from conserve.bench import report as reports
    from conserve.bench import verdict

    output.data(f"{verdict.sentence(comparison)}\n")
    table, shares = reports.table_rows(comparison), reports.attainment_rows(comparison)
    output.data("\n".join(output.columns(tuple(table.header), table.rows, right=range(1, len(table.header)))))
    if shares.rows:
        output.data("\nSLO attainment, by scale of online-only's P99s")
        output.data(
            "\n".join(output.columns(tuple(shares.header), shares.rows, right=range(1, len(shares.header))))
        )
    for line in (*reports.receipts(comparison), *reports.warnings(comparison)):
        output.data(f"\n{line}")


def facts(design: "Design") -> dict[str, str]:
    """Facts that stand beside every figure: machine, versions, commit, seed, arrivals."""
    import platform

    from conserve import __version__

    return {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "version": __version__,
        "measured": time.strftime("%Y-%m-%d %H:%M"),
        "policies": ", ".join(design.policies),
        **({"preemption": design.preemption} if CONSERVE in design.policies else {}),
        "blocks": f"{design.rounds} of {design.block_s:g} s",
        "seed": str(design.seed),
        "SLO": "given" if design.slo else f"{design.slo_scale:g} x online-only's P99s",
    }


def played(measurement: "Measurement", sized: "Sized") -> dict[str, str]:
    """Facts for the report: the arrivals, the flags that play them again, the expected load."""
    offered = measurement.offered
    return {
        "model": measurement.model,
        "arrivals": f"{offered.name} {sized.flags(offered, sized.rate)}".strip(),
        "set by": "the machine's speed" if sized.chosen else "the command line",
        **({"expected": sized.sentence()} if sized.forecasts else {}),
        **({"latency model": measurement.engine.description()} if measurement.engine else {}),
    }
