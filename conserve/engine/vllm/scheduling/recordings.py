"""Files that an engine writes for its user: what the policy sees and plans, and when live requests came."""

from __future__ import annotations

import time
from pathlib import Path

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.recorded import line_of
from conserve.engine.policy.view import View
from conserve.engine.runtime.recording import arrival_line, arrivals_at, recording_at
from conserve.engine.section import EngineSection
from conserve.engine.vllm.lane import is_online
from conserve.engine.vllm.profiling.warm_up import is_warm_up


class Recordings:
    """Recordings of one engine, those that its settings ask for."""

    def __init__(self, section: EngineSection, number: int) -> None:
        """`number` tells data parallel engines apart."""
        views, arrivals = (
            Path(file) if file else None for file in (section.record_views, section.record_arrivals)
        )
        self._views = recording_at(views, number)
        self._arrivals = arrivals_at(arrivals, number)
        self._cached: dict[str, int] = {}  # tokens that requests found in the prefix cache

    @property
    def watches(self) -> bool:
        """True if views are recorded."""
        return self._views is not None and self._views.on

    def planned(self, view: View, plan: Plan | None, policy: str) -> None:
        """Keep a view and its plan, unless the plan changes nothing."""
        if self._views is not None and self.watches and (plan is None or plan.changes_something):
            self._views.add(line_of(view, plan, policy=policy, at=time.time()))

    def started(self, output: SchedulerOutput) -> None:
        """Note what requests that start in this iteration found; one that is computed again counts as before."""
        if self._arrivals is not None:
            for new in output.scheduled_new_reqs:
                self._cached.setdefault(new.req_id, new.num_computed_tokens)

    def ended(self, request: Request) -> None:
        """Keep the time and the lengths of a live request, for `conserve tune`."""
        cached = self._cached.pop(request.request_id, 0)
        if self._arrivals is not None and is_online(request) and not is_warm_up(request.request_id):
            lengths = request.num_prompt_tokens, request.num_output_tokens, cached
            self._arrivals.add(arrival_line(request.arrival_time, *lengths))

    def close(self) -> None:
        """Write the last lines."""
        for recording in (self._views, self._arrivals):
            if recording is not None:
                recording.close()
