"""Number format of a CPU engine, measured once per machine, model shape and library version."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from conserve.engine.runtime.machine import compute_threads, cpu_model
from conserve.engine.runtime.number_format import Products, Shapes, Speed, choose, measure
from conserve.engine.runtime.start_cache import keep, kept_in
from conserve.engine.runtime.vllm_flags import names_of
from conserve.engine.vllm.compat.installed import installed_engine, installed_version
from conserve.engine.vllm.launching.fork_server import wait_until_idle

if TYPE_CHECKING:
    import torch

FLOAT32 = "float32"
HALVES = ("bfloat16", "float16")
GATED_DELTA_NET = ("linear_key_head_dim",)  # entries of configurations with such layers
MAMBA2 = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # limit instructions


class Chosen(NamedTuple):
    """A number format and the measured speeds that it was chosen by."""

    name: str
    speeds: dict[str, Speed]


def names_format(flags: Sequence[str]) -> bool:
    """True if these engine flags name a number format, or decide it otherwise."""
    return not {"--dtype", "--quantization"}.isdisjoint(names_of(flags))


def format_of(model: str) -> Chosen | None:
    """The faster number format of this model on this machine; None if vLLM is to decide. Imports torch and vLLM.

    vLLM decides for quantised models, for gated delta nets (Qwen3-Next), whose CPU kernels take bfloat16 alone, and
    if the configuration cannot be read.
    """
    config = read_config(model)
    if config is None or config.get("quantization_config") or keeps(config, GATED_DELTA_NET):
        return None
    try:
        shapes = Shapes.of(config)
    except KeyError:
        return None
    known = recall(config)
    if known is not None:
        return known
    own = own_format(config)
    wait_until_idle()
    speeds = measure(vllms_products, shapes, supported(own, FLOAT32))
    if not speeds:
        return None
    chosen = Chosen(choose(speeds, own), speeds)
    remember(config, chosen)
    return chosen


def recall(config: dict[str, Any]) -> Chosen | None:
    """The choice kept for models of this shape on this machine; None if there is none."""
    return kept_in(formats_file(), type_=Chosen).get(_key(config))


def remember(config: dict[str, Any], chosen: Chosen) -> None:
    """Keep a choice. If the folder cannot be written, the next start measures again."""
    keep(formats_file(), _key(config), chosen, type_=Chosen)


def formats_file() -> Path:
    """File of the kept choices, shared by all stores of the user."""
    from platformdirs import user_cache_path

    return user_cache_path("conserve") / "number-formats.json"


def read_config(model: str) -> dict[str, Any] | None:
    """The model's own configuration; None if it cannot be read."""
    folder = Path(model)
    if folder.is_dir():
        try:
            found: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict)
        except (OSError, msgspec.DecodeError):
            return None
        return found
    if folder.exists():
        return None
    from transformers import PretrainedConfig

    try:
        fetched: dict[str, Any] = PretrainedConfig.get_config_dict(model)[0]
    except Exception:  # vLLM will ask for it next, and report the error
        return None
    return fetched


def keeps(config: dict[str, Any], names: Iterable[str]) -> bool:
    """True if the configuration of the text model has one of these entries."""
    text = config.get("text_config") or config
    return any(text.get(name) for name in names)


def own_format(config: dict[str, Any]) -> str:
    """The half-precision format that vLLM would choose: the weights' own, else bfloat16."""
    text = config.get("text_config") or {}
    said = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "")
    said = said.removeprefix("torch.")
    return said if said in HALVES else HALVES[0]


def supported(*names: str) -> list[str]:
    """The formats among `names` that vLLM computes in on this processor."""
    from vllm.platforms import current_platform

    known = {str(dtype).removeprefix("torch.") for dtype in current_platform.supported_dtypes}
    return [name for name in names if name in known]


def vllms_products(name: str, shapes: Shapes, layers: int) -> Products:
    """Products by the kernels that vLLM chooses for layers of this format and size."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dtype = getattr(torch, name)
    threads = compute_threads()

    def layer(given: int, wanted: int) -> torch.nn.Module:
        made = torch.nn.Linear(given, wanted, bias=False, device="meta")
        made.weight = torch.nn.Parameter(torch.full((wanted, given), 0.01, dtype=dtype), requires_grad=False)
        dispatch_cpu_unquantized_gemm(made, remove_weight=False)
        return made

    # How oneDNN lays weights out depends on the threads too.
    with computing_on(threads):
        stack = [[layer(*product) for product in shapes.products] for _ in range(layers)]

    def run(tokens: int, layers: int) -> None:
        with computing_on(threads), torch.inference_mode():
            inputs = [torch.full((tokens, given), 0.01, dtype=dtype) for given, _ in shapes.products]
            for products in stack[:layers]:
                for x, linear in zip(inputs, products, strict=True):
                    linear.cpu_linear(x, linear.weight, None)  # (tokens, wanted)

    return run


@contextlib.contextmanager
def computing_on(threads: int) -> Iterator[None]:
    """Let torch compute on so many threads meanwhile."""
    import torch

    before, set_threads = torch.get_num_threads(), torch.set_num_threads
    set_threads(threads)
    try:
        yield
    finally:
        set_threads(before)


def _key(config: dict[str, Any]) -> str:
    """Key of a choice: processor, threads, versions, and the model's format and shape."""
    engine = installed_engine()
    shape = "x".join(f"{given}-{wanted}" for given, wanted in Shapes.of(config).products)
    cut = " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    parts = (
        cpu_model(),
        f"{compute_threads()} threads",
        f"torch {installed_version('torch')}",
        f"{engine.distribution} {engine.version}" if engine else "no engine",
        own_format(config),
        shape,
        cut,
    )
    return ", ".join(part for part in parts if part)
