"""Place where a harness's requests are answered: its queue, its engine or server, and the model's tokenizer."""

import asyncio
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from conserve.api.engines import Engine
from conserve.api.opening import open as open_store
from conserve.config import Settings, load
from conserve.errors import EvaluationUnready, UsageError
from conserve.evals.plan import ModelTarget
from conserve.jobs.harvest.services import running
from conserve.nightly.harness.request_jobs import Alone
from conserve.nightly.targets import ask_server, bound_to, with_target

Scoring = Literal["auto", "echo", "next-token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """A model's tokenizer and context length, and the ways in which its server scores tokens."""

    tokenizer: Any
    max_length: int
    is_vllm: bool
    next_token: bool


def alone(
    name: str,
    *,
    model: str | None = None,
    endpoint: str | None = None,
    store: str | Path | None = None,
    run: str | None = None,
    wait: bool = False,
    api_key: str | None = None,
    flags: Sequence[str] = (),
    progress: bool = True,
) -> Alone:
    """Queue of a harness that was started by itself; its engine starts with the first job.

    With `wait` it starts none: a `conserve run` or `conserve serve` over the store answers.
    """
    opened = open_store(store)
    settings = settings_of(store, model=model, endpoint=endpoint, api_key=api_key)
    asked = bound_to(settings, ModelTarget(model=model, answered_by="serve" if wait else "run"))
    if run is None:
        run = f"{name}-{secrets.token_hex(3)}"
        print(f"run {run}: if it is killed, go on with it by run={run}", file=sys.stderr, flush=True)
    engine = None
    if not wait:
        engine = Engine(model, endpoint=endpoint, api_key=api_key, engine_args=flags)
    return Alone(opened, str(run), engine, name=name, model=asked, progress=progress)


def model_tokens(
    settings: Settings,
    *,
    flags: Sequence[str] = (),
    tokenizer: str | None = None,
    max_length: int | None = None,
    scoring: Scoring = "auto",
) -> ModelTokens:
    """Tokenizer and context length of the settings' model or endpoint; raises `UsageError` without them."""
    from conserve.engine.vllm.model.tokenizer import folder_tokens

    if scoring not in ("auto", "echo", "next-token"):
        raise UsageError(f"scoring is auto, echo or next-token, not {scoring!r}")
    model, context, is_vllm = settings.engine_model, None, True
    if settings.endpoint is not None and settings.endpoint.startswith("http"):
        model, context, is_vllm = asyncio.run(model_of_server(settings))
    found = folder_tokens(tokenizer or model, settings.models_folder, flags)
    if found is None:
        raise UsageError(
            f"there is no tokenizer of {tokenizer or model} on this machine (or transformers is not installed); "
            "name the model's folder: tokenizer=FOLDER"
        )
    length = max_length or context or found.context
    if length is None:
        raise UsageError(f"the context length of {model} is not known; give max_length=TOKENS")
    next_token = is_vllm if scoring == "auto" else scoring == "next-token"
    return ModelTokens(
        tokenizer=found.tokenizer, max_length=int(length), is_vllm=is_vllm, next_token=next_token
    )


def settings_of_target(settings: Settings, target: ModelTarget, *, tokenizer: str | None = None) -> Settings:
    """Settings with the model or the server of a target, whose tokens are to be known unless a tokenizer is named.

    Raises `EvaluationUnready` where a server of the store is to answer and which model it has cannot be told.
    """
    from conserve.endpoints.discovery import served_models

    if target.answered_by == "run":
        return with_target(settings, target)
    key = settings.api_key or settings.harvest_key
    listed = [(server.url, ask_server(server.url, key, served_models) or []) for server in running(settings)]
    if target.model is not None:
        endpoint = next((url for url, models in listed if target.model in models), None)
        return replace(settings, model=target.model, endpoint=endpoint, api_key=key)
    firsts = {models[0]: url for url, models in listed if models}
    if len(firsts) > 1:
        raise EvaluationUnready(
            f"servers over this store have the models {', '.join(sorted(firsts))}; name the one that answers: "
            "model, beside answered_by"
        )
    if not firsts and tokenizer is None:
        raise EvaluationUnready(
            "no `conserve serve` over this store says which model it has; start one, or name the model's folder as "
            "the suite's tokenizer"
        )
    return replace(settings, model=None, endpoint=next(iter(firsts.values()), None), api_key=key)


async def model_of_server(settings: Settings) -> tuple[str, int | None, bool]:
    """Model of a server, its context length, and True if the server is vLLM, which alone has /tokenize."""
    from conserve.endpoints.tokens import ServerTokens

    assert settings.endpoint is not None
    server = await ServerTokens.ask(settings.endpoint, api_key=settings.api_key, model=settings.model)
    try:
        counted = await server.of_text("a", special=False)
        return server.model, server.context, counted is not None
    finally:
        await server.close()


def engine_flags(engine_args: str | Sequence[str], named: Mapping[str, Any]) -> list[str]:
    """Flags of vLLM: a line of them, then those that were given by name, as `dtype="float32"`."""
    flags = shlex.split(engine_args) if isinstance(engine_args, str) else list(engine_args)
    for name, value in named.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{word}" if value else f"--no-{word}")
        elif value is not None:
            flags += [f"--{word}", str(value)]
    return flags


def settings_of(
    store: str | Path | None, *, model: str | None, endpoint: str | None, api_key: str | None
) -> Settings:
    """Settings with these on top."""
    return load({"home": store, "model": model, "endpoint": endpoint, "api_key": api_key})
