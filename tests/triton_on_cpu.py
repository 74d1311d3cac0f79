"""vLLM's V2 model runner on a CPU: its own Triton kernels, run as Python on NumPy arrays.

The registry's CPU builds of vLLM bring the V2 runner and its CPU subclass (`vllm.v1.worker.cpu.model_runner`), but
no Triton, without which `triton.jit` leaves a kernel's Python as it is. So the kernels are run as they are written,
one program after the other, with these few functions in place of `triton.language`.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

RUNNER = "vllm.v1.worker.gpu"
LOADED = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.cpu.model_runner")
REACH = 1 << 30  # bytes behind an address: the kernel alone knows how far its memory goes


class Value(np.ndarray[Any, Any]):
    """A number or a block of numbers; `x ^= y` makes a new one, of another shape perhaps, as in Triton."""

    __imul__, __ixor__ = np.ndarray.__mul__, np.ndarray.__xor__

    def to(self, dtype: Any) -> Value:
        return self.astype(dtype)


def value(of: Any, dtype: Any = None) -> Value:
    return np.asarray(of, dtype).view(Value)


class Pointer:
    """Addresses of elements in memory: one, or a block of them."""

    __array_ufunc__ = None  # so that an array leaves the addition to the pointer

    def __init__(self, memory: np.ndarray[Any, Any], offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.memory, self.offset + elements)

    __radd__ = __add__

    def __sub__(self, elements: Any) -> Pointer:
        return Pointer(self.memory, self.offset - elements)


def pointer_to(tensor: torch.Tensor) -> Pointer:
    """The tensor's first element, with all that lies behind it."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return Pointer(tensor.detach().as_strided((size,), (1,)).numpy())


class Language:
    """The part of `triton.language` that the kernels of `KERNELS` use, for one program of a grid."""

    bool = int1 = np.bool_
    int32, int64, uint32, uint64 = np.int32, np.int64, np.uint32, np.uint64
    float32, float64 = np.float32, np.float64
    range = staticmethod(range)

    def __init__(self) -> None:
        self.program: Sequence[int] = ()
        self.grid: Sequence[int] = ()

    def program_id(self, axis: int) -> Value:
        return value(self.program[axis], np.int32)

    def num_programs(self, axis: int) -> Value:
        return value(self.grid[axis], np.int32)

    def arange(self, start: int, end: int) -> Value:
        return value(np.arange(start, end, dtype=np.int32))

    def full(self, shape: Sequence[int], filled: Any, dtype: Any) -> Value:
        return value(np.full(shape, filled, dtype))

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
        offset, wanted = np.broadcast_arrays(pointer.offset, mask)
        loaded = np.full(offset.shape, other, pointer.memory.dtype)
        loaded[wanted] = pointer.memory[offset[wanted]]
        return value(loaded)

    def store(self, pointer: Pointer, stored: Any, mask: Any = True) -> None:
        offset, stored, wanted = np.broadcast_arrays(pointer.offset, stored, mask)
        pointer.memory[offset[wanted]] = stored[wanted]

    def pointer_type(self, dtype: Any) -> np.dtype[Any]:
        return np.dtype(dtype)

    def cast(self, address: Value, dtype: np.dtype[Any]) -> Pointer:
        return Pointer(np.frombuffer((ctypes.c_char * REACH).from_address(int(address)), dtype))

    def multiple_of(self, pointer: Pointer, _: int) -> Pointer:
        return pointer

    def where(self, condition: Any, yes: Any, no: Any) -> Value:
        return value(np.where(condition, yes, no))

    def maximum(self, one: Any, other: Any) -> Value:
        return value(np.maximum(one, other))

    def max(self, block: Value, axis: int = 0, return_indices: Any = False) -> Any:
        largest = value(block.max(axis))
        return (largest, value(block.argmax(axis))) if return_indices else largest

    def sum(self, block: Value) -> Value:
        return value(block.sum())

    def exp(self, block: Value) -> Value:
        return value(np.exp(block))

    def log(self, block: Value) -> Value:
        return value(np.log(block))

    def log1p(self, block: Value) -> Value:
        return value(np.log1p(block))

    def randint(self, seed: Any, place: Any) -> Value:
        """Random numbers by seed and place, not Triton's own."""
        mixed = np.asarray(seed).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed + np.asarray(place).astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return value((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(33))

    def rand(self, seed: Any, place: Any) -> Value:
        return value(self.randint(seed, place).astype(np.float32) / np.float32(1 << 31))


class Kernel:
    """A kernel that runs when it is launched, `kernel[grid](...)`; within another it is a function."""

    def __init__(self, language: Language, program: Callable[..., None]) -> None:
        self.language, self.program = language, program
        self.parameters = inspect.signature(program).parameters

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            places = [pointer_to(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            named = {
                name: arg for name, arg in kwargs.items() if name in self.parameters
            }  # without num_warps
            self.language.grid = grid
            with np.errstate(over="ignore"):  # of random numbers, which wrap around
                for self.language.program in itertools.product(*map(range, grid)):
                    self.program(*places, **named)

        return launch


def kernels() -> Iterator[tuple[str, Callable[..., None]]]:
    """All of the runner's kernels, by where they are."""
    for module in LOADED:
        importlib.import_module(module)
    package = importlib.import_module(RUNNER)
    for found in pkgutil.walk_packages(package.__path__, f"{RUNNER}."):
        module = importlib.import_module(found.name)
        for name, one in vars(module).items():
            if name.endswith("_kernel") and isinstance(one, FunctionType) and one.__module__ == found.name:
                yield f"{found.name}.{name}", one


@contextmanager
def v2_runner() -> Iterator[None]:
    """Engines that start meanwhile use vLLM's V2 model runner."""
    from vllm.triton_utils import tl, triton

    language = Language()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setattr("vllm.config.vllm.HAS_TRITON", True)
        patch.setattr("vllm.v1.worker.gpu_worker.HAS_TRITON", True, raising=False)
        patch.setattr(triton, "next_power_of_2", lambda n: 1 << (n - 1).bit_length(), raising=False)
        for name in dir(language):
            if not name.startswith("_") and name not in ("program", "grid"):
                patch.setattr(tl, name, getattr(language, name), raising=False)
        patch.setattr("vllm.triton_utils.tldevice.log1p", language.log1p, raising=False)
        for path, kernel in list(kernels()):
            patch.setattr(path, Kernel(language, kernel))
        yield
