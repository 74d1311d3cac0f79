"""The scheduler's half of KV checkpoints: which blocks are copied next in each direction, and which copies ended.

The workers copy the bytes (`copies`) beside an iteration's computing. Blocks that no iteration has confirmed are
never copied. Source: conserve-2026 section 4.4, conserve-2024 section 4.4.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from vllm.v1.request import Request

from conserve.engine.policy.checkpointing import Marked, Pressure
from conserve.engine.policy.own_checkpoints import policy_named
from conserve.engine.policy.refusals import refusals_of
from conserve.engine.runtime.copy_budget import BlockMs, CopyBudget
from conserve.engine.runtime.host_memory import HostMemory
from conserve.engine.vllm.checkpoint.counts import CopyCounts
from conserve.engine.vllm.checkpoint.restores import Copy, Restores
from conserve.engine.vllm.checkpoint.saved_rows import SavedRows
from conserve.engine.vllm.checkpoint.transfers import Transfers, WorkerReport
from conserve.engine.vllm.lane import has_kv, is_online, is_running
from conserve.names import OFF

log = logging.getLogger("vllm.conserve")
SHARE = 0.05  # share of an iteration's time for the copies beside it, which lengthen it by 1.8 %
LAST_MINUTE = 2  # most blocks copied while their row is being evicted; they are free a moment later
NONE = Transfers()  # beside most iterations


class Gathered(NamedTuple):
    """Blocks that go to disk."""

    hosts: dict[str, int]  # host block by key (hexadecimal), most valuable first; each held once
    copies: list[Copy]  # copies to make before, including ones that others have asked for too
    fresh: list[Copy]  # copies among them that only the spill asked for: to be given to `copied`


class Checkpoints:
    """All checkpoints of an engine, and the copies under way in both directions.

    vLLM calls it through the connector, always between two iterations.
    """

    def __init__(
        self,
        policy: str,
        *,
        host_blocks: int,
        block_tokens: int,
        hashes_a_block: int = 1,
        shared: bool = True,
        workers: int = 1,
        block_ms: BlockMs,
        share: float = SHARE,
    ) -> None:
        """`hashes_a_block` hashes of vLLM's are of one KV block, and `shared` lets rows share blocks by them.

        `block_ms` is the assumed time of copying one KV block, `share` the part of an iteration's time that copies
        may take beside it. `workers` report each store.
        """
        self.name, self.policy = policy, policy_named(policy, log.warning)
        self.memory = HostMemory(host_blocks)
        self.saved = SavedRows(
            self.memory, block_tokens=block_tokens, hashes_a_block=hashes_a_block, shared=shared
        )
        self.block_tokens = block_tokens
        self.budget = CopyBudget(block_ms, share)
        self.counts = CopyCounts()
        self.spill: Any = None  # writes checkpoints to disk (`spill.Spilling`), if wanted
        self.on, self.why_off = True, "it is switched off"
        self.predicted_ms: float | None = None  # of the next iteration; None without a prediction
        self.allowed: Collection[str] | None = None  # rows whose restore may begin; None: any
        self.reserved_blocks = 0  # free device blocks kept for online requests to come
        self._device: Any = None  # vLLM's block pool
        self._block_ids: Callable[[str], Sequence[int]] = lambda name: ()
        self._workers = workers
        self._running: dict[str, Request] = {}  # requests with KV blocks, as vLLM has told us
        self._restores = Restores()
        self._events = 0
        self._stores: dict[int, list[Copy]] = {}
        self._reports: dict[int, int] = {}  # store -> number of workers that have reported it
        self._failed_stores: set[int] = set()  # stores that a worker reported as failed
        self._thrown_away: dict[int, list[int]] = {}  # stores whose device blocks are free: their host blocks
        self._local: dict[str, int] = {}  # tokens on the device of rows that may be restored
        self._last_minute: list[Copy] = []

    def bind(self, device: Any, block_ids: Callable[[str], Sequence[int]]) -> None:
        """Set vLLM's block pool, and a function from a row's name to its block ids."""
        self._device, self._block_ids = device, block_ids

    # Requests that come and go.

    def admitted(self, request: Request) -> None:
        """Note a request that has got KV blocks."""
        self._running[request.request_id] = request

    def evicting(self, request: Request) -> None:
        """Save the last blocks of a request that is being evicted, if they are few."""
        name = request.request_id
        if self._running.pop(name, None) is None or not self.on or not saveable(request):
            return
        full, tail_tokens = divmod(confirmed(request), self.block_tokens)
        have = len(self.saved.blocks(name))
        if full - have + bool(tail_tokens) > LAST_MINUTE or have > full:
            return
        ids = self._block_ids(name)
        copies = self.saved.extend(request, ids, full - have)
        if tail_tokens and len(self.saved.blocks(name)) == full:
            copies += self.saved.add_tail(request, ids, tail_tokens)
        self._last_minute += self._begun(copies)

    def has_all_of(self, name: str) -> bool:
        """True if evicting this running row would lose nothing; see `evicting`."""
        request = self._running.get(name)
        if request is None or name not in self.saved or not self.on:
            return False
        return confirmed(request) - self.saved.tokens(name) < LAST_MINUTE * self.block_tokens

    def finished(self, request: Request) -> None:
        """Forget a request that has ended in any way."""
        name = request.request_id
        self._running.pop(name, None)
        self._local.pop(name, None)
        self.saved.forget(name)
        self._restores.cancel(name)

    # Contents of a checkpoint.

    def is_being_saved(self, name: str) -> bool:
        """True if a waiting row should wait a moment longer, since its last KV is being copied."""
        return name not in self._running and not self.saved.is_whole(name)

    def restorable(self, request: Request, local: int) -> int:
        """Number of tokens after the first `local` ones, which are on the device, that can be restored.

        A row that never ran here may find KV that other rows left, if its own would be equal. Changes nothing.
        """
        if not self._could_restore(request, local):
            return 0
        name = request.request_id
        saved = self.saved.tokens(name) if is_online(request) else self.saved.tokens_found(request)
        tokens = min(saved, request.num_tokens - 1) - local
        return tokens if tokens >= min(self.block_tokens, max(1, self.saved.tail_tokens(name))) else 0

    def keep_for(self, request: Request, local: int) -> None:
        """Hold the blocks that `restorable` has found for an offline row without a checkpoint of its own."""
        if self._could_restore(request, local) and not is_online(request):
            self.saved.adopt(request)

    def _could_restore(self, request: Request, local: int) -> bool:
        return self.on and saveable(request) and not local % self.block_tokens

    def reset(self) -> bool:
        """Forget all checkpoints and void copies under way; False if rows are being restored: then do nothing."""
        if self._restores:
            return False
        self._failed_stores |= self._stores.keys()
        late, self._last_minute = self._last_minute, []
        self._device.free_blocks([self._device.blocks[copy.device] for copy in late])
        for copy in late:
            self.memory.forget(copy.host)
        self.memory.release(copy.host for copy in late)
        self.saved.clear()
        return True

    @contextlib.contextmanager
    def standing_still(self, *, free: bool) -> Iterator[None]:
        """Meanwhile begin no save. `free`: free the device blocks being saved, and throw away what copies bring."""
        saving, self.on = self.on, False
        for event, copies in self._stores.items() if free else ():
            hosts = [copy.host for copy in copies]
            self._device.free_blocks([self._device.blocks[copy.device] for copy in copies])
            self.saved.lost(set(hosts))
            for host in hosts:
                self.memory.forget(host)
            self._thrown_away.setdefault(event, []).extend(hosts)
            copies.clear()
        try:
            yield
        finally:
            self.on = saving

    @property
    def any_saved(self) -> bool:
        """True if any row has a checkpoint."""
        return bool(self.saved)

    # Restores.

    def matched(self, request: Request, local: int) -> int | None:
        """`restorable`, asked by vLLM, which then gives the row blocks; 0 if the restore is not to begin.

        None if vLLM should ask again later.
        """
        name = request.request_id
        if self.on and self.is_being_saved(name):
            return None
        if self.allowed is not None and name not in self.allowed:
            return 0
        self._local[name] = local
        self.keep_for(request, local)
        return self.restorable(request, local)

    def restore(self, request: Request, tokens: int) -> None:
        """Restore `tokens` tokens after the ones on the device; vLLM has given the row blocks for them."""
        name = request.request_id
        local = self._local.pop(name)
        first, last = local // self.block_tokens, -(-(local + tokens) // self.block_tokens)
        sources = self.saved.sources(name, first, last)
        targets = self._block_ids(name)[first:last]
        keys = frozenset(islice(self.saved.keys(request, first), last - first))
        self._restores.begin(name, map(Copy, targets, sources), keys)
        self.counts.restores += 1
        self.counts.tokens_restored += tokens

    @property
    def coming(self) -> frozenset[Hashable]:
        """Keys of the blocks that are being restored."""
        return self._restores.keys

    @property
    def copying(self) -> bool:
        """True if any block is being saved or restored, or is about to be."""
        return bool(self._stores or self._last_minute or self._restores)

    def report(self) -> dict[str, Any]:
        """Tokens, blocks and failures since the engine started, and the time of a block's copy, for JSON."""
        return {
            "policy": self.name if self.on else OFF,
            "why_off": None if self.on else self.why_off,
            "refused_choices": refusals_of(self.policy),
            **asdict(self.counts),
            "blocks_refused": self.saved.refused,
            "tokens_saved": self.counts.blocks_saved * self.block_tokens,
            "restoring": len(self._restores),
            "host_blocks": self.memory.capacity,
            "host_used": self.memory.used,
            "block_ms": {"to_host": self.budget.to_host_ms, "to_device": self.budget.to_device_ms},
            "spill": self.spill.report() if self.spill is not None else None,
        }

    # Transfers, once per iteration.

    def transfers(self) -> Transfers:
        """Copies for the workers to make beside the iteration that was just scheduled."""
        under_way = sum(map(len, self._stores.values()))
        left_ms = self._budget_ms() - under_way * self.budget.to_host_ms
        loads: list[Copy] = []
        rows: list[str] = []
        if self._restores:
            most = self.budget.restores(left_ms, self._restores.left)
            loads, rows = self._restores.next(most, self._events + 1)
        stores, self._last_minute = self._last_minute, []
        left_ms -= len(loads) * self.budget.to_device_ms + len(stores) * self.budget.to_host_ms
        most = self.budget.saves(left_ms, self.memory.capacity)
        stores += self._next_stores(most if under_way or loads or stores else max(1, most))
        if not (loads or stores or self._restores):
            return NONE
        sent = Transfers()
        if loads:
            self._events += 1
            sent.load_event, sent.load_rows = self._events, rows
            sent.load_gpu_blocks = [copy.device for copy in loads]
            sent.load_cpu_blocks = [copy.host for copy in loads]
            self.counts.blocks_restored += len(loads)
        if stores:
            self._events += 1
            sent.store_event = self._events
            self._stores[sent.store_event] = stores
            sent.store_gpu_blocks = [copy.device for copy in stores]
            sent.store_cpu_blocks = [copy.host for copy in stores]
        sent.load_event_to_reqs = {event: list(names) for event, names in self._restores.awaited.items()}
        return sent

    def _budget_ms(self) -> float:
        """Time that copies may take beside the next iteration; infinite if no request computes."""
        if self.predicted_ms is not None or any(map(is_running, self._running.values())):
            return self.budget.beside(self.predicted_ms)
        return inf

    def _next_stores(self, budget: int) -> list[Copy]:
        """Blocks that the policy chose to copy."""
        pool = self._device
        if not self.on:
            return []
        free = pool.get_num_free_blocks()
        pressure = Pressure(pool.num_gpu_blocks, free, self.memory.room, budget, self.reserved_blocks)
        if not self.policy.wants_marks(pressure):
            return []
        marks = list(self._marks())
        self.policy.checkpoint(marks)
        left = {row.name: row.blocks for row in marks}  # no other block is computed, whatever the policy says
        stores: list[Copy] = []
        for name, blocks in self.policy.blocks_to_checkpoint(pressure).items():
            blocks = min(blocks, left.get(name, 0))
            if not blocks or budget <= 0:
                continue
            request = self._running[name]
            copies = self.saved.extend(request, self._block_ids(name), blocks, most=budget)
            budget -= len(copies)
            stores += self._begun(copies)
        return stores

    def _marks(self) -> Iterator[Marked]:
        """Yield rows with blocks to copy in eviction order: the last admitted first."""
        size, saved = self.block_tokens, self.saved
        for name, request in reversed(self._running.items()):
            if not has_kv(request) or not saveable(request):
                continue
            blocks = confirmed(request) // size - len(saved.blocks(name))
            if blocks > 0:
                yield Marked(name, blocks, is_online(request))

    def _begun(self, copies: list[Copy]) -> list[Copy]:
        """Hold both blocks of each copy until it ends, also if the row ends before; returns the copies."""
        self._device.touch([self._device.blocks[copy.device] for copy in copies])
        for copy in copies:
            self.memory.hold(copy.host)
        return copies

    # For the disk, between two iterations (`spill`).

    def gather(self) -> Gathered:
        """All full blocks of offline rows that are or soon will be in host memory, the longest row's first."""
        pending = {copy.host: copy.device for copies in self._stores.values() for copy in copies}
        pending |= {copy.host: copy.device for copy in self._last_minute}
        fresh: list[Copy] = []
        keys: dict[Hashable, int] = {}
        for request in sorted(self._spillable(), key=lambda one: one.num_tokens, reverse=True):
            name = request.request_id
            full = confirmed(request) // self.block_tokens - len(self.saved.blocks(name))
            if full > 0 and has_kv(request):
                fresh += self._begun(self.saved.extend(request, self._block_ids(name), full))
            for key, host in zip(self.saved.keys(request), self.saved.blocks(name), strict=False):
                if isinstance(key, bytes):
                    keys.setdefault(key, host)
        pending |= {copy.host: copy.device for copy in fresh}
        for host in keys.values():
            self.memory.hold(host)
        copies = [Copy(pending[host], host) for host in keys.values() if host in pending]
        return Gathered({str(key.hex()): host for key, host in keys.items()}, copies, fresh)  # type: ignore[attr-defined]

    def _spillable(self) -> Iterator[Request]:
        """Yield offline rows whose KV depends on their tokens alone, not on an adapter, which may be changed."""
        found = {**{request.request_id: request for request in self.saved.requests()}, **self._running}
        for request in found.values():
            if not is_online(request) and saveable(request) and request.lora_request is None:
                yield request

    # Ended copies.

    def arrived(self, report: WorkerReport | None, restored: Iterable[str], failed: Iterable[str]) -> None:
        """Take the workers' report after an iteration."""
        broken = set(failed)
        for name in restored:
            self._restores.end(name)
            if name in broken:
                self.counts.blocks_failed += self.saved.unusable(name)
        if report is None:
            return
        self.budget.learn(report.block_ms)
        self._failed_stores |= report.failed_stores
        for event, workers in report.completed_store_events.items():
            self._reports[event] = self._reports.get(event, 0) + workers
            if self._reports[event] >= self._workers:
                del self._reports[event]
                self.copied(self._stores.pop(event), failed=event in self._failed_stores)
                self.memory.release(self._thrown_away.pop(event, ()))
                self._failed_stores.discard(event)

    def copied(self, copies: Sequence[Copy], *, failed: bool) -> None:
        """Note that these blocks are in host memory, or failed to get there."""
        self._device.free_blocks([self._device.blocks[copy.device] for copy in copies])
        if failed:
            self.counts.blocks_failed += len(copies)
            self.saved.lost({copy.host for copy in copies})
        else:
            self.counts.blocks_saved += len(copies)
            for copy in copies:
                self.memory.written(copy.host)
        self.memory.release(copy.host for copy in copies)


def confirmed(request: Request) -> int:
    """Number of tokens whose KV is certainly computed: a row may yet leave the iterations in flight."""
    return max(0, int(request.num_computed_tokens - request.num_in_flight_tokens))


def saveable(request: Request) -> bool:
    """True if the row could continue from a checkpoint: not if it wants logits of its whole prompt."""
    return not request.skip_reading_prefix_cache
