"""`conserve tune`: the promise that harvests most, for a model, its live traffic, and what may be harmed."""

import asyncio
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.api.running import engine_flags, flags_as_given
from conserve.bench.names import promise_flags
from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.cli.found_promises import Tuned, arrivals_folder, write
from conserve.cli.serve_flags import refuse_ours
from conserve.cli.sweep import simulator
from conserve.config import Settings
from conserve.engine.vllm.compat.installed import require_engine
from conserve.errors import Overloaded, SettingsError

if TYPE_CHECKING:
    from conserve.bench.machine import BenchMachine
    from conserve.bench.promise_search import TriedValue, Tuning
    from conserve.bench.slo_search import Promise
    from conserve.bench.traces import Trace
    from conserve.profiles.correction import Correction
    from conserve.profiles.profile import Profile

EXAMPLE = """
conserve tune Qwen/Qwen2.5-7B-Instruct --harm-ttft p99=5% --harm-tbt p99=5%
conserve tune smollm2-demo --trace azure_conv_2023_10min --rate 0.5 --lengths 0.125 --simulated-only
conserve serve Qwen/Qwen2.5-7B-Instruct --tuned
"""
BLOCK_S, BLOCKS = 60.0, 12
BUSIEST = 0.9  # share of the time, by online-only alone; above it nothing is left to harvest


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags:
    """Flags of the confirmation on an engine."""

    model: str
    flags: list[str]
    preset: str
    rounds: int
    seed: int


