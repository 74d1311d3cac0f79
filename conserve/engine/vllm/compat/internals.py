"""Every internal of vLLM that ConServe touches: its name in the newest tried version, and its use.

`trial` walks the names. Braces hold several names; a name that begins with a class of CLASSES stands for its full
one. `versions.DIFFERENCES` lists the names that other versions spell differently.
"""

from enum import Enum


class Part(Enum):
    """A part of ConServe; the value is what a user loses without it."""

    ENGINE = "no engine starts"
    EMBEDDED = "no engine within `conserve run`"
    PROFILING = "no `conserve profile`"
    SCHEDULER = "no rows beside live requests"
    SERVER = "no `conserve serve`"
    LEAVING = "rows never leave an iteration"
    CHECKPOINTS = "no KV checkpoints"
    SPILL = "no KV on disk"
    SIMULATION = "no simulated engine: no `conserve tune` and no sweep on simulated time"


CLASSES = {
    "AsyncLLM": "vllm.v1.engine.async_llm",
    "Attention": "vllm.model_executor.layers.attention.attention",
    "AttentionGroup": "vllm.v1.worker.utils",
    "BlockPool": "vllm.v1.core.block_pool",
    "EngineCore": "vllm.v1.engine.core",
    "GPUModelRunner": "vllm.v1.worker.gpu_model_runner",
    "GenerateBaseServing": "vllm.entrypoints.generate.base.serving",
    "KVCacheConfig": "vllm.v1.kv_cache_interface",
    "KVCacheCoordinator": "vllm.v1.core.kv_cache_coordinator",
    "KVCacheManager": "vllm.v1.core.kv_cache_manager",
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "OutputProcessor": "vllm.v1.engine.output_processor",
    "Request": "vllm.v1.request",
    "RequestState": "vllm.v1.engine.output_processor",
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "SimpleCPUOffloadWorker": "vllm.v1.simple_kv_offload.worker",
    "VllmConfig": "vllm.config",
    "Worker": "vllm.v1.worker.gpu_worker",
}

