"""A latency profile: where and what was measured, the models fitted to it, and its file."""

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import msgspec

from conserve.errors import ProfileDamaged, ProfileDerived, ProfileMismatch
from conserve.profiles.conserve import ConServeModel, PaperModel
from conserve.profiles.fit import Errors
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.margin import Residual
from conserve.profiles.model import LinearModel
from conserve.profiles.points import IterationLimits, Point
from conserve.whole import write_whole

FORMAT = 1
MEASURE = "conserve profile MODEL (with --served if conserve serve is to use it)"
MODELS: Mapping[str, type[LinearModel]] = {
    model.name: model for model in (ConServeModel, PaperModel, HyGenModel)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """Everything that changes the speed of an engine. Two engines with equal keys share a profile."""

    model: str  # digest of its configuration, weights, tokenizer and number formats
    dtype: str
    device: str
    parallelism: str
    engine: str
    flags: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Twelve characters for file names."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]

    @property
    def summary(self) -> str:
        """Device, engine, number format and parallelism in words."""
        return f"{self.device}; {self.engine}; {self.dtype}; {self.parallelism}"

    def differences(self, other: "ProfileKey") -> list[str]:
        """The differences in words: "device: H100 there, H200 here"."""
        names = [f.name for f in fields(self) if f.name != "flags"]
        pairs = [(name, getattr(other, name), getattr(self, name)) for name in names]
        flags = sorted(self.flags.keys() | other.flags.keys())
        pairs += [(name, other.flags.get(name, "unset"), self.flags.get(name, "unset")) for name in flags]
        return [f"{name}: {there} there, {here} here" for name, there, here in pairs if there != here]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """A model's coefficients (ms per unit of their terms), and its errors on batches outside of its fit."""

    coefficients: dict[str, float]
    errors: Errors | None = None  # None in a derived profile
    residuals: list[Residual] = field(default_factory=list)  # of every single run of these batches


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCopy:
    """Median times of copying KV blocks between the device and page-locked host memory."""

    blocks: int
    bytes: int
    to_host_ms: float
    to_device_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Safepoint:
    """Time of one check of the flag, and the number of checks in an iteration."""

    check_us: float
    per_iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Variation of the same batch, as relative standard deviations."""

    back_to_back: float  # of immediate repetitions, median over all repeated batches
    over_time: float  # of one batch measured now and then during the whole session


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRange:
    """The largest figures of the batches in a profile; predictions beyond them are extrapolated."""

    ms: float  # of an iteration (median of its visits)
    tokens: int  # computed in an iteration
    requests: int
    context: int  # of one request


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One engine's latency profile."""

    name: str  # the model as the user names it
    key: ProfileKey
    how: Literal["measured", "derived"]
    measured_at: str  # ISO 8601, UTC
    seconds: float
    limits: IterationLimits | None
    models: dict[str, FittedModel]
    noise: Noise | None = None
    empty_iteration_ms: float | None = None
    kv_copies: list[KVCopy] = field(default_factory=list)
    safepoint: Safepoint | None = None
    derivation: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)  # see `write_sample`
    format: int = FORMAT

    def model(self, name: str | None = None) -> LinearModel:
        """The fitted model of that name, by default the one with the smallest error."""
        name = name or self.best
        return MODELS[name](self.models[name].coefficients)

    @property
    def best(self) -> str:
        """Name of the model with the smallest error; ConServe's if no errors were measured."""
        known = {name: fitted.errors.mape for name, fitted in self.models.items() if fitted.errors}
        return min(known, key=known.__getitem__) if known else ConServeModel.name

    @property
    def stamp(self) -> str:
        """Identifies the coefficients that corrections were learned on."""
        return f"{self.best} {self.measured_at}"

    @property
    def measured(self) -> MeasuredRange | None:
        """The measured range; None in a derived profile."""
        samples = [read_sample(line) for line in self.samples]
        if not samples:
            return None
        return MeasuredRange(
            ms=max(statistics.median(ms) for _, ms in samples),
            tokens=max(point.batch.tokens for point, _ in samples),
            requests=max(len(point.slices) for point, _ in samples),
            context=max(piece.context for point, _ in samples for piece in point.slices),
        )

    def require(self, key: ProfileKey, *, command: str) -> None:
        """Raise `ProfileDerived` or `ProfileMismatch` unless it was measured on an engine with this key."""
        if self.how == "derived":
            raise ProfileDerived(
                f"the profile {self.name} is derived from published numbers and good for simulation only; "
                f"measure one with: {command}"
            )
        if different := key.differences(self.key):
            raise ProfileMismatch(
                f"this profile is of another engine ({'; '.join(different)}); measure one with: {command}"
            )


def write(profile: Profile, path: Path) -> None:
    """Write the file durably; a reader sees the old one or the new one, whole."""
    document = msgspec.to_builtins(profile)
    document["checksum"] = checksum(document)
    write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", durable=True)


def read(path: Path, *, command: str = MEASURE) -> Profile:
    """Read a profile's file; raises `ProfileDamaged`, which names the command that measures it again."""
    fix = f"measure it again with: {command}"
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict)
    except OSError as error:
        raise ProfileDamaged(f"{path} cannot be read ({error.strerror}); {fix}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileDamaged(f"{path} is truncated or no profile ({error}); {fix}") from error
    wanted = document.pop("checksum", None)
    if document.get("format") != FORMAT:
        raise ProfileDamaged(f"{path} is no profile of format {FORMAT}; {fix}")
    if wanted != checksum(document):
        raise ProfileDamaged(f"{path} was changed after it was measured; {fix}")
    try:
        profile = msgspec.convert(document, Profile)
        for name in profile.models:
            profile.model(name)
    except (msgspec.ValidationError, ValueError, KeyError) as error:
        raise ProfileDamaged(f"{path} is no profile ({error}); {fix}") from error
    return profile


def checksum(document: Mapping[str, object]) -> str:
    """SHA-256 of the document without its checksum; the file's layout does not matter."""
    return hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()


def write_sample(point: Point, ms: Sequence[float]) -> str:
    """A line of `Profile.samples`: the batch, the median, the spread (largest - smallest), and all times."""
    each = " ".join(f"{value:.3f}" for value in ms)
    return f"{point}: {statistics.median(ms):.2f} ms, spread {max(ms) - min(ms):.2f} ms; {each}"


def read_sample(line: str) -> tuple[Point, list[float]]:
    """The batch and its times."""
    point, _, rest = line.partition(": ")
    return Point.parse(point), [float(value) for value in rest.rpartition("; ")[2].split()]
