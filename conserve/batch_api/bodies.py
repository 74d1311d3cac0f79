"""JSON bodies, query parameters and headers of clients' requests; each mistake names its parameter."""

import re
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import ClientDisconnect, Request

from conserve.batch_api.refusals import Refused
from conserve.endpoints.protocol import Url
from conserve.errors import one_line
from conserve.http_server import STALLED, parts
from conserve.store.books.states import LONGEST_DEADLINE_S, OnLate
from conserve.units import parse_length

BODY_BYTES = 1 << 20
WINDOW = re.compile(r"[1-9]\d{0,8}[smhd]")
ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
KEY = re.compile(r"[ -~]{1,255}")
EXPIRES_AFTER = {name: f"expires_after[{name}]" for name in ("anchor", "seconds")}  # fields of a form

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Value = Annotated[str, msgspec.Meta(max_length=512)]


class ExpiresAfter(msgspec.Struct):
    """Life of a file, from its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class CreateBatch(msgspec.Struct):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Label, Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    on_late: OnLate | None = None  # not in OpenAI's


async def create_batch(request: Request) -> CreateBatch:
    """The body of `POST /v1/batches`; raises `Refused`, with the parameter, for another body."""
    content = await whole_body(request)
    try:
        asked = msgspec.json.decode(content, type=CreateBatch)
    except msgspec.ValidationError as error:
        raise Refused.invalid(one_line(error), param=parameter_of(str(error))) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused.invalid(f"the body is not JSON: {one_line(error)}") from error
    if asked.endpoint not in tuple(Url):
        said = (
            f"Invalid value: {one_line(asked.endpoint, most=80)!r}. Supported values are: {', '.join(Url)}."
        )
        raise Refused.invalid(said, param="endpoint", code="invalid_value")
    if ID.fullmatch(asked.input_file_id) is None:
        raise no_input(asked.input_file_id)
    if asked.on_late is OnLate.PUSH:
        said = "on_late is 'expire' or 'best-effort': live requests give way only to jobs of conserve submit"
        raise Refused.invalid(said, param="on_late", code="invalid_value")
    window_s(asked.completion_window)
    return asked


def no_input(name: str) -> Refused:
    """Refusal of a batch whose input file the caller's project has not."""
    return Refused.invalid(
        f"No such file: {one_line(name, most=100)}", param="input_file_id", code="file_not_found"
    )


async def whole_body(request: Request) -> bytes:
    """The body of a request; raises `Refused` for one beyond `BODY_BYTES`, and for one that does not end."""
    content = b""
    try:
        async for chunk in parts(request.stream()):
            content += chunk
            if len(content) > BODY_BYTES:
                raise Refused.invalid(f"the body has more than {BODY_BYTES:,} bytes")
    except ClientDisconnect as error:
        raise Refused.invalid("the body ended early; send it again") from error
    except TimeoutError as error:
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, STALLED) from error
    return content


def parameter_of(said: str) -> str | None:
    """Name of the parameter in msgspec's words: "... - at `$.metadata`", "missing required field `endpoint`"."""
    found = re.search(r"`\$\.(\w+)", said) or re.search(r"required field `(\w+)`", said)
    return found[1] if found else None


def window_s(text: str) -> float:
    """Seconds of a completion window such as "24h"; raises `Refused` for other text."""
    length_s = parse_length(text) if WINDOW.fullmatch(text) else None
    if length_s is None or length_s > LONGEST_DEADLINE_S:
        said = f"Invalid value: {one_line(text, most=40)!r}. It is '24h', or a number with s, m, h or d."
        raise Refused.invalid(said, param="completion_window", code="invalid_value")
    return length_s


def limit(request: Request, default: int, most: int) -> int:
    """The parameter `limit` of a list."""
    text = request.query_params.get("limit", str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        said = f"limit is a whole number from 1 to {most:,}, not {one_line(text, most=40)!r}"
        raise Refused.invalid(said, param="limit", code="invalid_value")
    return int(text)


def one_of(request: Request, name: str, values: tuple[str, ...], default: str) -> str:
    """A parameter with few values."""
    value = request.query_params.get(name, default)
    if value not in values:
        said = f"{name} is one of {', '.join(values)}, not {one_line(value, most=40)!r}"
        raise Refused.invalid(said, param=name, code="invalid_value")
    return value


def named(request: Request, what: str) -> str:
    """Id in a request's path; raises `Refused` for text that no id is."""
    return required_id(str(request.path_params["id"]), what)


def after(request: Request, what: str) -> str | None:
    """The parameter `after` of a list: the last id of the page before."""
    found = request.query_params.get("after")
    return None if found is None else required_id(found, what)


def required_id(text: str, what: str) -> str:
    """The text; raises `Refused` if it cannot be an id, so that a database need not take it."""
    if ID.fullmatch(text) is None:
        raise Refused.missing(what, text)
    return text


def idempotency_key(request: Request) -> str | None:
    """Header `Idempotency-Key`; None without it."""
    key = request.headers.get("idempotency-key")
    if key is not None and KEY.fullmatch(key) is None:
        raise Refused.invalid("Idempotency-Key is 1 to 255 printable characters", param="Idempotency-Key")
    return key


def expires_after(fields: dict[str, str]) -> ExpiresAfter | None:
    """Life of an upload, of the form's fields `expires_after[anchor]` and `expires_after[seconds]`."""
    given: dict[str, Any] = {name: fields[field] for name, field in EXPIRES_AFTER.items() if field in fields}
    if not given:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False)
    except msgspec.ValidationError as error:
        raise Refused.invalid(f"expires_after: {one_line(error)}", param="expires_after") from error
