"""Copying KV blocks between the device and host memory, timed."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

REPEATS = 5


class CopyTimes(NamedTuple):
    """Median times of copying one number of blocks."""

    blocks: int
    bytes: int
    to_host_ms: float
    to_device_ms: float


def time_copies(caches: Sequence[torch.Tensor], num_blocks: int, counts: Sequence[int]) -> list[CopyTimes]:
    """Time copies of blocks of every layer to the host and back, for each number of blocks in `counts`.

    `caches` holds one tensor per layer, one of whose dimensions is `num_blocks` long. Their contents do not change.
    The blocks are scattered, each a copy of its own. On a device they lie side by side, and host memory is
    page-locked: vLLM hands a device all of an iteration's copies in one call, where copies that are launched one
    by one would show the host's speed (an H200 took 0.7 ms for a block of 2 MB, 22 us a launch).
    """
    dice = random.Random(0)
    views = [block_first(cache, num_blocks) for cache in caches]  # (num_blocks, ...) each
    on_device = views[0].device.type != "cpu"
    times = []
    for count in counts:
        hosts = [
            torch.empty((count, *view.shape[1:]), dtype=view.dtype, pin_memory=on_device) for view in views
        ]
        blocks = places(count, num_blocks, dice, together=on_device)
        pairs = [
            (host[row], view[block]) for host, view in zip(hosts, views, strict=True) for row, block in blocks
        ]
        out = [timed_ms([(host, block) for host, block in pairs], on_device) for _ in range(REPEATS)]
        back = [timed_ms([(block, host) for host, block in pairs], on_device) for _ in range(REPEATS)]
        size = sum(host.nbytes for host in hosts)
        times.append(CopyTimes(count, size, statistics.median(out), statistics.median(back)))
    return times


def places(
    count: int, num_blocks: int, dice: random.Random, *, together: bool
) -> list[tuple[int | slice, int | slice]]:
    """Each copy's place in host memory for `count` blocks, and in a cache: one of all blocks, or one a block."""
    if not together:
        return [*enumerate(dice.sample(range(num_blocks), count))]
    first = dice.randrange(num_blocks - count + 1)
    return [(slice(count), slice(first, first + count))]


def block_first(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View of the cache with its blocks in the first dimension."""
    dimension = next(n for n, size in enumerate(cache.shape) if size == num_blocks)
    return cache.movedim(dimension, 0)


def timed_ms(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], on_device: bool) -> float:
    """Copy the second of each pair into the first and wait; returns milliseconds."""
    begun = time.perf_counter()
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    if on_device:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3
