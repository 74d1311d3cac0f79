"""Changes of a running scheduler: what `POST /v1/conserve` asks for, what the API server reports, and pauses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.plan import Policy
from conserve.engine.policy.promises import Promises
from conserve.engine.runtime.delivery_delay import Delays
from conserve.engine.runtime.traffic import Pause
from conserve.engine.vllm.scheduling.observation import keeps_kv
from conserve.engine.vllm.scheduling.row_terms import RowTerms
from conserve.names import OFF
from conserve.regime_change import RegimeChange

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing

AS_VLLM = OnlineOnly()  # in a pause of the receipt: it compares with an engine without rows
AS_PROMISED = OnlineOnly(keeps_promises=True)  # in a pause for a promise, which keeps the others


def planner_of(scheduler: CoServing) -> Policy:
    """The scheduler's policy, or in a pause of its rows one that computes no offline token."""
    policy: Policy = scheduler.chosen_policy
    if policy.traits.defers_offline:
        return policy
    traffic, offline = scheduler.traffic, bool(scheduler.offline)
    keeps = policy.traits.pauses_rows
    pause = traffic.pauses(offline=offline, promises=keeps, now=time.monotonic())
    if pause is None or not offline or not keeps_kv(scheduler):
        return policy
    # Without rows the policy plans classes among themselves, and leaves the rest to vLLM.
    return AS_PROMISED if keeps and (pause is Pause.PROMISE or traffic.classified) else AS_VLLM


def change_regime(scheduler: CoServing, change: Mapping[str, Any]) -> None:
    """Change the policy with HyGen's terms, preemption, checkpoints, batching mode or promises, as far as set."""
    asked = msgspec.convert(change, RegimeChange)
    if asked.policy is not UNSET:
        scheduler.use_policy(asked.policy)
        terms = {} if asked.hygen is UNSET else asked.hygen
        scheduler.row_terms = RowTerms.of(terms, now=time.monotonic())
    if asked.preemption is not UNSET:
        scheduler.arrival_monitor.use_rule(asked.preemption)
    if asked.checkpoint is not UNSET and scheduler.checkpoints is not None:
        scheduler.checkpoints.on = asked.checkpoint != OFF
    if asked.batching is not UNSET:
        scheduler.batches = asked.batching != OFF
    if asked.slo is not UNSET:
        scheduler.traffic.promise(Promises.of(asked.slo))


def report_delays(scheduler: CoServing, server: str, delays_ms: Mapping[str, Delays]) -> dict[str, Any]:
    """Keep promises earlier by the delays of each class that an API server reports (`Traffic.report_delays`)."""
    scheduler.books.catch_up()
    names: dict[str, Any] = scheduler.traffic.report_delays(delays_ms, server=server, now=time.monotonic())
    return names
