"""Classes of vLLM whose attributes ConServe touches, by module: `internals` calls them by their names alone."""

MODULES = {
    "vllm.config": (
        "AttentionConfig CacheConfig CompilationConfig KVTransferConfig LoadConfig LoggingConfig LoRAConfig "
        "ModelConfig MultiModalConfig ParallelConfig SchedulerConfig SpeculativeConfig VllmConfig"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorBase_V1 KVConnectorTransferResults SupportsHMA"
    ),
    "vllm.distributed.parallel_state": "GroupCoordinator",
    "vllm.engine.arg_utils": "AsyncEngineArgs",
    "vllm.entrypoints.generate.base.serving": "GenerateBaseServing",
    "vllm.entrypoints.openai.chat_completion.protocol": (
        "ChatCompletionRequest ChatCompletionResponse ChatCompletionResponseChoice"
    ),
    "vllm.entrypoints.openai.chat_completion.serving": "OpenAIServingChat",
    "vllm.entrypoints.openai.completion.protocol": (
        "CompletionRequest CompletionResponse CompletionResponseChoice"
    ),
    "vllm.entrypoints.openai.completion.serving": "OpenAIServingCompletion",
    "vllm.entrypoints.openai.models.protocol": "BaseModelPath",
    "vllm.forward_context": "ForwardContext",
    "vllm.lora.request": "LoRARequest",
    "vllm.model_executor.layers.attention.attention": "Attention",
    "vllm.outputs": "CompletionOutput RequestOutput",
    "vllm.renderers.base": "BaseRenderer",
    "vllm.renderers.online_renderer": "OnlineRenderer",
    "vllm.sampling_params": "SamplingParams",
    "vllm.multimodal.inputs": "MultiModalFeatureSpec PlaceholderRange",
    "vllm.v1.attention.backend": "AttentionMetadataBuilder CommonAttentionMetadata",
    "vllm.v1.core.block_pool": "BlockPool",
    "vllm.v1.core.encoder_cache_manager": "EncoderCacheManager",
    "vllm.v1.core.kv_cache_coordinator": "KVCacheCoordinator",
    "vllm.v1.core.kv_cache_manager": "KVCacheManager",
    "vllm.v1.core.kv_cache_utils": "FreeKVCacheBlockQueue KVCacheBlock",
    "vllm.v1.core.sched.output": "CachedRequestData NewRequestData SchedulerOutput",
    "vllm.v1.core.sched.request_queue": "RequestQueue SchedulingPolicy",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.core.single_type_kv_cache_manager": "SingleTypeKVCacheManager",
    "vllm.v1.engine": "EngineCoreOutput EngineCoreOutputs EngineCoreRequest",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.engine.core": "EngineCore",
    "vllm.v1.engine.core_client": "AsyncMPClient BackgroundResources",
    "vllm.v1.engine.detokenizer": "IncrementalDetokenizer",
    "vllm.v1.engine.input_processor": "InputProcessor",
    "vllm.v1.engine.output_processor": "OutputProcessor RequestState",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheConfig KVCacheGroupSpec KVCacheTensor",
    "vllm.v1.metrics.stats": "PrefillStats",
    "vllm.v1.outputs": "KVConnectorOutput ModelRunnerOutput",
    "vllm.v1.request": "Request RequestStatus",
    "vllm.v1.simple_kv_offload.copy_backend": "DmaCopyBackend",
    "vllm.v1.simple_kv_offload.metadata": "SimpleCPUOffloadMetadata SimpleCPUOffloadWorkerMetadata",
    "vllm.v1.simple_kv_offload.worker": "SimpleCPUOffloadWorker",
    "vllm.v1.utils": "CpuGpuBuffer",
    "vllm.v1.worker.gpu.sample.prompt_logprob": "PromptLogprobsWorker",
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu_worker": "Worker",
    "vllm.v1.worker.utils": "AttentionGroup",
}

CLASSES = {name: module for module, names in MODULES.items() for name in names.split()}