def tune(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [VLLM FLAGS]",
            help="As for conserve serve; it has to be profiled (conserve profile --served).",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIGEST", help="Latency profile of the search; the model's newest by default."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Live requests: a Parquet file or a bundled trace; by default what conserve serve has recorded in "
            "the last day.",
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second of an engine; as recorded by default.")
    ] = None,
    lengths: Annotated[
        float, typer.Option(metavar="TIMES", help="Prompts and answers so many times as long as recorded.")
    ] = 1.0,
    harm_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SHARE",
            help="How much longer a TTFT may take, e.g. p99=5%,mean=10%; 5% of both P99s.",
        ),
    ] = None,
    harm_tbt: Annotated[
        str | None, typer.Option(metavar="NAME=SHARE", help="And the time between two tokens.")
    ] = None,
    simulated_only: Annotated[
        bool, typer.Option("--simulated-only", help="Do not confirm it on the engine.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what was found on simulated time; start and keep nothing."),
    ] = False,
    preset: Annotated[
        str, typer.Option(help="Of the engine that confirms it: cpu or full, as for conserve bench.")
    ] = "full",
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of each policy that confirm it.")] = 3,
    block_s: Annotated[float, typer.Option(min=1, help="Seconds of a block.")] = BLOCK_S,
    seed: Annotated[int, typer.Option(min=0, help="Of rows and prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Search the promise to live requests that gives queued rows most, and keep it for conserve serve --tuned.

    Test runs are on simulated time, with the real scheduler and the model's latency profile; the engine itself
    confirms what they find.
    """
    from conserve.bench.machine import BenchMachine
    from conserve.bench.presets import PRESETS
    from conserve.bench.slo_search import harmed

    words = model or []
    if not words or words[0].startswith("-"):
        raise SettingsError("name the model first: conserve tune MODEL --trace FILE")
    if preset not in PRESETS:
        raise SettingsError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    context: Context = ctx.obj
    settings, promised = context.settings(model=words[0]), harmed(harm_ttft, harm_tbt)
    check_flags(settings, words[1:], confirmed=not (simulated_only or dry_run))
    require_engine()
    searched = profile_of(settings, words, profile)
    machine = BenchMachine.of(searched, learned_of(settings, searched))
    blocks = blocks_of(settings, words[0], trace, rate, lengths, block_s, machine)
    tuning = prepare_tuning(machine, blocks, promised, block_s, seed)
    found = asyncio.run(tuning.best())
    if not found.kept:
        output.say(
            f"no promise keeps {promise_words(promised)}; the nearest, {promise_flags(found.promises)}, exceeds it "
            f"by {found.excess - 1:.0%}: allow more harm, or serve without queued rows while this traffic lasts"
        )
        raise typer.Exit(exits.FAILED)
    measured, of_engine, served = None, None, list[str]()
    if not (simulated_only or dry_run):
        wanted = TuneFlags(model=words[0], flags=words[1:], preset=preset, rounds=rounds, seed=seed)
        tried = confirm(settings, wanted, tuning, found)
        if not tried.kept:
            output.say(refusal(found, tried, promised))
            raise typer.Exit(exits.FAILED)
        measured = harvest(tried)
        found = found if tried.value == found.value else asyncio.run(tuning.measure(tried))
        served = [*PRESETS[preset].engine_flags, *words[1:]]
        of_engine = engine_flags(settings, served)
    tuned = Tuned(
        model=words[0],
        promises=dict(found.promises),
        kept=[str(one) for one in promised],
        arrivals=f"{sum(map(len, blocks)):,} requests of {blocks[0].name}",
        expected=harvest(found),
        measured=measured,
        confirmed=measured is not None,
        measured_at=time.time(),
        engine_flags=of_engine,
        engine=searched.key.summary,
        profile=searched.key.digest,
    )
    raise typer.Exit(conclude(settings, tuned, served, keep=not dry_run, as_json=as_json))


def check_flags(settings: Settings, flags: list[str], *, confirmed: bool) -> None:
    """Raise for flags that no server of `conserve tune` can have, or that none has as none is started."""
    if confirmed:
        refuse_ours(flags_as_given(settings, flags), "conserve tune")
    elif flags:
        raise SettingsError(
            "--simulated-only and --dry-run start no server, and a simulated engine has the flags of its profile "
            f"(--profile); leave out: {shlex.join(flags)}"
        )


def profile_of(settings: Settings, words: list[str], wanted: str | None) -> "Profile":
    """Profile that the search is on: the one wanted, or the newest of the model, which others stand beside.

    `words` are the model and flags of vLLM. Raises `ProfileError`.
    """
    from conserve.profiles.book import Book

    book = Book(settings.profiles_folder)
    found = book.named(wanted or words[0], command=f"conserve profile --served {shlex.join(words)}")
    how = f"{found.how} {found.measured_at}".strip()
    output.say(f"on the profile {found.key.digest} of {found.name}, {how}: {found.key.summary}")
    older = [one for one in book.all() if one.name == found.name and one.key != found.key]
    for other in older if wanted is None else []:
        differences = "; ".join(found.key.differences(other.key))
        output.say(
            f"an older one is of another engine ({differences}); take it with --profile {other.key.digest}"
        )
    return found


def learned_of(settings: Settings, profile: "Profile") -> "Correction | None":
    """Correction of the profile that engines have learned since; `conserve serve` plans by it, too."""
    from conserve.profiles.book import Book

    learned = Book(settings.profiles_folder).learned(profile)
    if learned is not None:
        output.say(f"as engines have corrected it over {output.count(learned.seen, 'iteration')}")
    return learned


def blocks_of(
    settings: Settings,
    model: str,
    name: str | None,
    rate: float | None,
    lengths: float,
    block_s: float,
    machine: "BenchMachine",
) -> "list[Trace]":
    """Blocks of an engine's requests, from the quietest to the busiest; raises `InputError` and `Overloaded`."""
    from conserve.bench import recorded, traces
    from conserve.bench.simulate_online import play

    if name is None:
        engines = recorded.read(arrivals_folder(settings, model), now=time.time())
    else:
        engines = [traces.read(traces.find_trace(name))]
    mean = sum(trace.rate for trace in engines) / len(engines)
    if rate is not None:
        engines, mean = [trace.scaled(rate / mean) for trace in engines], rate
    whole = recorded.parts([trace.shortened(lengths, lengths) for trace in engines], block_s, BLOCKS)
    context = machine.flags["max_model_len"]
    blocks = [trace.within(context) for trace in whole]
    if longer := sum(one.input_tokens + one.output_tokens > context for trace in whole for one in trace):
        output.say(
            f"{longer:,} of the live requests are longer than the engine's context of {context:,} tokens; "
            "their prompts are cut to fit it"
        )
    busy = sum(play(one, machine.engine, block_s, until_s=block_s).busy for one in blocks) / len(blocks)
    if busy > BUSIEST:
        raise Overloaded(
            f"at {mean:.3g} requests/s online-only alone keeps the engine {busy:.0%} busy, which leaves "
            f"queued rows nothing; give a lower --rate, such as {mean * 0.5 / busy:.2g}, or shorter --lengths"
        )
    requests, whose = sum(map(len, blocks)), engines[0].name
    output.say(
        f"{output.count(len(blocks), 'block')} of {block_s:g} s from {whose}, {requests:,} live requests"
        f"{of_cache(blocks)}; online-only alone keeps the engine about {busy:.0%} busy"
    )
    return blocks


def of_cache(blocks: "list[Trace]") -> str:
    """Words on the prompts' tokens that the prefix cache has; none where it has none."""
    prompts = sum(one.input_tokens for block in blocks for one in block)
    cached = sum(block.cached(one) for block in blocks for one in block)
    return f", {cached / prompts:.0%} of their prompts' tokens in the prefix cache" if cached else ""


def prepare_tuning(
    machine: "BenchMachine", blocks: "list[Trace]", promised: "list[Promise] | Any", block_s: float, seed: int
) -> "Tuning":
    """The search on a simulated engine, whose live requests alone are played already."""
    from conserve.bench.promise_search import Tuning
    from conserve.bench.simulated import Simulator

    output.say("searching on simulated time: 20 to 32 test runs")
    simulated = Simulator(machine=machine, simulate=simulator(), block_s=block_s, seed=seed)
    mix = machine.mix(seed=seed)
    return Tuning(simulator=simulated, blocks=blocks, promised=promised, mix=mix, say=output.say)


def confirm(settings: Settings, wanted: TuneFlags, tuning: "Tuning", found: "TriedValue") -> "TriedValue":
    """The largest value up to the one found that the engine keeps; else the last one tried."""
    from conserve.bench.presets import PRESETS
    from conserve.bench.servers.confirmation import Confirmation
    from conserve.cli.bench import interruptible, until_stopped
    from conserve.cli.bench_plan import own_plan

    made = partial(own_plan, settings, wanted.flags, seed=wanted.seed)
    size = {"rounds": wanted.rounds, "seed": wanted.seed}
    with TemporaryDirectory(prefix="conserve-tune-") as folder, interruptible():
        sitting = Confirmation(made, PRESETS[wanted.preset], tuning, Path(folder), **size, say=output.say)
        if asyncio.run(until_stopped(sitting.run(found))):
            return sitting.outcome
    output.say("stopped before it was confirmed: nothing is kept; --simulated-only keeps what was found")
    raise typer.Exit(exits.INTERRUPTED)


def refusal(found: "TriedValue", tried: "TriedValue", promised: "Any") -> str:
    """Sentence where the engine kept none of the values, from the one found to the last one tried."""
    return (
        f"the engine kept {promise_words(promised)} with none of the values tried, "
        f"from {promise_flags(found.promises)} down to {promise_flags(tried.promises)}: nothing is kept; "
        "allow more harm, or give a lower --rate"
    )


def harvest(found: "TriedValue") -> dict[str, float]:
    """Harvest in rows' worth of work and in tokens."""
    return {
        "rows_per_s": found.rows_per_s,
        "prompt_tokens_per_s": found.prompt_tokens_per_s,
        "decode_tokens_per_s": found.decode_tokens_per_s,
    }


def rates(harvested: Mapping[str, float]) -> str:
    """A harvest in words."""
    rows_per_s = harvested["rows_per_s"]
    return (
        f"{rows_per_s:.2f} rows/s, {3600 * rows_per_s:,.0f} an hour: "
        f"{harvested['prompt_tokens_per_s']:,.0f} prompt tokens/s and "
        f"{harvested['decode_tokens_per_s']:,.0f} decode tokens/s"
    )


def promise_words(promised: "Any") -> str:
    """Latencies that may be harmed, in words."""
    return ", ".join(map(str, promised))


def conclude(settings: Settings, tuned: Tuned, served: list[str], *, keep: bool, as_json: bool) -> int:
    """Keep what was found, and print it; returns the exit code.

    `served` are the flags of vLLM that the confirming engine had beside those of the settings.
    """
    import msgspec

    path: Path | None = write(settings, tuned) if keep else None
    if as_json:
        moment = {"measured_at": output.iso(tuned.measured_at)}
        output.data_json({**msgspec.to_builtins(tuned), **moment, "file": str(path) if path else None})
    else:
        output.data(
            f"{tuned.flags} keeps {', '.join(tuned.kept)} "
            f"({'confirmed on the engine' if tuned.confirmed else 'simulated'})"
        )
        output.data(f"expected beside this traffic, simulated: {rates(tuned.expected)}")
        if tuned.measured is not None:
            output.data(f"measured beside its busiest blocks, on the engine: {rates(tuned.measured)}")
    if path is not None:
        output.say(f"kept for conserve serve {shlex.join([tuned.model, *served])} --tuned: {path}")
    return exits.DONE
