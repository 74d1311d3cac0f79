"""Promises that `conserve tune` has found for a model: a file in the store, read by `conserve serve --tuned`."""

import shlex
import time
from pathlib import Path

import msgspec
from msgspec import structs

from conserve.api.running import engine_flags
from conserve.bench.names import promise_entries, promise_flags
from conserve.cli import output
from conserve.cli.serve_files import make_home, own_name
from conserve.cli.serve_flags import recording_at
from conserve.config import Settings, model_name
from conserve.engine.runtime.vllm_flags import given_flags
from conserve.engine.section import EngineSection
from conserve.errors import InputError, SettingsError
from conserve.jobs.harvest.services import FOLDER
from conserve.whole import write_whole


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """Promises found for a model and its traffic, and what they are expected to bring."""

    model: str
    promises: dict[str, float]  # harm, or ttft_ms and tbt_ms
    kept: list[str]  # what may be harmed, in words
    arrivals: str
    expected: dict[str, float]  # harvest on simulated time
    confirmed: bool  # on the engine itself
    measured_at: float  # s since 1970
    engine_flags: list[str] | None  # of vLLM, where the engine confirmed it; None if none was started
    engine: str  # of the profile that the search was on, in words
    profile: str  # the digest of that one
    measured: dict[str, float] | None  # harvest of that engine beside the busiest blocks

    @property
    def flags(self) -> str:
        """Flags of `conserve serve` that promise the same."""
        return promise_flags(self.promises)


def tuned_file(settings: Settings, model: str) -> Path:
    """File of a model's promises."""
    return settings.home / "tuned" / f"{slug_of(model)}.json"


def slug_of(model: str) -> str:
    """The model's name as a file has it."""
    slug = "".join(c if c.isalnum() or c in "-." else "-" for c in model.strip("/"))
    return slug.strip("-.") or "model"


def write(settings: Settings, tuned: Tuned) -> Path:
    """Keep the promises; raises `SettingsError` where nothing can be written."""
    path = tuned_file(settings, tuned.model)
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(tuned), indent=2) + b"\n")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error.strerror}); set CONSERVE_HOME") from error
    return path


def read(settings: Settings, model: str) -> Tuned:
    """The promises of a model; raises `InputError`."""
    path = tuned_file(settings, model)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Tuned)
    except FileNotFoundError as error:
        raise InputError(f"nothing was tuned for {model} yet; run: conserve tune {model}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); run: conserve tune {model}") from error
    if model_name(found.model) != model_name(model):  # whose files have one name
        raise InputError(f"{path} was tuned for {found.model}, not for {model}; run: conserve tune {model}")
    return found


def as_tuned(
    section: EngineSection, settings: Settings, words: list[str], *, given: tuple[str | None, ...]
) -> EngineSection:
    """The section with the promises of `--tuned`, said in a sentence; raises `ConserveError`.

    `words` are the model and flags of vLLM, which those of the tuned engine are compared with.
    """
    if any(flag is not None for flag in given):
        raise SettingsError("--tuned brings its own promises; leave out --ttft-slo, --tbt-slo and --harm")
    found = read(settings, words[0])
    day = time.strftime("%Y-%m-%d", time.localtime(found.measured_at))
    how = "on the engine" if found.confirmed else "simulated"
    output.say(
        f"promised as tuned on {day} ({how}: {found.engine}) for {', '.join(found.kept)}: {found.flags}"
    )
    if found.engine_flags is not None and not are_alike(
        found.engine_flags, engine_flags(settings, words[1:])
    ):
        output.warn(
            f"it was tuned with other flags of vLLM: {shlex.join(found.engine_flags) or 'none'}; "
            f"for the ones given here run: conserve tune {shlex.join(words)}"
        )
    return structs.replace(section, **promise_entries(found.promises))


def are_alike(one: list[str], other: list[str]) -> bool:
    """True for the same flags of vLLM, in whatever order."""
    first, second = (
        sorted((flag.name, flag.key, *flag.values) for flag in given_flags(words)) for words in (one, other)
    )
    return first == second


def recording(
    section: EngineSection, settings: Settings, port: int, views: Path | None, *, arrivals: bool
) -> EngineSection:
    """The section with the files that the engine writes."""
    return structs.replace(
        section,
        record_views=str(recording_at(views)) if views is not None else None,
        record_arrivals=str(arrivals_file(settings, settings.engine_model, port)) if arrivals else None,
    )


def arrivals_file(settings: Settings, model: str, port: int) -> Path:
    """File that `conserve serve` of this model at this machine's port keeps its arrivals in; its folder exists."""
    path = arrivals_folder(settings, model) / f"{own_name(port)}.csv"
    make_home(settings.home)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def arrivals_folder(settings: Settings, model: str) -> Path:
    """Folder of the arrivals that servers of this store have recorded for a model."""
    return settings.home.absolute() / FOLDER / "arrivals" / slug_of(model)
