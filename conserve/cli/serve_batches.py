"""Files and batches at the address of `conserve serve`: the process beside the server, and the store's keys."""

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.cli.serve_notices import is_loopback
from conserve.config import Settings
from conserve.errors import SettingsError, StoreError

if TYPE_CHECKING:
    from conserve.engine.service import ProcessCommand

SOCKET = "CONSERVE_BATCH_API"  # as in the engine's plug-in, which is not imported here


def with_store_keys(settings: Settings, host: str) -> Settings:
    """Settings of a server that asks for a key if the store has keys; its own is then made for this start."""
    if settings.api_key is None and has_keys(settings, host):
        return replace(settings, api_key=secrets.token_urlsafe(32))
    return settings


def has_keys(settings: Settings, host: str) -> bool:
    """True if the store has or had a key; raises if it cannot be asked and other machines reach the server."""
    from conserve.store.books import keys
    from conserve.store.database.store import Store

    try:
        store = Store.open_to_read(settings)
    except StoreError as error:
        if is_loopback(host):
            return False
        raise SettingsError(f"whether requests need a key cannot be read: {error}") from error
    try:
        with store.read() as tx:
            return bool(keys.everything(tx))
    finally:
        store.close()


@contextmanager
def batch_api(
    settings: Settings, file_bytes: int, requests: int, *, wanted: bool = True
) -> Iterator["ProcessCommand | None"]:
    """Command of `conserve api` at a socket in a folder of its own, which only this user can open."""
    from conserve.engine.service import ProcessCommand, python

    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="conserve-", ignore_cleanup_errors=True) as folder:
        socket = str(Path(folder) / "api.sock")
        limits = ("--max-file", str(file_bytes), "--max-requests", str(requests))
        yield ProcessCommand(
            name="Batch API",
            words=python("conserve", "--home", str(settings.home), "api", "--socket", socket, *limits),
            environment={"CONSERVE_STORE": settings.store_url, SOCKET: socket},
        )


def told_of(beside: "ProcessCommand | None", server: "ProcessCommand") -> "ProcessCommand":
    """Command of the server, which passes files and batches on if there is a process for them."""
    if beside is None:
        return server
    return replace(server, environment={**server.environment, SOCKET: beside.environment[SOCKET]})
