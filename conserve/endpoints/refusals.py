"""Responses that are not completions: the error for each, which tells if the row or the server is at fault."""

import re
import ssl
from collections.abc import Mapping, Set
from typing import Any

import httpx
import msgspec

from conserve.endpoints.answers import UNREADABLE, excerpt
from conserve.endpoints.exchange import WholeResponse
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    RequestRejected,
    one_line,
)
from conserve.open_files import causes
from conserve.units import parse_retry_after

TOO_LONG = re.compile(
    r"context[ _](length|size)|maximum model length|too long|max_model_len|maximum context"
    r"|tokens \+ .max_new_tokens. must be|inputs. must have less than",  # of TGI
    re.IGNORECASE,
)
OF_ACCOUNT = re.compile(
    r"api[ _-]?key|(invalid|unknown|no such) model\b|model\b.{0,80}\b(not found|not exist|invalid|unknown)\b",
    re.IGNORECASE,
)
ENGINE_DEAD = ("enginecore encountered an issue", "enginedeaderror")  # of vLLM, with status 500
OF_ROWS = (400, 413, 422)  # of rejections; the others would be as true of any other request
UNPAID_NAMES = frozenset({"insufficient_quota", "billing_not_active"})  # OpenAI's, with status 429
UNPAID, PROXY = 402, 407  # no change of a row helps: the account or the proxy has to be mended
BUSY = (409, 423, 425, 429, 498, 503, 529)  # of Groq: 498, of Anthropic: 529
GIVEN_UP = (408, 424, 460, 499)  # under way; 424 is of TGI, whose batch failed, the others are of proxies
UNREACHED = (504, 521, 522, 523, 530)  # of proxies, Cloudflare's among them
CUT_OFF = ("reset reason: connection termination", "reset reason: remote reset")  # of Envoy, with status 503
OF_ANSWERS = ("choices", "data", "output")  # fields that an answer has, each of another route
MOST_RETRY_AFTER_S = 60.0  # longest wait that a server may ask for


def refusal(
    reply: WholeResponse, url: httpx.URL, route: str, *, now: float, answers: bool = False
) -> EndpointError:
    """The error for a response with a status other than 200; `answers` if key and model are good for others."""
    if 300 <= reply.status < 400:
        return redirect_error(reply, url, route)
    wait_s = retry_after_s(reply.headers, now=now)
    said, names = error_message(reply.content), error_names(reply.content)
    return error_of(reply.status, said, wait_s, answers=answers, names=names)


def error_of(
    status: int,
    detail: str,
    retry_after_s: float | None = None,
    *,
    answers: bool = False,
    names: Set[str] = frozenset(),
) -> EndpointError:
    """The error for a status, of a response or of an event within a stream; `names` are its code and its type.

    A proxy answers 502 for a row whose server closed the connection, perhaps because of the row: a faulty answer.
    """
    message = f"HTTP {status}: {detail}"
    lowered = detail.lower()
    if status >= 500 and any(words in lowered for words in ENGINE_DEAD):
        return EngineDied(message)
    if status == httpx.codes.SERVICE_UNAVAILABLE and any(words in lowered for words in CUT_OFF):
        return EndpointFault(message)
    if status in (UNPAID, PROXY) or (status in BUSY and not UNPAID_NAMES.isdisjoint(names)):
        what = "the proxy's password" if status == PROXY else "the account's credit"
        return EndpointUnusable(f"{message.rstrip('. ')}; check {what}", status=status)
    if status in BUSY:
        return EndpointBusy(message, retry_after_s=retry_after_s)
    if status in UNREACHED:
        return EndpointUnavailable(message)
    if status == httpx.codes.UNAUTHORIZED or (status == httpx.codes.FORBIDDEN and not answers):
        return EndpointUnusable(f"{message}; check CONSERVE_API_KEY", status=status)
    if status == httpx.codes.NOT_FOUND and "model" in lowered and not answers:
        mend = "correct the name of the model (--model; with --rebind where the job names it)"
        return EndpointUnusable(f"{message.rstrip('. ')}; {mend}", status=status)
    if status in GIVEN_UP or not 400 <= status < 500:
        return EndpointFault(message)
    return RequestRejected(
        message, kind="too_long" if TOO_LONG.search(" ".join([*names, detail])) else "invalid_request"
    )


