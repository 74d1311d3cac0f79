"""KV copies on CUDA streams, as vLLM makes them: the device times each one, and one that fails ends no other."""

from __future__ import annotations

import functools
import logging
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.cuda_mem_ops import copy_blocks

from conserve.engine.runtime.copy_budget import BlockMs

log = logging.getLogger("vllm.conserve")


class StreamCopy:
    """One transfer; stands in for the CUDA event that vLLM records behind it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.failed = False
        self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._queued = False  # on its stream, as far as it got
        self._lost = False  # the stream takes nothing any more

    def query(self) -> bool:
        """True once the transfer has ended, also if it failed."""
        return self._queued and (self._lost or bool(self._ended.query()))

    @property
    def took_ms(self) -> float:
        """Time on the device, of a transfer that has ended; an idle stream waits for the host to prepare it."""
        return float(self._begun.elapsed_time(self._ended))

    def make(self, copy: Callable[[], object], stream: torch.cuda.Stream, after: Any) -> None:
        """Queue the copy on a stream, behind an event if there is one."""
        try:
            if after is not None:
                after.wait(stream)
            self._begun.record(stream)
            copy()
        except Exception:  # the rows are computed again, and the next copy may succeed
            log.exception("%d KV blocks could not be copied", self.blocks)
            self.failed = True
        try:
            self._ended.record(stream)  # a part of the blocks may be on the stream
        except Exception:
            log.exception("a CUDA stream for copies of KV blocks is lost")
            self.failed = self._lost = True
        self._queued = True


class ByStreams(DmaCopyBackend):  # type: ignore[misc]
    """vLLM's DMA copies and their thread."""

    def __init__(self) -> None:
        super().__init__()
        self._timed: dict[bool, deque[StreamCopy]] = {True: deque(), False: deque()}  # by `is_store`

    def block_ms(self) -> BlockMs:
        """Time of copying one block in each direction, by the transfers that have ended since the last call."""
        return BlockMs(to_host=self._block_ms(is_store=True), to_device=self._block_ms(is_store=False))

    def _block_ms(self, *, is_store: bool) -> float | None:
        timed, blocks, ms = self._timed[is_store], 0, 0.0
        while timed and timed[0].query():
            transfer = timed.popleft()
            if not transfer.failed:
                blocks, ms = blocks + transfer.blocks, ms + transfer.took_ms
        return ms / blocks if blocks else None

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Queue a copy behind all earlier ones of its direction."""
        transfer = StreamCopy(len(src_blocks))
        self._timed[is_store].append(transfer)
        events_list.append((event_idx, transfer))
        params = self._store_params if is_store else self._load_params
        stream = self._store_stream if is_store else self._load_stream
        copy = functools.partial(copy_blocks, src_blocks, dst_blocks, params)
        self._queue.put(functools.partial(transfer.make, copy, stream, wait_event))

    @staticmethod
    def _copy_loop(
        q: queue.SimpleQueue[Callable[[], object] | None], device: Any, load_stream: Any, store_stream: Any
    ) -> None:
        current_platform.set_device(device)
        while (make := q.get()) is not None:
            make()
