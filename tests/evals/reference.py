"""lm-eval's model interface on the fake's log probabilities without a queue."""

from typing import Any

from lm_eval.api.model import LM

from conserve.endpoints.fake import WORDS, answer_tokens
from conserve.endpoints.fake_logprobs import likeliest_after, logprob


class Reference(LM):
    """Scores and texts of the fake, request by request, by another way than the queue's.

    `encode` and `template` are of the tokenizer; `window` is the context length.
    """

    def __init__(self, tokenizer: Any, *, window: int) -> None:
        super().__init__()
        self._tokenizer, self._window = tokenizer, window

    @property
    def tokenizer_name(self) -> str:
        return "characters"

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )  # fmt: skip

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return str(self._tokenizer.chat_template)

    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
        return [self._score(*request.args) for request in requests]

    def _score(self, context: str, continuation: str) -> tuple[float, bool]:
        before, whole = self._ids(context), self._ids(context + continuation)
        places = range(len(before), len(whole))
        greedy = all(whole[place] == likeliest_after(whole[:place]) for place in places)
        return sum(logprob(whole[:place], whole[place]) for place in places), greedy

    def loglikelihood_rolling(self, requests: Any) -> list[float]:
        sums = []
        for (text,) in (request.args for request in requests):
            ids = [self._tokenizer.eos_token_id, *self._ids(text)]
            sums.append(sum(logprob(ids[:place], ids[place]) for place in range(1, len(ids))))
        return sums

    def generate_until(self, requests: Any) -> list[str]:
        texts = []
        for context, arguments in (request.args for request in requests):
            answer = answer_tokens(str(self._ids(context)), arguments["max_gen_toks"])
            text = " ".join(WORDS[token] for token in answer)
            for stop in arguments["until"]:
                text = text.partition(stop)[0]
            texts.append(text)
        return texts

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found
