"""Number format of a CPU engine: time matrix products in the model's shapes and choose the faster format.

Processor flags do not tell the faster one. With AVX2 alone bfloat16 is emulated, ten times slower than float32;
with AMX it is several times faster; with AVX-512 BF16 and no AMX, either format has been faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

PREFILL_TOKENS = 128  # most tokens of a prefill-sized product
DECODE_TOKENS = 16  # rows of a decode-sized product
PREFILL_FLOP = 1.5e9  # most work of one prefill-sized pass: 90 ms where bfloat16 is emulated
LAYER_WEIGHTS = 16 << 20  # most weights of one layer; larger models are measured in smaller shapes
STREAMED_WEIGHTS = 24 << 20  # weights read by a decode-sized pass: more than a core's caches hold
REPEATS = 3
PROMPT_TOKENS, ANSWER_TOKENS = 256, 64  # of the row whose time decides
TIE = 0.05  # share by which float32, which takes twice the memory, must be faster to be chosen


class Products(Protocol):
    """The matrix products of `layers` equal layers in one number format, ready to run."""

    def __call__(self, tokens: int, layers: int) -> None:
        """Multiply `tokens` rows by each weight of the first `layers` layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The products of one decoder layer, each as (input size, output size)."""

    products: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The shapes of a model from its Hugging Face configuration; missing sizes follow GPT-2's rules.

        Raises `KeyError` if the configuration names no hidden size.
        """
        text = config.get("text_config") or config

        def size(*names: str, default: int | None = None) -> int:
            found = next((text[name] for name in names if isinstance(text.get(name), int)), default)
            if found is None:
                raise KeyError(names[0])
            return int(found)

        hidden = size("hidden_size", "n_embd", "d_model")
        heads = size("num_attention_heads", "n_head", default=1)
        kv_heads = size("num_key_value_heads", default=heads)
        head = size("head_dim", default=hidden // heads)
        inner = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        gated = 2 if text.get("hidden_act") in ("silu", "gelu_pytorch_tanh", "swiglu") else 1
        return cls(
            products=(
                (hidden, (heads + 2 * kv_heads) * head),
                (heads * head, hidden),
                (hidden, gated * inner),
                (inner, hidden),
            )
        )

    @property
    def weights(self) -> int:
        """Number of weights in one layer's matrices."""
        return sum(given * wanted for given, wanted in self.products)

    def measurable(self) -> Self:
        """Shrink large shapes in proportion, so that measuring takes a moment; sizes stay multiples of 32."""
        shrink = math.sqrt(min(1.0, LAYER_WEIGHTS / self.weights))
        if shrink == 1.0:
            return self
        return type(self)(
            products=tuple(
                (max(32, int(given * shrink) // 32 * 32), max(32, int(wanted * shrink) // 32 * 32))
                for given, wanted in self.products
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of one format's products, in GFLOP/s."""

    prefill: float
    decode: float

    @property
    def row_cost(self) -> float:
        """Time of a typical row (prompt as prefill, answer as decode steps), per FLOP of one token."""
        return PROMPT_TOKENS / self.prefill + ANSWER_TOKENS / self.decode


Build = Callable[[str, Shapes, int], Products]
"""Makes the products of a number of layers in a format; raises `RuntimeError` if the machine lacks the format."""


def measure(
    build: Build, shapes: Shapes, formats: Sequence[str], *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Speed]:
    """Measure the speed of each format that this machine has; under a second on every machine seen.

    Formats take turns and the fastest of `REPEATS` counts, so that other work on the machine affects all alike.
    """
    shapes = shapes.measurable()
    layers = max(1, STREAMED_WEIGHTS // shapes.weights)
    flop = 2.0 * shapes.weights  # of one token in one layer
    prefill = min(PREFILL_TOKENS, max(DECODE_TOKENS, int(PREFILL_FLOP / flop)))
    ready: dict[str, Products] = {}
    for name in formats:
        try:
            ready[name] = build(name, shapes, layers)
            ready[name](DECODE_TOKENS, 1)  # the first product allocates and compiles
            ready[name](prefill, 1)
        except RuntimeError:
            ready.pop(name, None)
    best: dict[tuple[str, str], float] = {}
    for _ in range(REPEATS):
        for name, products in ready.items():
            for phase, tokens, depth in (("prefill", prefill, 1), ("decode", DECODE_TOKENS, layers)):
                begun = clock()
                products(tokens, depth)
                rate = flop * tokens * depth / max(clock() - begun, 1e-9) / 1e9
                best[name, phase] = max(best.get((name, phase), 0.0), rate)
    return {name: Speed(prefill=best[name, "prefill"], decode=best[name, "decode"]) for name in ready}


def choose(speeds: Mapping[str, Speed], own: str) -> str:
    """The format with the fastest typical row; the model's `own` format if the others gain less than `TIE`."""
    if own not in speeds:
        return min(speeds, key=lambda name: speeds[name].row_cost, default=own)
    least = speeds[own].row_cost * (1 - TIE)
    return min(
        (name for name in speeds if name == own or speeds[name].row_cost < least),
        key=lambda name: speeds[name].row_cost,
    )
