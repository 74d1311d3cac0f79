"""Privileges: which key may use which route and which field of a request (the table in docs/how-to/keys.md).

There are two keys. Clients send the API key. The harvester has a key of its own, made anew at each start. On a
server without an API key every request may do everything.
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
from typing import Any, NoReturn, Self

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.request_fields import PUSH_ARGUMENT, RESUME_ARGUMENT, TTFT_ARGUMENT
from conserve.server_report import PATH
from conserve.variables import HARVEST_KEY

SLO = "conserve_ttft_slo_ms"  # in the app's state: the server's current TTFT promise, None without one
CLASS_HEADER = b"x-conserve-class"  # names the class of a live request
API_KEY = "VLLM_API_KEY"  # vLLM's variable
BEARER = b"bearer"


class Role(StrEnum):
    """Privileges of a request."""

    CLIENT = "client"
    """May use the API, and make its own requests worse, never better."""
    HARVESTER = "harvester"
    """May do everything, also for the whole server."""


class Need(StrEnum):
    """Key that a route asks for."""

    NOTHING = "nothing"
    KEY = "key"
    HARVESTER = "harvester"


# Load balancers and SageMaker cannot send a key. vLLM leaves these open too; they tell a version at most.
FREE = frozenset({"/health", "/ping", "/version"})
METRICS = "/metrics"
BATCHES = ("/v1/files", "/v1/batches")  # with everything below them: `conserve api`, beside the server
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
        ("POST", PATH),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/inference/v1/abort_requests"),
    }
)
"""Routes within `API` that change the server for all."""


def is_batch(path: str) -> bool:
    """True for a route of files and batches."""
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in BATCHES)


def need(method: str, path: str, *, open_metrics: bool = False) -> Need:
    """Key that the route asks for: the harvester's, unless the route is known to serve clients."""
    if path in FREE or (open_metrics and path == METRICS):
        return Need.NOTHING
    if (method, path) not in CHANGES and (path in CLIENTS or path.startswith(API)):
        return Need.KEY
    return Need.HARVESTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a server.

    Without a harvester's key, clients' keys may do everything; without any key, every request may.
    """

    clients: tuple[bytes, ...] = field(default=(), repr=False)
    harvester: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, api_keys: Iterable[str] | None, environ: Mapping[str, str]) -> Self:
        """The clients' keys from vLLM's `--api-key` or its variable, and the harvester's key from its own."""
        given = [key for key in (api_keys or [environ.get(API_KEY, "")]) if key]
        if not given:
            return cls()
        harvester = environ.get(HARVEST_KEY, "")
        clients = tuple(key.encode() for key in given if key != harvester)
        return cls(clients=clients, harvester=harvester.encode() or None)

    @property
    def asked(self) -> bool:
        """True if requests need a key."""
        return bool(self.clients or self.harvester is not None)

    def role(self, authorization: bytes) -> Role | None:
        """Role of a request with this `Authorization` header; None if its key is unknown."""
        if not self.asked:
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
    """Sender of the current request."""

    role: Role
    ttft_slo_ms: float = inf
    keyed: bool = False  # True: a key of the server's own was sent
    store_key: bytes | None = field(default=None, repr=False)  # header of a caller with a key of the store
    key: str | None = None  # that key's name
    project: str | None = None  # and its project
    asked_class: str | None = None  # class of live traffic in the request's header
    live_class: str | None = None  # class that the request is of, once it is known; None for the default one


CALLER: ContextVar[Caller | None] = ContextVar("conserve_caller", default=None)
"""Set by the guard; None outside of a request, and on a server without the guard."""


def why_not_allowed(caller: Caller | None, priority: int, extra: Mapping[str, Any]) -> str | None:
    """Reason for refusing this priority or these `vllm_xargs` to the caller; None if they are allowed."""
    if caller is None or caller.role is Role.HARVESTER:
        return None
    if priority < 0:
        return f"priority {priority} would push other requests aside: it wants the harvester's key; send 0 or more"
    for name in (RESUME_ARGUMENT, PUSH_ARGUMENT):
        if extra.get(name):
            return f"vllm_xargs.{name} wants the harvester's key"
    promise, least_ms = extra.get(TTFT_ARGUMENT), caller.ttft_slo_ms
    if promise is None or (isinstance(promise, int | float) and promise >= least_ms):
        return None
    if priority >= OFFLINE_PRIORITY:
        return None  # no row leaves an iteration for an offline request, whatever TTFT it asks for
    whose, without = "the server's --ttft-slo", "this server was started without --ttft-slo"
    if caller.live_class is not None:
        whose, without = (
            f"the TTFT of the class {caller.live_class}",
            f"the class {caller.live_class} has no TTFT",
        )
    if least_ms == inf:
        return f"vllm_xargs.{TTFT_ARGUMENT} wants the harvester's key: {without}"
    return f"vllm_xargs.{TTFT_ARGUMENT} below {whose}, {least_ms:g} ms, wants the harvester's key"


def refuse(why: str, status: HTTPStatus) -> NoReturn:
    """Raise the error that vLLM's routes answer with."""
    from vllm.exceptions import GracefulHTTPError

    raise GracefulHTTPError(why, status)


def permitting(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.generate` or `encode`: refuse with 403 what the caller may not ask for.

    All of vLLM's routes end in one of the two, so none is forgotten.
    """

    @functools.wraps(serve)
    def wrapped(llm: Any, prompt: Any, *args: Any, **rest: Any) -> Any:
        # vLLM names a model's parameters differently where it embeds.
        params = args[0] if args else rest.get("sampling_params", rest.get("pooling_params"))
        extra = getattr(params, "extra_args", None) or {}
        why = why_not_allowed(CALLER.get(), rest.get("priority", 0), extra)
        if why is not None:
            refuse(why, HTTPStatus.FORBIDDEN)
        return serve(llm, prompt, *args, **rest)

    return wrapped
