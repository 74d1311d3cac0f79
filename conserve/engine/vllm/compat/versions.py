"""Versions of vLLM: the tried ones, and the differences between their internals, as data."""

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

Minor = tuple[int, int]


class Tried(NamedTuple):
    """A release that tests were run on; docs/reference/modes.md says with which kernels and which Python."""

    release: str
    date: str


TRIED = (
    Tried("0.30.0", "2026-11-28"),
    Tried("0.31.0", "2026-11-28"),
    Tried("0.32.0", "2026-11-25"),
    Tried("0.33.0", "2026-11-28"),
)


def minor_of(version: str) -> Minor:
    """Major and minor number of a version, such as (0, 33) of "0.33.1rc1+cpu"; (0, 0) if it has none."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def spelled(minor: Minor) -> str:
    """A minor version as users write it."""
    return f"{minor[0]}.{minor[1]}"


OLDEST, NEWEST = minor_of(TRIED[0].release), minor_of(TRIED[-1].release)
SUPPORTED = f"{spelled(OLDEST)} to {spelled(NEWEST)}"


class VersionStanding(Enum):
    """Relation of an installed version to the tried ones."""

    OLDER = "older"
    TRIED = "tried"
    NEWER = "newer"


def standing(version: str) -> VersionStanding:
    """Standing of a version; patch releases and builds stand as their minor version does."""
    minor = minor_of(version)
    if minor < OLDEST:
        return VersionStanding.OLDER
    return VersionStanding.TRIED if minor <= NEWEST else VersionStanding.NEWER


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDifference:
    """A name that not every supported version has; `instead` stands in for it in the others.

    What an object has under such a name differs with it: `CacheHitSource` stands for `CacheHitSource.HOST` too.
    """

    name: str  # as in INTERNALS: its name in the newest version
    since: Minor | None = None  # first version with the name; None: the oldest
    until: Minor | None = None  # last version with the name; None: the newest
    instead: str | None = None  # its name in the other versions; None: they have nothing like it

    def has(self, minor: Minor) -> bool:
        """True if this version has the name."""
        return (self.since is None or minor >= self.since) and (self.until is None or minor <= self.until)


DIFFERENCES = (
    # Before 0.31 waiting requests with KV blocks are in one queue with those that were skipped (`vllms_scheduler`).
    VersionDifference(
        name="vllm.v1.core.sched.scheduler.Scheduler.kv_holding_waiting",
        since=(0, 31),
        instead="vllm.v1.core.sched.scheduler.Scheduler.skipped_waiting",
    ),
    VersionDifference(
        name="vllm.v1.core.sched.scheduler.Scheduler._handle_blocked_waiting_request",
        since=(0, 31),
        instead="vllm.v1.core.sched.scheduler.Scheduler._try_promote_blocked_waiting_request",
    ),
    # Before 0.31 no output of a request is lost with its place among the running ones.
    VersionDifference(name="vllm.v1.core.sched.scheduler.Scheduler.aux_output_connector", since=(0, 31)),
    # Before 0.31 processes have the environment's log level: the steps of their start are not told.
    VersionDifference(name="vllm.config.VllmConfig.logging_config", since=(0, 31)),
    VersionDifference(name="vllm.config.LoggingConfig.log_level", since=(0, 31)),
    VersionDifference(name="vllm.logger._last_configured_logging_config", since=(0, 31)),
    # Before 0.31 prompts are not scored for given tokens.
    VersionDifference(
        name="vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker.token_id_scores", since=(0, 31)
    ),
    # Before 0.31 the encoder cache asks a request how many embeddings an input has.
    VersionDifference(
        name="vllm.v1.core.encoder_cache_manager.EncoderCacheManager.num_embeds_by_hash", since=(0, 31)
    ),
    # Before 0.32 neither is counted on: what it refuses for them is taken for a lack of room.
    VersionDifference(name="vllm.v1.core.sched.scheduler.Scheduler.max_num_active_reqs", since=(0, 32)),
    VersionDifference(name="vllm.v1.core.sched.scheduler.Scheduler.pause_state", since=(0, 32)),
    # Before 0.32 hits are not counted by their source.
    VersionDifference(name="vllm.v1.metrics.cache_hit_source.CacheHitSource", since=(0, 32)),
    VersionDifference(
        name="vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1._cache_hit_source",
        since=(0, 32),
    ),
    # Before 0.31 the model's configuration says whether experts are told with answers (`worker.notes_experts`).
    VersionDifference(name="vllm.config.VllmConfig.aux_output_config", since=(0, 31)),
    VersionDifference(
        name="vllm.config.aux_output.AuxOutputConfig.enable_return_routed_experts",
        since=(0, 31),
        instead="vllm.config.ModelConfig.enable_return_routed_experts",
    ),
    # Before 0.33 the connector's output comes with the results.
    VersionDifference(name="vllm.v1.outputs.AsyncModelRunnerOutput.get_kv_connector_output", since=(0, 33)),
    # Before 0.32 the model runner asks the group's builder itself.
    VersionDifference(
        name="vllm.v1.worker.utils.AttentionGroup.build_metadata",
        since=(0, 32),
        instead="vllm.v1.worker.utils.AttentionGroup.get_metadata_builder",
    ),
    VersionDifference(
        name="vllm.entrypoints.common.cli_args.make_arg_parser",
        since=(0, 33),
        instead="vllm.entrypoints.launchers.cli_args.make_arg_parser",
    ),
    VersionDifference(
        name="vllm.entrypoints.common.cli_args.validate_parsed_serve_args",
        since=(0, 33),
        instead="vllm.entrypoints.launchers.cli_args.validate_parsed_serve_args",
    ),
)


def name_in(minor: Minor, name: str) -> str | None:
    """Name of an internal in this version; None if the version has nothing like it."""
    for difference in DIFFERENCES:
        rest = name.removeprefix(difference.name)
        if (rest == name or rest[:1] not in ("", ".")) or difference.has(minor):
            continue
        return difference.instead and difference.instead + rest
    return name


def name_here(name: str) -> str | None:
    """Name of an internal in the installed version; None if it has nothing like it."""
    from conserve.engine.vllm.compat.installed import installed_engine

    engine = installed_engine()
    return name_in(minor_of(engine.version) if engine else NEWEST, name)


@cache
def internal(name: str) -> Any:
    """The internal that the newest version calls `name`, by its name in the installed version; None if it has none.

    Raises `ImportError` if the installed version should have it and does not.
    """
    here = name_here(name)
    return None if here is None else imported(here)


def imported(name: str) -> Any:
    """Import a module, or an attribute of one; raises `ImportError`."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except AttributeError:
        raise ImportError(f"{module} has no {attribute}") from None
