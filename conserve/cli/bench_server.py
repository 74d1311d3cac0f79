"""The server that `conserve bench` starts, with rows to harvest and processes on separate cores."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from conserve.cli import output
from conserve.cli.serve import harvester_command, keyed, server_command
from conserve.config import Settings

if TYPE_CHECKING:
    from conserve.bench.compare import Design
    from conserve.bench.playing import Measurement
    from conserve.bench.presets import Preset
    from conserve.engine.service import Service

END_S = 5.0  # until processes are killed: their unsaved progress is of the benchmark's own store


async def on_own_server(
    settings: Settings,
    section: dict[str, Any],
    flags: list[str],
    preset: "Preset",
    design: "Design",
    measurement: "Measurement",
    *,
    overload: bool,
) -> None:
    """Start a server and a harvester over the store of these settings, and compare the policies on it."""
    from conserve.bench.deployment import Deployment
    from conserve.bench.playing import measure

    port, settings = free_port(), keyed(settings)
    endpoint = f"http://127.0.0.1:{port}"
    async with serving(settings, section, flags, preset, port) as service:
        pin(service, preset)
        deployment = Deployment(endpoint, api_key=settings.harvest_key or settings.api_key)
        try:
            await measure(
                deployment,
                endpoint,
                settings,
                preset,
                design,
                measurement,
                overload=overload,
                say=output.say,
            )
        finally:
            await deployment.close()


def free_port() -> int:
    """Unused port, so that two comparisons on one machine do not change each other's policy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def enqueue_rows(settings: Settings, preset: "Preset", seed: int) -> None:
    """Queue the offline rows in the benchmark's own store."""
    from conserve.bench.offline import like_papers, rows, write
    from conserve.bench.playing import VOCABULARY
    from conserve.endpoints.protocol import Url
    from conserve.jobs.requests.submit import submit
    from conserve.jobs.task import Kind, Task
    from conserve.store.database.store import Store

    settings.home.mkdir(parents=True, exist_ok=True)
    factor, most = preset.offline_factor, preset.offline_longest
    sizes = (
        like_papers(preset.offline_rows, factor=factor, most=most, seed=seed)
        if preset.offline_lengths is None
        else repeat(preset.offline_lengths, preset.offline_rows)
    )
    path = write(settings.home / "offline.jsonl", rows(sizes, vocab_range=VOCABULARY, seed=seed))
    store = Store.open(settings)
    try:
        submit(store, str(path), Task(kind=Kind.OPENAI, url=Url.COMPLETIONS), name="offline")
    finally:
        store.close()


@asynccontextmanager
async def serving(
    settings: Settings, section: dict[str, Any], flags: list[str], preset: "Preset", port: int
) -> AsyncIterator["Service"]:
    """Run the service during the block of the `with`; its processes are ended after it."""
    from conserve.engine.service import Service

    url = f"http://127.0.0.1:{port}"
    server = server_command(settings, section, [*flags, "--host", "127.0.0.1", "--port", str(port)], port)
    server = replace(server, environment={**server.environment, **preset.environment})
    window = ["--window", str(preset.offline_window)] if preset.offline_window else []
    harvester = harvester_command(settings, url, *window)
    service = Service(server, harvester, url=url, say=output.say)
    stop, ready = asyncio.Event(), asyncio.Event()

    async def on_ready() -> None:
        ready.set()

    output.say(f"starting {settings.model}")
    running = asyncio.create_task(service.run(stop, on_ready=on_ready))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        await asyncio.sleep(1.0)  # until the harvester is up
        yield service
    finally:
        waiting.cancel()
        stop.set()
        await end(service, running)


async def end(service: "Service", running: "asyncio.Task[None]") -> None:
    """Wait for the stopping service, and kill its processes after `END_S`."""
    try:
        await asyncio.wait({running}, timeout=END_S)
    finally:  # even after a Ctrl-C meanwhile
        if not running.done():
            service.kill()
        await running


def pin(service: "Service", preset: "Preset") -> None:
    """Pin the engine's worker to its cores, all other processes to the rest."""
    from conserve.bench.cores import pin_processes

    if preset.engine_cores:
        pin_processes(service.process_ids(), preset.engine_cores, preset.other_cores)
