"""Responses that are no completions, and connections that are refused: whose fault each is."""

import json
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import format_datetime

import httpx
import pytest

from conserve.endpoints.exchange import WholeResponse
from conserve.endpoints.refusals import (
    certificate_error,
    error_in_stream,
    error_message,
    error_of,
    refusal,
    retry_after_s,
)
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

ROUTE = "/v1/chat/completions"
HERE = "http://server:8000"
NOW = 1_800_000_000.0


def refused(status: int, content: bytes = b"", **headers: str) -> EndpointError:
    named = httpx.Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return refusal(WholeResponse(status, named, content), httpx.URL(HERE + ROUTE), ROUTE, now=NOW)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("2.5", 2.5),
        ("-5", 0.0),
        ("1000000000", 60.0),
        ("1e400", 60.0),
        ("inf", 60.0),
        ("-inf", None),
        ("nan", None),
        ("", None),
        ("soon", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60.0),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
        ("Fri, 99 Foo 2026", None),
        (format_datetime(datetime.fromtimestamp(NOW + 20, UTC), usegmt=True), 20.0),
        (format_datetime(datetime.fromtimestamp(NOW - 20, UTC), usegmt=True), 0.0),
    ],
)
def test_a_server_is_waited_for_as_it_asks_and_a_minute_at_most(value: str, seconds: float | None) -> None:
    assert retry_after_s(httpx.Headers({"retry-after": value}), now=NOW) == seconds
    error = refused(429, retry_after=value)
    assert isinstance(error, EndpointBusy)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": "insufficient_quota", "type": "insufficient_quota"}, EndpointUnusable),
        ({"code": None, "type": "insufficient_quota"}, EndpointUnusable),
        ({"code": "billing_not_active"}, EndpointUnusable),
        ({"code": "rate_limit_exceeded", "type": "requests"}, EndpointBusy),
        ({"code": 429, "message": "insufficient_quota of requests a minute"}, EndpointBusy),
        ("insufficient_quota", EndpointBusy),
    ],
)
def test_an_account_without_credit_is_no_busy_server(error: object, kind: type[EndpointError]) -> None:
    """OpenAI says both with one status."""
    found = refused(429, json.dumps({"error": error}).encode())
    assert type(found) is kind
    assert str(found).endswith("check the account's credit") == (kind is EndpointUnusable)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize(
    ("location", "said"),
    [
        (f"https://other{ROUTE}", "--endpoint https://other"),
        (f"https://other:8443/api{ROUTE}/", "--endpoint https://other:8443/api"),
        (f"{HERE}{ROUTE}/", "correct --endpoint"),
        ("https://login.example/?next=secret", "a redirect to https://login.example/; correct --endpoint"),
        ("/elsewhere", f"a redirect to {HERE}/elsewhere; correct --endpoint"),
        ("", "names no other address; correct --endpoint"),
        ("http://x:port", "names no other address"),
    ],
)
def test_a_redirect_is_a_wrong_address_and_no_rows_fault(status: int, location: str, said: str) -> None:
    error = refused(status, location=location)
    assert isinstance(error, EndpointUnusable)
    assert said in str(error)
    assert f"{HERE}{ROUTE} answers with HTTP {status}" in str(error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(201, EndpointFault), (204, EndpointFault), (599, EndpointFault), (418, RequestRejected)],
)
def test_only_a_status_of_the_fours_is_a_rejection(status: int, kind: type[EndpointError]) -> None:
    assert type(refused(status)) is kind


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "This model's maximum context length is 10 tokens"}, "too_long"),
        (400, {"message": "Too many tokens", "code": "context_length_exceeded"}, "too_long"),
        (400, {"message": "No", "type": "exceed_context_size_error", "code": 400}, "too_long"),
        (400, {"message": "the request exceeds the available context size"}, "too_long"),
        (422, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens", "too_long"),
        (422, "`inputs` must have less than 1024 tokens. Given: 5000", "too_long"),
        (422, "`temperature` must be strictly positive", "invalid_request"),
        (400, {"message": "No such parameter", "code": ["context size"], "type": None}, "invalid_request"),
        (400, {"message": "No such parameter", "code": "unknown_parameter"}, "invalid_request"),
    ],
)
def test_a_row_that_does_not_fit_is_too_long_in_the_words_of_any_server(
    status: int, error: object, kind: str
) -> None:
    """The message tells, or OpenAI's code and llama.cpp's type."""
    found = refused(status, json.dumps({"error": error}).encode())
    assert isinstance(found, RequestRejected)
    assert found.kind == kind


