"""Flags of `conserve bench`, checked: policies, SLO and design of the comparison."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conserve.cli.serve_flags import milliseconds
from conserve.config import Settings
from conserve.engine.policy.policies import CONSERVE, SERVING
from conserve.engine.policy.preemption import LEAVE_RULES, OFF
from conserve.errors import SettingsError

if TYPE_CHECKING:
    from conserve.bench.compare import Design
    from conserve.bench.measure import LatencyLimits
    from conserve.bench.presets import Preset

RECOMPUTE = "recompute"  # what the engine's memory loses
VARIANTS = (*LEAVE_RULES, OFF, RECOMPUTE)


def resized(preset: "Preset", rounds: int | None, block_s: float | None, offline: str | None) -> "Preset":
    """Preset with the values that the command line gives."""
    said = {
        "rounds": rounds,
        "block_s": block_s,
        "offline_lengths": lengths(offline) if offline is not None else None,
    }
    return replace(preset, **{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]


def lengths(text: str) -> tuple[int, int]:
    """Tokens of an offline row's prompt and of its answer."""
    found = [int(part) for part in text.split(",") if part.isdecimal() and int(part)]
    if len(found) != 2 or text.count(",") != 1:
        raise SettingsError(f"--offline takes two whole numbers of tokens, IN,OUT, not {text!r}")
    return found[0], found[1]


def which(names: str, *, preemption: bool = True) -> list[str]:
    """Names of the policies to compare; without preemption `conserve` is `conserve/off`."""
    chosen = list(SERVING) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        policy, slash, variant = name.partition("/")
        if policy not in SERVING:
            raise SettingsError(f"there is no policy {name!r}; give all, or some of {', '.join(SERVING)}")
        if slash and (policy != CONSERVE or variant not in VARIANTS):
            variants = ", ".join(f"{CONSERVE}/{known}" for known in VARIANTS)
            raise SettingsError(f"there is no {name!r}; there are {variants}")
    return [f"{CONSERVE}/{OFF}" if name == CONSERVE and not preemption else name for name in chosen]


def preempts(policies: Sequence[str]) -> bool:
    """True if the engine needs ConServe's worker and no asynchronous scheduling, as preemption does."""
    return any(name.partition("/")[0] == CONSERVE and name != f"{CONSERVE}/{OFF}" for name in policies)


def section(settings: Settings, policies: Sequence[str]) -> dict[str, Any]:
    """Section `conserve` of the engine's configuration: no offline work at first, and control by each block."""
    from conserve.bench.measure import ONLINE_ONLY

    preemption = {} if preempts(policies) else {"preemption": OFF}
    profiles = str(settings.profiles_folder)
    return {"policy": ONLINE_ONLY, "profile": None, "profiles": profiles, "control": True, **preemption}


def limits(ttft_slo: str | None, tbt_slo: str | None) -> "LatencyLimits | None":
    """SLO of the flags, if they give one."""
    from conserve.bench.measure import LatencyLimits

    if (ttft_slo is None) != (tbt_slo is None):
        raise SettingsError("give --ttft-slo and --tbt-slo together, or neither for online-only's P99s")
    ttft_ms, tbt_ms = milliseconds("--ttft-slo", ttft_slo), milliseconds("--tbt-slo", tbt_slo)
    return LatencyLimits(ttft_ms, tbt_ms) if ttft_ms is not None and tbt_ms is not None else None


def make_design(
    preset: "Preset", policies: list[str], slo: "LatencyLimits | None", slo_scale: float, seed: int
) -> "Design":
    """Design of the comparison, from the flags."""
    from conserve.bench.compare import Design
    from conserve.bench.measure import ONLINE_ONLY
    from conserve.engine.vllm.settings import PREEMPTION

    if slo_scale <= 0:
        raise SettingsError(f"--slo-scale {slo_scale:g} is no SLO; give a number above 0")
    if slo is None and ONLINE_ONLY not in policies:
        raise SettingsError(
            f"without {ONLINE_ONLY} there is no SLO; add it to --policies, or give --ttft-slo and --tbt-slo"
        )
    return Design(
        policies=policies,
        rounds=preset.rounds,
        block_s=preset.block_s,
        slo=slo,
        slo_scale=slo_scale,
        seed=seed,
        preemption=PREEMPTION,
        load_cores=preset.other_cores,
    )
