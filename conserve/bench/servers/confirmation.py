"""Confirmation of a tuned promise on the engine itself: blocks with it beside blocks of live requests alone."""

from dataclasses import replace
from itertools import cycle, islice
from math import inf
from pathlib import Path

from conserve.bench.attainment import LatencyLimits
from conserve.bench.compare import Design
from conserve.bench.measure import Block
from conserve.bench.names import HARM, ONLINE_ONLY_PLANNED, promise_flags
from conserve.bench.playing import Measurement, PlayWishes, Say, measure
from conserve.bench.presets import Preset
from conserve.bench.promise_search import TriedValue, Tuning, latencies
from conserve.bench.servers.servers import Servers
from conserve.bench.servers.sweep import MakePlan
from conserve.bench.sizing import Offered
from conserve.bench.traces import together
from conserve.errors import ConserveError
from conserve.names import CONSERVE, PROMPT

SMALLER = 0.7  # factor on a value that the engine did not keep
TRIES = 4
FAILED = "live requests beside rows failed, or were not answered in time"


def promising_less(found: TriedValue) -> TriedValue | None:
    """The next smaller value whose promises are others, since promises are rounded; None if there is none."""
    less = found
    while less.value > found.parameter.low:
        less = replace(less, value=max(found.parameter.low, SMALLER * less.value))
        if less.promises != found.promises:
            return less
    return None


class Confirmation:
    """Blocks on a server of its own."""

    def __init__(
        self,
        made: MakePlan,
        preset: Preset,
        tuning: Tuning,
        folder: Path,
        *,
        rounds: int,
        seed: int,
        say: Say,
    ) -> None:
        """`made` gives the servers of these policies, with this preset and a store at this place."""
        self._made, self._tuning, self._folder, self._say = made, tuning, folder, say
        self._preset = replace(preset, block_s=tuning.simulator.block_s)
        self._rounds, self._seed = rounds, seed
        self.outcome: TriedValue

    async def run(self, found: TriedValue) -> None:
        """Try the value, and ones that promise less while they do not keep what may be harmed.

        `outcome` then is the last one, with what the engine gave.
        """
        plan = self._made([CONSERVE], self._preset, self._folder / "store")
        servers = Servers(plan, self._design(found))
        try:
            await servers.start()
            for _ in range(TRIES):
                tried = await self._tried(servers, found)
                self.outcome = tried
                if tried.kept:
                    return
                over = (
                    f"it exceeds what may be harmed by {tried.excess - 1:.0%}"
                    if tried.excess < inf
                    else FAILED
                )
                less = promising_less(found)
                self._say(
                    f"on the engine {over}; {'trying less' if less else 'nothing less can be promised'}"
                )
                if less is None:
                    return
                found = less
        finally:
            await servers.close()

    async def _tried(self, servers: Servers, found: TriedValue) -> TriedValue:
        """The value with the engine's harvest and latencies, these beside blocks of live requests alone.

        A round has a block of the search for each engine of the server, from the busiest on.
        """
        self._say(f"confirming {promise_flags(found.promises)} on the engine")
        blocks, engines = self._tuning.blocks, await servers.deployment.engines()
        busiest = cycle(blocks[::-1])
        rounds = [together([*islice(busiest, engines)]) for _ in range(self._rounds)]
        offered = Offered(
            name="",
            source=lambda preset, rate: rounds.__getitem__,
            flags=lambda rate: "",
            rate=sum(map(len, rounds)) / len(rounds) / self._preset.block_s,
        )
        measurement = Measurement(offered=offered)
        wishes = PlayWishes(overload=True, say=self._say)
        design = self._design(found)
        await measure(servers.deployment, servers.prepare, self._preset, design, measurement, wishes)

        def of(policy: str) -> list[Block]:
            return [replace(one, engines=engines) for one in measurement.blocks if one.policy == policy]

        alone, beside = latencies(of(ONLINE_ONLY_PLANNED)).as_reference(), of(design.policies[1])
        if not any(block.offline_tokens for block in beside):
            raise ConserveError(
                "no token of a row was computed beside the live requests, so nothing is confirmed; "
                "give longer blocks (--block-s) or a lower --rate"
            )
        return self._tuning.tried(found.parameter, found.value, beside, alone)

    def _design(self, found: TriedValue) -> Design:
        promises = found.promises
        harm = promises.get("harm")
        slo = None if harm is not None else LatencyLimits(promises["ttft_ms"], promises["tbt_ms"])
        name = CONSERVE if harm is None else f"{CONSERVE}/{HARM}-{round(100 * harm)}"
        return Design(
            policies=[ONLINE_ONLY_PLANNED, name],
            rounds=self._rounds,
            block_s=self._preset.block_s,
            slo=slo,
            seed=self._seed,
            preemption=PROMPT,
            load_cores=self._preset.other_cores,
        )
