"""vLLM's scheduler with a policy: observe, plan, apply (docs/adr/0005).

A plan is applied through vLLM's own `schedule`: the requests that it admits are all that waits during the
call, each is capped at the plan's tokens, and those that it preempts are preempted before. What a plan knows
nothing of (LoRA limits, encoder inputs, grammars, speculative tokens) stays vLLM's own business.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from conserve.engine.policy.checkpointing import OFF
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.policies import POLICIES
from conserve.engine.policy.recorded import line_of
from conserve.engine.runtime.recording import Recording
from conserve.engine.runtime.traffic import Traffic
from conserve.engine.vllm.checkpoint.blocks import CopyCounts, checkpoints_of
from conserve.engine.vllm.iteration import outcome_of
from conserve.engine.vllm.lane import is_online, is_running, ttft_promise
from conserve.engine.vllm.preemption.arrivals import Preemptions
from conserve.engine.vllm.profiling.warm_up import is_warm_up
from conserve.engine.vllm.scheduling.iterations import Iterations
from conserve.engine.vllm.scheduling.lanes import Lanes
from conserve.engine.vllm.scheduling.observation import Picture, surcharged
from conserve.engine.vllm.scheduling.offline_tokens import OfflineTokens
from conserve.engine.vllm.settings import EngineSettings, finite, slo_of
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import TIMELESS, LatencyModel

SHORT_PROMPT = 128  # tokens
RESTORES_PAUSE = 8  # iterations
LEARN_EVERY = 8  # iterations without a plan: the model follows the machine, and nobody waits for it


class CoServing:
    """Mixed into vLLM's schedulers, of which it uses what `compat.INTERNALS` lists."""

    kv_cache_manager: Any
    connector: Any
    running: list[Request]
    waiting: Any
    requests: dict[str, Request]
    policy: SchedulingPolicy
    kv_holding_waiting: Any
    _inflight_prefills: set[Request]
    block_size: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    num_prefill_lookahead: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        installed = EngineSettings.read(vllm_config)
        self.waiting = Lanes()
        self._slo = installed.slo
        self._iterations = Iterations(installed)
        self._traffic = Traffic()
        self._offline: set[str] = set()  # requests in the engine
        self._with_logprobs: set[str] = set()  # those whose prompts take longer than their tokens tell
        self._grammars: dict[str, Request] = {}  # requests that wait for one to be compiled
        self._leaving: list[str] = []  # requests that are over, whose last tokens are not counted yet
        self._most_tokens = self.max_num_scheduled_tokens
        self._caps: Mapping[str, int] | None = None  # the plan's tokens, while it is applied
        self._stalled = False
        self._unplanned = 0
        self._offline_tokens = OfflineTokens(1 + self.num_spec_tokens)
        self.preemptions = Preemptions(
            vllm_config, policy=installed.preemption, every=installed.safepoint_every
        )
        self.checkpoints, self._why_no_checkpoints = checkpoints_of(self.connector)
        self.restores_pause = 0  # iterations for which none begins, since vLLM had no room for one
        self._caching_waits = False  # for blocks to be computed: iterations that may be preempted
        self._uncached: set[int] = set()  # id()s of their SchedulerOutputs
        self._recording = recording_of(vllm_config, installed.record_views)
        self._follow(installed.policy)

    def _follow(self, name: str) -> None:
        self._policy_name = name
        self._policy = POLICIES[name]()
        self.policy = SchedulingPolicy.FCFS if self._policy.spares_offline else SchedulingPolicy.PRIORITY

    @contextlib.contextmanager
    def _caching_later(self) -> Iterator[None]:
        """vLLM registers KV blocks for reuse before they are computed; a preempted row never computes them."""
        if not self._caching_waits:
            yield  # a call of ours for each request would take 0.1 ms
            return
        allocate = self.kv_cache_manager.allocate_slots

        def allocate_slots(*args: Any, delay_cache_blocks: bool = True, **kwargs: Any) -> Any:
            return allocate(*args, delay_cache_blocks=True, **kwargs)

        self.kv_cache_manager.allocate_slots = allocate_slots
        try:
            yield
        finally:
            self.kv_cache_manager.allocate_slots = allocate

    def conserve(self, change: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What `GET /conserve` answers, after a change of policy, preemption or SLO if one is given."""
        if change and "policy" in change:
            self._follow(change["policy"])
        if change and "preemption" in change:
            self.preemptions.follow(change["preemption"])
        if change and "checkpoint" in change and self.checkpoints is not None:
            self.checkpoints.on = change["checkpoint"] != OFF
        if change and "slo" in change:
            self._slo = slo_of(change["slo"])
        self._end_warm_up()
        traffic = self._traffic.report(self._slo, now=time.monotonic())
        traffic["offline"]["work"] = self._offline_tokens.work
        return {
            "policy": self._policy_name,
            "slo": {name: finite(ms) for name, ms in asdict(self._slo).items()},
            "alone": self._alone(),
            "latency_model": self._iterations.described(),
            "max_num_batched_tokens": self._most_tokens,
            **traffic,
            **self._iterations.report(),
            "preemption": self.preemptions.report(),
            "checkpoint": self._checkpoint_report(),
        }

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Take a request in, as vLLM does, and note on which side it is."""
        super().add_request(request)  # type: ignore[misc]
        self.preemptions.arrived(request.request_id)
        if surcharged(request):
            self._with_logprobs.add(request.request_id)
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self._grammars[request.request_id] = request
        if self._warms_up(request):
            return
        if is_online(request):
            at = time.monotonic() - (time.time() - request.arrival_time)
            self._traffic.arrived(request.request_id, request.num_prompt_tokens, at=at)
        else:
            self._offline.add(request.request_id)

    def arriving(self, request: Request) -> None:
        """Called in vLLM's I/O thread, while the model runs, for a request that `add_request` will bring."""
        if is_online(request) and not self._warms_up(request):
            arrived = time.monotonic() - (time.time() - request.arrival_time)
            self.preemptions.arriving(request, ttft_promise(request), arrived=arrived)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.preemptions.forget(request.request_id)
        self._offline.discard(request.request_id)
        self._offline_tokens.forget(request.request_id)
        self._with_logprobs.discard(request.request_id)
        self._grammars.pop(request.request_id, None)
        self._leaving.append(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def has_requests(self) -> bool:
        """Whether vLLM should go on stepping; not for requests that the policy holds out for good."""
        if self._policy.holds_offline and len(self._offline) == len(self.requests):
            return bool(super().has_finished_requests())  # type: ignore[misc]
        return bool(super().has_requests())  # type: ignore[misc]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if request.request_id in self._offline:
            self._offline_tokens.loses(request)
        self.preemptions.lost_memory(request.request_id)
        if self.checkpoints is not None:
            self.checkpoints.evicting(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    # An iteration.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan the next iteration if there is anything to decide, and have vLLM schedule it."""
        started = time.monotonic()
        plan = self._plan()
        if self.checkpoints is not None:
            timed = plan is not None and plan.tokens and self._iterations.model is not None
            self.checkpoints.predicted_ms = plan.predicted_ms if plan is not None and timed else None
        if plan is None:
            output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
            self._unplanned += 1
        else:
            output = self._apply(plan, started, *args, **kwargs)
        if plan is None and not self._offline and not self._learns_anyway():
            self._iterations.begin(output, started)
        else:
            batch = (
                plan.batch
                if plan is not None and output.num_scheduled_tokens == plan.tokens
                else self._batch(output)
            )
            surcharged = self._surcharged(output)
            self._iterations.begin(output, started, batch=batch, plan=plan, surcharged=surcharged)
            self._count_offline(output, batch, started)
            if plan is not None and self._caching_waits:
                self._uncached.add(id(output))
                if output.total_num_scheduled_tokens:
                    self._stamp(output, started, batch)
        self._caching_waits = False
        return output

    def _stamp(self, output: SchedulerOutput, started: float, batch: Batch) -> None:
        assert self._iterations.model is not None
        tokens = output.num_scheduled_tokens
        self.preemptions.begin(
            output,
            started=started,
            batch=batch,
            offline=[(self.requests[name], n) for name, n in tokens.items() if name in self._offline],
            model=self._iterations.model,
            slo=self._slo,
            offline_tokens=self._traffic.offline_tokens,
        )

    def _learns_anyway(self) -> bool:
        return self._iterations.model is None or self._unplanned % LEARN_EVERY == 0

    def _alone(self) -> dict[str, Any] | None:
        """What one request takes with the engine to itself; no SLO below that can be kept."""
        model = self._iterations.model
        if model is None:
            return None
        return {
            "prompt_tokens": SHORT_PROMPT,
            "ttft_ms": model.predict(Batch.of([Slice(SHORT_PROMPT, 0)])),
            "tbt_ms": model.predict(Batch.of([Slice(1, SHORT_PROMPT, True)])),
        }

    def _warms_up(self, request: Request) -> bool:
        """True for a request of the warm-up; later a client may have named its own like that."""
        return self._iterations.warm_up is not None and is_warm_up(request.request_id)

    def _end_warm_up(self) -> None:
        if self._iterations.warm_up is not None and not any(map(is_warm_up, self.requests)):
            self._iterations.end_warm_up()

    def _plan(self) -> Plan | None:
        if self._iterations.warm_up is not None and not all(map(is_warm_up, self.requests)):
            self._iterations.end_warm_up()
        policy, model = self._policy, self._iterations.model
        decides = policy.decides and (self._offline or self._policy_name == "paced")
        stalled, self._stalled = self._stalled, False
        if not decides or (model is None and not policy.holds_offline):
            plan = None
        elif stalled:
            plan = self._online_alone() if policy.holds_offline else None
        else:
            return self._plan_by_policy(model or TIMELESS)
        self._reserve(0)
        return plan

    def _plan_by_policy(self, model: LatencyModel) -> Plan | None:
        self._make_ready()
        surcharge_ms = self._iterations.surcharge_ms if self._with_logprobs else 0.0
        picture = Picture(self, self._traffic, surcharge_ms=surcharge_ms)
        view = picture.view(self._slo, model)
        plan = self._policy.plan(view)
        if self.checkpoints is not None:
            self.checkpoints.reserved_blocks = view.reserved_blocks
            for request, context in picture.looked:
                self.checkpoints.keep_for(request, context)
        if self._recording is not None and self._recording.on:
            self._recording.add(line_of(view, plan, policy=self._policy_name, at=time.time()))
        return plan

    def _make_ready(self) -> None:
        """Have vLLM see which grammars are compiled and whose KV has come: asking is what makes requests ready."""
        for request in self.kv_holding_waiting:
            if self._is_blocked_waiting_status(request.status):
                self._handle_blocked_waiting_request(request)
        for name, request in list(self._grammars.items()):
            if not self._is_blocked_waiting_status(request.status) or self._handle_blocked_waiting_request(
                request
            ):
                del self._grammars[name]

    @property
    def online_grammars_compile(self) -> bool:
        """True if an online request waits for its grammar: it will want an iteration, and no call will say so."""
        return any(map(is_online, self._grammars.values()))

    def _online_alone(self) -> Plan:
        """An iteration that vLLM composes as it likes, of online requests."""
        waiting = [request.request_id for request in self.waiting.online]
        running = [request.request_id for request in self.running if is_online(request)]
        whole = Batch.of([Slice(self._most_tokens, 0)])
        return Plan(
            tokens=dict.fromkeys([*running, *waiting], self._most_tokens), batch=whole, admitted=waiting
        )

    def _reserve(self, blocks: int) -> None:
        if self.checkpoints is not None:
            self.checkpoints.reserved_blocks = blocks

    def _apply(self, plan: Plan, now: float, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Have vLLM schedule what the plan says."""
        for name in plan.preempted:
            victim = self.requests[name]
            if is_running(victim):
                self.running.remove(victim)
                self._preempt_request(victim, now)
            else:
                self._take_back(victim)
        admitted = [self.requests[name] for name in plan.admitted]
        restored = [self.requests[name] for name in plan.restored]
        resumed = any(request.status == RequestStatus.PREEMPTED for request in admitted)
        overtaken = self._overtaken(admitted)
        lanes, holding = self.waiting, self.kv_holding_waiting
        held = set(holding)
        here = [request for request in (*restored, *admitted) if request in held]  # KV has come back to them
        waiting = [request for request in (*restored, *admitted) if request not in held]
        holding.remove_requests(here)
        lanes.take(waiting)
        self.waiting, self.kv_holding_waiting = FCFSRequestQueue(waiting), FCFSRequestQueue(here)
        self._caps = plan.tokens
        self._caching_waits = self.preemptions.on and not self._offline.isdisjoint(plan.tokens)
        self._reserve_prefill_lookahead = (
            self._cap_before_lookahead
        )  # only now: it is called for every request
        self.max_num_scheduled_tokens = min(self._most_tokens, plan.total + bool(restored))
        if self.checkpoints is not None:
            self.checkpoints.allowed = plan.restored
        try:
            with self._caching_later():
                output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = self._most_tokens
            self._caps = None
            del self._reserve_prefill_lookahead
            if self.checkpoints is not None:
                self.checkpoints.allowed = None
            lanes.prepend_requests(self.waiting)
            holding.prepend_requests(self.kv_holding_waiting)
            self.waiting, self.kv_holding_waiting = lanes, holding
        self.restores_pause = max(0, self.restores_pause - 1)
        if any(request.status != RequestStatus.WAITING_FOR_REMOTE_KVS for request in restored):
            self.restores_pause = RESTORES_PAUSE
        if resumed or overtaken:  # its place is before those that came after it
            self.running.sort()
        # Some requests take all of their tokens or none: then vLLM has the next iteration to itself.
        # Not after preemptions: they free less than planned where blocks are shared; the next frees more.
        self._stalled = bool(plan.total and not plan.preempted) and not output.total_num_scheduled_tokens
        return output

    def _take_back(self, request: Request) -> None:
        """Take the blocks of a request that waits although its KV has come back; host memory still has it."""
        self.kv_holding_waiting.remove_requests([request])
        self.kv_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        request.num_computed_tokens = 0
        self.waiting.add_request(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's, which needs all blocks back at once: nobody's last ones are saved meanwhile."""
        if self.checkpoints is None:
            return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
        saving, self.checkpoints.on = self.checkpoints.on, False
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
        finally:
            self.checkpoints.on = saving

    def _overtaken(self, admitted: Sequence[Request]) -> bool:
        """Whether offline requests that came later run already, because these were held out for their prefix."""
        last = next((r for r in reversed(self.running) if r.request_id in self._offline), None)
        turn = [r for r in (last, *admitted) if r is not None and r.request_id in self._offline]
        return any(later < earlier for earlier, later in pairwise(turn))

    def _cap_before_lookahead(self, request: Request, computed: int, tokens: int) -> int:
        """Called by vLLM for every request that it is about to schedule: cap its tokens at the plan's."""
        caps = self._caps
        if (
            caps is not None
            and not self.num_spec_tokens
            and (cap := caps.get(request.request_id)) is not None
        ):
            capped = cap if cap < tokens else tokens  # as `_capped` says, without another call
        else:
            capped = self._capped(request, tokens)
        if not self.num_prefill_lookahead:
            return capped
        return int(super()._reserve_prefill_lookahead(request, computed, capped))  # type: ignore[misc]

    def _mamba_block_aligned_split(self, request: Request, tokens: int, *args: Any, **kwargs: Any) -> int:
        """The same for models that must end a chunk at a block's end."""
        capped = self._capped(request, tokens)
        return super()._mamba_block_aligned_split(request, capped, *args, **kwargs) if capped else 0  # type: ignore[misc]

    def _capped(self, request: Request, tokens: int) -> int:
        if self._caps is None:
            return tokens
        cap = self._caps.get(request.request_id)
        if cap is None:  # held out; or none of the plan's business (a KV transfer that has arrived)
            return 0 if is_running(request) else tokens
        if self.num_spec_tokens and tokens == 1 + self.num_spec_tokens and not is_running(request):
            return tokens  # vLLM has made one token as long as a decode step, and insists on it
        return cap if cap < tokens else tokens

    def update_from_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        """Take the results in as vLLM does, and learn from the time they took."""
        whole = self._settle(scheduler_output, output)
        updated = super().update_from_output(scheduler_output, output)  # type: ignore[misc]
        ended = time.monotonic()
        self._iterations.end(scheduler_output, ended, whole=whole)
        for outputs in updated.values():
            answered = (answer.request_id for answer in outputs.outputs if answer.new_token_ids)
            self._traffic.tokens(answered, at=ended)
        for name in self._leaving:
            self._traffic.finished(name)
        self._leaving.clear()
        return updated

    def _settle(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> bool:
        """After an iteration with safepoints: rewind who has left it, and let the others' blocks be reused.

        Before vLLM takes the output in, which may free the requests. Counters of those who left go back to where
        they were; their blocks stay with them, and were never registered. Returns whether all was computed.
        """
        outcome = outcome_of(output)
        if id(scheduled) not in self._uncached:
            self.preemptions.computed(scheduled.num_scheduled_tokens)
            return outcome is None or not outcome.joined
        self._uncached.discard(id(scheduled))
        left = self.preemptions.end(outcome, scheduled.num_scheduled_tokens)
        for name, tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None or not is_running(request):
                self.preemptions.forget(name)  # aborted meanwhile
                continue
            if name not in left:
                if tokens == 1 and request.num_computed_tokens % self.block_size:
                    continue  # a decode step that fills no block
                self.kv_cache_manager.cache_blocks(
                    request, min(request.num_computed_tokens, request.num_tokens)
                )
                continue
            if name in self._offline:
                counted = self._offline_tokens.left(
                    request, self._slice(name, tokens), self._iterations.worth
                )
                self._traffic.offline(-counted, at=time.monotonic())
            request.num_computed_tokens -= tokens
            request.is_prefill_chunk = request.num_computed_tokens + 1 < request.num_tokens
            if request.is_prefill_chunk:
                self._inflight_prefills.add(request)
        return outcome is None or not (left or outcome.joined)

    def _checkpoint_report(self) -> dict[str, Any]:
        """What was saved and brought back; `why_off` where nothing is."""
        said = {
            "policy": OFF,
            "why_off": self._why_no_checkpoints,
            **asdict(CopyCounts()),
            "blocks_refused": 0,
            "tokens_saved": 0,
        }
        if self.checkpoints is not None:
            said = self.checkpoints.report()
        return {**said, "tokens_recomputed": self._offline_tokens.again}

    def shutdown(self) -> None:
        """Save what was learned."""
        self.preemptions.close()
        self._iterations.save()
        if self._recording is not None:
            self._recording.close()
        super().shutdown()  # type: ignore[misc]

    def _batch(self, output: SchedulerOutput) -> Batch:
        """What this iteration computes; the requests' counters have moved on by it already."""
        batch = Batch()
        for name, tokens in output.num_scheduled_tokens.items():
            batch.add(*self._slice(name, tokens))
        return batch

    def _slice(self, name: str, tokens: int) -> Slice:
        """The request's part in an iteration that was scheduled just now."""
        request = self.requests[name]
        context = request.num_computed_tokens - tokens
        decode = context >= request.num_prompt_tokens and tokens <= 1 + self.num_spec_tokens
        return Slice(tokens, context, decode)

    def _count_offline(self, output: SchedulerOutput, batch: Batch, now: float) -> None:
        """Count tokens of offline requests."""
        if self._offline:
            scheduled, worth = output.num_scheduled_tokens, self._iterations.worth
            tokens = self._offline_tokens.count(scheduled, self.requests, self._offline, batch, worth)
            if tokens:
                self._traffic.offline(tokens, at=now)

    def _surcharged(self, output: SchedulerOutput) -> int:
        """Tokens of prompts whose logprobs are wanted."""
        tokens = output.num_scheduled_tokens
        return sum(tokens[name] for name in self._with_logprobs if tokens.get(name, 0) > 1)


def recording_of(vllm_config: Any, path: Path | None) -> Recording | None:
    """Where this engine's views are recorded, if they are; data parallel engines behind the first add a number."""
    if path is None:
        return None
    number = vllm_config.parallel_config.data_parallel_index
    return Recording(path.with_name(f"{path.name}.{number}") if number else path)


class Synchronous(CoServing, Scheduler):  # type: ignore[misc]
    """For engines that finish one iteration before they schedule the next."""


class Asynchronous(CoServing, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule ahead."""


class CoServingScheduler:
    """What `--scheduler-cls` names: becomes the one that the engine's configuration asks for."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Vllm's scheduler with ours mixed in."""
        kind = Asynchronous if vllm_config.scheduler_config.async_scheduling else Synchronous
        return kind(vllm_config, *args, **kwargs)
