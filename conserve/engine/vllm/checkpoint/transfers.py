"""Messages between scheduler and workers about KV copies, on top of vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

from conserve.engine.runtime.copy_budget import BlockMs


@dataclass
class Transfers(SimpleCPUOffloadMetadata):  # type: ignore[misc]
    """Copies to make beside an iteration, in blocks of the device ("gpu") and of host memory ("cpu").

    `load_event_to_reqs` names, for every load under way, the rows that are complete once it has ended.
    """

    load_rows: list[str] = field(default_factory=list)  # rows of which this load restores blocks

    @property
    def none(self) -> bool:
        """True if nothing is to be copied, and no load is under way."""
        return self.load_event < 0 and self.store_event < 0 and not self.load_event_to_reqs

    def __reduce__(self) -> tuple[Any, ...] | str:
        """A message without copies is short: it goes to the workers beside most iterations."""
        return (Transfers, ()) if self.none else super().__reduce__()


@dataclass
class WorkerReport(SimpleCPUOffloadWorkerMetadata):  # type: ignore[misc]
    """Saves that have ended, each with the number of workers, and the times of copies."""

    failed_stores: set[int] = field(default_factory=set)  # the ones that failed
    block_ms: BlockMs = field(default_factory=BlockMs)  # time of copying one block since the last report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Merge the reports of two workers."""
        assert isinstance(other, WorkerReport)
        counts = super().aggregate(other).completed_store_events
        failed = self.failed_stores | other.failed_stores
        return WorkerReport(counts, failed, self.block_ms.slower(other.block_ms))
