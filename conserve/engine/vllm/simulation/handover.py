"""KV that goes from the engine of a prompt to the engine of its answer, by vLLM's protocol; no bytes move."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HandOver(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's half of a KV connector: blocks stay with the sender until the receiver has room for them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.leaving: set[str] = set()
        """Requests that go on in another engine once they have finished in this one."""
        self.brought: dict[str, int] = {}
        """Requests whose KV is in another engine, and its tokens."""
        self.taken: Callable[[str], None] = lambda name: None
        """Function that is told of a request that has got its KV."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens beyond those in this engine's cache; none for a request that lost its memory here."""
        return max(0, self.brought.get(request.request_id, 0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Note that a request has room here, so that its sender can free the blocks."""
        if self.brought.pop(request.request_id, None) is not None:
            self.taken(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Metadata with nothing in it: no worker loads or saves."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        """Keep the blocks of a request that goes on elsewhere."""
        leaves = request.request_id in self.leaving
        self.leaving.discard(request.request_id)
        return leaves, None

    # The workers' half, which no simulated worker calls.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
