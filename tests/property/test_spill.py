"""KV blocks on disk come back as they were, or not at all."""

import json
import random
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.engine.runtime.spill_file import (
    FORMAT,
    INDEX,
    Shard,
    Spill,
    claim,
    discard,
    read_index,
    read_shard,
    require_same,
    write_index,
    write_shard,
)
from conserve.errors import SettingsError, SpillRefused
from tests.reach import reached

ENGINE = {"model": "m@1", "block size": 16}
Blocks = list[list[bytes]]  # of each block its regions


def made(dice: random.Random, blocks: int, regions: Sequence[int]) -> Blocks:
    return [[dice.randbytes(size) for size in regions] for _ in range(blocks)]


def keys_of(blocks: Blocks) -> list[str]:
    return [f"{number:064x}" for number in range(len(blocks))]


def written(folder: Path, ranks: Sequence[Blocks], name: str = "spill") -> Spill:
    """A whole spill, its shards written at once."""
    keys = keys_of(ranks[0])

    def write(rank: int) -> Shard:
        return write_shard(
            folder, f"{name}-{rank}.kv", zip(keys, ranks[rank], strict=True), layout=f"layout {rank}"
        )

    with ThreadPoolExecutor(len(ranks)) as pool:
        shards = list(pool.map(write, range(len(ranks))))
    spill = Spill(identity=ENGINE, keys=keys, shards=shards)
    write_index(folder, spill)
    return spill


def come_back(folder: Path, regions: Sequence[int], blocks: int | None = None) -> list[Blocks]:
    """Read the spill as the next engine does; raises `SpillRefused`."""
    spill = read_index(folder)
    assert spill is not None
    require_same(spill.identity, ENGINE)
    found: list[Blocks] = []
    for rank, shard in enumerate(spill.shards):
        count = len(spill.keys) if blocks is None else blocks
        targets = [[bytearray(size) for size in regions] for _ in range(count)]
        read_shard(folder, shard, spill.keys, targets, layout=f"layout {rank}")
        found.append([[bytes(region) for region in block] for block in targets])
    return found


SHAPES = st.tuples(
    st.integers(0, 2**32), st.integers(1, 6), st.lists(st.integers(1, 40), min_size=1, max_size=4)
)


@given(SHAPES, st.integers(1, 3), st.data())
def test_what_was_written_comes_back_the_beginning_alone_too(
    shape: tuple[int, int, list[int]], workers: int, data: st.DataObject
) -> None:
    seed, count, regions = shape
    dice = random.Random(seed)
    ranks = [made(dice, count, regions) for _ in range(workers)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        spill = written(folder, ranks)
        assert read_index(folder) == spill
        assert come_back(folder, regions) == ranks
        first = data.draw(st.integers(0, count))
        assert come_back(folder, regions, first) == [blocks[:first] for blocks in ranks]
        discard(folder)
        assert not list(folder.iterdir())
        assert read_index(folder) is None


@given(SHAPES, st.data())
def test_any_damage_to_any_file_is_refused(shape: tuple[int, int, list[int]], data: st.DataObject) -> None:
    seed, count, regions = shape
    ranks = [made(random.Random(seed + rank), count, regions) for rank in range(2)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, ranks)
        path = folder / data.draw(st.sampled_from([INDEX, INDEX, "spill-0.kv", "spill-1.kv"]))
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        how = data.draw(st.sampled_from(["flipped", "cut", "longer", "gone", "gone"]))
        if how == "flipped":
            flipped = content[at] ^ data.draw(st.integers(1, 255))
            path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        elif how == "cut":
            path.write_bytes(content[:at])
        elif how == "longer":
            path.write_bytes(content + b"x")
        else:
            path.unlink()
        if reached("the index is gone", how == "gone" and path.name == INDEX):
            assert read_index(folder) is None
            return
        try:
            found = come_back(folder, regions)
        except SpillRefused:
            return
        # A byte of the index that means nothing: a space where JSON allows another.
        assert path.name == INDEX
        assert found == ranks


def test_blocks_that_changed_places_are_refused(tmp_path: Path) -> None:
    blocks = made(random.Random(1), 2, [8])
    spill = written(tmp_path, [blocks])
    (shard,) = spill.shards
    swapped = shard._replace(checksums=list(reversed(shard.checksums)))
    (tmp_path / shard.name).write_bytes(b"".join(region for block in reversed(blocks) for region in block))
    with pytest.raises(SpillRefused, match=r"block 0 of spill-0\.kv is not what was written"):
        read_shard(tmp_path, swapped, spill.keys, [[bytearray(8)]] * 2, layout="layout 0")


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        ({**ENGINE, "model": "m@2"}, "it is of another engine, whose model is m@1 and not m@2"),
        ({**ENGINE, "workers": 2}, "it is of another engine, whose workers is unknown and not 2"),
        ({"model": "m@1"}, "it is of another engine, whose block size is 16 and not unknown"),
    ],
)
def test_a_spill_of_another_engine_is_refused(tmp_path: Path, ours: dict[str, str | int], why: str) -> None:
    spill = written(tmp_path, [made(random.Random(1), 2, [8])])
    with pytest.raises(SpillRefused) as refused:
        require_same(spill.identity, ours)
    assert str(refused.value) == why
    require_same(spill.identity, ENGINE)