INTERNALS: dict[Part, dict[str, str]] = {
    Part.ENGINE: {
        # starting and stopping
        "vllm.engine.arg_utils.AsyncEngineArgs": "parses the user's engine flags and makes the configuration",
        "vllm.utils.argparse_utils.FlexibleArgumentParser": "the parser those flags are added to",
        "vllm.platforms.current_platform": "is this the CPU or the CUDA build",
        "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": "the kernels whose speed decides the format",
        "vllm.platforms.current_platform.supported_dtypes": "the formats there are",
        "vllm.platforms.current_platform.{import_kernels,is_cpu,is_cuda,get_device_name}": "a trial of the library",
        "vllm.utils.cpu_resource_utils.get_memory_node_info": "free memory as the CPU worker will see it",
        "AsyncLLM": "the engine: generate, errored, renderer, configuration, shutdown",
        "AsyncLLM.{generate,errored,renderer,vllm_config,shutdown,from_vllm_config}": "the same",
        "OutputProcessor.propagate_error": "ends the calls in flight on close",
        "AsyncLLM.engine_core": "its resources.ctx is the ZeroMQ context that its shutdown leaves open",
        "vllm.v1.engine.exceptions.{EngineDeadError,EngineGenerateError}": "how generate() fails",
        "vllm.{utils.system_utils,v1.engine.utils,v1.executor.multiproc_executor}.get_mp_context": "replaced on a "
        "CPU: core and worker are forked off one process that has imported vLLM",
        "vllm.utils.ompmultiprocessing.OMPProcessManager.configure_omp_envs": "the variables of a CPU worker",
        "vllm.exceptions.{VLLMClientError,VLLMServerError,VLLMValidationError,GracefulHTTPError}": "refusals and "
        "their parameter",
        # outputs and resuming
        "VllmConfig.logging_config": "its processes tell their steps",
        "vllm.logger._last_configured_logging_config": "the same",
        "vllm.outputs.{RequestOutput,CompletionOutput}": "results, and RequestOutput.add to merge deltas",
        "vllm.outputs.RequestOutput.add": "the same",
        "vllm.sampling_params.{SamplingParams,RequestOutputKind}": "final or delta outputs; cut to resume",
        "vllm.v1.engine.EngineCoreRequest": "what the detokeniser is made from",
        "vllm.v1.engine.detokenizer.IncrementalDetokenizer": "replays saved tokens: text and stop strings",
        "vllm.v1.core.sched.utils.check_stop": "its order of checks is repeated in continuation.py",
    },
    Part.EMBEDDED: {
        "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": "validates a chat body",
        "vllm.entrypoints.openai.completion.protocol.CompletionRequest": "validates a completion body",
        "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat": "answers in the OpenAI form",
        "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion": "the same for /v1/completions",
        "vllm.entrypoints.openai.models.serving.OpenAIServingModels": "those two ask it for the model's name",
        "vllm.entrypoints.openai.models.protocol.BaseModelPath": "that name",
        "vllm.entrypoints.generate.base.protocol.RequestResponseMetadata": "the answer's builders fill it in",
        "vllm.entrypoints.serve.engine.protocol.ErrorResponse": "how the renderer refuses a request",
        "vllm.entrypoints.serve.utils.api_utils.get_max_tokens": "the server's default for max_tokens",
        "vllm.renderers.online_renderer.OnlineRenderer": "chat template and tokenisation, on threads",
        "vllm.renderers.{renderer_from_config,params.ChatParams}": "warmup() while the processes start",
        "vllm.renderers.inputs.preprocess.extract_prompt_len": "prompt length of a rendered request",
        "AsyncLLM.output_processor": "tokens in flight, without streaming",
        "OutputProcessor.{external_req_ids,request_states}": "the same",
        "RequestState.detokenizer": "its output_token_ids, only read",
        "RequestState.{is_prefilling,prompt_len,max_tokens_param,request_index}": "tokens in flight, for the display",
    },
    Part.PROFILING: {
        "EngineCore.{step,preprocess_add_request,add_request,abort_requests,collective_rpc}": "an engine that runs "
        "given batches",
        "vllm.v1.executor.abstract.Executor.get_class": "the executor of the deployment, for that core",
        "KVCacheManager.allocate_slots": "blocks for a context that is not computed",
        "vllm.config.ParallelConfig.worker_extension_cls": "adds our probes to vLLM's worker",
        "GPUModelRunner.kv_caches": "one tensor a layer with num_gpu_blocks as a dimension, for copy times",
        "vllm.config.CompilationConfig.static_forward_context": "the attention layers, of which each has a safepoint",
    },
    Part.SCHEDULER: {
        "vllm.v1.core.sched.{scheduler.Scheduler,async_scheduler.AsyncScheduler}": "subclassed",
        "Scheduler.{schedule,add_request,update_from_output,has_requests,has_finished_requests,shutdown,"
        "_free_request,_preempt_request}": "overridden or called",
        "Scheduler.{running,waiting,requests,policy,connector,block_size,current_step,kv_cache_manager,"
        "max_num_scheduled_tokens,max_num_running_reqs,num_spec_tokens,num_prefill_lookahead}": "the state that a "
        "view is made of",
        "Scheduler.kv_holding_waiting": "waiting requests with KV blocks",
        "Scheduler._reserve_prefill_lookahead": "asked about every request before it is scheduled: the plan's cap",
        "Scheduler._mamba_block_aligned_split": "the same, where chunks end with blocks",
        "Scheduler._is_blocked_waiting_status": "is a waiting request blocked",
        "Scheduler._handle_blocked_waiting_request": "is it ready now",
        "vllm.v1.core.sched.request_queue.{RequestQueue,FCFSRequestQueue,SchedulingPolicy}": "the waiting queue",
        "vllm.v1.core.sched.output.SchedulerOutput": "attributes on it survive pickling",
        "vllm.v1.request.{Request,RequestStatus}": "counters",
        "Request.{num_tokens,num_tokens_with_spec,num_computed_tokens,num_prompt_tokens,num_output_placeholders,"
        "num_stale_output_tokens,next_decode_eligible_step,drop_stale_output,arrival_time,priority,block_hashes,num_preemptions,num_output_tokens}": "the "
        "counters",
        "KVCacheManager.coordinator": "its single_type_managers hold a request's blocks",
        "KVCacheCoordinator.{find_longest_cache_hit,single_type_managers}": "how much of a waiting prompt is cached",
        "KVCacheManager.{block_pool,watermark_blocks,free,allocate_slots}": "blocks held and free",
        "KVCacheManager.prefix_cache_lookup_enabled": "whether equal hashes are shared",
        "BlockPool.hash_block_size": "the same",
        "VllmConfig.additional_config": "carries the profile to the engine core's process",
        "vllm.config.ParallelConfig.data_parallel_index": "the number in the name of a further engine's recorded views",
    },
    Part.SERVER: {
        "vllm.entrypoints.common.cli_args.make_arg_parser": "the flags of vLLM's OpenAI server",
        "vllm.entrypoints.common.cli_args.validate_parsed_serve_args": "its check of them",
        "vllm.entrypoints.launchers.api_server.entry.run_server": "vLLM's OpenAI server",
        "EngineCore.{preprocess_add_request,model_executor,scheduler}": "wrapped: tells of an arrival, in the I/O thread",
        "vllm.v1.metrics.prometheus.get_prometheus_registry": "/metrics is vLLM's and our metrics, one after the other",
        "GenerateBaseServing._get_priority": "wrapped: the flex tier is offline",
        "GenerateBaseServing._get_session_id": "wrapped: called before a request's first part; its priority is noted",
        "AsyncLLM.{generate,encode}": "wrapped: requests that bring saved tokens; beams and later turns keep their "
        "priority",
        "AsyncLLM.input_processor": "its generation_config_fields are the model's own stop tokens",
    },
    Part.LEAVING: {
        "vllm.config.ParallelConfig.worker_cls": "names our worker",
        "vllm.v1.worker.{gpu_worker.Worker,cpu_worker.CPUWorker}": "subclassed",
        "Worker.{execute_model,sample_tokens,compile_or_warm_up_model,model_runner,vllm_config}": "alternate; an output "
        "that is not None is the iteration's",
        "vllm.v1.outputs.ModelRunnerOutput": "what an abandoned iteration brings; attributes on it survive pickling",
        "vllm.v1.outputs.AsyncModelRunnerOutput.get_output": "wrapped: results that are read later, in another thread "
        "perhaps; from the V2 runner (`async_utils.AsyncOutput`), and from V1 if scheduled ahead",
        "vllm.v1.outputs.EMPTY_MODEL_RUNNER_OUTPUT": "one object for all iterations: copied before it gets an outcome",
        "GPUModelRunner.{attn_groups,device,get_model}": "of either runner: what layers run on, and share",
        "GPUModelRunner.{input_batch,query_start_loc}": "the V1 runner's batch, read: req_ids, req_id_to_index, "
        "num_computed_tokens_cpu, generators",
        "GPUModelRunner.{discard_request_mask,num_prompt_logprobs}": "V1: rows that left get no sample",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_inputs": "wrapped: the V2 runner's batch (InputBatch: "
        "req_ids, num_reqs, query_start_loc, query_start_loc_np, num_computed_tokens_np)",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample": "wrapped: rows that left have no token sampled and "
        "their chunk rejected, in the tensors that `postprocess_sampled` moves its counters by",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.{prompt_logprobs_worker,req_states}": "V2: rows that left get "
        "no prompt logprobs; uses_prompt_logprobs, token_id_scores, req_id_to_index",
        "vllm.utils.torch_utils.async_tensor_h2d": "copies to the device without waiting for it",
        "AttentionGroup.{build_metadata,metadata_builders,layer_names}": "its builder's calls are noted, and made again for "
        "the rows that stay",
        "vllm.compilation.{backends,caching}.compile_execution_fn": "wrapped while a model is compiled or loaded "
        "from the cache: its code is cut behind each attention call",
        "GPUModelRunner.{_dummy_run,max_num_tokens}": "two passes, to see which variables have an entry a token",
        "vllm.forward_context.ForwardContext.cudagraph_runtime_mode": "set to NONE for the rest of a pass that rows "
        "have left or joined",
        "vllm.v1.attention.backend.CommonAttentionMetadata": "cut down; its fields are listed in rows.of_requests",
        "vllm.forward_context.get_forward_context": "its attn_metadata and slot_mapping are swapped",
        "vllm.distributed.get_tp_group": "ranks, cpu_group: all ranks decide alike",
        "EngineCore.step_with_batch_queue": "wrapped: where the next iteration is not scheduled ahead, a step ends with "
        "its own",
        "VllmConfig.use_v2_model_runner": "iterations are scheduled ahead under the V2 runner alone",
        "KVCacheManager.{allocate_slots,cache_blocks}": "blocks are registered when they are computed",
        "Scheduler._inflight_prefills": "put back for rows that left",
        "Request.{is_prefill_chunk,num_in_flight_tokens}": "the same",
    },
    Part.CHECKPOINTS: {
        "vllm.distributed.kv_transfer.kv_connector.v1.base.{KVConnectorBase_V1,SupportsHMA,KVConnectorRole,"
        "KVConnectorTransferResults,KVConnectorWorkerMetadata}": "our connector: all its calls",
        "vllm.v1.metrics.cache_hit_source.CacheHitSource": "where the tokens of a hit came from, for vLLM's metrics",
        "SimpleCPUOffloadWorker": "subclassed: the KV cache's regions, pinned memory, copies by DMA",
        "SimpleCPUOffloadWorker.{_backend,_store_events,_load_events,_store_hwm,_load_hwm,_init_cpu_mode,"
        "_pending_store_event_indices,_pending_load_event_indices,_completed_store_events,_connector_metadata}": "its "
        "state",
        "vllm.v1.simple_kv_offload.metadata.{SimpleCPUOffloadMetadata,SimpleCPUOffloadWorkerMetadata}": "the messages "
        "that ours extend",
        "KVCacheConfig.{kv_cache_groups,kv_cache_tensors,num_blocks}": "what KV there is, and what a block weighs",
        "vllm.v1.kv_cache_interface.FullAttentionSpec": "the KV that is checkpointed",
        "vllm.v1.core.kv_cache_utils.resolve_kv_cache_block_sizes": "tokens of a block, and of a hash",
        "BlockPool.{blocks,touch,free_blocks,num_gpu_blocks}": "blocks are kept while they are copied",
        "KVCacheManager.{get_block_ids,free}": "a row's blocks",
        "Request.{block_hashes,skip_reading_prefix_cache}": "what names a block; True: cannot be restored",
        "Scheduler._inflight_prefill_reserved_blocks": "blocks of requests whose KV comes back",
        "Scheduler.reset_prefix_cache": "overridden: nothing is saved meanwhile",
        "GPUModelRunner.maybe_get_kv_connector_output": "what an abandoned iteration brings, from the V1 runner",
    },
    Part.SPILL: {
        "EngineCore.{model_executor,get_weight_version}": "the workers write and read (collective_rpc with a function)",
        "vllm.distributed.kv_transfer.get_kv_transfer_group": "a worker's KV connector",
        "vllm.v1.core.kv_cache_utils.get_none_hash_seed": "what hashes of blocks begin with: must be the same again",
        "Attention.{impl,_k_scale_float,_v_scale_float}": "how KV lies within a block, and what scales it",
        "vllm.version.__version__": "whose layout it is",
    },
    Part.SIMULATION: {
        "vllm.engine.arg_utils.EngineArgs": "the configuration of an engine without weights",
        "vllm.v1.core.kv_cache_utils.{get_request_block_hasher,init_none_hash}": "names of KV blocks",
        "vllm.v1.kv_cache_interface.{FullAttentionSpec,KVCacheConfig,KVCacheGroupSpec}": "its KV cache",
        "vllm.v1.structured_output.StructuredOutputManager": "a scheduler is made with one",
        "vllm.utils.hashing.sha256": "hashes those names",
    },
}

