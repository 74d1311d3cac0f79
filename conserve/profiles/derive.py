"""Profiles of the papers' machines, derived from published numbers: for simulation, never for serving.

`python -m conserve.profiles.derive` writes them to `derived/`. A roofline gives the terms that memory bounds
(weights once per iteration, KV once per token); published iteration times give the other terms.
"""

from dataclasses import dataclass

from conserve.profiles import profile as profiles
from conserve.profiles.book import DERIVED
from conserve.profiles.conserve import ConServeModel, PaperModel
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.profile import FittedModel, KVCopy, Profile, ProfileKey, Safepoint

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnDevices:
    """A model on its devices, with numbers from public data sheets and model cards."""

    model: str
    device: str
    degree: int  # of tensor parallelism
    parameters: float
    kv_bytes: int  # per token, all layers: 2 * layers * KV heads * head size * 2 bytes
    attention_flops: float  # per pair of tokens: 4 * layers * heads * head size
    hbm_bytes_s: float  # of one device
    link_bytes_s: float  # to the host, of one device: the paper's measurement, or the bus's bandwidth
    dtype: str = "float16"

    @property
    def weights_ms(self) -> float:
        """k5: every iteration reads the weights once."""
        return 2 * self.parameters / self.degree / self.hbm_bytes_s * 1e3

    @property
    def memory_ms(self) -> float:
        """k4: the keys and values of every token of p + c are read or written once."""
        return self.kv_bytes / self.degree / self.hbm_bytes_s * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Coefficients of the paper's form, in ms: k1 + k3, k2, k4, k5."""

    compute: float
    attention: float
    memory: float
    constant: float


def from_two_chunks(
    machine: ModelOnDevices, tokens: int, fresh_ms: float, context: int, late_ms: float
) -> Coefficients:
    """Derive k2 from the time that `context` adds to a chunk of `tokens`, and k1 + k3 from the fresh chunk."""
    attention = (late_ms - fresh_ms - machine.memory_ms * context) / (tokens * context)
    return from_one_chunk(machine, tokens, 0, fresh_ms, attention)


def from_one_chunk(
    machine: ModelOnDevices, tokens: int, context: int, ms: float, attention: float
) -> Coefficients:
    """Derive k1 + k3 from the time of one batch; the other coefficients are known."""
    rest = ms - machine.weights_ms - machine.memory_ms * (tokens + context)
    return Coefficients(
        compute=(rest - attention * tokens * (tokens + context)) / tokens,
        attention=attention,
        memory=machine.memory_ms,
        constant=machine.weights_ms,
    )


H100_8B = ModelOnDevices(
    model="llama-3.1-8b",
    device="NVIDIA H100 SXM 80 GB",
    degree=1,
    parameters=8.03e9,
    kv_bytes=2 * 32 * 8 * 128 * 2,
    attention_flops=4 * 32 * 32 * 128,
    hbm_bytes_s=3.35e12,
    link_bytes_s=37e9,
)
H100_70B = ModelOnDevices(
    model="llama-3.1-70b",
    device="4 x NVIDIA H100 SXM 80 GB",
    degree=4,
    parameters=70.6e9,
    kv_bytes=2 * 80 * 8 * 128 * 2,
    attention_flops=4 * 80 * 64 * 128,
    hbm_bytes_s=3.35e12,
    link_bytes_s=132e9 / 4,
)
A100_7B = ModelOnDevices(
    model="llama-2-7b",
    device="NVIDIA A100 SXM 40 GB",
    degree=1,
    parameters=6.74e9,
    kv_bytes=2 * 32 * 32 * 128 * 2,
    attention_flops=4 * 32 * 32 * 128,
    hbm_bytes_s=1.555e12,
    link_bytes_s=25e9,
)


def llama_8b_h100() -> Profile:
    """Llama 3.1 8B on one H100, from two published chunk times."""
    k = from_two_chunks(H100_8B, 2048, 51.0, 40_960, 124.0)
    return published_profile(
        "llama-3.1-8b-h100",
        H100_8B,
        k,
        safepoint_us=10.0,
        derivation=[
            "published (conserve-2026 section 4.2): a chunk of 2,048 tokens takes 51 ms fresh and 124 ms at a "
            "context of 40K, read as 40,960 tokens",
            *roofline(H100_8B, k),
            f"k2 = (124 - 51 - k4 * 40,960) / (2,048 * 40,960) = {k.attention:.4g} ms",
            f"k1 + k3 = (51 - k5 - k4 * 2,048 - k2 * 2,048^2) / 2,048 = {k.compute:.4g} ms a token",
            "copies: 37 GB/s and 0.5 ms to gather (section 6.5); safepoint: its upper bound of 10 us",
        ],
    )


def h100_attention_flops_s() -> float:
    """Attention speed of an H100 in FLOP/s, implied by the 8B model's k2."""
    k2_ms = llama_8b_h100().models[PaperModel.name].coefficients["attention"]
    return H100_8B.attention_flops / (k2_ms / 1e3)


