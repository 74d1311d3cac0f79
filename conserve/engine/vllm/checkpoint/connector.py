"""vLLM's KV connector for checkpoints; `--kv-transfer-config` names it, alone or in a MultiConnector."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec

from conserve.engine.policy.checkpointing import ADAPTIVE, HOST_BYTES
from conserve.engine.runtime.copy_budget import BlockMs
from conserve.engine.vllm.checkpoint.blocks import SHARE, Checkpoints
from conserve.engine.vllm.checkpoint.copies import Copies
from conserve.engine.vllm.checkpoint.transfers import Transfers, WorkerReport
from conserve.engine.vllm.compat.internals import Part
from conserve.engine.vllm.compat.trial import lost_parts
from conserve.engine.vllm.compat.versions import internal
from conserve.engine.vllm.launching.flags import spans_machines
from conserve.engine.vllm.settings import CONNECTOR, CONNECTOR_ROLE, installed_times

log = logging.getLogger("vllm.conserve")
CacheHitSource = internal("vllm.v1.metrics.cache_hit_source.CacheHitSource")
WRONG_ROLE = (
    "kv_role of %s is %s: clients of a multimodal model may send embeddings, and evicted rows free their memory "
    'later; write "kv_role": "%s"'
)
USUAL_SPEED = 1e7  # assumed bytes per millisecond of copying, until it is measured
DEVICE_SHARE = 0.5  # share of an iteration's time for copies that do not use the memory it computes with


class CheckpointConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Passes vLLM's calls on to `Checkpoints` in the scheduler and to `Copies` in each worker.

    `kv_connector_extra_config` takes `policy`, `host_bytes` (of all workers together) and `spill` (a folder). If
    the model has other KV than that of full attention, nothing is checkpointed, and the log says so.
    """

    _cache_hit_source = CacheHitSource and CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        if role != KVConnectorRole.WORKER and self._kv_transfer_config.kv_role != CONNECTOR_ROLE:
            log.warning(WRONG_ROLE, CONNECTOR, self._kv_transfer_config.kv_role, CONNECTOR_ROLE)
        workers = vllm_config.parallel_config.world_size
        host_bytes = int(extra.get("host_bytes", HOST_BYTES)) // workers
        self.checkpoints: Checkpoints | None = None
        self.copies: Copies | None = None
        self._working: Copies | None = None  # the copies, if they have anything to do in this iteration
        self.why_not = why_not(vllm_config, kv_cache_config)
        if self.why_not is not None:
            log.warning("KV is not checkpointed: %s", self.why_not)
        elif role == KVConnectorRole.WORKER:
            self.copies = Copies(vllm_config, kv_cache_config, host_bytes)
        else:
            times = installed_times(vllm_config)
            usual_ms = 2 * [block_bytes(kv_cache_config) / USUAL_SPEED]
            block, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            self.checkpoints = Checkpoints(
                extra.get("policy", ADAPTIVE),
                host_blocks=max(1, host_bytes // block_bytes(kv_cache_config)),
                block_tokens=block,
                hashes_a_block=block // hashed,
                shared=bool(vllm_config.cache_config.enable_prefix_caching),
                workers=workers,
                block_ms=BlockMs(*((times and times.block_ms) or usual_ms)),
                share=SHARE if current_platform.is_cpu() else DEVICE_SHARE,
            )
            changed = lost_parts().get(Part.SPILL)
            if extra.get("spill") and changed is not None:
                log.warning("KV does not go to disk: vLLM has changed: %s", changed)
            elif extra.get("spill"):
                from conserve.engine.vllm.checkpoint.spill import Spilling

                self.checkpoints.spill = Spilling(
                    Path(extra["spill"]),
                    self.checkpoints,
                    vllm_config,
                    kv_cache_config,
                    block_bytes=block_bytes(kv_cache_config),
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: blocks that were not saved are computed again."""
        return False

    # In the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Bind the checkpoints to the scheduler's cache manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.checkpoints is not None:
            self.checkpoints.bind(
                kv_cache_manager.block_pool, lambda name: kv_cache_manager.get_block_ids(name)[0]
            )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that host memory has beyond the device's; vLLM restores them while other requests run."""
        tokens = self.checkpoints.matched(request, num_computed_tokens) if self.checkpoints is not None else 0
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin to restore a request that got its blocks, or note that it got them."""
        if self.checkpoints is None:
            return
        if num_external_tokens:
            self.checkpoints.restore(request, num_external_tokens)
        else:
            self.checkpoints.admitted(request)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """Copies for the workers to make beside this iteration."""
        return self.checkpoints.transfers() if self.checkpoints is not None else Transfers()

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' report of ended copies."""
        if self.checkpoints is not None:
            report = connector_output.kv_connector_worker_meta
            self.checkpoints.arrived(
                report if isinstance(report, WorkerReport) else None,
                connector_output.finished_recving or (),
                connector_output.failed_recving or (),
            )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; vLLM may free its blocks at once, except for the ones being copied."""
        if self.checkpoints is not None:
            self.checkpoints.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` for several KV cache groups, of which we support one."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """True if the engine should go on stepping while copies are under way."""
        return self.checkpoints is not None and self.checkpoints.copying

    def reset_cache(self) -> bool | None:
        """Forget all checkpoints; False while rows are being restored."""
        return self.checkpoints is None or self.checkpoints.reset()

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Set up host memory for this KV cache."""
        if self.copies is not None:
            self.copies.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin an iteration. vLLM's own note of the metadata stays empty, so that no layer asks for its KV."""
        copies = self.copies
        rests = copies is None or (connector_metadata.none and copies.rests)
        self._working = None if rests else copies
        if self._working is not None:
            self._working.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """End an iteration."""
        if self._working is not None:
            self._working.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the restores."""
        if self._working is not None:
            self._working.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no layer waits for a restore."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: KV is saved after the iteration that computes it."""

    def wait_for_save(self) -> None:
        """Begin to save blocks."""
        if self._working is not None:
            self._working.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Transfers that have ended."""
        if self._working is None:
            return KVConnectorTransferResults()
        return self._working.results(finished_req_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Restored rows, for callers that do not ask for failures."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Report of ended saves."""
        return self._working.build_connector_worker_meta() if self._working is not None else None

    def shutdown(self) -> None:
        """Stop copying when the process ends."""
        if self.copies is not None:
            self.copies.stop()


def why_not(config: Any, kv_cache_config: Any) -> str | None:
    """Reason that KV of this engine cannot be checkpointed; None if it can."""
    groups, parallel = kv_cache_config.kv_cache_groups, config.parallel_config
    reasons = {
        "its layers keep KV in different ways": len(groups) != 1,
        "its layers do not keep KV of the whole context": not all(
            isinstance(group.kv_cache_spec, FullAttentionSpec)
            and group.kv_cache_spec.sliding_window is None
            and group.kv_cache_spec.attention_chunk_size is None
            for group in groups
        ),
        "the pipeline is parallel": parallel.pipeline_parallel_size > 1,
        "its workers may be on other machines": spans_machines(config),
        "contexts are spread over workers": parallel.decode_context_parallel_size > 1,
        "tokens are speculated": config.speculative_config is not None,
    }
    return next((reason for reason, true in reasons.items() if true), None)


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one KV block on one worker, over all layers."""
    return int(max(1, kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks))
