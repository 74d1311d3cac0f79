"""Routes of batches: create, list, show, cancel, and a stream of changes."""

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from conserve.batch_api import bodies, objects
from conserve.batch_api.bodies import CreateBatch
from conserve.batch_api.refusals import Refused
from conserve.batch_api.state import ApiCaller, ApiState, caller_of
from conserve.batch_api.streams import HEADERS, MEDIA, BatchSnapshot, EventStream
from conserve.errors import JobRefused
from conserve.store.books import batches, keys, uploads
from conserve.store.books.batch_state import BatchState
from conserve.store.books.batches import BatchRecord, NewBatch
from conserve.store.books.keys import ApiKey
from conserve.store.database.store import Transaction

MOST_BATCHES = 100  # in one page
PAGE = 20
DAY_S = 86_400.0


async def create(request: Request) -> Response:
    """Make a batch of an uploaded file; with the idempotency key of an earlier one, answer with that."""
    api, key = ApiState.of(request), bodies.idempotency_key(request)
    asked = await bodies.create_batch(request)
    found = await run_in_threadpool(add, api, caller_of(request), asked, key)
    api.admissions.wake()
    return JSONResponse(objects.batch_object(found))


def add(api: ApiState, caller: ApiCaller, asked: CreateBatch, key: str | None) -> BatchRecord:
    """Add the batch, unless the key is known."""
    now = time.time()
    with api.store.write() as tx:
        if key is not None and (earlier := batches.of_idempotency_key(tx, caller.project, key)):
            return same_batch(earlier, asked)
        file = uploads.get(tx, caller.project, asked.input_file_id, now=now)
        if file is None or file.job_id is not None:
            raise bodies.no_input(asked.input_file_id)
        if caller.key is not None:
            require_within(tx, caller.key, file.num_lines, now=now)
        new = NewBatch(
            file_id=file.id,
            endpoint=asked.endpoint,
            completion_window=asked.completion_window,
            window_s=bodies.window_s(asked.completion_window),
            metadata=asked.metadata,
            key_name=caller.key.name if caller.key else None,
            idempotency_key=key,
            output_expires_s=output_expires_s(asked),
            on_late=asked.on_late,
        )
        batch_id = batches.add(tx, caller.project, new, now=now)
        return required(batches.get(tx, caller.project, batch_id), batch_id)


def require_within(tx: Transaction, key: ApiKey, num_lines: int, *, now: float) -> None:
    """Raise `Refused` if so many more rows, or any, are beyond the limits of the key.

    Of two batches of the key at once, the second waits and counts the first.
    """
    keys.lock(tx, key.name)
    if key.limit_rows is not None:
        waiting = batches.unfinished_rows(tx, key.name)
        if waiting + num_lines > key.limit_rows:
            said = f"{waiting:,} of at most {key.limit_rows:,} rows are unfinished, and this file has {num_lines:,}"
            raise limited("requests", f"Limit reached for the key '{key.name}': {said}.")
    if key.limit_tokens is not None:
        spent = batches.tokens_since(tx, key.name, now - DAY_S)
        if spent >= key.limit_tokens:
            said = f"its batches of the last 24 hours took {spent:,} of {key.limit_tokens:,} tokens"
            raise limited("tokens", f"Limit reached for the key '{key.name}': {said}.")


def limited(kind: str, said: str) -> Refused:
    """Refusal of a batch beyond a limit; sent again in a moment it would be refused again."""
    return Refused(
        HTTPStatus.TOO_MANY_REQUESTS,
        said,
        kind=kind,
        code="rate_limit_exceeded",
        headers={"X-Should-Retry": "false"},
    )


