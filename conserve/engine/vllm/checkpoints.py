"""The scheduler's side of KV checkpoints: what host memory has of which row, and what is copied next.

A row's checkpoint is a list of host blocks, one for each of its full KV blocks from the first on, and one more for
the last, partly filled block of a row that was preempted. The bytes are copied by the workers (`copies`), between
iterations' computing; what an iteration has not confirmed is never copied. Source: conserve-2026 section 4.4,
conserve-2024 section 4.4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from math import inf
from typing import Any, NamedTuple

from vllm.v1.request import Request

from conserve.engine.policy.checkpointing import OFF, Marked, Pressure, policy_named
from conserve.engine.runtime.copy_budget import BlockMs, CopyBudget
from conserve.engine.runtime.host_memory import HostMemory
from conserve.engine.vllm.lanes import is_online, is_running
from conserve.engine.vllm.restores import Copy, Restores
from conserve.engine.vllm.transfers import Transfers, WorkerReport

log = logging.getLogger("vllm.conserve")
SHARE = 0.05  # of an iteration's time that copies beside it may take; they make it 1.8 % longer
LAST_MINUTE = 2  # blocks that are copied while their row is preempted already; they are free a moment later


class Gathered(NamedTuple):
    """What is to go to disk."""

    hosts: dict[str, int]  # by key, in hexadecimal, what is worth most first; each held once for this
    copies: list[Copy]  # that are to be made before, some of which others have asked for too
    fresh: list[Copy]  # of them, those that nobody else has asked for: to be given to `copied`


@dataclass(slots=True)
class Checkpoint:
    """What host memory has of one row, or is about to have."""

    request: Request
    blocks: list[int] = field(default_factory=list)  # host blocks, each held once for this row
    tail: int | None = None  # host block of the block after those
    tail_tokens: int = 0  # in it
    whole: int = 0  # blocks known to have arrived: only ever grows, but for failures


@dataclass(slots=True)
class Counts:
    """Since the engine started."""

    blocks_saved: int = 0
    blocks_restored: int = 0
    tokens_restored: int = 0
    restores: int = 0
    blocks_failed: int = 0  # copies that did not succeed
    blocks_refused: int = 0  # host memory was full


class Checkpoints:
    """Host memory's contents by row, and the transfers under way.

    Called by vLLM through the connector, always between two iterations.
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
        self.name, self.policy = policy, policy_named(policy)
        self.memory = HostMemory(host_blocks)
        self.block_tokens = block_tokens
        self.budget = CopyBudget(block_ms, share)
        self._hashes_a_block = hashes_a_block
        self._shared = shared  # rows may use what others computed for the same tokens
        self.counts = Counts()
        self.spill: Any = None  # what takes it to disk (`spill.Spilling`), if anything
        self.on, self.why_off = True, "it is switched off"
        self.predicted_ms: float | None = None  # of the iteration to come; None where nobody predicts
        self.allowed: Collection[str] | None = None  # rows whose restore may begin; None: any
        self.reserved_blocks = 0  # of the device's free ones, for live requests to come
        self._device: Any = None  # vLLM's block pool
        self._block_ids: Callable[[str], Sequence[int]] = lambda name: ()
        self._workers = workers
        self._rows: dict[str, Checkpoint] = {}
        self._running: dict[str, Request] = {}  # with KV blocks, as far as we were told
        self._restores = Restores()
        self._events = 0
        self._stores: dict[int, list[Copy]] = {}
        self._reports: dict[int, int] = {}  # store -> workers that have reported it
        self._failed_stores: set[int] = set()  # reported so by one of them
        self._local: dict[str, int] = {}  # tokens that the device had of rows that may be restored
        self._last_minute: list[Copy] = []

    def bind(self, device: Any, block_ids: Callable[[str], Sequence[int]]) -> None:
        """Give it vLLM's block pool, and a row's block ids by its name."""
        self._device, self._block_ids = device, block_ids

    # Who is here.

    def admitted(self, request: Request) -> None:
        """It has KV blocks now."""
        self._running[request.request_id] = request

    def losing(self, request: Request) -> None:
        """It is being preempted: save the last of what it has, if that is little."""
        name = request.request_id
        if self._running.pop(name, None) is None or not self.on or not saveable(request):
            return
        computed = confirmed(request)
        full, tail_tokens = divmod(computed, self.block_tokens)
        checkpoint = self._rows.get(name) or Checkpoint(request)
        have = len(checkpoint.blocks)
        if full - have + bool(tail_tokens) > LAST_MINUTE or have > full:
            return
        self._rows[name] = checkpoint
        ids = self._block_ids(name)
        self._last_minute += self._extend(checkpoint, ids, full - have)
        if tail_tokens and len(checkpoint.blocks) == full:
            host = self.memory.allocate((name, computed))
            if host is None:
                self.counts.blocks_refused += 1
                return
            checkpoint.tail, checkpoint.tail_tokens = host, tail_tokens
            self._last_minute.append(self._begun(Copy(ids[full], host)))

    def has_all_of(self, name: str) -> bool:
        """Whether a running row would lose nothing with its memory; see `losing`."""
        request = self._running.get(name)
        if request is None or name not in self._rows or not self.on:
            return False
        return confirmed(request) - self.saved_tokens(name) < LAST_MINUTE * self.block_tokens

    def finished(self, request: Request) -> None:
        """It is over, one way or another."""
        name = request.request_id
        self._running.pop(name, None)
        self._local.pop(name, None)
        self._forget(name)
        self._restores.cancel(name)

    def _forget(self, name: str) -> None:
        checkpoint = self._rows.pop(name, None)
        if checkpoint is not None:
            self._drop_tail(checkpoint)
            # The beginning of a row is worth most to others, so its end goes first.
            self.memory.release(reversed(checkpoint.blocks))

    def _drop_tail(self, checkpoint: Checkpoint) -> None:
        if checkpoint.tail is not None:
            self.memory.forget(checkpoint.tail)
            self.memory.release([checkpoint.tail])
            checkpoint.tail, checkpoint.tail_tokens = None, 0

    # What there is of a row.

    def saved_tokens(self, name: str) -> int:
        """How many of the row's first tokens host memory has."""
        checkpoint = self._rows.get(name)
        if checkpoint is None:
            return 0
        written, blocks = self.memory.is_written, checkpoint.blocks
        while checkpoint.whole < len(blocks) and written(blocks[checkpoint.whole]):
            checkpoint.whole += 1
        tokens = checkpoint.whole * self.block_tokens
        if checkpoint.whole == len(blocks) and checkpoint.tail is not None and written(checkpoint.tail):
            tokens += checkpoint.tail_tokens
        return tokens

    def is_being_saved(self, name: str) -> bool:
        """Whether a row that waits should wait a moment longer: the last of its KV is being copied."""
        checkpoint = self._rows.get(name)
        if checkpoint is None or name in self._running:
            return False
        self.saved_tokens(name)  # looks what has arrived
        tail = checkpoint.tail is not None and not self.memory.is_written(checkpoint.tail)
        return tail or checkpoint.whole < len(checkpoint.blocks)

    def restorable(self, request: Request, local: int) -> int:
        """Tokens after the first `local` ones, which the device has, that need not be computed again.

        A row that was never here finds what others left behind, if its KV would be the same.
        """
        if not self.on or not saveable(request) or local % self.block_tokens:
            return 0
        name = request.request_id
        if self._shared and name not in self._rows and not is_online(request):
            self._adopt(request)
        tokens = min(self.saved_tokens(name), request.num_tokens - 1) - local
        return tokens if tokens >= min(self.block_tokens, max(1, self._tail_tokens(name))) else 0

    def _tail_tokens(self, name: str) -> int:
        checkpoint = self._rows.get(name)
        return checkpoint.tail_tokens if checkpoint is not None else 0

    def _adopt(self, request: Request) -> None:
        """Hold what host memory has of the tokens that this row begins with."""
        found = []
        each = self._hashes_a_block
        for key in islice(request.block_hashes, each - 1, None, each):
            host = self.memory.find(key)
            if host is None or not self.memory.is_written(host):
                break
            found.append(host)
        if not found:
            return
        for host in found:
            self.memory.hold(host)
        self._rows[request.request_id] = Checkpoint(request, found)

    def reset(self) -> bool:
        """Forget all; False where rows are on their way back. What is being saved is of no use any more."""
        if self._restores:
            return False
        for name in list(self._rows):
            self._forget(name)
        self._failed_stores |= self._stores.keys()
        late, self._last_minute = self._last_minute, []
        self._device.free_blocks([self._device.blocks[copy.device] for copy in late])
        for copy in late:
            self.memory.forget(copy.host)
        self.memory.release(copy.host for copy in late)
        self.memory.clear()
        return True

    @property
    def any_saved(self) -> bool:
        """Whether some row has a checkpoint."""
        return bool(self._rows)

    # Restores.

    def matched(self, request: Request, local: int) -> int | None:
        """The same as `restorable`, asked by vLLM, which then gives the row blocks: none if it is not to begin.

        None if vLLM should ask again later.
        """
        name = request.request_id
        if self.on and self.is_being_saved(name):
            return None
        if self.allowed is not None and name not in self.allowed:
            return 0
        self._local[name] = local
        return self.restorable(request, local)

    def restore(self, request: Request, tokens: int) -> None:
        """vLLM has given the row blocks: bring back so many tokens after those that the device has."""
        name = request.request_id
        checkpoint, local = self._rows[name], self._local.pop(name)
        first, last = local // self.block_tokens, -(-(local + tokens) // self.block_tokens)
        sources = checkpoint.blocks[first:last]
        if len(sources) < last - first:
            assert checkpoint.tail is not None
            sources = [*sources, checkpoint.tail]
        targets = self._block_ids(name)[first:last]
        keys = frozenset(islice(self._keys(request, first), last - first))
        self._restores.begin(name, map(Copy, targets, sources), keys)
        self.counts.restores += 1
        self.counts.tokens_restored += tokens

    @property
    def coming(self) -> frozenset[Hashable]:
        """What names the blocks that are on their way back."""
        return self._restores.keys

    @property
    def copying(self) -> bool:
        """Whether something is being saved, or is about to be."""
        return bool(self._stores or self._last_minute)

    def report(self) -> dict[str, Any]:
        """What was done since the engine started; tokens, blocks, and the time of a block's copy."""
        return {
            "policy": self.name if self.on else OFF,
            "why_off": None if self.on else self.why_off,
            **asdict(self.counts),
            "tokens_saved": self.counts.blocks_saved * self.block_tokens,
            "restoring": len(self._restores),
            "host_blocks": self.memory.capacity,
            "host_used": self.memory.used,
            "block_ms": {"to_host": self.budget.to_host_ms, "to_device": self.budget.to_device_ms},
            "spill": self.spill.report() if self.spill is not None else None,
        }

    # Transfers: once an iteration.

    def transfers(self) -> Transfers:
        """What the workers are to copy beside the iteration that was just scheduled."""
        under_way = sum(map(len, self._stores.values()))
        left_ms = self._budget_ms() - under_way * self.budget.to_host_ms
        most = self.budget.restores(left_ms, self._restores.left)
        loads, rows = self._restores.next(most, self._events + 1)
        stores, self._last_minute = self._last_minute, []
        left_ms -= len(loads) * self.budget.to_device_ms + len(stores) * self.budget.to_host_ms
        most = self.budget.saves(left_ms, self.memory.capacity)
        stores += self._next_stores(most if under_way or loads or stores else max(1, most))
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
        """What copies may take beside the iteration to come; without end where nobody computes."""
        if self.predicted_ms is not None or any(map(is_running, self._running.values())):
            return self.budget.beside(self.predicted_ms)
        return inf

    def _next_stores(self, budget: int) -> list[Copy]:
        """Blocks that the policy wants to have copied."""
        pool = self._device
        if not self.on:
            return []
        free = pool.get_num_free_blocks()
        pressure = Pressure(pool.num_gpu_blocks, free, self.memory.room, budget, self.reserved_blocks)
        try:
            if not self.policy.wants_marks(pressure):
                return []
            self.policy.checkpoint(list(self._marks()))
            chosen = self.policy.blocks_to_checkpoint(pressure)
        except Exception:  # a class of the user's must not end the engine
            log.exception("KV is not checkpointed any more: the policy %s failed", self.name)
            self.on, self.why_off = False, f"the policy {self.name} failed"
            return []
        stores: list[Copy] = []
        for name, blocks in chosen.items():
            request = self._running.get(name)
            if request is None or budget <= 0:
                continue
            checkpoint = self._rows.get(name)
            if checkpoint is None:
                checkpoint = self._rows[name] = Checkpoint(request)
            copies = self._extend(checkpoint, self._block_ids(name), blocks, most=budget)
            budget -= len(copies)
            stores += copies
        return stores

    def _marks(self) -> Iterator[Marked]:
        """Rows with blocks to copy, the last admitted first: they would be preempted first."""
        size, rows = self.block_tokens, self._rows
        for name, request in reversed(self._running.items()):
            if not is_running(request) or not saveable(request):
                continue
            checkpoint = rows.get(name)
            blocks = confirmed(request) // size - (len(checkpoint.blocks) if checkpoint is not None else 0)
            if blocks > 0:
                yield Marked(name, blocks, is_online(request))

    def _extend(
        self, checkpoint: Checkpoint, ids: Sequence[int], blocks: int, most: int | None = None
    ) -> list[Copy]:
        """Add so many of the row's next blocks to its checkpoint; what others have copied is shared."""
        copies: list[Copy] = []
        self._drop_tail(checkpoint)
        first = len(checkpoint.blocks)
        keys = self._keys(checkpoint.request, first)
        for device, key in islice(zip(ids[first:], keys, strict=False), blocks):
            host = self.memory.find(key)
            if host is not None:
                self.memory.hold(host)
            else:
                if most is not None and len(copies) >= most:
                    break
                host = self.memory.allocate(key)
                if host is None:
                    self.counts.blocks_refused += 1
                    break
                copies.append(self._begun(Copy(device, host)))
            checkpoint.blocks.append(host)
        return copies

    def _keys(self, request: Request, first: int) -> Iterator[Hashable]:
        """What names the contents of a row's blocks: the hash of all tokens up to their end, where vLLM has it."""
        hashes = request.block_hashes if self._shared else ()
        each = self._hashes_a_block
        for index in count(first):
            last = (index + 1) * each - 1
            yield hashes[last] if last < len(hashes) else (request.request_id, index)

    def _begun(self, copy: Copy) -> Copy:
        """The same, with both blocks kept for the copy, whatever becomes of the row."""
        self._device.touch([self._device.blocks[copy.device]])
        self.memory.hold(copy.host)
        return copy

    # For the disk, between two iterations (`spill`).

    def gather(self) -> Gathered:
        """All full blocks of offline rows, in host memory or about to be: the longest row's first."""
        pending = {copy.host: copy.device for copies in self._stores.values() for copy in copies}
        pending |= {copy.host: copy.device for copy in self._last_minute}
        fresh: list[Copy] = []
        keys: dict[Hashable, int] = {}
        for request in sorted(self._spillable(), key=lambda one: one.num_tokens, reverse=True):
            checkpoint = self._rows.get(request.request_id) or Checkpoint(request)
            full = confirmed(request) // self.block_tokens - len(checkpoint.blocks)
            if full > 0 and is_running(request):
                fresh += self._extend(checkpoint, self._block_ids(request.request_id), full)
                self._rows[request.request_id] = checkpoint
            for key, host in zip(self._keys(request, 0), checkpoint.blocks, strict=False):
                if isinstance(key, bytes):
                    keys.setdefault(key, host)
        pending |= {copy.host: copy.device for copy in fresh}
        for host in keys.values():
            self.memory.hold(host)
        copies = [Copy(pending[host], host) for host in keys.values() if host in pending]
        return Gathered({str(key.hex()): host for key, host in keys.items()}, copies, fresh)  # type: ignore[attr-defined]

    def _spillable(self) -> Iterator[Request]:
        """Offline rows whose KV is their tokens' and no adapter's, which may be another next time."""
        found = {**{name: row.request for name, row in self._rows.items()}, **self._running}
        for request in found.values():
            if not is_online(request) and saveable(request) and request.lora_request is None:
                yield request

    def returned(self, keys: Sequence[str]) -> list[int]:
        """Host blocks to read what was gathered once into, as many as there are; each held once."""
        hosts: list[int] = []
        for key in map(bytes.fromhex, keys):
            host = self.memory.allocate(key) if self.memory.find(key) is None and self.memory.room else None
            if host is None:
                break
            hosts.append(host)
        return hosts

    # What has arrived.

    def arrived(self, report: WorkerReport | None, restored: Iterable[str], failed: Iterable[str]) -> None:
        """The workers' report after an iteration."""
        broken = set(failed)
        for name in restored:
            self._restores.end(name)
            if name in broken:
                self._unusable(name)
        if report is None:
            return
        self.budget.learn(report.block_ms)
        self._failed_stores |= report.failed_stores
        for event, workers in report.completed_store_events.items():
            self._reports[event] = self._reports.get(event, 0) + workers
            if self._reports[event] >= self._workers:
                del self._reports[event]
                self.copied(self._stores.pop(event), failed=event in self._failed_stores)
                self._failed_stores.discard(event)

    def _unusable(self, name: str) -> None:
        """The row's checkpoint did not come back; it is computed again, and nobody else shall find it."""
        checkpoint = self._rows.get(name)
        if checkpoint is not None:
            self.counts.blocks_failed += len(checkpoint.blocks)
            for host in checkpoint.blocks:
                self.memory.forget(host)
            self._forget(name)

    def copied(self, copies: Sequence[Copy], *, failed: bool) -> None:
        """These blocks are in host memory, or will never be."""
        self._device.free_blocks([self._device.blocks[copy.device] for copy in copies])
        if failed:
            self.counts.blocks_failed += len(copies)
            self._lost({copy.host for copy in copies})
        else:
            self.counts.blocks_saved += len(copies)
            for copy in copies:
                self.memory.written(copy.host)
        self.memory.release(copy.host for copy in copies)

    def _lost(self, hosts: set[int]) -> None:
        """These blocks were not written: every checkpoint ends before them."""
        for checkpoint in self._rows.values():
            if checkpoint.tail in hosts:
                self._drop_tail(checkpoint)
            index = next((i for i, host in enumerate(checkpoint.blocks) if host in hosts), None)
            if index is not None:
                self._drop_tail(checkpoint)
                for host in checkpoint.blocks[index:]:
                    if host in hosts:
                        self.memory.forget(host)
                self.memory.release(reversed(checkpoint.blocks[index:]))
                del checkpoint.blocks[index:]
                checkpoint.whole = min(checkpoint.whole, index)


def confirmed(request: Request) -> int:
    """Tokens whose KV is computed for certain."""
    return int(request.num_computed_tokens - request.num_output_placeholders)


def saveable(request: Request) -> bool:
    """Whether the row could go on from a checkpoint; not where logits of its whole prompt are wanted."""
    return not request.skip_reading_prefix_cache
