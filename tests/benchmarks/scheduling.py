"""Time that planning adds to an iteration: our scheduler beside vLLM's own, on the same requests, no model.

Ours is configured as `conserve serve` runs it: rows may leave iterations, KV is checkpointed, both latencies are
promised. The promises are long; how much an iteration holds is left to the default bounds.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from conserve import names
from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks scheduling"
ROUNDS = 5
ITERATIONS = 60
RUNNING = 256
LAYERS = 30  # of the model
MOST_STEPS = 200  # until all requests decode
LONG_MS = 1e6  # a promise
PROMPT, ANSWER = 100, 400  # tokens: no request finishes while planning is measured


def measure() -> list[Figure]:
    """Milliseconds that an iteration takes longer, the two schedulers taking turns one by one; the order turns.

    And the share of vLLM's own time, since a machine's speed may double from minute to minute.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    cases = {
        "256 running, 10,000 waiting, all offline": (0, RUNNING, 10_000, 0.5),
        "128 online, 128 offline running, 10,000 waiting": (128, 128, 10_000, 0.5),
        "256 online running, no offline work": (RUNNING, 0, 0, 0.1),
    }
    figures = []
    for name, (online, offline, waiting, target) in cases.items():
        stock, ours = (engine(online, offline, waiting, ours=ours) for ours in (False, True))
        pairs = [pair(stock, ours, turned=bool(number % 2)) for number in range(ROUNDS * ITERATIONS)]
        rounds = [pairs[number::ROUNDS] for number in range(ROUNDS)]  # an odd number: both orders in each
        added = [statistics.median(own - vllms for vllms, own in pairs) for pairs in rounds]
        shares = [statistics.median(own / vllms - 1 for vllms, own in pairs) for pairs in rounds]
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
        figures.append(
            Figure(
                name=f"of vLLM's own time: {name}",
                unit="%",
                samples=[100 * share for share in shares],
                target="none",
                reached=True,
                command=COMMAND,
            )
        )
    return figures


def engine(online: int, offline: int, waiting: int, *, ours: bool) -> Any:
    """An engine in which so many requests decode and so many wait."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from tests.bare_scheduler import BareEngine

    with tempfile.TemporaryDirectory() as folder:
        config = configured(Path(folder), ours=ours)
        made = served(config) if ours else BareEngine(config, scheduler_class=Scheduler)
    for kind, count in ((False, online), (True, offline)):
        for _ in range(count):
            made.add(PROMPT, ANSWER, offline=kind)
    for _ in range(MOST_STEPS):  # an iteration begins only as many prompts as an arrival can wait for
        made.step()
        if len(made.scheduler.running) == online + offline:
            break
    assert len(made.scheduler.running) == online + offline
    for _ in range(waiting):
        made.add(PROMPT, ANSWER, offline=True)
    gc.collect()
    return made


def served(config: Any) -> Any:
    """An engine whose worker tells, as ours does in eager mode, that no row left and that rows could have."""
    from conserve.engine.vllm.iteration import IterationOutcome, put, stamp_of
    from tests.bare_scheduler import BareEngine

    stayed = IterationOutcome(
        left=frozenset(), kept={}, joined=0, layers_run=0, layers=LAYERS, separable=True, safepoints=LAYERS
    )

    class Served(BareEngine):
        def result(self, output: Any) -> Any:
            made = super().result(output)
            if stamp_of(output) is not None:
                put(made, stayed)
            return made

    return Served(config)


def configured(folder: Path, *, ours: bool) -> Any:
    """vLLM's configuration, or the one of `conserve serve` with its defaults."""
    from vllm.config import KVTransferConfig

    from conserve.engine.policy.checkpointing import ADAPTIVE, HOST_BYTES
    from conserve.engine.vllm.checkpoint.kv_transfer import with_checkpoints
    from conserve.engine.vllm.settings import WORKER
    from tests.bare_scheduler import engine_config

    sizes: dict[str, Any] = {
        "max_num_seqs": RUNNING,
        "max_num_batched_tokens": 8192,
        "async_scheduling": False,
    }
    if not ours:
        return engine_config(folder, section=None, **sizes)
    _, connector = with_checkpoints([], {"policy": ADAPTIVE, "host_bytes": HOST_BYTES})
    transfer = KVTransferConfig(**json.loads(connector))
    slo = {"ttft_slo_ms": LONG_MS, "tbt_slo_ms": LONG_MS}
    section = {"policy": "conserve", "preemption": names.PROMPT, **slo}
    config = engine_config(folder, section=section, kv_transfer_config=transfer, **sizes)
    config.parallel_config.worker_cls = WORKER
    return config


def pair(stock: Any, ours: Any, *, turned: bool) -> tuple[float, float]:
    """One iteration of each, in ms, vLLM's own first; `turned`: measured second."""
    if turned:
        own = timed(ours)
        return timed(stock), own
    vllms = timed(stock)
    return vllms, timed(ours)


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
