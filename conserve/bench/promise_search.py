"""HyGen's profiler for our own policy: the promise that harvests most while test runs keep what may be harmed.

The policy has few parameters, which are what it promises: the share by which offline tokens lengthen an iteration
(`harm`), or SLOs of TTFT and TBT, here so many times online-only's P99s. Each is searched apart with test runs on a
simulated engine, by hygen section 4.2, and the one with the larger harvest is taken.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from conserve.bench.beside import rows_beside
from conserve.bench.bound import Mix
from conserve.bench.measure import Block
from conserve.bench.names import HARM, promise_entries, promise_flags
from conserve.bench.simulated import Simulator
from conserve.bench.slo_search import Promise, RunLatencies, excess, search
from conserve.bench.traces import Trace
from conserve.errors import InputError
from conserve.names import CONSERVE, ONLINE_ONLY

HARMS = (0.01, 1.0)  # share of an iteration
SCALES = (0.25, 4.0)  # times online-only's P99s


class Parameter(NamedTuple):
    """One parameter of the policy, and the promises that it stands for."""

    name: str
    low: float
    high: float
    promises: Callable[[float], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedValue:
    """A value of a parameter, and what its test run gave."""

    parameter: Parameter
    value: float
    excess: float  # largest ratio of what may be harmed to its limit
    rows_per_s: float  # of the search's mean row, as are those of an engine
    prompt_tokens_per_s: float
    decode_tokens_per_s: float

    @property
    def promises(self) -> Mapping[str, float]:
        """`harm`, or `ttft_ms` and `tbt_ms`."""
        return self.parameter.promises(self.value)

    @property
    def kept(self) -> bool:
        """True if live requests kept what may be harmed."""
        return self.excess <= 1


@dataclass(slots=True, kw_only=True)
class Tuning:
    """Test runs of a model's policy beside recorded live requests."""

    simulator: Simulator
    blocks: Sequence[Trace]
    promised: Sequence[Promise]
    mix: Mix
    say: Callable[[str], None]
    alone: RunLatencies = field(init=False)
    runs: list[TriedValue] = field(default_factory=list)

    def __post_init__(self) -> None:
        played = self.simulator.play(ONLINE_ONLY, self.blocks)
        self.alone = latencies(played)
        if not len(self.alone.ttft_ms):
            raise InputError("the trace has no request that is answered; name another with --trace")

    def parameters(self) -> list[Parameter]:
        """Parameters that are searched."""
        ttft_ms, tbt_ms = (self.alone.of(Promise("p99", metric, 0.0)) or 1.0 for metric in ("ttft", "tbt"))
        return [
            Parameter(HARM, *HARMS, lambda share: {"harm": max(1, round(100 * share)) / 100}),
            Parameter(
                "SLO",
                *SCALES,
                lambda scale: {
                    "ttft_ms": float(ceil(scale * ttft_ms)),
                    "tbt_ms": ceil(10 * scale * tbt_ms) / 10,
                },
            ),
        ]

    async def best(self) -> TriedValue:
        """The candidate with the largest harvest of those that keep what may be harmed.

        Without one, the candidate that exceeds it least.
        """
        for parameter in self.parameters():
            await search(parameter.low, parameter.high, self.test_run(parameter), self.alone, self.promised)
        kept = [run for run in self.runs if run.kept]
        if kept:
            return max(kept, key=lambda run: run.rows_per_s)
        return min(self.runs, key=lambda run: run.excess)

    def test_run(self, parameter: Parameter) -> Callable[[float], Awaitable[RunLatencies]]:
        """Plays the live requests with this value of the parameter, and notes the harvest."""

        async def run(value: float) -> RunLatencies:
            promises = promise_entries(parameter.promises(value))
            blocks = self.simulator.play(CONSERVE, self.blocks, promises=promises)
            self.runs.append(self.tried(parameter, value, blocks, self.alone))
            self.say(sentence(self.runs[-1]))
            return latencies(blocks)

        return run

    async def measure(self, reduced: TriedValue) -> TriedValue:
        """The candidate with this value of its parameter, and the harvest of a test run of its own."""
        await self.test_run(reduced.parameter)(reduced.value)
        return self.runs[-1]

    def tried(
        self, parameter: Parameter, value: float, blocks: Sequence[Block], alone: RunLatencies
    ) -> TriedValue:
        """Outcome of these blocks, on the simulated engine or on the real one, beside latencies `alone` there."""
        rows, prompts, steps = rows_beside(blocks, self.simulator.machine.engine, self.mix)
        return TriedValue(
            parameter=parameter,
            value=value,
            excess=excess(latencies(blocks), alone, self.promised),
            rows_per_s=rows,
            prompt_tokens_per_s=prompts,
            decode_tokens_per_s=steps,
        )


def latencies(blocks: Sequence[Block]) -> RunLatencies:
    """TTFTs and TBTs of all blocks."""
    return RunLatencies.heard([answer for block in blocks for answer in block.answers])


def sentence(run: TriedValue) -> str:
    """Line of progress on a test run."""
    kept = "kept" if run.kept else f"exceeded by {run.excess - 1:.0%}"
    return f"{promise_flags(run.promises)}: {kept}, {run.rows_per_s:.2f} rows/s"
