"""What a server is: one that co-serves, stock vLLM with priorities, or what speaks OpenAI's routes."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import httpx
import msgspec
from msgspec import Meta

from conserve.endpoints.answers import UNREADABLE, Whole, excerpt
from conserve.endpoints.exchange import Reply, look
from conserve.endpoints.protocol import KvCache, Url
from conserve.endpoints.refusals import error_message, redirected, untrusted
from conserve.endpoints.window import Metrics
from conserve.errors import EndpointUnusable, one_line

MOST_ROWS = 64  # at once, where the server does not say how many it runs
OFFLINE_PRIORITY = 1000  # vLLM serves low numbers first; live requests have 0
LOOK_S = 5.0  # for an answer that needs no work
START_S = 60.0  # for the first answer, of a server that may be under load
REJECTED = (400, 422)


class Mode(StrEnum):
    """How rows and live requests share the server."""

    COSERVING = "co-serving"
    """ConServe's scheduler knows the two apart; rows are streamed and go on where they stopped."""
    PRIORITY = "priority"
    """Stock vLLM that takes priorities: live requests go first, but wait for iterations that rows fill."""
    PLAIN = "plain"
    """Rows and live requests are the same to the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What was found out about a server."""

    mode: Mode
    model: str
    identity: str  # what generates the tokens
    most_rows: int  # at once
    priority: int | None = None  # that rows are sent with
    has_metrics: bool = False  # vLLM's
    resumes: bool = False  # rows go on from saved tokens
    kv_cache: KvCache = field(default_factory=KvCache)

    def notice(self, base_url: str) -> str:
        """One sentence for the user."""
        if self.mode is Mode.COSERVING:
            behind = f"at most {self.most_rows} rows at once, behind live requests"
            key = "" if self.resumes else "; rows cut short start over, unless CONSERVE_HARVEST_KEY is set"
            return f"{base_url} co-serves {one_line(self.model)}: {behind}{key}"
        kind = "stock vLLM" if self.has_metrics else "a server"
        how = f"with priority {self.priority}" if self.priority else "without priorities"
        by = "its metrics" if self.has_metrics else "the time that probe requests take"
        hint = " (which counts under --scheduling-policy priority)" if self.priority else ""
        return (
            f"{base_url} is {kind} without ConServe's scheduler: harvesting {how}{hint} and at most "
            f"{self.most_rows} rows at once, adjusted by {by}; live requests may notice, and rows cut short "
            "start over"
        )


