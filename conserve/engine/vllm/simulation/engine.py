"""vLLM's real scheduler with our policies on simulated time: iterations take what a latency model says.

Everything that decides is real: scheduler, plans, the arrival monitor and its flag. The workers are simulated layer
by layer: requests arrive in the middle of an iteration, rows leave it at a safepoint, and join a later one where
they left. Hence hundreds of blocks in a minute, the same arrivals for each policy, and no noisy machine.

With checkpoints, evicted rows get their KV back: the real connector decides what is copied when, and the copies
take time (`copies`).

Three simplifications flatter a policy under which rows leave iterations. Planning takes no time. What an iteration
takes whatever is in it is spread over its layers, so that a row that leaves early is spared the rest of it. The
policy knows the true model.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from conserve.engine.runtime.leavers import behind, with_first
from conserve.engine.runtime.safepoint import ALL_ROWS
from conserve.engine.vllm.iteration import IterationOutcome, Stamp, forgotten, put, stamp_of
from conserve.engine.vllm.simulation.bare import Clock, SchedulerAlone
from conserve.engine.vllm.simulation.copies import SimulatedCopies, blocks_of
from conserve.profiles.batch import Batch
from conserve.profiles.model import LatencyModel

IDLE_S = 1e-3  # between two looks of an engine that has nothing to compute
TOKEN = 7  # that the workers answer with
SHARED_FROM = 990  # first token id of shared beginnings


@runtime_checkable
class Told(Protocol):
    """An online request to come whose prompt matters."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of its prompt."""


class Coming(Protocol):
    """An online request to come."""

    @property
    def at_s(self) -> float:
        """Time of its arrival, since the block's begin."""

    @property
    def input_tokens(self) -> int:
        """Tokens of its prompt."""

    @property
    def output_tokens(self) -> int:
        """Tokens of its answer."""

    @property
    def cached_tokens(self) -> int:
        """First tokens of its prompt that are those of all others."""


