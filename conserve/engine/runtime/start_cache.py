"""Findings of earlier starts on this machine: a value for each key, in a JSON file of the user's cache."""

from pathlib import Path
from typing import TypeVar

import msgspec

from conserve.whole import write_whole

T = TypeVar("T")


def kept_in(file: Path, *, type_: type[T]) -> dict[str, T]:
    """The values by key; none if the file cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, type_])  # type: ignore[valid-type]
    except (OSError, msgspec.DecodeError):
        return {}


def keep(file: Path, key: str, value: T, *, type_: type[T]) -> None:
    """Keep a value beside the others. If the folder cannot be written, the next start learns it again."""
    try:
        write_whole(
            file, msgspec.json.format(msgspec.json.encode({**kept_in(file, type_=type_), key: value}))
        )
    except OSError:
        return
