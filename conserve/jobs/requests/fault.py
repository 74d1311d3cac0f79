"""Faults for which every engine would reject a request: parameters out of range, answers of an impossible form.

The ranges are vLLM 0.32's (`SamplingParams`, `ChatCompletionRequest`), which are OpenAI's or wider.
"""

import os
from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any, NamedTuple

import msgspec

from conserve.endpoints.protocol import Url
from conserve.jobs.requests.json_schema import schema_fault, size_fault
from conserve.jobs.requests.wording import shown
from conserve.jobs.task import KEEP_LOGPROBS

INT32 = 2**31 - 1  # most that engines hold in their tensors
INT64: tuple[float, float] = (-(2**63), 2**63 - 1)


class Range(NamedTuple):
    """Range of a number among the parameters."""

    low: float
    high: float = inf
    whole: bool = False
    above: bool = False  # `low` itself is excluded

    def holds(self, value: float) -> bool:
        """True if the number is in the range."""
        if isinstance(value, float) and (not isfinite(value) or (self.whole and not value.is_integer())):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if (self.low, self.high) == INT64:
            return f"{kind} of 64 bits"
        low = f"above {self.low:g}" if self.above else f"from {self.low:g}"
        high = f"{self.high:,}" if isinstance(self.high, int) else f"{self.high:g}"
        return f"{kind} {low}" + ("" if self.high == inf else f" to {high}")


NUMBERS = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "top_k": Range(-1, INT32, whole=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, above=True),
    "max_tokens": Range(1, INT32, whole=True),
    "max_completion_tokens": Range(1, INT32, whole=True),
    "max_output_tokens": Range(1, INT32, whole=True),
    "min_tokens": Range(0, INT32, whole=True),
    "top_logprobs": Range(-1, INT32, whole=True),
    "prompt_logprobs": Range(-1, INT32, whole=True),
    KEEP_LOGPROBS: Range(1, INT32, whole=True),
    "seed": Range(*INT64, whole=True),
}
WITH_INPUT = (Url.EMBEDDINGS, Url.RESPONSES)
DECIDED = {
    "stream": "rows are answered whole, or streamed as the run sees fit; leave it out",
    "model": "name it to the job: --model",
}


def parameter_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """First fault of a request's parameters, None without one; a null counts as not given."""
    given = {name: value for name, value in body.items() if value is not None}
    return next((fault for check in CHECKS if (fault := check(url, given)) is not None), None)


def request_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """First fault of a whole request: of its messages or prompt, then of its parameters."""
    return prompt_fault(url, body) or parameter_fault(url, body)


def prompt_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """Fault of a chat's messages, a completion's prompt, or the input of another route; None without one."""
    if url in WITH_INPUT:
        given = body.get("input")
        known = isinstance(given, str | list) and bool(given)
        return None if known else "it has no input: text, or a list with at least one thing in it"
    if url == Url.COMPLETIONS:
        prompt = body.get("prompt")
        known = isinstance(prompt, str | list) or body.get("prompt_embeds") is not None
        return None if known else "it has no prompt: text, or a list of token ids"
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "it has no messages: a list with at least one in it"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number} has no role"
    return None


def number_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """Fault of a number out of its range."""
    limits = {**NUMBERS, "n": Range(1, int(os.environ.get("VLLM_MAX_N_SEQUENCES", "16384")), whole=True)}
    for name in limits.keys() & body.keys():
        if (value := number(body[name])) is None or not limits[name].holds(value):
            return f"{name} is {limits[name]}, not {shown(body[name])}"
    return None


def number(value: object) -> float | None:
    """Number that a parameter stands for, None if it is none; servers take numbers in quotes too."""
    if isinstance(value, int):
        return value  # not as a float, which rounds beyond 2**53
    try:
        return float(value) if isinstance(value, float | str) else None
    except ValueError:
        return None


def together_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """Fault of parameters that do not go together."""
    least, most = body.get("min_tokens"), most_tokens(body)
    if isinstance(least, int) and isinstance(most, int) and least > most:
        return f"min_tokens is {least} and max_tokens is only {most}"
    if url == Url.RESPONSES and body.get("background"):
        return "a response in the background comes after its answer; leave background out"
    if body.get("temperature") == 0 and isinstance(body.get("n"), int) and body["n"] > 1:
        return f"n is {body['n']} and temperature is 0, which gives one answer only; raise it or leave n out"
    return None


def logprobs_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """Fault of log probabilities that are asked for in another route's way."""
    asked = body.get("logprobs")
    if url not in (Url.CHAT, Url.COMPLETIONS):
        return None
    if url == Url.COMPLETIONS:
        if asked is not None and ((value := number(asked)) is None or not Range(-1, whole=True).holds(value)):
            return f"logprobs is a whole number from 0, not {shown(asked)}"
        return None
    if asked not in (None, True, False):
        return (
            f"logprobs of a chat is true or false, not {shown(asked)}; top_logprobs says of how many tokens"
        )
    if body.get("top_logprobs") and not asked:
        return "top_logprobs goes with logprobs: true"
    return None


def stop_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """Fault of stop strings: empty ones, too many, or no strings at all."""
    stop = body.get("stop", [])
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        return f"stop is a string that is not empty, or a list of such, not {shown(stop)}"
    most = int(os.environ.get("VLLM_MAX_STOP_STRINGS", "4"))
    if len(strings) > most:
        return (
            f"stop has {len(strings)} strings, and vLLM takes {most}; where the server takes more, set "
            "VLLM_MAX_STOP_STRINGS here too"
        )
    return None


def format_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """Fault of `response_format`: a type that no server knows, or an invalid schema."""
    wanted = body.get("response_format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        return f"response_format has a type: text, json_object or json_schema, not {shown(wanted)}"
    if kind != "json_schema":
        return None
    answer = wanted.get("json_schema")
    if not isinstance(answer, dict) or not isinstance(answer.get("name"), str):
        return "response_format of type json_schema has a json_schema with a name and a schema"
    return schema_fault(answer.get("schema"))


def structured_fault(url: str, body: Mapping[str, Any]) -> str | None:
    """Fault of the schema in vLLM's own field `structured_outputs`."""
    wanted = body.get("structured_outputs")
    schema = wanted.get("json") if isinstance(wanted, dict) else None
    if isinstance(schema, str):
        if (fault := size_fault(len(schema))) is not None:
            return fault
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"the schema in structured_outputs is not JSON ({error})"
    return None if schema is None else schema_fault(schema)


CHECKS: tuple[Callable[[str, Mapping[str, Any]], str | None], ...] = (
    number_fault,
    together_fault,
    logprobs_fault,
    stop_fault,
    format_fault,
    structured_fault,
)


def most_tokens(body: Mapping[str, Any]) -> Any:
    """Longest answer that a body asks for, in tokens, by either name; None without one, as where it is null."""
    limit = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit
