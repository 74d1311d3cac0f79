"""Data parallel engines behind one front end (`--data-parallel-size`): all are asked, and one report says it all.

Counts are added. A latency, a promise and an attainment are those of the worst engine, since no engine knows the
latencies of another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from conserve.engine.policy.promises import LATENCIES
from conserve.engine.runtime.class_traffic import yielding
from conserve.engine.runtime.histogram import together as all_latencies

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Report = Mapping[str, Any]
SINCE_THE_START = ("iterations", "planned", "overruns", "standstills", "busy_s")
IN_COMMON = ("share", "most_age_s")
SCALES = ("largest_slo_scale", "slo_scale")


def number_of_engines(engine_client: AsyncLLM) -> int:
    """Engines behind this front end."""
    return len(engine_client.engine_core.core_engines)


def most_requests(engine_client: AsyncLLM) -> int:
    """Requests that the batches of all engines hold together."""
    each: int = engine_client.vllm_config.scheduler_config.max_num_seqs
    return number_of_engines(engine_client) * each


async def ask_engines(engine_client: AsyncLLM, method: str, *arguments: Any) -> list[Any]:
    """Every engine's answer to a utility call; vLLM's own `call_utility_async` gives the first engine's alone."""
    client = engine_client.engine_core
    asked = (client._call_utility_async(method, *arguments, engine=one) for one in client.core_engines)
    return list(await asyncio.gather(*asked))


def together(reports: Sequence[Report]) -> dict[str, Any]:
    """One report of all engines. What is no count, such as the latency model, is the slowest engine's.

    An engine without a latency model counts as the slowest, so there is a model only once all engines have one.
    """
    if len(reports) == 1:
        return dict(reports[0])
    slowest = max(reports, key=alone_ms)
    said = {
        **slowest,
        **{name: sum(values(reports, name)) for name in SINCE_THE_START},
        "refused_plans": refusals(values(reports, "refused_plans")),
        "online": live(values(reports, "online")),
        "offline": {**slowest["offline"], **added(values(reports, "offline"))},
        "harm": harm(values(reports, "harm")),
        "pushing": pushing(values(reports, "pushing")),
        "live_prefixes": prefixes(values(reports, "live_prefixes")),
        "preemption": preemption(values(reports, "preemption")),
        "checkpoint": checkpoint(values(reports, "checkpoint")),
    }
    if "classes" in slowest:
        said["classes"] = {
            name: {"slo": one["slo"], **live([report["classes"][name] for report in reports])}
            for name, one in slowest["classes"].items()
        }
    return said


def alone_ms(report: Report) -> float:
    """TTFT of a short request on an idle engine, in ms; infinite without a latency model."""
    alone = report["alone"]
    return inf if alone is None else float(alone["ttft_ms"])


def live(sections: Sequence[Report]) -> dict[str, Any]:
    """Figures of live requests: the worst engine's latencies, and the histograms of all."""
    return {
        "requests": sum(values(sections, "requests")),
        **{name: worst(values(sections, name)) for name in LATENCIES},
        "attainment": min(values(sections, "attainment")),
        **yielding(sections),
        "way_ms": sections[0]["way_ms"],  # of the API server
        "promises": {
            name: {
                promise: kept([one["promises"][name][promise] for one in sections])
                for promise in sections[0]["promises"][name]
            }
            for name in LATENCIES
        },
        "counts": {name: added([one["counts"][name] for one in sections]) for name in LATENCIES},
        "histograms": {
            name: all_latencies([one["histograms"][name] for one in sections]) for name in LATENCIES
        },
    }


def kept(promises: Sequence[Report]) -> dict[str, Any]:
    """A promise, kept if every engine keeps it, beside the longest latency of the engines."""
    return {
        "promised_ms": promises[0]["promised_ms"],
        "seen_ms": largest(values(promises, "seen_ms")),
        "kept": all(values(promises, "kept")),
    }


def harm(sections: Sequence[Report]) -> dict[str, Any]:
    """Pauses and comparisons of all engines, and the latencies of the engine that compared most."""
    most = max(sections, key=lambda one: (one["compared"], one["pauses"]))
    return {**most, **{name: sum(values(sections, name)) for name in ("pauses", "compared")}}


def pushing(sections: Sequence[Report]) -> dict[str, Any]:
    """Rows and tokens of all engines, and the largest scale."""
    return {**added(sections), **{name: largest(values(sections, name)) for name in SCALES}}


def prefixes(sections: Sequence[Report]) -> dict[str, Any]:
    """Blocks and tokens of all engines; the share and the age that they have in common are the largest."""
    return {**added(sections), **{name: largest(values(sections, name)) for name in IN_COMMON}}


def preemption(sections: Sequence[Report]) -> dict[str, Any]:
    """Counts of all engines; rows stay if they stay on one engine, for its reason."""
    stays = next((one for one in sections if one["why_off"]), sections[0])
    return {
        **stays,
        **added(sections),
        "rows_go_on": all(values(sections, "rows_go_on")),
        "reaction_ms": worst(values(sections, "reaction_ms")),
    }


def checkpoint(sections: Sequence[Report]) -> dict[str, Any]:
    """Counts of all engines, and their host memory together."""
    off = next((one for one in sections if one["why_off"]), sections[0])
    return {
        **off,
        **added(sections),
        "refused_choices": refusals(values(sections, "refused_choices")),
    }


def refusals(sections: Sequence[Report]) -> dict[str, Any]:
    """Refusals of all engines, each reason once."""
    reasons = dict.fromkeys(reason for one in sections for reason in one["reasons"])
    return {"count": sum(values(sections, "count")), "reasons": [*reasons]}


def added(sections: Sequence[Report]) -> dict[str, Any]:
    """Sums of the numbers in these sections; what is no number is left out."""
    return {
        name: sum(one.get(name, 0) for one in sections)
        for name, value in sections[0].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def worst(latencies: Sequence[Report]) -> dict[str, float | None]:
    """The longest latency of each name; None where no engine has one."""
    return {name: largest(values(latencies, name)) for name in latencies[0]}


def largest(figures: Iterable[float | None]) -> float | None:
    """The largest figure; None if there is none."""
    return max((one for one in figures if one is not None), default=None)


def values(reports: Sequence[Report], name: str) -> list[Any]:
    """List what each engine says under this name."""
    return [one[name] for one in reports]
