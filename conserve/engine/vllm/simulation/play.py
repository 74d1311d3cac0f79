"""Block after block of live requests beside offline rows, under one policy, on simulated time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from conserve.engine.known_times import KnownTimes
from conserve.engine.policy.policies import traits
from conserve.engine.section import EngineSection
from conserve.engine.vllm.settings import WORKER
from conserve.engine.vllm.simulation.bare import Clock, bare_config
from conserve.engine.vllm.simulation.copies import HostCopies, SimulatedCopies, checkpointing
from conserve.engine.vllm.simulation.disaggregated import Disaggregated, PoolEngine, handing_over
from conserve.engine.vllm.simulation.engine import Coming, SimulatedAnswer, SimulatedEngine
from conserve.names import OFF, PRIORITY, PROMPT
from conserve.profiles.model import LinearModel
from conserve.server_report import SchedulerReport, of_engine

SCATTER = 0.025  # of one batch around its own median, as measured
SEED = 7
RESIDUALS_MS = range(1, 400)  # lengths of iterations that the margins are learned at


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """An engine's speed and sizes."""

    model: LinearModel
    layers: int
    flags: Mapping[str, int]  # of vLLM, by the names of its arguments
    num_blocks: int  # of KV
    copies: HostCopies | None = None  # for engines with checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBlock:
    """Answers of one block, and the engine's reports at its begin and at the end of its time.

    Its time ends with an iteration, so that `ended_s` is later than asked for.
    """

    began_s: float
    ended_s: float
    answers: Sequence[SimulatedAnswer]
    first: SchedulerReport
    last: SchedulerReport


def simulate(
    machine: SimulatedMachine,
    policy: str,
    blocks: Iterable[Iterable[Coming]],
    *,
    block_s: float,
    rows: Iterator[tuple[int, int]],
    window: int,
    promises: Mapping[str, Any] | None = None,
    hygen: Mapping[str, float] | None = None,
    terms: Mapping[str, float] | None = None,
    separable: bool = True,
    checkpoints: bool = False,
    shared_tokens: int = 0,
) -> Iterator[SimulatedBlock]:
    """Play the blocks one after the other on one engine, which has run offline rows alone for a block before.

    `policy` may name its preemption (`conserve/never`). `promises` are entries of the engine's section, `hygen` are
    coefficients of HyGen's predictor, `terms` are parameters of its policies. Where rows are not `separable`, all
    leave an iteration or none. With `checkpoints` evicted rows get their KV back from host memory.
    """
    with _engine(
        machine,
        policy,
        rows,
        window=window,
        promises=promises or {},
        hygen=hygen,
        separable=separable,
        checkpoints=checkpoints,
    ) as engine:
        if terms is not None:
            engine.scheduler.conserve({"policy": policy.partition("/")[0], "hygen": dict(terms)})
        engine.go_on_until(engine.clock.now + block_s)
        for arrivals in blocks:
            began_s, first = engine.clock.now, engine.scheduler.conserve()
            answers = engine.play(arrivals, block_s, shared_tokens=shared_tokens)
            yield SimulatedBlock(
                began_s=began_s,
                ended_s=engine.said_s,
                answers=answers,
                first=of_engine(first),
                last=of_engine(engine.said),
            )


def simulate_pool(
    machine: SimulatedMachine,
    blocks: Iterable[Iterable[Coming]],
    *,
    prefill: int,
    decode: int,
    prefill_tokens: int,
    block_s: float,
    rows: Iterator[tuple[int, int]],
    window: int,
    shared_tokens: int = 0,
) -> Iterator[SimulatedBlock]:
    """Play the blocks on so many prefill and decode engines, which have run rows alone for a block before.

    An iteration of a prefill engine has `prefill_tokens` tokens at most.
    """
    limited = {**machine.flags, "max_num_batched_tokens": prefill_tokens}
    flags = [*[limited] * prefill, *[machine.flags] * decode]
    with _pool(machine, flags, prefill, rows, window) as pool:
        pool.go_on_until(pool.now + block_s)
        for arrivals in blocks:
            began_s, first = pool.now, pool.report()
            answers = pool.play(arrivals, block_s, shared_tokens=shared_tokens)
            yield SimulatedBlock(
                began_s=began_s,
                ended_s=pool.said_s,
                answers=answers,
                first=of_engine(first),
                last=of_engine(pool.said),
            )


@contextmanager
def _pool(
    machine: SimulatedMachine,
    flags: Sequence[Mapping[str, int]],
    prefill: int,
    rows: Iterator[tuple[int, int]],
    window: int,
) -> Iterator[Disaggregated]:
    """Engines with these flags under vLLM's priority scheduling, with their clock installed."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, clock.installed():
        section = EngineSection(policy=PRIORITY, preemption=OFF, harm=None, receipt=0.0)
        times = known(machine.model, Path(folder))
        stages = [
            PoolEngine(
                handing_over(Path(folder), section, times, of_one),
                clock=clock,
                model=machine.model,
                layers=machine.layers,
                num_blocks=machine.num_blocks,
                scatter=SCATTER,
                seed=SEED + number,
            )
            for number, of_one in enumerate(flags)
        ]
        try:
            yield Disaggregated(stages[:prefill], stages[prefill:], offline=rows, window=window)
        finally:
            for stage in stages:
                stage.scheduler.shutdown()


@contextmanager
def _engine(
    machine: SimulatedMachine,
    policy: str,
    rows: Iterator[tuple[int, int]],
    *,
    window: int,
    promises: Mapping[str, Any],
    hygen: Mapping[str, float] | None = None,
    separable: bool,
    checkpoints: bool,
) -> Iterator[SimulatedEngine]:
    """The engine, with its clock installed."""
    name, _, preemption = policy.partition("/")
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, clock.installed():
        leaves = preemption or (PROMPT if traits(name).rows_may_leave else OFF)
        said = {"policy": name, "preemption": leaves, "harm": None, "receipt": 0.0, **promises}
        times = msgspec.structs.replace(known(machine.model, Path(folder)), hygen=hygen)
        flags: dict[str, Any] = {**machine.flags}
        copies = machine.copies if checkpoints else None
        if copies is not None:
            times = msgspec.structs.replace(times, block_ms=2 * [copies.block_ms])
            flags["kv_transfer_config"] = checkpointing(copies, flags["block_size"])
        config = bare_config(Path(folder), section=EngineSection.of(said), times=times, **flags)
        config.parallel_config.worker_cls = WORKER
        engine = SimulatedEngine(
            config,
            clock=clock,
            model=machine.model,
            layers=machine.layers,
            num_blocks=machine.num_blocks,
            offline=iter(()) if traits(name).defers_offline else rows,
            window=window,
            scatter=SCATTER,
            seed=SEED,
            separable=separable,
            copies=SimulatedCopies(copies) if copies is not None else None,
        )
        try:
            yield engine
        finally:
            engine.scheduler.shutdown()


def known(model: LinearModel, folder: Path) -> KnownTimes:
    """Times of iterations: the model is right, but for scatter."""
    scatter = np.random.default_rng(SEED).normal(1, SCATTER, len(RESIDUALS_MS)).tolist()
    residuals = list(zip(RESIDUALS_MS, scatter, strict=True))
    return KnownTimes.made_up(model, folder, of="simulation", residuals=residuals)
