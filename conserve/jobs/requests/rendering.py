"""Rendering: an input row becomes its request's payload, by a template, a messages column, or as it is."""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from conserve.endpoints.protocol import Url
from conserve.errors import TemplateError
from conserve.jobs.inputs.cells import Unreadable
from conserve.jobs.requests.fault import request_fault
from conserve.jobs.task import ROW, Kind, Task, in_template, is_word

Row = Mapping[str, Any]
"""The whole row in a template, for columns whose names are no words: `row['a b']`. A column called so wins."""

EXPRESSION = re.compile(r"\{[^{}]*")  # from a brace to the next one
QUOTED = re.compile(r"(['\"]).*?\1")

CALLS = ("tool_calls", "function_call")
"""Fields of a message that may stand in place of its content."""


class RenderedRow(NamedTuple):
    """A row's payload, or why it has none; `url` only where the row names its own route."""

    payload: str | None = None
    error_type: str | None = None
    error: str | None = None
    url: str | None = None


Renderer = Callable[[Row], RenderedRow]


class _Unprintable(JinjaError):
    """The template printed a null, which would read "None" to the model, or bytes as JSON."""


def _not_null(value: Any) -> Any:
    if value is None:
        raise _Unprintable("the template prints a null; write {{ column or '' }} if that is meant")
    return value


ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, finalize=_not_null
)


ENCODER = msgspec.json.Encoder(decimal_format="number")
"""Writes values as `conserve results` writes them in JSON."""

NUMBER = secrets.token_hex(16)
"""Mark in front of the digits of a decimal, which `json.dumps` can write as text alone; no row knows it."""


def to_json(value: Any, **options: Any) -> str:
    """JSON of a value for Jinja's filter `tojson`: dates and times are ISO text, decimals numbers of all digits."""
    written = json.dumps(value, default=in_json, **options)
    return re.sub(rf'"{NUMBER}([^"]*)"', r"\1", written) if NUMBER in written else written


def in_json(value: Any) -> Any:
    """A value that `json.dumps` has no form for, as one that it has; raises for bytes and for what is no value."""
    if isinstance(value, bytes):
        raise _Unprintable("tojson has no form for bytes; make text of them with --sql, or leave them out")
    if isinstance(value, Decimal):
        return NUMBER + ENCODER.encode(value).decode()
    if isinstance(value, date | time | timedelta):
        return msgspec.json.decode(ENCODER.encode(value))
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


ENVIRONMENT.policies["json.dumps_function"] = to_json


@contextmanager
def mistakes_named() -> Iterator[None]:
    """Turn errors of Jinja and Python in compiling a template into `TemplateError`."""
    try:
        yield
    except TemplateSyntaxError as error:
        raise TemplateError(
            f"the prompt template has a mistake in line {error.lineno}: {(error.message or '').rstrip('.')}"
        ) from error
    except (SyntaxError, RecursionError, MemoryError) as error:  # Python's own limits on nesting
        raise TemplateError("the prompt template nests too deep; write it flatter") from error
    except UnicodeEncodeError as error:
        raise TemplateError(f"the prompt template is not UTF-8 ({error.reason}); write it again") from error


def template_names(template: str, columns: Collection[str]) -> set[str]:
    """Columns that a template reads, of a file with these `columns`; a missing one is among them too."""
    with mistakes_named():
        tree = ENVIRONMENT.parse(template)
        names = meta.find_undeclared_variables(tree) - ENVIRONMENT.globals.keys()
        if ROW not in names or ROW in columns:
            return names
        uses = sum(name.name == ROW for name in tree.find_all(nodes.Name))
        keys = [
            item.arg.value
            for item in tree.find_all(nodes.Getitem)
            if isinstance(item.node, nodes.Name)
            and item.node.name == ROW
            and isinstance(item.arg, nodes.Const)
            and isinstance(item.arg.value, str)
        ]
        whole = whole_rows(tree)
    every = set(columns) if whole else set()
    return (names - {ROW} if len(keys) + whole == uses else names) | set(keys) | every


def whole_rows(tree: nodes.Template) -> int:
    """Number of places where a template writes its whole row: `row | tojson`."""
    filters = (found for found in tree.find_all(nodes.Filter) if found.name == "tojson")
    return sum(isinstance(found.node, nodes.Name) and found.node.name == ROW for found in filters)


def odd_name_hint(template: str, columns: Collection[str], missing: Collection[str]) -> str:
    """Hint on naming a column whose name is no word, where the template seems to mean one; else empty.

    `missing` are the names in the template that are no columns.
    """
    odd = [name for name in columns if not is_word(name)]
    spelled = " ".join(EXPRESSION.findall(QUOTED.sub("", template)))
    sought = {part for name in missing for part in parts_of(name)}
    meant = (
        name for name in odd if ROW in missing or sought & {*parts_of(name)} or is_spelled(name, spelled)
    )
    name = next(meant, None)
    return "" if name is None else f"; a template names {name!r} as {in_template(name)}"


