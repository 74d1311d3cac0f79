"""Rehearse every step on a CPU with a tiny model: `python -m tools.gpu.rehearse [--out FOLDER] [STEP,STEP...]`.

Proves that the steps run, and that their command lines and fields are right. Its figures say nothing about speed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu import children, contents
from tools.gpu.results import FAILED, LEFT_OUT, state
from tools.gpu.steps import STEPS

LIMIT_S = 2400  # a machine under load takes several times as long


def main() -> int:
    """Rehearse, print a table; returns 1 if a step has no result."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.rehearse", description=__doc__)
    parser.add_argument("steps", nargs="?", default="all", help="all of them by default")
    parser.add_argument("--out", type=Path, default=Path(".gpu/rehearsal"), help=".gpu/rehearsal by default")
    known = parser.parse_args()
    shutil.rmtree(known.out, ignore_errors=True)
    known.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="conserve-gpu-") as scratch:
        measured(known.steps, known.out, Path(scratch))
    document = json.loads((known.out / "results.json").read_text())
    print(table(document["steps"]))
    names = list(STEPS) if known.steps == "all" else known.steps.split(",")
    return 0 if complete(document["steps"], names) else 1


def measured(steps: str, out: Path, scratch: Path) -> None:
    """Run the steps as on a GPU machine, in a process of their own."""
    contents.write_models(scratch / "models", Path(os.environ.get("CONSERVE_MODELS", ".demo/models")))
    words = [
        sys.executable,
        "-m",
        "tools.gpu.measure",
        "--rehearse",
        "--limit",
        str(LIMIT_S),
        "--out",
        str(out),
    ]
    words += ["--models", str(scratch / "models"), "--scratch", str(scratch / "stores"), steps]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    process = subprocess.Popen(words, env={**os.environ, **environment}, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        process.wait()
    finally:
        children.end(process, 2 * children.STOP_PATIENCE_S)


def complete(found: Mapping[str, Mapping[str, Any]], names: list[str]) -> bool:
    """True if every step has a result."""
    return all(name in found and not {FAILED, LEFT_OUT} & set(found[name]) for name in names)


def table(found: Mapping[str, dict[str, Any]]) -> str:
    """One line a step: its seconds, and how it ended."""
    lines = [f"{name:<20} {of.get('took_s', 0):>7.1f} s  {state(of)}" for name, of in found.items()]
    return "\n".join(["", *lines, f"{'all':<20} {sum(of.get('took_s', 0) for of in found.values()):>7.1f} s"])


if __name__ == "__main__":
    sys.exit(main())
