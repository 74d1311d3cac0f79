"""On the GPU machine: `python3 -m tools.gpu.look FOLDER` prints versions, modules that do not load, and the GPU."""

import importlib
import pkgutil
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTIONS = ("torch", "triton", "transformers", "tokenizers", "numpy", "numba", "pyarrow", "vllm", "duckdb",
                 "sqlalchemy")  # fmt: skip
MODULES = (
    *("vllm", "vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C"),
    *("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_worker"),
    *("vllm.v1.engine.async_llm", "vllm.entrypoints.openai.api_server", "vllm.model_executor.models.llama"),
    "vllm.v1.attention.backends.flash_attn",
)
# vLLM imports these names for a kind of speculation that no step uses.
NUMBA = '''"""Names of numba, which does not load on this machine."""
def jit(*args, **kwargs):
    return args[0] if args and callable(args[0]) else lambda function: function
njit, prange, get_num_threads, set_num_threads = jit, range, lambda: 1, lambda count: None
'''


def version_of(name: str) -> str:
    """Name and version of a distribution."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} MISSING"


def loads(name: str) -> bool:
    """Import a module; print why it does not load."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # a library may even exit
        print(f"install: {name} DOES NOT LOAD: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return False
    return True


def replace_numba(site: Path) -> None:
    """Write a module with numba's names, if numba does not load."""
    if not loads("numba"):
        (site / "numba").mkdir(exist_ok=True)
        (site / "numba/__init__.py").write_text(NUMBA)
        sys.modules.pop("numba", None)
        importlib.invalidate_caches()


def look_at_gpu() -> None:
    """Print vLLM's platform and the GPU."""
    import torch
    from vllm.platforms import current_platform

    print(
        f"install: vLLM's platform is {type(current_platform).__name__}, CUDA is {torch.cuda.is_available()}"
    )
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        computed = torch.ones(1, device="cuda").sum().item()
        print(f"install: {torch.cuda.get_device_name()}, {free >> 30} of {whole >> 30} GiB free, capability "
              f"{torch.cuda.get_device_capability()}, computes {computed}")  # fmt: skip


def main(kit: Path) -> None:
    """Print everything; a module that does not load ends nothing."""
    print(
        f"install: Python {platform.python_version()},", ", ".join(map(version_of, DISTRIBUTIONS)), flush=True
    )
    replace_numba(kit / "site")
    began = time.monotonic()
    own = [
        module.name
        for module in pkgutil.walk_packages(["conserve"], "conserve.")
        if "__main__" not in module.name
    ]
    names = [*MODULES, *own]
    loaded = sum([loads(name) for name in names])
    print(f"install: {loaded} of {len(names)} modules load, in {time.monotonic() - began:.0f} s", flush=True)
    look_at_gpu()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
