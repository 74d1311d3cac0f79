"""A world of rows, KV blocks and copies for the bookkeeping of checkpoints: all but the bytes is real."""

from __future__ import annotations

import random
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    from vllm.v1.request import RequestStatus

    from conserve.engine.vllm.checkpoint.blocks import Checkpoints
    from conserve.engine.vllm.checkpoint.transfers import Transfers, WorkerReport

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.runtime.copy_budget import BlockMs

SIZE = 4  # tokens of a block
DEVICE, HOST = 40, 30  # blocks
Content = tuple[str, int, int]  # whose tokens, which block of them, how many of them


@dataclass(eq=False)
class FakeRequest:
    """The part of a request that checkpoints read."""

    request_id: str
    stream: str  # rows of one stream have the same tokens
    num_tokens: int
    status: Any = RequestStatus.RUNNING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    priority: int = OFFLINE_PRIORITY
    skip_reading_prefix_cache: bool = False
    block_hashes: list[str] = field(default_factory=list)
    over: bool = False


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """The device: free blocks are overwritten at once."""

    def __init__(self) -> None:
        self.num_gpu_blocks = DEVICE
        self.blocks = [Block(number) for number in range(DEVICE)]
        self.content: dict[int, Content | None] = {}

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks)

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.content[block.block_id] = None

    def take(self, count: int) -> list[int]:
        free = [block for block in self.blocks if not block.ref_cnt][:count]
        self.touch(free)
        return [block.block_id for block in free]


