"""Policies of `conserve bench`: the names on its command line, and the engine that they need."""

from collections.abc import Sequence

from conserve.bench.names import (
    ALL,
    DISTSERVE_P,
    HARM,
    HYGENS,
    MECHANISMS,
    NON_PREEMPTIVE_PLANNED,
    ON_ONE_SERVER,
    ONLINE_ONLY_PLANNED,
    RECOMPUTE,
    SARATHI_P,
    USUAL,
    arms,
    arms_of,
    harm_of,
    regime_of,
)
from conserve.config import Settings
from conserve.engine.policy.policies import BENCHED
from conserve.engine.policy.preemption import LEAVE_RULES
from conserve.engine.section import EngineSection
from conserve.errors import SettingsError
from conserve.names import CONSERVE, NON_PREEMPTIVE, OFF, ONLINE_ONLY, PRIORITY

KNOWN = (*ALL, DISTSERVE_P, ONLINE_ONLY_PLANNED, NON_PREEMPTIVE_PLANNED, PRIORITY)
VARIANTS = (*LEAVE_RULES, OFF, RECOMPUTE, HARM)
PLUGGED_IN = {ONLINE_ONLY: ONLINE_ONLY_PLANNED, NON_PREEMPTIVE: NON_PREEMPTIVE_PLANNED}


def which(
    names: str | None,
    mechanisms: str | None = None,
    *,
    preemption: bool = True,
    endpoint: bool = False,
    stock: bool = False,
    simulated: bool = False,
) -> list[str]:
    """Names of the policies to compare, each once; raises `SettingsError`.

    Without preemption `conserve` is `conserve/off`. `mechanisms` are those of `--arms`. On a server that runs
    already, at an `endpoint`, a policy of stock vLLM is its counterpart under the plug-in; with a `stock` server
    beside, `online-only` is itself.
    """
    chosen = named(names, arms_too=mechanisms is not None, endpoint=endpoint)
    if mechanisms is not None:
        chosen = [*(name for name in chosen if name != CONSERVE), *product(mechanisms)]
    for name in chosen:
        require_known(name)
    if DISTSERVE_P in chosen and not simulated:
        raise SettingsError(
            f"{DISTSERVE_P} has several engines at once, which are simulated; compare it with: conserve bench "
            f"--sweep quick --simulated --policies {CONSERVE},{ONLINE_ONLY},{NON_PREEMPTIVE},{DISTSERVE_P}"
        )
    if endpoint and SARATHI_P in chosen:
        raise SettingsError(
            f"{SARATHI_P} runs on a stock server of its own; leave --endpoint out, or compare {PRIORITY}, which is "
            "vLLM's priority scheduling under the plug-in"
        )
    if stock and not endpoint:
        raise SettingsError("--stock-endpoint goes with --endpoint: name the server that has our plug-in too")
    if stock and ONLINE_ONLY not in chosen:
        raise SettingsError(
            f"--stock-endpoint is for {ONLINE_ONLY}; add it to --policies, or leave the server out"
        )
    if endpoint:
        chosen = [name if stock and name == ONLINE_ONLY else PLUGGED_IN.get(name, name) for name in chosen]
    chosen = [f"{CONSERVE}/{OFF}" if name == CONSERVE and not preemption else name for name in chosen]
    return list(dict.fromkeys(chosen))


def named(names: str | None, *, arms_too: bool, endpoint: bool) -> list[str]:
    """Names as the command line gives them, or the default ones."""
    if names is None:
        alone = [CONSERVE, ONLINE_ONLY]
        return alone if arms_too else list(ON_ONE_SERVER if endpoint else USUAL)
    if names == "all":
        return [*ON_ONE_SERVER, *HYGENS] if endpoint else list(ALL)
    return [name.strip() for name in names.split(",")]


def product(mechanisms: str) -> list[str]:
    """Names of `conserve` with every subset of these mechanisms off; raises `SettingsError`."""
    given = list(dict.fromkeys(name.strip() for name in mechanisms.split(",")))
    for name in given:
        if name not in MECHANISMS:
            raise SettingsError(
                f"there is no mechanism {name!r}; --arms takes some of {', '.join(MECHANISMS)}"
            )
    return arms(given)


def require_known(name: str) -> None:
    """Raise `SettingsError` for a name that no policy has."""
    policy, slash, variant = name.partition("/")
    if name in (*KNOWN, *BENCHED) or (
        policy == CONSERVE and slash and (variant in VARIANTS or arms_of(variant) or harm_of(variant))
    ):
        return
    if policy == CONSERVE:
        variants = ", ".join(f"{CONSERVE}/{known}" for known in VARIANTS)
        off = "-".join(("", *MECHANISMS))
        raise SettingsError(
            f"there is no {name!r}; there are {variants}, {CONSERVE}/{HARM}-25 with any percentage, and "
            f"{CONSERVE}/{off} with some of these"
        )
    raise SettingsError(f"there is no policy {name!r}; give all, or some of {', '.join(KNOWN)}")


def is_ours(name: str) -> bool:
    """True for a variant of ConServe's own policy."""
    return name.partition("/")[0] == CONSERVE


def rows_leave(policies: Sequence[str]) -> bool:
    """True if the engine needs ConServe's worker and no asynchronous scheduling, as preemption does."""
    return any(is_ours(name) and regime_of(name).preemption != OFF for name in policies)


def section(settings: Settings, policies: Sequence[str]) -> EngineSection:
    """Settings of the engine: no offline work at first, and control by each block."""
    return EngineSection(
        policy=ONLINE_ONLY,
        profiles=str(settings.profiles_folder),
        control=True,
        preemption=None if rows_leave(policies) else OFF,
    )
