"""Calls between ConServe and vLLM: parameters, overriding classes, and habits without a name."""

from conserve.engine.vllm.compat.internals import Part

SIGNATURES: dict[Part, dict[str, str]] = {
    # Parameters by name. Behind "..." others may stand that need no value, and the named ones are among them.
    Part.ENGINE: {
        "AsyncLLM.from_vllm_config": "vllm_config, ..., disable_log_stats",
        "OutputProcessor.propagate_error": "self, e, ...",
    },
    Part.PROFILING: {
        "KVCacheManager.allocate_slots": "self, request, num_new_tokens, ...",
        "EngineCore.add_request": "self, request, ...",
        "EngineCore.collective_rpc": "self, method, ..., args",
    },
    Part.SCHEDULER: {
        "Scheduler._reserve_prefill_lookahead": "self, request, num_computed_tokens, num_new_tokens",
        "Scheduler._mamba_block_aligned_split": "self, request, num_new_tokens, ...",
        "Scheduler._try_schedule_encoder_inputs": (
            "self, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, ..."
        ),
        "Scheduler._is_blocked_waiting_status": "status",
        "Scheduler._handle_blocked_waiting_request": "self, request",
        "Scheduler._preempt_request": "self, request, timestamp, ..., drop_stale_output",
        "KVCacheManager.free": "self, request, ...",
        "KVCacheCoordinator.find_longest_cache_hit": "self, block_hashes, max_cache_hit_length, ...",
    },
    Part.SERVER: {
        "EngineCore.preprocess_add_request": "self, request",
        "GenerateBaseServing._get_priority": "request, raw_request",
        "GenerateBaseServing._get_session_id": "request, raw_request",
        "AsyncLLM.generate": "self, prompt, sampling_params, request_id, ..., priority, session_id",
    },
    Part.LEAVING: {
        "KVCacheManager.allocate_slots": "self, request, num_new_tokens, ..., delay_cache_blocks",
        "KVCacheManager.cache_blocks": "self, request, num_computed_tokens, ...",
    },
    Part.CHECKPOINTS: {
        "KVConnectorBase_V1.__init__": "self, vllm_config, role, kv_cache_config, ...",
        "SimpleCPUOffloadWorker.__init__": "self, vllm_config, kv_cache_config, cpu_capacity_bytes, ...",
        "DmaCopyBackend.init": "self, gpu_caches, cpu_caches, device, load_stream, store_stream",
        "vllm.v1.simple_kv_offload.cuda_mem_ops.copy_blocks": "src_block_ids, dst_block_ids, params, ...",
        "BlockPool.touch": "self, blocks, ...",
        "BlockPool.free_blocks": "self, ordered_blocks, ...",
        "KVCacheManager.get_block_ids": "self, request_id, ...",
        "vllm.v1.core.kv_cache_utils.resolve_kv_cache_block_sizes": "kv_cache_config, vllm_config, ...",
    },
    Part.SPILL: {
        "EngineCore.get_weight_version": "self, ...",
        "vllm.v1.core.kv_cache_utils.get_none_hash_seed": "...",
    },
}

OVERRIDING: dict[Part, tuple[str, ...]] = {
    # Our subclasses of vLLM's classes: an override takes what vLLM passes.
    Part.SCHEDULER: (
        "conserve.engine.vllm.scheduling.scheduler.Synchronous",
        "conserve.engine.vllm.scheduling.scheduler.Asynchronous",
        "conserve.engine.vllm.scheduling.lanes.Lanes",
        "conserve.engine.vllm.scheduling.prefixes.KeepingQueue",
    ),
    Part.LEAVING: (
        "conserve.engine.vllm.preemption.worker.Worker",
        "conserve.engine.vllm.preemption.outputs.Promised",
    ),
    Part.CHECKPOINTS: (
        "conserve.engine.vllm.checkpoint.connector.CheckpointConnector",
        "conserve.engine.vllm.checkpoint.copies.Copies",
        "conserve.engine.vllm.checkpoint.streams.ByStreams",
    ),
}

HABITS = {
    # No name stands for these: only tests find a change.
    "vllm.v1.core.sched.utils.check_stop": "its order of checks is repeated in continuation.py",
    "request.service_tier": "kept from a body, though a chat's class has no such field: the flex tier",
    "multiprocessing child named EngineCore*": "its id, so that it dies with us even when we are killed",
    "the lines of vLLM's log in phases.TOLD": "the step of a start, for the display",
    "a WAITING request with num_computed_tokens > 0": "is scheduled from there, as after a KV transfer",
    "Worker.execute_model and sample_tokens": "alternate",
    "Attention.impl.forward": "wrapped: safepoints where there are none between layers",
    "a decoder layer's forward": "wrapped: token-major tensors in, token-major tensors out",
    "V2 GPUModelRunner.execute_model": "has taken in which requests came and went when it calls prepare_inputs",
    "a request with num_stale_output_tokens": "loses what iterations in flight bring for it",
    "EngineCore.{conserve,conserve_delays,conserve_spill}": "added: utility calls that ask and tell our scheduler, "
    "and have the workers write and read",
    "vllm.{general,endpoint}_plugins": "the entry points through which vLLM loads us",
    "vllm.platform_plugins": "the entry points of its platforms, which `conserve serve` lets it load",
    "vllm.conserve": "our logger: what it says goes where vLLM's log goes",
    "app.state.engine_client": "the engine, in vLLM's API server",
    "args.{enable_request_id_headers,middleware,served_model_name}": "flags of that server",
}
