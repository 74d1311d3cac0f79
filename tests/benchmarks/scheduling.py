"""Time that planning adds to an iteration: our scheduler beside vLLM's own, on the same requests, no model."""

import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks scheduling"
ROUNDS = 5
ITERATIONS = 60
RUNNING = 256
PROMPT, ANSWER = 100, 400  # tokens: no request finishes while planning is measured


def measure() -> list[Figure]:
    """Milliseconds that an iteration takes longer, the two schedulers taking turns one by one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    cases = {
        "256 running, 10,000 waiting, all offline": (0, RUNNING, 10_000, 0.5),
        "128 online, 128 offline running, 10,000 waiting": (128, 128, 10_000, 0.5),
        "256 online running, no offline work": (RUNNING, 0, 0, 0.1),
    }
    figures = []
    for name, (online, offline, waiting, target) in cases.items():
        stock, ours = (engine(online, offline, waiting, ours=ours) for ours in (False, True))
        pairs = [(timed(stock), timed(ours)) for _ in range(ROUNDS * ITERATIONS)]
        rounds = [pairs[number::ROUNDS] for number in range(ROUNDS)]
        added = [statistics.median(own - vllms for vllms, own in pairs) for pairs in rounds]
        figures.append(
            Figure(
                name=f"scheduling adds: {name}",
                unit="ms",
                samples=added,
                target=f"<= {target:g}",
                reached=statistics.median(added) <= target,
                command=COMMAND,
            )
        )
    return figures


def engine(online: int, offline: int, waiting: int, *, ours: bool) -> Any:
    """An engine in which so many requests decode and so many wait."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from tests.bare_scheduler import BareEngine, engine_config

    slo = {"policy": "conserve", "tbt_slo_ms": 1e6}  # long enough for all to decode at once
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"max_num_seqs": RUNNING, "max_num_batched_tokens": 8192}
        config = engine_config(Path(folder), section=slo if ours else None, **sizes)
        made = BareEngine(config) if ours else BareEngine(config, scheduler_class=Scheduler)
    for kind, count in ((False, online), (True, offline)):
        for _ in range(count):
            made.add(PROMPT, ANSWER, offline=kind)
    for _ in range(20):  # until all of them decode
        made.step()
    assert len(made.scheduler.running) == online + offline
    for _ in range(waiting):
        made.add(PROMPT, ANSWER, offline=True)
    gc.collect()
    return made


def timed(made: Any) -> float:
    """One iteration, in ms, without what the stand-in for the executor takes."""
    begun = time.perf_counter()
    output = made.scheduler.schedule()
    scheduled = time.perf_counter()
    made.execute(output)
    result = made.result(output)
    computed = time.perf_counter()
    made.scheduler.update_from_output(output, result)
    return (scheduled - begun + time.perf_counter() - computed) * 1e3
