"""The scheduler's side of layer-wise preemption: the arrival monitor, and what a preemption leaves behind.

While the model runs, vLLM's I/O thread brings requests in. For an online one, what is left of the iteration is
estimated there and then, and the flag is raised if its offline rows are to leave. Source: conserve-2026
Algorithm 2, conserve-2024 Algorithm 2.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from vllm.v1.request import Request

from conserve.engine.policy.preemption import LEAVE_RULES, OFF, Arrivals, UnderWay, spare_tokens
from conserve.engine.policy.view import Slo
from conserve.engine.runtime.leavers import Leavers, Lost
from conserve.engine.runtime.safepoint import ALL_ROWS, LeaveFlag
from conserve.engine.runtime.traffic import quantiles
from conserve.engine.vllm.iteration import Outcome, Stamp, put
from conserve.engine.vllm.settings import CONNECTOR, WORKER
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

log = logging.getLogger("vllm.conserve")
REACTION_SHARE = 0.005  # of the TTFT promise between two safepoints
LARGEST_STEP = 8  # layers between two safepoints
FORGET_S = 10.0  # after which an arrival that never reached the scheduler is no longer expected
REMEMBERED = 1000  # reactions


@dataclass(slots=True, kw_only=True)
class Running:
    """An iteration with offline rows, while it runs."""

    iteration: int
    started: float  # monotonic seconds
    batch: Batch
    rows: Sequence[tuple[Request, int]]  # that may leave, and their tokens
    asked: int = 0  # of them, to leave
    raised_at: float = 0.0  # monotonic seconds


@dataclass(frozen=True, slots=True)
class Expected:
    """An online request that has reached the engine and not yet the scheduler."""

    prompt: Slice
    arrived: float  # monotonic seconds
    ttft_ms: float


class Preemptions:
    """Stamps iterations, raises the flag, counts.

    `arriving` is called in vLLM's I/O thread, everything else in its main one.
    """

    def __init__(self, config: Any, *, policy: str, every: int | None = None) -> None:
        self.why_not = why_not(config) if policy != OFF else "it is switched off"
        self.name = OFF if self.why_not else policy
        self.policy = LEAVE_RULES[policy]() if policy != OFF else None
        self.layers = config.model_config.get_num_layers(config.parallel_config)
        self.separable = False  # until a worker says so
        self._seen = False  # that a worker has safepoints and reads the flag
        self.preemptions = self.abandoned = self.rows_left = self.layers_run = self.tokens_redone = 0
        self.tokens_wasted = 0.0
        self._every = every
        self._flag = LeaveFlag.create() if self.why_not is None else None
        self._lock = threading.Lock()
        self._iterations = 0
        self._running: Running | None = None
        self._expected: dict[str, Expected] = {}
        self._leavers = Leavers()
        self._reactions_ms: deque[float] = deque(maxlen=REMEMBERED)
        self._model: LatencyModel | None = None
        self._slo = Slo()
        self._offline_tokens = 0

    @property
    def on(self) -> bool:
        """Whether iterations are preempted at all."""
        return self.name != OFF

    def follow(self, name: str) -> None:
        """Use another policy from now on, where there can be one."""
        if self._flag is not None:
            self.name = name
            self.policy = LEAVE_RULES[name]() if name != OFF else None

    @property
    def acts(self) -> bool:
        """Whether the next iteration can be preempted, as far as is known."""
        return self.on and self._seen and (self.separable or not self._leavers.any_sheltered())

    def chunk(self, request: str) -> int | None:
        """The most tokens that the next chunk of a row should have, if it has left an iteration."""
        return self._leavers.chunk(request) if self.on else None

    # In the main thread.

    def begin(
        self,
        output: Any,
        *,
        started: float,
        batch: Batch,
        offline: Iterable[tuple[Request, int]],
        model: LatencyModel,
        slo: Slo,
        offline_tokens: int,
    ) -> None:
        """An iteration starts: stamp it, and look once more who came while it was composed."""
        assert self._flag is not None
        rows = list(offline)
        if self._leavers and self._leavers.any_sheltered():
            staying = [row for row in rows if self._leavers.is_sheltered(row[0].request_id)]
            if staying and not self.separable:
                return
            rows = [row for row in rows if row not in staying]
        if not rows:
            return
        # Prompts leave before decode steps, which take less time; those who came last before others.
        rows.reverse()
        rows.sort(key=lambda row: -row[1])
        self._iterations += 1
        self._model, self._slo, self._offline_tokens = model, slo, offline_tokens
        put(
            output,
            Stamp(
                iteration=self._iterations,
                flag=self._flag.name,
                rows=[request.request_id for request, _ in rows],
                every=self._every or self._step(model.predict(batch), slo),
            ),
        )
        self._running = Running(
            iteration=self._iterations,
            started=started,
            batch=batch,
            rows=rows,
        )
        if self._expected:
            self._consider()

    def arrived(self, request: str) -> None:
        """The scheduler has it: the next plan will know."""
        self._expected.pop(request, None)

    def end(self, outcome: Outcome | None, tokens: Mapping[str, int]) -> frozenset[str]:
        """The iteration is over; returns those who computed nothing."""
        with self._lock:
            running, self._running = self._running, None
        left = outcome.left if outcome is not None else frozenset()
        self._leavers.computed(
            {name: n for name, n in tokens.items() if name not in left} if left else tokens
        )
        if outcome is None or running is None:
            return frozenset()
        self.separable, self.layers = outcome.separable, max(1, outcome.layers)
        self._believe(outcome)
        if not left:
            return left
        self.preemptions += 1
        self.abandoned += len(left) == len(tokens)
        self.rows_left += len(left)
        self.layers_run += outcome.layers_run
        self._reactions_ms.append((time.monotonic() - running.raised_at) * 1e3)
        for name in left:
            layer = outcome.kept.get(name, 0)
            self._count(
                self._leavers.left(
                    name, tokens[name], layer=layer, layers_run=outcome.layers_run, layers=self.layers
                )
            )
        return left

    def computed(self, tokens: Mapping[str, int]) -> None:
        """These were in an iteration without safepoints."""
        self._leavers.computed(tokens)

    def lost_memory(self, request: str) -> None:
        """The row's KV blocks are gone."""
        self._count(self._leavers.evicted(request, self.layers))

    def _count(self, lost: Lost) -> None:
        self.tokens_redone += lost.tokens
        self.tokens_wasted += lost.worth

    def _believe(self, outcome: Outcome) -> None:
        """A worker has answered: see whether it can be preempted at all."""
        self._seen = True
        if not outcome.safepoints or not outcome.heard:
            self.why_not = (
                "the model has no safepoints" if outcome.heard else "the worker cannot read the flag"
            )
            log.warning("iterations are not preempted: %s", self.why_not)
            self.close()

    def forget(self, request: str) -> None:
        """The request is gone."""
        self._expected.pop(request, None)
        self._leavers.forget(request)

    def close(self) -> None:
        """Remove the flag."""
        with self._lock:
            if self._flag is not None:
                self._flag.close()
                self._flag, self.name = None, OFF

    def report(self) -> dict[str, Any]:
        """Counts since the start, for JSON."""
        return {
            "policy": self.name,
            "why_off": self.why_not,
            "rows_go_on": self.separable,  # where they left; else iterations are abandoned whole
            "iterations_left": self.preemptions,
            "preemptions": self.preemptions,  # deprecated: its former name, kept for one release
            "abandoned": self.abandoned,
            "rows": self.rows_left,
            "layers_run": self.layers_run,
            "tokens_redone": self.tokens_redone,
            "tokens_wasted": self.tokens_wasted,
            "reaction_ms": quantiles(sorted(self._reactions_ms)),
        }

    # In the I/O thread.

    def arriving(self, request: Request, ttft_ms: float | None, *, arrived: float) -> None:
        """An online request has come."""
        if self.policy is None or request.use_structured_output:  # whose grammar is not compiled yet
            return
        tokens = max(1, request.num_prompt_tokens)
        promise = self._slo.ttft_ms if ttft_ms is None else ttft_ms
        self._expected[request.request_id] = Expected(Slice(tokens, 0), arrived, promise)
        if self._running is not None:
            self._consider()

    # In either.

    def _consider(self) -> None:
        with self._lock:
            running, policy, model = self._running, self.policy, self._model
            now = time.monotonic()
            for name, one in list(self._expected.items()):
                if one.arrived < now - FORGET_S:
                    self._expected.pop(name, None)
            waiting = list(self._expected.values())
            if running is None or policy is None or model is None or not waiting or self._flag is None:
                return
            rows = policy.leaving(
                UnderWay(
                    batch=running.batch,
                    rows=[slice_of(request, tokens) for request, tokens in running.rows],
                    separable=self.separable,
                    elapsed_ms=(now - running.started) * 1e3,
                ),
                Arrivals(
                    prompts=[one.prompt for one in waiting],
                    slack_ms=min(one.ttft_ms - (now - one.arrived) * 1e3 for one in waiting),
                    ttft_ms=min(one.ttft_ms for one in waiting),
                    spare_tokens=spare_tokens(self._offline_tokens, self.tokens_wasted),
                ),
                model,
            )
            if rows > running.asked:
                running.asked, running.raised_at = rows, running.raised_at or now
                alone = rows == running.batch.requests or not self.separable
                self._flag.raise_for(running.iteration, ALL_ROWS if alone else rows)

    def _step(self, iteration_ms: float, slo: Slo) -> int:
        """Layers between two safepoints: the most that pass within the reaction time wanted."""
        if slo.ttft_ms == inf:
            return LARGEST_STEP
        layer_ms = iteration_ms / max(1, self.layers)
        return max(1, min(LARGEST_STEP, int(REACTION_SHARE * slo.ttft_ms / layer_ms))) if layer_ms > 0 else 1


