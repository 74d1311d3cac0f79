"""vLLM's scheduler with a policy: look, plan, apply, settle (docs/adr/0005).

`schedule` makes an `Iteration`, which goes to the workers on vLLM's own output; `update_from_output` settles it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.policies import named
from conserve.engine.policy.view import Slo
from conserve.engine.runtime.receipt import Receipt
from conserve.engine.runtime.traffic import Traffic
from conserve.engine.vllm.checkpoint.counts import checkpoints_of
from conserve.engine.vllm.compat.vllms_scheduler import AsyncScheduler, Scheduler, VllmsAttributes
from conserve.engine.vllm.iteration import Iteration, device_time_of, iteration_of, outcome_of, put
from conserve.engine.vllm.lane import class_named, is_online, pushes, ttft_promise
from conserve.engine.vllm.preemption.arrivals import ArrivalMonitor
from conserve.engine.vllm.profiling.warm_up import is_warm_up
from conserve.engine.vllm.scheduling.ahead import Ahead
from conserve.engine.vllm.scheduling.application import apply, evict, make_ready, make_way, online_alone
from conserve.engine.vllm.scheduling.bookkeeping import Bookkeeping, live_first
from conserve.engine.vllm.scheduling.control import change_regime, planner_of
from conserve.engine.vllm.scheduling.encoders import encoded_by, in_the_way
from conserve.engine.vllm.scheduling.iterations import Iterations
from conserve.engine.vllm.scheduling.lanes import Lanes
from conserve.engine.vllm.scheduling.observation import Picture, computes, keeps_kv, kv_groups_of, surcharged
from conserve.engine.vllm.scheduling.offline_tokens import OfflineTokens
from conserve.engine.vllm.scheduling.online_cost import cost_by_class
from conserve.engine.vllm.scheduling.own_time import OwnTime
from conserve.engine.vllm.scheduling.parking import Parking, lose
from conserve.engine.vllm.scheduling.prefixes import LivePrefixes
from conserve.engine.vllm.scheduling.recordings import Recordings
from conserve.engine.vllm.scheduling.repetition import Repetition
from conserve.engine.vllm.scheduling.report import report
from conserve.engine.vllm.scheduling.resets import resetting
from conserve.engine.vllm.scheduling.row_terms import RowTerms
from conserve.engine.vllm.scheduling.settlement import settle
from conserve.engine.vllm.settings import settings_of
from conserve.names import ONLINE_ONLY
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import TIMELESS, LatencyModel

log = logging.getLogger("vllm.conserve")
NOTHING = Plan(tokens={}, batch=Batch())
LEARN_EVERY = 8  # of iterations without a plan, the model learns from one: nothing depends on its speed then


def arrived_at(request: Request) -> float:
    """Time of a request's arrival, in monotonic seconds: not to come, if the wall clock was set back since then."""
    return time.monotonic() - max(0.0, time.time() - float(request.arrival_time))


