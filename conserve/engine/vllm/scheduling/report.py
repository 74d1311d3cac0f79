"""Report of the scheduler: the JSON of `GET /v1/conserve`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conserve.engine.policy.refusals import refusals_of
from conserve.engine.vllm.checkpoint.counts import CopyCounts
from conserve.names import OFF, ON
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing

SHORT_PROMPT = 128  # tokens


def report(scheduler: CoServing) -> dict[str, Any]:
    """Policy, SLO and latency model, the last 60 s of both lanes, and counts since the start."""
    iterations = scheduler.iterations
    holds_back = scheduler.chosen_policy.traits.pauses_rows and iterations.model is not None
    traffic = scheduler.traffic.report(now=time.monotonic(), holds_back=holds_back)
    traffic["offline"]["work"] = scheduler.offline_tokens.work
    traffic["offline"]["decode_steps"] = scheduler.offline_tokens.steps
    traffic["offline"]["rows"] = len(scheduler.offline)
    return {
        "policy": scheduler.policy_name,
        "refused_plans": refusals_of(scheduler.chosen_policy),
        "slo": scheduler.traffic.promises.document(),
        "alone": alone(iterations.model) if iterations.model is not None else None,
        "latency_model": iterations.described(),
        "batching": {"policy": ON if scheduler.batches else OFF},
        "hygen": {**scheduler.row_terms.said(), **hygen_model(iterations)},
        "max_num_batched_tokens": scheduler.most_tokens,
        "scheduling_ms": scheduler.own_time.ms,
        **traffic,
        "harm": scheduler.traffic.receipt.report(),
        "pushing": scheduler.traffic.pushing.report(),
        **iterations.report(),
        "live_prefixes": scheduler.prefixes.report(),
        "preemption": {
            **scheduler.arrival_monitor.report(),
            "scheduled_ahead": scheduler.ahead.count,
            "parked": scheduler.parking.count,
        },
        "checkpoint": {**checkpoints(scheduler), "tokens_recomputed": scheduler.offline_tokens.again},
    }


def hygen_model(iterations: Any) -> dict[str, Any]:
    """HyGen's latency predictor; empty while there is none."""
    return {"coefficients": iterations.hygen.coefficients} if iterations.hygen is not None else {}


def alone(model: LatencyModel) -> dict[str, Any]:
    """TTFT and TBT of a short request with the engine to itself, in ms; no SLO below that can be kept."""
    return {
        "prompt_tokens": SHORT_PROMPT,
        "ttft_ms": model.predict(Batch.of([Slice(SHORT_PROMPT, 0)])),
        "tbt_ms": model.predict(Batch.of([Slice(1, SHORT_PROMPT, True)])),
    }


def checkpoints(scheduler: CoServing) -> dict[str, Any]:
    """Counts of KV blocks saved and restored; `why_off` where nothing is checkpointed."""
    if scheduler.checkpoints is not None:
        said: dict[str, Any] = scheduler.checkpoints.report()
        return said
    off = {"policy": OFF, "why_off": scheduler.why_no_checkpoints, "refused_choices": refusals_of(None)}
    return {**off, **asdict(CopyCounts()), "blocks_refused": 0, "tokens_saved": 0}
