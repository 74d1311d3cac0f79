"""A worker's half of KV checkpoints on disk, called in all workers at once (`spill`).

Writing reads host memory only, in a thread, while the engine goes on. Blocks that only the device has are copied to
host memory first.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group

from conserve.engine.runtime.spill_file import Shard, read_shard, write_shard
from conserve.engine.vllm.checkpoint.copies import Copies
from conserve.engine.vllm.checkpoint.restores import Copy
from conserve.errors import SpillRefused

log = logging.getLogger("vllm.conserve")
AT_ONCE = 64  # blocks copied from the device in one call


class Writing:
    """A shard being written to disk."""

    def __init__(self) -> None:
        self.ended: Shard | str | None = None  # the shard, or the reason that there is none

    def run(self, write: Callable[[], Shard]) -> None:
        """Write the shard, and set `ended`."""
        try:
            self.ended = write()
        except Exception as error:
            log.exception("KV blocks could not be written")
            self.ended = said(error)


def begin_writing(
    worker: Any, folder: str, name: str, hosts: Mapping[str, int], copies: Sequence[Copy]
) -> bool:
    """Copy blocks to host memory, and begin to write these and others; True if the copies succeeded."""
    ours = copies_here()
    ours.writing = writing = Writing()
    try:
        copy_now(ours, copies)
        regions = host_regions(ours)
        blocks = ((key, [region[host] for region in regions]) for key, host in hosts.items())
        write = functools.partial(
            write_shard, Path(folder), shard_name(name), blocks, layout=layout(worker, ours)
        )
    except Exception as error:
        writing.ended = said(error)
        return False
    threading.Thread(target=writing.run, args=(write,), name="kv-spill", daemon=True).start()
    return True


def what_was_written(worker: Any) -> Shard | str | None:
    """The shard once it is written, or the reason that there is none; None until then."""
    writing: Writing = copies_here().writing
    return writing.ended


def read(
    worker: Any, folder: str, shards: Sequence[Shard], keys: Sequence[str], hosts: Sequence[int]
) -> str | None:
    """Read this worker's shard into blocks of host memory; returns the reason if it is refused, else None."""
    try:
        ours, mine = copies_here(), shard_name("")
        shard = next((one for one in shards if one.name.endswith(mine)), None)
        if shard is None:
            raise SpillRefused("it has no part for every worker")
        regions = host_regions(ours)
        targets = ([region[host] for region in regions] for host in hosts)
        read_shard(Path(folder), shard, keys, targets, layout=layout(worker, ours))
    except Exception as error:
        return said(error)
    return None


def copies_here() -> Copies:
    """This worker's `Copies`; raises `SpillRefused` if it has none."""
    connector = get_kv_transfer_group()
    for one in getattr(connector, "_connectors", (connector,)):
        if isinstance(copies := getattr(one, "copies", None), Copies):
            return copies
    raise SpillRefused("a worker has no KV checkpoints")


def copy_now(ours: Copies, copies: Sequence[Copy]) -> None:
    """Copy blocks from the device and wait for them."""
    device, host = ours.gpu_kv_caches, ours.cpu_kv_caches
    assert device is not None
    assert host is not None
    if copies and next(iter(device.values())).device.type != "cpu":
        torch.accelerator.synchronize()
    for first in range(0, len(copies), AT_ONCE):
        some = copies[first : first + AT_ONCE]
        sources = torch.tensor([copy.device for copy in some])
        targets = torch.tensor([copy.host for copy in some])
        for name, cache in device.items():
            blocks = cache.index_select(0, sources.to(cache.device))  # (n, block bytes)
            host[name].index_copy_(0, targets, blocks.cpu())


def host_regions(ours: Copies) -> list[list[memoryview]]:
    """Bytes of every block in host memory, by region."""
    assert ours.cpu_kv_caches is not None
    regions = []
    for cache in ours.cpu_kv_caches.values():
        size, whole = cache[0].nbytes, memoryview(cache.numpy()).cast("B")
        regions.append([whole[at : at + size] for at in range(0, len(whole), size)])
    return regions


def shard_name(spill: str) -> str:
    """File name of this worker's shard."""
    return f"{spill}-{get_tp_group().rank_in_group}.kv"


def layout(worker: Any, ours: Copies) -> str:
    """Digest of the layout of KV within a block, which depends on the attention backend, and of its scales."""
    assert ours.cpu_kv_caches is not None
    parts: list[Any] = [(name, cache[0].nbytes) for name, cache in ours.cpu_kv_caches.items()]
    for cache in worker.model_runner.kv_caches:
        strides = cache.stride()
        parts.append((cache.dtype, sorted(range(cache.dim()), key=strides.__getitem__)))
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        scales = [getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float", "isa")]
        parts.append((type(getattr(layer, "impl", None)).__qualname__, *scales))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def said(error: Exception) -> str:
    """The error in a few words."""
    return str(error) if isinstance(error, SpillRefused) else f"{type(error).__name__}: {error}"
