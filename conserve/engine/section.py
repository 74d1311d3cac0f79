"""Settings of an engine: the section `conserve` of vLLM's `--additional-config`, as users and commands write it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import UNSET, UnsetType

from conserve.config import default_home
from conserve.engine.policy.classes import LiveClasses
from conserve.engine.policy.policies import named, traits
from conserve.engine.policy.preemption import LEAVE_RULES
from conserve.engine.policy.promises import Promises
from conserve.engine.runtime.pushing import LARGEST_SCALE, NEVER
from conserve.engine.runtime.receipt import LARGEST_SHARE, SHARE
from conserve.errors import SettingsError
from conserve.names import CONSERVE, OFF, PROMPT

PLACE = "additional_config.conserve"
AUTO = "auto"  # no profile: learn a latency model from the warm-up
LIVE_PREFIXES, MOST_PREFIXES = 0.5, 0.9  # share of the KV blocks left to live requests: usual, at most
SHARES = {"receipt": LARGEST_SHARE, "live_prefixes": MOST_PREFIXES}  # the largest of each
RECORDED = ("record_views", "record_arrivals")


class EngineSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Policy, promises and latency profile of an engine, as far as said; the properties have what follows."""

    policy: str = CONSERVE
    ttft_slo_ms: float | dict[str, float] | None = None  # one time, or times by name
    tbt_slo_ms: float | dict[str, float] | None = None
    harm: float | UnsetType | None = UNSET  # None: no harm is promised; unset: the default one
    receipt: float | None = None  # share of the time in which offline work pauses, to measure its harm
    push_slo_scale: float | None = None  # largest scale of the SLO that rows of urgent jobs may use
    live_prefixes: float = LIVE_PREFIXES  # share of the KV blocks that rows leave to live ones at most
    profile: str | None = None  # a file, `AUTO`, or None for the engine's own profile
    profiles: str | None = None  # folder of profiles
    control: bool = False  # True: policy and SLO may be changed over HTTP
    preemption: str | None = None
    safepoint_every: int | None = None  # layers; None for as many as the reaction time allows
    record_views: str | None = None  # file that views and plans are written to
    classes: dict[str, dict[str, Any]] = {}  # of live traffic, beside the default one
    record_arrivals: str | None = None  # file that times and lengths of live requests are written to

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Read a section that a user may have written; raises `SettingsError`.

        A policy of the user's own is not looked for: its module may be elsewhere.
        """
        if not isinstance(said, Mapping):
            raise SettingsError(f"{PLACE} takes an object, not {said!r}")
        if unknown := sorted(said.keys() - set(cls.__struct_fields__)):
            raise SettingsError(
                f"{PLACE} has {', '.join(unknown)}; it takes {', '.join(cls.__struct_fields__)}"
            )
        require_promises(said)
        require_numbers(said)
        require_names(said)
        try:
            return msgspec.convert({**said, "classes": said.get("classes") or {}}, cls)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{PLACE}: {error}") from error

    def document(self) -> dict[str, Any]:
        """The section for JSON, without defaults."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document

    @property
    def asked_harm(self) -> float | None:
        """The harm that the user promised."""
        return None if self.harm is UNSET else self.harm

    @property
    def promises(self) -> Promises:
        """All promises to live requests of the default class."""
        return promised(self.ttft_slo_ms, self.tbt_slo_ms, self.harm)

    @property
    def live_classes(self) -> LiveClasses:
        """The classes of live traffic."""
        return LiveClasses.of(self.classes, self.promises)

    @property
    def class_promises(self) -> dict[str, Promises]:
        """Promises of each of these classes."""
        return {name: one.promises for name, one in self.live_classes.named.items()}

    @property
    def pausing_share(self) -> float:
        """Share of the time in which offline work pauses; a benchmark is not paused."""
        return self.receipt if self.receipt is not None else 0.0 if self.control else SHARE

    @property
    def largest_scale(self) -> float:
        """Largest scale of the SLO for rows of urgent jobs."""
        return NEVER if self.push_slo_scale is None else self.push_slo_scale

    @property
    def leave_rule(self) -> str:
        """The rule by which rows leave iterations, or `OFF`."""
        return self.preemption or (OFF if traits(self.policy).treats_alike else PROMPT)

    @property
    def profiles_folder(self) -> Path:
        """Folder of latency profiles."""
        return Path(self.profiles) if self.profiles else default_home() / "profiles"


def promised(ttft_ms: Any, tbt_ms: Any, harm: Any) -> Promises:
    """Promises of these times, with the default harm where no harm is said; raises ValueError."""
    times = {"ttft_ms": ttft_ms, "tbt_ms": tbt_ms}
    if harm is UNSET:
        return Promises.of(times).with_default_harm()
    return Promises.of({**times, "harm": harm})


def require_promises(said: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for promises and classes that cannot be."""
    try:
        promises = promised(said.get("ttft_slo_ms"), said.get("tbt_slo_ms"), said.get("harm", UNSET))
    except ValueError as error:
        raise SettingsError(f"{PLACE}: {error}") from error
    classes = said.get("classes") or {}
    try:
        if not isinstance(classes, Mapping):
            raise ValueError(f"classes are an object by name, not {classes!r}")
        LiveClasses.of(classes, promises)
    except ValueError as error:
        raise SettingsError(f"{PLACE}.classes: {error}") from error


def require_numbers(said: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for shares, a scale and layers out of their range."""
    for key in SHARES:
        if key in said and not is_within(said[key], 0, SHARES[key]):
            raise SettingsError(f"{PLACE}.{key} takes a share from 0 to {SHARES[key]:g}, not {said[key]!r}")
    scale = said.get("push_slo_scale", NEVER)
    if not is_within(scale, NEVER, LARGEST_SCALE):
        raise SettingsError(f"{PLACE}.push_slo_scale is from {NEVER:g} to {LARGEST_SCALE:g}, not {scale!r}")
    every = said.get("safepoint_every")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise SettingsError(f"{PLACE}.safepoint_every takes layers from 1, not {every!r}")


def is_within(value: Any, least: float, most: float) -> bool:
    """True for a number in this range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def require_names(said: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a policy, a rule of preemption or a file that cannot be."""
    policy = said.get("policy", CONSERVE)
    if not isinstance(policy, str):
        raise SettingsError(f"{PLACE}.policy takes a name, not {policy!r}")
    if "." not in policy:
        require_policy(policy)
    rule = said.get("preemption", PROMPT)
    if rule not in (*LEAVE_RULES, OFF):
        raise SettingsError(
            f"there is no rule of preemption {rule!r}; there are {', '.join(LEAVE_RULES)}, {OFF}"
        )
    for name in RECORDED:
        if said.get(name) is not None and not isinstance(said[name], str):
            raise SettingsError(f"{PLACE}.{name} takes a file, not {said[name]!r}")


def require_policy(name: str) -> None:
    """Raise `SettingsError` if there is no policy of this name, or if one of the user's own cannot be made."""
    try:
        named(name)
    except ValueError as error:
        raise SettingsError(str(error)) from error