@pytest.mark.parametrize("status", [408, 424, 460, 499])
def test_a_request_that_was_given_up_under_way_is_tried_again(status: int) -> None:
    """A batch of a server may run out of memory, and a proxy may lose patience: the next attempt is answered."""
    assert type(refused(status)) is EndpointFault


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((402, 407), EndpointUnusable),
        ((409, 423, 425, 429, 498, 503, 529), EndpointBusy),
        ((504, 521, 522, 523, 530), EndpointUnavailable),
    ],
)
def test_what_no_row_can_help_fails_none(statuses: Sequence[int], kind: type[EndpointError]) -> None:
    """An account without credit, a proxy before a server that starts: each row would fail within seconds."""
    assert [type(refused(status)) for status in statuses] == [kind] * len(statuses)


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (502, "", EndpointFault),
        (503, "connection termination", EndpointFault),
        (503, "remote reset", EndpointFault),
        (503, "connection failure", EndpointBusy),
        (503, "overflow", EndpointBusy),
        (400, "connection termination", RequestRejected),
    ],
)
def test_a_proxy_whose_server_hung_up_tells_of_a_faulty_answer(
    status: int, reason: str, kind: type[EndpointError]
) -> None:
    """Words are Envoy's; one that never reached its server sent no row there."""
    said = f"upstream connect error or disconnect/reset before headers. reset reason: {reason}"
    assert type(refused(status, said.encode())) is kind


def test_a_rejection_that_repeats_a_rows_words_is_no_dead_engine() -> None:
    assert type(error_of(400, "no such parameter: EngineDeadError")) is RequestRejected
    assert type(error_of(500, "EngineDeadError")) is EngineDied


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 60_000,
        b'{"error": ' * 20_000,
        b'{"error": {"message": ["x"]}}',
        b'{"error": {"message": "cut \\ud83d"}}',
        b'"cut \\ud83d"',
        b'{"error": {"message": "\\u001b[31mred\\u0000"}}',
        b"\xff\xfe\x00",
        b'{"error": {"message": "' + b"x" * 1_000_000 + b'"}}',
    ],
)
def test_the_message_of_an_error_is_one_printable_line(content: bytes) -> None:
    said = error_message(content)
    assert said.isprintable()
    assert len(said) <= 500
    said.encode()


def test_the_message_of_an_error_is_the_servers() -> None:
    assert error_message(b'{"error": {"message": "no\\n  such thing"}}') == "no such thing"
    assert error_message(b'{"detail": "Not Found"}') == '{"detail": "Not Found"}'
    assert error_message(b'"no"') == "no"
    assert error_message(b"<html>no</html>") == "<html>no</html>"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "no", "code": 400}, RequestRejected),
        ({"message": "no", "code": 503}, EndpointBusy),
        ({"message": "no", "code": "503"}, EndpointBusy),
        ({"message": "no", "code": "many"}, EndpointFault),
        ({"message": "no", "code": "4²9"}, EndpointFault),
        ({"message": ["x"], "code": ["x"]}, EndpointFault),
        ({"message": "no", "code": 10**20}, EndpointFault),
        ({"code": True}, EndpointFault),
        ("no", EndpointFault),
        (["x"], EndpointFault),
        (7, EndpointFault),
    ],
)
def test_an_error_in_a_stream_may_have_any_form(error: object, kind: type[EndpointError]) -> None:
    assert type(error_in_stream(json.loads(json.dumps(error)))) is kind


def test_a_certificate_that_is_refused_is_a_wrong_address() -> None:
    refused = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED]")
    refused.verify_message = "self-signed certificate"
    outer = httpx.ConnectError("failed")
    outer.__cause__ = RuntimeError()
    outer.__cause__.__context__ = refused
    error = certificate_error(outer, "https://server")
    assert isinstance(error, EndpointUnusable)
    assert "the certificate of https://server is refused (self-signed certificate)" in str(error)
    assert "SSL_CERT_FILE" in str(error)
    assert certificate_error(httpx.ConnectError("reset"), "https://server") is None


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("a\n  b\tc", "a b c"),
        ("cut \ud83d", "cut \\ud83d"),
        ("\x1b[31mred\x00", "\\x1b[31mred\\x00"),
        ("täxt 漢字 😀", "täxt 漢字 😀"),
        ("x" * 501, "x" * 499 + "…"),
        ("x" * 500, "x" * 500),
        (" " * 9_000_000 + "x", "…"),
    ],
)
def test_what_others_say_fits_on_a_line(said: str, line: str) -> None:
    assert one_line(said) == line
