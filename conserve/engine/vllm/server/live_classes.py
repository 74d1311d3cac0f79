"""Classes of live traffic in vLLM's API server: which one a request is of (docs/adr/0023).

The choice is `LiveClasses`'s. The engine core reads it from the request's `vllm_xargs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from conserve.engine.policy.classes import ClassRefused, LiveClasses
from conserve.engine.policy.view import DEFAULT_CLASS, OFFLINE_PRIORITY
from conserve.engine.section import EngineSection
from conserve.engine.vllm.server.privileges import CALLER, Caller, Role, refuse
from conserve.engine.vllm.settings import SECTION
from conserve.errors import SettingsError
from conserve.request_fields import CLASS_ARGUMENT

FOUND = "conserve_classes"  # attribute of vLLM's front end: the classes of its configuration
MODEL: ContextVar[str | None] = ContextVar("conserve_model", default=None)
"""Model that the current request names; None where vLLM's serving classes are not used."""


def noting_model(session_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_get_session_id`, which vLLM calls once for each request before it generates: note the model's name."""

    @functools.wraps(session_of)
    def wrapped(request: Any, raw_request: Any) -> Any:
        MODEL.set(getattr(request, "model", None))
        return session_of(request, raw_request)

    return wrapped


def classing(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.generate`: write a live request's class into its parameters, where the server has classes.

    A class that is not there is a 400, one that the caller may not ask for a 403.
    """

    @functools.wraps(generate)
    def wrapped(llm: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **rest: Any) -> Any:
        classes = classes_of_engine(llm)
        if classes and hasattr(sampling_params, "extra_args") and rest.get("priority", 0) < OFFLINE_PRIORITY:
            put_in_class(classes, sampling_params, rest)
        return generate(llm, prompt, sampling_params, request_id, *args, **rest)

    return wrapped


def put_in_class(classes: LiveClasses, params: Any, rest: Mapping[str, Any]) -> None:
    """Choose the class of a request, and note it for the engine core and for the check of privileges."""
    caller = CALLER.get() or Caller(role=Role.HARVESTER)
    extra, adapter = params.extra_args or {}, getattr(rest.get("lora_request"), "lora_name", None)
    models = [name for name in (MODEL.get(), adapter) if name]
    own = classes.own(key=caller.key, project=caller.project, models=models)
    try:
        asked = extra.get(CLASS_ARGUMENT, caller.asked_class)
        live_class = classes.chosen(own, asked, trusted=caller.role is Role.HARVESTER)
    except ClassRefused as why:
        refuse(str(why), HTTPStatus.BAD_REQUEST if why.unknown else HTTPStatus.FORBIDDEN)
    params.extra_args = {**extra, CLASS_ARGUMENT: live_class}
    if live_class in classes.named:
        promised_ms = classes.promises_of(live_class).slo.ttft_ms
        CALLER.set(replace(caller, live_class=live_class, ttft_slo_ms=promised_ms))


def class_of(llm: Any, params: Any) -> str:
    """The class that `classing` has written into a live request's parameters; the default one without classes."""
    extra = getattr(params, "extra_args", None) or {}
    return str(extra.get(CLASS_ARGUMENT, DEFAULT_CLASS)) if classes_of_engine(llm) else DEFAULT_CLASS


def classes_of_engine(llm: Any) -> LiveClasses:
    """Classes of live traffic in the engine's configuration, read once."""
    found: LiveClasses | None = getattr(llm, FOUND, None)
    if found is None:
        config = getattr(getattr(llm, "vllm_config", None), "additional_config", None) or {}
        try:
            found = EngineSection.of(config.get(SECTION, {})).live_classes
        except SettingsError:  # for an engine with another scheduler, which reads no section
            found = LiveClasses()
        setattr(llm, FOUND, found)
    return found
