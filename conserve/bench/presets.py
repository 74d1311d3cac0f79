"""Sizes of a comparison that suit a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from conserve.bench.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Scaling of a trace and a deployment to a machine."""

    engine_flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    engine_cores: tuple[int, ...] = ()  # cores of the worker that computes
    other_cores: tuple[int, ...] = ()  # cores of all other processes
    rounds: int = 5
    block_s: float = 120.0
    rate: float | None = None  # requests per second that a trace is thinned to
    busy: float | None = None  # share of the time: with it, `sizing` sets rate and lengths by the machine
    input_factor: float = 1.0
    output_factor: float = 1.0
    longest: int = 1 << 20  # tokens of a prompt with its answer
    longest_output: int = 1 << 16
    offline_factor: float = 1.0
    offline_longest: int = 1 << 15
    offline_rows: int = 20_000
    offline_lengths: tuple[int, int] | None = None  # tokens of prompt and answer, instead of those of papers
    offline_window: int | None = None
    resident: bool = False  # the servers of a comparison stay in memory while another one has its turn

    def arrivals(self, trace: Trace, seed: int) -> Trace:
        """Compress the whole trace into a block of `block_s`, thin it and shorten its requests."""
        speed = trace.duration_s / self.block_s
        if self.rate is not None:  # first, since the other steps take time in proportion to the arrivals
            trace = trace.thinned(min(1.0, self.rate / (trace.rate * speed)), seed)
        return trace.scaled(speed).shortened(
            self.input_factor,
            self.output_factor,
            max_input=max(1, self.longest - self.longest_output),
            max_output=self.longest_output,
        )

    def times(self, lengths: float) -> Self:
        """Preset with live prompts and answers `lengths` times as long."""
        longest_output = max(1, round(self.longest_output * lengths))
        return replace(
            self,
            input_factor=self.input_factor * lengths,
            output_factor=self.output_factor * lengths,
            longest=longest_output + max(1, round((self.longest - self.longest_output) * lengths)),
            longest_output=longest_output,
        )


FULL = Preset()
# Two cores: the worker computes on one, everything else shares the other. The trace's ten minutes become 25 s
# with the bursts they had. Iterations have as many tokens and sequences as vLLM's server on a CPU gives them by
# default. The rate is for servers without a latency model: on the machine of docs/benchmarks
# online-only keeps the engine busy for 23 to 36 % of the time with it.
CPU = Preset(
    engine_flags=(
        *("--max-num-batched-tokens", "2048", "--max-model-len", "2048", "--max-num-seqs", "128"),
        *("--block-size", "64", "--kv-cache-memory-bytes", str(1 << 30)),
    ),
    environment={"VLLM_CPU_OMP_THREADS_BIND": "0"},
    engine_cores=(0,),
    other_cores=(1,),
    rounds=2,  # four policies take under ten minutes: answers of slow ones end a minute after the last arrival
    block_s=25.0,
    rate=0.8,
    busy=0.52,
    input_factor=0.125,
    output_factor=0.75,
    longest=1024,
    longest_output=48,
    offline_factor=0.125,
    offline_longest=1024,
    offline_rows=4000,
    offline_window=160,
    resident=True,  # 3 GB a server with the demo model
)
PRESETS = {"cpu": CPU, "full": FULL}