ON_CPUS = ("dispatch_cpu_", "cpu_resource_utils", "ompmultiprocessing", "cpu_worker")
"""Parts of names that only the CPU build needs."""

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
        "Scheduler._is_blocked_waiting_status": "status",
        "Scheduler._handle_blocked_waiting_request": "self, request",
        "Scheduler._preempt_request": "self, request, timestamp, ...",
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
    ),
    Part.LEAVING: (
        "conserve.engine.vllm.preemption.worker.Worker",
        "conserve.engine.vllm.preemption.outputs.Promised",
    ),
    Part.CHECKPOINTS: (
        "conserve.engine.vllm.checkpoint.connector.CheckpointConnector",
        "conserve.engine.vllm.checkpoint.copies.Copies",
    ),
}

HABITS = {
    # No name stands for these: only tests find a change.
    "multiprocessing child named EngineCore*": "its id, so that it dies with us even when we are killed",
    "the lines of vLLM's log in phases.TOLD": "the step of a start, for the display",
    "a WAITING request with num_computed_tokens > 0": "is scheduled from there, as after a KV transfer",
    "Worker.execute_model and sample_tokens": "alternate",
    "Attention.impl.forward": "wrapped: safepoints where there are none between layers",
    "a decoder layer's forward": "wrapped: token-major tensors in, token-major tensors out",
    "V2 GPUModelRunner.kv_connector.{post_forward,no_forward}": "what an abandoned and a refused iteration bring",
    "V2 GPUModelRunner.execute_model": "has taken in which requests came and went when it calls prepare_inputs",
    "a request with num_stale_output_tokens": "loses what iterations in flight bring for it",
    "EngineCore.{conserve,conserve_spill}": "added: utility calls that ask our scheduler, and have the workers "
    "write and read",
    "AsyncLLM.engine_core.call_utility_async": "makes those calls from the API server",
    "vllm.{general,endpoint}_plugins": "the entry points through which vLLM loads us",
}
