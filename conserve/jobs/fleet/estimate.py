"""Estimate of a row's tokens before it has run: by its text, its limit, and the answers of others. Pure."""

from array import array

from conserve.endpoints.protocol import Call, Completion, KvCache
from conserve.jobs.fleet.pieces import UnplacedRow
from conserve.jobs.window.prompt_key import prompt_key

FIRST_TOKENS = 128.0  # of an answer before any has ended
WEIGHT = 0.05  # of the last answer in their mean
MOST_BLOCKS = 256  # of a key: longer prompts are told apart by then
NO_KEY = array("q")  # of the same type as other keys, with which it is compared once a second server joins
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class AnswerLength:
    """Mean length of the answers so far."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def answered(self, completion: Completion) -> None:
        """Take the length of an answer into the mean."""
        tokens = completion.completion_tokens
        self._mean = tokens if self._mean is None else self._mean + WEIGHT * (tokens - self._mean)

    def asked(self, number: int, call: Call, block_tokens: int | None) -> UnplacedRow:
        """Key and tokens of a call; without a key if `block_tokens` is None."""
        limits = [call.body[name] for name in LIMITS if isinstance(call.body.get(name), int)]
        mean = FIRST_TOKENS if self._mean is None else self._mean
        answer = max(1.0, min([mean, *limits]) - len(call.resume_from))
        if block_tokens is None:
            return UnplacedRow(number, NO_KEY, answer)
        cache = KvCache(block_tokens=block_tokens, num_blocks=MOST_BLOCKS)
        return UnplacedRow(number, prompt_key(call.url, call.body, cache), answer + block_tokens / 2)
