"""The seam between jobs and engines: a request goes in; its completion, or its tokens so far, come out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from conserve.config import model_name


class Url(StrEnum):
    """The OpenAI routes that a request can ask for."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"


class Call(Struct, frozen=True, kw_only=True):
    """One request, in the words of the OpenAI API.

    `body` is the request body without ``model`` and ``stream``. `resume_from` holds the token ids that an earlier
    attempt on the same endpoint generated; the completion covers them too, as if it had not been interrupted.
    It is set only if `resumable(body)`. `identity` is the endpoint's when the call was made: an endpoint that has
    become another must neither continue tokens of the first, nor report its own under the first one's name.
    `model` is the name of the one that the row's job is bound to (see `model_of`): no other may answer it.
    `pushes` is for a row whose job would miss its deadline: a server may let it take more than other rows.
    """

    key: str  # unique among the calls in flight
    url: Url
    body: Mapping[str, Any]
    resume_from: Sequence[int] = ()
    identity: str | None = None
    model: str | None = None
    pushes: bool = False
    traceparent: str | None = None  # W3C trace context, which an HTTP endpoint sends along

    def traced(self, traceparent: str | None) -> "Call":
        """The call with this trace context; itself without one."""
        return self if traceparent is None else replace(self, traceparent=traceparent)


class Choice(Struct, frozen=True, kw_only=True):
    """One of a completion's `n` answers; `logprobs` is the route's OpenAI object, if asked for.

    `beside` is what an answer holds beside its text, under OpenAI's names: `tool_calls`,
    a `function_call`, a `refusal`.
    """

    text: str
    finish_reason: str  # "stop", "length", ...
    logprobs: Mapping[str, Any] | None = None
    beside: Mapping[str, Any] = {}


class Completion(Struct, frozen=True, kw_only=True):
    """The whole answer to one call, with token counts of one uninterrupted generation."""

    choices: Sequence[Choice]  # n >= 1, in order
    prompt_tokens: int
    completion_tokens: int  # over all choices
    cached_tokens: int  # prompt tokens found in the engine's prefix cache
    model: str
    engine: str | None = None  # identity that generated it, if not the one that the call names
    started_over: bool = False  # True: it does not go on from the tokens that the call brought

    @property
    def tells_tokens(self) -> bool:
        """True if the server counted tokens; some send no `usage`."""
        return self.prompt_tokens + self.completion_tokens > 0

    def resumed_tokens(self, call: Call) -> int:
        """Number of tokens of an earlier attempt that the answer to this call goes on from."""
        return 0 if self.started_over else len(call.resume_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Size of an engine's prefix cache, which holds whole KV blocks."""

    block_tokens: int = 16  # vLLM's default
    num_blocks: int | None = None  # None if unknown


class InFlight(NamedTuple):
    """Tokens of the calls in flight: computed ones, of prompts and answers, and all of them.

    `most` assumes that every answer reaches its limit; None if that is not known.
    """

    computed: int = 0
    most: int | None = None


OnTokens = Callable[[Sequence[int]], None]
"""Called with all output token ids so far, resumed ones included; must return quickly."""


class Endpoint(Protocol):
    """Completes requests, many at a time, in one event loop.

    Endpoints inherit what they do not tell. `doing` and `in_flight` are for the display: they are read a few times
    a second and must be cheap.

    `complete` raises `RequestRejected` for a request that can never succeed and a `RetryableError` for one that
    may; cancelling it withdraws the request.
    """

    @property
    def identity(self) -> str:
        """Identity of model, weights and tokenizer: saved tokens continue only under an equal one.

        Known once started.
        """

    @property
    def capacity(self) -> int:
        """Number of calls that keep the endpoint busy; more of them only wait. Known once started."""

    @property
    def model(self) -> str | None:
        """Name of the model, which jobs are bound to (see `model_of`); None where the identity says it."""
        return None

    @property
    def kv_cache(self) -> KvCache:
        """Size of the prefix cache. Known once started."""
        return KvCache()

    @property
    def doing(self) -> str | None:
        """Step that it is at while it is not ready, as "starting MODEL: loading the weights"."""
        return None

    @property
    def in_flight(self) -> InFlight:
        """Tokens of the calls in flight."""
        return InFlight()

    @property
    def notice(self) -> str | None:
        """Sentence on the server for the user, once started."""
        return None

    async def start(self) -> None:
        """Make ready, or raise `EndpointUnusable`."""

    async def alive(self) -> bool:
        """True unless the server of a fleet gives no sign of life."""
        return True

    async def version(self) -> str | None:
        """Versions of what runs at the server, as far as it tells them."""
        return None

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer one call; report tokens as they come if `on_tokens` is given and tokens can be seen."""

    async def close(self) -> None:
        """Withdraw the calls in flight and free all resources."""


def model_of(endpoint: Endpoint) -> str:
    """Name of the model that answers, once started: a folder by its absolute path."""
    return model_name(said_model(endpoint))


def said_model(endpoint: Endpoint) -> str:
    """Model as the endpoint says it, once started."""
    return endpoint.model or endpoint.identity


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
    """True if a generation cut short can continue from its tokens and end as if uninterrupted.

    Only for parameters known to be safe. Log probabilities of saved tokens are gone. The state of a grammar or of a
    seeded generator cannot be rebuilt from tokens alone. Presence and frequency penalties count output tokens only,
    and saved ones come back as prompt. Several choices, as of several prompts, have several token lists.
    """
    if not RESUMABLE_PARAMETERS.issuperset(body):
        return False
    logprobs, prompt = body.get("logprobs"), body.get("prompt")  # 0 logprobs are those of the samples
    if body.get("n") not in (None, 1) or not (logprobs is None or logprobs is False):
        return False
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        return False
    greedy = body.get("temperature") == 0
    return body.get("seed") is None or greedy
