"""Measure on a GPU machine: `python3 -m tools.gpu.measure [--limit S] STEP,STEP...`, after install.sh.

Steps that follow each other and need the same server share it. Findings are in $OUT/results.json at once. Flags
behind the steps go to vLLM: --kv-cache-dtype fp8, ...
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tools.gpu.budget import Budget
from tools.gpu.engines import FULL, SMALL
from tools.gpu.results import Results
from tools.gpu.server import StepFailed
from tools.gpu.steps import STEPS, Run, Step

LIMIT_S = 540.0


def measure(
    run: Run, names: Sequence[str], budget: Budget, steps: Mapping[str, Step] = STEPS, *, keep: bool = False
) -> None:
    """Do the steps in turn; a step that no longer fits is left out, and one that fails ends no other."""
    try:
        for name in names:
            most_s = run.size.patience * steps[name].most_s
            allowed = budget.allow(least_s=steps[name].least_s, most_s=most_s)
            if allowed is None:
                run.results.note(name, left_out=budget.why_left_out(steps[name].least_s))
            else:
                do(run, name, steps[name], allowed, budget)
    finally:
        for name in names:
            if name not in run.results.steps:
                run.results.note(name, left_out="the call was ended before it began")
        if keep:
            run.leave_server()
        run.stop_server()


def do(run: Run, name: str, step: Step, limit_s: float, budget: Budget) -> None:
    """Do one step, and note how it ended."""
    began = budget.clock()
    try:
        step.work(run, name, step.kind, limit_s)
    except StepFailed as failed:
        run.results.note(name, failed=str(failed), **({"log": failed.log} if failed.log else {}))
    except Exception as error:  # the next step may still say something
        run.results.note(name, failed=f"{type(error).__name__}: {error}")
    except BaseException as ended:
        run.results.note(name, failed=f"cut short by {type(ended).__name__}")
        raise
    run.results.note(name, took_s=round(budget.clock() - began, 1))


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and vLLM's flags."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.gpu.measure", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("steps", help=f"all, or with commas between: {', '.join(STEPS)}")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for all of it ({LIMIT_S:.0f})")
    parser.add_argument("--model", help="llama-8b, qwen-14b, tiny, or a folder")
    parser.add_argument("--rates", help="live requests per second of the comparisons, e.g. 1,2")
    parser.add_argument("--policies", default="", help="of the comparisons, instead of a step's own")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="$OUT by default"
    )
    kit = Path(os.environ.get("KIT", "/tmp/conserve-gpu"))
    parser.add_argument("--models", type=Path, default=kit / "models", help="folder of the models")
    parser.add_argument("--scratch", type=Path, default=kit / "scratch", help="folder for stores and rows")
    parser.add_argument("--keep", action="store_true", help="leave the last server to the next call")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model and small counts, on a CPU")
    known, more = parser.parse_known_args(words)
    known.steps = list(STEPS) if known.steps == "all" else known.steps.split(",")
    if unknown := [name for name in known.steps if name not in STEPS]:
        parser.error(f"there is no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    return known, more


def main() -> int:
    """Measure; returns 0 also if steps failed, since their reasons are results too."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, stop)
    known, more = parse(sys.argv[1:])
    size = SMALL if known.rehearse else FULL
    size = replace(size, model=known.model or size.model)
    if known.rates:
        size = replace(size, rates=tuple(float(rate) for rate in known.rates.split(",")))
    known.out.mkdir(parents=True, exist_ok=True)
    scratch = known.scratch / str(os.getpid())
    scratch.mkdir(parents=True)
    setting = {"model": size.model, "steps": known.steps, "limit_s": known.limit, "more": more}
    results = Results(folder=known.out.absolute(), rehearsal=known.rehearse, setting=setting)
    results.write()
    run = Run(
        size=size,
        results=results,
        models=known.models.absolute(),
        scratch=scratch.absolute(),
        more=more,
        policies=known.policies,
        kept=known.scratch.absolute() / "kept.json",
    )
    budget = Budget(limit_s=known.limit, began=began, clock=time.monotonic)
    measure(run, known.steps, budget, keep=known.keep)
    return 0


def stop(*_: object) -> NoReturn:
    """End as if by an exception, so that children are ended and results noted."""
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())
