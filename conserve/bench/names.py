"""Names of the compared policies, and what a server has to be told for each. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from msgspec import UNSET

from conserve.names import (
    CONSERVE,
    DEFAULT_HARM,
    HYGEN,
    HYGEN_STAR,
    NON_PREEMPTIVE,
    OFF,
    ON,
    ONLINE_ONLY,
    PRIORITY,
    SARATHI_PP,
)
from conserve.regime_change import RegimeChange

SARATHI_P = "sarathi-p"
DISTSERVE_P = "distserve-p"  # on several engines at once, which are simulated
PLUGGED = "planned"  # variant of a stock policy: its counterpart under our scheduler plug-in
ONLINE_ONLY_PLANNED, NON_PREEMPTIVE_PLANNED = f"{ONLINE_ONLY}/{PLUGGED}", f"{NON_PREEMPTIVE}/{PLUGGED}"
STOCK = (ONLINE_ONLY, NON_PREEMPTIVE, SARATHI_P)  # each on a stock vLLM server of its own
HYGENS = (SARATHI_PP, HYGEN_STAR, HYGEN)
TUNED = (SARATHI_P, HYGEN_STAR, HYGEN)  # each has a parameter that its authors tune to the workload
USUAL = (CONSERVE, ONLINE_ONLY, NON_PREEMPTIVE, SARATHI_P)
ALL = (*USUAL, *HYGENS)
ON_ONE_SERVER = (CONSERVE, ONLINE_ONLY, NON_PREEMPTIVE, PRIORITY)  # of `--endpoint`, where two are `PLUGGED`
RECOMPUTE = "recompute"
HARM, HARM_PERCENT = "harm", round(100 * DEFAULT_HARM)  # `conserve/harm` promises the default

PROMISED = {"harm": "harm", "ttft_ms": "ttft_slo_ms", "tbt_ms": "tbt_slo_ms"}  # entry of the section for each

MECHANISMS = {
    "scheduler": "iterations are planned by the SLO; without it, rows fill the token budget behind live requests",
    "preemption": "rows leave an iteration when a live request arrives",
    "checkpoints": "KV of rows is copied to host memory",
    "order": "rows with equal beginnings run together; without it, the oldest row runs first",
    "batching": "iterations without live requests use the engine's full size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Settings of the plug-in's server under a policy. None leaves a setting as it is by default."""

    policy: str
    preemption: str | None = None
    checkpoint: bool = False
    ordered: bool = True
    full_batches: bool = True
    harm: float | None = None  # promised instead of the SLO


def regime_of(name: str) -> Regime:
    """Settings of a policy's name: `conserve`, `conserve/never`, `conserve/-order-batching`, `conserve/harm-25`."""
    policy, _, variant = name.partition("/")
    if policy in HYGENS:
        return Regime(policy=policy, preemption=OFF)
    if policy != CONSERVE:
        return Regime(policy=policy)
    if (harm := harm_of(variant)) is not None:
        return Regime(policy=policy, checkpoint=True, harm=harm)
    without = arms_of(variant)
    if without is None:
        own = variant.replace(RECOMPUTE, "") or None
        return Regime(policy=policy, preemption=own, checkpoint=variant != RECOMPUTE)
    return Regime(
        policy=SARATHI_PP if "scheduler" in without else policy,
        preemption=OFF if "preemption" in without else None,
        checkpoint="checkpoints" not in without,
        ordered="order" not in without,
        full_batches="batching" not in without,
    )


def arms_of(variant: str) -> Sequence[str] | None:
    """Mechanisms that a variant like `-order-batching` goes without; None for another kind of variant."""
    found = variant.split("-")
    known = found[0] == "" and len(found) > 1 and all(name in MECHANISMS for name in found[1:])
    return found[1:] if known else None


def harm_of(variant: str) -> float | None:
    """Share that `harm` or `harm-25` promises; None for another kind of variant."""
    kind, dash, percent = variant.partition("-")
    if kind != HARM or (dash and not (percent.isdigit() and int(percent))):
        return None
    return int(percent or HARM_PERCENT) / 100


def arms(mechanisms: Sequence[str]) -> list[str]:
    """Names of `conserve` with each subset of these mechanisms off, the whole of it first."""
    subsets = [off for size in range(len(mechanisms) + 1) for off in combinations(mechanisms, size)]
    return [CONSERVE + ("/" + "".join(f"-{name}" for name in off) if off else "") for off in subsets]


def alone_of(policies: Sequence[str]) -> str | None:
    """Name of the policy that runs live requests alone, by whose latencies others are judged; None without one."""
    return next((name for name in (ONLINE_ONLY, ONLINE_ONLY_PLANNED) if name in policies), None)


def most_of(policies: Sequence[str]) -> str | None:
    """Name of the policy whose offline throughput is the yardstick; None without one."""
    return next((name for name in (NON_PREEMPTIVE, NON_PREEMPTIVE_PLANNED) if name in policies), None)


def runs_offline(name: str) -> bool:
    """True if offline rows run under this policy."""
    return name.partition("/")[0] != ONLINE_ONLY


def is_stock(name: str) -> bool:
    """True if the policy runs on a stock vLLM server of its own."""
    return name in STOCK


def wanted(regime: Regime, preemption: str) -> RegimeChange:
    """Change of a running server to this regime; `preemption` is the default one."""
    return RegimeChange(
        policy=regime.policy,
        preemption=regime.preemption or preemption,
        checkpoint=ON if regime.checkpoint else OFF,
        batching=ON if regime.full_batches else OFF,
        slo=UNSET if regime.harm is None else {"harm": regime.harm},
    )


def promise_flags(promises: Mapping[str, float]) -> str:
    """Promises, which are `harm` or `ttft_ms` and `tbt_ms`, as flags of `conserve serve`."""
    if "harm" in promises:
        return f"--harm {100 * promises['harm']:g}%"
    return f"--ttft-slo {promises['ttft_ms']:.0f}ms --tbt-slo {promises['tbt_ms']:.1f}ms"


def promise_entries(promises: Mapping[str, float]) -> dict[str, Any]:
    """Promises, which are `harm` or `ttft_ms` and `tbt_ms`, as entries of the engine's section."""
    return {PROMISED[name]: value for name, value in promises.items()}
