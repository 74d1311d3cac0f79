"""KV checkpoints on disk: written at a clean stop, read by the next engine of the same kind.

The engine core chooses the blocks (`Spilling`); each worker writes and reads its own part of them (`spill_worker`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import get_none_hash_seed, resolve_kv_cache_block_sizes
from vllm.version import __version__ as vllm_version

from conserve.engine.runtime.host_memory import HostMemory
from conserve.engine.runtime.spill_file import (
    Identity,
    Shard,
    Spill,
    discard,
    read_index,
    remove,
    require_same,
    write_index,
)
from conserve.engine.vllm.checkpoint.blocks import Checkpoints
from conserve.engine.vllm.checkpoint.counts import checkpoints_of
from conserve.engine.vllm.checkpoint.spill_worker import begin_writing, read, said, what_was_written
from conserve.engine.vllm.model.fingerprint import identity_of
from conserve.engine.vllm.model.weights import version_of
from conserve.errors import SpillRefused

log = logging.getLogger("vllm.conserve")
RESERVE = 1 << 30  # bytes left free on the disk, where the store may lie too


@dataclass(slots=True)
class SpillCounts:
    """Counts since the engine started."""

    blocks_spilled: int = 0
    bytes_spilled: int = 0
    blocks_taken_in: int = 0
    tokens_taken_in: int = 0


class Spilling:
    """The engine core's half of the spill; called between two iterations."""

    def __init__(
        self, folder: Path, checkpoints: Checkpoints, config: Any, kv_cache_config: Any, *, block_bytes: int
    ) -> None:
        self._folder, self._checkpoints = folder, checkpoints
        self._identity = functools.partial(identity, config, kv_cache_config)
        self._block_bytes = block_bytes * config.parallel_config.world_size
        self.why_off = why_not(config)
        self.refused: str | None = None  # why the last spill was not read, or not written
        self.counts = SpillCounts()
        self._writing: dict[str, int] = {}  # host blocks by key
        self._whose: Identity = {}  # identity of the spill being written
        if self.why_off is not None:
            log.warning("KV checkpoints do not go to disk: %s", self.why_off)

    def report(self) -> dict[str, Any]:
        """Blocks, bytes and tokens written and read, for JSON."""
        return {"why_off": self.why_off, "refused": self.refused, **asdict(self.counts)}

    def take_in(self, core: Any) -> None:
        """Read the last engine's spill into host memory and remove it, before any request is served."""
        if self.why_off is not None:
            return
        try:
            spill = read_index(self._folder)
            if spill is not None:
                require_same(spill.identity, self._identity(version_of(core)))
                self._read(core, spill)
                discard(self._folder)
        except Exception as error:  # in every case the KV can be computed again
            self.refused = said(error)
            log.warning("the KV blocks in %s are not used: %s", self._folder, self.refused)

    def _read(self, core: Any, spill: Spill) -> None:
        memory = self._checkpoints.memory
        hosts = room_for(memory, spill.keys)
        try:
            keys = list(spill.keys[: len(hosts)])
            whys = core.model_executor.collective_rpc(
                read, args=(str(self._folder), list(spill.shards), keys, hosts)
            )
            if why := next(filter(None, whys), None):
                raise SpillRefused(why)
            for host in hosts:
                memory.written(host)
        finally:
            # Blocks that were not written are forgotten; of the others the beginnings are reused last.
            memory.release(reversed(hosts))
        self.counts.blocks_taken_in = len(hosts)
        self.counts.tokens_taken_in = len(hosts) * self._checkpoints.block_tokens
        log.info("%d KV blocks of rows in flight came back from %s", len(hosts), self._folder)

    def begin(self, core: Any) -> None:
        """Have the workers write the KV of rows in flight, at a clean stop."""
        if self.why_off is not None or self._writing:
            return
        found = self._checkpoints.gather()
        self._writing = found.hosts
        failed = True
        try:
            if found.hosts:
                self._require_room(len(found.hosts))
                self._whose = self._identity(version_of(core))
                arguments = (str(self._folder), secrets.token_hex(8), found.hosts, found.copies)
                failed = not all(core.model_executor.collective_rpc(begin_writing, args=arguments))
        except Exception as error:  # a worker may have died: the KV can be computed again
            self._over(said(error))
        finally:
            self._checkpoints.copied(found.fresh, failed=failed)

    @property
    def writing(self) -> bool:
        """True while workers write, and until `end` has made the spill valid."""
        return bool(self._writing)

    def end(self, core: Any) -> None:
        """Make the spill valid once all workers have written their shards."""
        if not self._writing:
            return
        shards: list[Shard] = []
        try:
            ended: list[Shard | str | None] = core.model_executor.collective_rpc(what_was_written)
            if None in ended:
                return
            shards = [one for one in ended if isinstance(one, Shard)]
            if why := next((one for one in ended if isinstance(one, str)), None):
                raise SpillRefused(why)
            self._make_count(shards)
        except Exception as error:  # as in `begin`
            remove(self._folder, shards)
            self._over(said(error))
        else:
            self._over(None)

    def _make_count(self, shards: Sequence[Shard]) -> None:
        keys = list(self._writing)
        write_index(self._folder, Spill(identity=self._whose, keys=keys, shards=shards))
        self.counts.blocks_spilled = len(keys)
        self.counts.bytes_spilled = sum(shard.block_bytes for shard in shards) * len(keys)

    def _require_room(self, blocks: int) -> None:
        wanted, free = blocks * self._block_bytes, shutil.disk_usage(self._folder).free
        if wanted + RESERVE > free:
            raise SpillRefused(
                f"they take {wanted >> 20} MiB, and {free >> 20} are free, {RESERVE >> 20} of them for others"
            )

    def _over(self, why: str | None) -> None:
        self._checkpoints.memory.release(reversed(self._writing.values()))
        self._writing, self.refused = {}, why
        if why is not None:
            log.warning("KV blocks of rows in flight are not written to %s: %s", self._folder, why)


