"""Routes of files: upload, list, show, download, delete."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from conserve.batch_api import bodies, objects
from conserve.batch_api.refusals import Refused
from conserve.batch_api.state import ApiState, caller_of
from conserve.batch_api.upload import MultipartForm, Upload, form_of
from conserve.errors import StoreUnreachable
from conserve.store.books import uploads
from conserve.store.books.uploads import File, NewFile
from conserve.store.files import os_errors
from conserve.store.files.objects import BLOCK_BYTES, ObjectPath, below

PURPOSE = "batch"
OUTPUT = "batch_output"
LIFE_S = 30 * 86_400.0  # of an upload that names none, as OpenAI has it
MOST_FILES = 10_000  # in one page
BINARY = "application/octet-stream"
RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


async def create(request: Request) -> Response:
    """Store an upload; with the idempotency key of an earlier one, answer with that."""
    api, key = ApiState.of(request), bodies.idempotency_key(request)
    form = form_of(request, api.limits.file_bytes, require_so_far)
    folder = await run_in_threadpool(uploads.make_folder, api.store)
    file_id = uploads.new_file_id()
    with os_errors.explained(folder):
        upload = Upload(folder / f"{file_id}.jsonl", api.store.local)
    with upload:
        await form.read(request, upload)
        now = time.time()
        new = new_file(api, form, upload, key, now=now)
        project = caller_of(request).project
        stored = await run_in_threadpool(store, api, project, file_id, upload, new, now=now)
    return JSONResponse(objects.file_object(stored))


def require_so_far(fields: dict[str, str]) -> None:
    """Raise `Refused` for a wrong field before the file, which need not come then; others may follow it."""
    require_purpose(fields.get("purpose", PURPOSE))
    if all(name in fields for name in bodies.EXPIRES_AFTER.values()):
        bodies.expires_after(fields)


def require_purpose(purpose: str | None) -> None:
    """Raise `Refused` for another purpose than that of batches."""
    if purpose != PURPOSE:
        said = f"purpose is {PURPOSE!r}: this server keeps files for batches alone"
        raise Refused.invalid(said, param="purpose", code="invalid_value")


def new_file(api: ApiState, form: MultipartForm, upload: Upload, key: str | None, *, now: float) -> NewFile:
    """Record of an upload; raises `Refused` for a form without a file, or with another purpose."""
    if form.filename is None:
        raise Refused.invalid("the form has no file", param="file")
    require_purpose(form.fields.get("purpose"))
    if not upload.bytes:
        raise Refused.invalid("the file is empty", param="file", code="empty_file")
    life = bodies.expires_after(form.fields)
    return NewFile(
        purpose=PURPOSE,
        filename=form.filename,
        bytes=upload.bytes,
        num_lines=upload.num_lines,
        digest=upload.digest,
        path=below(upload.path, api.store.data),
        expires_at=now + (life.seconds if life else LIFE_S),
        idempotency_key=key,
    )


def store(api: ApiState, project: str, file_id: str, upload: Upload, new: NewFile, *, now: float) -> File:
    """Put the file and its record in place, in this order; the earlier file if the key is known."""
    if (earlier := same_upload(api, project, new, now=now)) is not None:
        return earlier
    with os_errors.explained(api.store.data):
        upload.keep()
    try:
        with api.store.write() as tx:
            key = new.idempotency_key
            if key is not None:
                uploads.free_idempotency_key(tx, project, key, now=now)
            if key is not None and uploads.of_idempotency_key(tx, project, key, now=now) is not None:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the same upload is under way; try again")
            uploads.add(tx, project, file_id, new, now=now)
            found = uploads.get(tx, project, file_id, now=now)
    except Refused:
        with suppress(StoreUnreachable):
            upload.path.unlink(missing_ok=True)
        raise  # after any other error the record may be there: `sweep_uploads` takes a file without one
    assert found is not None
    return found


def same_upload(api: ApiState, project: str, new: NewFile, *, now: float) -> File | None:
    """The file that an earlier upload with this key made; raises `Refused` if it had other contents."""
    if new.idempotency_key is None:
        return None
    with api.store.read() as tx:
        earlier = uploads.of_idempotency_key(tx, project, new.idempotency_key, now=now)
    if earlier is not None and asked_of(earlier) != (new.digest, new.filename, life_s(new.expires_at, now)):
        said = "this Idempotency-Key was used for another file"
        raise Refused.invalid(said, param="Idempotency-Key", code="idempotency_key_reused")
    return earlier


def asked_of(file: File) -> tuple[str, str, int | None]:
    """Contents, name and life of an upload, by which a repeated one is known."""
    return file.digest, file.filename, life_s(file.expires_at, file.created_at)


def life_s(expires_at: float | None, created_at: float) -> int | None:
    """Life of a file in whole seconds, as clients ask for it."""
    return None if expires_at is None else round(expires_at - created_at)


async def index(request: Request) -> Response:
    """List the files of the caller's project."""
    api = ApiState.of(request)
    limit = bodies.limit(request, MOST_FILES, MOST_FILES)
    oldest_first = bodies.one_of(request, "order", ("asc", "desc"), "desc") == "asc"
    purpose, after = request.query_params.get("purpose"), bodies.after(request, "file")
    project, now = caller_of(request).project, time.time()

    def read() -> list[File]:
        if purpose not in (None, PURPOSE, OUTPUT):
            return []
        with api.store.read() as tx:
            beyond = None
            if after is not None:
                last = uploads.get(tx, project, after, now=now)
                beyond = last.seq if last is not None else api.deleted.seq(project, after)
                if beyond is None:
                    raise Refused.missing("file", after)
            return uploads.page(
                tx,
                project,
                now=now,
                limit=limit + 1,
                purpose=purpose,
                beyond=beyond,
                oldest_first=oldest_first,
            )

    found = await run_in_threadpool(read)
    shown = [objects.file_object(file) for file in found[:limit]]
    return JSONResponse(objects.page(shown, has_more=len(found) > limit))


