"""vLLM's real scheduler with our policy in it and no executor: thousands of iterations a second."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from conserve.engine.known_times import KnownTimes
from conserve.engine.section import AUTO, EngineSection
from conserve.engine.vllm.scheduling.scheduler import CoServing
from conserve.engine.vllm.simulation.bare import Clock, SchedulerAlone, bare_config
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.model import LinearModel

__all__ = ["BareEngine", "Clock", "engine_config"]

MODEL = ConServeModel.of(0.3, 1e-4, 2e-4, 1.5e-3, 0.15, 1.0, 1e-3, 15.0)
FOLDER = TemporaryDirectory(
    prefix="conserve-test-"
)  # for what engines write at their end; gone with the process
RESIDUALS = [(ms, 1.0) for ms in range(1, 400)]  # the model is right


def engine_config(
    folder: Path, *, section: Mapping[str, Any] | None, times: KnownTimes | None = None, **flags: Any
) -> VllmConfig:
    """vLLM's configuration for a model that is nothing but its config.json; without times those of `MODEL`."""
    if section is None:
        return bare_config(folder, section=None, **flags)
    known = None if section.get("profile") == AUTO else times or known_times()
    return bare_config(folder, section=section_of(**section), times=known, **flags)


def section_of(**said: Any) -> EngineSection:
    """A section that promises nothing and pauses nothing by default."""
    return EngineSection.of({"harm": None, "receipt": 0.0, **said})


def known_times(model: LinearModel = MODEL) -> KnownTimes:
    """Times of iterations."""
    return KnownTimes.made_up(model, Path(FOLDER.name), of="test", residuals=RESIDUALS)


def let_see(engine: Any, embeddings: int, embedding_ms: float = 0.0) -> None:
    """Have the engine take images, with an encoder cache of so many embeddings, each of which takes so long."""
    engine.embedding_ms = embedding_ms
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=embeddings)
    engine.scheduler.max_num_encoder_input_tokens = embeddings


def show(request: Request, images: Mapping[int, str], size: int) -> None:
    """Put images into a prompt: place of the first token -> the image's name; each is `size` tokens."""
    request.mm_features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset=place, length=size),
        )
        for place, name in sorted(images.items())
    ]


class Executed(NamedTuple):
    """An executor's time and results."""

    ms: float
    sampled: list[list[int]]


class BareEngine(SchedulerAlone):
    """Requests in, iterations one by one, which take what `MODEL` says, and the time of their images."""

    embedding_ms = 0.0

    def __init__(self, config: VllmConfig, **rest: Any) -> None:
        super().__init__(config, **rest)
        self._under_way: dict[int, Executed] = {}  # by id() of vLLM's SchedulerOutput

    def add(self, *args: Any, **rest: Any) -> Request:
        """Have the scheduler take in a new `request`."""
        request = self.request(*args, **rest)
        self.scheduler.add_request(request)
        return request

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
            (MODEL.predict(Batch.of(slices)) if slices else 0.0) + self._encoder_ms(output),
            [[] if requests[name].is_prefill_chunk else [7] for name in output.num_scheduled_tokens],
        )
        self.scheduler.get_grammar_bitmask(output)  # vLLM asks as soon as workers have the iteration

    def _encoder_ms(self, output: SchedulerOutput) -> float:
        return self.embedding_ms * sum(
            self.scheduler.requests[name].get_num_encoder_embeds(number)
            for name, numbers in output.scheduled_encoder_inputs.items()
            for number in numbers
        )

    def finish(self, output: SchedulerOutput) -> Mapping[int, EngineCoreOutputs]:
        """Take in what an executor would have brought."""
        outputs: Mapping[int, EngineCoreOutputs] = self.scheduler.update_from_output(
            output, self.result(output)
        )
        if isinstance(self.scheduler, CoServing):
            self.scheduler.books.catch_up()  # not left to the next iteration: tests read what was noted
        return outputs

    def result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Results that an executor would have brought."""
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
        """Abort requests as when clients hang up."""
        self.scheduler.finish_requests(
            [request.request_id for request in requests], RequestStatus.FINISHED_ABORTED
        )
