"""A co-serving server under test: its policy is switched, its counters are read."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, Self

import httpx
import msgspec
from msgspec.structs import replace

from conserve.bench.answers import LoadAnswer
from conserve.bench.attainment import LatencyLimits
from conserve.bench.field import LOOK_S, Turn, readings
from conserve.bench.load import LoadTarget
from conserve.bench.names import HYGENS, regime_of, runs_offline, wanted
from conserve.bench.served import served_model
from conserve.bench.simulate_online import EngineModel
from conserve.errors import ConserveError, EndpointUnusable
from conserve.hosts import bearer, split_login
from conserve.names import OFF, ON
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.profile import MODELS
from conserve.regime_change import RegimeChange
from conserve.server_report import PATH, UNREADABLE, SchedulerReport, ServerReport, read

LOOKS = 5  # for a row, since there may be none between the end of one and the next
RUN_BITS = 48  # of the first seed of a comparison on a server that runs already


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounters:
    """Counts of the scheduler since its start."""

    offline_tokens: int
    offline_work: float
    offline_decodes: int
    iterations: int
    planned: int
    overruns: int
    busy_s: float  # the mean of several engines
    iterations_left: int
    tokens_redone: int
    tokens_wasted: float
    live_tokens_recomputed: int
    tokens_saved: int
    tokens_restored: int
    tokens_recomputed: int

    @classmethod
    def of(cls, said: SchedulerReport, *, engines: int = 1) -> Self:
        """Read the counts from a report of so many engines."""
        offline, preemption, checkpoint = said.offline, said.preemption, said.checkpoint
        return cls(
            offline_tokens=offline.tokens,
            offline_work=offline.work,
            offline_decodes=offline.decode_steps,
            iterations=said.iterations,
            planned=said.planned,
            overruns=said.overruns,
            busy_s=said.busy_s / engines,
            iterations_left=preemption.iterations_left,
            tokens_redone=preemption.tokens_redone,
            tokens_wasted=preemption.tokens_wasted,
            live_tokens_recomputed=preemption.live_tokens_recomputed,
            tokens_saved=checkpoint.tokens_saved,
            tokens_restored=checkpoint.tokens_restored,
            tokens_recomputed=checkpoint.tokens_recomputed,
        )

    def since(self, first: Self) -> dict[str, Any]:
        """Counts after `first`, by name."""
        return {of.name: getattr(self, of.name) - getattr(first, of.name) for of in fields(self)}


class Deployment:
    """A server that was started with `--allow-control`."""

    def __init__(
        self, url: str, *, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        shown, login = split_login(url)
        self._client = httpx.AsyncClient(
            base_url=shown,
            headers=bearer(api_key),
            auth=login,
            timeout=60.0,
            trust_env=False,
            transport=transport,
        )
        self.terms: dict[str, Mapping[str, float]] = {}  # of HyGen's policies, by name

    async def follow(
        self, name: str, slo: LatencyLimits | None = None, *, preemption: str = OFF
    ) -> SchedulerCounters:
        """Switch the scheduler to this policy, with this SLO or the one it has; returns its counters.

        A policy may name its preemption (`conserve/just-enough`) or the mechanisms that it goes without
        (`conserve/-checkpoints`); otherwise `preemption` applies. KV is checkpointed for ConServe's own alone.
        Raises `EndpointUnusable` if the server cannot do what the name says.
        """
        regime = regime_of(name)
        change = wanted(regime, preemption)
        if regime.harm is None and slo is not None:
            change = replace(change, slo={"ttft_ms": slo.ttft_ms, "tbt_ms": slo.tbt_ms})
        if regime.policy in HYGENS:
            change = replace(change, hygen=dict(self.terms.get(name, {})))
        said = await self._ask("POST", json=change.document())
        found = said.scheduler.preemption
        if regime.preemption not in (None, found.policy):
            raise EndpointUnusable(
                f"{self._client.base_url} cannot run {name}: its preemption is {found.policy} ({found.why_off})"
            )
        return counters_of(said)

    async def regime(self) -> RegimeChange:
        """The change that would bring the current policy, preemption, checkpoints, batching mode and SLO back."""
        said = (await self._ask("GET")).scheduler
        return RegimeChange(
            policy=said.policy,
            slo=msgspec.to_builtins(said.slo),
            preemption=said.preemption.policy,
            checkpoint=OFF if said.checkpoint.policy == OFF else ON,
            batching=said.batching.policy,
        )

    async def why_rows_stay(self) -> str | None:
        """Reason that rows never leave this server's iterations; None if they can."""
        return (await self._ask("GET")).scheduler.preemption.why_off

    async def restore(self, regime: RegimeChange) -> None:
        """Set policy, preemption, checkpoints and SLO back."""
        await self._ask("POST", json=regime.document())

    async def counters(self) -> SchedulerCounters:
        """Current counters."""
        return counters_of(await self._ask("GET"))

    async def engine(self) -> EngineModel | None:
        """Speed of the engine by its latency model; None if this ConServe does not know the model.

        Raises `EndpointUnusable` if it has no model yet, without which its policies cannot act.
        """
        front_end, said = await self._ask("GET")
        told = said.latency_model
        if told is None:
            raise EndpointUnusable(
                f"{self._client.base_url} has not seen enough iterations for a latency model, without which no "
                "policy acts; measure one with: conserve profile --served MODEL FLAGS"
            )
        try:
            model = MODELS[told.name](told.coefficients)
        except (KeyError, ValueError):  # a newer server with another model
            return None
        return EngineModel(
            model=model,
            scale=told.scale,
            max_tokens=said.max_num_batched_tokens,
            max_requests=front_end.max_num_seqs // front_end.engines,
            engines=front_end.engines,
        )

    async def rows(self) -> int:
        """Offline rows in the engine now."""
        return (await self._ask("GET")).scheduler.offline.rows

    async def engines(self) -> int:
        """Number of data parallel engines behind the server."""
        return (await self._ask("GET")).front_end.engines

    async def hygen_model(self) -> HyGenModel | None:
        """HyGen's latency predictor on this engine; None where it has learned none."""
        coefficients = (await self._ask("GET")).scheduler.hygen.coefficients
        return None if coefficients is None else HyGenModel(coefficients)

    async def watch(self, start_at: float) -> list[tuple[float, SchedulerCounters]]:
        """Read the counters until cancelled; returns them with their times in s since `start_at`."""
        return await readings(self.counters, start_at)

    def counted(
        self,
        first: SchedulerCounters,
        last: SchedulerCounters,
        seen: Sequence[tuple[float, SchedulerCounters]],
        answers: Sequence[LoadAnswer],
        duration_s: float,
    ) -> dict[str, Any]:
        """Counts of a block, by the names of `Block`."""
        series = tuple((at, counts.offline_tokens - first.offline_tokens) for at, counts in seen)
        return {**last.since(first), "offline_series": series}

    async def model(self) -> str:
        """Name of the served model."""
        return await served_model(self._client, starts="conserve serve")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, method: str, **content: Any) -> ServerReport:
        try:
            answer = await self._client.request(method, PATH, **content)
        except httpx.HTTPError as error:
            raise EndpointUnusable(
                f"{self._client.base_url} went away or is not there ({error!r}); see its log, or its address"
            ) from error
        if answer.status_code == httpx.codes.OK:
            try:
                return read(answer.content)
            except UNREADABLE as error:
                raise EndpointUnusable(
                    f"{answer.url} is no report that this ConServe reads ({error}); update it, or the server"
                ) from error
        hint = (
            "; start the server with: conserve serve MODEL --allow-control, "
            "and set CONSERVE_HARVEST_KEY here and there if it has an API key"
        )
        why = f"{answer.url} answered {answer.status_code}: {answer.text[:200]}"
        raise EndpointUnusable(why + (hint if answer.status_code in (403, 404) else ""))


