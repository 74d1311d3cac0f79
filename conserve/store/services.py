"""Which servers run over this store, so that `conserve status` can ask them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from conserve.config import Settings

FOLDER = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A `conserve serve`."""

    url: str
    pid: int
    process_started_at: float  # tells it from another process of the same number
    started_at: float


@contextmanager
def announce(settings: Settings, url: str) -> Iterator[None]:
    """Be found by `running` while this lasts."""
    here = psutil.Process()
    path = settings.home / FOLDER / f"{here.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = Running(url=url, pid=here.pid, process_started_at=here.create_time(), started_at=time.time())
    whole = path.with_suffix(".tmp")
    whole.write_bytes(msgspec.json.encode(record))
    whole.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running(settings: Settings) -> list[Running]:
    """The servers whose processes live; what others left behind is swept up."""
    found = []
    for path in sorted((settings.home / FOLDER).glob("*.json")):
        record = read(path)
        if record is not None and alive(record):
            found.append(record)
        else:
            path.unlink(missing_ok=True)
    return found


def read(path: Path) -> Running | None:
    """The record in a file, if it is one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return None


def alive(record: Running) -> bool:
    """Whether the process that wrote the record still runs."""
    try:
        started_at = psutil.Process(record.pid).create_time()
    except psutil.Error:
        return False
    return record.pid == os.getpid() or abs(started_at - record.process_started_at) < 1.0