def llama_70b_h100() -> Profile:
    """Llama 3.1 70B on four H100, from one published mean and an assumed batch."""
    flops_s = h100_attention_flops_s()
    attention = H100_70B.attention_flops / H100_70B.degree / flops_s * 1e3
    k = from_one_chunk(H100_70B, 2048, 2048, 262.0, attention)
    return published_profile(
        "llama-3.1-70b-4xh100",
        H100_70B,
        k,
        safepoint_us=167.2,
        derivation=[
            "published (conserve-2026 section 6.5): a mean iteration of 262 ms; the batch is not, and is taken "
            "to be one chunk of 2,048 tokens after 2,048 others",
            *roofline(H100_70B, k),
            f"k2: attention at the {flops_s / 1e12:.0f} TFLOP/s that the 8B figures imply, on each of four "
            f"devices: {k.attention:.4g} ms",
            f"k1 + k3 = (262 - k5 - k4 * 4,096 - k2 * 2,048 * 4,096) / 2,048 = {k.compute:.4g} ms a token",
            "copies: 132 GB/s over four workers; safepoint: 167.2 us with tensor parallelism (section 6.5)",
        ],
    )


def llama_7b_a100() -> Profile:
    """Llama 2 7B on one A100, from one published mean and an assumed batch."""
    flops_s = h100_attention_flops_s() / 989e12 * 312e12
    attention = A100_7B.attention_flops / flops_s * 1e3
    k = from_one_chunk(A100_7B, 1024, 1024, 98.5, attention)
    return published_profile(
        "llama-2-7b-a100",
        A100_7B,
        k,
        safepoint_us=988.0,
        derivation=[
            "published (conserve-2024 section 6): a mean iteration of 98.5 ms; the batch is not, and is taken "
            "to be one chunk of 1,024 tokens after 1,024 others",
            *roofline(A100_7B, k),
            f"k2: attention at the share of peak (312 of 989 TFLOP/s) that the H100 figures imply: "
            f"{flops_s / 1e12:.0f} TFLOP/s, {k.attention:.4g} ms",
            f"k1 + k3 = (98.5 - k5 - k4 * 2,048 - k2 * 1,024 * 2,048) / 1,024 = {k.compute:.4g} ms a token",
            "copies: PCIe 4.0 x16 at 25 GB/s of its 32; safepoint: 988 us (conserve-2024 section 6)",
        ],
    )


def roofline(machine: ModelOnDevices, k: Coefficients) -> list[str]:
    """Derivations of k4 and k5, for the profile's text."""
    shared = f" / {machine.degree} devices" if machine.degree > 1 else ""
    return [
        f"k5 = {2 * machine.parameters / 1e9:.1f} GB of weights{shared} / "
        f"{machine.hbm_bytes_s / 1e12:g} TB/s of HBM = {k.constant:.4g} ms",
        f"k4 = {machine.kv_bytes:,} bytes of KV a token{shared} / {machine.hbm_bytes_s / 1e12:g} TB/s "
        f"= {k.memory:.4g} ms",
    ]


def published_profile(
    name: str, machine: ModelOnDevices, k: Coefficients, *, safepoint_us: float, derivation: list[str]
) -> Profile:
    """A profile with these coefficients, in the forms of all models."""
    return Profile(
        name=name,
        key=ProfileKey(
            model=machine.model,
            dtype=machine.dtype,
            device=machine.device,
            parallelism=f"tp={machine.degree} pp=1 dp=1",
            engine="as published",
        ),
        how="derived",
        measured_at="",
        seconds=0.0,
        limits=None,
        models={
            ConServeModel.name: FittedModel(
                coefficients=ConServeModel.of(
                    k.compute, k.attention, k.attention, k.memory, 0, 0, 0, k.constant
                ).coefficients
            ),
            PaperModel.name: FittedModel(
                coefficients=PaperModel.of(k.compute, k.attention, k.memory, k.constant).coefficients
            ),
            HyGenModel.name: FittedModel(
                coefficients=HyGenModel.of(
                    k.compute + k.memory, k.memory, k.attention, 0, 0, k.compute, k.constant
                ).coefficients
            ),
        },
        kv_copies=[copy_of(machine, blocks) for blocks in (1, 16, 128)],
        safepoint=Safepoint(check_us=safepoint_us, per_iteration=80 if "70b" in machine.model else 32),
        derivation=derivation,
    )


def copy_of(machine: ModelOnDevices, blocks: int) -> KVCopy:
    """Time of copying blocks of 16 tokens: every worker its share over its link, after 0.5 ms of gathering."""
    size = blocks * BLOCK_TOKENS * machine.kv_bytes
    ms = 0.5 + size / machine.degree / machine.link_bytes_s * 1e3
    return KVCopy(blocks=blocks, bytes=size, to_host_ms=ms, to_device_ms=ms)


def main() -> None:
    """Write the profiles' files."""
    for profile in (llama_8b_h100(), llama_70b_h100(), llama_7b_a100()):
        profiles.write(profile, DERIVED / f"{profile.name}.json")


if __name__ == "__main__":
    main()
