"""Archives of the kit's files, shared out over uploads of limited size."""

import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

PART_BYTES = 58 << 20  # of one upload; the working tree comes on top, and runners were seen to take 64 MiB
TREE_BYTES = 5 << 20  # most that the working tree may add

Preset = Literal[6, 9]


class PartTooLarge(ValueError):
    """One archive alone is larger than a part."""


def share_out(sizes: Mapping[str, int], limit: int = PART_BYTES) -> list[list[str]]:
    """Put the archives, largest first, into the first part that has room; raises `PartTooLarge`."""
    parts: list[list[str]] = []
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if sizes[name] > limit:
            raise PartTooLarge(
                f"{name} has {sizes[name]:,} bytes, more than the {limit:,} of a part; split it"
            )
        room = (part for part in parts if sum(sizes[other] for other in part) + sizes[name] <= limit)
        part = next(room, None)
        if part is None:
            parts.append(part := [])
        part.append(name)
    return parts


def group(root: Path, patterns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Files of each archive, relative to the root; every file is in the first archive whose pattern matches."""
    taken: set[Path] = set()
    found = {}
    for name, globs in patterns.items():
        files = {file for pattern in globs for top in root.glob(pattern) for file in _files(top)} - taken
        taken |= files
        found[name] = sorted(str(file.relative_to(root)) for file in files)
    return found


def pack(target: Path, folder: Path, members: Sequence[str], *, preset: Preset = 6) -> int:
    """Write an archive of some files of a folder under the folder's name; returns its bytes."""
    partial = target.with_suffix(".part")
    with tarfile.open(partial, "w:xz", preset=preset) as tar:
        for member in members:
            tar.add(folder / member, arcname=f"{folder.name}/{member}")
    partial.rename(target)
    return target.stat().st_size


def _files(top: Path) -> Iterable[Path]:
    return [top] if top.is_file() else [file for file in top.rglob("*") if file.is_file()]
