"""vLLM's real scheduler with our policy in it and no executor: thousands of iterations a second."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.vllm.scheduling.scheduler import CoServingScheduler
from conserve.engine.vllm.settings import SCHEDULER, SECTION
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel

MODEL = ConServeModel.of(0.3, 1e-4, 2e-4, 1.5e-3, 0.15, 1.0, 1e-3, 15.0)
FOLDER = TemporaryDirectory(
    prefix="conserve-test-"
)  # for what engines write at their end; gone with the process
RESIDUALS = [(ms, 1.0) for ms in range(1, 400)]  # the model is right


def engine_config(folder: Path, *, section: Mapping[str, Any] | None, **flags: Any) -> VllmConfig:
    """vLLM's configuration for a model that is nothing but its config.json."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": flags.get("max_model_len", 8192), "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    chosen = {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "block_size": 128,
        "enable_prefix_caching": True,
    }
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        scheduling_policy="priority",
        kv_cache_memory_bytes=1 << 30,
        **{**chosen, **flags},
    ).create_engine_config()
    if section is not None:
        config.scheduler_config.scheduler_cls = SCHEDULER
        config.additional_config = {SECTION: {**known_model(), **section}}
    return config


def known_model() -> dict[str, Any]:
    """The section's part that says how long iterations take."""
    return {
        "model": MODEL.name,
        "coefficients": MODEL.coefficients,
        "residuals": RESIDUALS,
        "of": "test",
        "correction": str(Path(FOLDER.name) / "correction"),
        "keep_correction": False,
    }


class Clock:
    """Stands in for the module `time` where the adapter reads it: only iterations take time."""

    READERS: ClassVar = (
        "scheduling.scheduler",
        "scheduling.control",
        "scheduling.observation",
        "scheduling.report",
        "scheduling.settlement",
        "preemption.arrivals",
    )  # of the adapter's modules

    def __init__(self) -> None:
        self.now = 1e6  # s

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The adapter reads this clock."""
        with ExitStack() as stack:
            for module in self.READERS:
                stack.enter_context(patch(f"conserve.engine.vllm.{module}.time", self))
            yield


class Executed(NamedTuple):
    """What an executor would have taken and brought."""

    ms: float
    sampled: list[list[int]]


class BareEngine:
    """Requests in, iterations one by one, which take what `MODEL` says."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        num_blocks: int = 4096,
        scheduler_class: Any = CoServingScheduler,
        clock: Clock | None = None,
    ) -> None:
        block_size = config.cache_config.block_size
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[SimpleNamespace(size=num_blocks * spec.page_size_bytes)],  # its class varies
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.config = config
        self.clock = clock or Clock()
        self.scheduler = scheduler_class(
            config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._numbers = 0
        self._under_way: dict[int, Executed] = {}  # by id() of vLLM's SchedulerOutput

    def add(self, *args: Any, **rest: Any) -> Request:
        """Have the scheduler take in a new `request`."""
        request = self.request(*args, **rest)
        self.scheduler.add_request(request)
        return request

    def request(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 16,
        *,
        offline: bool = False,
        age_s: float = 0.0,
        **params: Any,
    ) -> Request:
        """One with so many prompt tokens (all different from others') or these."""
        self._numbers += 1
        again, first = divmod(self._numbers, 997)
        tokens = (
            list(prompt)
            if not isinstance(prompt, int)
            else [first, again, *((first + i * 31) % 997 for i in range(2, prompt))][:prompt]
        )
        return Request(
            request_id=f"{'off' if offline else 'on'}-{self._numbers}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
            pooling_params=None,
            arrival_time=self.clock.time() - age_s,
            priority=OFFLINE_PRIORITY if offline else 0,
            block_hasher=self._hasher,
        )

    def step(self) -> SchedulerOutput:
        """Schedule, compute nothing, sample a 7 for each request that is due a token."""
        output = self.start()
        self.finish(output)
        return output

    def start(self) -> SchedulerOutput:
        """Schedule an iteration, which `finish` ends; with asynchronous scheduling another may start."""
        output: SchedulerOutput = self.scheduler.schedule()
        self.execute(output)
        return output

    def execute(self, output: SchedulerOutput) -> None:
        """Note what the iteration takes and brings, as of now: the next one may be scheduled before it ends."""
        requests = self.scheduler.requests
        slices = []
        for name, tokens in output.num_scheduled_tokens.items():
            context = requests[name].num_computed_tokens - tokens
            slices.append(Slice(tokens, context, tokens == 1 and context >= requests[name].num_prompt_tokens))
        self._under_way[id(output)] = Executed(
            MODEL.predict(Batch.of(slices)) if slices else 0.0,
            [[] if requests[name].is_prefill_chunk else [7] for name in output.num_scheduled_tokens],
        )

    def finish(self, output: SchedulerOutput) -> Mapping[int, EngineCoreOutputs]:
        """Take in what an executor would have brought."""
        outputs: Mapping[int, EngineCoreOutputs] = self.scheduler.update_from_output(
            output, self.result(output)
        )
        return outputs

    def result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What an executor would have brought."""
        names = list(output.num_scheduled_tokens)
        ms, sampled = self._under_way.pop(id(output))
        self.clock.now += max(ms, 0.1) / 1e3
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def abort(self, requests: Iterable[Request]) -> None:
        """As when clients hang up."""
        self.scheduler.finish_requests(
            [request.request_id for request in requests], RequestStatus.FINISHED_ABORTED
        )
