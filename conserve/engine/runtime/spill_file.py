"""Files that keep KV blocks while an engine restarts: one shard per worker, and an index that makes them valid.

    DIR/index.json         the engine that the blocks belong to, their keys, their checksums; written last
    DIR/ID-RANK.kv         the blocks of one worker, one after the other, each with all of its regions
    DIR/lock               held by the server that uses the folder

A file is written under another name, flushed and renamed. So a crash leaves the last index with its shards, or
none; shards that no index names are removed with the next spill.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NamedTuple

from conserve.errors import SettingsError, SpillRefused
from conserve.whole import sync

FORMAT = 1
INDEX, LOCK = "index.json", "lock"
SHARDS, PARTIAL = "*.kv", "*.partial"
Identity = Mapping[str, str | int]
Buffer = bytes | bytearray | memoryview


class Shard(NamedTuple):
    """The blocks of one worker."""

    name: str
    layout: str  # how its engine lays KV out within a block
    block_bytes: int
    checksums: Sequence[int]  # CRC-32 of each block, seeded with that of its key


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Contents of an index."""

    identity: Identity
    keys: Sequence[str]  # of the blocks, most valuable first; hexadecimal
    shards: Sequence[Shard]  # by rank


def write_shard(
    folder: Path, name: str, blocks: Iterable[tuple[str, Sequence[Buffer]]], *, layout: str
) -> Shard:
    """Write blocks, each given as its key and its regions. Raises OSError, and then leaves no file."""
    checksums: list[int] = []
    with _replacing(folder / name) as file:
        for key, regions in blocks:
            checksum = zlib.crc32(key.encode())
            for region in regions:
                file.write(region)
                checksum = zlib.crc32(region, checksum)
            checksums.append(checksum)
        block_bytes = file.tell() // len(checksums) if checksums else 0
    return Shard(name, layout, block_bytes, checksums)


def read_shard(
    folder: Path, shard: Shard, keys: Sequence[str], targets: Iterable[Sequence[Buffer]], *, layout: str
) -> None:
    """Read as many of the shard's first blocks as there are targets.

    Raises `SpillRefused`; some targets may be filled by then.
    """
    if shard.layout != layout:
        raise SpillRefused("its blocks are laid out in another way than this engine's")
    path = folder / shard.name
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != shard.block_bytes * len(shard.checksums):
                raise SpillRefused(f"{path.name} is not as long as it was")
            for number, regions in enumerate(targets):
                checksum = zlib.crc32(keys[number].encode())
                for region in regions:
                    _fill(file, region, path)
                    checksum = zlib.crc32(region, checksum)
                if checksum != shard.checksums[number] or file.tell() != (number + 1) * shard.block_bytes:
                    raise SpillRefused(f"block {number} of {path.name} is not what was written")
    except OSError as error:
        raise SpillRefused(f"{path.name} cannot be read ({error.strerror or error})") from error


def write_index(folder: Path, spill: Spill) -> None:
    """Make the shards valid, and remove all other ones. Raises OSError, and then the last index stays valid."""
    body = json.dumps({**asdict(spill), "shards": [shard._asdict() for shard in spill.shards]})
    with _replacing(folder / INDEX) as file:
        file.write(
            json.dumps({"format": FORMAT, "checksum": zlib.crc32(body.encode()), "body": body}).encode()
        )
    sweep(folder, keep=[shard.name for shard in spill.shards])


def read_index(folder: Path) -> Spill | None:
    """The index of the last spill, None if there is none; raises `SpillRefused` if it cannot be relied on."""
    try:
        outer = json.loads((folder / INDEX).read_bytes())
        if outer["format"] != FORMAT:
            raise SpillRefused(f"its format is {outer['format']} and this version reads {FORMAT}")
        if zlib.crc32(outer["body"].encode()) != outer["checksum"]:
            raise SpillRefused("its index is not what was written")
        body = json.loads(outer["body"])
        shards = [Shard(**shard) for shard in body["shards"]]
        spill = Spill(identity=body["identity"], keys=body["keys"], shards=shards)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpillRefused(f"its index cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpillRefused("its index is not what was written") from error
    if any(len(shard.checksums) != len(spill.keys) for shard in shards):
        raise SpillRefused("its shards have other blocks than its index")
    return spill


def verify(folder: Path) -> None:
    """Read a whole spill; raises `SpillRefused` if any part of it is damaged."""
    spill = read_index(folder)
    if spill is None:
        return
    for shard in spill.shards:
        blocks = ([bytearray(shard.block_bytes)] for _ in spill.keys)
        read_shard(folder, shard, spill.keys, blocks, layout=shard.layout)


def require_same(spilled: Identity, ours: Identity) -> None:
    """Raise `SpillRefused` with the first property in which two engines differ."""
    for name in dict.fromkeys((*ours, *spilled)):
        if spilled.get(name) != ours.get(name):
            there, here = spilled.get(name, "unknown"), ours.get(name, "unknown")
            raise SpillRefused(f"it is of another engine, whose {name} is {there} and not {here}")


def discard(folder: Path) -> None:
    """Remove the spill: the index first, since shards without an index are not valid."""
    (folder / INDEX).unlink(missing_ok=True)
    sweep(folder, keep=())


def remove(folder: Path, shards: Iterable[Shard]) -> None:
    """Remove shards that will not become valid."""
    for shard in shards:
        (folder / shard.name).unlink(missing_ok=True)


def sweep(folder: Path, *, keep: Iterable[str]) -> None:
    """Remove shards that are not kept, and files that crashes left half written."""
    kept = frozenset(keep)
    for pattern in (SHARDS, PARTIAL):
        for path in folder.glob(pattern):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def claim(folder: Path) -> IO[str]:
    """Lock a folder for spills and make it if it is missing; raises `SettingsError` if it cannot be used.

    The operating system releases the lock when the file is closed, and so when the process ends.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        lock = (folder / LOCK).open("a")
    except OSError as error:
        why = error.strerror or error
        raise SettingsError(f"--kv-spill {folder} cannot be written ({why}); name another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise SettingsError(
            f"--kv-spill {folder} is in use by another server; name another folder"
        ) from error
    return lock


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears, whole and flushed, if the block ends without an error, and not at all otherwise."""
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _fill(file: IO[bytes], region: Buffer, path: Path) -> None:
    view = memoryview(region).cast("B")
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise SpillRefused(f"{path.name} ends too early")
        done += count
