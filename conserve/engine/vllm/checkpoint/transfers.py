"""What scheduler and workers tell each other about KV copies, on top of vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

from conserve.engine.runtime.copy_budget import BlockMs


@dataclass
class Transfers(SimpleCPUOffloadMetadata):  # type: ignore[misc]
    """What to copy beside an iteration, in blocks of the device ("gpu") and of host memory ("cpu").

    `load_event_to_reqs` names, for every load under way, the rows that are whole once it has ended.
    """

    load_rows: list[str] = field(default_factory=list)  # whose blocks this load brings, or some of them


@dataclass
class WorkerReport(SimpleCPUOffloadWorkerMetadata):  # type: ignore[misc]
    """Stores that have ended, each counted by its workers, and how long copies took."""

    failed_stores: set[int] = field(default_factory=set)  # of them
    block_ms: BlockMs = field(default_factory=BlockMs)  # what copying one has taken since the last report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both workers' reports as one."""
        assert isinstance(other, WorkerReport)
        counts = super().aggregate(other).completed_store_events
        failed = self.failed_stores | other.failed_stores
        return WorkerReport(counts, failed, self.block_ms.slower(other.block_ms))