def test_blocks_laid_out_in_another_way_are_refused(tmp_path: Path) -> None:
    spill = written(tmp_path, [made(random.Random(1), 2, [8])])
    with pytest.raises(SpillRefused, match="laid out in another way"):
        read_shard(tmp_path, spill.shards[0], spill.keys, [], layout="layout 1")
    with pytest.raises(SpillRefused, match="is not what was written"):  # regions of another size
        read_shard(tmp_path, spill.shards[0], spill.keys, [[bytearray(4)]], layout="layout 0")


def test_another_versions_format_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [made(random.Random(1), 2, [8])])
    outer = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({**outer, "format": FORMAT + 1}))
    with pytest.raises(SpillRefused, match=f"its format is {FORMAT + 1} and this version reads {FORMAT}"):
        read_index(tmp_path)


def test_an_index_and_shards_of_different_lengths_are_refused(tmp_path: Path) -> None:
    spill = written(tmp_path, [made(random.Random(1), 2, [8])])
    write_index(tmp_path, Spill(identity=ENGINE, keys=spill.keys[:1], shards=spill.shards))
    with pytest.raises(SpillRefused, match="other blocks"):
        read_index(tmp_path)


def test_a_crash_before_a_file_has_its_name_leaves_the_spill_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (made(random.Random(seed), 3, [8, 5]) for seed in (1, 2))
    written(tmp_path, [before], "before")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    for pattern in ("after-0.kv.partial", f"{INDEX}.partial"):  # the shard, or the index over it
        with monkeypatch.context() as patch:
            rename = Path.replace
            patch.setattr(
                Path,
                "replace",
                lambda path, to, at=pattern: crash() if path.name == at else rename(path, to),  # noqa: B023
            )
            with pytest.raises(KeyboardInterrupt):
                written(tmp_path, [after], "after")
        assert come_back(tmp_path, [8, 5]) == [before]
    written(tmp_path, [after], "again")
    assert come_back(tmp_path, [8, 5]) == [after]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again-0.kv", INDEX]


def test_a_process_killed_while_it_writes_leaves_the_spill_before(tmp_path: Path) -> None:
    before = made(random.Random(1), 3, [8, 5])
    written(tmp_path, [before], "before")
    script = (
        "import os, sys; from pathlib import Path; from conserve.engine.runtime.spill_file import write_shard\n"
        "def blocks():\n"
        "    yield '00', [bytes(1 << 20)]\n"
        "    os.kill(os.getpid(), 9)\n"
        "write_shard(Path(sys.argv[1]), 'after-0.kv', blocks(), layout='')"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after-0.kv.partial", "before-0.kv", INDEX]
    assert come_back(tmp_path, [8, 5]) == [before]
    discard(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_of_the_shard(tmp_path: Path) -> None:
    def blocks() -> object:
        yield "00", [b"x" * 10]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_shard(tmp_path, "spill-0.kv", blocks(), layout="")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_no_other_user_may_read_what_prompts_became(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "spill"
    with claim(folder):
        written(folder, [made(random.Random(1), 1, [8])])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o077 for path in folder.glob("*.*")} == {0}


def test_a_folder_is_one_servers(tmp_path: Path) -> None:
    with claim(tmp_path), pytest.raises(SettingsError, match="in use by another server; name another"):
        claim(tmp_path)
    claim(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"cannot be written \(.+\); name another folder"):
        claim(tmp_path / "file" / "spill")


def test_a_checksum_is_of_key_and_content(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, "a.kv", [("aa", [b"12", b"3"]), ("bb", [b"45", b"6"])], layout="")
    assert shard.checksums == [zlib.crc32(b"123", zlib.crc32(b"aa")), zlib.crc32(b"456", zlib.crc32(b"bb"))]
    assert shard.block_bytes == 3
    assert (tmp_path / "a.kv").stat().st_size == 6