class CoServing(VllmsAttributes):
    """Mixed into vLLM's schedulers, of which it uses what `compat.INTERNALS` lists."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        section, times = settings_of(vllm_config)
        self.waiting, self.kv_holding_waiting = Lanes(), Lanes()
        self.iterations = Iterations(times, learns=vllm_config.model_config.runner_type == "generate")
        pauses = Receipt(share=section.pausing_share)
        self.traffic = Traffic(section.promises, pauses, section.class_promises)
        self.traffic.pushing.largest_scale = section.largest_scale
        self.offline: set[str] = set()  # offline requests in the engine
        self.with_logprobs: set[str] = set()  # requests that want logprobs of their prompts
        self.grammars: dict[str, Request] = {}  # requests whose grammar is being compiled
        self.books = Bookkeeping(self)
        self.last_iteration = Iteration()  # the newest: the one before that which is being planned
        self.most_tokens = self.max_num_scheduled_tokens
        self._unplanned = 0  # iterations without a plan
        self.offline_tokens = OfflineTokens(1 + self.num_spec_tokens)
        rule, every = section.leave_rule, section.safepoint_every
        self.arrival_monitor = ArrivalMonitor(vllm_config, policy=rule, every=every)
        self.checkpoints, self.why_no_checkpoints = checkpoints_of(self.connector)
        self.restores_pause = 0  # iterations for which no restore begins, since vLLM had no room for one
        self.ahead = Ahead(self, asynchronous=vllm_config.scheduler_config.async_scheduling)
        self.recordings = Recordings(section, vllm_config.parallel_config.data_parallel_index)
        self.row_terms = RowTerms()
        self.own_time = OwnTime.of(vllm_config.parallel_config)
        self.repetition = Repetition(self)
        self.kv_groups = kv_groups_of(self.kv_cache_manager, vllm_config)
        self.prefixes = LivePrefixes(self.kv_cache_manager, share=section.live_prefixes)
        self.parking = Parking(self, settles=vllm_config.max_concurrent_batches <= 2)
        self.batches = True  # batching mode is allowed
        self.use_policy(section.policy)

    def use_policy(self, name: str) -> None:
        """Plan by this policy from now on."""
        self.policy_name = name
        self.chosen_policy = self.planner = named(name, log.warning)
        self.traffic.use_policy(name)
        traits = self.chosen_policy.traits
        self.prefixes.switch(on=traits.guards_prefixes)
        self.policy = SchedulingPolicy.FCFS if traits.spares_offline else SchedulingPolicy.PRIORITY

    def conserve(self, change: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Answer `GET /v1/conserve`, after a change of policy, preemption, checkpoints or SLO if one is given."""
        self.books.catch_up()
        if change:
            self.repetition.forget()
            self.traffic.receipt.restart()
            change_regime(self, change)
        if self.iterations.warm_up is not None and not any(map(is_warm_up, self.requests)):
            self.iterations.end_warm_up()
        return report(self)

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Take a request in, as vLLM does, and note its lane. A prompt may come in parts, each answered in turn."""
        self.books.note_latencies()
        name = request.request_id
        known = self.requests.get(name)  # the request of which this is a part, or the end
        arrives = known is None or known.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        super().add_request(request)  # type: ignore[misc]
        self.repetition.forget()
        self.arrival_monitor.arrived(name)
        if not arrives or name not in self.requests or self._warms_up(request):
            return
        self.books.silent.discard(name)
        if surcharged(request):
            self.with_logprobs.add(name)
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.grammars[name] = request
        if is_online(request):
            at, live_class, own = arrived_at(request), class_named(request), ttft_promise(request) is not None
            self.traffic.arrived(name, request.num_prompt_tokens, at=at, live_class=live_class, own_ttft=own)
        else:
            self.offline.add(name)
            if pushes(request):
                self.traffic.pushing.rows.add(name)

    def arriving(self, request: Request) -> None:
        """Note in vLLM's I/O thread, while the model runs, a request that `add_request` will bring."""
        if is_online(request) and not self._warms_up(request):
            promise = ttft_promise(request) or self.traffic.ttft_ms(class_named(request))
            self.arrival_monitor.arriving(request, promise, arrived=arrived_at(request))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.arrival_monitor.forget(request.request_id)
        for names in (self.offline, self.traffic.pushing.rows, self.with_logprobs, self.parking.names):
            names.discard(request.request_id)
        self.offline_tokens.forget(request.request_id)
        self.grammars.pop(request.request_id, None)
        self.books.ended(request)
        self.recordings.ended(request)
        self.repetition.forget()
        self.prefixes.end(request, now=time.monotonic())
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Finish requests as vLLM does; where it finishes all, behind a fault say, no results may come any more."""
        if request_ids is None:
            self.ahead.forget()
        return super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]

    def has_requests(self) -> bool:
        """True if vLLM should schedule an iteration; requests that the policy defers for good do not count."""
        if self.ahead.waits():
            return False
        if self.chosen_policy.traits.defers_offline and self._rows_alone:
            copying = self.checkpoints is not None and self.checkpoints.copying
            return copying or bool(super().has_finished_requests())  # type: ignore[misc]
        return bool(super().has_requests())  # type: ignore[misc]

    @property
    def _rows_alone(self) -> bool:
        """True if no online request is in the engine, but for those whose client is to say more."""
        return len(self.offline) + len(self.books.silent) == len(self.requests)

    @property
    def offline_alone(self) -> bool:
        """True if no online request is in the engine or on its way to the scheduler, and a worker has answered."""
        known = self.arrival_monitor.workers_read_flag and self.iterations.warm_up is None
        return known and self._rows_alone and not self.arrival_monitor.expects

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if not self.parking.under_way:
            lose(self, request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    # An iteration: look, plan, apply; settle.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan the next iteration, have vLLM schedule it, and send its record along."""
        self.own_time.begin()
        self.ahead.begin()
        iteration = Iteration(started=time.monotonic(), ahead=self.ahead.refusable)
        iteration.plan = plan = self._plan()
        self._predict(plan)
        schedule = partial(self.own_time.of_vllm(super().schedule), *args, **kwargs)  # type: ignore[misc]
        leaves = self.arrival_monitor.enabled and self.iterations.model is not None and not self.ahead.beside
        mine = plan is not None and leaves and not self.offline.isdisjoint(plan.tokens)
        iteration.registers_late = mine or iteration.ahead
        output = apply(self, iteration, schedule, prompts_held_back=any((*args, *kwargs.values())))
        self.parking.tell(iteration, output)
        if plan is not None and not plan.tokens:
            self.row_terms.rest()
        self._send(iteration, output)
        self.ahead.scheduled(iteration)
        self.own_time.pause()
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """Answer as vLLM does, which asks once the workers compute: the time for what no iteration waits for."""
        self.own_time.begin()
        self.books.catch_up()
        self.repetition.prepare()
        self.own_time.pause(launched=True)
        return super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        """Settle the iteration, have vLLM take its results in, and leave what it teaches to `books`."""
        self.own_time.begin()
        self.books.catch_up()
        iteration = iteration_of(scheduler_output)
        iteration.outcome, iteration.device = outcome_of(output), device_time_of(output)
        self.ahead.settled(iteration, time.monotonic())
        settle(self, iteration)
        rows = self.offline.intersection(iteration.tokens)  # also those that end now
        updated = self.own_time.of_vllm(super().update_from_output)(scheduler_output, output)  # type: ignore[misc]
        self.books.end(iteration, updated)
        live = len(rows) < len(iteration.tokens)
        if rows and live:
            live_first(updated, rows)
        self.own_time.end(counts=live and not iteration.follows)
        return updated

    def _plan(self) -> Plan | None:
        """The policy's plan; None leaves the iteration to vLLM."""
        if self.iterations.warm_up is not None and not all(map(is_warm_up, self.requests)):
            self.iterations.end_warm_up()
        self.planner = policy = planner_of(self)
        traits = policy.traits
        model: LatencyModel | None = self.iterations.model
        decides = traits.decides and (self.offline or traits.treats_alike or self.traffic.classified)
        self.reserve_blocks(0)
        self.traffic.planned_quiet = False
        if not decides or (model is None and not traits.defers_offline) or not keeps_kv(self):
            evict(self, [*self.parking.names], time.monotonic())  # vLLM would run them before live requests
            return None
        if not computes(self) or (self._rows_alone and policy is not self.chosen_policy):  # the rows pause
            return NOTHING
        make_way(self)
        if self.last_iteration.stalled and not self._last_was_a_turn:
            return online_alone(self, self.most_tokens) if traits.defers_offline else None
        model = (self.iterations.hygen if traits.predicts_as_hygen else None) or model or TIMELESS
        return self.repetition.again(model) or self._plan_by_policy(model)

    def _plan_by_policy(self, model: LatencyModel) -> Plan | None:
        self.books.note_latencies()
        make_ready(self)
        surcharge_ms = self.iterations.surcharge_ms if self.with_logprobs else 0.0
        picture = Picture(self, self.traffic, surcharge_ms=surcharge_ms)
        evict(self, in_the_way(self, picture.context_of), time.monotonic())
        view = picture.view(self.slo, model)
        plan = self.planner.plan(view)
        self.traffic.planned_quiet = plan is not None and bool(plan.tokens) and view.quiet
        if plan is not None:
            self.row_terms.began(self.requests[name] for name in plan.admitted if name in self.offline)
        self.reserve_blocks(view.set_aside_blocks)
        if self.checkpoints is not None:
            for request, context in picture.looked:
                self.checkpoints.keep_for(request, context)
        paused = self.planner is not self.chosen_policy
        self.recordings.planned(view, plan, ONLINE_ONLY if paused else self.policy_name)
        self.repetition.note(plan, view)
        return plan

    @property
    def online_grammars_compile(self) -> bool:
        """True if an online request waits for its grammar: it will want an iteration, and no call will say so."""
        return any(map(is_online, self.grammars.values()))

    @property
    def _last_was_a_turn(self) -> bool:
        """True if the last plan had rows alone while online requests run: theirs is the next iteration anyway."""
        plan = self.last_iteration.plan
        return plan is not None and plan.tokens.keys() <= self.offline and any(map(is_online, self.running))

    @property
    def slo(self) -> Slo:
        """Bounds on the next iteration under which every promise can be kept."""
        return self.traffic.bounds(now=time.monotonic())

    def reserve_blocks(self, blocks: int) -> None:
        """Keep so many free KV blocks from checkpoints."""
        if self.checkpoints is not None:
            self.checkpoints.reserved_blocks = blocks

    def _predict(self, plan: Plan | None) -> None:
        """Tell checkpoints how long the iteration will take, for copies go beside it; None where it is unknown."""
        if self.checkpoints is not None:
            timed = plan is not None and plan.tokens and self.iterations.model is not None
            self.checkpoints.predicted_ms = plan.predicted_ms if plan is not None and timed else None

    def _send(self, iteration: Iteration, output: SchedulerOutput) -> None:
        """Complete the record with what vLLM has scheduled, stamp it, and put it on the output."""
        put(output, iteration)
        self.last_iteration = iteration
        self.recordings.started(output)
        if self.iterations.warm_up is None:
            self.prefixes.start(output, self.requests, now=iteration.started)
        plan, tokens = iteration.plan, output.num_scheduled_tokens
        iteration.tokens, iteration.encodes = tokens, encoded_by(self, output)
        self._unplanned += plan is None
        if plan is None and not self.offline and not iteration.ahead and not self._teaches(iteration):
            return
        iteration.batch = plan.batch if plan is not None and tokens == plan.tokens else self._batch(tokens)
        iteration.surcharged = sum(tokens[name] for name in self.with_logprobs if tokens.get(name, 0) > 1)
        self._count_offline(iteration, iteration.batch)
        if self.traffic.classified:
            self.traffic.computed(cost_by_class(self, tokens))
        if iteration.registers_late and tokens:
            self._stamp(iteration)

    def _stamp(self, iteration: Iteration) -> None:
        assert self.iterations.model is not None
        requests, offline = self.requests, self.offline
        self.arrival_monitor.begin(
            iteration,
            offline=[(requests[name], n) for name, n in iteration.tokens.items() if name in offline],
            model=self.iterations.model,
            slo=self.slo,
            offline_tokens=self.traffic.offline_tokens,
        )

    def _teaches(self, iteration: Iteration) -> bool:
        return bool(iteration.encodes) or self.iterations.model is None or self._unplanned % LEARN_EVERY == 0

    def _batch(self, tokens: Mapping[str, int]) -> Batch:
        """The batch that was scheduled just now; the requests' counters have moved on by it already."""
        return Batch.of(self.scheduled_slice(name, count) for name, count in tokens.items())

    def scheduled_slice(self, name: str, tokens: int) -> Slice:
        """The request's part in the iteration that was scheduled last."""
        request = self.requests[name]
        return self.part(request, tokens, request.num_computed_tokens - tokens)

    def part(self, request: Request, tokens: int, context: int) -> Slice:
        """A request's part in an iteration: so many tokens behind so many others."""
        decode = context >= request.num_prompt_tokens and tokens <= 1 + self.num_spec_tokens
        return Slice(tokens, context, decode)

    def _count_offline(self, iteration: Iteration, batch: Batch) -> None:
        if self.offline:
            worth = self.iterations.worth
            counted = self.offline_tokens.count(iteration.tokens, self.requests, self.offline, batch, worth)
            if counted:
                self.traffic.offline(counted, at=iteration.started)

    def _warms_up(self, request: Request) -> bool:
        """True for a request of the warm-up. Afterwards a client's request may have such a name."""
        return self.iterations.warm_up is not None and is_warm_up(request.request_id)

    def shutdown(self) -> None:
        """Save the model's correction, and end."""
        self.books.catch_up()
        self.arrival_monitor.close()
        self.iterations.close()
        self.recordings.close()
        super().shutdown()  # type: ignore[misc]

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """Reset the cache as vLLM does, which needs all blocks free, and its copies in host memory.

        Weights may have been replaced: their KV would come back with rows, under names that do not tell.
        """
        with resetting(self, running=reset_running_requests):
            done = bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))  # type: ignore[misc]
            return done and (self.checkpoints is None or self.checkpoints.reset())


class Synchronous(CoServing, Scheduler):  # type: ignore[misc]
    """Scheduler of an engine that finishes one iteration before it schedules the next."""


class Asynchronous(CoServing, AsyncScheduler):  # type: ignore[misc]
    """Scheduler of an engine that schedules ahead."""


class CoServingScheduler:
    """The class that `--scheduler-cls` names; making one gives the scheduler that the configuration asks for."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's scheduler, synchronous or not, with `CoServing` mixed in."""
        kind = Asynchronous if vllm_config.scheduler_config.async_scheduling else Synchronous
        return kind(vllm_config, *args, **kwargs)
