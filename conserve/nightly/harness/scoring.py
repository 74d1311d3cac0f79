"""Log-likelihoods of continuations as requests, and the answers as numbers.

A continuation is scored in one of two ways. *Next token*: each of its tokens is asked for as the next one after the
tokens before it, by `logprob_token_ids`. Continuations of one context share these requests, and the engine finds
the context in its prefix cache. *Echo*: context and continuation are one prompt, whose log probabilities the server
returns; vLLM reads no prefix cache then. The cheaper one is taken, by the tokens to compute.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from conserve.endpoints.protocol import Url
from conserve.errors import EndpointFault
from conserve.jobs.task import KEEP_LOGPROBS
from conserve.nightly.harness.request_jobs import HarnessAnswer, Line

# Tokens that a further request on a cached context costs: half a KV block, and an iteration's place.
REQUEST_TOKENS = 48
MOST_TOKENS = 100  # in one request; vLLM takes 128

Tokens = tuple[int, ...]


class ContinuationScore(NamedTuple):
    """Log-likelihood of a continuation, and whether greedy decoding would have written it."""

    loglikelihood: float
    is_greedy: bool


NOTHING = ContinuationScore(0.0, True)  # of an empty continuation


class Logprobs(msgspec.Struct):
    """Log probabilities of a completion in OpenAI's form."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


DECODE = msgspec.json.Decoder(Logprobs).decode


class ByNextToken(NamedTuple):
    """Plan that asks for each token of some continuations as the next one."""

    continuations: Sequence[Tokens]

    def lines(self, context: Sequence[int]) -> Iterator[Line]:
        """Requests of the plan."""
        for prefix, wanted in asked_after(self.continuations).items():
            for some in parts(wanted):
                yield next_line([*context, *prefix], some)

    def scores(self, answers: Iterator[HarnessAnswer]) -> list[ContinuationScore]:
        """Scores of the continuations; takes the answers to `lines` off `answers`."""
        found: dict[tuple[Tokens, int], ContinuationScore] = {}
        for prefix, wanted in asked_after(self.continuations).items():
            for some in parts(wanted):
                told = next_told(next(answers))
                found |= {(prefix, token): of_token(told, token) for token in some}
        return [together(found, continuation) for continuation in self.continuations]

    def cost(self, context_tokens: int) -> int:
        """Tokens to compute."""
        requests = sum(len(parts(wanted)) for wanted in asked_after(self.continuations).values())
        return context_tokens + requests * REQUEST_TOKENS


class ByEcho(NamedTuple):
    """Plan that lets the server echo each continuation behind its context; `lengths` are of the continuations."""

    lengths: Sequence[int]

    def scores(self, answers: Iterator[HarnessAnswer]) -> list[ContinuationScore]:
        """Scores of the continuations; takes an answer for each off `answers`, and none for an empty one."""
        return [echo_score(next(answers), length) if length else NOTHING for length in self.lengths]


Plan = ByNextToken | ByEcho


def cheaper_plan(
    context: Sequence[int], continuations: Sequence[Tokens], *, next_token: bool
) -> tuple[Plan, Iterator[Line]]:
    """Plan with the fewer tokens to compute, and its requests; the plan holds no context, so that many fit."""
    by_token = ByNextToken(continuations)
    whole = sum(len(context) + len(continuation) for continuation in continuations)
    if next_token and by_token.cost(len(context)) < whole:
        return by_token, by_token.lines(context)
    lines = (echo_line([*context, *one], len(one)) for one in continuations if one)
    return ByEcho([len(one) for one in continuations]), lines


def asked_after(continuations: Sequence[Tokens]) -> dict[Tokens, list[int]]:
    """Tokens to ask for after each beginning of a continuation, in a fixed order."""
    wanted: dict[Tokens, dict[int, None]] = {}
    for continuation in continuations:
        for place, token in enumerate(continuation):
            wanted.setdefault(continuation[:place], {})[token] = None
    return {prefix: list(tokens) for prefix, tokens in wanted.items()}


def parts(wanted: Sequence[int]) -> list[Sequence[int]]:
    """Tokens in lists that one request may ask for."""
    return [wanted[start : start + MOST_TOKENS] for start in range(0, len(wanted), MOST_TOKENS)]


def next_line(prompt: Sequence[int], wanted: Sequence[int]) -> Line:
    """Request for the log probabilities of some tokens as the next one."""
    return line(prompt, logprobs=len(wanted), logprob_token_ids=wanted)


def echo_line(prompt: Sequence[int], scored: int) -> Line:
    """Request for the log probabilities of a prompt's last tokens."""
    return line(prompt, logprobs=1, echo=True, **{KEEP_LOGPROBS: scored})


def line(prompt: Sequence[int], **asked: Any) -> Line:
    """Request of one token, which servers must generate at least, with log probabilities."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_tokens_as_token_ids": True, **asked}
    return Line(Url.COMPLETIONS, body)


def echo_score(answer: HarnessAnswer, length: int) -> ContinuationScore:
    """Score of a continuation of this many tokens at the end of an echoed prompt."""
    told = logprobs_of(answer)
    shortened = len(told.token_logprobs) == length  # by the queue
    start = 0 if shortened else answer.prompt_tokens - length
    if start < 0 or start + length > len(told.token_logprobs):
        raise EndpointFault(
            "the server does not echo the log probabilities of a prompt; score on an engine (model=...), on vLLM, "
            "or on another server that answers `echo` with `logprobs`"
        )
    values = [number(value) for value in told.token_logprobs[start : start + length]]
    tops = [top or {} for top in told.top_logprobs[start : start + length]]
    greedy = all(value >= max(top.values(), default=value) for value, top in zip(values, tops, strict=True))
    return ContinuationScore(sum(values), greedy)


class NextTokenAnswer(NamedTuple):
    """Answer to a next-token request: log probabilities by name of the token, and the greatest one."""

    by_name: dict[str, float]
    greatest: float


def next_told(answer: HarnessAnswer) -> NextTokenAnswer:
    """Log probabilities of a next token."""
    told = logprobs_of(answer)
    return NextTokenAnswer(told.top_logprobs[0] or {}, number(told.token_logprobs[0]))


def of_token(answer: NextTokenAnswer, token: int) -> ContinuationScore:
    """Log probability of one token, and whether it is the likeliest."""
    value = answer.by_name.get(f"token_id:{token}")
    if value is None:
        raise EndpointFault(
            "the server does not answer `logprob_token_ids`, which vLLM does from 0.31 on; give scoring=echo"
        )
    return ContinuationScore(value, value >= answer.greatest)


def together(found: dict[tuple[Tokens, int], ContinuationScore], continuation: Tokens) -> ContinuationScore:
    """Score of a continuation from those of its tokens."""
    each = [found[continuation[:place], token] for place, token in enumerate(continuation)]
    return ContinuationScore(sum(one.loglikelihood for one in each), all(one.is_greedy for one in each))


def logprobs_of(answer: HarnessAnswer) -> Logprobs:
    """Log probabilities of an answer; raises `EndpointFault` for one without them."""
    if answer.logprobs is None:
        raise EndpointFault(
            "the server returned no log probabilities; score with an engine (model=...) or vLLM"
        )
    return DECODE(answer.logprobs)


def number(value: float | None) -> float:
    """Log probability; raises `EndpointFault` where there is none, as at a prompt's first token."""
    if value is None:
        raise EndpointFault("a token has no log probability; a context of at least one token goes before it")
    return value