def slice_of(request: Request, tokens: int) -> Slice:
    """The request's part in an iteration that was scheduled, and is not over."""
    context = max(0, request.num_computed_tokens - tokens)
    return Slice(tokens, context, tokens == 1 and context >= request.num_prompt_tokens)


def connector_of(config: Any) -> str | None:
    """The name of the engine's KV connector."""
    transfer = config.kv_transfer_config
    return None if transfer is None else transfer.kv_connector


def why_not(config: Any) -> str | None:
    """Why iterations of this engine cannot be preempted; None if they can."""
    parallel, model = config.parallel_config, config.model_config
    reasons = {
        "the worker is not ConServe's (--worker-cls)": parallel.worker_cls != WORKER,
        "iterations are scheduled ahead (--async-scheduling)": config.scheduler_config.async_scheduling,
        "the pipeline is parallel": parallel.pipeline_parallel_size > 1,
        "data parallel engines wait for each other": parallel.data_parallel_size > 1,
        "tokens are speculated": config.speculative_config is not None,
        "another KV connector takes part": connector_of(config) not in (None, CONNECTOR),
        "its state is not only KV blocks": model.is_hybrid or model.is_attention_free,
        "it has an encoder": model.is_encoder_decoder,
        "it does not generate": model.runner_type != "generate",
    }
    return next((reason for reason, true in reasons.items() if true), None)