def parts_of(name: str) -> list[str]:
    """Words of a column's name, in small letters."""
    return re.findall(r"[^\W_]+", name.casefold())


def is_spelled(name: str, text: str) -> bool:
    """True if a text has the words of a name one after the other, whatever stands between them."""
    words = r"[\W_]*".join(map(re.escape, parts_of(name))) or re.escape(name)
    return re.search(rf"(?<!\w){words}(?!\w)", text.casefold()) is not None


def compiled(template: str) -> Template:
    """The template, ready to render."""
    with mistakes_named():
        return ENVIRONMENT.from_string(template)


def renderer(task: Task) -> Renderer:
    """Function that renders the rows of a task."""
    if task.kind is Kind.PROMPT:
        assert task.template is not None
        return template_renderer(task.template)
    if task.kind is Kind.MESSAGES:
        assert task.column is not None
        return messages_renderer(task.column)
    return openai_renderer(task)


def template_renderer(template: str) -> Renderer:
    """Render rows through a Jinja template in the sandbox; a row that cannot be rendered fails alone."""
    ready = compiled(template)
    plain = sorted(template_names(template, [ROW]))
    keyed = sorted(template_names(template, []))
    whole = whole_rows(ENVIRONMENT.parse(template)) > 0

    def render(row: Row) -> RenderedRow:
        by_key = plain != keyed and ROW not in row
        values = {name: row[name] for name in (keyed if by_key else plain)}
        by_name = row if by_key and whole else values
        if Unreadable in map(type, by_name.values()):
            return RenderedRow(error_type="template", error=unreadable(by_name))
        try:
            return RenderedRow(ready.render({**values, ROW: by_name} if by_key else values))
        except SecurityError as error:
            raise TemplateError(
                f"the prompt template tries to leave Jinja's sandbox ({error}); use the row's columns only"
            ) from error
        except _Unprintable as error:
            return RenderedRow(error_type="template", error=str(error))
        except Exception as error:  # whatever a template's expression can raise is the row's error
            return RenderedRow(error_type="template", error=f"{type(error).__name__}: {error}")

    return render


def unreadable(values: Row) -> str:
    """Sentence for the first column that holds an `Unreadable` value."""
    return next(
        f"column {name!r} holds {value.reason}"
        for name, value in values.items()
        if isinstance(value, Unreadable)
    )


def messages_renderer(column: str) -> Renderer:
    """Take a chat from a column: a non-empty list of objects with a role and a content or calls."""

    def render(row: Row) -> RenderedRow:
        messages = row[column]
        if fault := messages_fault(messages):
            return RenderedRow(error_type="invalid_messages", error=f"{column}: {fault}")
        try:
            return RenderedRow(msgspec.json.encode([without_nulls(m) for m in messages]).decode())
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            said = f"a message that JSON has no form for ({error})"
            return RenderedRow(error_type="invalid_messages", error=f"{column}: {said}")

    return render


def without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message, and the parts of its content, without the fields that Parquet fills with nulls."""
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(kept.get("content"), list):
        kept["content"] = filled(kept["content"])
    return kept


def filled(value: Any) -> Any:
    """A value of JSON without the fields that are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: filled(part) for key, part in value.items() if part is not None}
    return [filled(part) for part in value] if isinstance(value, list) else value


def messages_fault(messages: object) -> str | None:
    """Fault of a row's messages; None without one."""
    if isinstance(messages, Unreadable):
        return messages.reason
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return "not a list of messages with at least one in it"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"message {number} is no object"
        if not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        if message.get("content") is None and not any(map(message.get, CALLS)):
            return f"message {number} has no content"
    return None


def openai_renderer(task: Task) -> Renderer:
    """Take OpenAI Batch lines as they are; one that every engine would reject fails here."""

    def render(row: Row) -> RenderedRow:
        if isinstance(row["custom_id"], Unreadable):
            said = f"the custom_id holds {row['custom_id'].reason}"
            return RenderedRow(error_type="invalid_request", error=said)
        rendered = render_openai_line(row)
        if rendered.payload is not None and (
            fault := request_fault(row["url"], {**task.params, **row["body"]})
        ):
            return RenderedRow(error_type="invalid_request", error=fault)
        return rendered

    return render


def render_openai_line(row: Row) -> RenderedRow:
    """Render an OpenAI Batch line: its body as it is, but without `stream` and `stream_options`."""
    url = row["url"]
    if url not in tuple(Url):
        return RenderedRow(error_type="unsupported_url", error=f"{url} is not one of {', '.join(Url)}")
    if isinstance(row["body"], Unreadable):
        return RenderedRow(error_type="invalid_request", error=f"the body holds {row['body'].reason}")
    body = {key: value for key, value in row["body"].items() if key not in ("stream", "stream_options")}
    return RenderedRow(msgspec.json.encode(body).decode(), url=url)
