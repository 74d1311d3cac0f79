"""OpenAI's error body, which every HTTP answer that refuses a request has."""

from http import HTTPStatus

INVALID, SERVER, AUTHENTICATION = "invalid_request_error", "server_error", "authentication_error"


def error_body(
    message: str, *, kind: str = INVALID, param: str | None = None, code: str | int | None = None
) -> dict[str, object]:
    """The body; `code` is OpenAI's word for the cause, or the HTTP status as vLLM's answers have it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def kind_of(status: int) -> str:
    """Kind of error that goes with an HTTP status."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return SERVER
    return AUTHENTICATION if status == HTTPStatus.UNAUTHORIZED else INVALID
