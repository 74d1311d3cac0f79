"""A co-serving server under test: its policy is switched, its counters are read."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, Self

import httpx

from conserve.bench.answers import LoadAnswer
from conserve.bench.attainment import LatencyLimits
from conserve.bench.field import LOOK_S, Turn, readings
from conserve.bench.load import LoadTarget
from conserve.bench.names import HYGENS, regime_of, runs_offline, wanted
from conserve.bench.served import served_model
from conserve.bench.simulate_online import EngineModel
from conserve.errors import ConserveError, EndpointUnusable
from conserve.hosts import REPORT, bearer, split_login
from conserve.names import OFF
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.profile import MODELS

LOOKS = 5  # for a row, since there may be none between the end of one and the next
RUN_BITS = 48  # of the first seed of a comparison on a server that runs already
FEATURES = ("preemption", "checkpoint", "batching")  # parts of a server's report that say what it can do


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounters:
    """Counts of the scheduler since its start."""

    offline_tokens: int
    offline_work: float = 0.0
    offline_decodes: int = 0
    iterations: int
    planned: int
    overruns: int
    busy_s: float  # the mean of several engines
    iterations_left: int = 0
    tokens_redone: int = 0
    tokens_wasted: float = 0.0
    live_tokens_recomputed: int = 0
    tokens_saved: int = 0
    tokens_restored: int = 0
    tokens_recomputed: int = 0

    @classmethod
    def of(cls, said: dict[str, Any]) -> Self:
        """Read the counts from an answer of `GET /v1/conserve`."""
        preemption, checkpoint = said.get("preemption", {}), said.get("checkpoint", {})
        return cls(
            offline_tokens=said["offline"]["tokens"],
            offline_work=said["offline"].get("work", 0.0),
            offline_decodes=said["offline"].get("decode_steps", 0),
            iterations=said["iterations"],
            planned=said["planned"],
            overruns=said["overruns"],
            busy_s=said["busy_s"] / number_of_engines(said),
            iterations_left=preemption.get("iterations_left", preemption.get("preemptions", 0)),
            tokens_redone=preemption.get("tokens_redone", 0),
            tokens_wasted=preemption.get("tokens_wasted", 0.0),
            live_tokens_recomputed=preemption.get("live_tokens_recomputed", 0),
            tokens_saved=checkpoint.get("tokens_saved", 0),
            tokens_restored=checkpoint.get("tokens_restored", 0),
            tokens_recomputed=checkpoint.get("tokens_recomputed", 0),
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
        self._can: frozenset[str] | None = None  # of `FEATURES`; None if not asked yet
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
        if self._can is None:
            await self.regime()
        can = self._can or frozenset()
        body = wanted(regime, preemption, *(feature in can for feature in FEATURES))
        if regime.harm is not None:
            body["slo"] = {"harm": regime.harm}
        elif slo is not None:
            body["slo"] = {"ttft_ms": slo.ttft_ms, "tbt_ms": slo.tbt_ms}
        if regime.policy in HYGENS:
            body["hygen"] = dict(self.terms.get(name, {}))
        said = await self._ask("POST", json=body)
        section = said.get("preemption", {"policy": OFF, "why_off": "it is too old"})
        if regime.preemption not in (None, section["policy"]):
            raise EndpointUnusable(
                f"{self._client.base_url} cannot run {name}: its preemption is {section['policy']} "
                f"({section['why_off']})"
            )
        return SchedulerCounters.of(said)

    async def regime(self) -> dict[str, Any]:
        """Current policy, preemption, checkpoints and SLO."""
        said = await self._ask("GET")
        self._can = frozenset(feature for feature in FEATURES if feature in said)
        found = {"policy": said["policy"], "slo": said["slo"]}
        if "preemption" in said:
            found["preemption"] = said["preemption"]["policy"]
        if "checkpoint" in said:
            found["checkpoint"] = OFF if said["checkpoint"]["policy"] == OFF else "on"
        if "batching" in said:
            found["batching"] = said["batching"]["policy"]
        return found

    async def require(self, policies: Sequence[str]) -> None:
        """Raise `EndpointUnusable` if one of these goes without a mechanism that the server has no switch for."""
        await self.regime()
        lacking = [name for name in policies if not regime_of(name).full_batches]
        if lacking and "batching" not in (self._can or ()):
            raise EndpointUnusable(
                f"{self._client.base_url} cannot run {lacking[0]}: it has no batching mode to turn off"
            )

    async def why_rows_stay(self) -> str | None:
        """Reason that rows never leave this server's iterations; None if they can."""
        section = (await self._ask("GET")).get("preemption", {"why_off": "the server is too old"})
        return str(section["why_off"]) if section["why_off"] else None

    async def restore(self, regime: dict[str, Any]) -> None:
        """Set policy, preemption, checkpoints and SLO back."""
        await self._ask("POST", json=regime)

    async def counters(self) -> SchedulerCounters:
        """Current counters."""
        return SchedulerCounters.of(await self._ask("GET"))

    async def engine(self) -> EngineModel | None:
        """Speed of the engine by its latency model; None if the server does not tell.

        Raises `EndpointUnusable` if it has no model yet, without which its policies cannot act.
        """
        said = await self._ask("GET")
        if said.get("latency_model", said) is None:
            raise EndpointUnusable(
                f"{self._client.base_url} has not seen enough iterations for a latency model, without which no "
                "policy acts; measure one with: conserve profile --served MODEL FLAGS"
            )
        try:
            told = said["latency_model"]
            return EngineModel(
                model=MODELS[told["name"]](told["coefficients"]),
                scale=float(told["scale"]),
                max_tokens=int(said["max_num_batched_tokens"]),
                max_requests=int(said["max_num_seqs"]) // number_of_engines(said),
                engines=number_of_engines(said),
            )
        except (KeyError, TypeError, ValueError):  # an older server, or a newer one with another model
            return None

    async def rows(self) -> int | None:
        """Offline rows in the engine now; None if the server, an older one, does not tell."""
        rows = (await self._ask("GET"))["offline"].get("rows")
        return None if rows is None else int(rows)

    async def engines(self) -> int:
        """Number of data parallel engines behind the server."""
        return number_of_engines(await self._ask("GET"))

    async def hygen_model(self) -> HyGenModel | None:
        """HyGen's latency predictor on this engine; None if the server does not tell it."""
        try:
            return HyGenModel((await self._ask("GET"))["hygen"]["coefficients"])
        except (KeyError, TypeError, ValueError):  # an older server, or one that has learned none
            return None

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

    async def _ask(self, method: str, **content: Any) -> dict[str, Any]:
        try:
            answer = await self._client.request(method, REPORT, **content)
        except httpx.HTTPError as error:
            raise EndpointUnusable(
                f"{self._client.base_url} went away or is not there ({error!r}); see its log, or its address"
            ) from error
        if answer.status_code == httpx.codes.OK:
            said: dict[str, Any] = answer.json()
            return said
        hint = (
            "; start the server with: conserve serve MODEL --allow-control, "
            "and set CONSERVE_HARVEST_KEY here and there if it has an API key"
        )
        why = f"{answer.url} answered {answer.status_code}: {answer.text[:200]}"
        raise EndpointUnusable(why + (hint if answer.status_code in (403, 404) else ""))


def number_of_engines(said: Mapping[str, Any]) -> int:
    """Number of data parallel engines in an answer of `GET /v1/conserve`; an older server does not tell."""
    return int(said.get("engines", 1))


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
                if await self.deployment.rows() != 0:
                    return
                await asyncio.sleep(LOOK_S)
            raise ConserveError(
                f"the server has no offline row at the end of a block of {policy}, which is dropped; queue rows "
                "for the whole comparison with conserve submit, and see whether a harvester runs: conserve status"
            )