def same_batch(earlier: BatchRecord, asked: CreateBatch) -> BatchRecord:
    """The batch of an earlier request with the same key; raises `Refused` if that asked for something else."""
    before = earlier.file_id, earlier.endpoint, earlier.completion_window, earlier.metadata
    same = before == (asked.input_file_id, asked.endpoint, asked.completion_window, asked.metadata)
    same = same and earlier.on_late == asked.on_late
    if not same or earlier.output_expires_s != output_expires_s(asked):
        said = "this Idempotency-Key was used for another batch"
        raise Refused.invalid(said, param="Idempotency-Key", code="idempotency_key_reused")
    return earlier


def output_expires_s(asked: CreateBatch) -> float | None:
    """Life of the answers' files, in s from their creation; None for as long as their job."""
    return float(asked.output_expires_after.seconds) if asked.output_expires_after else None


def required(batch: BatchRecord | None, name: str) -> BatchRecord:
    """The batch; raises `Refused` if there is none."""
    if batch is None:
        raise Refused.missing("batch", name)
    return batch


async def index(request: Request) -> Response:
    """List the batches of the caller's project, the newest first."""
    api, limit = ApiState.of(request), bodies.limit(request, PAGE, MOST_BATCHES)
    after, project = bodies.after(request, "batch"), caller_of(request).project

    def read() -> list[BatchRecord]:
        with api.store.read() as tx:
            before = None if after is None else required(batches.get(tx, project, after), after).seq
            return batches.page(tx, project, before=before, limit=limit + 1)

    found = await run_in_threadpool(read)
    shown = await foreseen(api, found[:limit])
    return JSONResponse(objects.page(shown, has_more=len(found) > limit))


async def show(request: Request) -> Response:
    """Show a batch; one whose files are still to be written gets them."""
    api, name = ApiState.of(request), bodies.named(request, "batch")
    found = await api.polls.of(caller_of(request).project, name)
    if found.batch.unfinished:
        api.deliveries.ask(found.batch.id)
    return Response(found.body, media_type=JSONResponse.media_type)


async def foreseen(api: ApiState, found: Sequence[BatchRecord]) -> list[dict[str, Any]]:
    """Batch objects with the forecasts of the jobs that go on."""
    going = [batch for batch in found if batch.state is BatchState.IN_PROGRESS]
    shown: dict[str, Mapping[str, Any] | None] = {}
    if going:
        seen = await api.foresight.shared()
        shown = {batch.id: seen.document(batch.job_id) for batch in going}
    return [objects.batch_object(batch, shown.get(batch.id)) for batch in found]


async def cancel(request: Request) -> Response:
    """Cancel a batch; results that it has are kept."""
    api, name = ApiState.of(request), bodies.named(request, "batch")
    project = caller_of(request).project

    def change() -> BatchRecord:
        with api.store.write() as tx:
            found = required(batches.get(tx, project, name), name)
            try:
                batches.cancel(tx, found, now=time.time())
            except JobRefused as error:
                said = f"Cannot cancel a batch with status '{found.state}'."
                raise Refused.invalid(said, code="batch_not_cancellable") from error
            return required(batches.get(tx, project, name), name)

    found = await run_in_threadpool(change)
    if found.unfinished:
        api.deliveries.ask(found.id)
    return JSONResponse(objects.batch_object(found))


async def stream(request: Request) -> Response:
    """Send a batch whenever it has changed, as server-sent events, until it has ended."""
    api, name = ApiState.of(request), bodies.named(request, "batch")
    caller = caller_of(request)

    def read() -> BatchRecord:
        with api.store.read() as tx:
            return required(batches.get(tx, caller.project, name), name)

    found = await run_in_threadpool(read)
    if found.unfinished:
        api.deliveries.ask(found.id)
    now, last = BatchSnapshot.of(found), request.headers.get("last-event-id")
    if now.final and last == now.id:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    if request.method == "HEAD":
        return Response(media_type=MEDIA, headers=HEADERS)
    key = caller.key.name if caller.key is not None else None
    api.streams.enter(key, found.id, now)
    return EventStream(api.streams, key, found.id, last)
