"""A folder that plays the service of a bucket, so that a test needs no server."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyarrow import fs

from conserve.store.files import bucket

DENIED = OSError(
    "When doing it: AWS Error ACCESS_DENIED (HTTP status 403) during an operation: AKIAKEY may not"
)


@dataclass
class Service:
    """Answers like pyarrow's filesystem of a bucket."""

    root: Path
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Names of requests, and what they were about."""
    refused: frozenset[str] = frozenset()
    """Names of requests that fail."""
    short: int = 0
    """Bytes that are missing at the end of each object that is put."""
    listed_too: list[fs.FileInfo] = field(default_factory=list)
    """Entries that the service lists beside the files of the folder."""
    most_read: int | None = None
    """Bytes of an object that one request reads at most."""

    def __post_init__(self) -> None:
        self._files = fs.SubTreeFileSystem(str(self.root), fs.LocalFileSystem())

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self._files, name)

        def asked(about: Any, *more: Any, **named: Any) -> Any:
            self._note(name, about)
            return answer(about, *more, **named)

        return asked

    def _note(self, name: str, about: Any) -> None:
        self.asked.append((name, about if isinstance(about, str) else about.base_dir))
        if name in self.refused:
            raise DENIED

    def get_file_info(self, about: str | fs.FileSelector) -> Any:
        """Describe an object, or those below a path."""
        self._note("get_file_info", about)
        found = self._files.get_file_info(about)
        if isinstance(about, str):
            return next((info for info in self.listed_too if info.path == about), found)
        return [*found, *self.listed_too]

    @contextmanager
    def open_output_stream(self, at: str) -> Iterator["Put"]:
        """Put an object: object storage has no folders that would have to be made."""
        self._note("open_output_stream", at)
        put = Put()
        yield put
        self._put(at, put.content[: len(put.content) - self.short])

    def copy_file(self, at: str, to: str) -> None:
        """Copy an object."""
        self._note("copy_file", at)
        self._put(to, (self.root / at).read_bytes())

    def _put(self, at: str, content: bytes) -> None:
        path = self.root / at
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def open_input_file(self, at: str) -> "Got":
        """Open an object that is there."""
        self._note("open_input_file", at)
        return Got(self, at, (self.root / at).read_bytes())


@dataclass
class Put:
    """An object that is being put."""

    content: bytes = b""

    def write(self, block: bytes) -> None:
        """Send a part."""
        self.content += block


@dataclass
class Got:
    """An object that is being read."""

    service: Service
    at: str
    content: bytes

    def size(self) -> int:
        """Bytes of the object."""
        return len(self.content)

    def metadata(self) -> dict[str, bytes]:
        """Headers of the object, as a service sends them."""
        return {"ETag": hashlib.md5(self.content).hexdigest().encode()}

    def read_at(self, size: int, start: int) -> bytes:
        """Read a range."""
        self.service._note("read_at", self.at)
        most = size if self.service.most_read is None else min(size, self.service.most_read)
        return self.content[start : start + most]


class Appearing(fs.FileSystemHandler):
    """Files of a folder, whose folders appear with them as in a bucket."""

    def __init__(self, root: Path) -> None:
        self._files = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())

    def get_type_name(self) -> str:
        return "played"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._files.get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        return self._files.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._files.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._files.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._files.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._files.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._files.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._make_folder_of(dest)
        self._files.copy_file(src, dest)

    def open_input_stream(self, path: str) -> Any:
        return self._files.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._files.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._make_folder_of(path)
        return self._files.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def _make_folder_of(self, path: str) -> None:
        self._files.create_dir(path.rpartition("/")[0])


def play_with_folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be the service of every bucket, by pyarrow."""
    files = fs.PyFileSystem(Appearing(root))
    monkeypatch.setattr(bucket, "connected", lambda *_: files)


def play(root: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Let a folder be the service of every bucket."""
    service = Service(root)
    monkeypatch.setattr(bucket, "connected", lambda *_: service)
    return service


class ServiceError(Exception):
    """Stands for an error of boto3's: one that the service answered, with its code, or another."""

    def __init__(self, code: str | None = None) -> None:
        super().__init__("AKIAKEY may not")
        self.response = {"Error": {} if code is None else {"Code": code}}


class ConnectionLost(Exception):
    """Stands for an error of boto3's that has no answer."""


@dataclass
class Boto:
    """Stands for boto3, which lists and ends unfinished uploads; remembers how it was asked."""

    begun_at: dict[str, float]
    """Times at which unfinished uploads began, by their keys."""
    asked: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def client(self, service: str, **options: Any) -> "Boto":
        """Client of a service."""
        self.asked |= {"service": service, **options}
        return self

    def get_paginator(self, request: str) -> "Boto":
        """Listing by pages."""
        self.asked["listing"] = request
        return self

    def paginate(self, **named: Any) -> Iterator[dict[str, Any]]:
        """Yield pages of one upload each, and one without any."""
        if self.error is not None:
            raise self.error
        bucket, prefix = named["Bucket"], named["Prefix"]
        yield {}
        for key, begun_at in [*self.begun_at.items()]:
            if f"{bucket}/{prefix}" == f"{bucket}/{key}"[: len(f"{bucket}/{prefix}")]:
                initiated = datetime.fromtimestamp(begun_at, UTC)
                yield {"Uploads": [{"Key": key, "UploadId": f"id of {key}", "Initiated": initiated}]}

    def abort_multipart_upload(self, **named: Any) -> None:
        """End an upload."""
        assert named == {"Bucket": "lake", "Key": named["Key"], "UploadId": f"id of {named['Key']}"}
        del self.begun_at[named["Key"]]


def play_boto3(begun_at: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Boto:
    """Let these uploads be unfinished, and boto3 be installed."""
    boto = Boto(begun_at)
    parts: dict[str, dict[str, Any]] = {
        "boto3": {"client": boto.client},
        "botocore": {},
        "botocore.config": {"Config": lambda **named: named},
        "botocore.exceptions": {"BotoCoreError": ConnectionLost, "ClientError": ServiceError},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return boto
