"""Outcomes of attempts as results."""

from typing import Any

import msgspec

from conserve.endpoints.protocol import Choice, Completion
from conserve.jobs.harvest.echo import shortened
from conserve.jobs.harvest.workload import ReadyRow
from conserve.store.books.results import Result

MOST_SAID = 10_000  # characters of an error


def success(work: ReadyRow, completion: Completion, *, now: float) -> Result:
    """Result of a row that was answered."""
    assert work.call is not None
    if work.keep_logprobs is not None:
        completion = shortened(completion, work.keep_logprobs)
    first = completion.choices[0]
    more = len(completion.choices) > 1 or bool(first.beside)  # than one text
    return Result(
        row_index=work.request.row_index,
        custom_id=work.request.custom_id,
        text=first.text,
        json=valid_json(first.text) if work.wants_json else None,
        choices=to_json([choice_document(choice) for choice in completion.choices]) if more else None,
        finish_reason=first.finish_reason,
        model=completion.model,
        engine=completion.engine or work.call.identity,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        cached_tokens=completion.cached_tokens,
        resumed_tokens=completion.resumed_tokens(work.call),
        logprobs=to_json(first.logprobs) if first.logprobs is not None else None,
        attempts=work.row.attempts,
        submitted_at=work.submitted_at,
        started_at=work.row.started_at,
        finished_at=now,
    )


def failure(work: ReadyRow, error_type: str, error: str, *, now: float) -> Result:
    """Result of a row that has failed for good; the text of the error is cut and made valid UTF-8."""
    return Result(
        row_index=work.request.row_index,
        custom_id=work.request.custom_id,
        attempts=work.row.attempts,
        error_type=error_type,
        error=error.encode(errors="backslashreplace").decode()[:MOST_SAID],
        submitted_at=work.submitted_at,
        started_at=work.row.started_at,
        finished_at=now,
    )


def lacks_json(work: ReadyRow, result: Result) -> bool:
    """True for a whole answer that is not the JSON that was asked for, as of a server that ignores a schema."""
    whole = result.finish_reason != "length" and bool(result.text)
    return work.wants_json and result.json is None and whole


def choice_document(choice: Choice) -> dict[str, Any]:
    """A choice as it stands in the `choices` column."""
    document = {"text": choice.text, "finish_reason": choice.finish_reason, **choice.beside}
    return document if choice.logprobs is None else {**document, "logprobs": choice.logprobs}


def valid_json(text: str) -> str | None:
    """The text if it is JSON; None otherwise, as for an answer that its token limit cut off."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):  # nested too deep for any reader
        return None
    return text.strip()


def to_json(value: Any) -> str:
    """JSON text for a column."""
    return msgspec.json.encode(value).decode()
