"""lm-evaluation-harness over the durable queue: its model `conserve`."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import (
    handle_stop_sequences,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from conserve.endpoints.protocol import Url
from conserve.nightly.harness.model_access import (
    ModelTokens,
    Scoring,
    alone,
    engine_flags,
    model_tokens,
    settings_of,
)
from conserve.nightly.harness.request_jobs import Asker, Line, Queue
from conserve.nightly.harness.scoring import ContinuationScore, Plan, Tokens, cheaper_plan

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger(__name__)

NAME = "conserve"
CHUNK = 512  # requests that are tokenised at a time
STOPS = 4  # stop strings that servers take
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling of vLLM without the defaults of a model's generation_config.json, which servers apply."""
AS_WRITTEN = {"skip_special_tokens": False, "spaces_between_special_tokens": False}


class ConserveLM(TemplateLM):  # type: ignore[misc]
    """Model of lm-eval whose requests are rows of durable jobs, one job a call.

    The arguments are those of `--model_args` (docs/how-to/lm-eval-and-inspect.md); names that are none of them are
    flags of vLLM, as `dtype=float32`. A program may give its own `queue` and `tokens`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pretrained: str | None = None,  # lm-eval's own word for the model
        endpoint: str | None = None,
        store: str | None = None,
        run: str | None = None,
        wait: bool = False,
        api_key: str | None = None,
        tokenizer: str | None = None,
        engine_args: str = "",
        max_length: int | None = None,
        scoring: Scoring = "auto",
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        truncation_side: str = "left",
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: object = None,  # lm-eval gives these three to every model
        max_batch_size: object = None,
        device: object = None,
        queue: Queue | None = None,
        tokens: ModelTokens | None = None,
        **vllm_flags: Any,
    ) -> None:
        super().__init__()
        named, flags = model or pretrained, engine_flags(engine_args, vllm_flags)
        if tokens is None:
            settings = settings_of(store, model=named, endpoint=endpoint, api_key=api_key)
            tokens = model_tokens(
                settings, flags=flags, tokenizer=tokenizer, max_length=max_length, scoring=scoring
            )
        if queue is None:
            place: dict[str, Any] = {"store": store, "run": run, "wait": wait, "api_key": api_key}
            queue = alone("lm-eval", model=named, endpoint=endpoint, flags=flags, **place)
        self._tokens, self._asker = tokens, Asker(queue)
        self.tokenizer = tokens.tokenizer
        self._max_gen_toks = int(max_gen_toks)
        self._add_bos = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._truncation_side = truncation_side
        self._think_end = think_end_token
        self._chat_arguments = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_arguments["enable_thinking"] = enable_thinking

    # Tokens.

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without a context."""
        chosen = (self._prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id)
        return next(int(token) for token in chosen if token is not None)

    @property
    def max_length(self) -> int:
        """Context length in tokens."""
        return self._tokens.max_length

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Chat as the text that the model sees."""
        try:
            return self._as_chat(chat_history, add_generation_prompt)
        except TemplateError:
            log.warning("the chat template does not take the chat; its system message is left out")
            said = [message for message in chat_history if message["role"] != "system"]
            return self._as_chat(said, add_generation_prompt)

    def _as_chat(self, chat: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            chat,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_arguments,
        )
        return cast("str", text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of one text."""
        return self._encoded([string], add_special_tokens)[0]

    def _encoded(self, texts: Sequence[str], special: bool | None = None) -> list[list[int]]:
        """Token ids of texts; one that begins with the sign of the beginning, as chats do, gets no second one."""
        found: list[list[int]] = [[] for _ in texts]
        sign = self.tokenizer.decode(self.prefix_token_id)
        begun = [text.startswith(sign) for text in texts]
        for has_sign in (True, False):
            places = [place for place, text in enumerate(texts) if text and begun[place] is has_sign]
            wanted = False if has_sign else self._add_bos if special is None else special
            flags = {} if wanted is None else {"add_special_tokens": wanted}
            if places:
                encoded = self.tokenizer(
                    [texts[place] for place in places], return_attention_mask=False, **flags
                )
                for place, tokens in zip(places, encoded["input_ids"], strict=True):
                    found[place] = tokens
        return found

    # Log-likelihoods.

    def loglikelihood(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[ContinuationScore]:
        """Log-likelihoods of continuations, and whether greedy decoding would have written them."""
        return self._scored(self._pairs([request.args for request in requests]), requests)

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each in windows of the context length."""
        counts: list[int] = []
        scores = iter(self._scored(self._windows([request.args[0] for request in requests], counts)))
        sums = [sum(score.loglikelihood for score in islice(scores, count)) for count in counts]
        for request, found in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[ContinuationScore]:
        return self._scored((tuple(context), tuple(rest)) for _, context, rest in requests)

    def _scored(
        self, pairs: Iterator[tuple[Tokens, Tokens]], requests: "Sequence[Instance]" = ()
    ) -> list[ContinuationScore]:
        plans: list[Plan] = []
        answers = self._asker.ask(self._scoring_lines(pairs, plans))
        scores = list(chain.from_iterable(plan.scores(answers) for plan in plans))
        for request, score in zip(requests, scores, strict=False):
            self.cache_hook.add_partial("loglikelihood", request.args, score)
        return scores

    def _scoring_lines(self, pairs: Iterator[tuple[Tokens, Tokens]], plans: list[Plan]) -> Iterator[Line]:
        """Requests for pairs of context and continuation; the plan of each context is appended."""
        fitting = map(self._fitted, pairs)
        for context, group in groupby(fitting, key=lambda pair: pair[0]):
            plan, lines = cheaper_plan(
                context, [rest for _, rest in group], next_token=self._tokens.next_token
            )
            plans.append(plan)
            yield from lines

    def _fitted(self, pair: tuple[Tokens, Tokens]) -> tuple[Tokens, Tokens]:
        """Context without its first tokens, if it and the continuation leave no place for a token to generate."""
        context, rest = pair
        over = max(0, len(context) + len(rest) - (self.max_length - 1))
        if not over:
            return pair
        log.warning("a context is %d tokens too long; its beginning is left out", over)
        if over < len(context):
            return context[over:], rest
        kept = rest[over - len(context) :]  # even the continuation is too long: its end is scored
        return kept[:1], kept[1:]

    def _pairs(self, arguments: Sequence[tuple[str, str]]) -> Iterator[tuple[Tokens, Tokens]]:
        """Token ids of contexts and continuations; spaces at a context's end go to the continuation."""
        for start in range(0, len(arguments), CHUNK):
            some = [with_spaces(*pair) for pair in arguments[start : start + CHUNK]]
            contexts = list(dict.fromkeys(context for context, _ in some if context))
            encoded = dict(zip(contexts, self._encoded(contexts), strict=True))
            whole = self._encoded([context + rest for context, rest in some if context])
            bare = self._encoded([rest for context, rest in some if not context], special=False)
            wholes, bares = iter(whole), iter(bare)
            for context, _ in some:
                if context:
                    before = encoded[context]
                    yield tuple(before), tuple(next(wholes)[len(before) :])
                else:
                    yield self._behind_nothing(next(bares))

    def _behind_nothing(self, rest: Sequence[int]) -> tuple[Tokens, Tokens]:
        """Continuation of an empty context: behind the sign of the beginning, unless it begins with that."""
        if rest and rest[0] == self.prefix_token_id:
            return tuple(rest[:1]), tuple(rest[1:])
        return (self.prefix_token_id,), tuple(rest)

    def _windows(self, texts: Sequence[str], counts: list[int]) -> Iterator[tuple[Tokens, Tokens]]:
        """Windows of texts; their number for each text is appended to `counts`."""
        for text in texts:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,  # as lm-eval's vLLM has it, so that the windows are the same
                context_len=1,
            )
            found = [make_disjoint_window(window) for window in windows]
            counts.append(len(found))
            yield from ((tuple(context), tuple(rest)) for context, rest in found)

    # Generation.

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Texts that the model writes until a stop string."""
        sampled = any(normalize_gen_kwargs(request.args[1]).get("temperature", 1.0) for request in requests)
        kept: list[dict[str, Any]] = []
        answers = self._asker.ask(self._generation_lines(requests, kept), sampled=sampled)
        texts = []
        for request, arguments, answer in zip(requests, kept, answers, strict=True):
            text = postprocess_generated_text(answer.text or "", arguments["until"], self._think_end)
            texts.append(text)
            self.cache_hook.add_partial("generate_until", (request.args[0], arguments), text)
        return texts

    def _generation_lines(self, requests: "Sequence[Instance]", kept: list[dict[str, Any]]) -> Iterator[Line]:
        """Requests for texts; the arguments of each are appended to `kept`."""
        eos = self.tokenizer.decode(self.eot_token_id) or self.tokenizer.eos_token
        for start in range(0, len(requests), CHUNK):
            some = requests[start : start + CHUNK]
            encoded = self._encoded([request.args[0] for request in some])
            for request, tokens in zip(some, encoded, strict=True):
                arguments = normalize_gen_kwargs(request.args[1], default_max_gen_toks=self.max_gen_toks)
                until = handle_stop_sequences(arguments.pop("until", None), eos=eos)
                most = int(arguments.pop("max_gen_toks", self.max_gen_toks))
                arguments.pop("do_sample", None)
                prompt, most = maybe_truncate(
                    tokens, max_gen_toks=most, max_model_len=self.max_length, side=self._truncation_side
                )
                kept.append({**arguments, "until": until, "max_gen_toks": most})
                yield Line(Url.COMPLETIONS, self._body(prompt, most, until, eos, arguments))

    def _body(
        self, prompt: Sequence[int], most: int, until: Sequence[str], eos: str, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Body of a request for a text. Stop strings beyond those that servers take cut the text afterwards."""
        sent = [eos] if self._think_end else [stop for stop in until if stop]
        if len(sent) > STOPS:
            sent = [stop for stop in sent if stop != eos][:STOPS]  # its token ends the answer anyway
        ours = {**PLAIN, **AS_WRITTEN} if self._tokens.is_vllm else {}
        return {**ours, **arguments, "prompt": prompt, "max_tokens": most, "stop": sent}


def with_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Context and continuation with the spaces between them in the continuation."""
    bare = context.rstrip()
    return (bare, context[len(bare) :] + continuation) if context else (context, continuation)


def register() -> None:
    """Make lm-eval know the model `conserve`."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=ConserveLM)
