"""`conserve api`: OpenAI's Batch API over the store, without an engine."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.options import LogFormat
from conserve.cli.ports import require_free
from conserve.cli.telemetry import begin_logging
from conserve.config import size_bytes
from conserve.errors import SettingsError
from conserve.hosts import is_loopback, url_elsewhere, url_of
from conserve.http_server import CONNECTIONS
from conserve.niceness import give_way

if TYPE_CHECKING:
    from conserve.store.database.store import Store

EXAMPLE = """
conserve api
conserve api --port 8010 --max-requests 1000000 --max-file 4GB
OPENAI_BASE_URL=http://127.0.0.1:8001/v1 python my_batches.py
"""

NEEDS = ("starlette", "uvicorn", "python_multipart")


def api(
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8001,
    socket: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Listen at a Unix socket, for a vllm serve beside.")
    ] = None,
    max_file: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of an upload.")] = "200MB",
    max_requests: Annotated[int, typer.Option(metavar="N", min=1, help="Most requests of a batch.")] = 50_000,
    max_connections: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most connections at once.")
    ] = CONNECTIONS,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Answer /metrics without a key.")
    ] = False,
    log_format: LogFormat = None,
) -> None:
    """Serve OpenAI's files and batches over this store; `conserve run`, `serve` or `harvest` computes them.

    Stop it with Ctrl-C or SIGTERM. Batches go on meanwhile, and files are written at the next start.
    """
    require_packages()
    from conserve.batch_api.serving import serve
    from conserve.jobs.batches.lines import Limits

    context: Context = ctx.obj
    begin_logging(context.settings(log_format=log_format))
    limits = Limits(file_bytes=size_bytes("--max-file", max_file), requests=max_requests)
    if socket is None:
        require_free(host, port)
    else:
        give_way()
    url = f"{url_elsewhere(host, port) or url_of(host, port)}/v1"
    with context.store() as store:
        if socket is None:
            require_keys(store, host)
        serve(
            store,
            limits,
            host=host,
            port=port,
            socket=socket,
            connections=max_connections,
            open_metrics=open_metrics,
            on_ready=lambda: None if socket else output.say(f"serving files and batches at {url}"),
        )


def require_keys(store: "Store", host: str) -> None:
    """Raise if other machines would reach an API that asks for no key."""
    from conserve.store.books import keys

    if is_loopback(host):
        return
    with store.read() as tx:
        if any(key.revoked_at is None for key in keys.everything(tx)):
            return
    raise SettingsError(
        f"without keys the API listens on this machine alone, and {host} is for others; "
        "run first: conserve keys add NAME --project PROJECT"
    )


def require_packages() -> None:
    """Raise if the extra `api` is not installed."""
    if all(map(find_spec, NEEDS)):
        return
    from conserve.installation import install_line

    raise SettingsError(f"conserve api needs an HTTP server; run: {install_line('api')}")
