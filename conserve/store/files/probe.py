"""Trial of the place of a store's files: writes a small file there, reads it and deletes it."""

import time
import uuid

from conserve.errors import StoreError
from conserve.store.files.layout import PROBES
from conserve.store.files.objects import FilePath, ObjectPath


def probe(data: FilePath) -> float:
    """Seconds that a file takes to be written, read and deleted; raises `StoreError` or OSError."""
    began = time.perf_counter()
    path, content = data / PROBES / uuid.uuid4().hex, uuid.uuid4().bytes
    if not isinstance(path, ObjectPath):
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    same = path.read_bytes() == content
    path.unlink()
    if not same or path.is_file():
        raise StoreError(f"{data} does not keep what is written there, or does not delete it")
    return time.perf_counter() - began