def room_for(memory: HostMemory, keys: Sequence[str]) -> list[int]:
    """Host blocks to read the first of these KV blocks into, as many as there is room for; each held once."""
    hosts: list[int] = []
    for key in map(bytes.fromhex, keys):
        host = memory.allocate(key) if memory.find(key) is None and memory.room else None
        if host is None:
            break
        hosts.append(host)
    return hosts


def ask_spilling(core: Any, what: str) -> dict[str, Any] | None:
    """Call `take_in`, `begin` or `end` through vLLM's utility calls; None if KV does not go to disk."""
    checkpoints, _ = checkpoints_of(core.scheduler.connector)
    spilling: Spilling | None = checkpoints.spill if checkpoints is not None else None
    if spilling is None:
        return None
    {"take_in": spilling.take_in, "begin": spilling.begin, "end": spilling.end}[what](core)
    return {**spilling.report(), "writing": spilling.writing}


def why_not(config: Any) -> str | None:
    """Reason that KV of this engine would be useless to the next; None if it is not."""
    cache, parallel = config.cache_config, config.parallel_config
    seeded = os.environ.get("PYTHONHASHSEED") is not None
    reasons = {
        "prefix caching is off": not cache.enable_prefix_caching,
        f"hashes of blocks differ from start to start with {cache.prefix_caching_hash_algo} "
        "(PYTHONHASHSEED is not set)": cache.prefix_caching_hash_algo.startswith("xxhash") and not seeded,
        # By the index too, since vLLM sets the size to 1 in independent engines: the first of these spills alone.
        "the engine is data parallel": parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0,
    }
    return next((reason for reason, true in reasons.items() if true), None)


def identity(config: Any, kv_cache_config: Any, weights: str) -> Identity:
    """Properties that two engines must share for KV of one to be right in the other; workers add their layouts."""
    model, cache = config.model_config, config.cache_config
    block, hashed = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return {
        "model": identity_of("", config),
        "weight version": weights,
        "load format": str(config.load_config.load_format),
        "dtype": str(model.dtype),
        "KV cache dtype": str(cache.cache_dtype),
        "context length": model.max_model_len,  # some rotary embeddings depend on it
        "block size": block,
        "hash block size": hashed,
        "hash algorithm": cache.prefix_caching_hash_algo,
        "hash seed": hashlib.sha256(get_none_hash_seed().encode()).hexdigest()[:16],
        "KV cache": "; ".join(str(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups),
        "layers": sum(len(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors),
        "workers": config.parallel_config.world_size,
        "vLLM": vllm_version,
    }
