"""The record of an iteration: from its plan in the scheduler, through the workers, to its settlement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from conserve.engine.policy.plan import Plan
    from conserve.engine.runtime.stopwatch import DeviceTime
    from conserve.profiles.batch import Batch

DEVICE_TIME = "conserve_device_time"  # of the attribute on vLLM's ModelRunnerOutput
LONG_MS = 40.0  # of an iteration in which the host's work, 2 to 3 ms, counts little
NAME = "conserve"  # of the attribute on vLLM's SchedulerOutput and ModelRunnerOutput; both are pickled whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Message to the workers: safepoints are on for this iteration."""

    iteration: int
    flag: str  # name of the shared memory
    rows: Sequence[str]  # offline requests that may leave, the first to leave first
    every: int  # layers between two safepoints
    ahead: bool = False  # scheduled while an earlier iteration ran, so it may be refused
    settled: int = 0  # last stamped iteration that was settled when this one was planned


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOutcome:
    """Answer of the workers, on their `ModelRunnerOutput`."""

    left: frozenset[str] = frozenset()  # requests that left; their tokens are scheduled again
    kept: Mapping[str, int] = field(default_factory=dict)  # rows that can join later -> the layer to join at
    joined: int = 0  # rows that joined: the iteration took less time than its tokens tell
    layers_run: int = 0  # by the rows that left, before they left
    layers: int = 0  # of the model
    separable: bool = False  # rows can leave while others stay
    safepoints: int = 0  # in the model; without any, no row can leave
    flag_readable: bool = True  # the flag could be read
    refused: bool = False  # the iteration was not begun, and all of its requests have left


@dataclass(slots=True, kw_only=True, eq=False)
class Iteration:
    """One pass of the model over a batch.

    The scheduler makes the record and puts it on vLLM's `SchedulerOutput`; it is filled in as the iteration goes
    on. Pickled, on its way to a worker's process, it is its stamp and `keeps` alone.
    """

    # Planned.
    started: float = 0.0  # monotonic seconds
    plan: Plan | None = None  # None where vLLM composes the iteration
    registers_late: bool = False  # KV blocks become reusable once computed, not once allocated
    ahead: bool = False  # scheduled while one was in flight that rows may leave, so it may be refused
    follows: bool = False  # scheduled while another was in flight: the device goes from that one to this
    cold: bool = False  # none was in flight, as one usually is: the time has the host's work in it
    overlapped: bool = False  # rows may leave it or its neighbour in flight: the host's clock mixes them up
    # Scheduled.
    tokens: Mapping[str, int] = field(default_factory=dict)  # request -> tokens that it computes
    batch: Batch | None = None  # the same for the latency model; None where it learns nothing
    encodes: Mapping[str, int] = field(default_factory=dict)  # image or sound -> embeddings that it becomes
    surcharged: int = 0  # of the tokens, prompt tokens with logprobs, whose time no latency model knows
    stalled: bool = False  # the plan gave tokens, and vLLM could use none of them
    skipped: frozenset[str] = frozenset()  # were to begin, and wait for a connector: not in the next plan
    turns_away: bool = False  # vLLM had no room for a live request that the plan found room for
    # Stamped, if rows may leave.
    stamp: Stamp | None = None
    # Rows whose part of a chunk is theirs yet, though vLLM preempts or resumes them.
    keeps: frozenset[str] = frozenset()
    rows: Sequence[tuple[Request, int]] = ()  # the stamp's rows and their tokens
    spare_tokens: float = 0.0  # offline tokens that may be thrown away for an arrival's comfort
    asked: int = 0  # rows that were told to leave
    raised_at: float = 0.0  # monotonic seconds; of the first row's order to leave
    # Settled.
    outcome: IterationOutcome | None = None
    took_s: float = 0.0  # by the host's clock
    device: DeviceTime | None = None  # by the device's clock, where the worker tells it

    @property
    def limit_ms(self) -> float | None:
        """The time that offline tokens had to fit into; None where there were none."""
        return self.plan.limit_ms if self.plan is not None else None

    @property
    def rows_s(self) -> float:
        """Seconds of the time taken that rows took, by the plan; 0 where vLLM composed the iteration."""
        plan = self.plan
        if plan is None or not plan.predicted_ms:
            return 0.0
        return self.took_s * max(0.0, 1 - plan.online_ms / plan.predicted_ms)

    @property
    def left(self) -> frozenset[str]:
        """Requests that left before the last layer."""
        return self.outcome.left if self.stamp is not None and self.outcome is not None else frozenset()

    @property
    def refused(self) -> bool:
        """True if nothing of it was computed."""
        return self.outcome is not None and self.outcome.refused

    @property
    def batch_ms(self) -> float | None:
        """Time of the batch, for the latency model; None if no clock tells it, or another batch was computed.

        Where rows left or joined, not all layers ran on all of its tokens and on nothing else.
        """
        changed = self.outcome is not None and (self.left or self.outcome.joined)
        return None if changed else self.lasted_ms

    @property
    def lasted_ms(self) -> float | None:
        """Time from the end of the iteration before to the end of this one; None if no clock tells it.

        In an idle engine the host's work comes first, and between safepoints the device waits for launches. Both
        count little in a long iteration.
        """
        if self.follows and self.device is not None:
            ms = self.device.since_last_ms
            return ms if self.stamp is None else self._if_long(ms)
        if self.cold:
            return self._if_long(self.device.own_ms if self.device is not None else None)
        return None if self.overlapped else self.took_s * 1e3

    @property
    def ended(self) -> float | None:
        """End by the device's clock, in monotonic seconds; None if that does not tell it."""
        if not self.follows or self.device is None or self.device.since_last_ms is None:
            return None
        return self.started + self.device.since_last_ms / 1e3

    def _if_long(self, ms: float | None) -> float | None:
        """The time of a long iteration; None for a short one, also if it was held up."""
        held_up = self.plan is not None and self.plan.predicted_ms < LONG_MS / 2
        return ms if ms is not None and ms >= LONG_MS and not held_up else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _for_worker, (self.stamp, self.keeps)