async def discover(
    client: httpx.AsyncClient, *, model: str | None, most_rows: int | None, considerate: bool
) -> Server:
    """Find out what answers; raises `EndpointUnusable` if it is nothing that completes requests.

    Only where rows are to give way (`considerate`) is vLLM asked, by a request of one token, whether it takes
    priorities. Older versions reject any but 0 unless they run with ``--scheduling-policy priority``; newer
    ones take them in silence and heed them under that policy only.
    """
    served = await served_models(client)
    found = model or served[0]
    ours = await coserving(client)
    if ours is not None:
        await healthy(client)
        bears = 2 * ours.max_num_seqs
        return Server(
            mode=Mode.COSERVING,
            model=found,
            # Tokens saved with another key are not gone on from; so they are another's.
            identity=ours.identity if ours.resumes else f"{ours.identity} from the beginning",
            resumes=ours.resumes,
            most_rows=min(bears, most_rows or bears),
            priority=ours.offline_priority,
            kv_cache=await kv_cache(client),
        )
    has_metrics = await metrics(client) is not None
    if has_metrics:
        await healthy(client)
    prioritised = considerate and has_metrics and await takes_priority(client, found)
    return Server(
        mode=Mode.PRIORITY if prioritised else Mode.PLAIN,
        model=found,
        identity=f"{base_url_of(client)} {found}",
        most_rows=most_rows or MOST_ROWS,
        priority=OFFLINE_PRIORITY if prioritised else None,
        has_metrics=has_metrics,
        kv_cache=await kv_cache(client) if has_metrics else KvCache(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One entry of the list of models."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The answer to ``GET /v1/models``."""

    data: list[ServedModel]


async def served_models(client: httpx.AsyncClient) -> list[str]:
    """The server's list of models, at least one."""
    base_url, route = base_url_of(client), "/v1/models"
    try:
        reply = await look(client, "GET", route, seconds=START_S)
    except httpx.HTTPError as error:
        raise no_server(base_url, error) from error
    if 300 <= reply.status < 400:
        raise redirected(reply, httpx.URL(f"{base_url}{route}"), route)
    if reply.status != 200:
        raise EndpointUnusable(
            f"{base_url}{route} answered {reply.status}; check the URL and CONSERVE_API_KEY",
            status=reply.status,
        )
    try:
        served = [entry.id for entry in msgspec.json.decode(reply.content, type=ServedModels).data]
    except UNREADABLE as error:
        said = f"{one_line(error)}: {excerpt(reply.content)}"
        raise EndpointUnusable(
            f"no OpenAI-compatible server answers at {base_url} ({said}); start it or correct --endpoint"
        ) from error
    if not served:
        raise EndpointUnusable(f"{base_url} serves no model; start it with one")
    return served


def no_server(base_url: str, error: httpx.HTTPError) -> EndpointUnusable:
    """The error for an address at which no request could be made."""
    said = one_line(error) or type(error).__name__
    return untrusted(error, base_url) or EndpointUnusable(
        f"no OpenAI-compatible server answers at {base_url} ({said}); start it or correct --endpoint"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoServing:
    """What is needed of the answer to ``GET /v1/conserve`` (docs/design.md)."""

    identity: Annotated[str, Meta(max_length=4096, pattern="^[^\\x00]+$")]  # no database takes more
    max_num_seqs: Annotated[int, Meta(ge=1, le=1_000_000)]
    offline_priority: Whole
    resumes: bool = True  # True if our key is the harvester's; servers without keys do not say


async def coserving(client: httpx.AsyncClient) -> CoServing | None:
    """What the plug-in says; None where there is none.

    A server or a proxy in trouble is not taken for one without: its rows would start over.
    """
    reply = await healthy_reply(client, "/v1/conserve")
    try:
        return msgspec.json.decode(reply.content, type=CoServing) if reply.status == 200 else None
    except UNREADABLE:
        return None


async def metrics(client: httpx.AsyncClient) -> Metrics | None:
    """vLLM's figures; None where there are none."""
    try:
        page = await look(client, "GET", "/metrics", seconds=LOOK_S)
        return Metrics.read(page.text) if page.status == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


async def kv_cache(client: httpx.AsyncClient) -> KvCache:
    """What vLLM's metrics say of its KV cache, as far as they say it."""
    try:
        page = await look(client, "GET", "/metrics", seconds=LOOK_S)
    except httpx.HTTPError:
        return KvCache()
    told = re.search(r"^vllm:cache_config_info\{(.*)\} ", page.text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([0-9]{1,9})"', told[1])) if page.status == 200 and told else {}
    block_tokens, num_blocks = int(labels.get("block_size", 0)), int(labels.get("num_gpu_blocks", 0))
    return KvCache(block_tokens=block_tokens or KvCache().block_tokens, num_blocks=num_blocks or None)


async def takes_priority(client: httpx.AsyncClient, model: str) -> bool:
    """Whether vLLM accepts a request with a priority; raises `EndpointUnusable` where it cannot tell."""
    body = {"model": model, "prompt": "a", "max_tokens": 1, "priority": OFFLINE_PRIORITY}
    try:
        reply = await look(client, "POST", Url.COMPLETIONS, json=body, seconds=LOOK_S)
    except httpx.ReadTimeout:
        return True  # it waits behind live requests; a rejection comes at once
    except httpx.HTTPError as error:
        raise silent(client, error) from error
    if reply.status == 200 or reply.status in REJECTED:
        return reply.status == 200
    raise EndpointUnusable(
        f"{base_url_of(client)}{Url.COMPLETIONS} answered {reply.status}: {error_message(reply.content)}"
    )


async def healthy(client: httpx.AsyncClient) -> None:
    """Raise `EndpointUnusable` if vLLM does not answer, or says that its engine is dead."""
    await healthy_reply(client, "/health")


async def healthy_reply(client: httpx.AsyncClient, path: str) -> Reply:
    """The answer of a route that needs no work; raises `EndpointUnusable` if none or one of trouble comes."""
    try:
        reply = await look(client, "GET", path, seconds=LOOK_S)
    except httpx.HTTPError as error:
        raise silent(client, error) from error
    if reply.status >= 500:  # also 500: the routes of vLLM whose engine has died
        raise EndpointUnusable(f"{base_url_of(client)}{path} answered {reply.status}; wait and try again")
    return reply


def silent(client: httpx.AsyncClient, error: httpx.HTTPError) -> EndpointUnusable:
    """The error for a server that cannot be reached."""
    base_url, said = base_url_of(client), one_line(error) or type(error).__name__
    return untrusted(error, base_url) or EndpointUnusable(f"{base_url} does not answer: {said}")


def base_url_of(client: httpx.AsyncClient) -> str:
    """The server's address as the user knows it."""
    return str(client.base_url).rstrip("/")
