"""Uploads: a multipart body that is written to disk as it comes."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from conserve.batch_api.refusals import Refused
from conserve.errors import StoreFull, one_line
from conserve.http_server import STALLED, parts
from conserve.store.files import os_errors
from conserve.store.files.objects import FilePath
from conserve.store.files.place import place_of

FLUSH_BYTES = 1 << 20
LEAST_FREE = 1 << 30  # bytes of the disk, which rows, answers and the database need while clients upload
FIELD_BYTES = 4096
HEADER_BYTES = 8192  # of all headers of a part, which earlier versions of the parser do not bound
MOST_FIELDS = 32
ENDED_EARLY = "the body ended within the form; send it again"
NAMELESS = "upload"
OnFile: TypeAlias = Callable[[dict[str, str]], None]


class Upload:
    """A file on its way to disk, under a scratch name until `keep`."""

    def __init__(self, path: FilePath, local: Path) -> None:
        self.path = path
        self.bytes = self._newlines = 0
        self._scratch = place_of(path).scratch_file(local)
        self._file: BinaryIO = self._scratch.open("wb")
        self._digest = hashlib.blake2b(digest_size=16)
        self._ended = True  # with a newline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    @property
    def digest(self) -> str:
        """BLAKE2b of the contents."""
        return self._digest.hexdigest()

    @property
    def num_lines(self) -> int:
        """Lines of the file, of which the last may lack its newline."""
        return self._newlines + (not self._ended)

    def write(self, data: bytes) -> None:
        """Append to the file; raises `StoreFull` while the disk has little left."""
        if shutil.disk_usage(self._scratch.parent).free < LEAST_FREE:
            raise StoreFull(
                f"less than {LEAST_FREE >> 30} GiB is free in {self._scratch.parent}, which uploads leave to all "
                "else; free some"
            )
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)
        self._newlines += data.count(b"\n")
        self._ended = data.endswith(b"\n") if data else self._ended

    def keep(self) -> None:
        """Move the file to its place, durably."""
        self._file.close()
        place_of(self.path).write(self._scratch)


@dataclass(slots=True)
class FormPart:
    """One part of a form, while it is read."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    header_bytes: int = 0
    name: str = ""
    filename: str | None = None
    text: bytearray = field(default_factory=bytearray)


class MultipartForm:
    """A multipart form with one file; `on_file` gets the fields before the file when that begins."""

    def __init__(self, boundary: bytes, most_bytes: int, on_file: OnFile) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.whole = False
        self._most_bytes, self._file_bytes = most_bytes, 0
        self._on_file = on_file
        self._part = FormPart()
        self._header = (bytearray(), bytearray())
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_header_begin": self._header_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers,
                "on_end": self._whole,
            },
        )

    async def read(self, request: Request, upload: Upload) -> None:
        """Read a request's body, the file in it to `upload`; raises `Refused` for a body that is no such form."""
        try:
            async for chunk in parts(request.stream()):
                self._parser.write(chunk)
                if self._waiting_bytes >= FLUSH_BYTES:
                    await self._flush(upload)
            self._parser.finalize()
        except ClientDisconnect as error:
            raise Refused.invalid(ENDED_EARLY) from error
        except TimeoutError as error:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, STALLED) from error
        except FormParserError as error:
            raise Refused.invalid(f"the body is no multipart form: {one_line(error)}") from error
        await self._flush(upload)
        if not self.whole:
            raise Refused.invalid(ENDED_EARLY)

    async def _flush(self, upload: Upload) -> None:
        data = b"".join(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        with os_errors.explained(upload.path.parent):
            await run_in_threadpool(upload.write, data)

    def _begin(self) -> None:
        self._part = FormPart()

    def _header_begin(self) -> None:
        self._header = (bytearray(), bytearray())

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._extend_header(0, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._extend_header(1, data[start:end])

    def _extend_header(self, half: int, data: bytes) -> None:
        self._part.header_bytes += len(data)
        if self._part.header_bytes > HEADER_BYTES:
            raise Refused.invalid(f"the headers of a part of the form have more than {HEADER_BYTES:,} bytes")
        self._header[half].extend(data)

    def _header_end(self) -> None:
        self._part.headers[bytes(self._header[0]).lower()] = bytes(self._header[1])

    def _headers(self) -> None:
        _, options = parse_options_header(self._part.headers.get(b"content-disposition", b""))
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        if self._part.name != "file":
            return
        if self.filename is not None:
            raise Refused.invalid("the form has two files; upload one at a time", param="file")
        given = options.get(b"filename", b"").decode(errors="replace")
        self.filename = self._part.filename = one_line(given, most=255) or NAMELESS
        self._on_file(self.fields)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.filename is not None:
            self._file_bytes += end - start
            if self._file_bytes > self._most_bytes:
                raise too_large(self._most_bytes)
            self._waiting.append(data[start:end])
            self._waiting_bytes += end - start
            return
        self._part.text.extend(data[start:end])
        if len(self._part.text) > FIELD_BYTES:
            raise Refused.invalid(f"a field of the form has more than {FIELD_BYTES:,} bytes")

    def _end(self) -> None:
        if self._part.filename is None:
            self.fields[self._part.name] = self._part.text.decode(errors="replace")
            if len(self.fields) > MOST_FIELDS:
                raise Refused.invalid(f"the form has more than {MOST_FIELDS} fields")

    def _whole(self) -> None:
        self.whole = True


def form_of(request: Request, most_bytes: int, on_file: OnFile) -> MultipartForm:
    """The form that a request announces; raises `Refused` for another body, or one that is too large."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 256:
        raise Refused.invalid("files are uploaded as multipart/form-data with a boundary")
    return MultipartForm(boundary, most_bytes, on_file)


def too_large(most_bytes: int) -> Refused:
    """Refusal of a file beyond the limit."""
    said = (
        f"the file has more than {most_bytes:,} bytes; split it, or start the server with a larger --max-file"
    )
    return Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, said, param="file", code="file_too_large")
