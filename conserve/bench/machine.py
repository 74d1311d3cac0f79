"""Engines to simulate: the speed and the sizes of one, by a latency profile or by the CPU preset. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from conserve.bench.bound import Mix
from conserve.bench.offline import like_papers
from conserve.bench.presets import CPU
from conserve.bench.simulate_online import EngineModel
from conserve.errors import ProfileMissing
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import Correction
from conserve.profiles.model import LinearModel
from conserve.profiles.points import IterationLimits
from conserve.profiles.profile import Profile

# As `conserve profile` measured the demo model with the flags of the CPU preset and its worker on one core, in an
# hour in which the machine was about half as fast as in those of the comparisons in docs/benchmarks.
DEMO = (1.404, 3.811e-4, 8.629e-4, 4.952e-3, 0.2298, 2.274, 0.0, 30.07)
FASTER = 2.2
DEMO_LAYERS, DEMO_KV_BYTES = 30, 2 * 30 * 3 * 64 * 2  # a token's: 30 layers, 3 heads of 64, bf16
LAYERS = 32  # of a model whose profile does not say
SMALL = 2048  # tokens of an iteration and of a context on which lengths are the usual ones
# As vLLM serves an 8B model on an H100, for profiles that tell no sizes.
USUAL = IterationLimits(tokens=8192, requests=256, context=32768, kv_tokens=457_728, block_tokens=64)
ROWS = 1 << 16  # different rows
MIXED = 1000  # rows in a mean
HOST_BYTES = 4 << 30  # of host memory for copies of KV, as `conserve serve` takes by default
COPY_BYTES_PER_MS = 6.7e6  # as KV is copied beside computing on two cores (docs/benchmarks/memory.md)
USUAL_COPY_MS = 0.2  # of a block, for profiles that tell no copies: 8 MB over PCIe


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMachine:
    """An engine, and lengths of requests and rows that suit it."""

    name: str
    model: LinearModel
    layers: int
    flags: Mapping[str, int]  # of vLLM, by the names of its arguments
    num_blocks: int  # of KV
    host_blocks: int  # of KV in host memory, for checkpoints
    copy_ms: float  # of copying a block to host memory, or back

    @property
    def digest(self) -> str:
        """Digest of all that its times depend on; a term that the model got later is none of it where it is 0."""
        model = self.model
        costs = {name: ms for name, ms in model.coefficients.items() if ms or name not in model.added}
        sizes = (self.layers, dict(self.flags), self.num_blocks, self.host_blocks, self.copy_ms)
        said = json.dumps([model.name, costs, sizes], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @classmethod
    def demo(cls) -> Self:
        """The demo model under the CPU preset."""
        given = dict(zip(CPU.engine_flags[::2], CPU.engine_flags[1::2], strict=True))
        flags = {flag.removeprefix("--").replace("-", "_"): int(value) for flag, value in given.items()}
        kv_bytes = flags.pop("kv_cache_memory_bytes")
        block_bytes = flags["block_size"] * DEMO_KV_BYTES
        return cls(
            name="the demo model on one core",
            model=ConServeModel.of(*(ms / FASTER for ms in DEMO)),
            layers=DEMO_LAYERS,
            flags=flags,
            num_blocks=kv_bytes // block_bytes,
            host_blocks=HOST_BYTES // block_bytes,
            copy_ms=block_bytes / COPY_BYTES_PER_MS,
        )

    @classmethod
    def of(cls, profile: Profile, learned: Correction | None = None) -> Self:
        """The engine that was profiled; raises `ProfileMissing` if the profile has no model.

        `learned` is what engines have learned of it since.
        """
        if not profile.models:
            raise ProfileMissing(f"the profile {profile.name} has no model; run: conserve profile MODEL")
        limits = profile.limits or USUAL
        copies = max(profile.kv_copies, key=lambda one: one.blocks, default=None)
        return cls(
            name=profile.name,
            model=profile.model() if learned is None else learned.applied_to(profile.model()),
            layers=profile.safepoint.per_iteration if profile.safepoint else LAYERS,
            flags={
                "max_num_batched_tokens": limits.tokens,
                "max_model_len": limits.context,
                "max_num_seqs": limits.requests,
                "block_size": limits.block_tokens,
            },
            num_blocks=limits.kv_tokens // limits.block_tokens,
            host_blocks=HOST_BYTES * copies.blocks // copies.bytes
            if copies
            else limits.kv_tokens // limits.block_tokens,
            copy_ms=(copies.to_host_ms + copies.to_device_ms) / 2 / copies.blocks
            if copies
            else USUAL_COPY_MS,
        )

    @property
    def engine(self) -> EngineModel:
        """The engine for forecasts."""
        return EngineModel(
            model=self.model,
            max_tokens=self.flags["max_num_batched_tokens"],
            max_requests=self.flags["max_num_seqs"],
        )

    def limited(self, tokens: int) -> Self:
        """The engine with so many tokens in an iteration at most."""
        return replace(self, flags={**self.flags, "max_num_batched_tokens": tokens})

    @property
    def times(self) -> float:
        """Factor on the usual lengths of live requests."""
        return max(1.0, min(self.flags["max_num_batched_tokens"], self.flags["max_model_len"]) / SMALL)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV memory holds."""
        return self.num_blocks * self.flags["block_size"]

    @property
    def window(self) -> int:
        """Rows in the engine, waiting ones included."""
        return self.flags["max_num_seqs"] * 5 // 4

    def mix(self, *, seed: int) -> Mix:
        """The mean offline row."""
        return Mix.of(self.rows(MIXED, seed=seed), self.engine)

    def rows(self, count: int = ROWS, *, seed: int) -> list[tuple[int, int]]:
        """Prompt and answer tokens of offline rows."""
        context = self.flags["max_model_len"]
        factor = min(1.0, context * CPU.offline_factor / SMALL)
        return list(like_papers(count, factor=factor, most=context // 2, seed=seed))
