"""Refusals: answers with OpenAI's error body, and the exceptions that lead to them."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Self

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from conserve.errors import ConserveError, StoreError, StoreMoved, one_line
from conserve.openai_error import INVALID, SERVER, error_body, kind_of

log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind
        self.headers = headers

    @classmethod
    def invalid(cls, message: str, *, param: str | None = None, code: str | None = None) -> Self:
        """The request is wrong."""
        return cls(HTTPStatus.BAD_REQUEST, message, param=param, code=code)

    @classmethod
    def missing(cls, what: str, name: str) -> Self:
        """The caller's project has no such file or batch."""
        said = f"No such {what}: {one_line(name, most=100)}"
        return cls(HTTPStatus.NOT_FOUND, said, param="id", code=f"{what}_not_found")


async def refused(request: Request, error: Exception) -> Response:
    """Answer for a request that was refused."""
    assert isinstance(error, Refused)
    said = error_body(str(error), kind=error.kind, param=error.param, code=error.code)
    return JSONResponse(said, error.status, headers=error.headers)


async def not_answered(request: Request, error: Exception) -> Response:
    """Answer for a missing route or method."""
    assert isinstance(error, HTTPException)
    path = one_line(request.url.path, most=200)
    lacks = f"this server does not answer {request.method} {path}; GET /openapi.json lists its routes"
    said = lacks if error.status_code in (404, 405) else str(error.detail)
    headers = {"Allow": ", ".join(methods(request))} if error.status_code == 405 else error.headers
    return JSONResponse(error_body(said), error.status_code, headers=headers)


def methods(request: Request) -> list[str]:
    """Methods of all routes at a request's path; Starlette names those of one."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    here = [route for route in routes if route.path_regex.match(request.url.path)]
    return sorted({method for route in here for method in route.methods or ()})


async def failed(request: Request, error: Exception) -> Response:
    """Answer for a store that is out of reach, full or locked: the same request may succeed later."""
    assert isinstance(error, ConserveError)
    log.warning("%s %s: %s", request.method, request.url.path, error)
    told = isinstance(error, StoreMoved) or not isinstance(error, StoreError)
    said = one_line(error) if told else "the store cannot be used now; try again"
    status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, StoreError) else HTTPStatus.BAD_REQUEST
    return JSONResponse(error_body(said, kind=kind_of(status)), status)


async def broken(request: Request, error: Exception) -> Response:
    """Answer for a fault of this program; the cause is in the log alone."""
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    said = error_body("the server failed at this request; its log has the cause", kind=SERVER)
    return JSONResponse(said, HTTPStatus.INTERNAL_SERVER_ERROR)