@dataclass(slots=True)
class SimulatedAnswer:
    """An online request's answer."""

    arrived_s: float
    token_at_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.token_at_s[0] - self.arrived_s) * 1e3

    @property
    def tbts_ms(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.diff(self.token_at_s) * 1e3


class SimulatedSuspended(NamedTuple):
    """A row that goes on where it left: as `rows.Suspended`, with nothing in it."""

    layer: int
    start: int
    tokens: int

    def after(self, tokens: int) -> "SimulatedSuspended":
        return SimulatedSuspended(self.layer, self.start + tokens, self.tokens - tokens)


class SimulatedEngine(SchedulerAlone):
    """Plays arrivals beside offline rows, where its clock is installed."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        clock: Clock,
        model: LatencyModel,
        layers: int,
        num_blocks: int,
        offline: Iterator[tuple[int, int]],
        window: float,
        scatter: float,
        seed: int,
        separable: bool = True,
        copies: SimulatedCopies | None = None,
    ) -> None:
        """`offline`: tokens of prompts and answers, of which `window` rows are in the engine at a time.

        An iteration takes what `model` says times a factor around 1, `scatter` its standard deviation. Where rows
        are not `separable`, all leave or none. `copies` are for an engine with checkpoints.
        """
        super().__init__(config, num_blocks=num_blocks, clock=clock)
        self._model, self._layers, self._scatter = model, layers, scatter
        self._separable, self._copies = separable, copies
        self._offline, self._window = offline, window
        self._dice = np.random.default_rng(seed)
        self._due: deque[Request] = deque()  # yet to come
        self._came: list[Request] = []  # and not yet in the scheduler
        self._suspended: dict[str, tuple[SimulatedSuspended, ...]] = {}
        self._answers: dict[str, SimulatedAnswer] = {}
        self._rows = 0  # offline ones in the engine
        self._prompts = 0  # with a shared beginning
        self.counted = 0  # offline tokens of the last block
        self.said: dict[str, Any] = {}
        self.said_s = 0.0  # time of that report

    @property
    def offline_tokens(self) -> int:
        """Computed so far, as the scheduler counts them."""
        return int(self.scheduler.traffic.offline_tokens)

    def play(
        self, arrivals: Iterable[Coming], block_s: float = 0.0, *, shared_tokens: int = 0
    ) -> list[SimulatedAnswer]:
        """Play these requests from now on; returns when all are answered and `block_s` are over.

        The first `shared_tokens` of their prompts are the same. `counted` are the offline tokens of the block
        itself, `said` is the scheduler's report at the end of the iteration in which its time ran out, at `said_s`.
        """
        began, before = self.clock.now, self.offline_tokens
        for arrival in arrivals:
            due = self.request(self._prompt(arrival, shared_tokens), arrival.output_tokens)
            due.arrival_time = began + arrival.at_s
            self._due.append(due)
            self._answers[due.request_id] = SimulatedAnswer(due.arrival_time)
        self.go_on_until(began + block_s)
        self.counted, self.said = self.offline_tokens - before, self.scheduler.conserve()
        self.said_s = self.clock.now
        while self._due or self._came or any(name in self._answers for name in self.scheduler.requests):
            self._iterate()
        answers, self._answers = list(self._answers.values()), {}
        return answers

    def _prompt(self, arrival: Coming, shared: int) -> int | Sequence[int]:
        """The arrival's own prompt, or one that begins as all others do; a number of tokens where none matters."""
        if isinstance(arrival, Told):
            return arrival.prompt_ids
        tokens, shared = arrival.input_tokens, max(shared, arrival.cached_tokens)
        if not shared:
            return tokens
        self._prompts += 1
        own, again = divmod(self._prompts, SHARED_FROM)
        common = [SHARED_FROM + n % 7 for n in range(min(shared, tokens - 1))]
        return [*common, again, own, *range(tokens)][:tokens]

    def go_on_until(self, moment: float) -> None:
        """Run iterations of the requests that are there until this moment of simulated time."""
        while self.clock.now < moment:
            self._iterate(moment)

    def _iterate(self, until: float | None = None) -> None:
        self._bring_requests()
        output = self.schedule()
        if not output.num_scheduled_tokens and not blocks_of(output.kv_connector_metadata):
            self._rest(until)
        self._take_in(output, self.result(output))

    def _bring_requests(self) -> None:
        """Fill the window of rows, and give the scheduler the requests that have arrived."""
        while self._rows < self._window and (lengths := next(self._offline, None)) is not None:
            self.scheduler.add_request(self.request(*lengths, offline=True))
            self._rows += 1
        self._arrive()
        for request in self._came:
            self.scheduler.add_request(request)
        self._came.clear()

    def _rest(self, until: float | None) -> None:
        """Let time pass in which the engine has nothing to compute."""
        idle = not any(name in self._answers for name in self.scheduler.requests)
        coming = min(self._due[0].arrival_time if self._due else inf, until or inf) if idle else 0.0
        self.clock.now = max(self.clock.now + IDLE_S, coming if coming < inf else 0.0)

    def _take_in(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Give the scheduler an iteration's results, which end now."""
        for outputs in self.scheduler.update_from_output(output, result).values():
            for answer in outputs.outputs:
                if (timed := self._answers.get(answer.request_id)) is not None:
                    timed.token_at_s += [self.clock.now] * len(answer.new_token_ids)
                elif answer.finish_reason is not None:
                    self._rows -= 1

    def _arrive(self) -> None:
        """Hand the requests that are due by now to the engine, as its I/O thread does."""
        now = self.clock.now
        while self._due and self._due[0].arrival_time <= now:
            request = self._due.popleft()
            self.clock.now = request.arrival_time
            self.scheduler.arriving(request)
            self._came.append(request)
        self.clock.now = now

    # The worker.

    def result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute, as far as time is concerned; each request that is due a token gets a 7."""
        due = self._due_tokens(output)
        self._forget(output)
        stamp, began_s = stamp_of(output), self.clock.now
        outcome = self._compute(output, stamp)
        result = results_of(output, due - outcome.left)
        if stamp is not None or outcome.joined:
            put(result, outcome)
        if self._copies is not None:
            transfers = output.kv_connector_metadata
            self.clock.now = self._copies.ends_s(transfers, began_s, self.clock.now)
            self._arrive()
            result.kv_connector_output = self._copies.report(transfers)
        return result

    def _due_tokens(self, output: SchedulerOutput) -> set[str]:
        """Requests that get a token of the iteration."""
        requests = self.scheduler.requests
        return {name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk}

    def _forget(self, output: SchedulerOutput) -> None:
        """Begin an iteration like `RunnerRows.begin`: a row that finished or was evicted does not go on."""
        for name in forgotten(output) if self._suspended else ():
            self._suspended.pop(name, None)

    def _compute(self, output: SchedulerOutput, stamp: Stamp | None) -> IterationOutcome:
        """Compute layer by layer, as `RunnerRows.run`."""
        slices = {
            name: self.scheduler.scheduled_slice(name, tokens)
            for name, tokens in output.num_scheduled_tokens.items()
        }
        joining: dict[str, int] = {}
        for name in slices.keys() & self._suspended.keys():
            one = self._suspended[name][0]
            if one.start == slices[name].context and slices[name].tokens <= one.tokens:
                joining[name] = one.layer
            else:
                del self._suspended[name]
        joined, left, asked, left_before = len(joining), set[str](), 0, 0
        speed = self._noise() / self._layers / 1e3
        layer_s: float | None = None  # of the rows that are in the pass
        for layer in range(self._layers if slices else 0):
            if layer in joining.values():
                joining = {name: at for name, at in joining.items() if at != layer}
                layer_s = None
            if stamp is not None and layer % stamp.every == 0 and (rows := self._orders(stamp)) > asked:
                left_before, asked = left_before if asked else layer, rows
                all_leave = rows == ALL_ROWS
                leaving = slices.keys() if all_leave else slices.keys() & set(stamp.rows[:rows])
                for name in leaving - left - joining.keys() if layer and self._separable else ():
                    leaves = SimulatedSuspended(layer, slices[name].context, slices[name].tokens)
                    self._suspended[name] = with_first(leaves, self._suspended.get(name, ()))
                left |= leaving
                joining = {name: at for name, at in joining.items() if name not in left}
                layer_s = None
                if len(left) == len(slices):
                    break
            if layer_s is None:
                inside = [one for name, one in slices.items() if name not in left and name not in joining]
                layer_s = self._pass_ms(Batch.of(inside), stamp) * speed if inside else 0.0
            self.clock.now += layer_s
            self._arrive()
        self._keep_the_rest({name: one.tokens for name, one in slices.items() if name not in left})
        return IterationOutcome(
            left=frozenset(left),
            kept={name: self._suspended[name][0].layer for name in left & self._suspended.keys()},
            joined=joined,
            layers_run=left_before,
            layers=self._layers,
            separable=self._separable,
            safepoints=self._layers,
        )

    def _pass_ms(self, batch: Batch, stamp: Stamp | None) -> float:
        """Time of a pass over all layers, in ms."""
        return self._model.predict(batch)

    def _noise(self) -> float:
        """Factor on an iteration's time."""
        return max(0.5, 1 + self._scatter * float(self._dice.standard_normal()))

    def _orders(self, stamp: Stamp) -> int:
        flag = self.scheduler.arrival_monitor._flag
        return int(flag.rows_asked(stamp.iteration)) if flag is not None else 0

    def _keep_the_rest(self, computed: Mapping[str, int]) -> None:
        """End an iteration like `RunnerRows.end`: a row that ran part of its chunk keeps the remaining tokens."""
        for name in self._suspended.keys() & computed.keys():
            if rest := behind(self._suspended.pop(name), computed[name]):
                self._suspended[name] = rest


def results_of(output: SchedulerOutput, due: Set[str]) -> ModelRunnerOutput:
    """Results of an iteration of which these requests get a token: a 7."""
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[TOKEN] if name in due else [] for name in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
