"""Exceptions of vLLM become what they say about a row: never answerable, a failed attempt, or nothing."""

import errno
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from jinja2 import TemplateError

from conserve.engine.vllm.requests.faults import check_finished, engine_errors, row_error
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EngineDied,
    RequestRejected,
)
from conserve.jobs.harvest.retry import RowHistory, decide
from tests.warned import OF_VLLM

pytestmark = [pytest.mark.engine, *OF_VLLM]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no such thing"), "invalid_request"),
        (TypeError("a list"), "invalid_request"),
        (OverflowError("Integer value out of range"), "invalid_request"),
        (NotImplementedError("beams"), "invalid_request"),
        (TemplateError("no user"), "template"),
    ],
)
def test_what_can_never_succeed_is_rejected(error: Exception, kind: str) -> None:
    found = row_error(error)
    assert isinstance(found, RequestRejected)
    assert found.kind == kind
    assert str(error.args[0]) in str(found)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("the file server is slow"),
        aiohttp.ServerTimeoutError("the file server is slow"),
        aiohttp.ClientPayloadError("cut off"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("can't start new thread"),
        MemoryError("no more"),
        KeyError("of vLLM's own"),
    ],
)
def test_what_may_pass_counts_as_an_attempt(error: Exception) -> None:
    """A row is tried again after a while, holds no other row up, and fails when its attempts are used up."""
    found = row_error(error)
    assert type(found) is EndpointFault
    assert str(found) in (str(error), str(error.args[0]))
    again, last = (decide(found, RowHistory(faults=faults), max_attempts=5) for faults in (0, 4))
    assert (again.error_type, again.is_failure, again.hold_s) == (None, True, 0.0)
    assert last.error_type == "endpoint_fault"


def test_vllms_own_errors_are_told_by_whose_fault_they_are() -> None:
    from vllm import exceptions

    gone = row_error(exceptions.VLLMUnprocessableEntityError("no image there: HTTP 404"))
    assert isinstance(gone, RequestRejected)
    assert (str(gone), gone.kind) == ("no image there: HTTP 404", "invalid_request")
    long = row_error(exceptions.VLLMValidationError("too many", parameter="input_tokens"))
    assert isinstance(long, RequestRejected)
    assert (str(long), long.kind) == ("too many", "too_long")
    assert isinstance(row_error(exceptions.GenerationError("the server's fault")), EndpointFault)
    assert isinstance(row_error(exceptions.QueueOverflowError()), EndpointBusy)


def caught(error: Exception, cause: Exception | None = None, *, errored: bool = False) -> EndpointError:
    llm: Any = SimpleNamespace(errored=errored)
    with pytest.raises(EndpointError) as raised, engine_errors(llm, lambda: "the engine died"):
        raise error from cause
    return raised.value


def test_what_generating_raises_is_judged_by_its_cause() -> None:
    from vllm.v1.engine import exceptions

    generating = exceptions.EngineGenerateError
    assert isinstance(caught(generating(), OverflowError("2**70")), RequestRejected)
    assert isinstance(caught(generating(), KeyError("a")), EndpointFault)
    assert isinstance(caught(generating()), EndpointFault)
    assert isinstance(caught(generating(), KeyError("a"), errored=True), EngineDied)
    assert isinstance(caught(generating(), ValueError("a"), errored=True), RequestRejected)
    assert isinstance(caught(generating(), EndpointUnavailable("it is being closed")), EndpointUnavailable)
    assert isinstance(caught(exceptions.EngineDeadError()), EngineDied)
    assert isinstance(caught(RuntimeError("no thread")), EndpointFault)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("error", EndpointFault), ("abort", EndpointUnavailable), (None, EndpointUnavailable)],
)
def test_an_answer_without_an_end_is_none(reason: str | None, kind: type[EndpointError]) -> None:
    answers: list[Any] = [
        SimpleNamespace(outputs=[SimpleNamespace(finish_reason=each)]) for each in ("stop", reason)
    ]
    check_finished(answers[:1])
    with pytest.raises(kind):
        check_finished(answers)
