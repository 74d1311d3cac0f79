"""Generated tokens of rows in flight: the next attempt of a row continues from them."""

import array
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, update

from conserve.store.books import spans
from conserve.store.database import schema
from conserve.store.database.bulk import insert_rows

request = schema.request


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """Generated tokens of one row in flight."""

    epoch: int
    job_id: str
    position: int
    tokens: bytes
    tokens_by: str  # Endpoint.identity


def save_tokens(tx: Connection, saved: Sequence[SavedTokens]) -> None:
    """Save the tokens of rows in flight; a row that is no longer under that lease is skipped."""
    alive = spans.locked(tx, {s.epoch for s in saved})
    first, later = [], []
    for s in saved:
        rest = alive.get(s.epoch)
        if rest is not None and rest.take(s.job_id, s.position):
            first.append(rest.record(s.position, epoch=s.epoch, **columns(s)))
        elif s.epoch in alive:
            new = {f"new_{name}": value for name, value in columns(s).items()}
            later.append({"of_job": s.job_id, "at": s.position, "under": s.epoch, **new})
    spans.write(tx, alive.values())
    insert_rows(tx, request, first)
    if later:
        tx.execute(SAVE, later)


def columns(s: SavedTokens) -> dict[str, Any]:
    """Columns of a row that saved tokens set."""
    return {"tokens": s.tokens, "tokens_by": s.tokens_by, "checksum": tokens_checksum(s.tokens, s.tokens_by)}


SAVE = (
    update(request)
    .where(
        request.c.job_id == bindparam("of_job"),
        request.c.position == bindparam("at"),
        request.c.epoch == bindparam("under"),
    )
    .values(
        tokens=bindparam("new_tokens"),
        tokens_by=bindparam("new_tokens_by"),
        checksum=bindparam("new_checksum"),
    )
)
"""Replaces the tokens of a row that has a record."""


def whole_tokens(row: Any) -> tuple[bytes | None, str | None]:
    """Saved tokens of a row and the endpoint that generated them; None for both if their checksum is wrong."""
    if row.checksum not in (None, tokens_checksum(row.tokens, row.tokens_by)):
        return None, None
    return row.tokens, row.tokens_by


def tokens_checksum(tokens: bytes | None, tokens_by: str | None) -> int:
    """CRC-32 of saved tokens."""
    return zlib.crc32(tokens or b"", zlib.crc32((tokens_by or "").encode()))


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32, 4 bytes each."""
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    unpacked = array.array("i")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
