"""Privileges: which key may use which route, and which field of a request (the table in docs/cli.md).

Two keys exist. Clients send the API key. The harvester has a key of its own, made anew at each start. Without an
API key every request may do everything.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from math import inf
from typing import Any, Self

from conserve.engine.policy.view import OFFLINE_PRIORITY, TTFT_ARGUMENT
from conserve.engine.runtime.front import HARVEST_KEY

RESUME = "conserve_resume"  # in a request's vllm_xargs: token ids that an earlier attempt generated
SLO = "conserve_ttft_slo_ms"  # of the app's state: the TTFT promise as it is now, None without one
API_KEY = "VLLM_API_KEY"  # vLLM's variable
BEARER = b"bearer"


class Role(StrEnum):
    """What a request may do."""

    CLIENT = "client"
    """Use the API; lower itself, and nothing else."""
    HARVESTER = "harvester"
    """Everything, also for the whole server."""


class Need(StrEnum):
    """What a route asks of a request."""

    NOTHING = "nothing"
    KEY = "key"
    HARVESTER = "harvester"


# Load balancers and SageMaker cannot send a key. vLLM leaves these open too, and they tell a version at most.
FREE = frozenset({"/health", "/ping", "/version"})
METRICS = "/metrics"
API = ("/v1/", "/v2/", "/inference/", "/cohere/", "/static/")
CLIENTS = frozenset(
    {
        "/tokenize", "/detokenize", "/tokenizer_info", "/invocations", "/pooling", "/classify", "/score",
        "/rerank", "/generative_scoring", "/load", METRICS, "/docs", "/docs/oauth2-redirect", "/redoc",
        "/openapi.json",
    }
)  # fmt: skip
"""Routes outside `API` that serve clients. The others (profiler, weights, caches) change the server for all."""
CHANGES = frozenset(
    {
        ("POST", "/v1/conserve"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/inference/v1/abort_requests"),
    }
)
"""Routes within `API` that do so too."""


def need(method: str, path: str, *, open_metrics: bool = False) -> Need:
    """What the route asks for; one that is not known to serve clients asks for the harvester's key."""
    if path in FREE or (open_metrics and path == METRICS):
        return Need.NOTHING
    if (method, path) not in CHANGES and (path in CLIENTS or path.startswith(API)):
        return Need.KEY
    return Need.HARVESTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a server. Without a harvester's key, clients' keys may do everything; without any, all may."""

    clients: tuple[bytes, ...] = field(default=(), repr=False)
    harvester: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, api_keys: Iterable[str] | None, environ: Mapping[str, str]) -> Self:
        """The keys behind vLLM's `--api-key`, or else in its variable, and the harvester's."""
        given = [key for key in (api_keys or [environ.get(API_KEY, "")]) if key]
        if not given:
            return cls()
        harvester = environ.get(HARVEST_KEY, "")
        clients = tuple(key.encode() for key in given if key != harvester)
        return cls(clients=clients, harvester=harvester.encode() or None)

    def role(self, authorization: bytes) -> Role | None:
        """The role of a request with this `Authorization` header; None if its key is none of these."""
        if not self.clients and self.harvester is None:
            return Role.HARVESTER
        scheme, _, key = authorization.partition(b" ")
        bearer = scheme.lower() == BEARER
        harvester = self.harvester is not None and hmac.compare_digest(key, self.harvester)
        client = any([hmac.compare_digest(key, known) for known in self.clients])  # noqa: C419  all, always
        if bearer and (harvester or (client and self.harvester is None)):
            return Role.HARVESTER
        return Role.CLIENT if bearer and client else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of the request under way."""

    role: Role
    ttft_slo_ms: float = inf


CALLER: ContextVar[Caller | None] = ContextVar("conserve_caller", default=None)
"""Set by the guard. None outside of a request, and on a server without the guard."""


def refusal(caller: Caller | None, priority: int, extra: Mapping[str, Any]) -> str | None:
    """Why the request may not have this priority or these `vllm_xargs`; None if it may."""
    if caller is None or caller.role is Role.HARVESTER:
        return None
    if priority < 0:
        return f"priority {priority} would push other requests aside: it wants the harvester's key; send 0 or more"
    if extra.get(RESUME):
        return f"vllm_xargs.{RESUME} wants the harvester's key"
    promise, least_ms = extra.get(TTFT_ARGUMENT), caller.ttft_slo_ms
    if promise is None or (isinstance(promise, int | float) and promise >= least_ms):
        return None
    if priority >= OFFLINE_PRIORITY:
        return None  # nothing leaves an iteration for an offline request, whatever it promises itself
    if least_ms == inf:
        return f"vllm_xargs.{TTFT_ARGUMENT} wants the harvester's key: this server was started without --ttft-slo"
    return f"vllm_xargs.{TTFT_ARGUMENT} below the server's --ttft-slo, {least_ms:g} ms, wants the harvester's key"


def permitting(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.generate` or `encode`: refuse with 403 what the caller may not ask for.

    Every route of vLLM ends in one of the two, so that none is forgotten.
    """

    @functools.wraps(serve)
    def wrapped(llm: Any, prompt: Any, params: Any, request_id: str, *args: Any, **rest: Any) -> Any:
        extra = getattr(params, "extra_args", None) or {}
        why = refusal(CALLER.get(), rest.get("priority", 0), extra)
        if why is not None:
            from vllm.exceptions import GracefulHTTPError

            raise GracefulHTTPError(why, HTTPStatus.FORBIDDEN)
        return serve(llm, prompt, params, request_id, *args, **rest)

    return wrapped
