"""`conserve profile` measures this engine's iterations; `conserve profile show` prints the profile."""

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.api.running import engine_flags
from conserve.cli import exits, output
from conserve.cli.context import Context, split_flags
from conserve.cli.profile_report import range_words, show_profile

if TYPE_CHECKING:
    from conserve.engine.profiling import Rig, SessionProgress
    from conserve.profiles.itinerary import Stretch
    from conserve.profiles.points import IterationLimits
    from conserve.profiles.profile import Profile

EXAMPLE = """
conserve profile smollm2-demo
conserve profile Qwen/Qwen2.5-7B-Instruct --budget 600 --tensor-parallel-size 2
conserve profile show smollm2-demo
"""
SHOW_EXAMPLE = """
conserve profile show
conserve profile show smollm2-demo --plot predicted.png
conserve profile show llama-3.1-8b-h100 --json
"""
EXAMPLES = {"show": SHOW_EXAMPLE}
HELP = "Measure how long the engine's iterations take, and show it; `profile MODEL` measures."
BUDGET_S = 180.0
LINE_S = 10.0


def measure(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [VLLM FLAGS]",
            help="Local folder, hub id or smollm2-demo, and the flags that it is served with.",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="For all of it, the engine's start included.")
    ] = BUDGET_S,
    max_context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Longest request that will be served; all by default."),
    ] = None,
    served: Annotated[
        bool, typer.Option("--served", help="As conserve serve runs it: with cores kept for the front end.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random batches and their order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON at the end.")] = False,
) -> None:
    """Measure a model on this machine through the real engine and keep the profile.

    Ctrl-C stops it; the same command goes on from there. An older profile is kept until the new one is done.
    """
    from conserve.engine.vllm.profiling.rig import EngineRig
    from conserve.errors import SettingsError
    from conserve.profiles.book import Book

    if not 0 < budget < float("inf"):
        raise SettingsError(f"--budget {budget:g} leaves no time; give seconds, 180 for the demo model")
    context: Context = ctx.obj
    names, flags = split_flags(model or [])
    if flags and not names:
        raise SettingsError("name the model before vLLM's flags: conserve profile MODEL FLAGS")
    if len(names) > 1:
        raise SettingsError(
            f"one model at a time, with vLLM's flags behind it: conserve profile {names[0]} [VLLM FLAGS]"
        )
    settings = context.settings(model=names[0] if names else None)
    require_writable(settings.home, settings.profiles_folder)
    begun = time.monotonic()
    output.say(f"starting the engine with {settings.engine_model}")
    rig = EngineRig.start(
        settings.engine_model,
        engine_flags=engine_flags(settings, flags),
        cache_dir=settings.models_folder,
        served=served,
    )
    try:
        started_s = time.monotonic() - begun
        profile, path = measure_profile(
            rig,
            settings.profiles_folder,
            budget_s=max(budget - started_s, budget / 2),
            max_context=max_context,
            seed=seed,
        )
    finally:
        rig.close()
    output.say(f"wrote {path}: {', '.join(range_words(profile))}")
    show_profile(profile, None, Book(settings.profiles_folder).all(), as_json=as_json)


