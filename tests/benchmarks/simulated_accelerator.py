"""A simulated engine on an accelerator, whose host works beside the device: iterations may be scheduled ahead.

The device computes iterations one after the other, in the order of their launches. The host takes `host_s` to plan
and launch one, and as long again to take its results in. Without a CUDA graph it launches kernel by kernel, which
takes it longer, and the device is not done before. While rows may leave an iteration, the host waits at safepoints
and does nothing else, and launches piece by piece.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from conserve.engine.runtime.stopwatch import DeviceTime
from conserve.engine.vllm.iteration import IterationOutcome, Stamp, outcome_of, put, put_device_time, stamp_of
from conserve.engine.vllm.profiling.warm_up import LONGEST_PROMPT, PREFIX, WARM_UP_S, Growth, WarmUpGroup
from conserve.engine.vllm.simulation.engine import SimulatedEngine, results_of
from conserve.profiles.batch import Batch

IN_FLIGHT = 2  # iterations, as in vLLM's queue of batches
GROUPS = 2  # of the warm-up, at a time


class LaunchTimes(NamedTuple):
    """Time of the host's launches."""

    captured_tokens: int  # of the largest CUDA graph
    uncaptured_s: float  # of an iteration with more tokens
    piece_share: float  # of an iteration's time that safepoints between its pieces add,
    pieces_ms: float  # and the most that they add


class Launched(NamedTuple):
    """An iteration on the device."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    ends_s: float


class SimulatedAccelerator(SimulatedEngine):
    """Steps as vLLM's engine core does with asynchronous scheduling, or without it as the scheduler was made."""

    def __init__(self, *args: Any, host_s: float, launches: LaunchTimes, **rest: Any) -> None:
        """`host_s`: time of the host before an iteration, and behind it, in s."""
        super().__init__(*args, **rest)
        self._host_s, self._launches = host_s, launches
        self._launched: deque[Launched] = deque()
        self._free_at = 0.0  # when the device has computed everything
        self._lost: set[str] = set()  # requests that left the last iteration: no token of theirs is known

    def warm_up(self, seconds: float = WARM_UP_S) -> None:
        """Serve random requests, two groups at a time, before all others, as `profiling.warm_up` does."""
        most = self.config.scheduler_config.max_num_seqs
        growth = Growth(seconds=seconds, longest=LONGEST_PROMPT, most=most)
        began, window, self._window = self.clock.now, self._window, -inf
        served: list[tuple[WarmUpGroup, float, set[str]]] = []
        while self.clock.now < began + seconds or growth.missing:
            while len(served) < GROUPS:
                served.append(self._begin(growth.next()))
            self._iterate()
            for group, begun, names in [*served]:
                if names.isdisjoint(self.scheduler.requests.keys()):
                    served.remove((group, begun, names))
                    growth.served(group, self.clock.now - begun)
        while self.scheduler.requests:
            self._iterate()
        self._rows, self._window = 0, window

    def _begin(self, group: WarmUpGroup) -> tuple[WarmUpGroup, float, set[str]]:
        requests = [self.request(*lengths) for lengths in zip(*group, strict=True)]
        for request in requests:
            request.request_id = f"{PREFIX}{request.request_id}"
            self.scheduler.add_request(request)
        return group, self.clock.now, {request.request_id for request in requests}

    def _iterate(self, until: float | None = None) -> None:
        self._bring_requests()
        launched = self.scheduler.has_requests() and self._schedules()
        if (
            launched
            and self._overlaps
            and len(self._launched) < IN_FLIGHT
            and not self.scheduler.ahead.waits()
        ):
            return
        if self._launched:
            self._settle()
        if not launched and not self._launched:
            self._rest(until)

    def _schedules(self) -> bool:
        """Schedule an iteration and launch it; False if it has nothing to compute."""
        output = self.schedule()
        if output.num_scheduled_tokens:
            self.clock.now += self._host_s
            self._launch(output)
            return True
        self._launched.append(Launched(output, results_of(output, set()), self._free_at))
        return False

    @property
    def _overlaps(self) -> bool:
        return bool(self.config.scheduler_config.async_scheduling)

    def _settle(self) -> None:
        """Wait for the oldest iteration, and take its results in."""
        output, result, ends_s = self._launched.popleft()
        self.clock.now = max(self.clock.now, ends_s)
        self._arrive()
        self._take_in(output, result)
        if output.num_scheduled_tokens:
            self.clock.now += self._host_s

    def _launch(self, output: SchedulerOutput) -> None:
        """Launch the iteration; one that rows may leave is over by then, as far as the host is concerned."""
        stamp, last_s = stamp_of(output), self._free_at
        began_s = max(last_s, self.clock.now - self._host_s)
        if stamp is None:
            due = self._due_tokens(output)
            self._forget(output)
            begins_s = max(self._free_at, self.clock.now)
            if output.total_num_scheduled_tokens > self._launches.captured_tokens:
                self.clock.now += self._launches.uncaptured_s
            self._free_at = max(begins_s + self._takes_s(output), self.clock.now)
            result = results_of(output, due)
        else:
            self.clock.now = max(self.clock.now, self._free_at)
            result = self._refused(output) if self._refuses(stamp, output) else self._left(stamp, output)
            self._free_at = self.clock.now
        if self._overlaps:
            own_ms, since_ms = ((self._free_at - before) * 1e3 for before in (began_s, last_s))
            put_device_time(result, DeviceTime(own_ms, since_ms))
        self._launched.append(Launched(output, result, self._free_at))

    def _takes_s(self, output: SchedulerOutput) -> float:
        """Time of the device in s. Rows that left begin their chunks anew, as in a pass that is one graph."""
        for name in output.num_scheduled_tokens:
            self._suspended.pop(name, None)
        batch = Batch.of(self.scheduler.scheduled_slice(*one) for one in output.num_scheduled_tokens.items())
        return self._model.predict(batch) * self._noise() / 1e3

    def _pass_ms(self, batch: Batch, stamp: Stamp | None) -> float:
        """Time of a pass; decode steps alone are one graph, which has no pieces."""
        ms = self._model.predict(batch)
        if stamp is None or (batch.prefills == 0 and batch.tokens <= self._launches.captured_tokens):
            return ms
        return ms + min(self._launches.piece_share * ms, self._launches.pieces_ms)

    def _left(self, stamp: Stamp, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run an iteration that rows may leave."""
        flag = self.scheduler.arrival_monitor._flag
        if flag is not None:
            flag.note_start(stamp.iteration, self.clock.monotonic())
        result = self.result(output)
        outcome = outcome_of(result)
        self._lost = set(outcome.left) if outcome is not None else set()
        return result

    def _refuses(self, stamp: Stamp, output: SchedulerOutput) -> bool:
        flag = self.scheduler.arrival_monitor._flag
        wanted = flag is None or not flag.is_refused(stamp.iteration)
        return stamp.ahead and not (wanted and self._lost.isdisjoint(output.num_scheduled_tokens))

    def _refused(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Begin nothing of an iteration: it was planned with tokens that are not there, or unwanted by then."""
        names = frozenset(output.num_scheduled_tokens)
        self._lost |= names
        result = results_of(output, frozenset())
        told = IterationOutcome(
            left=names, refused=True, layers=self._layers, safepoints=self._layers, separable=self._separable
        )
        put(result, told)
        return result
