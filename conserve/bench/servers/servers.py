"""Servers of a comparison: the plug-in's, and a stock one for each policy that needs it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Self

from conserve.bench.attainment import LatencyLimits
from conserve.bench.compare import FILL_S, PRACTICE_S, Design
from conserve.bench.deployment import Deployment
from conserve.bench.field import Turn
from conserve.bench.load import LoadTarget
from conserve.bench.names import SARATHI_P, is_stock, regime_of, runs_offline
from conserve.bench.playing import VOCABULARY, Measurement, PlayWishes, Say, measure
from conserve.bench.presets import Preset
from conserve.bench.servers.place import ServerPlace
from conserve.bench.servers.rows import OfflineQueue, rows_of, rows_of_block
from conserve.bench.simulate_online import EngineModel
from conserve.bench.sizing import Sized
from conserve.bench.stock import StockServer
from conserve.config import Settings
from conserve.engine.section import EngineSection
from conserve.engine.service import ProcessCommand, python
from conserve.errors import ConserveError
from conserve.hosts import HERE, free_port, url_of

LEASE_S = 24 * 3600.0  # a harvester may be stopped for as long as others have their turns
# Of settings, a section, vLLM's flags and a port.
MakeServer = Callable[[Settings, EngineSection, list[str], int], ProcessCommand]
MakeHarvester = Callable[..., ProcessCommand]  # of settings and a server's address, with more flags
MOST_ROWS = 256  # in flight at a stock server beside one of unknown speed
MOST_BLOCKS = 10_000  # on the same servers


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersPlan:
    """The servers to start: settings of the user, flags of vLLM, our section of the engine's configuration."""

    settings: Settings
    section: EngineSection
    flags: Sequence[str]  # of stock servers
    connector: Sequence[str]  # of the plug-in's server, which may copy KV
    preset: Preset
    rows: OfflineQueue  # of the plug-in's server
    server: MakeServer
    harvester: MakeHarvester
    say: Say


async def on_own_server(
    plan: ServersPlan, design: Design, measurement: Measurement, wishes: PlayWishes
) -> None:
    """Start the servers one by one, and compare the policies on them."""
    servers = Servers(plan, design)
    try:
        await servers.start()
        design = replace(design, starts_servers=True)
        await measure(servers.deployment, servers.prepare, plan.preset, design, measurement, wishes)
    finally:
        await servers.close()


