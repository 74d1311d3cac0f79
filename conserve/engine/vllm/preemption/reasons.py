"""Reasons for which rows stay in the iterations of an engine, by its configuration."""

from __future__ import annotations

from typing import Any

from conserve.engine.vllm.compat.internals import Part
from conserve.engine.vllm.compat.trial import lost_parts
from conserve.engine.vllm.launching.flags import ahead_under_v1, spans_machines
from conserve.engine.vllm.settings import CONNECTOR, WORKER

AHEAD_UNDER_V1 = "iterations are scheduled ahead under the V1 model runner (--async-scheduling)"


def connector_of(config: Any) -> str | None:
    """The name of the engine's KV connector."""
    transfer = config.kv_transfer_config
    return None if transfer is None else transfer.kv_connector


def why_not(config: Any) -> str | None:
    """Reason why no row can leave an iteration of this engine; None if rows can."""
    parallel, model = config.parallel_config, config.model_config
    changed = lost_parts().get(Part.LEAVING)
    reasons = {
        f"vLLM has changed: {changed}": changed is not None,
        "the worker is not ConServe's (--worker-cls)": parallel.worker_cls != WORKER,
        "the pipeline is parallel": parallel.pipeline_parallel_size > 1,
        "its workers may be on other machines": spans_machines(config),
        # Without experts, vLLM's data parallel engines are independent, and know of no others.
        "data parallel engines wait for each other": parallel.data_parallel_size > 1 and model.is_moe,
        "tokens are speculated": config.speculative_config is not None,
        "another KV connector takes part": connector_of(config) not in (None, CONNECTOR),
        # A refused iteration would have entered images into vLLM's books that no worker has brought.
        "another engine encodes (--ec-transfer-config)": config.ec_transfer_config is not None,
        "its state is not only KV blocks": model.is_hybrid or model.is_attention_free,
        "it has an encoder": model.is_encoder_decoder,
        "it does not generate": model.runner_type != "generate",
        # The last: where another applies, vLLM schedules ahead by its own choice.
        AHEAD_UNDER_V1: ahead_under_v1(config),
    }
    return next((reason for reason, true in reasons.items() if true), None)
