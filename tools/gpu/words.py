"""Words of the engine: its report at `GET /v1/conserve`, and the lines of its log that name its parts."""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

NOTABLE = re.compile(
    r"backend|compil|graph|KV cache|Model loading|[Rr]unner|memory|WARN|ERROR|Error|took|conserve"
)
LINES = 40
V2_LINE = "Using V2 Model Runner"  # vLLM's words; it says nothing of V1
PREEMPTION = ("policy", "why_off", "rows_go_on", "iterations_left", "abandoned", "rows", "layers_run",
              "tokens_redone", "tokens_wasted", "live_tokens_recomputed", "reaction_ms")  # fmt: skip
CHECKPOINT = ("policy", "why_off", "tokens_saved", "tokens_restored", "tokens_recomputed", "blocks_saved",
              "blocks_restored", "blocks_failed", "blocks_refused", "block_ms")  # fmt: skip
COUNTS = ("iterations", "planned", "overruns", "busy_s")


def told(report: Mapping[str, Any], log: str, vllm_version: str | None = None) -> dict[str, Any]:
    """The engine's words about itself, without the figures of the last minute.

    A part that the report lacks is None, so that a result shows the gap.
    """
    preemption, checkpoint = report.get("preemption") or {}, report.get("checkpoint") or {}
    return {
        "versions": {"conserve": report.get("version"), "vllm": vllm_version},
        "policy": report.get("policy"),
        "runner": runner(log),
        "identity": report.get("identity"),
        "latency_model": report.get("latency_model"),
        "alone": report.get("alone"),
        "preemption": {name: preemption.get(name) for name in PREEMPTION},
        "checkpoint": {name: checkpoint.get(name) for name in CHECKPOINT},
        **{name: report.get(name) for name in COUNTS},
    }


def runner(log: str) -> str | None:
    """vLLM's model runner by the engine's log; None if the log is empty."""
    if not log:
        return None
    return "V2" if V2_LINE in log else "V1"


def notable(log: str) -> list[str]:
    """Lines that say which parts vLLM chose, each once."""
    lines = [re.sub(r"^.*?\[", "[", line)[:240] for line in log.splitlines()
             if NOTABLE.search(line) and not line.startswith(("$ ", "{"))]  # fmt: skip
    return list(dict.fromkeys(lines))[:LINES]


def counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of `preemption` between two reports, and the reaction times by then."""
    first, last = before.get("preemption") or {}, after.get("preemption") or {}
    counts = {
        name: last[name] - first[name]
        for name in PREEMPTION
        if isinstance(last.get(name), int | float) and not isinstance(last[name], bool) and name in first
    }
    return {**counts, "rows_go_on": last.get("rows_go_on"), "reaction_ms": last.get("reaction_ms")}


def reading(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Throughput of rows between two reports, and the copies of their KV."""

    def more(part: str | None, name: str) -> float:
        first, last = (before.get(part) or {}, after.get(part) or {}) if part else (before, after)
        return float((last.get(name) or 0) - (first.get(name) or 0))

    to_host_ms = ((after.get("checkpoint") or {}).get("block_ms") or {}).get("to_host") or 0.0
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(more("offline", "tokens") / seconds, 1),
        "work_per_s": round(more("offline", "work") / seconds, 1),
        "iterations_per_s": round(more(None, "iterations") / seconds, 2),
        "busy": round(more(None, "busy_s") / seconds, 4),
        "tokens_saved_per_s": round(more("checkpoint", "tokens_saved") / seconds, 1),
        "copying": round(more("checkpoint", "blocks_saved") * to_host_ms / 1000 / seconds, 4),
    }


def compared(readings: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Median throughput of each setting in tokens and in work, and its ratio to the first setting's.

    Work weighs a token by its cost, so a reading depends less on its mix of prompts and answers.
    """
    found: dict[str, Any] = {}
    for unit in ("tokens", "work"):
        medians = {name: median(one[f"{unit}_per_s"] for one in of) for name, of in readings.items() if of}
        first = next(iter(medians.values()), 0.0)
        ratios = {name: round(value / first, 4) for name, value in medians.items()} if first else {}
        found |= {f"{unit}_per_s": medians, f"{unit}_ratio": ratios}
    return found


def hidden(copy_ms: float, products_ms: float, both_ms: float) -> float:
    """Share of the shorter of two works that ran beside the other: 1 if both take no longer than the longer one."""
    shorter = min(copy_ms, products_ms)
    return round(max(0.0, min(1.0, (copy_ms + products_ms - both_ms) / shorter)), 3) if shorter > 0 else 0.0
