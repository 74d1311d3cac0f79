"""Run all benchmarks, or those named, and print one table."""

import importlib
import sys

from tests.benchmarks.report import Report, environment

ALL = (
    *(
        "startup",
        "submit",
        "bookkeeping",
        "nightly",
        "waiting",
        "scheduling",
        "simulation",
        "turns",
        "exchange",
        "prefixes",
        "images",
    ),
    *("forecast", "deadlines", "pushing"),
    *("real_engine", "prefix_order", "latency_model", "preemption", "checkpoints", "serving", "run_batch"),
    "polling",
    "first_row",
    "accelerator",
    "buckets",
)


def main(names: list[str]) -> int:
    """Measure and report; 1 if a target was missed."""
    print("\n".join(f"{key:<11} {value}" for key, value in environment().items()), flush=True)
    report = Report()
    for name in names or ALL:
        report.add(importlib.import_module(f"tests.benchmarks.{name}").measure())
    print(f"raw numbers: {report.save().name} in .bench/")
    return 0 if all(figure.reached for figure in report.figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
