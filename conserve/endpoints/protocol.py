"""The seam between jobs and engines: one request in, its completion or its tokens so far out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from conserve.config import model_name


class Url(StrEnum):
    """The OpenAI routes a request can ask for."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, in the words of the OpenAI API.

    `body` is the request body without ``model`` and ``stream``. `resume_from` holds the token ids that an
    earlier attempt on the same endpoint already generated, at least one; the completion covers them too, as
    if nothing had happened. It is only ever set where `resumable(body)` holds. `identity` is the endpoint's
    when the call was made: one that can become another meanwhile must not continue tokens of the first, nor
    report its own under the first one's name.
    """

    key: str  # unique among the calls in flight
    url: Url
    body: Mapping[str, Any]
    resume_from: Sequence[int] = ()
    identity: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a completion's `n` answers; `logprobs` is the OpenAI object of the route, if asked for."""

    text: str
    finish_reason: str  # "stop", "length", ...
    logprobs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to one call. Token counts are those of one uninterrupted generation."""

    choices: Sequence[Choice]  # n >= 1, in order
    prompt_tokens: int
    completion_tokens: int  # over all choices
    cached_tokens: int  # prompt tokens found in the engine's prefix cache
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """How an engine caches prefixes: in whole blocks, so many of them."""

    block_tokens: int = 16  # vLLM's default
    num_blocks: int | None = None  # unknown


class InFlight(NamedTuple):
    """Tokens of the calls in flight: those computed so far (prompts once they are, and answers), and all of them
    if no answer ends before its limit, where that is known."""

    computed: int = 0
    most: int | None = None


OnTokens = Callable[[Sequence[int]], None]
"""Called with every output token id generated so far, resumed ones included; must return quickly."""


class Endpoint(Protocol):
    """Something that completes requests, many at a time; it may have a `kv_cache: KvCache` of which it knows.

    It may have a `model: str`, the name of the model that answers, which jobs are bound to; see `model_of`.
    For the display it may have `doing: str | None`, what it does while it is not ready ("starting MODEL: loading
    the weights"), and `in_flight: InFlight`. Both are read a few times a second and must be cheap.

    `complete` raises `RequestRejected` for a request that can never succeed and a `RetryableError` for one
    that may; cancelling it withdraws the request. Every method runs in one event loop.
    """

    @property
    def identity(self) -> str:
        """What generates the tokens (model, weights, tokenizer); saved tokens continue only on an equal one.

        Known once started.
        """

    @property
    def capacity(self) -> int:
        """How many calls keep the endpoint busy; more in flight only wait. Known once started."""

    async def start(self) -> None:
        """Make ready, or raise `EndpointUnusable`."""

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer one call; report tokens as they come where `on_tokens` is given and tokens can be seen."""

    async def close(self) -> None:
        """Withdraw what is in flight and free everything."""


def model_of(endpoint: Endpoint) -> str:
    """The name of the model that answers, once started: a folder by its absolute path."""
    return model_name(getattr(endpoint, "model", None) or endpoint.identity)


RESUMABLE_PARAMETERS = frozenset(
    {
        "messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
        "top_k", "min_p", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos",
        "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "user",
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
        "chat_template_kwargs", "metadata", "priority", "service_tier", "store", "model", "n", "seed",
        "logprobs",
    }
)  # fmt: skip


def resumable(body: Mapping[str, Any]) -> bool:
    """Whether a generation cut short can go on from its tokens and end as if uninterrupted.

    True only for parameters known to be safe. Log probabilities of the saved tokens are gone, a grammar's
    state and a seeded generator's state cannot be rebuilt from tokens alone, presence and frequency penalties
    count output tokens only (saved ones come back as prompt), and several choices have several token lists.
    """
    if not RESUMABLE_PARAMETERS.issuperset(body):
        return False
    if body.get("n") not in (None, 1) or body.get("logprobs") not in (None, False):
        return False
    greedy = body.get("temperature") == 0
    return body.get("seed") is None or greedy
