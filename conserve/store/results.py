"""A result row: as JSON in the journal, as Arrow in a shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one input row: an answer, or an error with `error_type` and `error` set.

    Times are seconds since the epoch; `json`, `choices` and `logprobs` are JSON text.
    """

    row_index: int  # row of the input file, from 0
    custom_id: str | None = None
    text: str | None = None  # of the first choice
    json: str | None = None  # the text parsed, where a schema was asked for
    choices: str | None = None  # all choices, where n > 1
    finish_reason: str | None = None
    model: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0  # completion tokens taken over from an earlier attempt
    logprobs: str | None = None
    attempts: int = 1
    error_type: str | None = None
    error: str | None = None
    submitted_at: float
    started_at: float
    finished_at: float

    @property
    def failed(self) -> bool:
        """Whether the row ended in an error."""
        return self.error_type is not None


COLUMNS = tuple(Result.__slots__)
_INTEGERS = {
    "row_index": "int64",
    "prompt_tokens": "int32",
    "completion_tokens": "int32",
    "cached_tokens": "int32",
    "resumed_tokens": "int32",
    "attempts": "int32",
}
_TIMES = ("submitted_at", "started_at", "finished_at")

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Result).decode


def arrow_schema() -> "pa.Schema":
    """Columns of a shard: `job_id`, `position`, then the fields of `Result`."""
    import pyarrow as pa

    def kind(name: str) -> "pa.DataType":
        if name in _TIMES:
            return pa.timestamp("us", tz="UTC")
        return getattr(pa, _INTEGERS.get(name, "string"))()

    ours = [("job_id", pa.string()), ("position", pa.int64())]
    return pa.schema([*ours, *((name, kind(name)) for name in COLUMNS)])


def to_arrow(job_ids: Sequence[str], positions: Sequence[int], results: Sequence[Result]) -> "pa.Table":
    """Results, with their jobs and positions, as a table of `arrow_schema`."""
    import pyarrow as pa

    schema = arrow_schema()
    columns: list[list[object]] = [list(job_ids), list(positions)]
    for name in COLUMNS:
        values = [getattr(result, name) for result in results]
        columns.append([round(value * 1e6) for value in values] if name in _TIMES else values)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)