def _for_worker(stamp: Stamp | None, keeps: frozenset[str]) -> Iteration:
    return Iteration(stamp=stamp, keeps=keeps)


def iteration_of(output: Any) -> Iteration:
    """The record on vLLM's `SchedulerOutput`."""
    iteration: Iteration = getattr(output, NAME)
    return iteration


def stamp_of(output: Any) -> Stamp | None:
    """The stamp of vLLM's `SchedulerOutput`; None where no row may leave, or another scheduler made it."""
    iteration: Iteration | None = getattr(output, NAME, None)
    return iteration.stamp if iteration is not None else None


def forgotten(output: Any) -> set[str]:
    """Requests of vLLM's `SchedulerOutput` whose part of a chunk is no longer theirs: finished or evicted ones."""
    gone = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
    gone.update(output.scheduled_cached_reqs.resumed_req_ids)
    gone.update(new.req_id for new in output.scheduled_new_reqs)
    iteration: Iteration | None = getattr(output, NAME, None)
    return gone - iteration.keeps if iteration is not None else gone


def outcome_of(output: Any) -> IterationOutcome | None:
    """The outcome on vLLM's `ModelRunnerOutput`, if there is one."""
    return getattr(output, NAME, None)


def put_device_time(output: Any, time: DeviceTime) -> None:
    """Attach an iteration's time on the device to vLLM's `ModelRunnerOutput`."""
    setattr(output, DEVICE_TIME, time)


def device_time_of(output: Any) -> DeviceTime | None:
    """The iteration's time on the device, if the worker has told it."""
    return getattr(output, DEVICE_TIME, None)


def put(output: Any, note: Iteration | IterationOutcome) -> None:
    """Attach the record or the outcome to vLLM's object."""
    setattr(output, NAME, note)
