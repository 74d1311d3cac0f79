"""The folder of measured profiles, found by their keys. Profiles derived from the papers come with the package."""

from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from conserve.errors import ProfileError, ProfileMissing
from conserve.profiles import profile as profiles
from conserve.profiles.correction import Correction
from conserve.profiles.profile import Profile, ProfileKey

DERIVED = Path(str(files("conserve.profiles"))) / "derived"


class Book:
    """The profiles measured on this machine, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, key: ProfileKey) -> Path:
        """File of the profile with this name and key."""
        slug = "".join(c if c.isalnum() or c in "-." else "-" for c in name.rsplit("/", 1)[-1]).strip("-.")
        return self.folder / f"{slug or 'model'}-{key.digest}.json"

    def correction_path(self, name: str, key: ProfileKey) -> Path:
        """File of the correction that engines have learned for this profile."""
        return self.path(name, key).with_suffix(".drift")

    def learned(self, profile: Profile) -> Correction | None:
        """Correction of this profile that engines have learned since it was measured."""
        return Correction.load(self.correction_path(profile.name, profile.key), of=profile.stamp)

    def save(self, profile: Profile) -> Path:
        """Write a profile. It replaces an older one with its key, and the correction learned for that one."""
        path = self.path(profile.name, profile.key)
        profiles.write(profile, path)
        for other in self.folder.glob(f"*-{profile.key.digest}.*"):
            if other != path and other.suffix in (".json", ".drift"):
                other.unlink(missing_ok=True)
        return path

    def find(self, key: ProfileKey, *, command: str) -> Profile:
        """The profile of the engine with this key.

        Raises `ProfileMissing`, which names the nearest profile and its differences, or `ProfileDamaged`.
        """
        path = max(self.folder.glob(f"*-{key.digest}.json"), key=lambda p: p.stat().st_mtime, default=None)
        if path is not None:
            found = profiles.read(path, command=command)
            found.require(key, command=command)
            return found
        nearest = min(
            (key.differences(p.key) for p in self.all() if p.key.model == key.model), key=len, default=None
        )
        but = f"; the nearest differs ({'; '.join(nearest)})" if nearest else ""
        raise ProfileMissing(f"no profile for this model on this machine{but}; run: {command}")

    def all(self) -> list[Profile]:
        """All readable profiles, the newest last."""
        return sorted(self._readable(), key=lambda profile: profile.measured_at)

    def named(self, name: str, *, command: str | None = None) -> Profile:
        """A profile by file, by derived name, or the newest of a model; raises `ProfileError`.

        `command` makes a missing one.
        """
        if Path(name).is_file():
            return profiles.read(Path(name))
        if (DERIVED / f"{name}.json").is_file():
            return profiles.read(DERIVED / f"{name}.json")
        found = [profile for profile in self.all() if name in (profile.name, profile.key.digest)]
        if found:
            return found[-1]
        for path in self.folder.glob("*.json"):
            if path.stem.rpartition("-")[0] == name.rsplit("/", 1)[-1]:
                return profiles.read(path)  # raises the reason that it was not among the readable ones
        if name.endswith(".json"):
            raise ProfileMissing(f"there is no file {name}; name a profile's file, or a model")
        known = dict.fromkeys([*(profile.name for profile in self.all()), *derived_names()])
        raise ProfileMissing(
            f"there is no profile of {name}; there are: {', '.join(known)}; "
            f"run: {command or f'conserve profile {name}'}"
        )

    def _readable(self) -> Iterator[Profile]:
        for path in self.folder.glob("*.json"):
            with suppress(ProfileError):
                yield profiles.read(path)


def derived_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in DERIVED.glob("*.json"))
