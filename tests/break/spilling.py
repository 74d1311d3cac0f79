"""An engine's way with its KV spill, without an engine: take the last one in, then write one of its own.

    python -m tests.break.spilling FOLDER NUMBER '{"at": "...", "call": 3}'

The contents of a spill follow from its number, so that a reader knows what must be in it. The process kills itself
where the shot says.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from conserve.engine.runtime import spill_file
from conserve.engine.runtime.spill_file import Shard, Spill
from tests.acceptance.aimed import Shot, take_aim

WORKERS, BLOCKS, REGION_BYTES = 2, 5, (700, 300)


def contents(number: int, rank: int) -> list[tuple[str, list[bytes]]]:
    """Keys and regions of the blocks of a worker."""
    dice = random.Random(f"{number} {rank}")
    return [
        (f"{number:032x}{block:032x}", [dice.randbytes(size) for size in REGION_BYTES])
        for block in range(BLOCKS)
    ]


def write(folder: Path, number: int) -> None:
    """Write a spill."""
    shards: list[Shard] = []
    for rank in range(WORKERS):
        name = f"{number:08x}-{rank}.kv"
        shards.append(spill_file.write_shard(folder, name, contents(number, rank), layout="one"))
    keys = [key for key, _ in contents(number, 0)]
    spill_file.write_index(folder, Spill(identity={"number": number}, keys=keys, shards=shards))


def found(folder: Path) -> int | None:
    """Number of the valid spill, whose blocks are compared; None if there is none. Raises `SpillRefused`."""
    spill = spill_file.read_index(folder)
    if spill is None:
        return None
    number = int(spill.identity["number"])
    for rank, shard in enumerate(spill.shards):
        assert read(folder, shard, spill.keys) == [b"".join(regions) for _, regions in contents(number, rank)]
    return number


def read(folder: Path, shard: Shard, keys: Sequence[str]) -> list[bytes]:
    """Blocks of a shard."""
    targets = [[bytearray(size) for size in REGION_BYTES] for _ in keys]
    spill_file.read_shard(folder, shard, keys, targets, layout="one")
    return [b"".join(target) for target in targets]


def main() -> None:
    """Take the last spill in, remove it and write another."""
    folder, number, shot = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    take_aim(Shot(**shot))
    with spill_file.claim(folder):
        if found(folder) is not None:
            spill_file.discard(folder)
        write(folder, number)


if __name__ == "__main__":
    main()
