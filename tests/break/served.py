"""A `conserve serve` whose server is scripted: the supervisor, the harvester and their ends are the real ones.

python -m tests.break.served HOME PORT     # the supervisor
python -m tests.break.served server PORT   # the server
"""

import asyncio
import signal
import sys

from conserve.config import load
from conserve.engine import service
from conserve.engine.service import ProcessCommand, Service, python
from tests.acceptance.scripted_server import Script, ScriptedServer

MODULE = "tests.break.served"


def server(port: int) -> None:
    """Answer until a signal comes."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM}
    )  # a handler could meet its own event half locked
    with ScriptedServer(Script(token_s=0.0005, max_num_seqs=32), port=port):
        signal.sigwait({signal.SIGTERM})


async def supervise(home: str, port: int) -> None:
    """Run a server and a harvester until a signal comes."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    url = f"http://127.0.0.1:{port}"
    from conserve.cli.serve import harvester_command

    parts = Service(
        ProcessCommand(name="server", words=python(MODULE, "server", str(port))),
        harvester_command(load({"home": home}), url),
        url=url,
        say=lambda said: print(said, file=sys.stderr, flush=True),
    )

    async def ready() -> None:
        print("ready", flush=True)

    await parts.run(stop, on_ready=ready)


def main() -> None:
    """Start the part that the command line names."""
    where, port = sys.argv[1], int(sys.argv[2])
    if where == "server":
        server(port)
        return
    service.LONGEST_BACKOFF_S = 0.1  # parts are killed again and again
    asyncio.run(supervise(where, port))


if __name__ == "__main__":
    main()
