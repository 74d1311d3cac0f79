"""Policy, SLO and latency profile of an engine, and how they reach the engine core's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from conserve.config import default_home
from conserve.engine.policy.classes import LiveClasses
from conserve.engine.policy.policies import named, traits
from conserve.engine.policy.preemption import LEAVE_RULES
from conserve.engine.policy.promises import HARMS, Promises
from conserve.engine.runtime.pushing import LARGEST_SCALE, NEVER
from conserve.engine.runtime.receipt import LARGEST_SHARE, SHARE
from conserve.engine.vllm.model.profile_key import key_of
from conserve.errors import SettingsError
from conserve.names import CONSERVE, OFF, PACED, PROMPT
from conserve.profiles.book import Book
from conserve.profiles.correction import CorrectedModel, Correction
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.margin import Residual
from conserve.profiles.profile import MODELS, KVCopy, Profile
from conserve.profiles.refit import FittedReach

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WARM_UP = "warm-up"
AUTO = "auto"  # no profile: learn a latency model from the warm-up
PROFILE_COMMAND = "conserve profile --served MODEL FLAGS"
SECTION = "conserve"  # our section of vLLM's additional_config
SCHEDULER = "conserve.vllm.Scheduler"
CONNECTOR = "CheckpointConnector"
CONNECTOR_MODULE = "conserve.vllm"
# Where KV comes from others, vLLM lets every client send embeddings of images, and frees blocks an iteration later.
CONNECTOR_ROLE = "kv_producer"
WORKER = "conserve.vllm.Worker"
VLLMS_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")
LIVE_PREFIXES, MOST_PREFIXES = 0.5, 0.9  # share of the KV blocks left to live requests: usual, at most
RECORDED = ("record_views", "record_arrivals")  # files of the section
# Keys that a user may write into the section.
WRITTEN = (
    "policy",
    "ttft_slo_ms",
    "tbt_slo_ms",
    "harm",
    "receipt",
    "push_slo_scale",
    "live_prefixes",
    "profile",
    "profiles",
    "control",
    "preemption",
    "safepoint_every",
    "record_views",
    "classes",
    "record_arrivals",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSettings:
    """Policy, SLO and profile that the user asked for (a file, `AUTO`, or None for the engine's own profile)."""

    folder: Path  # folder of profiles
    command: str  # command that makes a missing profile
    policy: str = PACED
    promises: Promises = field(default_factory=Promises)
    # The promises are not the user's: an engine without a latency model starts with them.
    by_default: bool = False
    receipt: float = 0.0  # share of the time in which offline work pauses, to measure its harm
    push_slo_scale: float = NEVER  # largest scale of the SLO that rows of urgent jobs may use
    live_prefixes: float = LIVE_PREFIXES  # share of the KV blocks that rows leave to live ones at most
    profile: str | None = None
    keep_correction: bool = True  # start with the correction learned earlier
    control: bool = False  # True: policy and SLO may be changed over HTTP
    preemption: str = OFF
    safepoint_every: int | None = None  # layers; None for as many as the reaction time allows
    record_views: str | None = None  # file that views and plans are written to
    classes: LiveClasses = field(default_factory=LiveClasses)  # without the default one's promises
    record_arrivals: str | None = None  # file that times and lengths of live requests are written to

    def install(self, config: VllmConfig) -> None:
        """Write the settings into an engine's configuration; raises `ProfileError` and `SettingsError`."""
        scheduler = config.scheduler_config
        require_decoder(config)
        require_chunks(config, [self.promises, *(one.promises for one in self.classes.named.values())])
        scheduler.scheduler_cls = SCHEDULER
        if self.preemption != OFF and config.parallel_config.worker_cls in VLLMS_WORKERS:
            config.parallel_config.worker_cls = WORKER
        section = {
            "policy": self.policy,
            "ttft_slo_ms": dict(self.promises.ttft_ms) or None,
            "tbt_slo_ms": dict(self.promises.tbt_ms) or None,
            **{name: getattr(self.promises, name) for name in HARMS},
            "by_default": self.by_default,
            "receipt": self.receipt,
            "push_slo_scale": self.push_slo_scale,
            "live_prefixes": self.live_prefixes,
            "control": self.control,
            "preemption": self.preemption,
            "safepoint_every": self.safepoint_every,
            "record_views": self.record_views,
            "classes": {name: one.document() for name, one in self.classes.named.items()},
            "record_arrivals": self.record_arrivals,
            "command": self.command,
            **self.source(config),
        }
        config.additional_config = {**config.additional_config, SECTION: section}

    def source(self, config: VllmConfig) -> dict[str, Any]:
        """The latency model as entries of the section; raises `ProfileError`."""
        if self.profile == AUTO:
            return {"model": None}
        key, book = key_of(config), Book(self.folder)
        if self.profile is None:
            found = book.find(key, command=self.command)
        else:
            found = book.named(self.profile)
            found.require(key, command=self.command)
        return {
            "model": found.best,
            "coefficients": found.models[found.best].coefficients,
            "residuals": found.models[found.best].residuals,
            "hygen": hygen.coefficients if (hygen := found.models.get(HyGenModel.name)) else None,
            "reach": reach_of(found),
            "of": found.stamp,
            "profile_name": found.name,
            "block_ms": block_ms(found.kv_copies),
            "correction": str(book.correction_path(found.name, key)),
            "keep_correction": self.keep_correction,
        }


@dataclass(slots=True, kw_only=True)
class EngineSettings:
    """Settings that the engine core runs with."""

    policy: str
    promises: Promises
    receipt: float
    model: CorrectedModel | None  # None until the warm-up is over
    source: str = WARM_UP  # of the model
    correction_file: Path | None = None
    preemption: str = OFF
    safepoint_every: int | None = None
    record_views: Path | None = None  # file that views and plans are written to
    classes: Mapping[str, Promises] = field(default_factory=dict)  # of live traffic, beside the default one
    record_arrivals: Path | None = None  # file that times and lengths of live requests are written to
    hygen: HyGenModel | None = None  # HyGen's predictor, of the same profile
    push_slo_scale: float = NEVER  # largest scale of the SLO that rows of urgent jobs may use
    live_prefixes: float = LIVE_PREFIXES  # share of the KV blocks that rows leave to live ones at most

    @classmethod
    def read(cls, config: VllmConfig) -> Self:
        """Read the settings that `install`, or a user of `vllm serve`, wrote into the configuration."""
        section = dict(config.additional_config.get(SECTION, {}))
        promises, receipt = promises_of(section), section.get("receipt", 0.0)
        if "model" not in section:
            asked = written(section)
            promises, receipt = asked.promises, asked.receipt
            section |= asked.source(config)
        classes = {name: one.promises for name, one in classes_of(section).named.items()}
        require_decoder(config)
        require_chunks(config, [promises, *classes.values()])
        policy = section.get("policy", CONSERVE)
        views, arrivals = (Path(section[name]) if section.get(name) else None for name in RECORDED)
        common: dict[str, Any] = {
            "policy": policy,
            "promises": promises,
            "receipt": receipt,
            "preemption": section.get("preemption", OFF if traits(policy).treats_alike else PROMPT),
            "safepoint_every": section.get("safepoint_every"),
            "record_views": views,
            "record_arrivals": arrivals,
            "classes": classes,
            "push_slo_scale": push_scale_of(section),
            "live_prefixes": live_prefixes_of(section),
        }
        if section["model"] is None:
            return cls(**common, model=None)
        file = Path(section["correction"])
        model = MODELS[section["model"]](section["coefficients"])
        earlier = Correction.load(file, of=section["of"]) if section["keep_correction"] else None
        correction = earlier or Correction(of=section["of"])
        residuals = map(Residual._make, section["residuals"])
        reach = FittedReach(*section["reach"]) if section.get("reach") else None
        return cls(
            **common,
            model=CorrectedModel(model, residuals, correction=correction, reach=reach),
            source=f"profile {section['profile_name']}" if section.get("profile_name") else "profile",
            correction_file=file,
            hygen=HyGenModel(section["hygen"]) if section.get("hygen") else None,
        )


def require_decoder(config: VllmConfig) -> None:
    """Raise `SettingsError` for a diffusion model, for which vLLM has schedulers of its own."""
    if vars(config.model_config.hf_config).get("canvas_length") is not None:  # by which vLLM knows them
        raise SettingsError(
            "vLLM schedules a diffusion model by a class of its own, in ConServe's place; start vllm serve with "
            "the model, and feed that: conserve harvest --endpoint URL"
        )


def require_chunks(config: VllmConfig, promised: Sequence[Promises]) -> None:
    """Raise `SettingsError` if a promise wants prompts in chunks and vLLM cuts none.

    A chunk that fits the time of an iteration would never begin: vLLM takes all of a prompt or nothing.
    """
    if config.scheduler_config.enable_chunked_prefill:
        return
    if config.model_config.is_encoder_decoder or config.model_config.runner_type != "generate":
        if any(one.tbt_ms for one in promised):
            raise SettingsError(
                "a TBT limit cuts prompts into chunks, and vLLM cuts none for this model; leave it out"
            )
    elif any(one.any for one in promised):
        raise SettingsError(
            "an SLO or a harm cuts prompts into chunks; leave out --no-enable-chunked-prefill, or promise nothing: "
            "--harm off"
        )


def reach_of(profile: Profile) -> FittedReach | None:
    """The largest batches that the profile's model was fitted to; None if it was fitted to none."""
    known = profile.measured
    return FittedReach(known.tokens, known.requests, known.context) if known is not None else None


def block_ms(copies: Sequence[KVCopy]) -> tuple[float, float] | None:
    """Time of copying one KV block to the host and back, in ms, by the largest copy; None if not measured."""
    most = max(copies, key=lambda copy: copy.blocks, default=None)
    return (most.to_host_ms / most.blocks, most.to_device_ms / most.blocks) if most is not None else None


def promises_of(section: Mapping[str, Any]) -> Promises:
    """The promises in the section; raises `SettingsError`."""
    said = {"ttft_ms": section.get("ttft_slo_ms"), "tbt_ms": section.get("tbt_slo_ms")}
    try:
        return Promises.of({**said, **{name: section.get(name) for name in HARMS}})
    except ValueError as error:
        raise SettingsError(f"additional_config.conserve: {error}") from error


def push_scale_of(section: Mapping[str, Any]) -> float:
    """Largest scale of the SLO for rows of urgent jobs; raises `SettingsError`."""
    scale = section.get("push_slo_scale", NEVER)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not NEVER <= scale <= LARGEST_SCALE:
        raise SettingsError(
            f"additional_config.conserve.push_slo_scale is from {NEVER:g} to {LARGEST_SCALE:g}, not {scale!r}"
        )
    return float(scale)


def live_prefixes_of(section: Mapping[str, Any]) -> float:
    """Share of the KV blocks that rows leave at most for live requests to find; raises `SettingsError`."""
    return share_of(section, "live_prefixes", LIVE_PREFIXES, most=MOST_PREFIXES)


def share_of(section: Mapping[str, Any], key: str, usual: float, *, most: float) -> float:
    """A share in the section, `usual` where there is none; raises `SettingsError` if it is not from 0 to `most`."""
    share = section.get(key, usual)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= most:
        raise SettingsError(
            f"additional_config.conserve.{key} takes a share from 0 to {most:g}, not {share!r}"
        )
    return float(share)


def classes_of(section: Mapping[str, Any]) -> LiveClasses:
    """The classes of live traffic in the section; raises `SettingsError`."""
    said = section.get("classes") or {}
    try:
        if not isinstance(said, Mapping):
            raise ValueError(f"classes are an object by name, not {said!r}")
        return LiveClasses.of(said, promises_of(section))
    except ValueError as error:
        raise SettingsError(f"additional_config.conserve.classes: {error}") from error


def written(section: Mapping[str, Any], command: str = PROFILE_COMMAND) -> RequestedSettings:
    """Settings that a user wrote into `--additional-config '{"conserve": {...}}'`; raises `SettingsError`."""
    unknown = set(section) - set(WRITTEN)
    if unknown:
        raise SettingsError(
            f"additional_config.conserve has {', '.join(sorted(unknown))}; it takes {', '.join(WRITTEN)}"
        )
    promises = promises_of(section)
    by_default = not promises.any and "harm" not in section
    if "harm" not in section:
        promises = promises.with_default_harm()
    usual = 0.0 if section.get("control") else SHARE  # a benchmark is not paused
    receipt = share_of(section, "receipt", usual, most=LARGEST_SHARE)
    policy = section.get("policy", CONSERVE)
    try:
        named(policy)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    preemption = section.get("preemption", PROMPT)
    if preemption not in (*LEAVE_RULES, OFF):
        raise SettingsError(
            f"there is no rule of preemption {preemption!r}; there are {', '.join(LEAVE_RULES)}, {OFF}"
        )
    every = section.get("safepoint_every")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise SettingsError(f"additional_config.conserve.safepoint_every takes layers from 1, not {every!r}")
    for name in RECORDED:
        if section.get(name) is not None and not isinstance(section[name], str):
            raise SettingsError(f"additional_config.conserve.{name} takes a file, not {section[name]!r}")
    return RequestedSettings(
        folder=Path(section.get("profiles") or default_home() / "profiles"),
        command=command,
        policy=policy,
        promises=promises,
        by_default=by_default,
        receipt=receipt,
        profile=section.get("profile"),
        control=bool(section.get("control")),
        preemption=preemption,
        safepoint_every=every,
        push_slo_scale=push_scale_of(section),
        live_prefixes=live_prefixes_of(section),
        record_views=section.get("record_views"),
        record_arrivals=section.get("record_arrivals"),
        classes=classes_of(section),
    )
