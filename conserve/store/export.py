"""A job's results as a file: Parquet, JSON lines, CSV, or OpenAI Batch output, in the order of the input rows."""

import csv
import io
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.store import home
from conserve.store.query import ROW, columns_of, literal, literals, prefixed, quoted
from conserve.store.store import Store


class Format(StrEnum):
    """How `conserve results` writes."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"
    OPENAI = "openai"


SUFFIXES = {
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
}
SUFFIXES[".csv"] = Format.CSV

DOCUMENTS = ("json", "choices", "logprobs")  # columns of JSON text; one of the user's may be called so too
BATCH_ROWS = 8192


def ordered(duck: duckdb.DuckDBPyConnection, job_id: str, *, with_inputs: bool) -> duckdb.DuckDBPyRelation:
    """The job's results by input row, with the input's own columns behind them if asked.

    An input column that is called like one of the results', such as `text`, gets the prefix `input_`.
    """
    chosen, joined = ["r.*"], "results r"
    if with_inputs:
        taken = columns_of(duck, "results")
        theirs = [name for name in columns_of(duck, "inputs") if name not in ROW]
        chosen += [f"i.{quoted(name)} as {quoted(alias)}" for name, alias in prefixed(theirs, taken).items()]
        joined = "results r join inputs i using (job_id, row_index)"
    where = f"r.job_id = {literal(job_id)}"
    return duck.sql(f"select {', '.join(chosen)} from {joined} where {where} order by r.row_index")


def with_urls(duck: duckdb.DuckDBPyConnection, store: Store, job_id: str) -> duckdb.DuckDBPyRelation:
    """The job's results with the route that each row named itself, if it did."""
    requests = literals([home.requests_file(store.home, job_id)])
    return duck.sql(
        f"select r.*, q.url from results r join (select row_index, url from read_parquet({requests})) q "
        f"using (row_index) where r.job_id = {literal(job_id)} order by r.row_index"
    )


def write_parquet(answer: duckdb.DuckDBPyRelation, sink: BinaryIO) -> int:
    """Write the answer as one Parquet file; returns the number of rows."""
    reader = answer.to_arrow_reader(BATCH_ROWS)
    rows = 0
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), reader.schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def write_lines(
    answer: duckdb.DuckDBPyRelation,
    sink: BinaryIO,
    convert: Callable[[dict[str, Any]], Any] = lambda row: row,
) -> int:
    """Write one JSON object a line; JSON columns come out as values, not as text."""
    encode = msgspec.json.Encoder().encode
    rows = 0
    for row in documents_parsed(answer):
        sink.write(encode(convert(row)) + b"\n")
        rows += 1
    return rows


def write_csv(answer: duckdb.DuckDBPyRelation, sink: BinaryIO) -> int:
    """Write CSV with a header; JSON columns are JSON text."""
    text = io.TextIOWrapper(sink, encoding="utf-8", newline="", write_through=True)
    reader = answer.to_arrow_reader(BATCH_ROWS)
    writer = csv.writer(text)
    writer.writerow(reader.schema.names)
    rows = 0
    for batch in reader:
        writer.writerows(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        rows += batch.num_rows
    text.detach()
    return rows


def documents_parsed(answer: duckdb.DuckDBPyRelation) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries with their JSON columns parsed."""
    raw = msgspec.Raw
    kinds = zip(answer.columns, answer.types, strict=True)
    documents = [name for name, kind in kinds if name in DOCUMENTS and str(kind) == "JSON"]
    for batch in answer.to_arrow_reader(BATCH_ROWS):
        for row in batch.to_pylist():
            for name in documents:
                if row[name] is not None:
                    row[name] = raw(on_one_line(row[name]).encode())
            yield row


def on_one_line(document: str) -> str:
    """The same JSON. In a string a line break is escaped, so that those there are stand between values."""
    return document.replace("\r", " ").replace("\n", " ")


def openai_line(row: dict[str, Any], default_url: str) -> dict[str, Any]:
    """One line of an OpenAI Batch output file."""
    line: dict[str, Any] = {
        "id": f"{row['job_id']}-{row['row_index']}",
        "custom_id": row["custom_id"] if row["custom_id"] is not None else str(row["row_index"]),
        "response": None,
        "error": None,
    }
    if row["error_type"] is not None:
        line["error"] = {"code": row["error_type"], "message": row["error"]}
        return line
    body = openai_body(row, chat=(row["url"] or default_url).endswith("chat/completions"))
    line["response"] = {"status_code": 200, "request_id": line["id"], "body": body}
    return line


def openai_body(row: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """The response body that an OpenAI-compatible server would have given."""
    if row["choices"] is not None:
        choices = msgspec.json.decode(row["choices"])
    else:
        choices = [{"text": row["text"], "finish_reason": row["finish_reason"], "logprobs": row["logprobs"]}]
    return {
        "id": f"{row['job_id']}-{row['row_index']}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(row["finished_at"].timestamp()),
        "model": row["model"],
        "system_fingerprint": row["engine"],
        "choices": [openai_choice(index, choice, chat=chat) for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": row["prompt_tokens"],
            "completion_tokens": row["completion_tokens"],
            "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": row["cached_tokens"]},
        },
    }


def openai_choice(index: int, choice: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """One entry of `choices` in the shape of its route."""
    text = {"message": {"role": "assistant", "content": choice["text"]}} if chat else {"text": choice["text"]}
    return {
        "index": index,
        **text,
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice["finish_reason"],
    }


def format_of(path: Path | None, wanted: Format | None) -> Format:
    """The format asked for, else the one the file's name says, else JSON lines."""
    return wanted or SUFFIXES.get(path.suffix.lower() if path else "", Format.JSONL)
