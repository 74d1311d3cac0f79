"""Live prefixes: KV that live requests will find in the prefix cache, left by rows or taken last (docs/adr/0034).

vLLM gives out the free block that was used longest ago. Beside rows, which take and free blocks all the time, live
requests would find next to nothing of what earlier ones have left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from conserve.engine.runtime.prefix_reuse import PrefixReuse, Reach
from conserve.engine.vllm.lane import is_online

REUSED = 0.98  # share of the blocks that live requests reuse, which is to be kept
EARLY_S = 600.0  # time for which an unused block is kept while it is too early to have seen long reuses


class KeepingQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """Free KV blocks in the order in which vLLM gives them out: those that are kept behind all others.

    `keep` marks blocks in use; from their next release on they are kept ones, until they are given out or dropped.
    `num_free_blocks` counts both.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._kept = FreeKVCacheBlockQueue([])
        self._marked: OrderedDict[int, tuple[KVCacheBlock, float]] = OrderedDict()  # the longest unused first
        super().__init__(list(blocks))

    @property
    def kept(self) -> int:
        """Free blocks that are kept."""
        return int(self._kept.num_free_blocks)

    def keep(self, blocks: Iterable[KVCacheBlock], *, now: float) -> None:
        """Mark blocks that a live request holds and leaves now."""
        for block in blocks:
            self._marked[block.block_id] = block, now
            self._marked.move_to_end(block.block_id)

    def drop(self, *, most: int, before: float) -> None:
        """Keep so many blocks at most, the last used ones, and none that was left before that time."""
        marked = self._marked
        while marked:
            name, (block, left_at) = next(iter(marked.items()))
            if len(marked) <= most and left_at >= before:
                return
            free = not block.ref_cnt
            if free:
                self._take_kept(block)
            del marked[name]
            if free:
                super().append(block)

    def popleft(self) -> KVCacheBlock:
        """Give out a block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Give out blocks: kept ones if there are too few others."""
        from_kept = max(0, n - (self.num_free_blocks - self.kept))
        blocks: list[KVCacheBlock] = super().popleft_n(n - from_kept)
        given: list[KVCacheBlock] = self._kept.popleft_n(from_kept)
        self.num_free_blocks -= from_kept
        for block in given:
            del self._marked[block.block_id]
        return blocks + given

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, which a request has found."""
        if block.block_id in self._marked:
            self._take_kept(block)
        else:
            super().remove(block)

    def append(self, block: KVCacheBlock) -> None:
        """Take a block back."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Take blocks back, to be given out in this order."""
        marked = self._marked
        if marked:
            kept = [block for block in blocks if block.block_id in marked]
            self._kept.append_n(kept)
            self.num_free_blocks += len(kept)
            blocks = [block for block in blocks if block.block_id not in marked]
        super().append_n(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Take blocks back that are of no use to anyone."""
        for block in blocks:
            self._marked.pop(block.block_id, None)
        super().prepend_n(blocks)

    def _take_kept(self, block: KVCacheBlock) -> None:
        self._kept.remove(block)
        self.num_free_blocks -= 1


class LivePrefixes:
    """Keeps as much KV of live requests as these are seen to reuse, and counts what they find and what they lost.

    Lost are tokens that would have been found in a cache of the same size without rows.
    """

    def __init__(self, manager: Any, *, share: float) -> None:
        """`share`: of the KV blocks that rows leave at most. Beyond it rows take what they need."""
        pool = manager.block_pool
        self._manager, self._pool, self._share = manager, pool, share
        # Another pool is in host memory (HiSparse), and its blocks have the same numbers.
        self._kinds = [kind for kind in manager.coordinator.single_type_managers if kind.block_pool is pool]
        self._caches = bool(pool.enable_caching and self._kinds)  # an encoder's layers keep no KV
        self._hashed = pool.hash_block_size  # tokens of a block with a name
        self._blocks_of_name = sum(self._hashed / kind.block_size for kind in self._kinds)
        names = (pool.num_gpu_blocks - 1) / self._blocks_of_name if self._caches else 1
        self._reuse = PrefixReuse(round(names))
        self._queue: KeepingQueue | None = None
        self._prompt_tokens = self._found_tokens = self._lost_tokens = 0
        self._most, self._age_s = 0, 0.0  # blocks to keep, and seconds for which an unused one is kept
        self._withheld = 0  # of the kept blocks, those that no row takes, at most
        self.on = False

    @property
    def kept(self) -> int:
        """Free blocks that rows do not take."""
        return min(self._withheld, self._queue.kept) if self._queue is not None else 0

    def switch(self, *, on: bool) -> None:
        """Keep blocks or not, from now on."""
        self.on = on and self._caches and self._share > 0
        if self.on and self._queue is None:
            self._queue = KeepingQueue(self._pool.free_block_queue.get_all_free_blocks())
            self._pool.free_block_queue = self._queue
        self._learn()
        self._drop(now=0.0)

    def _drop(self, *, now: float) -> None:
        """Let go of blocks that live requests are not seen to reuse any more."""
        if self._queue is not None:
            self._queue.drop(most=self._most, before=now - self._age_s)

    def start(self, output: SchedulerOutput, requests: dict[str, Request], *, now: float) -> None:
        """Count what live requests find that start in this iteration."""
        self._drop(now=now)
        for new in output.scheduled_new_reqs:
            request = requests[new.req_id]
            # vLLM counts once what a request was spared. Later parts of a prompt and, under the V2 model runner,
            # preempted requests are among the new ones.
            spared = request.prefill_stats
            if spared is None or request.num_preemptions or not is_online(request):
                continue
            if not self._manager.prefix_cache_lookup_enabled(request):
                continue
            usable = request.num_prompt_tokens - 1  # one token is always computed
            names = request.block_hashes[: usable // self._hashed]
            found = spared.num_local_cached_tokens
            self._prompt_tokens += request.num_prompt_tokens
            self._found_tokens += found
            self._lost_tokens += max(0, self._reuse.found(names, now=now) * self._hashed - found)

    def end(self, request: Request, *, now: float) -> None:
        """Keep the blocks of a live request that is about to free them, at its end or since vLLM preempts it.

        Else a preempted one would lose its own to the next arrival, and compute its tokens again.
        """
        if not self._caches or not is_online(request):
            return
        held = [kind.req_to_blocks.get(request.request_id, ()) for kind in self._kinds]
        left = [block for blocks in held for block in blocks if block.block_hash is not None]
        if not left:
            return
        computed = request.num_computed_tokens // self._hashed  # an aborted prompt may not be
        self._reuse.used(request.block_hashes[:computed], now=now)
        self._learn()
        if self.on and self._queue is not None:
            self._queue.keep(reversed(left), now=now)
            self._drop(now=now)

    def forget(self) -> None:
        """Forget all blocks: vLLM resets its cache."""
        self._reuse.forget()
        if self._queue is not None:
            self._queue.drop(most=0, before=0.0)

    def _learn(self) -> None:
        """Look how much is to be kept, and for how long."""
        reach = self._reuse.reach(REUSED) if self.on else Reach(0, 0.0)
        self._most, self._age_s = round(reach.blocks * self._blocks_of_name), reach.age_s
        self._withheld = min(round(self._share * self._pool.num_gpu_blocks), self._most)
        if self.on and self._reuse.early:
            self._most, self._age_s = self._pool.num_gpu_blocks, max(reach.age_s, EARLY_S)

    def report(self) -> dict[str, Any]:
        """Counts since the start, and what is kept now."""
        return {
            "share": self._share if self.on else 0.0,
            "kept_blocks": self.kept,
            "most_blocks": self._withheld,
            "most_age_s": self._age_s,
            "prompt_tokens": self._prompt_tokens,
            "found_tokens": self._found_tokens,
            "lost_tokens": self._lost_tokens,
        }
