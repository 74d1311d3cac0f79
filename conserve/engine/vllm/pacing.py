"""Which latency profile an engine runs on, and its way into the engine core's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from conserve.engine.vllm.profile_key import key_of
from conserve.errors import SettingsError
from conserve.profiles.book import Book
from conserve.profiles.correction import CorrectedModel, Correction, Residual
from conserve.profiles.profile import MODELS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AUTO = "auto"  # no profile: learn from the warm-up
SECTION = "conserve"  # our part of vLLM's additional_config
SCHEDULERS = {
    False: "conserve.engine.vllm.scheduler.PacedScheduler",
    True: "conserve.engine.vllm.scheduler.PacedAsyncScheduler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """What the user asked for: a profile (a file, `AUTO`, or None for the one with the engine's key)."""

    folder: Path  # of profiles
    command: str  # that makes the missing one
    profile: str | None = None
    tbt_ms: float | None = None  # most that an iteration may take; None to watch and learn only
    keep_correction: bool = True  # begin with what was learned before

    def install(self, config: VllmConfig) -> None:
        """Have the engine that starts with this configuration run on the profile; raises `ProfileError`."""
        scheduler = config.scheduler_config
        if self.tbt_ms is not None and not scheduler.enable_chunked_prefill:
            raise SettingsError("--tbt-ms cuts prompts into chunks; leave out --no-enable-chunked-prefill")
        scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
        section = {**self._source(config), "tbt_ms": self.tbt_ms}
        config.additional_config = {**config.additional_config, SECTION: section}

    def _source(self, config: VllmConfig) -> dict[str, Any]:
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
            "of": found.stamp,
            "correction": str(book.correction_path(found.name, key)),
            "keep_correction": self.keep_correction,
        }


@dataclass(slots=True)
class Installed:
    """What `Pacing.install` left in the configuration, as the engine core reads it."""

    model: CorrectedModel | None  # None until the warm-up was seen
    tbt_ms: float | None
    correction_file: Path | None

    @classmethod
    def read(cls, additional_config: Mapping[str, Any]) -> Self:
        """The inverse of `Pacing.install`."""
        section = additional_config[SECTION]
        if section["model"] is None:
            return cls(None, section["tbt_ms"], None)
        file = Path(section["correction"])
        model = MODELS[section["model"]](section["coefficients"])
        earlier = Correction.load(file, of=section["of"]) if section["keep_correction"] else None
        correction = earlier or Correction(of=section["of"])
        return cls(
            CorrectedModel(model, map(Residual._make, section["residuals"]), correction=correction),
            section["tbt_ms"],
            file,
        )
