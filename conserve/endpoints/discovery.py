"""What a server is: one that co-serves, stock vLLM with priorities, or what speaks OpenAI's routes."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

import httpx
import msgspec

from conserve.endpoints.answers import error_message
from conserve.endpoints.protocol import KvCache, Url
from conserve.endpoints.window import Metrics
from conserve.errors import EndpointUnusable

MOST_ROWS = 64  # at once, where the server does not say how many it runs
OFFLINE_PRIORITY = 1000  # vLLM serves low numbers first; live requests have 0
LOOK_S = 5.0  # for an answer that needs no work
REJECTED = (400, 422)
UNREADABLE = (httpx.HTTPError, httpx.InvalidURL, AttributeError, KeyError, TypeError, ValueError)


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
    kv_cache: KvCache = field(default_factory=KvCache)

    def notice(self, base_url: str) -> str:
        """One sentence for the user."""
        if self.mode is Mode.COSERVING:
            behind = f"at most {self.most_rows} rows at once, behind live requests"
            return f"{base_url} co-serves {self.model}: {behind}"
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
            identity=ours.identity,
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


async def served_models(client: httpx.AsyncClient) -> list[str]:
    """The server's list of models, at least one."""
    base_url = base_url_of(client)
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        served = [str(entry["id"]) for entry in answer.json()["data"]]
    except httpx.HTTPStatusError as error:
        raise EndpointUnusable(
            f"{base_url}/v1/models answered {error.response.status_code}; check the URL and CONSERVE_API_KEY"
        ) from error
    except UNREADABLE as error:
        raise EndpointUnusable(
            f"no OpenAI-compatible server answers at {base_url} ({str(error) or type(error).__name__}); "
            "start it or correct --endpoint"
        ) from error
    if not served:
        raise EndpointUnusable(f"{base_url} serves no model; start it with one")
    return served


@dataclass(frozen=True, slots=True, kw_only=True)
class CoServing:
    """What is needed of the answer to ``GET /v1/conserve`` (docs/design.md)."""

    identity: str
    max_num_seqs: int
    offline_priority: int


async def coserving(client: httpx.AsyncClient) -> CoServing | None:
    """What the plug-in says; None where there is none.

    A server or a proxy in trouble is not taken for one without: its rows would start over.
    """
    answer = await look(client, "/v1/conserve")
    try:
        return msgspec.json.decode(answer.content, type=CoServing) if answer.status_code == 200 else None
    except msgspec.DecodeError:
        return None


async def metrics(client: httpx.AsyncClient) -> Metrics | None:
    """vLLM's figures; None where there are none."""
    try:
        page = await client.get("/metrics", timeout=LOOK_S)
        return Metrics.read(page.text) if page.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


async def kv_cache(client: httpx.AsyncClient) -> KvCache:
    """What vLLM's metrics say of its KV cache, as far as they say it."""
    try:
        page = await client.get("/metrics", timeout=LOOK_S)
    except httpx.HTTPError:
        return KvCache()
    told = re.search(r"^vllm:cache_config_info\{(.*)\} ", page.text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="(\d+)"', told[1])) if page.status_code == 200 and told else {}
    block_tokens, num_blocks = int(labels.get("block_size", 0)), int(labels.get("num_gpu_blocks", 0))
    return KvCache(block_tokens=block_tokens or KvCache().block_tokens, num_blocks=num_blocks or None)


async def takes_priority(client: httpx.AsyncClient, model: str) -> bool:
    """Whether vLLM accepts a request with a priority; raises `EndpointUnusable` where it cannot tell."""
    body = {"model": model, "prompt": "a", "max_tokens": 1, "priority": OFFLINE_PRIORITY}
    try:
        answer = await client.post(Url.COMPLETIONS, json=body, timeout=LOOK_S)
    except httpx.ReadTimeout:
        return True  # it waits behind live requests; a rejection comes at once
    except httpx.HTTPError as error:
        raise silent(client, error) from error
    if answer.status_code == 200 or answer.status_code in REJECTED:
        return answer.status_code == 200
    raise EndpointUnusable(
        f"{base_url_of(client)}{Url.COMPLETIONS} answered {answer.status_code}: {error_message(answer)}"
    )


async def healthy(client: httpx.AsyncClient) -> None:
    """Raise `EndpointUnusable` if vLLM does not answer, or says that its engine is dead."""
    await look(client, "/health")


async def look(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """The answer of a route that needs no work; raises `EndpointUnusable` if none or one of trouble comes."""
    try:
        answer = await client.get(path, timeout=LOOK_S)
    except httpx.HTTPError as error:
        raise silent(client, error) from error
    if answer.status_code >= 500:  # also 500: the routes of vLLM whose engine has died
        raise EndpointUnusable(
            f"{base_url_of(client)}{path} answered {answer.status_code}; wait and try again"
        )
    return answer


def silent(client: httpx.AsyncClient, error: httpx.HTTPError) -> EndpointUnusable:
    """The error for a server that cannot be reached."""
    return EndpointUnusable(f"{base_url_of(client)} does not answer: {str(error) or type(error).__name__}")


def base_url_of(client: httpx.AsyncClient) -> str:
    """The server's address as the user knows it."""
    return str(client.base_url).rstrip("/")
