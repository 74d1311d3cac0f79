"""Finds out what kind a server is: co-serving, stock vLLM with priorities, or any with OpenAI's routes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from conserve.endpoints.answers import UNREADABLE, excerpt
from conserve.endpoints.exchange import WholeResponse, short_response
from conserve.endpoints.protocol import KvCache, Url
from conserve.endpoints.refusals import BUSY, certificate_error, error_message, redirect_error
from conserve.endpoints.window import ServerMetrics
from conserve.errors import EndpointUnusable, ModelUnnamed, one_line
from conserve.server_report import PATH, RECENT, FrontEndReport, read_front_end

MOST_ROWS = 64  # at once, if the server does not say how many it runs
OFFLINE_PRIORITY = 1000  # vLLM serves low numbers first; live requests have 0
LOOK_S = 5.0  # for an answer that needs no work
START_S = 60.0  # for the first answers of a server that may be under load
MOST_NAMED = 5  # models in a message
REJECTED = (400, 422)
LACKS_ROUTE = (404, 405, 501)
LOGIN_SENT = "the login in it, which is sent in place of CONSERVE_API_KEY"
NO_REPORT_YET = 503  # of a server whose scheduler is in its first iteration; also of one that is in trouble


class Mode(StrEnum):
    """Ways in which rows and live requests share a server."""

    COSERVING = "co-serving"
    """ConServe's scheduler tells rows from live requests; rows are streamed and continue from their tokens."""
    PRIORITY = "priority"
    """Stock vLLM with priorities: live requests come first, but wait for iterations that rows fill."""
    PLAIN = "plain"
    """The server treats rows and live requests alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Facts about a server."""

    mode: Mode
    model: str
    identity: str  # of the model that generates the tokens
    most_rows: int  # at once
    priority: int | None = None  # priority that rows are sent with
    lists_models: bool = True
    has_metrics: bool = False  # True: vLLM's metrics are there
    resumes: bool = False  # True: rows continue from saved tokens
    kv_cache: KvCache = field(default_factory=KvCache)
    version: str | None = None  # of ConServe

    def bears_as(self, other: "ServerFacts") -> bool:
        """True if what is known of the other's load holds of this one."""
        mine, theirs = ((one.identity, one.mode, one.most_rows, one.has_metrics) for one in (self, other))
        return mine == theirs

    def notice(self, base_url: str, *, steady: bool = False) -> str:
        """One sentence on the server for the user; `steady` if its load changes nothing."""
        if self.mode is Mode.COSERVING:
            behind = f"at most {self.most_rows} rows at once, behind live requests"
            key = "" if self.resumes else "; rows cut short start over, unless CONSERVE_HARVEST_KEY is set"
            return f"{base_url} co-serves {one_line(self.model)}: {behind}{key}"
        kind = "stock vLLM" if self.has_metrics else "a server"
        how = f"with priority {self.priority}" if self.priority else "without priorities"
        by = "the time that small requests take"
        by = f"{by} while its metrics show others" if self.has_metrics else by
        rows = f"{self.most_rows} rows at once"
        rows = f"{rows} whatever its load" if steady else f"at most {rows}, adjusted by {by}"
        hint = " (which counts under --scheduling-policy priority)" if self.priority else ""
        return (
            f"{base_url} is {kind} without ConServe's scheduler: harvesting {how}{hint} and {rows}; "
            "live requests may notice, and rows cut short start over"
        )


