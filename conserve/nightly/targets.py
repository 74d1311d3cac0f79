"""Models and endpoints that a night asks, of the file or of flags, and whether they can be asked."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from conserve.api.portal import portal
from conserve.api.running import ADDRESSES
from conserve.config import Settings, model_name
from conserve.errors import ConserveError, ModelUnnamed, SettingsError, UsageError
from conserve.evals.plan import ModelTarget
from conserve.hosts import server_root, split_login, without_login

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
ModelAsked = Callable[[ModelTarget], str | None]


def with_flags(target: ModelTarget, model: str | None, endpoint: str | None) -> ModelTarget:
    """Target with the model or the endpoint of a flag; what no flag names stays the file's.

    An endpoint in the place of an engine, or of a server of the store, has a model and flags of its own. Raises
    `UsageError` for a model alone where such a server answers.
    """
    if endpoint is not None:
        kept = target.model if target.endpoint is not None else None
        target = replace(target, model=kept, endpoint=endpoint, engine_args=(), answered_by="run")
    elif target.answered_by == "serve":
        raise UsageError(
            'the file says answered_by = "serve", and that server answers with its own model; remove --model, or '
            "name a server with --endpoint"
        )
    return target if model is None else replace(target, model=model)


def check_target(target: ModelTarget, table: str) -> None:
    """Raise `SettingsError` for an endpoint that is no address, or flags of an engine beside one."""
    if target.endpoint is None:
        return
    if not target.endpoint.startswith(ADDRESSES):
        raise SettingsError(
            f"{table}.endpoint: {without_login(target.endpoint)!r} is no address; one begins with http:// or https://"
        )
    if target.engine_args:
        raise SettingsError(
            f"{table}.engine_args are for an engine of the run's own, and {table}.endpoint names a server; "
            "remove one of the two"
        )


def with_target(settings: Settings, target: ModelTarget) -> Settings:
    """Settings with a target's model and endpoint over their own."""
    return replace(
        settings, model=target.model or settings.model, endpoint=target.endpoint or settings.endpoint
    )


def bound_to(settings: Settings, target: ModelTarget) -> str | None:
    """Model that a target's jobs are bound to; None for any.

    A job that is bound to none is taken by the first harvester of the store that comes, whatever its model. Raises
    `ModelUnnamed` for a server of several models where none is named.
    """
    from conserve.endpoints.discovery import sole_model

    asked = with_target(settings, target)
    model = asked.model
    if target.answered_by == "serve":
        model = target.model
    elif asked.endpoint is None:
        model = asked.engine_model
    elif model is None and asked.endpoint.startswith("http"):
        model = ask_server(asked.endpoint, settings.api_key, sole_model)
    return None if model is None else model_name(model)


def model_lookup(settings: Settings) -> ModelAsked:
    """`bound_to` that asks a server once, whichever suite's thread comes first."""
    lock, known = Lock(), cache(partial(bound_to, settings))

    def model_asked(target: ModelTarget) -> str | None:
        with lock:
            return known(target)

    return model_asked


def ask_server(
    endpoint: str, api_key: str | None, ask: "Callable[[httpx.AsyncClient], Awaitable[T]]"
) -> T | None:
    """Answer of a server to these requests; None if no server answers. Raises `ModelUnnamed`."""
    from conserve.endpoints.exchange import open_client

    async def told() -> T:
        shown, login = split_login(endpoint)
        async with open_client(server_root(shown), api_key, None, login=login) as client:
            return await ask(client)

    try:
        return portal.submit(told()).result()
    except ModelUnnamed:
        raise
    except ConserveError:
        return None