def show(
    ctx: typer.Context,
    profile: Annotated[
        str | None,
        typer.Argument(help="A model, a profile's file or digest, or one of those derived from the papers."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything but the samples as JSON.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Write predicted against measured times as a picture.")
    ] = None,
) -> None:
    """Show a profile: coefficients, errors and a small table; the newest one by default."""
    from conserve.errors import ProfileMissing
    from conserve.profiles.book import Book
    from conserve.store.files.os_errors import refuse_no_folder

    context: Context = ctx.obj
    settings = context.settings()
    book = Book(settings.profiles_folder)
    if profile is not None:
        found = book.named(profile)
    elif not (newest := book.all()):
        refuse_no_folder(settings.home)
        raise ProfileMissing("nothing was profiled on this machine yet; run: conserve profile MODEL")
    else:
        found = newest[-1]
    if plot is not None:
        from conserve.profiles.plot import plot_profile

        plot_profile(found, plot)
        output.say(f"wrote {plot}")
    show_profile(found, book.learned(found), book.all(), as_json=as_json)


def require_writable(home: Path, folder: Path) -> None:
    """Raise if the profile could not be saved, before minutes are spent measuring."""
    from conserve.errors import ProfileError
    from conserve.store.files.place import place_of

    try:
        place_of(home).make_private()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ProfileError(
            f"{folder} cannot be written ({error.strerror}); set CONSERVE_HOME to a folder that can"
        ) from error


def measure_profile(
    rig: "Rig",
    folder: Path,
    *,
    budget_s: float,
    max_context: int | None,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> "tuple[Profile, Path]":
    """Measure and save the profile; an interrupted session is continued."""
    from conserve.engine.profiling import conclude
    from conserve.engine.profiling import measure as measure_points
    from conserve.errors import ProfilingFailed
    from conserve.profiles.book import Book
    from conserve.profiles.points import plan
    from conserve.profiles.record import Header, Record

    book = Book(folder)
    points = plan(rig.limits, seed=seed, max_context=max_context)
    header = Header(rig.key.digest, plan_digest(rig.limits, seed=seed, max_context=max_context))
    record = Record.open(book.path(rig.name, rig.key).with_suffix(".partial"), header)
    if record.visits:
        output.say(f"going on with {output.count(len(record.visits), 'batch', 'batches')} measured earlier")
    try:
        with shown_progress() as on_progress:
            measure_points(
                rig,
                points,
                record,
                budget_s=budget_s,
                on_progress=on_progress,
                on_stretch=say_stretch,
                clock=clock,
            )
        profile = conclude(rig, record)
        path = book.save(profile)
    except KeyboardInterrupt:
        output.say(
            f"stopped with {output.count(len(record.visits), 'batch', 'batches')} measured; "
            "the same command goes on from there"
        )
        raise typer.Exit(exits.INTERRUPTED) from None
    except OSError as error:
        raise ProfilingFailed(
            f"{folder} cannot be written ({error.strerror}); free some space and run the command again"
        ) from error
    record.discard()
    return profile, path


def say_stretch(stretch: "Stretch") -> None:
    """Print that the budget is too small, and by how many seconds."""
    output.say(
        "the budget is too small for a profile of this engine: measuring takes about "
        f"{output.duration(stretch.more_s)} longer, for {stretch.batches} more batches "
        "(Ctrl-C keeps what was measured)"
    )


def plan_digest(limits: "IterationLimits", *, seed: int, max_context: int | None) -> str:
    """Digest of a session's limits without KV memory, which differs from start to start on a CPU."""
    chosen = (limits.tokens, limits.requests, limits.context, max_context, seed)
    return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]


@contextmanager
def shown_progress() -> "Iterator[Callable[[SessionProgress], None]]":
    """Show a bar on a terminal, and elsewhere a line now and then."""
    if not output.colourful(sys.stderr):
        yield line_now_and_then()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("measuring"),
        BarColumn(bar_width=30),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        shown = bar.add_task("", total=1.0)
        yield lambda progress: bar.update(
            shown,
            completed=min(1.0, progress.seconds / progress.expected_s),
            description=f"{progress.points} batches",
        )


def line_now_and_then() -> "Callable[[SessionProgress], None]":
    said_at = -LINE_S

    def on_progress(progress: "SessionProgress") -> None:
        nonlocal said_at
        if progress.seconds >= said_at + LINE_S:
            said_at = progress.seconds
            batches = output.count(progress.points, "batch", "batches")
            output.say(f"{batches}, {progress.seconds:.0f} of {progress.expected_s:.0f} s")

    return on_progress


VERBS = {"measure": measure, "show": show}
DEFAULT_VERB = "measure"
