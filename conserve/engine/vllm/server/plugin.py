"""vLLM's plug-in: hooks in vLLM's own processes, which do nothing unless ConServe's scheduler runs.

`register` (entry point `vllm.general_plugins`) runs in every process of vLLM and only sets hooks;
`Surface` (entry point `vllm.endpoint_plugins`, loaded if VLLM_PLUGINS names it) adds routes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from conserve import logs
from conserve.engine.runtime.parent_death import follow_parent
from conserve.engine.section import AUTO
from conserve.engine.vllm.compat.installed import too_old, untried
from conserve.engine.vllm.compat.internals import Part
from conserve.engine.vllm.compat.trial import lost_parts, said_of
from conserve.engine.vllm.compat.versions import SUPPORTED
from conserve.engine.vllm.model.weights import noting_updates, updated_version
from conserve.engine.vllm.preemption.cpu_pieces import split_on_cpu
from conserve.engine.vllm.server.live_classes import classing, noting_model
from conserve.engine.vllm.server.priorities import flex_is_offline, keeping_priority, noting_priority
from conserve.engine.vllm.server.privileges import permitting
from conserve.engine.vllm.settings import command_of, section_of
from conserve.request_fields import RESUME_ARGUMENT
from conserve.variables import SERVED

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

log = logging.getLogger("vllm.conserve")
# Attribute of what our hooks have replaced; tracing agents wrap vLLM's methods, too.
HOOKED = "conserve_hooked"
COUNTING = "batched_count_greater_than"  # counts the tokens that are likelier than a sample


def register() -> None:
    """Set the hooks in this process, once; a vLLM of another version is left alone."""
    if too_old():
        log.warning("ConServe drives vLLM %s and leaves this one alone", SUPPORTED)
        return
    if not fits():
        return
    process = multiprocessing.current_process()
    if os.environ.get(SERVED) and logs.wanted_by(os.environ):
        logs.take_over()
    if os.environ.get(SERVED) and multiprocessing.parent_process() is not None:
        follow_parent(signal.SIGKILL)  # vLLM's engine core waits for ever for its front end
    if "Worker" in process.name:
        count_uncompiled()
        return
    split_on_cpu()
    hook_engine_core()
    if not process.name.startswith("EngineCore"):
        hook_server()


def fits() -> bool:
    """False, with a warning, if an untried vLLM has not what the hooks need."""
    told, lost = untried(), lost_parts()
    if told is None:
        return True
    needed = lost.keys() & {Part.ENGINE, Part.SCHEDULER, Part.SERVER}
    log.warning("%s%s; %s", told, " and leaves alone" if needed else "", said_of(lost))
    return not needed


def count_uncompiled() -> None:
    """Have a CPU's worker count the tokens likelier than a sample as the function is written.

    vLLM compiles it at the first request with logprobs, for which all requests would wait ten seconds. A vLLM
    without the function needs no mend, so the self-test does not look for it.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import sampler

    counting = getattr(sampler, COUNTING, None)
    if counting is not None and current_platform.is_cpu():
        setattr(sampler, COUNTING, inspect.unwrap(counting))


def hook_engine_core() -> None:
    """Let the API server ask the scheduler, and tell the scheduler of requests that arrive while the model runs."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.conserve = ask_scheduler
    EngineCore.conserve_delays = report_delays
    EngineCore.conserve_spill = ask_spilling
    if not hasattr(EngineCore.preprocess_add_request, HOOKED):
        EngineCore.preprocess_add_request = marked(announcing(EngineCore.preprocess_add_request))
        EngineCore.step_with_batch_queue = waiting(EngineCore.step_with_batch_queue)
        EngineCore.collective_rpc = noting_updates(EngineCore.collective_rpc)


def hook_server() -> None:
    """Make flex requests offline, find the class of live ones, continue rows, and refuse what a caller may not."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.v1.engine.async_llm import AsyncLLM

    from conserve.engine.vllm.server.delivery import delivering

    if not hasattr(AsyncLLM.generate, HOOKED):
        priority_of = flex_is_offline(GenerateBaseServing._get_priority)
        session_of = noting_model(noting_priority(GenerateBaseServing._get_session_id, priority_of))
        GenerateBaseServing._get_priority = staticmethod(priority_of)
        GenerateBaseServing._get_session_id = staticmethod(session_of)
        resumable = resuming(AsyncLLM.generate)
        AsyncLLM.generate = marked(keeping_priority(classing(permitting(delivering(resumable)))))
        AsyncLLM.encode = permitting(AsyncLLM.encode)


def marked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook as ours, so that it is set once, also beneath a wrapper of others."""
    setattr(hook, HOOKED, True)
    return hook


def ask_scheduler(core: Any, change: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Ask the scheduler (`CoServing.conserve`) through vLLM's utility calls; None if another scheduler runs."""
    asked = getattr(core.scheduler, "conserve", None)
    return {**asked(change), "weights": updated_version(core)} if asked is not None else None


