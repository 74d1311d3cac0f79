"""Raw numbers on disk: a Parquet file with a row per request, and one with a row per block."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.measure import Block

SCHEMA = pa.schema(
    [
        ("policy", pa.string()),
        ("block", pa.int32()),
        ("request", pa.int32()),
        ("due_s", pa.float64()),
        ("sent_s", pa.float64()),
        ("ended_s", pa.float64()),
        ("input_tokens", pa.int32()),
        ("output_tokens", pa.int32()),  # asked for
        ("cached_tokens", pa.int32()),  # of the input
        ("ttft_ms", pa.float64()),
        ("tokens", pa.int32()),
        ("token_at_ms", pa.list_(pa.float64())),  # milliseconds since the load began, like due_s
        ("status", pa.string()),
        ("detail", pa.string()),
    ]
)

BLOCKS = pa.schema(
    [
        ("block", pa.int32()),
        ("policy", pa.string()),
        ("started_s", pa.float64()),
        ("duration_s", pa.float64()),
        ("offline_tokens", pa.int64()),
        ("offline_work", pa.float64()),
        ("offline_decodes", pa.int64()),
        ("iterations", pa.int64()),
        ("planned", pa.int64()),
        ("overruns", pa.int64()),
        ("busy_s", pa.float64()),
        ("iterations_left", pa.int64()),
        ("tokens_redone", pa.int64()),
        ("tokens_wasted", pa.float64()),
        ("live_tokens_recomputed", pa.int64()),
        ("tokens_saved", pa.int64()),
        ("tokens_restored", pa.int64()),
        ("tokens_recomputed", pa.int64()),
    ]
)
COUNTS = BLOCKS.names[1:]  # fields of a `Block`


def table(answers: Sequence[LoadAnswer], *, policy: str, block: int) -> Any:
    """Table with a row for each request of one block."""
    rows = [
        {
            "policy": policy,
            "block": block,
            "request": answer.index,
            "due_s": answer.due_s,
            "sent_s": answer.sent_s,
            "ended_s": answer.ended_s,
            "input_tokens": answer.input_tokens,
            "output_tokens": answer.output_tokens,
            "cached_tokens": answer.cached_tokens,
            "ttft_ms": answer.ttft_ms,
            "tokens": answer.tokens,
            "token_at_ms": np.asarray(answer.token_at_s) * 1e3,
            "status": answer.status.value,
            "detail": answer.detail,
        }
        for answer in answers
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write(blocks: Sequence[Block], folder: Path, prefix: str = "") -> None:
    """Write the requests and the counts of all blocks into a folder; raises OSError."""
    write_blocks(blocks, folder / f"{prefix}answers.parquet")
    write_counts(blocks, folder / f"{prefix}blocks.parquet")


def write_blocks(blocks: Sequence[Block], path: Path) -> None:
    """Write the requests of all blocks, numbered in their order; raises OSError."""
    tables = [table(block.answers, policy=block.policy, block=n) for n, block in enumerate(blocks)]
    pq.write_table(pa.concat_tables([SCHEMA.empty_table(), *tables]), path, compression="zstd")


def write_counts(blocks: Sequence[Block], path: Path) -> None:
    """Write the engine's counts of each block, in their order; raises OSError."""
    rows = [{"block": n, **{name: getattr(block, name) for name in COUNTS}} for n, block in enumerate(blocks)]
    pq.write_table(pa.Table.from_pylist(rows, schema=BLOCKS), path, compression="zstd")


def write_answers(answers: Sequence[LoadAnswer], path: Path) -> None:
    """Write requests of no policy yet; raises OSError."""
    pq.write_table(table(answers, policy="", block=0), path, compression="zstd")


def read_answers(path: Path) -> list[LoadAnswer]:
    """Read the requests of a file of raw numbers; raises OSError."""
    return [
        LoadAnswer(
            index=row["request"],
            due_s=row["due_s"],
            sent_s=row["sent_s"],
            ended_s=row["ended_s"],
            input_tokens=row["input_tokens"],
            token_at_s=tuple(ms / 1e3 for ms in row["token_at_ms"]),
            status=RequestEnd(row["status"]),
            detail=row["detail"],
            output_tokens=row["output_tokens"],
            cached_tokens=row["cached_tokens"],
        )
        for row in pq.read_table(path).to_pylist()
    ]
