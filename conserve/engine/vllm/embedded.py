"""Endpoint that runs vLLM in this process, for `conserve run` without a server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.endpoints.protocol import Call, Completion, Endpoint, InFlight, KvCache, OnTokens
from conserve.engine.section import AUTO
from conserve.engine.vllm.compat import trial
from conserve.engine.vllm.compat.installed import OR_A_SERVER, require_engine
from conserve.engine.vllm.compat.internals import Part
from conserve.engine.vllm.launching import fork_server
from conserve.engine.vllm.launching.environment import (
    engine_log,
    prepare_environment,
    quiet_warnings,
    why_not_started,
)
from conserve.engine.vllm.launching.flags import parse_flags, said_of_adapters
from conserve.engine.vllm.launching.launch import Launch, on_thread
from conserve.engine.vllm.launching.phases import CONVERTING, IMPORTING, LEARNING, PROCESSES, Phases
from conserve.engine.vllm.model.demo_model import DEMO_MODEL, is_to_convert, resolve_model
from conserve.engine.vllm.model.fingerprint import identity_of
from conserve.engine.vllm.model.hub import require_on_hub
from conserve.engine.vllm.profiling.learning import PACE_FLAGS, learn, require_model, scheduler_says
from conserve.engine.vllm.profiling.warm_up import seconds_asked_for
from conserve.engine.vllm.requests.answers import Serving
from conserve.engine.vllm.requests.continuation import continued
from conserve.engine.vllm.requests.data_parallel import most_requests
from conserve.engine.vllm.requests.faults import check_finished, engine_errors
from conserve.engine.vllm.requests.preparation import Prepared, Prompt, prepare
from conserve.engine.vllm.requests.token_watch import in_flight
from conserve.engine.vllm.settings import RequestedSettings
from conserve.errors import (
    ConserveError,
    EndpointUnavailable,
    EndpointUnusable,
)

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

log = logging.getLogger(__name__)
ROWS_PER_SLOT = 2  # calls in flight per sequence of the engine's batch: a freed slot is filled at once


class EmbeddedEndpoint(Endpoint):
    """One model on vLLM's AsyncLLM, unmodified, in this process and two child processes.

    `model` is a folder, a hub id or "smollm2-demo". `engine_flags` are vLLM's own and override our defaults. Where
    settings are `requested`, iterations are predicted by a latency profile and held under a time. `say` tells the
    user why the start takes longer. If the engine dies, calls in flight raise `EngineDied` and the next call starts
    it again.
    """

    kv_cache = KvCache()

    def __init__(
        self,
        model: str = DEMO_MODEL,
        *,
        engine_flags: Sequence[str] = (),
        cache_dir: Path,
        requested: RequestedSettings | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._model = model
        self._say = say
        self._requested = requested
        self._engine_flags = tuple(engine_flags)
        self._cache_dir = cache_dir
        self._running: asyncio.Task[_Engine] | None = None
        self._identity: str | None = None
        self._capacity = 0
        self._closed = False
        self._phases = Phases()
        self._phases.begin(IMPORTING)

    @property
    def identity(self) -> str:
        """Model name, and a digest of its configuration, weights, tokenizer and number formats."""
        if self._identity is None:
            raise EndpointUnusable("the engine is not started, so its identity is not known")
        return self._identity

    @property
    def model(self) -> str:
        """The model as the user named it."""
        return self._model

    @property
    def capacity(self) -> int:
        """Twice the number of sequences in one batch of the engine, or of all data parallel engines."""
        return self._capacity

    @property
    def doing(self) -> str | None:
        """The current step of the engine's start, also of a restart; None while it runs."""
        step = self._phases.now
        return None if step is None else f"starting {self._model}: {step}"

    @property
    def in_flight(self) -> InFlight:
        """Tokens of the calls in flight, read off vLLM's bookkeeping at no cost per token."""
        running = self._running
        if running is None or not running.done() or running.cancelled() or running.exception() is not None:
            return InFlight()
        return in_flight(running.result().serving.llm)

    async def start(self) -> None:
        """Start the engine: about a minute the first time it is imported, else half of that or less."""
        try:
            engine = await self._engine()
        except asyncio.CancelledError:
            await self.close()
            raise
        llm = engine.serving.llm
        config = llm.vllm_config
        self._identity = await asyncio.to_thread(identity_of, self._model, config)
        self._capacity = ROWS_PER_SLOT * most_requests(llm)
        self.kv_cache = KvCache(
            block_tokens=config.cache_config.block_size, num_blocks=config.cache_config.num_gpu_blocks
        )

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer one call; `on_tokens` gets a single answer's tokens a few times a second and at the end."""
        serving = (await self._engine()).serving
        prepared = await prepare(call, serving)
        single = len(prepared.prompts) == 1 and prepared.prompts[0].params.n == 1
        with engine_errors(serving.llm, _why_died):
            if call.resume_from and single:
                outputs = [await _resume(call, prepared, serving, on_tokens)]
            elif on_tokens is not None and single:
                with serving.tokens.on(f"{call.key}-0", on_tokens):
                    outputs = await _collect(call, prepared, serving)
                on_tokens(outputs[0].outputs[0].token_ids)
            else:
                outputs = await _collect(call, prepared, serving)
        check_finished(outputs)
        return await serving.answer(prepared, outputs)

    async def close(self) -> None:
        """Fail the calls in flight, and wait until the engine's processes have ended."""
        self._closed = True
        running, self._running = self._running, None
        if running is None:
            return
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConserveError):
            await (await running).stop()
        fork_server.release(self)
        # The engine and its OpenAI layer refer to each other. Left to the interpreter's exit, the engine's
        # finaliser would run half torn down and print a traceback.
        del running
        gc.collect()

    async def _engine(self) -> _Engine:
        if self._closed:
            raise EndpointUnusable("the engine is closed")
        running = self._running
        if running is None or (running.done() and not running.cancelled() and _died(running)):
            self._running = running = asyncio.create_task(self._start_engine(running))
        return await asyncio.shield(running)

    async def _start_engine(self, dead: asyncio.Task[_Engine] | None) -> _Engine:
        if dead is not None:
            await dead.result().stop()
        try:
            require_engine(OR_A_SERVER)
            converts = is_to_convert(self._model, self._cache_dir)
            self._phases.begin(CONVERTING if converts else IMPORTING)
            path = await on_thread(partial(resolve_model, self._model, self._cache_dir))
            say = self._say
            flags, requested = self._engine_flags, self._requested
            return await _Engine.start(self._model, path, flags, requested, self._phases, say, user=self)
        except BaseException as error:
            fork_server.release(self)
            if isinstance(error, ConserveError) or not isinstance(error, Exception):
                raise
            raise EndpointUnusable(why_not_started(self._model, error)) from error
        finally:
            self._phases.end()


