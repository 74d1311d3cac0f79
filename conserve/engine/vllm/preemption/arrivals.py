"""The scheduler's side of layer-wise preemption: the arrival monitor, stamps, and rows that left.

While the model runs, vLLM's I/O thread brings requests in. When an online one arrives, the rest of the iteration is
estimated at once, and the flag is raised if offline rows are to leave. Source: conserve-2026 Algorithm 2,
conserve-2024 Algorithm 2.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import Any

from vllm.v1.request import Request

from conserve.engine.policy.preemption import LEAVE_RULES, Arrivals, UnderWay, spare_tokens
from conserve.engine.policy.view import Slo
from conserve.engine.runtime.leavers import Leavers
from conserve.engine.runtime.safepoint import ALL_ROWS, LeaveFlag
from conserve.engine.vllm.iteration import Iteration, IterationOutcome, Stamp
from conserve.engine.vllm.preemption.leave_counts import LeaveCounts
from conserve.engine.vllm.preemption.reasons import why_not
from conserve.names import OFF
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

log = logging.getLogger("vllm.conserve")
REACTION_SHARE = 0.005  # most time between two safepoints, as a share of the TTFT promise
LARGEST_STEP = 8  # most layers between two safepoints
# An arrival that has not reached the scheduler by then is no longer expected: vLLM takes requests in between any
# two iterations, and refuses some, as all while it drains.
FORGET_S = 10.0
FORGET_AFTER = 3  # iterations that rows may leave


@dataclass(frozen=True, slots=True)
class Expected:
    """An online request that has reached the engine and not yet the scheduler."""

    prompt: Slice
    arrived: float  # monotonic seconds
    ttft_ms: float
    iterations: int = 0  # stamped before it came


class ArrivalMonitor:
    """Stamps iterations, raises the flag when online requests arrive, and knows the rows that left.

    `arriving` is called in vLLM's I/O thread, every other method in its main thread.
    """

    def __init__(self, config: Any, *, policy: str, every: int | None = None) -> None:
        self.why_not = why_not(config) if policy != OFF else "it is switched off"
        self.name = OFF if self.why_not else policy
        self.policy = LEAVE_RULES[policy]() if policy != OFF else None
        self.layers = config.model_config.get_num_layers(config.parallel_config)
        self.separable = False  # rows can leave while others stay; known from the first outcome
        self._seen = False  # a worker has answered that it has safepoints and reads the flag
        self.counts = LeaveCounts()
        self._every = every
        self._flag = LeaveFlag.create() if self.why_not is None else None
        self._lock = threading.Lock()
        self._iterations = 0  # stamped so far
        self._settled = 0  # number of the last one whose outcome is known
        self._in_flight: list[Iteration] = []  # stamped and not settled: one runs, and one may wait
        self._expected: dict[str, Expected] = {}
        self._leavers = Leavers()
        self._model: LatencyModel | None = None
        self._slo = Slo()

    @property
    def enabled(self) -> bool:
        """True if rows may leave iterations at all."""
        return self.name != OFF

    def use_rule(self, name: str) -> None:
        """Use another rule from now on, where rows can leave at all."""
        if self._flag is not None:
            self.name = name
            self.policy = LEAVE_RULES[name]() if name != OFF else None

    @property
    def may_leave_next(self) -> bool:
        """True if rows can leave the next iteration, as far as is known."""
        return self.enabled and self._seen and (self.separable or not self._leavers.any_sheltered())

    @property
    def workers_read_flag(self) -> bool:
        """True if workers that read the flag are known to run the iterations."""
        return self.enabled and self._seen

    @property
    def expects(self) -> bool:
        """True if an online request has reached the engine and not yet the scheduler."""
        with self._lock:
            return bool(self._still_expected(time.monotonic()))

    def chunk(self, request: str) -> int | None:
        """Largest next chunk of a row that has left an iteration, in tokens; None for any other row."""
        return self._leavers.chunk(request) if self.enabled else None

    # In the main thread.

    def begin(
        self,
        iteration: Iteration,
        *,
        offline: Iterable[tuple[Request, int]],
        model: LatencyModel,
        slo: Slo,
        offline_tokens: int,
    ) -> None:
        """Stamp the iteration, then re-check for requests that arrived while it was planned.

        `offline` are the iteration's offline rows and their tokens, `offline_tokens` all that were ever computed.
        Without a row that may leave there is no stamp, unless the workers have not said yet what they can do, or
        rows may leave an iteration in flight, whose outcome decides on this one.
        """
        rows = self._may_leave(iteration, offline)
        if not rows and self._seen and not self._in_flight:
            return
        assert self._flag is not None
        assert iteration.batch is not None
        self._iterations += 1
        self._model, self._slo = model, slo
        iteration.rows = rows
        iteration.spare_tokens = spare_tokens(offline_tokens, self.counts.tokens_wasted)
        iteration.stamp = Stamp(
            iteration=self._iterations,
            flag=self._flag.name,
            rows=[request.request_id for request, _ in rows],
            every=self._every or self._step(model.predict(iteration.batch), slo),
            ahead=iteration.ahead,
            settled=self._settled,
        )
        if not rows and not iteration.ahead:
            return
        with self._lock:
            self._flag.expect(self._iterations)
            self._in_flight.append(iteration)
        if self._expected:
            self._consider()

    def _may_leave(
        self, iteration: Iteration, offline: Iterable[tuple[Request, int]]
    ) -> list[tuple[Request, int]]:
        """Rows without the sheltered ones, the first to leave first; none if one has to stay and so all have."""
        # Where rows cannot leave alone, they do not leave an iteration with online requests in it.
        rows = list(offline)
        if not self.separable and len(rows) < len(iteration.tokens):
            return []
        if self._leavers and self._leavers.any_sheltered():
            staying = [row for row in rows if self._leavers.is_sheltered(row[0].request_id)]
            if staying and not self.separable:
                return []
            rows = [row for row in rows if row not in staying]
        # Leave order: prefill chunks before decode steps (they save more time), then latest arrival first.
        rows.reverse()
        rows.sort(key=itemgetter(1), reverse=True)
        return rows

    def arrived(self, request: str) -> None:
        """Expect a request no more: the scheduler has it, so the next plan sees it."""
        self._expected.pop(request, None)

    def end(self, iteration: Iteration) -> None:
        """Take in the outcome of an iteration: what the worker can do, and the rows that left."""
        if iteration.stamp is not None:
            self._settled = iteration.stamp.iteration
            with self._lock:
                self._in_flight = [one for one in self._in_flight if one is not iteration]
        outcome, left, tokens = iteration.outcome, iteration.left, iteration.tokens
        self._leavers.computed(
            {name: n for name, n in tokens.items() if name not in left} if left else tokens
        )
        if outcome is None:
            return
        self.separable, self.layers = outcome.separable, max(1, outcome.layers)
        self._note_worker_abilities(outcome)
        if outcome.refused:
            self.counts.refused += 1
        elif left:
            self.counts.left(iteration, outcome)
            self._note_left(iteration, outcome)

    def computed(self, tokens: Mapping[str, int]) -> None:
        """Take in an iteration that rows could not leave: these requests computed so many tokens each."""
        self._leavers.computed(tokens)

    def _note_left(self, iteration: Iteration, outcome: IterationOutcome) -> None:
        for name in iteration.left:
            layer = outcome.kept.get(name, 0)
            lost = self._leavers.left(
                name, iteration.tokens[name], layer=layer, layers_run=outcome.layers_run, layers=self.layers
            )
            self.counts.lost(lost)

    def lost_memory(self, request: str) -> None:
        """Count an evicted row, whose KV blocks are gone."""
        self.counts.lost(self._leavers.evicted(request, self.layers))

    def _note_worker_abilities(self, outcome: IterationOutcome) -> None:
        """Note what the worker can do: rows never leave if it has no safepoints or cannot read the flag."""
        self._seen = True
        if not outcome.safepoints or not outcome.flag_readable:
            self.why_not = (
                "the model has no safepoints" if outcome.flag_readable else "the worker cannot read the flag"
            )
            log.warning("rows do not leave iterations: %s", self.why_not)
            self.close()

    def forget(self, request: str) -> None:
        """Forget a finished request."""
        self._expected.pop(request, None)
        self._leavers.forget(request)

    def forget_iterations(self) -> None:
        """Ask no row to leave what is in flight: vLLM has finished all requests."""
        with self._lock:
            self._in_flight = []

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
            **self.counts.report(),
        }

    # In the I/O thread.

    def arriving(self, request: Request, ttft_ms: float | None, *, arrived: float) -> None:
        """Raise the flag if rows are to leave for this online request; `arrived` in monotonic seconds."""
        if self.policy is None or request.use_structured_output:  # its grammar is not compiled yet
            return
        tokens = max(1, request.num_prompt_tokens)
        promise = self._slo.ttft_ms if ttft_ms is None else ttft_ms
        self._expected[request.request_id] = Expected(Slice(tokens, 0), arrived, promise, self._iterations)
        if self._in_flight:
            self._consider()

    # In either.

    def _consider(self) -> None:
        """Refuse the iteration that waits, and ask the rule how many rows are to leave the one that runs."""
        with self._lock:
            now = time.monotonic()
            waiting = self._still_expected(now)
            if not waiting or self._flag is None:
                return
            for place, iteration in reversed(list(enumerate(self._in_flight))):
                assert iteration.stamp is not None
                if self._waits(iteration.stamp):
                    self._flag.refuse(iteration.stamp.iteration)
                if not self._waits(iteration.stamp):  # asked again: it may have started before it was refused
                    self._ask(iteration, self._in_flight[place + 1 :], waiting, now)
                    return

    def _waits(self, stamp: Stamp) -> bool:
        assert self._flag is not None
        return stamp.ahead and self._flag.started(stamp.iteration) is None

    def _ask(
        self, running: Iteration, behind: Sequence[Iteration], waiting: Sequence[Expected], now: float
    ) -> None:
        """Raise the flag for as many rows as the rule says; `behind` are iterations scheduled ahead."""
        flag, policy, model = self._flag, self.policy, self._model
        if policy is None or model is None or flag is None:
            return
        assert running.batch is not None
        assert running.stamp is not None
        started = flag.started(running.stamp.iteration) or running.started
        rows = policy.leaving(
            UnderWay(
                batch=running.batch,
                rows=[slice_of(request, tokens, behind) for request, tokens in running.rows],
                separable=self.separable,
                elapsed_ms=(now - started) * 1e3,
            ),
            Arrivals(
                prompts=[one.prompt for one in waiting],
                slack_ms=min(
                    *(one.ttft_ms - (now - one.arrived) * 1e3 for one in waiting),
                    self._harmless_ms([one.prompt for one in waiting], model),
                ),
                ttft_ms=min(one.ttft_ms for one in waiting),
                spare_tokens=running.spare_tokens,
            ),
            model,
        )
        if rows > running.asked:
            running.asked, running.raised_at = rows, running.raised_at or now
            alone = rows == running.batch.requests or not self.separable
            flag.raise_for(running.stamp.iteration, ALL_ROWS if alone else rows)

    def _harmless_ms(self, prompts: Sequence[Slice], model: LatencyModel) -> float:
        """Time until the prompts' first token that `harm` allows, in ms: their own, and a share of it."""
        harm = self._slo.ttft_harm
        return inf if harm is None else (1 + harm) * model.predict(Batch.of(prompts))

    def _still_expected(self, now: float) -> list[Expected]:
        """Online requests on their way to the scheduler, without the ones that never got there."""
        for name, one in list(self._expected.items()):
            if one.arrived < now - FORGET_S or self._iterations > one.iterations + FORGET_AFTER:
                self._expected.pop(name, None)
        return list(self._expected.values())

    def _step(self, iteration_ms: float, slo: Slo) -> int:
        """Layers between two safepoints: as many as run within `REACTION_SHARE` of the TTFT promise."""
        # A single layer where `harm` is promised: prompts may be short.
        if slo.ttft_harm is not None:
            return 1
        if slo.ttft_ms == inf:
            return LARGEST_STEP
        layer_ms = iteration_ms / max(1, self.layers)
        return max(1, min(LARGEST_STEP, int(REACTION_SHARE * slo.ttft_ms / layer_ms))) if layer_ms > 0 else 1


def slice_of(request: Request, tokens: int, behind: Sequence[Iteration]) -> Slice:
    """The request's part in an iteration that was scheduled and is not settled; others are `behind` it."""
    later = sum(iteration.tokens.get(request.request_id, 0) for iteration in behind)
    context = max(0, request.num_computed_tokens - later - tokens)
    return Slice(tokens, context, tokens == 1 and context >= request.num_prompt_tokens)