def is_of_account(reply: WholeResponse) -> bool:
    """True if a message is about the key or the name of the model, as some gateways say it with status 400."""
    return OF_ACCOUNT.search(error_message(reply.content)) is not None


def error_in_stream(error: Any) -> EndpointError:
    """The error for an error event within a stream; without a status it is the server's fault."""
    found = error if isinstance(error, Mapping) else {"message": error}
    message = found.get("message")
    status = status_named(found) or httpx.codes.INTERNAL_SERVER_ERROR
    return error_of(status, one_line(message) if isinstance(message, str) else "no message")


def status_named(error: Mapping[str, Any]) -> int | None:
    """The HTTP status that an error has as its code, as a number or as a text; None for any other code."""
    code = error.get("code")
    if isinstance(code, str) and len(code) == 3 and code.isascii() and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else None


def with_own_status(reply: WholeResponse) -> WholeResponse:
    """The response, with the status that its error names: some gateways send the errors of others with a 200."""
    body = decode_or_none(reply.content)
    error = body.get("error") if isinstance(body, dict) and not any(map(body.get, OF_ANSWERS)) else None
    status = status_named(error) if reply.status == httpx.codes.OK and isinstance(error, dict) else None
    return reply if status is None else reply._replace(status=status)


def error_message(content: bytes) -> str:
    """The message in the body of an error, or the beginning of the body."""
    error = error_in(content)
    message = error.get("message") if isinstance(error, dict) else error
    return one_line(message) if isinstance(message, str) else excerpt(content)


def error_names(content: bytes) -> frozenset[str]:
    """The code and the type in the body of an error, as far as they are texts."""
    error = error_in(content)
    found = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return frozenset(name for name in found if isinstance(name, str))


def error_in(content: bytes) -> Any:
    """The error in a body, which may be the body itself; None if that is unreadable."""
    body = decode_or_none(content)
    return body.get("error", body) if isinstance(body, dict) else body


def decode_or_none(content: bytes) -> Any:
    """The JSON value of a body; None if it is unreadable."""
    try:
        return msgspec.json.decode(content)
    except UNREADABLE:
        return None


def retry_after_s(headers: httpx.Headers, *, now: float) -> float | None:
    """Seconds that the server asks to wait, a minute at most."""
    return parse_retry_after(headers.get("retry-after", ""), now=now, most_s=MOST_RETRY_AFTER_S)


def redirect_error(reply: WholeResponse, url: httpx.URL, route: str) -> EndpointUnusable:
    """The error for an address that redirects requests: the address is wrong, and no row is at fault."""
    status, here = reply.status, f"{one_line(url)} answers with HTTP {reply.status}"
    location = reply.headers.get("location", "")
    try:
        target = url.join(location)
    except (httpx.InvalidURL, ValueError):
        location = ""
    if not location:
        message = f"{here} and names no other address; correct --endpoint (CONSERVE_ENDPOINT)"
        return EndpointUnusable(message, status=status)
    to = one_line(target.copy_with(query=None, fragment=None))
    if to.rstrip("/").endswith(route) and to.rstrip("/") != one_line(url):
        better = to.rstrip("/").removesuffix(route)
        message = f"{here} and a redirect to {to}; use that server: --endpoint {better}"
        return EndpointUnusable(message, status=status)
    message = f"{here} and a redirect to {to}; correct --endpoint (CONSERVE_ENDPOINT)"
    return EndpointUnusable(message, status=status)


def certificate_error(error: BaseException, base_url: str) -> EndpointUnusable | None:
    """The error for a server whose certificate was refused; None if the connection failed for another reason."""
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return EndpointUnusable(
                f"the certificate of {base_url} is refused ({one_line(cause.verify_message)}); correct "
                "--endpoint, or name the certificate to trust in SSL_CERT_FILE"
            )
    return None
