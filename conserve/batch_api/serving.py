"""The HTTP server of the application: uvicorn, until a signal comes."""

import asyncio
import signal
import socket as net
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import uvicorn

from conserve import open_files
from conserve.batch_api.app import application
from conserve.errors import SettingsError
from conserve.http_server import CONNECTIONS, KEEP_ALIVE_S, affordable, bounded
from conserve.jobs.batches.lines import Limits
from conserve.store.database.store import Store

DRAIN_S = 30  # for requests under way
READY_LOOK_S = 0.05
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    store: Store,
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    socket: Path | None = None,
    connections: int = CONNECTIONS,
    open_metrics: bool = False,
    on_ready: Callable[[], object] = lambda: None,
) -> None:
    """Serve at an address, or at a Unix socket, until SIGINT or SIGTERM; uploads under way are finished first.

    Raises `StoreMoved` at an address, once the store is in another database. A socket is a live server's, which
    goes on.
    """
    app = application(store, limits, beside=socket is not None, open_metrics=open_metrics)
    most = affordable(connections, open_files.raise_limit())
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=bounded(most) if socket is None else "auto",  # a live server bounds its own clients
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=KEEP_ALIVE_S,  # uvicorn's 5 s end as the next poll of many clients comes
        server_header=False,
    )
    with ExitStack() as opened:
        sockets = None if socket is None else [opened.enter_context(closing(at_path(socket)))]
        server, api = SignalledServer(config), app.state.conserve_api
        if socket is None:
            api.moves.on_gone = server.end
        asyncio.run(until_signalled(server, on_ready, sockets, on_stop=api.streams.close))
    if server.ended and api.moves.moved is not None:
        raise api.moves.moved


def at_path(path: Path) -> net.socket:
    """A Unix socket that this user alone can open; nothing connects before it listens."""
    bound = net.socket(net.AF_UNIX)
    try:
        if path.is_socket():
            path.unlink()  # of an earlier process
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        bound.close()
        raise SettingsError(f"--socket {path} cannot be made: {error}; name another path") from error
    return bound


class SignalledServer(uvicorn.Server):
    """uvicorn's server, whose signals are handled by `until_signalled`; `ended` if the program ends it itself."""

    ended = False

    def end(self) -> None:
        """End in order; any thread may ask for that."""
        self.ended = self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def until_signalled(
    server: SignalledServer,
    on_ready: Callable[[], object],
    sockets: list[net.socket] | None = None,
    *,
    on_stop: Callable[[], object] = lambda: None,
) -> None:
    """Run the server; a signal ends it in order, a second one at once."""

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        on_stop()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets))
    while not (server.started or serving.done()):
        await asyncio.sleep(READY_LOOK_S)
    if server.started:
        on_ready()
    await serving
