"""The event loop and its HTTP server: tokens leave at once, connections rest and end, signals are given back."""

import asyncio
import os
import signal
import socket
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.types import Receive, Scope, Send

from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.launching.environment import KEEP_ALIVE, START_METHOD, prepare_environment
from conserve.engine.vllm.server import process
from conserve.engine.vllm.server.process import run
from tests.warned import OF_VLLM

pytestmark = [pytest.mark.engine, *OF_VLLM]


def test_tokens_wait_for_no_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of a request, made at a socket such as vLLM's, has Nagle's algorithm off."""
    import uvicorn
    from vllm.entrypoints.launchers.api_server import entry

    at_once: list[bool] = []

    async def served(args: Namespace, *, http: Any, **others: Any) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for connection in server.server_state.connections:
                sending = connection.transport.get_extra_info("socket")
                at_once.append(bool(sending.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            server.should_exit = True

        server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="critical", lifespan="off"))
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()  # a connection that is made before uvicorn accepts waits
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")
            await server._serve([listening])
            writer.close()

    monkeypatch.setattr(entry, "run_server", served)
    run(Namespace(), ApiLimits())
    assert at_once == [True]


def test_a_connection_outlasts_the_pause_between_two_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop(KEEP_ALIVE, None)
    prepare_environment(offline=True, served=True)
    assert envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE == 75
    os.environ[KEEP_ALIVE] = "30"  # the user's own
    prepare_environment(offline=True, served=True)
    assert envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE == 30


@pytest.mark.parametrize("served", [True, False])
def test_processes_are_spawned_unless_the_user_says_otherwise(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of a process with threads would keep the locks that they hold."""
    from vllm import envs

    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop(START_METHOD, None)
    prepare_environment(offline=True, served=served)
    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"
    os.environ[START_METHOD] = "fork"
    prepare_environment(offline=True, served=served)
    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "fork"


def test_an_answer_without_an_end_does_not_keep_a_server_whose_engine_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a stream of events, or one whose client does not read."""
    import uvicorn
    from vllm.entrypoints.launchers.api_server import entry

    ended: list[bool] = []

    async def served(args: Namespace, **given: Any) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            server.should_exit = True  # as vLLM's watchdog does
            await asyncio.Event().wait()

        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", **given))
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")
            async with asyncio.timeout(60):
                await server._serve([listening])
            ended.append(True)
            writer.close()

    monkeypatch.setattr(entry, "run_server", served)
    monkeypatch.setattr(process, "LAST_S", 0)
    run(Namespace(), ApiLimits())
    assert ended == [True]


def test_a_signal_behind_the_end_of_a_run_does_what_it_did_before() -> None:
    import uvloop

    from conserve.cli.run import supervise
    from conserve.cli.signals import STOPPING

    async def ran(stop: asyncio.Event) -> None:
        assert not stop.is_set()

    async def show() -> None:
        await asyncio.Event().wait()

    before = [signal.getsignal(number) for number in STOPPING]
    harvester: Any = SimpleNamespace(run=ran, ready_at=0.0)
    assert uvloop.run(supervise(harvester, show)) is False
    assert [signal.getsignal(number) for number in STOPPING] == before
