"""One line of an OpenAI Batch file: custom_id, method, url and body."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from conserve.errors import one_line
from conserve.jobs.inputs.cells import Unreadable

STRING = (str,)
OBJECT = (dict, Unreadable)  # a body with half of a surrogate pair fails as a row of the job
FIELDS: Mapping[str, tuple[type, ...]] = {
    "custom_id": STRING,
    "method": STRING,
    "url": STRING,
    "body": OBJECT,
}
KINDS: Mapping[tuple[type, ...], str] = {STRING: "a string", OBJECT: "an object"}
OPENAI_COLUMNS = tuple(FIELDS)
INVALID_METHOD = "invalid_method"


class LineFault(NamedTuple):
    """Reason why an object is no request, in the form of OpenAI's batch errors."""

    code: str
    param: str
    message: str


def fault_of(row: Mapping[str, Any]) -> LineFault | None:
    """First fault of an object that a line holds; None if it is a request."""
    for name, kind in FIELDS.items():
        if name not in row:
            said = f"Missing required parameter: '{name}'."
            return LineFault("missing_required_parameter", name, said)
        value = id_of_line(row[name]) if name == "custom_id" else row[name]
        if not isinstance(value, kind):
            said = f"Invalid type for '{name}': expected {KINDS[kind]}."
            return LineFault("invalid_type", name, said)
    if row["method"] != "POST":
        said = f"The method is {one_line(row['method'], most=20)!r}; only POST is possible."
        return LineFault(INVALID_METHOD, "method", said)
    return None


def id_of_line(value: object) -> object:
    """The id of a batch's line as the store keeps it: text with half of a surrogate pair in escapes."""
    return value.escaped if isinstance(value, Unreadable) else value
