"""Every internal of vLLM that ConServe touches: its name in the newest tried version, and its use.

`trial` looks for the names; `tests/unit/test_internals.py` finds uses that are not listed. Braces hold several names;
a name that begins with a class of `classes.CLASSES` stands for its full one. A name without an entry in
`versions.DIFFERENCES` has been in vLLM since the oldest supported version; the entries say since which version, until
which, and what the others have instead.
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
        "vllm.v1.sample.sampler": "logprobs on a CPU wait for no compiler",
        "AsyncLLM": "the engine: generate, errored, renderer, configuration, shutdown",
        "AsyncLLM.{generate,errored,renderer,vllm_config,shutdown,from_vllm_config}": "the same",
        "OutputProcessor.propagate_error": "ends the calls in flight on close",
        "AsyncLLM.output_processor": "tokens in flight, without streaming; the times of live ones",
        "OutputProcessor.{external_req_ids,request_states}": "the same",
        "AsyncLLM.engine_core": "its resources.ctx is the ZeroMQ context that its shutdown leaves open",
        "vllm.v1.engine.exceptions.{EngineDeadError,EngineGenerateError}": "how generate() fails",
        "vllm.{utils.system_utils,v1.engine.utils,v1.executor.multiproc_executor}.get_mp_context": "replaced on a "
        "CPU: core and worker are forked off one process that has imported vLLM",
        "vllm.utils.ompmultiprocessing.OMPProcessManager.{configure_omp_envs,reserve_cpu_num}": "a CPU worker's cores",
        "vllm.exceptions.{VLLMClientError,VLLMValidationError,GracefulHTTPError}": "refusals and "
        "their parameter",
        # outputs and resuming
        "VllmConfig.logging_config": "its processes tell their steps",
        "vllm.logger._last_configured_logging_config": "the same",
        "vllm.outputs.{RequestOutput,CompletionOutput,RequestOutput.add}": "results, and deltas that are merged",
        "vllm.sampling_params.{SamplingParams,RequestOutputKind}": "final or delta outputs; cut to resume",
        "vllm.v1.engine.EngineCoreRequest": "what the detokeniser is made from",
        "vllm.v1.engine.detokenizer.IncrementalDetokenizer": "replays saved tokens: text and stop strings",
        "AsyncEngineArgs.{add_cli_args,from_cli_args,create_engine_config,disable_log_stats,enable_lora,max_loras}": (
            "from the user's flags to the configuration"
        ),
        "vllm.usage.usage_lib.UsageContext.{LLM_CLASS,OPENAI_API_SERVER}": "and the default sizes of its iterations",
        "vllm.utils.argparse_utils.FlexibleArgumentParser.{error,parse_args}": "a wrong flag ends in our sentence",
        "vllm.utils.cpu_resource_utils.MemoryNodeInfo.available_memory": "that memory",
        "AsyncLLM.model_config": "the served model",
        "BackgroundResources.ctx": "that context",
        "AsyncMPClient.resources": "the same",
        "BaseRenderer.{warmup,get_eos_token_id,tokenizer}": "chats render at once; the model's end token and tokenizer",
        "vllm.model_executor.model_loader": "imported before the fork, with core and executor",
        "vllm.v1.worker.cpu_model_runner": "the same",
        "vllm.v1.attention.backends.cpu_attn": "the same",
        "VllmConfig.{attention_config,cache_config,compilation_config,lora_config,model_config,"
        "load_config,parallel_config,scheduler_config,speculative_config}": "the parts of the configuration",
        "AttentionConfig.backend": "part of a profile's key",
        "CacheConfig.{block_size,cache_dtype,enable_prefix_caching,num_gpu_blocks}": (
            "the KV cache; part of a profile's key"
        ),
        "CompilationConfig.{cudagraph_mode,max_cudagraph_capture_size,mode}": "part of a profile's key",
        "ModelConfig.{dtype,enforce_eager,hf_config,hf_config_path,hf_overrides,is_multimodal_model,max_model_len,"
        "model,multimodal_config,override_generation_config,quantization,revision,tokenizer}": "which model it is, for profiles, saved tokens and limits",
        "vllm.distributed.device_communicators.{cpu_communicator.CpuCommunicator,"
        "base_device_communicator.DeviceCommunicatorBase}.all_gatherv": "can engines on a CPU exchange experts' tokens",
        "AsyncMPClient.{core_engines,_call_utility_async}": "every data parallel engine is asked",
        "{MultiModalConfig.mm_processor_kwargs,LoadConfig.download_dir}": "the same, and the folder of its weights",
        "ModelConfig.is_moe": "data parallel engines of such a model wait for each other",
        "ParallelConfig.{data_parallel_size,data_parallel_size_local,distributed_executor_backend,"
        "enable_expert_parallel,nnodes,pipeline_parallel_size,tensor_parallel_size}": "the processes of the engine; refused where it spans machines",
        "SchedulerConfig.{async_scheduling,enable_chunked_prefill,max_num_batched_tokens,max_num_seqs,"
        "scheduler_cls}": "what one iteration may hold, and our scheduler's place",
        "SpeculativeConfig.method": "part of a profile's key",
        "LoggingConfig.log_level": "its processes tell their steps",
        "RequestOutput.{finished,num_cached_tokens,outputs,prompt,prompt_logprobs,prompt_token_ids,request_id}": (
            "an answer, and one made up of saved tokens"
        ),
        "CompletionOutput.{cumulative_logprob,finish_reason,index,logprobs,text,token_ids}": "the same",
        "vllm.sampling_params.RequestOutputKind.{DELTA,FINAL_ONLY}": "streamed or not",
        "SamplingParams.{clone,update_from_generation_config,detokenize,eos_token_id,ignore_eos,output_kind}": (
            "the parameters of a continued request and of a warm-up"
        ),
        "SamplingParams.{max_tokens,min_tokens,n,stop,stop_token_ids,stream_interval,temperature,seed}": (
            "what continuing counts and cuts"
        ),
        "SamplingParams.{bad_words,frequency_penalty,logprob_token_ids,logprobs,presence_penalty,"
        "prompt_logprobs,repetition_detection,structured_outputs,thinking_token_budget}": "what forbids continuing: it depends on earlier tokens",
        "EngineCoreRequest.{arrival_time,cache_salt,data_parallel_rank,lora_request,mm_features,"
        "pooling_params,prompt_token_ids,request_id,sampling_params}": "its fields",
        "IncrementalDetokenizer.{from_new_request,get_next_output_text,num_output_tokens,"
        "output_token_ids,update}": "replaying",
        "InputProcessor.generation_config_fields": "the model's own stop tokens",
        "vllm.inputs.EngineInput": "a rendered prompt, in annotations",
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
        "RequestState.detokenizer": "its output_token_ids, only read",
        "RequestState.{is_prefilling,prompt_len,max_tokens_param,request_index}": "tokens in flight, for the display",
        "OnlineRenderer.{render_chat,render_completion}": "the rendering",
        "ChatCompletionRequest.{max_completion_tokens,max_tokens,echo,truncate_prompt_tokens,"
        "to_sampling_params,priority}": "what is read of a body",
        "CompletionRequest.{max_tokens,echo,truncate_prompt_tokens,to_sampling_params,priority}": "the same",
        "OpenAIServingChat.{chat_completion_full_generator,default_sampling_params,online_renderer,"
        "override_max_tokens}": "the answer's builder and the server's defaults",
        "OpenAIServingCompletion.{request_output_to_completion_response,online_renderer}": "the same",
        "ChatCompletionResponse.choices": "the answer's text",
        "ChatCompletionResponseChoice.message": "the same",
        "CompletionResponse.choices": "the same",
        "CompletionResponseChoice.text": "the same",
        "BaseModelPath.{model_path,name}": "the model's name in answers",
        "vllm.entrypoints.generate.base.protocol.RequestResponseMetadata.request_id": "the answer's id",
        "vllm.entrypoints.serve.engine.protocol.ErrorResponse.error": "its message is the row's error",
        "vllm.entrypoints.serve.engine.protocol.ErrorInfo.message": "the same",
        "AsyncLLM.get_supported_tasks": "does the model generate",
    },
    Part.PROFILING: {
        "EngineCore.{step,preprocess_add_request,add_request,abort_requests,collective_rpc}": "an engine that runs "
        "given batches",
        "vllm.v1.executor.abstract.Executor.get_class": "the executor of the deployment, for that core",
        "ParallelConfig.{data_parallel_rank_local,reconfigure_for_independent_dp_rank}": "one of the data parallel engines",
        "KVCacheManager.allocate_slots": "blocks for a context that is not computed",
        "vllm.config.ParallelConfig.worker_extension_cls": "adds our probes to vLLM's worker",
        "GPUModelRunner.kv_caches": "one tensor a layer with num_gpu_blocks as a dimension, for copy times",
        "ModelConfig.get_num_layers": "each layer has a safepoint",
        "EngineCore.{vllm_config,log_stats,shutdown}": "the same core",
        "VllmConfig.max_concurrent_batches": "one batch at a time",
    },
    Part.SCHEDULER: {
        "vllm.v1.core.sched.{scheduler.Scheduler,async_scheduler.AsyncScheduler}": "subclassed",
        "Scheduler.{schedule,add_request,update_from_output,has_requests,has_finished_requests,shutdown,"
        "_free_request,_free_request_blocks,_preempt_request,finish_requests,get_grammar_bitmask}": "overridden or called",
        "Scheduler.{running,waiting,requests,policy,scheduler_config,connector,block_size,current_step,kv_cache_manager,"
        "max_num_scheduled_tokens,max_num_running_reqs,max_num_active_reqs,num_spec_tokens,num_prefill_lookahead,pause_state,requires_kv_delivery}": "the state that a "
        "view is made of",
        "Scheduler.lora_config": "how many adapters requests may have that run",
        "LoRAConfig.max_loras": "the same",
        "LoRARequest.lora_int_id": "the same",
        "Scheduler.kv_holding_waiting": "waiting requests with KV blocks",
        "Scheduler.aux_output_connector": "outputs that a preempted request loses",
        "Scheduler._reserve_prefill_lookahead": "asked about every request before it is scheduled: the plan's cap",
        "Scheduler.{_try_schedule_encoder_inputs,_mamba_block_aligned_split}": "the same for images, and for states",
        "Scheduler.{_is_blocked_waiting_status,_handle_blocked_waiting_request}": "is a waiting request ready now",
        "vllm.v1.core.sched.request_queue.{RequestQueue,FCFSRequestQueue,SchedulingPolicy}": "the waiting queue",
        "vllm.v1.core.sched.output.SchedulerOutput": "attributes on it survive pickling",
        "vllm.v1.request.{Request,RequestStatus}": "counters",
        "Request.{num_tokens,num_tokens_with_spec,num_computed_tokens,num_prompt_tokens,num_output_placeholders,"
        "num_stale_output_tokens,next_decode_eligible_step,drop_stale_output,prefill_stats,arrival_time,priority,block_hashes,num_preemptions,num_output_tokens}": "the "
        "counters",
        "KVCacheManager.coordinator": "its single_type_managers hold a request's blocks",
        "KVCacheCoordinator.{find_longest_cache_hit,single_type_managers}": "how much of a waiting prompt is cached",
        "KVCacheManager.{block_pool,watermark_blocks,free,allocate_slots}": "blocks held and free",
        "KVCacheManager.prefix_cache_lookup_enabled": "whether equal hashes are shared",
        "BlockPool.{hash_block_size,enable_caching,free_block_queue,get_num_free_blocks}": "the same; free blocks",
        "Scheduler.{is_encoder_decoder,max_num_encoder_input_tokens}": "what an iteration may encode",
        "EncoderCacheManager.{cache_size,num_freeable_slots}": "room for embeddings",
        "Request.get_num_encoder_embeds": "embeddings of an image or a sound",
        "MultiModalFeatureSpec.mm_position": "its place in the prompt",
        "PlaceholderRange.{length,offset}": "the same",
        "VllmConfig.additional_config": "carries the profile to the engine core's process",
        "vllm.config.ParallelConfig.data_parallel_index": "the number in the name of a further engine's recorded views",
        "Request.{request_id,max_tokens,sampling_params,status}": "its name, its state, what it asks for",
        "RequestStatus.{FINISHED_ABORTED,PREEMPTED,RUNNING,WAITING_FOR_REMOTE_KVS,WAITING_FOR_STREAMING_REQ,"
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR}": "its states",
        "SamplingParams.extra_args": "what a row or a client sends along",
        "RequestQueue.{add_request,peek_request,pop_request,prepend_request,prepend_requests,"
        "remove_request,remove_requests}": "overridden: two lanes",
        "SchedulingPolicy.{FCFS,PRIORITY}": "set by our policy",
        "SchedulerOutput.{num_scheduled_tokens,total_num_scheduled_tokens,scheduled_new_reqs}": "the tokens of an iteration",
        "EngineCoreOutputs.outputs": "the tokens that an iteration brought",
        "EngineCoreOutput.{finish_reason,new_token_ids,request_id}": "the same",
        "SingleTypeKVCacheManager.{block_pool,block_size,req_to_blocks}": "the blocks that a request holds",
        "SingleTypeKVCacheManager.get_num_skipped_tokens": "the window of its layers",
        "KVCacheBlock.{ref_cnt,is_null,block_hash,block_id}": "blocks shared with running requests; names of the others",
        "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue": "subclassed: what live requests will find is given out last",
        "FreeKVCacheBlockQueue.{num_free_blocks,popleft,popleft_n,remove,append,append_n,prepend_n,get_all_free_blocks}": "its calls",
        "{NewRequestData.num_computed_tokens,PrefillStats.num_local_cached_tokens}": "what a request has found in the cache",
    },
    Part.SERVER: {
        "vllm.entrypoints.common.cli_args.{make_arg_parser,validate_parsed_serve_args}": "the flags of vLLM's server",
        "vllm.entrypoints.launchers.api_server.entry.run_server": "vLLM's OpenAI server",
        "EngineCore.{collective_rpc,preprocess_add_request,model_executor,scheduler}": "wrapped: tells of an arrival, in the I/O thread",
        "vllm.v1.metrics.prometheus.get_prometheus_registry": "/metrics is vLLM's and our metrics, one after the other",
        "GenerateBaseServing._get_priority": "wrapped: the flex tier is offline",
        "GenerateBaseServing._get_session_id": "wrapped: called before a request's first part; its priority is noted",
        "AsyncLLM.{generate,encode}": "wrapped: rows go on from saved tokens; all parts of a request have its priority",
        "AsyncLLM.input_processor": "its generation_config_fields are the model's own stop tokens",
        "vllm.engine.protocol.EngineClient": "what the plug-in is given, in annotations",
        "AsyncMPClient.call_utility_async": "asks for the spill from the API server",
        "ModelConfig.get_vocab_size": "are saved tokens the model's",
        "RequestState.stats": "when the engine had the newest token of a streamed answer",
        "vllm.v1.metrics.stats.RequestStateStats.{arrival_time,first_token_ts,last_token_ts}": "the same",
        "VllmConfig.kv_transfer_config": "is our connector there",
        "LoRARequest.lora_name": "the class of a request with an adapter",
        "vllm.exceptions.VLLMValidationError.parameter": "which field was refused",
    },
    Part.LEAVING: {
        "vllm.{LLM.generate,LLM.reset_prefix_cache,logprobs.Logprob.logprob}": "the leaving of rows is rehearsed",
        "vllm.config.ParallelConfig.worker_cls": "names our worker",
        "vllm.v1.worker.{gpu_worker.Worker,cpu_worker.CPUWorker}": "subclassed",
        "Worker.{execute_model,sample_tokens,compile_or_warm_up_model,model_runner,vllm_config}": "alternate; an output "
        "that is not None is the iteration's",
        "vllm.v1.outputs.ModelRunnerOutput": "what an abandoned iteration brings; attributes on it survive pickling",
        "vllm.v1.outputs.AsyncModelRunnerOutput.get_output": "wrapped: results that are read later, in another thread "
        "perhaps; from the V2 runner (`async_utils.AsyncOutput`), and from V1 if scheduled ahead",
        "vllm.v1.outputs.AsyncModelRunnerOutput.get_kv_connector_output": "passed on",
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
        "vllm.compilation.passes.utility.fix_functionalization.FixFunctionalizationPass": "left out on a CPU, where it "
        "names operators that are not there",
        "vllm.config.CompilationMode.{DYNAMO_TRACE_ONCE,VLLM_COMPILE}": "one graph, or pieces",
        "CompilationConfig.{backend,compile_sizes}": "set for pieces on a CPU",
        "vllm.platforms.cpu.CpuPlatform.check_and_update_config": "wrapped: models are compiled in pieces on a CPU too",
        "vllm.compilation.{backends,caching}.compile_execution_fn": "wrapped while a model is compiled or loaded "
        "from the cache: its code is cut behind each attention call",
        "GPUModelRunner.{_dummy_run,max_num_tokens}": "two passes, to see which variables have an entry a token",
        "vllm.forward_context.ForwardContext.cudagraph_runtime_mode": "set to NONE for the rest of a pass that rows "
        "have left or joined",
        "vllm.forward_context.get_forward_context": "its attn_metadata and slot_mapping are swapped",
        "vllm.distributed.get_tp_group": "ranks, cpu_group: all ranks decide alike",
        "EngineCore.step_with_batch_queue": "wrapped: where the next iteration is not scheduled ahead, a step ends with "
        "its own",
        "VllmConfig.{ec_transfer_config,use_v2_model_runner}": "another engine encodes: rows stay; iterations are scheduled ahead under the V2 runner alone",
        "KVCacheManager.{allocate_slots,cache_blocks}": "blocks are registered when they are computed",
        "Scheduler._inflight_prefills": "put back for rows that left",
        "SchedulerOutput.scheduled_encoder_inputs": "what an iteration encodes",
        "Scheduler.encoder_cache_manager": "its books: what a refused iteration was to encode is taken out of them",
        "EncoderCacheManager.{cached,freeable,freed,num_embeds_by_hash,num_free_slots,free_encoder_input}": "the same",
        "Request.mm_features": "the images and sounds of a prompt",
        "MultiModalFeatureSpec.identifier": "the same",
        "Request.{is_prefill_chunk,num_in_flight_tokens}": "the same",
        "Worker.{device,use_v2_model_runner,load_model}": "which runner it has, and where",
        "vllm.config.CUDAGraphMode.NONE": "set for a pass that rows have left",
        "ForwardContext.{attn_metadata,slot_mapping}": "swapped for the rows that stay",
        "CommonAttentionMetadata.{replace,query_start_loc,query_start_loc_cpu,seq_lens,num_reqs,"
        "num_actual_tokens,max_query_len,max_seq_len}": "cut down",
        "CommonAttentionMetadata.{block_table_tensor,slot_mapping,causal,is_prefilling,"
        "seq_lens_cpu_upper_bound,positions,req_idx,_num_computed_tokens_cache,"
        "_token_to_req_indices_cache}": "the same",
        "AttentionMetadataBuilder.supports_update_block_table": "builders that share metadata: rows stay",
        "vllm.v1.worker.gpu_input_batch.InputBatch.{generators,num_computed_tokens_cpu,req_id_to_index,req_ids}": (
            "the V1 runner's batch"
        ),
        "CpuGpuBuffer.np": "the same, on the host",
        "vllm.v1.worker.gpu.input_batch.InputBatch.{num_computed_tokens_np,num_reqs,query_start_loc,"
        "query_start_loc_np,req_ids}": "the V2 runner's batch",
        "vllm.v1.worker.gpu.states.RequestState.req_id_to_index": "V2: a request's slot",
        "PromptLogprobsWorker.{token_id_scores,uses_prompt_logprobs}": "V2: rows that left get no prompt logprobs",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.kv_connector": (
            "V2: what it is asked when an iteration is abandoned"
        ),
        "vllm.v1.worker.gpu.kv_connector.KVConnector.{post_forward,no_forward}": (
            "V2: what an abandoned and a refused iteration bring"
        ),
        "GroupCoordinator.{broadcast_object,rank_in_group,world_size}": "ranks decide alike",
        "ModelRunnerOutput.{req_ids,req_id_to_index,sampled_token_ids,kv_connector_output}": (
            "an abandoned iteration's output"
        ),
        "SchedulerOutput.{finished_req_ids,preempted_req_ids,scheduled_cached_reqs,scheduled_new_reqs}": (
            "who came and went"
        ),
        "CachedRequestData.resumed_req_ids": "the same",
        "NewRequestData.req_id": "the same",
        "Request.use_structured_output": "a grammar makes no row leave",
        "KVTransferConfig.kv_connector": "another connector: rows stay",
        "ModelConfig.{get_num_layers,is_attention_free,is_encoder_decoder,is_hybrid,rswa_window,runner_type}": (
            "models whose rows stay"
        ),
        "ParallelConfig.{decode_context_parallel_size,prefill_context_parallel_size,use_ubatching}": "the same",
        "CacheConfig.kv_sharing_fast_prefill": "the same",
        "ModelConfig.hf_text_config": "the same, by what the model says of its layers",
        "VllmConfig.aux_output_config": "experts that are told with answers: rows stay",
        "vllm.config.aux_output.AuxOutputConfig.enable_return_routed_experts": "the same",
        "CompilationConfig.{fast_moe_cold_start,static_forward_context}": "the same; attention layers, for safepoints",
    },
    Part.CHECKPOINTS: {
        "vllm.distributed.kv_transfer.kv_connector.v1.base.{KVConnectorBase_V1,SupportsHMA,KVConnectorRole,"
        "KVConnectorTransferResults,KVConnectorWorkerMetadata}": "our connector: all its calls",
        "vllm.v1.metrics.cache_hit_source.CacheHitSource{,.HOST}": "where a hit's tokens came from, for vLLM's metrics",
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
        "Scheduler.reset_prefix_cache": "overridden: nothing is saved meanwhile, and copies go too",
        "GPUModelRunner.maybe_get_kv_connector_output": "what an abandoned iteration brings, from the V1 runner",
        "KVConnectorBase_V1.{_cache_hit_source,_kv_transfer_config,requires_kv_delivery,shutdown}": "ours or read",
        "KVConnectorBase_V1.{bind_kv_cache_manager,get_num_new_matched_tokens,update_state_after_alloc,"
        "build_connector_meta,update_connector_output,request_finished,has_pending_push_work,"
        "reset_cache}": "overridden: the scheduler's half",
        "KVConnectorBase_V1.{register_kv_caches,bind_connector_metadata,clear_connector_metadata,"
        "start_load_kv,wait_for_layer_load,save_kv_layer,wait_for_save,get_finished,"
        "get_transfer_results,build_connector_worker_meta}": "overridden: the workers' half",
        "SupportsHMA.request_finished_all_groups": "overridden",
        "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorRole.WORKER": "which half it is",
        "KVConnectorTransferResults.{finished_recving,failed_recving}": "rows that are back, and the broken ones",
        "KVConnectorOutput.{finished_recving,finished_sending,failed_recving,kv_connector_worker_meta}": "the same",
        "KVTransferConfig.{kv_connector_extra_config,kv_connector_module_path,kv_role}": "our settings",
        "ParallelConfig.world_size": "host memory is divided",
        "FullAttentionSpec.{attention_chunk_size,sliding_window}": "KV that is not of the whole context",
        "{KVCacheGroupSpec.kv_cache_spec,KVCacheTensor.size}": "the same, and what a block weighs",
        "SimpleCPUOffloadMetadata.{load_event,load_cpu_blocks,load_gpu_blocks,load_event_to_reqs,"
        "store_event,store_cpu_blocks,store_gpu_blocks}": "the copies to make",
        "SimpleCPUOffloadWorkerMetadata.{aggregate,completed_store_events}": "the copies that have ended",
        "SimpleCPUOffloadWorker.{_poll_stream_events,bind_connector_metadata,"
        "build_connector_worker_meta,clear_connector_metadata,get_finished,handle_preemptions,"
        "register_kv_caches,start_load_kv,wait_for_save}": "overridden or called",
        "SimpleCPUOffloadWorker.{cpu_kv_caches,gpu_kv_caches,num_cpu_blocks}": "the memory on both sides",
        "{SimpleCPUOffloadWorker.,DmaCopyBackend._}{load,store}_stream": "what copies go on",
        "DmaCopyBackend.{_copy_loop,_load_params,_queue,_store_params,init,launch_copy,shutdown}": "its thread, with "
        "copies that are timed; ours stands in for it on a CPU",
        "vllm.v1.simple_kv_offload.cuda_mem_ops.copy_blocks": "a copy",
        "vllm.platforms.current_platform.set_device": "for a thread of copies",
    },
    Part.SPILL: {
        "EngineCore.{model_executor,get_weight_version}": "the workers write and read (collective_rpc with a function)",
        "vllm.distributed.kv_transfer.get_kv_transfer_group": "a worker's KV connector",
        "vllm.v1.core.kv_cache_utils.get_none_hash_seed": "what hashes of blocks begin with: must be the same again",
        "Attention.{impl,_k_scale_float,_v_scale_float}": "how KV lies within a block, and what scales it",
        "vllm.version.__version__": "whose layout it is",
        "Request.lora_request": "KV of adapters stays off the disk",
        "CacheConfig.prefix_caching_hash_algo": "whether hashes are the same after a restart",
        "vllm.config.ParallelConfig.data_parallel_index": "a further engine has no spill",
        "KVCacheTensor.layers": "how KV lies in a file",
        "VllmConfig.load_config": "which weights the KV is of",
        "vllm.config.LoadConfig.load_format": "the same",
    },
    Part.SIMULATION: {
        "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorMetadata": "KV between engines",
        "vllm.engine.arg_utils.EngineArgs": "the configuration of an engine without weights",
        "vllm.v1.core.kv_cache_utils.{get_request_block_hasher,init_none_hash}": "names of KV blocks",
        "vllm.v1.kv_cache_interface.{FullAttentionSpec,KVCacheConfig,KVCacheGroupSpec}": "its KV cache",
        "vllm.v1.structured_output.StructuredOutputManager": "a scheduler is made with one",
        "vllm.utils.hashing.sha256": "hashes those names",
        "AsyncEngineArgs.{enforce_eager,kv_cache_memory_bytes,model,scheduling_policy,"
        "skip_tokenizer_init,async_scheduling}": "the flags of that engine",
        "FullAttentionSpec.{block_size,num_kv_heads,head_size,dtype,page_size_bytes}": (
            "blocks of KV that are never filled"
        ),
        "EngineCoreOutput.finish_reason": "a request has ended",
        "ModelRunnerOutput.{logprobs,pooler_output,prompt_logprobs_dict}": "what no worker computed",
        "Request.{pooling_params,prompt_token_ids}": "a request without a front end",
        "SchedulerOutput.kv_connector_metadata": "copies of KV that take time",
    },
}

ON_CPUS = (
    "dispatch_cpu_",
    "cpu_resource_utils",
    "ompmultiprocessing",
    "cpu_worker",
    "cpu_model_runner",
    "cpu_attn",
)
"""Parts of names that only the CPU build needs."""
