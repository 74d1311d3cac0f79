"""vLLM's OpenAI server as `conserve serve` starts it, without an engine behind it.

    python -m tests.benchmarks.front_end PORT SOCKET [FLAG ...]

It passes files and batches on to the `conserve api` at the socket. The flags are vLLM's.
"""

import asyncio
import os
import socket
import sys

import uvicorn

from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.server import process
from conserve.variables import BATCH_API


def main(port: int, path: str, *flags: str) -> None:
    """Serve until SIGTERM."""
    os.environ[BATCH_API] = path
    process.allow_plugin()
    from vllm.entrypoints.launchers.app import build_app

    front = ApiLimits()
    args = process.parsed(["any", *flags])
    process.put_in_front(args, front)
    app = build_app(args, ("generate",))
    config = uvicorn.Config(
        app, http=process.http_protocol(front), lifespan="off", access_log=False, log_config=None
    )  # vLLM's own lifespan wants an engine
    with socket.create_server(("127.0.0.1", port)) as listening:
        asyncio.run(uvicorn.Server(config).serve([listening]))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