class World:
    """Rows come, compute, lose their memory, come back and end; workers copy in their own time."""

    def __init__(self, seed: int, *, policy: str, shared: bool, workers: int = 1) -> None:
        self.dice = random.Random(seed)
        self.pool, self.shared, self.workers = Pool(), shared, workers
        self.checkpoints = Checkpoints(
            policy,
            host_blocks=HOST,
            block_tokens=SIZE,
            shared=shared,
            workers=workers,
            block_ms=BlockMs(1.0, 1.0),
        )
        self.ids: dict[str, list[int]] = {}
        self.checkpoints.bind(self.pool, self.ids.__getitem__)
        self.rows: dict[str, FakeRequest] = {}
        self.host: dict[int, Content | None] = {}
        self.queue: deque[tuple[Transfers, int]] = deque()  # and the step before which it is not done
        self.loaded: list[int] = []
        self.broken: set[str] = set()
        self.step_number = self.names = self.lost = self.restored = 0

    def step(self) -> None:
        self.step_number += 1
        dice = self.dice
        self._compute()
        if dice.random() < 0.4:
            self._arrive()
        running = [row for row in self.rows.values() if row.status == RequestStatus.RUNNING]
        if running and dice.random() < 0.3:
            self._lose(dice.choice(running))
        if self.rows and dice.random() < 0.1:
            self._end(dice.choice([row for row in self.rows.values() if not row.over] or [None]))
        self._restore()
        self.checkpoints.predicted_ms = dice.choice([None, 5.0, 50.0])
        sent = self.checkpoints.transfers()
        self.queue.append((sent, self.step_number + dice.choice([0, 0, 1, 3])))
        self._work(sent)

    def _arrive(self) -> None:
        blocks = self.dice.randint(1, 6)
        if self.pool.get_num_free_blocks() < blocks + 2:
            return
        self.names += 1
        name, stream = f"row{self.names}", f"stream{self.dice.randrange(4)}"
        row = FakeRequest(name, stream, blocks * SIZE + 1)
        self.rows[name], self.ids[name] = row, []
        self._hash(row)
        if self.checkpoints.matched(row, 0) == 0:  # type: ignore[arg-type]
            self._begin(row, blocks)
        else:
            row.status = RequestStatus.PREEMPTED

    def _hash(self, row: FakeRequest) -> None:
        full = row.num_tokens // SIZE
        row.block_hashes = [f"{row.stream}/{index}" for index in range(full)] if self.shared else []

    def _begin(self, row: FakeRequest, blocks: int) -> None:
        row.status, row.num_computed_tokens = RequestStatus.RUNNING, row.num_tokens - 1
        self.ids[row.request_id] = self.pool.take(blocks)
        self._write(row)
        self.checkpoints.admitted(row)  # type: ignore[arg-type]

    def _write(self, row: FakeRequest) -> None:
        for index, block in enumerate(self.ids[row.request_id]):
            filled = min(SIZE, row.num_computed_tokens - index * SIZE)
            self.pool.content[block] = (row.stream, index, filled)

    def _compute(self) -> None:
        for row in self.rows.values():
            if row.status != RequestStatus.RUNNING or row.over:
                continue
            ids = self.ids[row.request_id]
            if row.num_computed_tokens + 1 > len(ids) * SIZE:
                if not self.pool.get_num_free_blocks() or len(ids) > 10:
                    continue
                ids += self.pool.take(1)
            row.num_computed_tokens += 1
            row.num_tokens += 1
            self._hash(row)
            self._write(row)

    def _lose(self, row: FakeRequest) -> None:
        self.lost += 1
        self.checkpoints.evicting(row)  # type: ignore[arg-type]
        self._free(row)
        row.status, row.num_computed_tokens = RequestStatus.PREEMPTED, 0

    def _free(self, row: FakeRequest) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in self.ids[row.request_id]])
        self.ids[row.request_id] = []

    def _end(self, row: FakeRequest | None) -> None:
        if row is None:
            return
        row.over = True
        waits = row.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        self.checkpoints.finished(row)  # type: ignore[arg-type]
        if not waits:  # vLLM keeps the blocks of a restore until it is over
            self._free(row)
            del self.rows[row.request_id]

    def _restore(self) -> None:
        for row in self.rows.values():
            blocks = -(-(row.num_tokens - 1) // SIZE)
            if row.status != RequestStatus.PREEMPTED or self.pool.get_num_free_blocks() < blocks:
                continue
            tokens = self.checkpoints.matched(row, 0)  # type: ignore[arg-type]
            if tokens is None:
                continue
            if not tokens:
                self._begin(row, blocks)
                continue
            assert tokens < row.num_tokens
            self.ids[row.request_id] = self.pool.take(-(-tokens // SIZE))
            row.status, row.num_computed_tokens = RequestStatus.WAITING_FOR_REMOTE_KVS, tokens
            self.checkpoints.restore(row, tokens)  # type: ignore[arg-type]

    def _work(self, now: Transfers) -> None:
        """Do what is due, in order; what is copied is what lies there now."""
        stores: dict[int, int] = {}
        failed: set[int] = set()
        while self.queue and self.queue[0][1] <= self.step_number:
            sent, _ = self.queue.popleft()
            fails = self.dice.random() < 0.03
            if sent.store_event >= 0:
                stores[sent.store_event] = self.workers
                failed |= {sent.store_event} if fails else set()
                for here, there in zip(sent.store_gpu_blocks, sent.store_cpu_blocks, strict=True):
                    self.host[there] = None if fails else self.pool.content.get(here)
            if sent.load_event >= 0:
                self.loaded.append(sent.load_event)
                self.broken |= set(sent.load_rows) if fails else set()
                for here, there in zip(sent.load_cpu_blocks, sent.load_gpu_blocks, strict=True):
                    self.pool.content[there] = None if fails else self.host.get(here)
        back = {name for event in self.loaded for name in now.load_event_to_reqs.get(event, ())}
        self.loaded.clear()  # an event without a waiting row is never asked about again
        broken, self.broken = self.broken & back, self.broken - back
        self.checkpoints.arrived(WorkerReport(stores, failed), back, broken)
        for name in back:
            self._arrived(self.rows[name], usable=name not in broken)

    def _arrived(self, row: FakeRequest, *, usable: bool) -> None:
        if row.over:
            self._free(row)
            del self.rows[row.request_id]
            return
        if not usable:
            self._free(row)
            row.status, row.num_computed_tokens = RequestStatus.PREEMPTED, 0
            return
        self.restored += 1
        for index, block in enumerate(self.ids[row.request_id]):
            needed = min(SIZE, row.num_computed_tokens - index * SIZE)
            found = self.pool.content[block]
            assert found is not None
            assert found[:2] == (row.stream, index)
            assert found[2] >= needed
        missing = -(-(row.num_tokens - 1) // SIZE) - len(self.ids[row.request_id])
        if self.pool.get_num_free_blocks() < missing:
            self._lose_before_running(row)
            return
        self.ids[row.request_id] += self.pool.take(missing)
        row.status, row.num_computed_tokens = RequestStatus.RUNNING, row.num_tokens - 1
        self._write(row)
        self.checkpoints.admitted(row)  # type: ignore[arg-type]

    def _lose_before_running(self, row: FakeRequest) -> None:
        self._free(row)
        row.status, row.num_computed_tokens = RequestStatus.PREEMPTED, 0

    def finish(self) -> None:
        """All requests end; nothing is left."""
        for row in list(self.rows.values()):
            if not row.over:
                self._end(row)
        for _ in range(200):
            self.step_number += 1
            sent = self.checkpoints.transfers()
            self.queue.append((sent, self.step_number))
            self._work(sent)
        assert not self.rows
        checkpoints = self.checkpoints
        parts = [part for part in vars(checkpoints).values() if isinstance(part, dict | list | set)]
        assert not any(parts), parts
        assert not checkpoints.saved
        assert not checkpoints._restores
        assert not checkpoints._restores.awaited
        assert checkpoints.memory.room == HOST
        assert self.pool.get_num_free_blocks() == DEVICE
