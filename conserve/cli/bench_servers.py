"""The servers that `conserve bench` plays live traffic against: its own, or one that runs already."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from conserve.cli import output
from conserve.cli.serve import harvester_command, keyed, server_command
from conserve.config import Settings
from conserve.engine.policy.policies import CONSERVE
from conserve.errors import ConserveError, EndpointUnusable

if TYPE_CHECKING:
    from conserve.bench.compare import Design
    from conserve.bench.deployment import Deployment
    from conserve.bench.forecast import Engine
    from conserve.bench.measure import Block
    from conserve.bench.presets import Preset
    from conserve.bench.sizing import Offered, Sized
    from conserve.engine.service import Service

VOCABULARY = (100, 20_000)  # token ids that prompts are made of
END_S = 5.0  # for processes to end by themselves: what they have to save is of the benchmark's own store
RESTORE_S = 5.0  # for a server to take its policy back


@dataclass(slots=True, kw_only=True)
class Measured:
    """A comparison's blocks as they come, and what is played in them."""

    offered: "Offered"
    blocks: list["Block"] = field(default_factory=list)
    sized: "Sized | None" = None  # None before the engine's speed was asked for
    engine: "Engine | None" = None  # None where the server does not tell its latency model
    model: str = ""  # as the server names it


async def until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Do the work until Ctrl-C or SIGTERM; True if it came to its end.

    Work that was stopped is cancelled, once; its errors while it ends are of processes that were ended.
    """
    task, stopped = asyncio.ensure_future(work), False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            output.say("stopping: the block under way is dropped")
            stopped = task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await task
    except (asyncio.CancelledError, ConserveError):
        if not stopped:
            raise
    return not stopped


async def on_server(
    endpoint: str,
    settings: Settings,
    preset: "Preset",
    design: "Design",
    measured: Measured,
    *,
    overload: bool,
) -> None:
    """Compare on a server that runs already, and give it back as it was."""
    from conserve.bench.deployment import Deployment

    endpoint = endpoint.rstrip("/").removesuffix("/v1")
    deployment = Deployment(endpoint, api_key=settings.harvest_key or settings.api_key)
    try:
        before = await deployment.regime()
        try:
            await comparison(deployment, endpoint, settings, preset, design, measured, overload=overload)
        finally:
            if measured.sized is not None:  # otherwise nothing was changed
                await give_back(deployment, before, endpoint)
    finally:
        await deployment.close()


async def comparison(
    deployment: "Deployment",
    endpoint: str,
    settings: Settings,
    preset: "Preset",
    design: "Design",
    measured: Measured,
    *,
    overload: bool,
) -> None:
    """Size the load, and add the blocks to `measured` as they end."""
    from conserve.bench.compare import alternate
    from conserve.bench.load import Target
    from conserve.bench.sizing import judge, size

    offered, engine = measured.offered, await deployment.engine()
    if CONSERVE in design.policies and (why := await deployment.why_not_preempted()):
        output.say(f"live requests wait for the iteration under way, which rows cannot leave: {why}")
    measured.model = await deployment.model()
    target = Target(base_url=endpoint, model=measured.model, api_key=settings.api_key, vocab_range=VOCABULARY)
    sized = size(offered, preset, design, engine, overload=overload)
    measured.sized, measured.engine = sized, engine
    output.say(sized.sentence())
    judged = None if overload else partial(judge, sized=sized, offered=offered, engine=engine)
    async for block in alternate(
        deployment, target, sized.source, sized.design, say=output.say, judged=judged
    ):
        measured.blocks.append(block)


async def give_back(deployment: "Deployment", regime: dict[str, Any], endpoint: str) -> None:
    """Restore the server's policy, preemption and SLO, or say that they are not."""
    try:
        async with asyncio.timeout(RESTORE_S):
            await deployment.restore(regime)
    except (EndpointUnusable, TimeoutError):
        output.say(f"{endpoint} did not take its policy {regime['policy']} back; start it again to have it")


async def on_own_server(
    settings: Settings,
    section: dict[str, Any],
    flags: list[str],
    preset: "Preset",
    design: "Design",
    measured: Measured,
    *,
    overload: bool,
) -> None:
    """Start a server and a harvester of the rows in the store of these settings, and compare on it."""
    from conserve.bench.deployment import Deployment

    port, settings = free_port(), keyed(settings)
    endpoint = f"http://127.0.0.1:{port}"
    async with serving(settings, section, flags, preset, port) as service:
        pin(service, preset)
        deployment = Deployment(endpoint, api_key=settings.harvest_key or settings.api_key)
        try:
            await comparison(deployment, endpoint, settings, preset, design, measured, overload=overload)
        finally:
            await deployment.close()


def free_port() -> int:
    """A port that nothing listens on: two comparisons on one machine must not change each other's policy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def enqueue_rows(settings: Settings, preset: "Preset", seed: int) -> None:
    """Put the offline work into a store of the benchmark's own."""
    from conserve.bench.offline import like_papers, rows, write
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
    """The service while it runs; its processes are ended at the end, whatever they are doing."""
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
        await asyncio.sleep(1.0)  # the harvester comes up
        yield service
    finally:
        waiting.cancel()
        stop.set()
        await end(service, running)


async def end(service: "Service", running: "asyncio.Task[None]") -> None:
    """Wait for the service, which was told to stop, and kill what is left of it after `END_S`."""
    try:
        await asyncio.wait({running}, timeout=END_S)
    finally:  # also where Ctrl-C comes meanwhile
        if not running.done():
            service.kill()
        await running


def pin(service: "Service", preset: "Preset") -> None:
    """The engine's worker to its cores, everything else to the others."""
    from conserve.bench.cores import pin_processes

    if preset.engine_cores:
        pin_processes(service.process_ids(), preset.engine_cores, preset.other_cores)
