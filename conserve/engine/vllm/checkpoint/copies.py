"""The workers' half of KV checkpoints: host memory, and copies between it and the device.

vLLM's offloading worker finds the KV cache's regions and pins host memory. Copies go on CUDA streams (`streams`).
A CPU engine has no streams, so a thread copies there.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from conserve.engine.runtime.copy_budget import BlockMs
from conserve.engine.runtime.copy_thread import Copied, CopyThread, Region
from conserve.engine.vllm.checkpoint.streams import ByStreams
from conserve.engine.vllm.checkpoint.transfers import Transfers, WorkerReport

log = logging.getLogger("vllm.conserve")


class Copies(SimpleCPUOffloadWorker):  # type: ignore[misc]
    """Makes the copies of `Transfers` and reports the ones that have ended.

    A failed copy makes its target useless; all later copies are still made.
    """

    cpu_kv_caches: dict[str, torch.Tensor] | None
    _backend: Any
    _completed_store_events: dict[int, int]
    _pending_load_event_indices: set[int]
    _pending_store_event_indices: set[int]
    _store_hwm: int
    _load_hwm: int

    def __init__(self, vllm_config: Any, kv_cache_config: Any, host_bytes: int) -> None:
        super().__init__(vllm_config, kv_cache_config, host_bytes)
        self._failed_stores: set[int] = set()  # to be reported
        self._rows_of: dict[int, list[str]] = {}  # rows of loads under way
        self._broken: set[str] = set()  # rows whose restore failed in part
        self._load_targets_free: torch.Event | None = None
        self.writing: Any = None  # the shard being written to disk (`spill`), if any

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the regions of the KV cache and set up host memory of the same shape."""
        cache = next(iter(kv_caches.values()), None)
        if cache is None or cache.device.type != "cpu":
            super().register_kv_caches(kv_caches)
            return
        cuda, torch.cuda.Stream = torch.cuda.Stream, NoStream
        try:
            super().register_kv_caches(kv_caches)
        finally:
            torch.cuda.Stream = cuda

    def _init_cpu_mode(
        self, unique_gpu_caches: dict[str, torch.Tensor], block_bytes: int, device: Any
    ) -> None:
        if device.type != "cpu":
            super()._init_cpu_mode(unique_gpu_caches, block_bytes, device)
            self._backend.shutdown()  # its thread has nothing to do yet
            self._backend = ByStreams()
            self._backend.init(
                unique_gpu_caches, self.cpu_kv_caches, device, self.load_stream, self.store_stream
            )
            return
        # Not zeroed: the kernel provides zeroed pages when they are first written.
        self.cpu_kv_caches = {
            name: torch.empty((self.num_cpu_blocks, *cache.shape[1:]), dtype=cache.dtype)
            for name, cache in unique_gpu_caches.items()
        }
        self._backend = ByThread(unique_gpu_caches, self.cpu_kv_caches)

    @property
    def rests(self) -> bool:
        """True if no copy is under way, and none has ended since the last report."""
        under_way = self._pending_load_event_indices or self._pending_store_event_indices
        return not (under_way or self._completed_store_events or self._failed_stores or self._broken)

    def bind_connector_metadata(self, metadata: Transfers) -> None:
        """Begin an iteration; a CPU engine starts its copies here, since its computing is not queued."""
        super().bind_connector_metadata(metadata)
        if metadata.load_event >= 0:
            self._rows_of[metadata.load_event] = metadata.load_rows
        if isinstance(self._backend, ByThread):
            super().start_load_kv()
            if metadata.store_gpu_blocks:
                self._backend.launch_copy(
                    metadata.store_gpu_blocks,
                    metadata.store_cpu_blocks,
                    is_store=True,
                    event_idx=metadata.store_event,
                    events_list=self._store_events,
                )

    def start_load_kv(self) -> None:
        """Queue the loads behind the iteration: earlier work may still read the blocks that they fill."""
        metadata = self._connector_metadata
        if isinstance(self._backend, ByThread) or metadata is None or not metadata.load_cpu_blocks:
            return
        assert self._backend is not None
        if self._load_targets_free is None:
            self._load_targets_free = torch.Event()
        self._load_targets_free.record(torch.cuda.current_stream())
        self._backend.launch_copy(
            metadata.load_cpu_blocks,
            metadata.load_gpu_blocks,
            is_store=False,
            event_idx=metadata.load_event,
            events_list=self._load_events,
            wait_event=self._load_targets_free,
        )

    def wait_for_save(self) -> None:
        """Queue the saves behind the iteration on a device; a CPU engine's saves are under way already."""
        if not isinstance(self._backend, ByThread):
            super().wait_for_save()

    def handle_preemptions(self, kv_connector_metadata: Transfers) -> None:
        """Nothing: the scheduler keeps the blocks of a copy until it has ended."""

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        """Rows that have been restored, and the ones among them whose KV must not be used."""
        restored = set(self.get_finished(finished)[1] or ())
        broken = restored & self._broken
        self._broken -= restored
        return KVConnectorTransferResults(finished_recving=restored, failed_recving=broken)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Copies that have ended since the last report."""
        block_ms = self._backend.block_ms()
        ended, self._completed_store_events = self._completed_store_events, {}
        if not ended and block_ms == BlockMs():
            return None
        failed = self._failed_stores & ended.keys()
        self._failed_stores -= failed
        return WorkerReport(ended, failed, block_ms)

    def _poll_stream_events(self, is_store: bool) -> int:
        """The last transfer that has ended with all before it; failed ones are noted."""
        events = self._store_events if is_store else self._load_events
        last = self._store_hwm if is_store else self._load_hwm
        while events and events[0][1].query():
            last, done = events.pop(0)
            if done.failed:
                self._note_failure(last, is_store)
            self._rows_of.pop(last, None)
        if is_store:
            self._store_hwm = last
        else:
            self._load_hwm = last
        return last

    def _note_failure(self, event: int, is_store: bool) -> None:
        if is_store:
            self._failed_stores.add(event)
        else:
            self._broken.update(self._rows_of.pop(event, ()))

    def stop(self) -> None:
        """Stop copying."""
        if self._backend is not None:
            self._backend.shutdown()


class ByThread:
    """Stands in for vLLM's DMA copies on an engine whose device is the host."""

    def __init__(self, device: dict[str, torch.Tensor], host: dict[str, torch.Tensor]) -> None:
        self.thread = CopyThread([*map(region, device.values())], [*map(region, host.values())])
        self._reported: tuple[Copied, ...] = (Copied(), Copied())

    def block_ms(self) -> BlockMs:
        """Time of copying one block in each direction since the last call."""
        now = (self.thread.stored, self.thread.loaded)
        pairs = list(zip(now, self._reported, strict=True))
        # A clock may not tick during one transfer: then its blocks are reported with those of the next.
        times = [copied.block_ms_since(before) or None for copied, before in pairs]
        self._reported = tuple(
            before if ms is None else copied for ms, (copied, before) in zip(times, pairs, strict=True)
        )
        return BlockMs(*times)

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Queue a copy behind all earlier ones."""
        events_list.append((event_idx, self.thread.copy(src_blocks, dst_blocks, is_store=is_store)))

    def shutdown(self) -> None:
        """Stop the thread."""
        self.thread.stop()


class NoStream:
    """Stands in for a CUDA stream on a CPU engine."""

    def __init__(self, priority: int = 0) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Range of the streams' priorities: there is one priority."""
        return 0, 0


def region(cache: torch.Tensor) -> Region:
    """First address of a region and the size of its blocks, which are its first dimension."""
    assert cache.stride(0) * cache.element_size() == cache[0].nbytes or cache.shape[0] == 1
    return Region(cache.data_ptr(), cache[0].nbytes)
