"""Times that an engine knows when it starts: the latency model of a profile, and times of copies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from conserve.profiles.correction import CorrectedModel, Correction
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.margin import Residual
from conserve.profiles.model import LinearModel
from conserve.profiles.profile import MODELS, KVCopy, Profile
from conserve.profiles.refit import FittedReach


class KnownTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A latency model with its errors, and the file that keeps what is learned beyond it."""

    model: str
    coefficients: Mapping[str, float]
    residuals: Sequence[tuple[float, float]]
    of: str  # stamp of the profile
    correction: str  # file
    keep_correction: bool  # start with the correction learned earlier
    profile_name: str | None = None
    hygen: Mapping[str, float] | None = None  # coefficients of HyGen's predictor, of the same profile
    reach: Sequence[int] | None = None  # of the batches that the model was fitted to
    block_ms: Sequence[float] | None = None  # of copying one KV block to the host and back

    @classmethod
    def of_profile(cls, found: Profile, correction: Path, *, keep_correction: bool) -> Self:
        """The times of a profile, and of what was learned since if that is kept."""
        best, hygen = found.models[found.best], found.models.get(HyGenModel.name)
        return cls(
            model=found.best,
            coefficients=best.coefficients,
            residuals=best.residuals,
            of=found.stamp,
            correction=str(correction),
            keep_correction=keep_correction,
            profile_name=found.name,
            hygen=hygen.coefficients if hygen is not None else None,
            reach=reach_of(found),
            block_ms=block_ms(found.kv_copies),
        )

    @classmethod
    def made_up(
        cls, model: LinearModel, folder: Path, *, of: str, residuals: Sequence[tuple[float, float]]
    ) -> Self:
        """The times of a model that no profile has; `folder` gets what is learned."""
        return cls(
            model=model.name,
            coefficients=model.coefficients,
            residuals=residuals,
            of=of,
            correction=str(folder / "correction"),
            keep_correction=False,
        )

    def document(self) -> dict[str, Any]:
        """The times for JSON."""
        return msgspec.structs.asdict(self)

    @property
    def source(self) -> str:
        """Words on where the model comes from."""
        return f"profile {self.profile_name}" if self.profile_name else "profile"

    def corrected_model(self) -> CorrectedModel:
        """The latency model, with what was learned earlier if that is kept."""
        earlier = Correction.load(Path(self.correction), of=self.of) if self.keep_correction else None
        return CorrectedModel(
            MODELS[self.model](self.coefficients),
            map(Residual._make, self.residuals),
            correction=earlier or Correction(of=self.of),
            reach=FittedReach(*self.reach) if self.reach else None,
        )

    def hygen_model(self) -> HyGenModel | None:
        """HyGen's predictor; None where the profile has none."""
        return HyGenModel(self.hygen) if self.hygen else None


def reach_of(profile: Profile) -> FittedReach | None:
    """The largest batches that the profile's model was fitted to; None if it was fitted to none."""
    known = profile.measured
    return FittedReach(known.tokens, known.requests, known.context) if known is not None else None


def block_ms(copies: Sequence[KVCopy]) -> tuple[float, float] | None:
    """Time of copying one KV block to the host and back, in ms, by the largest copy; None if not measured."""
    most = max(copies, key=lambda copy: copy.blocks, default=None)
    return (most.to_host_ms / most.blocks, most.to_device_ms / most.blocks) if most is not None else None
