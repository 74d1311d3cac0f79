"""Exceptions of vLLM as verdicts on a row: it can never succeed, its attempt failed, or nothing is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from conserve.errors import (
    ConserveError,
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EngineDied,
    RequestRejected,
)

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

# Parameters that vLLM names for a prompt over the context length.
TOO_LONG = frozenset({"input_tokens", "input_text"})


def row_error(error: Exception) -> EndpointError:
    """Our error for an exception of vLLM's request handling, as vLLM's server tells 4xx from 5xx.

    Whatever is not known to be the request's fault counts as a failed attempt: vLLM hands on that a file server
    refused a connection, and this process may be out of memory or of files.
    """
    from jinja2 import TemplateError
    from vllm.exceptions import GracefulHTTPError, VLLMClientError

    if isinstance(error, GracefulHTTPError):  # from the user's own --max-num-queued-... flags
        return EndpointBusy(_sentence(error))
    at_fault = (VLLMClientError, TemplateError, ValueError, TypeError, OverflowError, NotImplementedError)
    if isinstance(error, at_fault):
        return RequestRejected(_sentence(error), kind=_kind(error))
    return EndpointFault(_sentence(error))


@contextmanager
def engine_errors(llm: AsyncLLM, why_died: Callable[[], str]) -> Iterator[None]:
    """Turn exceptions of generate() into ours: the engine died, the request is at fault, or its attempt failed."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except ConserveError:
        raise
    except EngineDeadError as error:
        raise EngineDied(why_died()) from error
    except EngineGenerateError as error:
        cause = error.__cause__
        if isinstance(cause, ConserveError):
            raise cause from None
        found = row_error(cause) if isinstance(cause, Exception) else EndpointFault(_sentence(error))
        if llm.errored and not isinstance(found, RequestRejected):
            raise EngineDied(why_died()) from error
        raise found from error
    except Exception as error:
        raise row_error(error) from error


def check_finished(outputs: Sequence[RequestOutput]) -> None:
    """Raise `EndpointFault` if vLLM ended a request as faulty, `EndpointUnavailable` if it was taken from vLLM."""
    for output in outputs:
        for answer in output.outputs:
            if answer.finish_reason == "error":
                raise EndpointFault("the engine ended the request with an error, which its log names")
            if answer.finish_reason in (None, "abort"):
                raise EndpointUnavailable(f"the engine gave the request up ({answer.finish_reason})")


def _kind(error: Exception) -> str:
    from jinja2 import TemplateError

    if getattr(error, "parameter", None) in TOO_LONG:
        return "too_long"
    chain = (error, error.__cause__)
    if any(isinstance(link, TemplateError) or "Template" in type(link).__name__ for link in chain):
        return "template"
    return "invalid_request"


def _sentence(error: Exception) -> str:
    """The first complaint of pydantic or vLLM, in one line."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    # str() of vLLM's errors appends the parameter; the first argument of an OSError is a number
    first_said = error.args[0] if error.args and isinstance(error.args[0], str) else error
    text = " ".join(str(first_said).split())
    return text or type(error).__name__