class Servers:
    """The field of a comparison: the plug-in's server, and a stock one for each policy that needs it.

    A server starts when it first has its turn. While another one has it, all of its processes are stopped in their
    tracks, rows in flight included; with a preset that has no memory for several, it is ended instead.
    """

    def __init__(self, plan: ServersPlan, design: Design) -> None:
        self._plan, self._design = plan, design
        self._port = free_port()
        settings = plan.settings
        self.deployment = Deployment(
            url_of(HERE, self._port), api_key=settings.harvest_key or settings.api_key
        )
        self._ordered = True
        self._plugged = ServerPlace(
            "the plug-in's server",
            self._command(),
            self._harvester(settings, self._port),
            self.deployment,
            url=url_of(HERE, self._port),
            preset=plan.preset,
            say=plan.say,
        )
        self._stock: dict[str, ServerPlace] = {}
        self._queues: dict[str, OfflineQueue] = {}  # of the stock servers
        self._wanted = 1  # rows that wait before a block
        self._budgets: dict[str, int | None] = {}  # token budgets of the stock servers
        self._seeds = count(design.seed * MOST_BLOCKS)  # of the blocks' prompts

    async def start(self) -> None:
        """Start the plug-in's server, by whose latency model a comparison is sized, or let it go on alone."""
        if not self._plugged.started:
            self._plan.say(f"starting {self._plan.settings.engine_model}")
        await self._go_on(self._plugged)

    async def prepare(self, sized: Sized, engine: EngineModel | None, tokens: int | None) -> Self:
        """Name the stock servers of a comparison of this size; `tokens` is the token budget of `sarathi-p`."""
        if engine is not None:
            self._wanted = rows_of_block(sized, self._plan.preset, engine, FILL_S + PRACTICE_S)
        for policy in filter(is_stock, sized.design.policies):
            budget = tokens if policy == SARATHI_P else None
            if policy in self._stock and self._budgets[policy] != budget:
                await self._stock.pop(policy).end()  # a stock server has its token budget from the start
            if policy not in self._stock:
                self._budgets[policy] = budget
                self._stock[policy] = self._stock_place(policy, engine, budget)
        return self

    async def turn(self, policy: str, slo: LatencyLimits | None) -> Turn:
        """Stop the other servers, and let this policy's one go on, or start."""
        place = self._stock.get(policy, self._plugged)
        if not place.started:
            self._plan.say(f"starting {place.name}")
        await self._go_on(place)
        if place is self._plugged:
            await self._follow(policy, slo)
        if runs_offline(policy):
            await self._fill(policy)
            await place.filled(FILL_S)
        settings = self._plan.settings
        target = LoadTarget(
            base_url=place.url, model=settings.engine_model, api_key=settings.api_key, vocab_range=VOCABULARY
        )
        return Turn(place.server, target, next(self._seeds), first=place.first_turn())

    async def played(self, policy: str) -> None:
        """Raise `ConserveError` if the rows of this policy's server ran out in the block, or never began."""
        if not runs_offline(policy):
            return
        if not await asyncio.to_thread(self._queue(policy).waiting):
            raise ConserveError(
                f"the offline rows of {policy} ran out within a block, which is dropped; "
                "give fewer or shorter blocks (--rounds, --block-s)"
            )
        if not await asyncio.to_thread(self._queue(policy).taken):
            said = self._stock.get(policy, self._plugged).harvester_said
            raise ConserveError(
                f"no offline row of {policy} was sent to its server, so the block is dropped; the last words of "
                f"its harvester: {said}"
            )

    async def end(self) -> None:
        """End all servers together, in seconds. Each starts anew when it next has its turn."""
        await asyncio.gather(*(place.end() for place in self._places), return_exceptions=True)

    async def close(self) -> None:
        """End all servers, for good."""
        await self.end()
        await asyncio.gather(*(place.server.close() for place in self._places), return_exceptions=True)

    @property
    def _places(self) -> list[ServerPlace]:
        return [self._plugged, *self._stock.values()]

    async def _go_on(self, place: ServerPlace) -> None:
        for other in self._places:
            if other is not place:
                await (other.freeze() if self._plan.preset.resident else other.end())
        await place.begin()

    def _queue(self, policy: str) -> OfflineQueue:
        return self._queues.get(policy, self._plan.rows)

    async def _fill(self, policy: str) -> None:
        """Queue rows until enough wait; a server that is stopped might hold its store locked meanwhile."""
        queue = self._queue(policy)
        while await asyncio.to_thread(queue.waiting) < self._wanted:
            await asyncio.to_thread(queue.add)

    async def _follow(self, policy: str, slo: LatencyLimits | None) -> None:
        ordered = regime_of(policy).ordered
        if ordered != self._ordered:
            self._ordered = ordered
            order = () if ordered else ("--utility", "0")
            await self._plugged.harvest_by(self._harvester(self._plan.settings, self._port, *order))
        await self.deployment.follow(policy, slo, preemption=self._design.preemption)

    def _command(self) -> ProcessCommand:
        plan, address = self._plan, address_of(self._port)
        command = plan.server(plan.settings, plan.section, [*plan.connector, *address], self._port)
        # vLLM's time-out for an iteration goes on counting while others have a turn.
        patient = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(int(LEASE_S))}
        return replace(command, environment={**command.environment, **patient, **plan.preset.environment})

    def _harvester(self, settings: Settings, port: int, *more: str) -> ProcessCommand:
        window = self._plan.preset.offline_window
        limit = ("--window", str(window)) if window and "--window" not in more else ()
        words = (*limit, "--lease-s", str(LEASE_S), *more)
        return self._plan.harvester(settings, url_of(HERE, port), *words)

    def _stock_place(self, policy: str, engine: EngineModel | None, tokens: int | None) -> ServerPlace:
        plan, port = self._plan, free_port()
        flags = [*plan.flags, *address_of(port)]
        if policy == SARATHI_P:
            flags += ["--scheduling-policy", "priority"]
            flags += ["--max-num-batched-tokens", str(tokens)] if tokens is not None else []
        settings = stock_settings(plan.settings, policy)
        harvester = None
        if runs_offline(policy):
            if policy not in self._queues:
                self._queues[policy] = OfflineQueue(settings=settings, files=plan.rows.files)
                self._queues[policy].add()
            window = plan.preset.offline_window or (engine.most_rows if engine else MOST_ROWS)
            harvester = self._harvester(settings, port, "--window", str(window), "--steady")
        server = StockServer(
            url_of(HERE, port),
            rows=rows_of(plan.preset, engine) if harvester else None,
            api_key=settings.api_key,
        )
        return ServerPlace(
            f"stock vLLM for {policy}",
            stock_command(settings, flags, plan.preset, port),
            harvester,
            server,
            url=url_of(HERE, port),
            preset=plan.preset,
            say=plan.say,
        )


def address_of(port: int) -> list[str]:
    """Address of a server on this machine, as flags of vLLM."""
    return ["--host", HERE, "--port", str(port)]


def stock_settings(settings: Settings, policy: str) -> Settings:
    """Settings of a stock server's own store. It knows one key, and its harvester sends that one."""
    home = settings.home.with_name(f"{settings.home.name}-{policy}")
    return replace(settings, home=home, harvest_key=settings.api_key)


def stock_command(settings: Settings, flags: Sequence[str], preset: Preset, port: int) -> ProcessCommand:
    """Command of vLLM's own server."""
    words = (settings.engine_model, str(settings.models_folder), *flags)
    return ProcessCommand(
        name="server",
        words=python("conserve.engine.vllm.server.stock", *words),
        environment={"VLLM_API_KEY": settings.api_key or "", **preset.environment},
        log=settings.home / "serving" / f"{port}.log",
    )
