"""Log probabilities of the fake endpoint: made up, and the same for a token after the same tokens at every call."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

VOCABULARY = 10  # tokens that may be the likeliest


def likeliest(prompt: Sequence[int], count: int) -> list[int]:
    """`count` token ids, each the likeliest after those before it."""
    found = list(prompt)
    for _ in range(count):
        found.append(likeliest_after(found))
    return found[len(prompt) :]


def likeliest_after(prefix: Sequence[int]) -> int:
    """Token that is likeliest after these."""
    return digest_of(prefix) % VOCABULARY


def logprob(prefix: Sequence[int], token: int) -> float:
    """Log probability of a token after others, made up and the same at every call."""
    if token == likeliest_after(prefix):
        return -0.125
    return -0.25 - digest_of([*prefix, token]) % 10_000 / 1024


def digest_of(token_ids: Sequence[int]) -> int:
    """Number that depends on the token ids alone."""
    return int.from_bytes(hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=6).digest())


def logprobs_of(body: Mapping[str, Any], answer: Sequence[int]) -> dict[str, Any]:
    """Log probabilities of an answer, and of an echoed prompt, in vLLM's form with token ids as names."""
    prompt = list(body["prompt"])
    said = [*prompt, *answer]
    places = range(0 if body.get("echo") else len(prompt), len(said))
    return {
        "tokens": [f"token_id:{said[place]}" for place in places],
        "token_logprobs": [logprob(said[:place], said[place]) if place else None for place in places],
        "top_logprobs": [
            top_logprobs(said[:place], said[place], body) if place else None for place in places
        ],
        "text_offset": [0] * len(places),
    }


def top_logprobs(prefix: Sequence[int], token: int, body: Mapping[str, Any]) -> dict[str, float]:
    """Log probabilities at one place: of its token, and of those asked for, else of the likeliest."""
    wanted = body.get("logprob_token_ids") or [likeliest_after(prefix)]
    return {f"token_id:{one}": logprob(prefix, one) for one in [token, *wanted]}