async def wanted(request: Request) -> File:
    """The file that the path names, of the caller's project."""
    api, name = ApiState.of(request), bodies.named(request, "file")
    project = caller_of(request).project

    def read() -> File | None:
        with api.store.read() as tx:
            return uploads.get(tx, project, name, now=time.time())

    if (found := await run_in_threadpool(read)) is None:
        raise Refused.missing("file", name)
    return found


async def show(request: Request) -> Response:
    """Show a file."""
    return JSONResponse(objects.file_object(await wanted(request)))


async def content(request: Request) -> Response:
    """Download a file, or a range of it."""
    file = await wanted(request)
    path = ApiState.of(request).store.data / file.path
    if not await run_in_threadpool(path.is_file):
        raise Refused.missing("file", file.id)
    if isinstance(path, ObjectPath):
        return of_object(request, file, path)
    return FileResponse(path, media_type=BINARY, filename=file.filename)


def of_object(request: Request, file: File, path: ObjectPath) -> Response:
    """Download of an object, or of one range of it, as `FileResponse` is of a file of this machine."""
    headers, part = described(file), wanted_bytes(request, file)
    if request.method == "HEAD":
        return Response(headers=headers, media_type=BINARY)
    if part is None:
        return StreamingResponse(blocks(path, range(file.bytes)), headers=headers, media_type=BINARY)
    if not part:
        said = f"the file has {file.bytes:,} bytes, and none of these"
        headers = {"Content-Range": f"bytes */{file.bytes}"}
        raise Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, said, param="Range", headers=headers)
    headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{file.bytes}"
    headers["content-length"] = str(len(part))
    return StreamingResponse(blocks(path, part), HTTPStatus.PARTIAL_CONTENT, headers, BINARY)


def wanted_bytes(request: Request, file: File) -> range | None:
    """Bytes of a file that a request asks for; None for the whole, as for several ranges."""
    asked = RANGE.fullmatch(request.headers.get("range", ""))
    if asked is None or request.headers.get("if-range", tag(file)) != tag(file):
        return None
    first, last = asked[1], asked[2]
    if not first:
        return range(max(0, file.bytes - int(last)), file.bytes) if last else None
    return range(int(first), min(int(last) + 1, file.bytes) if last else file.bytes)


def blocks(path: ObjectPath, part: range) -> Iterator[bytes]:
    """Yield these bytes of an object."""
    left = len(part)
    with path.open() as file:
        file.seek(part.start)
        while block := file.read(min(BLOCK_BYTES, left)):
            left -= len(block)
            yield block


def described(file: File) -> dict[str, str]:
    """Headers of a download, as of a file of this machine."""
    name = quote(file.filename, safe="")
    return {
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=utf-8''{name}",
        "content-length": str(file.bytes),
        "etag": tag(file),
    }


def tag(file: File) -> str:
    """ETag of a file: its contents never change."""
    return f'"{file.digest}"'


async def delete(request: Request) -> Response:
    """Delete a file; a job that was made of it keeps its rows."""
    api, file = ApiState.of(request), await wanted(request)
    await run_in_threadpool(uploads.remove, api.store, file)
    api.deleted.add(file)
    return JSONResponse(objects.deleted(file))
