"""vLLM's plug-in: what ConServe adds to vLLM's own processes, and nothing where its scheduler does not run.

`register` (entry point `vllm.general_plugins`) runs in every process of vLLM and only hangs up hooks;
`Surface` (entry point `vllm.endpoint_plugins`, loaded where VLLM_PLUGINS names it) adds a route.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import conserve
from conserve.engine.policy.policies import SERVING
from conserve.engine.policy.preemption import OFF, PREEMPTIONS
from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.runtime.parent import follow_parent
from conserve.engine.vllm.compat import SUPPORTED_VERSION, installed_engine
from conserve.engine.vllm.pacing import SECTION

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State
    from starlette.requests import Request
    from starlette.responses import Response
    from vllm.engine.protocol import EngineClient

log = logging.getLogger("vllm.conserve")
PATH = "/v1/conserve"  # below /v1, which vLLM's --api-key guards
SPILL_PATH = f"{PATH}/spill"
SUPERVISOR = (
    "CONSERVE_SUPERVISOR"  # a secret between `conserve serve` and its server, and the header it is sent in
)
LOOK_S = 0.05  # between two looks whether the workers have written
SERVED = "CONSERVE_SERVED"  # set where `conserve serve` started the server
RESUME = "conserve_resume"  # in a request's vllm_xargs: token ids that an earlier attempt generated
FLEX = "flex"  # OpenAI's service tier for work that can wait


def register() -> None:
    """Hang up the hooks in this process, once; leaves a vLLM of another version alone."""
    engine = installed_engine()
    if engine is None or engine.version.split(".")[:2] != SUPPORTED_VERSION.split("."):
        log.warning("ConServe drives vLLM %s and leaves this one alone", SUPPORTED_VERSION)
        return
    process = multiprocessing.current_process()
    if os.environ.get(SERVED) and multiprocessing.parent_process() is not None:
        follow_parent(signal.SIGKILL)  # vLLM's engine core waits for ever for a front end that was killed
    if "Worker" in process.name:
        return
    hook_engine_core()
    if not process.name.startswith("EngineCore"):
        hook_server()


def hook_engine_core() -> None:
    """Let the API server ask the scheduler, and the scheduler know who comes while the model runs."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.conserve = ask_scheduler
    EngineCore.conserve_spill = ask_spilling
    if not hasattr(EngineCore.preprocess_add_request, "__wrapped__"):
        EngineCore.preprocess_add_request = announcing(EngineCore.preprocess_add_request)


def hook_server() -> None:
    """Tell offline requests of the flex tier, and rows that bring saved tokens."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.v1.engine.async_llm import AsyncLLM

    if not hasattr(AsyncLLM.generate, "__wrapped__"):
        GenerateBaseServing._get_priority = staticmethod(flex_is_offline(GenerateBaseServing._get_priority))
        AsyncLLM.generate = resuming(AsyncLLM.generate)


def ask_scheduler(core: Any, change: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """`CoServing.conserve` through vLLM's utility calls; None where another scheduler runs."""
    asked = getattr(core.scheduler, "conserve", None)
    return asked(change) if asked is not None else None


def ask_spilling(core: Any, what: str) -> dict[str, Any] | None:
    """`spill.ask_spilling`; None where nothing goes to disk."""
    from conserve.engine.vllm import spill

    return spill.ask_spilling(core, what)


