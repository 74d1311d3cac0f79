"""Files that a reader sees whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace the file; of two writers at the same time, of any machine, one's content stays. Raises OSError.

    With `durable`, the new file survives a power cut once this has returned, and the old one survives until then.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(8).hex()}")
    try:
        partial.write_bytes(content)
        if durable:
            sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        for folder in (path.parent, *(made.parent for made in missing)):
            sync(folder)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
