"""Policies over a grid of operating points, on simulated time: `conserve bench --sweep full --simulated`.

    python -m tests.benchmarks.sweep             # the whole grid, hours; goes on where it was stopped
    python -m tests.benchmarks.sweep --cells 8   # its first cells, which are spread over the grid

Measured cells, tables and the page are kept in .bench/sweep.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conserve.bench.points import grid
from conserve.cli.context import Context
from conserve.cli.sweep import SweepFlags, sweeping

FOLDER = Path(".bench/sweep")
SEED = 0


def main(words: Sequence[str]) -> int:
    """Measure the cells that are missing, then print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sweep", description=__doc__)
    parser.add_argument("--cells", type=int, default=len(grid()))
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--policies", default=None)
    parser.add_argument("--output", type=Path, default=FOLDER)
    given = parser.parse_args(words)
    wanted = SweepFlags(
        size="full",
        cells=given.cells,
        seed=SEED,
        policies=given.policies,
        rounds=given.rounds,
        block_s=None,
        simulated=True,
        processes=None,
        preset="cpu",
        folder=given.output,
    )
    return sweeping(Context(), [], wanted, as_json=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
