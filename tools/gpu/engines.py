"""Engines to measure, and how much of everything."""

from collections.abc import Mapping
from dataclasses import dataclass, field

V2 = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Flags of `conserve serve` and environment of one engine."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False  # a stock server of the same model shares the GPU


KINDS: Mapping[str, Kind] = {
    "default": Kind(),  # vLLM's own choice: on a GPU CUDA graphs and the V2 runner
    "shared": Kind(beside=True),
    "eager-v1": Kind(flags=("--enforce-eager",), environment={V2: "0"}),
    "eager-v2": Kind(flags=("--enforce-eager",), environment={V2: "1"}),
    "sync": Kind(flags=("--no-async-scheduling",)),  # as `default`, without scheduling ahead
    "plain": Kind(
        flags=("--no-preemption", "--no-async-scheduling")
    ),  # the same without safepoints in the model
    "saving": Kind(
        flags=("--kv-checkpoint", "eager")
    ),  # adaptive checkpoints save nothing while memory is ample
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amounts of a measurement; lengths are in tokens."""

    model: str = "llama-8b"
    flags: tuple[str, ...] = ("--load-format", "dummy", "--max-model-len", "8192")
    shared: tuple[str, ...] = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(72 << 30))
    stock: tuple[str, ...] = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(16 << 30))
    host_bytes: int = 16 << 30  # for rows' KV, or a quarter of the machine's memory if that is less
    rows: int = 8000  # enough for all steps of one server
    row_prompt: tuple[int, int] = (1200, 3900)  # shortest and longest, about those of `conserve bench`
    row_answer: tuple[int, int] = (64, 128)
    live: tuple[int, int] = (4096, 64)  # prompt and answer of a live request
    short: tuple[int, int] = (256, 8)  # and of one that only has to arrive
    arrivals: int = 100
    window_s: float = 12.0  # of one reading of the rows' throughput
    turns: int = 3  # readings of each setting, in turn
    rates: tuple[float, ...] = (1.0, 2.0)  # live requests per second of the benchmark
    lengths: str = "4096,256"  # as in Figure 6 of the 2026 paper
    block_s: int = 40
    batch: tuple[int, int, int] = (64, 1024, 128)  # requests, prompt and answer of the first step
    profile_s: int = 120
    copy_bytes: int = 1 << 30
    matrix: int = 8192  # side of the products beside copies
    patience: float = 1.0  # times the limit of each step
    rehearsal: bool = False

    def engine_flags(self, kind: str) -> list[str]:
        """Flags of the plug-in's server."""
        chosen = KINDS[kind]
        return [*self.flags, *(self.shared if chosen.beside else ()), *chosen.flags]

    def environment(self, kind: str) -> dict[str, str]:
        """Environment of an engine. A CPU has no V2 runner, whose kernels need Triton."""
        chosen = KINDS[kind].environment
        return {name: value for name, value in chosen.items() if not (self.rehearsal and name == V2)}


FULL = Size()
SMALL = Size(
    model="tiny",
    flags=("--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16",
           "--kv-cache-memory-bytes", "100000000", "--gpu-memory-utilization", "0.1"),
    shared=(), stock=(),
    host_bytes=256 << 20, rows=6000, row_prompt=(50, 400), row_answer=(16, 64), live=(256, 16), short=(64, 4),
    arrivals=12, window_s=2.0, turns=1, rates=(2.0,), lengths="256,16", block_s=4, batch=(4, 64, 8), profile_s=20,
    copy_bytes=32 << 20, matrix=512, patience=4.0, rehearsal=True,
)  # fmt: skip
