"""A result row: as JSON in the journal, as Arrow in a shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
from msgspec import Meta

from conserve.errors import one_line

if TYPE_CHECKING:
    import pyarrow as pa

INVALID = "invalid_answer"  # error type of a row whose answer does not fit the columns
UNKNOWN = -1  # row index of a payload that is no result at all
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
RowIndex = Annotated[int, Meta(ge=UNKNOWN, le=2**63 - 1)]
Time = Annotated[float, Meta(ge=0, le=253_402_300_799)]  # the year 9999


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one input row: an answer, or an error with `error_type` and `error` set.

    Times are seconds since the epoch; `json`, `choices` and `logprobs` are JSON text.
    """

    row_index: RowIndex  # row of the input file, from 0
    custom_id: str | None = None
    text: str | None = None  # of the first choice
    json: str | None = None  # the text parsed, where a schema was asked for
    choices: str | None = None  # all choices, where n > 1
    finish_reason: str | None = None
    model: str | None = None
    engine: str | None = None  # Endpoint.identity: the model's name with a digest, or the server's address
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0
    resumed_tokens: Count = 0  # completion tokens taken over from an earlier attempt
    logprobs: str | None = None
    attempts: Count = 1
    error_type: str | None = None
    error: str | None = None
    submitted_at: Time
    started_at: Time
    finished_at: Time

    @property
    def failed(self) -> bool:
        """True if the row ended in an error."""
        return self.error_type is not None


COLUMNS = Result.__struct_fields__
TOKEN_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "resumed_tokens")
_INTEGERS = {
    "row_index": "int64",
    "prompt_tokens": "int32",
    "completion_tokens": "int32",
    "cached_tokens": "int32",
    "resumed_tokens": "int32",
    "attempts": "int32",
}
TIMES = ("submitted_at", "started_at", "finished_at")
DOCUMENTS = ("json", "choices", "logprobs")  # columns that hold JSON

encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Result).decode


def checked(result: Result) -> tuple[Result, bytes]:
    """Encode a result; one that could not be decoded again is replaced by an error of its row first."""
    try:
        payload = encode(result)
        _decode(payload)
    except UNREADABLE as error:
        result = misfit(ResultHeader.of(result), error)
        payload = encode(result)
    return result, payload


def decode(payload: bytes) -> Result:
    """Decode a payload; an answer that does not fit the columns is read as an error of its row.

    Stores of earlier versions hold such answers, since they were journalled unchecked.
    """
    try:
        return _decode(payload)
    except UNREADABLE as error:
        return misfit(ResultHeader.read(payload), error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHeader:
    """Fields of a result that do not come from an endpoint."""

    row_index: RowIndex = UNKNOWN
    custom_id: str | None = None
    attempts: Count = 1
    submitted_at: Time = 0.0
    started_at: Time = 0.0
    finished_at: Time = 0.0

    @classmethod
    def of(cls, result: Result) -> Self:
        """Header of a result that cannot be encoded."""
        values = {name: getattr(result, name) for name in cls.__slots__}
        if isinstance(named := values["custom_id"], str):
            values["custom_id"] = named.encode(errors="backslashreplace").decode()
        return cls(**values)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """Header in a payload; an empty one if it cannot be read."""
        try:
            return msgspec.json.decode(payload, type=cls)
        except UNREADABLE:
            return cls()


def misfit(header: ResultHeader, why: Exception) -> Result:
    """Failed result of a row whose answer does not fit the columns."""
    return Result(
        **{name: getattr(header, name) for name in ResultHeader.__slots__},
        error_type=INVALID,
        error=f"the answer does not fit the columns of results ({one_line(why)}); run: conserve retry JOB",
    )


def is_object(payload: bytes) -> bool:
    """True if a payload is a JSON object, whatever is in it."""
    try:
        msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        return False
    return True


def counts(payload: bytes) -> dict[str, int]:
    """Token counts in a payload of any form, as they were added to the job's counters."""
    try:
        found = msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        found = {}
    return {name: n if isinstance(n := found.get(name), int) else 0 for name in TOKEN_COUNTS}


def arrow_schema() -> "pa.Schema":
    """Columns of a shard: `job_id`, `position`, then the fields of `Result`."""
    import pyarrow as pa

    def kind(name: str) -> "pa.DataType":
        if name in TIMES:
            return pa.timestamp("us", tz="UTC")
        return getattr(pa, _INTEGERS.get(name, "string"))()

    ours = [("job_id", pa.string()), ("position", pa.int64())]
    return pa.schema([*ours, *((name, kind(name)) for name in COLUMNS)])


def to_arrow(job_ids: Sequence[str], positions: Sequence[int], results: Sequence[Result]) -> "pa.Table":
    """Results, with their jobs and positions, as a table of `arrow_schema`."""
    import pyarrow as pa

    schema = arrow_schema()
    columns: list[Sequence[object]] = [job_ids, positions]
    values = zip(*map(msgspec.structs.astuple, results), strict=True) if results else ((),) * len(COLUMNS)
    for name, of_rows in zip(COLUMNS, values, strict=True):
        columns.append([round(value * 1e6) for value in of_rows] if name in TIMES else of_rows)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def from_arrow(table: "pa.Table") -> list[Result]:
    """Results in a table that `to_arrow` made; an earlier version's table lacks columns."""
    columns = {name: table[name].to_pylist() for name in COLUMNS if name in table.column_names}
    for name in TIMES:
        columns[name] = [value.timestamp() for value in columns[name]]
    rows = zip(*columns.values(), strict=True)
    return [Result(**dict(zip(columns, row, strict=True))) for row in rows]
