"""Answers of a server, checked in full before any part of them is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from conserve.endpoints.protocol import Call, Choice, Completion, Url
from conserve.errors import EndpointFault, EndpointUnavailable, one_line

BROKEN_OFF = "error"
CUT_SHORT = ("abort", BROKEN_OFF)
"""Finish reasons of answers that the server gave up, as vLLM does when it stops, or when a request breaks it."""
LEVELS = 8  # of nesting in log probabilities; OpenAI's have 6
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # raised by msgspec for malformed content

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # as wide as in the results
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def nested_json(levels: int) -> Any:
    """Type of JSON values with at most this many levels of lists and objects."""
    kind: Any = Union[None, bool, Whole, float, str]  # noqa: UP007
    for _ in range(levels):
        kind = Union[None, bool, Whole, float, str, list[kind], dict[str, kind]]  # noqa: UP007
    return kind


if TYPE_CHECKING:
    Logprobs = Mapping[str, Any]
    ToolCalls = list[Mapping[str, Any]]
    FunctionCall = Mapping[str, Any]
else:
    Logprobs = dict[str, nested_json(LEVELS - 1)]
    ToolCalls = list[dict[str, nested_json(LEVELS - 2)]]
    FunctionCall = dict[str, nested_json(LEVELS - 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDetails:
    """Details of a prompt's tokens."""

    cached_tokens: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Token counts of a request."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    """A part of a message, as Mistral's models that reason send it; what is no text is left out."""

    type: str
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """The answer to a chat."""

    content: str | list[ContentPart] | UnsetType | None = UNSET
    tool_calls: ToolCalls | None = None
    function_call: FunctionCall | None = None  # OpenAI's older form, of a request with `functions`
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One of the answers to a chat."""

    message: AssistantMessage
    index: int | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a message of nothing: servers leave out `content` where something else is."""
        if self.message.content is UNSET and self.finish_reason is None and not self.beside:
            raise ValueError("a message without `content`")

    @property
    def text(self) -> str:
        content = self.message.content
        if isinstance(content, list):
            return "".join(part.text or "" for part in content if part.type == "text")
        return content or ""

    @property
    def beside(self) -> Mapping[str, Any]:
        """Tool calls and a refusal, where there are any."""
        return beside(self.message.tool_calls, self.message.refusal, self.message.function_call)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChoice:
    """One of the answers to a bare prompt."""

    text: str | None
    index: int | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None

    @property
    def beside(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Response body of the route for chats."""

    choices: list[ChatChoice]
    usage: Any = None  # read by `token_usage`
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswer:
    """Response body of the route for bare prompts."""

    choices: list[TextChoice]
    usage: Any = None  # read by `token_usage`
    model: str | None = None


CHAT = msgspec.json.Decoder(ChatAnswer)
TEXT = msgspec.json.Decoder(TextAnswer)


def completion(call: Call, content: bytes) -> Completion:
    """Read a response body; raises `EndpointFault` if it is not a whole answer to the call."""
    answer: ChatAnswer | TextAnswer
    try:
        answer = CHAT.decode(content) if call.url is Url.CHAT else TEXT.decode(content)
    except UNREADABLE as error:
        raise EndpointFault(f"the answer is no completion ({one_line(error)}): {excerpt(content)}") from error
    wanted = num_choices(call.body)
    if len(answer.choices) != (wanted or len(answer.choices) or 1):
        raise EndpointFault(f"the answer has {len(answer.choices)} choices, not {wanted or 1}")
    choices = tuple(
        Choice(
            text=c.text or "", finish_reason=c.finish_reason or "stop", logprobs=c.logprobs, beside=c.beside
        )
        for c in in_order(answer.choices)
    )
    return with_usage(choices, token_usage(answer.usage), answer.model)


def token_usage(
    usage: Any, *, prompt: str = "prompt_tokens", answer: str = "completion_tokens"
) -> TokenUsage:
    """Token counts, under a route's names for them; one that is unreadable counts as none, and spoils no answer."""
    counts = usage if isinstance(usage, Mapping) else {}
    details = counts.get(f"{prompt}_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return TokenUsage(
        prompt_tokens=readable(counts.get(prompt)),
        completion_tokens=readable(counts.get(answer)),
        prompt_tokens_details=PromptDetails(cached_tokens=readable(cached)),
    )


def readable(value: Any) -> int | None:
    """The count, which some gateways send as `10.0` or as a text; None for anything else."""
    try:
        count: int = msgspec.convert(value, Count, strict=False)
    except UNREADABLE:
        return None
    return count


def in_order(choices: Sequence[ChatChoice | TextChoice]) -> Sequence[ChatChoice | TextChoice]:
    """Choices by their `index`; as they came if not all have one."""
    if any(choice.index is None for choice in choices):
        return choices
    return sorted(choices, key=lambda choice: choice.index or 0)


def beside(
    tool_calls: Sequence[Mapping[str, Any]] | None,
    refusal: str | None,
    function_call: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Tool calls and a refusal, where there are any: servers send empty lists and nulls for none."""
    found = {"tool_calls": list(tool_calls or ()), "function_call": function_call, "refusal": refusal}
    return {name: value for name, value in found.items() if value}


def with_usage(choices: tuple[Choice, ...], usage: TokenUsage | None, model: str | None) -> Completion:
    """The completion of these choices.

    Raises `EndpointUnavailable` if one was cut short, and `EndpointFault` if by an error: it may be the row's.
    """
    for choice in choices:
        if choice.finish_reason in CUT_SHORT:
            said = f"the server gave the answer up (finish_reason {choice.finish_reason})"
            raise EndpointFault(said) if choice.finish_reason == BROKEN_OFF else EndpointUnavailable(said)
    usage = usage or TokenUsage()
    details = usage.prompt_tokens_details or PromptDetails()
    return Completion(
        choices=choices,
        prompt_tokens=usage.prompt_tokens or 0,
        completion_tokens=usage.completion_tokens or 0,
        cached_tokens=details.cached_tokens or 0,
        model=model or "",
    )


def num_choices(body: Mapping[str, Any]) -> int | None:
    """Number of choices that a request asks for: `n` for each of its prompts. None if that is not clear."""
    n, prompt = body.get("n"), body.get("prompt")
    n = 1 if n is None else n
    if not isinstance(n, int):
        return None
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    if several and not isinstance(prompt[0], int):  # type: ignore[index]
        return n * len(prompt)  # type: ignore[arg-type]
    return n


def excerpt(content: bytes) -> str:
    """The beginning of a body, for an error message."""
    return one_line(content[:800].decode("utf-8", "replace"), most=200)