def counters_of(said: ServerReport) -> SchedulerCounters:
    """Counters of all engines of a server."""
    return SchedulerCounters.of(said.scheduler, engines=said.front_end.engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneServer:
    """The field of a comparison on one server, which has its turn all the time.

    The server may still hold the prompts of an earlier comparison, so seeds begin at random.
    """

    deployment: Deployment
    target: LoadTarget
    preemption: str  # of policies that do not name theirs
    # Seeds of blocks' prompts.
    seeds: Iterator[int] = field(default_factory=lambda: count(secrets.randbits(RUN_BITS)))

    async def turn(self, policy: str, slo: LatencyLimits | None) -> Turn:
        """Switch the server to this policy."""
        await self.deployment.follow(policy, slo, preemption=self.preemption)
        return Turn(self.deployment, self.target, next(self.seeds))

    async def played(self, policy: str) -> None:
        """Raise `ConserveError` if the server has no row of the user's queue any more, or never had one."""
        if not runs_offline(policy):
            return
        with suppress(EndpointUnusable):  # the next turn tells of a server that went away
            for _ in range(LOOKS):
                if await self.deployment.rows():
                    return
                await asyncio.sleep(LOOK_S)
            raise ConserveError(
                f"the server has no offline row at the end of a block of {policy}, which is dropped; queue rows "
                "for the whole comparison with conserve submit, and see whether a harvester runs: conserve status"
            )
