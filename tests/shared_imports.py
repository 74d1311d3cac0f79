"""Test modules that the workers of a run rewrite once together, not each on its own.

pytest rewrites the assertions of each module at its import, which is half of a collection, and keeps the outcome in
a file that other processes read.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep rewritten modules in files, also where PYTHONDONTWRITEBYTECODE is set; their tests find it as it was."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def import_share(config: pytest.Config) -> None:
    """Import every n-th test module in one of n workers, which all modules are collected in afterwards.

    Each worker then finds most of the others' modules rewritten. One that is not yet there it rewrites itself.
    """
    worker, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{end}", "") for end in ("", "_COUNT"))
    if not worker or config.args != config.getini("testpaths"):
        return
    modules = sorted(path for folder in config.args for path in (config.rootpath / folder).rglob("test_*.py"))
    for path in modules[int(worker.removeprefix("gw")) :: int(workers)]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which its collection tells of
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))
