"""Files and batches at the address of `conserve serve`: the process beside the server, and the store's keys."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.cli.suggestions import again
from conserve.config import Settings
from conserve.errors import SettingsError, StoreError
from conserve.hosts import is_loopback
from conserve.variables import BATCH_API, GIVEN

if TYPE_CHECKING:
    from conserve.engine.service import ProcessCommand

VLLMS_KEY = "VLLM_API_KEY"


def with_store_keys(settings: Settings, *, batches: bool = True) -> Settings:
    """Settings of a server that asks for a key if the store has keys; its own is then made for this start.

    The process of the `batches` knows the store's keys. A server without it would answer callers that have none.
    """
    if settings.api_key or os.environ.get(VLLMS_KEY) or not has_keys(settings):
        return settings
    if not batches:
        raise SettingsError("the store has keys; leave out --no-batches, or set CONSERVE_API_KEY")
    return replace(settings, api_key=secrets.token_urlsafe(32))


def has_keys(settings: Settings) -> bool:
    """True if the store has or had a key; raises if the store cannot be asked."""
    from conserve.store.books import keys
    from conserve.store.database.store import Store

    try:
        store = Store.open_to_read(settings)
        with closing(store), store.read() as tx:
            return bool(keys.everything(tx))
    except StoreError as error:
        said = f"whether requests need a key cannot be read; set CONSERVE_API_KEY, or mend the store: {error}"
        raise SettingsError(said) from error


def open_batches(host: str, settings: Settings) -> bool:
    """True if callers without a key would reach the store's batches from other machines."""
    return not (settings.api_key or is_loopback(host))


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
            environment={"CONSERVE_STORE": settings.store_url, BATCH_API: socket, GIVEN: again()},
        )


def told_of(beside: "ProcessCommand | None", server: "ProcessCommand") -> "ProcessCommand":
    """Command of the server, which passes files and batches on if there is a process for them."""
    if beside is None:
        return server
    return replace(server, environment={**server.environment, BATCH_API: beside.environment[BATCH_API]})
