"""Settings and known times of an engine in vLLM's configuration, which brings them to the engine core's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conserve.engine.known_times import KnownTimes
from conserve.engine.policy.promises import Promises
from conserve.engine.section import AUTO, EngineSection, require_policy
from conserve.engine.vllm.model.profile_key import key_of
from conserve.errors import SettingsError
from conserve.names import OFF
from conserve.profiles.book import Book

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROFILE_COMMAND = "conserve profile --served MODEL FLAGS"
# Entries of vLLM's additional_config: what a user may write, and what `install` adds.
SECTION, INSTALLED = "conserve", "conserve_installed"
SCHEDULER = "conserve.vllm.Scheduler"
CONNECTOR = "CheckpointConnector"
CONNECTOR_MODULE = "conserve.vllm"
# Where KV comes from others, vLLM lets every client send embeddings of images, and frees blocks an iteration later.
CONNECTOR_ROLE = "kv_producer"
WORKER = "conserve.vllm.Worker"
VLLMS_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSettings:
    """Settings that a command asks for, and how it finds the times of the engine's iterations."""

    section: EngineSection
    command: str = PROFILE_COMMAND  # that makes a missing profile
    keep_correction: bool = True  # start with the correction learned earlier

    def install(self, config: VllmConfig) -> None:
        """Write the settings into an engine's configuration; raises `ProfileError` and `SettingsError`."""
        require_possible(config, self.section)
        config.scheduler_config.scheduler_cls = SCHEDULER
        if self.section.leave_rule != OFF and config.parallel_config.worker_cls in VLLMS_WORKERS:
            config.parallel_config.worker_cls = WORKER
        ours = entries(self.section, self.times(config), command=self.command)
        config.additional_config = {**config.additional_config, **ours}

    def times(self, config: VllmConfig) -> KnownTimes | None:
        """Times of the profile that is asked for; None if they are to be learned. Raises `ProfileError`."""
        if self.section.profile == AUTO:
            return None
        key, book = key_of(config), Book(self.section.profiles_folder)
        if self.section.profile is None:
            found = book.find(key, command=self.command)
        else:
            found = book.named(self.section.profile)
            found.require(key, command=self.command)
        correction = book.correction_path(found.name, key)
        return KnownTimes.of_profile(found, correction, keep_correction=self.keep_correction)


def entries(
    section: EngineSection, times: KnownTimes | None, *, command: str = PROFILE_COMMAND
) -> dict[str, Any]:
    """Entries of vLLM's additional_config; without times the engine learns them in its warm-up."""
    installed = {"command": command, "times": times.document() if times is not None else None}
    return {SECTION: section.document(), INSTALLED: installed}


def section_of(config: VllmConfig) -> EngineSection:
    """The section that `install`, or a user of `vllm serve`, wrote; raises `SettingsError`."""
    return EngineSection.of(config.additional_config.get(SECTION, {}))


def command_of(config: VllmConfig) -> str:
    """The command that makes a missing profile."""
    command: str = config.additional_config.get(INSTALLED, {}).get("command", PROFILE_COMMAND)
    return command


def installed_times(config: VllmConfig) -> KnownTimes | None:
    """The times that `install` wrote; None if there are none, or the section is a user's of `vllm serve`."""
    times = config.additional_config.get(INSTALLED, {}).get("times")
    return KnownTimes(**times) if times is not None else None


def settings_of(config: VllmConfig) -> tuple[EngineSection, KnownTimes | None]:
    """Settings and times that the engine core starts with; raises `ProfileError` and `SettingsError`."""
    section = section_of(config)
    require_possible(config, section)
    if INSTALLED in config.additional_config:
        return section, installed_times(config)
    require_policy(section.policy)
    return section, RequestedSettings(section=section).times(config)


def require_possible(config: VllmConfig, section: EngineSection) -> None:
    """Raise `SettingsError` if ConServe cannot schedule the model, or not keep the promises on it."""
    require_decoder(config)
    require_chunks(config, [section.promises, *section.class_promises.values()])


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