async def discover(
    client: httpx.AsyncClient,
    *,
    model: str | None,
    most_rows: int | None,
    considerate: bool,
    of_fleet: bool = False,
    of_jobs: bool = False,
    known: str | None = None,
) -> ServerFacts:
    """Find out what kind of server answers; raises `EndpointUnusable` if it completes no requests.

    Without `model` it is the server's only one or, if it was `known` before and is still there, that one; several
    raise `ModelUnnamed`. With `of_fleet` the server is one of several, and with `of_jobs` the model is that of the
    queued jobs: a server that lists others has the first of these. One without a list has the model that is given,
    unless it is of a fleet.

    With `considerate`, rows give way to live requests, and vLLM is asked by a request of one token whether it
    takes priorities. Older versions reject any but 0 unless they run with ``--scheduling-policy priority``; newer
    ones accept all, and heed them under that policy only.
    """
    try:
        listed = await listed_models(client)
    except EndpointUnusable as error:
        if model is None or of_fleet or error.status not in LACKS_ROUTE:
            raise
        listed = []
    served = [one.id for one in listed]
    ours = await coserving(client)
    found = model if model is not None else known if known in served else None
    if served and (of_fleet or of_jobs) and found not in served:
        found = served[0]
    elif found is None:
        found = served[0] if ours is not None else only_model(base_url_of(client), listed)
    if ours is not None:
        await healthy(client)
        bears = 2 * ours.max_num_seqs
        return ServerFacts(
            mode=Mode.COSERVING,
            model=found,
            identity=identity_of(ours, found),
            resumes=ours.resumes,
            most_rows=min(bears, most_rows or bears),
            priority=ours.offline_priority,
            kv_cache=await kv_cache(client),
            version=ours.version,
        )
    has_metrics = await metrics(client) is not None
    if has_metrics:
        await healthy(client)
    asks = considerate and has_metrics
    prioritised = asks and await takes_priority(client, found, listed=not served or found in served)
    return ServerFacts(
        mode=Mode.PRIORITY if prioritised else Mode.PLAIN,
        model=found,
        identity=f"{base_url_of(client)} {found}",
        most_rows=most_rows or MOST_ROWS,
        lists_models=bool(served),
        priority=OFFLINE_PRIORITY if prioritised else None,
        has_metrics=has_metrics,
        kv_cache=await kv_cache(client) if has_metrics else KvCache(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One entry of the list of models; `parent` is the model that an adapter is of, `root` the files of a model."""

    id: str
    parent: Any = None
    root: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The answer to ``GET /v1/models``; some servers send the bare list."""

    data: list[ServedModel]


async def served_models(client: httpx.AsyncClient) -> list[str]:
    """Names of the models that the server lists, at least one; raises `EndpointUnusable`."""
    return [one.id for one in await listed_models(client)]


async def sole_model(client: httpx.AsyncClient) -> str:
    """The model that the server has; raises `ModelUnnamed` for several, and as `served_models`."""
    return only_model(base_url_of(client), await listed_models(client))


def only_model(base_url: str, listed: Sequence[ServedModel]) -> str:
    """The model of a server; raises `ModelUnnamed` if it has several, beside adapters and other names of one."""
    own = [one for one in listed if not one.parent] or listed
    if len({str(one.root or one.id) for one in own}) == 1:
        return own[0].id
    names = [one_line(one.id) for one in own[:MOST_NAMED]]
    more = "" if len(own) <= MOST_NAMED else ", ..."
    raise ModelUnnamed(
        f"{base_url} serves {len(own)} models ({', '.join(names)}{more}); name the one that answers by --model "
        "or CONSERVE_MODEL"
    )


async def listed_models(client: httpx.AsyncClient) -> list[ServedModel]:
    """Models that the server lists, at least one; raises `EndpointUnusable`."""
    base_url, route = base_url_of(client), "/v1/models"
    try:
        reply = await short_response(client, "GET", route, seconds=START_S)
    except httpx.HTTPError as error:
        raise no_server(base_url, error) from error
    if 300 <= reply.status < 400:
        raise redirect_error(reply, httpx.URL(f"{base_url}{route}"), route)
    lacking = reply.status in LACKS_ROUTE
    if is_in_trouble(reply.status):
        raise trouble_error(client, route, reply)
    if reply.status != 200:
        unlisted = "; for one server without a list of models, --model names it" if lacking else ""
        sent = "CONSERVE_API_KEY" if client.auth is None else LOGIN_SENT
        raise EndpointUnusable(
            f"{base_url}{route} answered {reply.status}; check the URL and {sent}{unlisted}",
            status=reply.status,
        )
    try:
        found = msgspec.json.decode(reply.content, type=ServedModels | list[ServedModel])
        served = found if isinstance(found, list) else found.data
    except UNREADABLE as error:
        said = f"{one_line(error)}: {excerpt(reply.content)}"
        raise EndpointUnusable(
            f"no OpenAI-compatible server answers at {base_url} ({said}); start it or correct the address"
        ) from error
    if not served:
        raise EndpointUnusable(f"{base_url} serves no model; start it with one")
    return served


def no_server(base_url: str, error: httpx.HTTPError) -> EndpointUnusable:
    """The error for an address at which no request could be made."""
    said = one_line(error) or type(error).__name__
    return certificate_error(error, base_url) or EndpointUnusable(
        f"no OpenAI-compatible server answers at {base_url} ({said}); start it or correct the address"
    )


def identity_of(ours: FrontEndReport, model: str) -> str:
    """Identity of one of the server's models; the server's own names the first, of which adapters are others.

    Tokens saved under one key are not continued under another, so the identities differ.
    """
    identity = ours.identity if ours.identity.startswith(f"{model}@") else f"{ours.identity} as {model}"
    return identity if ours.resumes else f"{identity} from the beginning"


def is_in_trouble(status: int) -> bool:
    """True for the status of a server or a proxy that is in trouble or busy, which says nothing of a route."""
    return status in BUSY or (status >= 500 and status not in LACKS_ROUTE)


async def coserving(client: httpx.AsyncClient) -> FrontEndReport | None:
    """The report of ConServe's plug-in; None if the server has none.

    A server or proxy in trouble raises `EndpointUnusable`: taken for one without the plug-in, its rows would start
    over.
    """
    # The scheduler answers between two iterations, which may take minutes. What is read here never changes.
    reply = await any_reply(client, RECENT)
    if reply.status == NO_REPORT_YET:
        reply = await healthy_reply(client, PATH)
    if is_in_trouble(reply.status):
        raise trouble_error(client, PATH, reply)
    try:
        return read_front_end(reply.content) if reply.status == 200 else None
    except UNREADABLE:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmVersion:
    """The answer to vLLM's ``GET /version``."""

    version: Annotated[str, Meta(max_length=100, pattern="^[^\\x00]*$")]


async def vllm_version(client: httpx.AsyncClient) -> str | None:
    """Version of vLLM; None if the server is another, or does not tell."""
    try:
        reply = await short_response(client, "GET", "/version", seconds=LOOK_S)
        told = msgspec.json.decode(reply.content, type=VllmVersion) if reply.status == 200 else None
    except (httpx.HTTPError, *UNREADABLE):
        return None
    return None if told is None else f"vLLM {one_line(told.version)}"


async def metrics(client: httpx.AsyncClient) -> ServerMetrics | None:
    """vLLM's figures; None if the server shows none."""
    try:
        page = await short_response(client, "GET", "/metrics", seconds=LOOK_S)
        return ServerMetrics.read(page.text) if page.status == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


async def kv_cache(client: httpx.AsyncClient) -> KvCache:
    """Size of vLLM's KV cache by its metrics, as far as they tell."""
    try:
        page = await short_response(client, "GET", "/metrics", seconds=LOOK_S)
    except httpx.HTTPError:
        return KvCache()
    told = re.search(r"^vllm:cache_config_info\{(.*)\} ", page.text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([0-9]{1,9})"', told[1])) if page.status == 200 and told else {}
    block_tokens, num_blocks = int(labels.get("block_size", 0)), int(labels.get("num_gpu_blocks", 0))
    return KvCache(block_tokens=block_tokens or KvCache().block_tokens, num_blocks=num_blocks or None)


async def takes_priority(client: httpx.AsyncClient, model: str, *, listed: bool) -> bool:
    """True if vLLM accepts a completion with a priority; raises `EndpointUnusable` if that cannot be told.

    A server whose model only embeds lacks the route. The answer for a model that is not `listed` looks alike.
    """
    body = {"model": model, "prompt": "a", "max_tokens": 1, "priority": OFFLINE_PRIORITY}
    try:
        reply = await short_response(client, "POST", Url.COMPLETIONS, json=body, seconds=LOOK_S)
    except httpx.ReadTimeout:
        return True  # the request waits behind live ones; a rejection would come at once
    except httpx.HTTPError as error:
        raise silence_error(client, error) from error
    if reply.status == 200 or reply.status in REJECTED or (listed and reply.status in LACKS_ROUTE):
        return reply.status == 200
    raise EndpointUnusable(
        f"{base_url_of(client)}{Url.COMPLETIONS} answered {reply.status}: {error_message(reply.content)}",
        status=reply.status,
    )


async def healthy(client: httpx.AsyncClient) -> None:
    """Raise `EndpointUnusable` if vLLM does not answer, or reports that its engine is dead."""
    await healthy_reply(client, "/health")


async def healthy_reply(client: httpx.AsyncClient, path: str) -> WholeResponse:
    """The response of a route that needs no work; raises `EndpointUnusable` if there is none or a 5xx one."""
    reply = await any_reply(client, path)
    if reply.status >= 500:  # also 500: vLLM's routes once its engine has died
        raise trouble_error(client, path, reply)
    return reply


async def any_reply(client: httpx.AsyncClient, path: str) -> WholeResponse:
    """The response of a server that may be under load, of any status; raises `EndpointUnusable` if there is none.

    A server that has listed its models is there, so it has as long for this answer as for its list.
    """
    try:
        return await short_response(client, "GET", path, seconds=START_S)
    except httpx.HTTPError as error:
        raise silence_error(client, error) from error


def trouble_error(client: httpx.AsyncClient, path: str, reply: WholeResponse) -> EndpointUnusable:
    """The error for a response of a server that is in trouble, or busy."""
    said = f"{base_url_of(client)}{path} answered {reply.status}; wait and try again"
    return EndpointUnusable(said, status=reply.status)


def silence_error(client: httpx.AsyncClient, error: httpx.HTTPError) -> EndpointUnusable:
    """The error for a server that cannot be reached."""
    base_url, said = base_url_of(client), one_line(error) or type(error).__name__
    late = isinstance(error, httpx.ReadTimeout)
    step = (
        "it is busy or stuck: look at its log, and try again" if late else "start it or correct the address"
    )
    return certificate_error(error, base_url) or EndpointUnusable(
        f"{base_url} does not answer ({said}); {step}"
    )


def base_url_of(client: httpx.AsyncClient) -> str:
    """The server's address as the user knows it."""
    return str(client.base_url).rstrip("/")