class _Engine:
    """A started engine and its launch."""

    def __init__(self, launch: Launch, serving: Serving) -> None:
        self._launch = launch
        self.serving = serving

    @classmethod
    async def start(
        cls,
        name: str,
        path: str,
        flags: Sequence[str],
        requested: RequestedSettings | None,
        phases: Phases,
        say: Callable[[str], None],
        *,
        user: EmbeddedEndpoint,
    ) -> _Engine:
        seconds_asked_for()
        phases.begin(IMPORTING)
        prepare_environment(offline=Path(path).exists())
        await on_thread(partial(require_on_hub, path))
        needed = [Part.ENGINE, Part.EMBEDDED, *([Part.SCHEDULER] if requested is not None else [])]
        await on_thread(partial(trial.require, *needed, say=say))  # its outcome is for forks too
        await asyncio.to_thread(fork_server.start_early, user)
        quiet_warnings()
        arguments = await on_thread(partial(parse_flags, path, flags))  # imports vLLM, up to a minute
        if (warning := said_of_adapters(arguments)) is not None:
            say(warning)
        log = engine_log()
        log.capture_loggers()
        log.mark()
        launch = Launch(arguments, log_descriptor=log.fileno(), requested=requested)
        phases.begin(PROCESSES, log.tail)
        llm = await launch.run()
        log.capture_loggers()
        try:
            if "generate" not in await llm.get_supported_tasks():
                raise EndpointUnusable(f"{name} does not generate text; name a model that does")
            if requested is not None and requested.section.profile == AUTO:
                phases.begin(LEARNING)
                await learn(llm, say=say)
                if (said := await scheduler_says(llm, {})) is not None:
                    require_model(said, said["slo"], requested.command, flags=PACE_FLAGS)
            return cls(launch, Serving(llm, name))
        except BaseException:
            await launch.stop()
            raise

    @property
    def dead(self) -> bool:
        return bool(self.serving.llm.errored)

    async def stop(self) -> None:
        closed = EndpointUnavailable("the engine is being closed")
        self.serving.llm.output_processor.propagate_error(closed)
        await self._launch.stop()


def _died(running: asyncio.Task[_Engine]) -> bool:
    return running.exception() is None and running.result().dead


async def _collect(call: Call, prepared: Prepared, serving: Serving) -> list[RequestOutput]:
    """The final output of every prompt, each with its `n` answers."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_final(f"{call.key}-{number}", prompt, prepared, serving))
                for number, prompt in enumerate(prepared.prompts)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _final(key: str, prompt: Prompt, prepared: Prepared, serving: Serving) -> RequestOutput:
    final = None
    async for output in serving.llm.generate(
        prompt.engine_input, prompt.params, key, priority=prepared.request.priority
    ):
        final = output
    assert final is not None
    return final


async def _resume(
    call: Call, prepared: Prepared, serving: Serving, on_tokens: OnTokens | None
) -> RequestOutput:
    """One answer continued from saved tokens; the engine is not used if the saved tokens end it."""
    (prompt,) = prepared.prompts

    def go_on(engine_input: EngineInput, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        generating: AsyncGenerator[RequestOutput, None] = serving.llm.generate(
            engine_input, params, call.key, priority=prepared.request.priority
        )
        return generating

    async for answer in continued(serving.llm, prompt, call.resume_from, go_on):
        if on_tokens is not None:
            on_tokens(answer.token_ids)
    return answer.output()


def _why_died() -> str:
    cause = engine_log().last_error()
    return f"the engine died: {cause}" if cause else "the engine died without a word; was it killed?"
