"""Validation of a batch's input file: one pass, nothing kept but the ids, faults named by line."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from conserve.errors import one_line
from conserve.jobs.inputs.nesting import MAX_DEPTH, is_deeper
from conserve.jobs.inputs.openai_line import FIELDS, fault_of, id_of_line
from conserve.jobs.inputs.text_rows import row_with_halves
from conserve.store.books.batches import InputFault

LINE_BYTES = 64 << 20  # as much as the body of a request to `conserve serve` may have
MOST_PARTS = 1_000_000  # objects and lists of a line: decoded, one of two characters takes some 60 bytes
MOST_FAULTS = 100
MOST_NAMES = 100  # of further fields of the lines, each of which is a column of the kept input


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an upload and of a batch. The defaults are OpenAI's."""

    file_bytes: int = 200_000_000
    requests: int = 50_000


def faults(path: Path, endpoint: str, limits: Limits) -> list[InputFault]:
    """Faults of an input file, at most `MOST_FAULTS`; none if it can become a job."""
    found: list[InputFault] = []
    for fault in Validation(endpoint, limits).faults(path):
        found.append(fault)
        if len(found) == MOST_FAULTS:
            break
    return found


class Validation:
    """One pass over an input file."""

    def __init__(self, endpoint: str, limits: Limits) -> None:
        self._endpoint, self._limits = endpoint, limits
        self._ids: set[str] = set()
        self._names: set[str] = set()  # of further fields
        self._decode = msgspec.json.Decoder().decode

    def faults(self, path: Path) -> Iterator[InputFault]:
        """Yield the faults in the order of the lines."""
        requests = 0
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
                if len(line) > LINE_BYTES:
                    yield too_large(number, f"{LINE_BYTES >> 20} MiB")
                    return
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line or line.isspace():
                    continue
                requests += 1
                if requests > self._limits.requests:
                    yield too_many(self._limits.requests)
                    return
                if (fault := self._fault(line, number)) is not None:
                    yield fault
                if len(self._names) > MOST_NAMES:
                    yield too_many_names(number)
                    return
        if not requests:
            yield InputFault(code="empty_file", message="The input file has no requests.")

    def _fault(self, line: bytes, number: int) -> InputFault | None:
        parts = line.count(b"{") + line.count(b"[")
        if parts > MOST_PARTS:
            return too_large(number, f"{MOST_PARTS:,} objects and lists, or as many opening brackets")
        try:
            row = self._decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            if (row := row_with_halves(line)) is None:
                return invalid_json(number, one_line(error))
        if not isinstance(row, dict):
            return invalid_json(number, "a line is a JSON object")
        if parts > MAX_DEPTH and is_deeper(row, MAX_DEPTH):
            return invalid_json(number, f"it nests more than {MAX_DEPTH} levels deep")
        return self._request_fault(row, number)

    def _request_fault(self, row: dict[str, Any], number: int) -> InputFault | None:
        """Fault of a line that is an object; the ids of faultless lines are noted."""
        self._names.update(row.keys() - FIELDS.keys())
        if (fault := fault_of(row)) is not None:
            return InputFault(code=fault.code, message=fault.message, line=number, param=fault.param)
        if row["url"] != self._endpoint:
            said = f"The url is {one_line(row['url'], most=80)!r}, and the batch's endpoint is '{self._endpoint}'."
            return InputFault(code="mismatched_url", message=said, line=number, param="url")
        custom_id = str(id_of_line(row["custom_id"]))  # half of a surrogate pair fails as a row of the job
        if custom_id in self._ids:
            said = f"The custom_id {one_line(custom_id, most=80)!r} is on an earlier line; make ids unique."
            return InputFault(code="duplicate_custom_id", message=said, line=number, param="custom_id")
        self._ids.add(custom_id)
        return None


def too_many_names(number: int) -> InputFault:
    """Fault of a file whose lines have too many different fields."""
    said = (
        f"The lines have more than {MOST_NAMES} different fields beside {', '.join(FIELDS)}; put what differs by "
        "line into the custom_id or the body."
    )
    return InputFault(code="too_many_fields", message=said, line=number)


def too_many(most: int) -> InputFault:
    """Fault of a file with too many requests."""
    said = f"The input file has more than {most:,} requests; split it."
    return InputFault(code="too_many_requests", message=said)


def too_large(number: int, most: str) -> InputFault:
    """Fault of a line that is too large to be decoded."""
    return InputFault(code="line_too_large", message=f"This line has more than {most}.", line=number)


def invalid_json(number: int, why: str) -> InputFault:
    """Fault of a line that is not a JSON object."""
    said = f"This line is not parseable as valid JSON: {why}."
    return InputFault(code="invalid_json_line", message=said, line=number)
