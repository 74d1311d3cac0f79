"""How long the commands take that a user waits for."""

import tempfile
from pathlib import Path

from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure, conserve

RUNS = 11


def measure() -> list[Figure]:
    """`--help` and `status`, whole processes."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        conserve("submit", str(short_rows(Path(folder), 1000)), "--prompt", "{{ q }}", home=home)
        return [timed_command(home, "--help", at_most_ms=150), timed_command(home, "status", at_most_ms=400)]


def timed_command(home: Path, argument: str, *, at_most_ms: float) -> Figure:
    """One command, run several times after a warm-up."""
    samples = [conserve(argument, home=home).wall_s * 1e3 for _ in range(RUNS + 1)][1:]
    return Figure(
        name=f"conserve {argument}",
        unit="ms",
        samples=samples,
        target=f"<= {at_most_ms:g}",
        reached=sorted(samples)[RUNS // 2] <= at_most_ms,
        command="python -m tests.benchmarks startup",
    )
