"""The workers' half of KV checkpoints on simulated time: copies take time, and no bytes move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput

from conserve.engine.policy.checkpointing import ADAPTIVE
from conserve.engine.runtime.copy_budget import BlockMs
from conserve.engine.vllm.checkpoint.transfers import Transfers, WorkerReport
from conserve.engine.vllm.settings import CONNECTOR, CONNECTOR_MODULE, CONNECTOR_ROLE
from conserve.engine.vllm.simulation.bare import block_bytes

SLOWS = 0.36  # part of the copies' time by which they lengthen an iteration: 1.8 % of it for 5 % of its time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """Host memory for copies of KV blocks, and the time of copying a block in each direction."""

    blocks: int
    block_ms: float


def checkpointing(copies: HostCopies, block_size: int) -> KVTransferConfig:
    """vLLM's configuration of the connector that `conserve serve` gives an engine."""
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role=CONNECTOR_ROLE,
        kv_connector_extra_config={
            "policy": ADAPTIVE,
            "host_bytes": copies.blocks * block_bytes(block_size),
        },
    )


def blocks_of(transfers: Any) -> int:
    """Number of blocks that are copied beside an iteration, in either direction; 0 without checkpoints."""
    if not isinstance(transfers, Transfers):
        return 0
    return len(transfers.load_cpu_blocks) + len(transfers.store_cpu_blocks)


class SimulatedCopies:
    """Makes the copies of each iteration; they end with it."""

    def __init__(self, copies: HostCopies) -> None:
        self._block_ms = copies.block_ms

    def ends_s(self, transfers: Transfers, began_s: float, computed_s: float) -> float:
        """Time at which an iteration and its copies have ended; `computed_s` is when it would have without them."""
        copy_s = self._block_ms * blocks_of(transfers) / 1e3
        return max(computed_s + SLOWS * copy_s, began_s + copy_s)

    def report(self, transfers: Transfers) -> KVConnectorOutput | None:
        """The worker's report of these copies, which have ended; None if there were none."""
        if transfers.load_event < 0 and transfers.store_event < 0:
            return None
        loaded, stored = transfers.load_event >= 0, transfers.store_event >= 0
        restored = transfers.load_event_to_reqs.get(transfers.load_event, ()) if loaded else ()
        return KVConnectorOutput(
            finished_recving=set(restored) or None,
            kv_connector_worker_meta=WorkerReport(
                {transfers.store_event: 1} if stored else {},
                set(),
                BlockMs(self._block_ms if stored else None, self._block_ms if loaded else None),
            ),
        )