def report_delays(core: Any, server: str, delays_ms: dict[str, Any]) -> dict[str, Any] | None:
    """Report delays of delivery to the scheduler (`control.report_delays`); None if another scheduler runs."""
    from conserve.engine.vllm.scheduling import control

    ours = hasattr(core.scheduler, "conserve")
    return control.report_delays(core.scheduler, server, delays_ms) if ours else None


def ask_spilling(core: Any, what: str) -> dict[str, Any] | None:
    """`spill.ask_spilling`; None if KV does not go to disk."""
    from conserve.engine.vllm.checkpoint import spill

    return spill.ask_spilling(core, what)


def announcing(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `preprocess_add_request`: tell our scheduler of each arrival, in the engine core's I/O thread."""

    @functools.wraps(preprocess)
    def wrapped(core: Any, request: Any) -> Any:
        prepared = preprocess(core, request)
        arriving = getattr(getattr(core, "scheduler", None), "arriving", None)
        if arriving is not None:
            try:
                arriving(prepared[0])
            except Exception:  # a failed announcement must not refuse the request
                log.exception("an arrival was not looked at")
        return prepared

    return wrapped


def waiting(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step_with_batch_queue`: where our scheduler does not schedule ahead, a step ends with its iteration.

    Without this, vLLM would take a second step to read the results, and sleep for 1 ms behind it.
    """

    @functools.wraps(step)
    def wrapped(core: Any) -> Any:
        outputs, executed = step(core)
        ahead = getattr(core.scheduler, "ahead", None)
        if executed and outputs is None and ahead is not None and ahead.waits():
            outputs, _ = step(core)
        return outputs, executed

    return wrapped


def resuming(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.generate`: requests that bring tokens of an earlier attempt continue from them."""

    @functools.wraps(generate)
    def wrapped(llm: Any, prompt: Any, sampling_params: Any, request_id: str, **rest: Any) -> Any:
        saved = (getattr(sampling_params, "extra_args", None) or {}).get(RESUME_ARGUMENT)
        if not saved:
            return generate(llm, prompt, sampling_params, request_id, **rest)
        require_resumable(llm, prompt, sampling_params, saved)
        start = functools.partial(generate, llm, **rest)
        return resumed(llm, start, prompt, sampling_params, request_id, saved)

    return wrapped


def require_resumable(llm: Any, prompt: Any, params: Any, saved: Any) -> None:
    """Raise, before anything is computed, if a request cannot continue from its saved tokens: clients get a 400."""
    from vllm.exceptions import VLLMValidationError

    from conserve.engine.vllm.requests.continuation import why_not

    if why := why_not(saved, prompt, params, llm.model_config.get_vocab_size()):
        field = f"vllm_xargs.{RESUME_ARGUMENT}"
        raise VLLMValidationError(f"{field}: {why}", parameter=field)


async def resumed(
    llm: Any, start: Callable[..., Any], prompt: Any, params: Any, request_id: str, saved: Any
) -> AsyncIterator[Any]:
    """Outputs as of one uninterrupted generation; the saved tokens come with the first."""
    from vllm.sampling_params import RequestOutputKind

    from conserve.engine.vllm.requests.continuation import continued
    from conserve.engine.vllm.requests.preparation import Prompt

    streamed = params.output_kind == RequestOutputKind.DELTA

    def go_on(rest_of_prompt: Any, rest_of_params: Any) -> Any:
        return start(rest_of_prompt, rest_of_params, request_id)

    async for answer in continued(llm, Prompt(engine_input=prompt, params=params), saved, go_on):
        if streamed:
            yield answer.delta()
    if not streamed:
        yield answer.output()


class Surface:
    """Our routes in vLLM's API server (`routes`), and the warm-up before it takes requests."""

    name = "conserve"
    required_tasks = None  # attached for models that only embed, too

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        from conserve.engine.vllm.server.routes import attach

        attach(app)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Find the model's identity and, if need be, learn its latency model before the server takes requests.

        Raises `ProfileMissing` for an SLO that the engine could not keep without a latency model.
        """
        from conserve.engine.vllm.model.fingerprint import identity_of
        from conserve.engine.vllm.profiling.learning import learn, require_model, scheduler_says
        from conserve.engine.vllm.server.routes import remember

        if engine_client is None or await scheduler_says(engine_client) is None:
            return
        config = engine_client.vllm_config
        names = args.served_model_name or [args.model]
        state.conserve_identity = await asyncio.to_thread(identity_of, names[0], config)
        section, command = section_of(config), command_of(config)
        if section.profile == AUTO:
            log.info("learning how long iterations take")
            await learn(engine_client, say=log.warning)
        said = await scheduler_says(engine_client, {})
        assert said is not None
        # A default harm is no promise that the user made.
        require_model(said, {**said["slo"], "harm": section.asked_harm}, command)
        if section.classes:
            require_model(said, {"classes": True}, command, flags={"classes": "--class"})
        remember(state, said)
        if config.kv_transfer_config is not None:
            await engine_client.engine_core.call_utility_async("conserve_spill", "take_in")
