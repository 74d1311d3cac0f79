"""Time of the commands that a user waits for, beside Python alone."""

import statistics
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure, Finished, conserve, timed

RUNS = 10
AT_MOST_MS = {"--help": 100.0, "status": 150.0}
COMMAND = "python -m tests.benchmarks startup"


def measure() -> list[Figure]:
    """Whole processes, taken in turn: `python -c pass`, `--help`, `status`. A first round does not count."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        conserve("submit", str(short_rows(Path(folder), 1000)), "--prompt", "{{ q }}", home=home)
        rounds = [one_round(home) for _ in range(RUNS + 1)][1:]
    bare = [taken["python"] for taken in rounds]
    return [figure(name, [taken[name] for taken in rounds], bare) for name in AT_MOST_MS]


def one_round(home: Path) -> dict[str, Finished]:
    """Each of the processes once."""
    bare = timed([sys.executable, "-c", "pass"])
    return {"python": bare, **{name: conserve(name, home=home) for name in AT_MOST_MS}}


def figure(name: str, runs: list[Finished], bare: list[Finished]) -> Figure:
    """One command, and how many times as long as Python alone it took in the same round."""
    samples = [run.wall_s * 1e3 for run in runs]
    alone = [run.wall_s * 1e3 for run in bare]
    ratios = [run.wall_s / python.wall_s for run, python in zip(runs, bare, strict=True)]
    cpu_ms, alone_cpu_ms = (1e3 * statistics.median(run.cpu_s for run in which) for which in (runs, bare))
    note = (
        f"python alone {statistics.median(alone):.3g} ms ({min(alone):.3g} to {max(alone):.3g}), "
        f"ratio {statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g}); "
        f"processor time {cpu_ms:.3g} and {alone_cpu_ms:.3g} ms"
    )
    return Figure(
        name=f"conserve {name}",
        unit="ms",
        samples=samples,
        target=f"<= {AT_MOST_MS[name]:g}",
        reached=statistics.median(samples) <= AT_MOST_MS[name],
        command=COMMAND,
        note=note,
    )
