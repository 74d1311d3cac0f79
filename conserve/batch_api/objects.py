"""Objects of OpenAI's API: files, batches, pages of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from conserve.jobs.task import Task
from conserve.store.books.batch_state import BatchState
from conserve.store.books.batches import BatchRecord
from conserve.store.books.states import JobState, OnLate
from conserve.store.books.uploads import File

NO_WINDOW = "none"  # completion_window of a job that was not asked for as a batch


def file_object(file: File) -> dict[str, Any]:
    """A file, as OpenAI's `FileObject`."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": seconds(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def deleted(file: File) -> dict[str, Any]:
    """Answer to the deletion of a file."""
    return {"id": file.id, "object": "file", "deleted": True}


def batch_object(batch: BatchRecord, forecast: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A batch, as OpenAI's `Batch`; `conserve` has what OpenAI's has not: job, forecast, what a late job does."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": endpoint(batch),
        "model": batch.job.model if batch.job else None,
        "errors": errors(batch),
        "input_file_id": batch.file_id or f"file-{batch.job_id}",
        "completion_window": batch.completion_window or NO_WINDOW,
        "status": batch.state.value,
        "output_file_id": batch.output_file_id if batch.delivered else None,
        "error_file_id": batch.error_file_id if batch.delivered else None,
        **moments(batch),
        "request_counts": request_counts(batch),
        "usage": usage(batch),
        "metadata": batch.metadata,
        "conserve": {
            "job": batch.job_id,
            "state": batch.job.state.value if batch.job else None,
            "on_late": (batch.job.on_late if batch.job else batch.on_late) or OnLate.EXPIRE,
            "forecast": forecast,
        },
    }


def endpoint(batch: BatchRecord) -> str:
    """Route of a batch's requests; of a job by `conserve submit`, of its task."""
    if batch.endpoint is not None or batch.job is None:
        return batch.endpoint or ""
    return Task.from_json(batch.job.task).url.value


def moments(batch: BatchRecord) -> dict[str, int | None]:
    """Time stamps of a batch in whole seconds; a stamp that its state has not reached is None."""
    job, state = batch.job, batch.state
    finished_at = job.finished_at if job else None
    cancelled = state in (BatchState.CANCELLING, BatchState.CANCELLED)
    expired = job is not None and job.state is JobState.EXPIRED
    ended = state in (BatchState.FINALIZING, BatchState.COMPLETED, BatchState.EXPIRED)
    done_at = (batch.delivered_at if job else batch.cancelling_at) if state.final else None
    found = {
        "created_at": batch.created_at,
        "in_progress_at": job.submitted_at if job else None,
        "expires_at": expires_at(batch),
        "finalizing_at": finished_at if ended else None,
        "completed_at": done_at if state is BatchState.COMPLETED else None,
        "failed_at": (batch.refused_at or finished_at) if state is BatchState.FAILED else None,
        "expired_at": finished_at if expired else None,
        "cancelling_at": (batch.cancelling_at or finished_at) if cancelled else None,
        "cancelled_at": done_at if cancelled else None,
    }
    return {name: seconds(moment) for name, moment in found.items()}


def expires_at(batch: BatchRecord) -> float | None:
    """End of a batch's time: its job's deadline, once there is a job."""
    if batch.job is None:
        return batch.created_at + batch.window_s if batch.window_s is not None else None
    if batch.job.state is JobState.EXPIRED or batch.job.deadline is not None:
        return batch.job.deadline
    return None


def seconds(moment: float | None) -> int | None:
    """A time in whole seconds."""
    return None if moment is None else int(moment)


def errors(batch: BatchRecord) -> dict[str, Any] | None:
    """Reasons for which a batch failed as a whole; None for any other batch."""
    if batch.state is not BatchState.FAILED:
        return None
    found = [
        {"code": fault.code, "message": fault.message, "line": fault.line, "param": fault.param}
        for fault in batch.errors
    ]
    if batch.job is not None:
        found = [{"code": "job_failed", "message": batch.job.error or "", "line": None, "param": None}]
    return {"object": "list", "data": found}


def request_counts(batch: BatchRecord) -> dict[str, int]:
    """Rows of a batch, those with an answer, and those that failed."""
    job = batch.job
    if job is None:
        return {"total": 0, "completed": 0, "failed": 0}
    return {"total": job.num_rows, "completed": job.succeeded, "failed": job.failed}


def usage(batch: BatchRecord) -> dict[str, Any]:
    """Tokens that a batch has taken so far."""
    job = batch.job
    prompt, answer = (job.prompt_tokens, job.completion_tokens) if job else (0, 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": job.cached_tokens if job else 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }


def page(found: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """One page of a list."""
    return {
        "object": "list",
        "data": list(found),
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": has_more,
    }