def announcing(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Tell our scheduler of each request the moment it reaches the engine core, in its I/O thread."""

    @functools.wraps(preprocess)
    def wrapped(core: Any, request: Any) -> Any:
        prepared = preprocess(core, request)
        arriving = getattr(getattr(core, "scheduler", None), "arriving", None)
        if arriving is not None:
            try:
                arriving(prepared[0])
            except Exception:  # a request must not be refused because nobody made room for it
                log.exception("an arrival was not looked at")
        return prepared

    return wrapped


def flex_is_offline(priority_of: Callable[..., int]) -> Callable[..., int]:
    """Give requests of OpenAI's flex tier the priority of offline ones."""

    @functools.wraps(priority_of)
    def wrapped(request: Any, raw_request: Any) -> int:
        priority = priority_of(request, raw_request)
        tier = getattr(request, "service_tier", None)
        return max(priority, OFFLINE_PRIORITY) if tier == FLEX else priority

    return wrapped


def resuming(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Have requests that bring tokens of an earlier attempt go on from them."""

    @functools.wraps(generate)
    def wrapped(llm: Any, prompt: Any, sampling_params: Any, request_id: str, **rest: Any) -> Any:
        saved = (getattr(sampling_params, "extra_args", None) or {}).get(RESUME)
        if not saved:
            return generate(llm, prompt, sampling_params, request_id, **rest)
        start = functools.partial(generate, llm, **rest)
        return resumed(llm, start, prompt, sampling_params, request_id, saved)

    return wrapped


async def resumed(
    llm: Any, start: Callable[..., Any], prompt: Any, params: Any, request_id: str, saved: Any
) -> AsyncIterator[Any]:
    """The outputs of one uninterrupted generation: what was saved comes with the first."""
    from vllm.sampling_params import RequestOutputKind

    from conserve.engine.vllm.continuation import continued
    from conserve.engine.vllm.requests import Prompt

    if not isinstance(saved, list) or not all(isinstance(token, int) for token in saved) or params.n != 1:
        raise ValueError(f"{RESUME} takes the token ids of one answer")
    streamed = params.output_kind == RequestOutputKind.DELTA

    def go_on(rest_of_prompt: Any, rest_of_params: Any) -> Any:
        return start(rest_of_prompt, rest_of_params, request_id)

    async for answer in continued(llm, Prompt(engine_input=prompt, params=params), saved, go_on):
        if streamed:
            yield answer.delta()
    if not streamed:
        yield answer.output()


class Surface:
    """The routes of docs/design.md: how the scheduler does, also at /metrics, and another policy meanwhile."""

    name = "conserve"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_route(PATH, show, methods=["GET"])
        app.add_route(PATH, change, methods=["POST"])
        app.add_route(SPILL_PATH, spill, methods=["POST"])
        from conserve.engine.vllm.metrics import Metrics

        Metrics(scheduler_says).attach(app)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Before the server takes requests: see what generates the tokens, and learn its times if need be."""
        from conserve.engine.vllm.fingerprint import identity_of
        from conserve.engine.vllm.warm_up import warm_up

        if engine_client is None or await scheduler_says(engine_client) is None:
            return
        config = engine_client.vllm_config
        names = args.served_model_name or [args.model]
        state.conserve_identity = await asyncio.to_thread(identity_of, names[0], config)
        section = config.additional_config.get(SECTION, {})
        if section.get("model", "") is None or section.get("profile") == "auto":
            log.info("learning how long iterations take")
            await warm_up(engine_client, say=log.warning)
            # A request from outside would end the warm-up; so does this question.
            said = await scheduler_says(engine_client, {})
            if said is not None and said["alone"] is None:
                log.warning("the warm-up taught too little; the first requests go on with it")
        if config.kv_transfer_config is not None:
            await engine_client.engine_core.call_utility_async("conserve_spill", "take_in")


async def scheduler_says(
    engine_client: Any, change: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """What the scheduler in the engine core answers; None if it is not ours."""
    answer = await engine_client.engine_core.call_utility_async("conserve", change)
    return dict(answer) if answer is not None else None


async def show(request: Request) -> Response:
    """How the scheduler does."""
    return await answer(request, None)


async def change(request: Request) -> Response:
    """Another policy, preemption or SLO; only where the engine was started to allow it (`conserve bench`)."""
    config = request.app.state.engine_client.vllm_config
    if not config.additional_config.get(SECTION, {}).get("control"):
        return reply({"error": {"message": "this engine keeps its policy and its SLO"}}, 403)
    try:
        wanted = json.loads(await request.body())
        policy, slo = wanted.get("policy", SERVING[0]), wanted.get("slo", {})
        preemption = wanted.get("preemption", OFF)
        known = set(wanted) <= {"policy", "preemption", "checkpoint", "slo"} and set(slo) <= {
            "ttft_ms",
            "tbt_ms",
        }
        known = known and policy in SERVING and preemption in (*PREEMPTIONS, OFF)
        known = known and wanted.get("checkpoint", OFF) in ("on", OFF)
        positive = all(value is None or value > 0 for value in slo.values())
    except (ValueError, TypeError, AttributeError):
        known = positive = False
    if not known or not positive:
        example = '{"preemption": "off", "checkpoint": "on", "slo": {"ttft_ms": 1500, "tbt_ms": 100}}'
        names = f"policies are {', '.join(SERVING)}; preemptions are {', '.join((*PREEMPTIONS, OFF))}"
        return reply({"error": {"message": f"send e.g. {example}; {names}"}}, 400)
    return await answer(request, wanted)


async def spill(request: Request) -> Response:
    """Write KV of rows in flight to disk; for the process that started this server and is about to stop it."""
    secret, sent = os.environ.get(SUPERVISOR, ""), request.headers.get(SUPERVISOR, "")
    if not secret or not hmac.compare_digest(sent.encode(), secret.encode()):
        return reply({"error": {"message": "only conserve serve may ask for that"}}, 403)
    ask = request.app.state.engine_client.engine_core.call_utility_async
    said = await ask("conserve_spill", "begin")
    while said is not None and said["writing"]:
        await asyncio.sleep(LOOK_S)
        said = await ask("conserve_spill", "end")
    if said is None:
        return reply({"error": {"message": "this engine has no checkpoints to spill"}}, 404)
    return reply(said)


async def answer(request: Request, wanted: Mapping[str, Any] | None) -> Response:
    """The scheduler's answer, with what the API server knows."""
    client = request.app.state.engine_client
    said = await scheduler_says(client, wanted)
    if said is None:
        return reply({"error": {"message": "this engine runs with another scheduler"}}, 404)
    return reply(
        {
            "version": conserve.__version__,
            "identity": getattr(request.app.state, "conserve_identity", ""),
            "max_num_seqs": client.vllm_config.scheduler_config.max_num_seqs,
            "offline_priority": OFFLINE_PRIORITY,
            **said,
        }
    )


def reply(document: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON response."""
    from starlette.responses import JSONResponse

    return JSONResponse(document, status)
