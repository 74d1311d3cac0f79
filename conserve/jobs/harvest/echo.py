"""Log probabilities of an echoed prompt, of which a row may ask to keep those of the last tokens alone.

Scoring a continuation needs the log probabilities of its tokens alone. Those of the context before it, which
servers return too, would take 100 bytes a token in the store.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from conserve.endpoints.protocol import Choice, Completion

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def shortened(completion: Completion, keep: int) -> Completion:
    """Completion without its echoed text, and with the log probabilities of the prompt's last `keep` tokens."""
    choices = [shorter(choice, completion.prompt_tokens, keep) for choice in completion.choices]
    return replace(completion, choices=choices)


def shorter(choice: Choice, prompt_tokens: int, keep: int) -> Choice:
    """One choice shortened; as it is if it echoes no prompt of this length."""
    logprobs = choice.logprobs
    if logprobs is None or not keep <= prompt_tokens <= len(logprobs.get("tokens") or ()):
        return choice
    return replace(choice, text="", logprobs=part_of(logprobs, prompt_tokens - keep, prompt_tokens))


def part_of(logprobs: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Log probabilities of the tokens from `start` to `stop`, in OpenAI's form."""
    return {name: found[start:stop] if name in LISTS and found else found for name, found in logprobs.items()}
