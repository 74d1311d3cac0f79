"""How long the commands take that a user waits for, beside Python alone."""

import statistics
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure, conserve, timed

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


def one_round(home: Path) -> dict[str, float]:
    """Milliseconds that each of the processes takes."""
    taken_s = {"python": timed([sys.executable, "-c", "pass"]).wall_s}
    taken_s |= {name: conserve(name, home=home).wall_s for name in AT_MOST_MS}
    return {name: wall_s * 1e3 for name, wall_s in taken_s.items()}


def figure(name: str, samples: list[float], bare: list[float]) -> Figure:
    """One command, and how many times as long as Python alone it took in the same round."""
    ratios = [sample / alone for sample, alone in zip(samples, bare, strict=True)]
    note = (
        f"python alone {statistics.median(bare):.3g} ms ({min(bare):.3g} to {max(bare):.3g}), "
        f"ratio {statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
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
