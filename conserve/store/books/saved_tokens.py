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

request = schema.request


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """Generated tokens of one row in flight."""

    epoch: int
    job_id: str
    position: int
    tokens: bytes
    tokens_by: str  # Endpoint.identity


def save_tokens(tx: Connection, saved: Sequence[SavedTokens], *, owner: str | None = None) -> None:
    """Save the tokens of rows in flight; a row that is no longer under that lease, of the `owner`, is skipped."""
    alive = spans.locked(tx, {s.epoch for s in saved}, owner)
    spans.record(tx, [(s, columns(s)) for s in saved], SAVE, alive=alive, held=True)


def columns(s: SavedTokens) -> dict[str, Any]:
    """Columns of a row that saved tokens set."""
    return {"tokens": s.tokens, "tokens_by": s.tokens_by, "checksum": tokens_checksum(s.tokens, s.tokens_by)}


SAVE = (
    update(request)
    .where(spans.RECORD)
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
