"""Parquet files of a store that can be read or not, by their last bytes or to their end."""

from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.store.files.bucket import Bucket
from conserve.store.files.objects import ObjectPath
from conserve.store.sql.readable import CHECK, REPAIR, LeftOut, damage, fault
from conserve.store.sql.unsupported_values import SUBMIT_AGAIN

PAR1, CUT, OVERWRITTEN = b"PAR1", "is cut short", "is cut short or was overwritten"


def length(number: int) -> bytes:
    return number.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", CUT),
        (length(0) + PAR1, CUT),
        ((PAR1 + length(0) + PAR1)[1:], CUT),
        (PAR1 + length(0) + PAR1, None),
        (PAR1 + length(1) + PAR1, OVERWRITTEN),
        (PAR1 + b"x" + length(1) + PAR1, None),
        (PAR1 + b"x" + length(2) + PAR1, OVERWRITTEN),
        (PAR1 + length(0) + b"PAR2", OVERWRITTEN),
        (PAR1 + length(0) + PAR1 + b"x", OVERWRITTEN),
    ],
)
def test_the_end_of_a_file_says_whether_it_is_whole(
    tmp_path: Path, content: bytes, reason: str | None
) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    assert fault(path) == reason


def test_a_file_that_cannot_be_opened_is_told_from_one_that_is_gone(tmp_path: Path) -> None:
    assert fault(tmp_path / "x.parquet") == "is gone"
    assert fault(tmp_path) == "cannot be read (Is a directory)"


def test_of_an_object_nothing_is_read() -> None:
    assert fault(ObjectPath(Bucket.parse("s3://nowhere"), "x.parquet")) is None


def test_want_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq, "ParquetFile", Mock(side_effect=pa.ArrowMemoryError("malloc failed")))
    with pytest.raises(MemoryError):
        damage(tmp_path / "x.parquet")


def test_a_page_that_does_not_match_its_checksum_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = [f"text number {n}" for n in range(10_000)]
    pq.write_table(
        pa.table({"a": texts}), path, compression="none", use_dictionary=False, write_page_checksum=True
    )
    assert damage(path) is None
    data = path.read_bytes()
    at = data.index(b"text number 9876")
    path.write_bytes(data[:at] + b"T" + data[at + 1 :])
    found = damage(path)
    assert found is not None
    assert found.startswith("is damaged (")
    assert "\n" not in found
    assert fault(path) is None, "its end is whole"


@pytest.mark.parametrize("content", [b"", b"no Parquet at all", PAR1 + length(0) + PAR1])
def test_what_is_no_parquet_is_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    assert str(damage(path)).startswith("is damaged (")
    path.unlink()
    assert str(damage(path)).startswith("is damaged (")


@pytest.mark.parametrize(
    ("fix", "damaged"),
    [(CHECK, True), (REPAIR, True), (f"{CHECK} job-1", True), (SUBMIT_AGAIN, False)],
)
def test_only_what_a_check_mends_is_damage_of_the_store(fix: str, damaged: bool) -> None:
    left_out = LeftOut(view="inputs", job_id="job-1", reason="it is gone", fix=fix)
    assert left_out.damaged is damaged
    assert left_out.sentence == f"the view inputs leaves out rows of job job-1: it is gone; {fix}"
