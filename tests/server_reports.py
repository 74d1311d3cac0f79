"""Reports of servers, `GET /v1/conserve`, of which a test says what matters to it; nothing else has happened."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import msgspec

from conserve.server_report import SchedulerReport, of_engine

NONE = {"p50": None, "p99": None}
NOTHING_REFUSED: dict[str, Any] = {"count": 0, "reasons": []}
LIVE: dict[str, Any] = {
    "requests": 0,
    "ttft_ms": NONE,
    "tbt_ms": NONE,
    "attainment": 1.0,
    "held_back": [],
    "paused_for": [],
    **{name: {"ttft_ms": {}, "tbt_ms": {}} for name in ("way_ms", "promises")},
    "counts": {key: {"all": 0, "late": 0} for key in ("ttft_ms", "tbt_ms")},
    "histograms": {key: {"bounds_ms": [], "counts": [0], "sum_ms": 0.0} for key in ("ttft_ms", "tbt_ms")},
}
SLO: dict[str, Any] = {
    "ttft_ms": None,
    "tbt_ms": None,
    "harm": None,
    "default_harm": None,
    "promises": {"ttft_ms": {}, "tbt_ms": {}},
}
MODEL: dict[str, Any] = {
    "name": "conserve",
    "source": "warm-up",
    "coefficients": {},
    "scale": 1.0,
    "refits": 0,
    "off": {"iterations": 0, **NONE},
    "encoders": {"iterations": 0, "input_ms": 0.0, "embedding_ms": 0.0},
}
DISK: dict[str, Any] = {
    "why_off": None,
    "refused": None,
    "blocks_spilled": 0,
    "bytes_spilled": 0,
    "blocks_taken_in": 0,
    "tokens_taken_in": 0,
}
SCHEDULER: dict[str, Any] = {
    "policy": "conserve",
    "refused_plans": NOTHING_REFUSED,
    "slo": SLO,
    "alone": None,
    "latency_model": None,
    "batching": {"policy": "on"},
    "hygen": {"budget_ms": None, "tokens": None, "offline_per_s": None, "utility": 0.9},
    "max_num_batched_tokens": 512,
    "scheduling_ms": 0.0,
    "online": LIVE,
    "offline": {"tokens": 0, "tokens_per_s": 0.0, "work": 0.0, "decode_steps": 0, "rows": 0},
    "harm": {"pauses": 0, "compared": 0, "ttft_ms": NONE, "tbt_ms": NONE},
    "pushing": {"largest_slo_scale": 1.0, "slo_scale": 1.0, "rows": 0, "tokens": 0},
    **dict.fromkeys(("iterations", "planned", "overruns", "standstills"), 0),
    "busy_s": 0.0,
    "live_prefixes": {
        "share": 0.5,
        "kept_blocks": 0,
        "most_blocks": 0,
        "most_age_s": 0.0,
        "prompt_tokens": 0,
        "found_tokens": 0,
        "lost_tokens": 0,
    },
    "preemption": {
        "policy": "prompt",
        "why_off": None,
        "rows_go_on": True,
        "iterations_left": 0,
        "abandoned": 0,
        "rows": 0,
        "parked": 0,
        "layers_run": 0,
        "scheduled_ahead": 0,
        "refused": 0,
        "tokens_redone": 0,
        "tokens_wasted": 0.0,
        "live_tokens_recomputed": 0,
        "reaction_ms": NONE,
    },
    "checkpoint": {
        "policy": "off",
        "why_off": None,
        "refused_choices": NOTHING_REFUSED,
        "tokens_saved": 0,
        "tokens_restored": 0,
        "tokens_recomputed": 0,
        "restores": 0,
        "blocks_saved": 0,
        "blocks_restored": 0,
        "blocks_failed": 0,
        "blocks_refused": 0,
    },
}
FRONT_END: dict[str, Any] = {
    "version": "0",
    "identity": "m@weights",
    "resumes": True,
    "engines": 1,
    "max_num_seqs": 4,
    "offline_priority": 1000,
}


def changed(found: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A document with these changes; objects in them change the fields that they name."""
    merged = deepcopy(dict(found))
    for name, value in changes.items():
        part = merged.get(name)
        merged[name] = (
            changed(part, value) if isinstance(part, dict) and isinstance(value, Mapping) else value
        )
    return merged


def document(**changes: Any) -> dict[str, Any]:
    """The JSON of a scheduler's report with these changes."""
    return changed(SCHEDULER, changes)


def report(**changes: Any) -> SchedulerReport:
    """The report of a scheduler with these changes."""
    return of_engine(document(**changes))


def answer(**changes: Any) -> bytes:
    """The whole answer of a server with these changes."""
    return json.dumps(changed({**FRONT_END, **SCHEDULER}, changes)).encode()


def promised(latency: str, **bounds_ms: float) -> dict[str, Any]:
    """Promises that a server makes for a latency, by their names."""
    return {latency: max(bounds_ms.values()), "promises": {latency: bounds_ms}}


def of_class(**changes: Any) -> dict[str, Any]:
    """The JSON of a class of live traffic."""
    return changed({**LIVE, "slo": SLO}, changes)


def require_fit(said: Mapping[str, Any]) -> SchedulerReport:
    """Read a scheduler's report; fails if the structs of its readers have not just its fields."""
    read = of_engine(said)
    assert told(msgspec.to_builtins(read)) == told(json.loads(json.dumps(said)))
    return read


def told(part: Any) -> Any:
    """A part of a report without nulls."""
    if isinstance(part, dict):
        return {name: told(value) for name, value in part.items() if value is not None}
    return part
