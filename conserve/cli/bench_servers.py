"""The servers that `conserve bench` plays live traffic against: its own, or one that runs already."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from conserve.cli import output
from conserve.cli.serve import harvester_command, keyed, server_command
from conserve.config import Settings
from conserve.engine.policy.policies import CONSERVE
from conserve.errors import EndpointUnusable

if TYPE_CHECKING:
    from conserve.bench.compare import Design
    from conserve.bench.forecast import Engine
    from conserve.bench.measure import Block
    from conserve.bench.presets import Preset
    from conserve.bench.sizing import Offered, Sized
    from conserve.engine.service import Service

VOCABULARY = (100, 20_000)  # token ids that prompts are made of


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A comparison's blocks, and what was played in them."""

    blocks: list["Block"]
    offered: "Offered"
    sized: "Sized"
    engine: "Engine | None"  # None where the server does not tell its latency model


async def on_server(
    endpoint: str,
    settings: Settings,
    preset: "Preset",
    offered: "Offered",
    design: "Design",
    *,
    overload: bool,
) -> Measured:
    """Compare on a server that runs already."""
    from conserve.bench.compare import alternate
    from conserve.bench.deployment import Deployment
    from conserve.bench.load import Target
    from conserve.bench.sizing import judge, size

    endpoint = endpoint.rstrip("/").removesuffix("/v1")
    deployment = Deployment(endpoint, api_key=settings.harvest_key or settings.api_key)
    try:
        before, engine = await deployment.regime(), await deployment.engine()
        if CONSERVE in design.policies and (why := await deployment.why_not_preempted()):
            output.say(f"live requests wait for the iteration under way, which rows cannot leave: {why}")
        target = Target(
            base_url=endpoint,
            model=await deployment.model(),
            api_key=settings.api_key,
            vocab_range=VOCABULARY,
        )
        sized = size(offered, preset, design, engine, overload=overload)
        output.say(sized.sentence())
        judged = None if overload else partial(judge, sized=sized, offered=offered, engine=engine)
        try:
            blocks = await alternate(
                deployment, target, sized.source, sized.design, say=output.say, judged=judged
            )
        finally:
            with contextlib.suppress(EndpointUnusable):
                await deployment.restore(before)
    finally:
        await deployment.close()
    return Measured(blocks=blocks, offered=offered, sized=sized, engine=engine)


async def on_own_server(
    settings: Settings,
    section: dict[str, Any],
    flags: list[str],
    preset: "Preset",
    offered: "Offered",
    design: "Design",
    *,
    overload: bool,
) -> Measured:
    """Start a server and a harvester with offline rows of its own, and compare on it."""
    port, settings = free_port(), keyed(settings)
    enqueue_rows(settings, preset, design.seed)
    async with serving(settings, section, flags, preset, port) as service:
        pin(service, preset)
        return await on_server(
            f"http://127.0.0.1:{port}", settings, preset, offered, design, overload=overload
        )


def free_port() -> int:
    """One that nobody has: two comparisons on one machine must not change each other's policy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def enqueue_rows(settings: Settings, preset: "Preset", seed: int) -> None:
    """Put the offline work into a store of the benchmark's own."""
    from conserve.bench.offline import like_papers, rows, write
    from conserve.endpoints.protocol import Url
    from conserve.jobs.submit import submit
    from conserve.jobs.task import Kind, Task
    from conserve.store.store import Store

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
    """The service while it runs; Ctrl-C stops it in order."""
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

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    output.say(f"starting {settings.model}")
    running = asyncio.create_task(service.run(stop, on_ready=on_ready))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        await asyncio.sleep(1.0)  # the harvester comes up
        yield service
    finally:
        waiting.cancel()
        stop.set()
        await running


def pin(service: "Service", preset: "Preset") -> None:
    """The engine's worker to its cores, everything else to the others."""
    from conserve.bench.cores import pin_processes

    if preset.engine_cores:
        pin_processes(service.process_ids(), preset.engine_cores, preset.other_cores)
