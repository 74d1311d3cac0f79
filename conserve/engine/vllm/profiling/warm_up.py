"""A latency model from a warm-up: random requests that the engine serves before all others.

It is rougher than a profile: contexts are only as long as the prompts, and it takes seconds instead of minutes. Its
margin reflects that: with few residuals, `quantile_margin` goes beyond the largest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from conserve import variables
from conserve.errors import SettingsError
from conserve.profiles.batch import Batch
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel
from conserve.profiles.fit import Samples, cross_predictions, fit, non_negative
from conserve.profiles.margin import Residual

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

PREFIX = "conserve-warm-up-"
WARM_UP_S = 12.0
LONGEST_PROMPT = 3000
MOST_TOGETHER = 32
LEAST_SAMPLES = 4 * len(ConServeModel.terms)
LEAST_PREFILLS = 2 * len(ConServeModel.terms)  # iterations with a prompt in them, among the samples
MOST_MORE = 4 * LEAST_SAMPLES  # groups served beyond the end for an engine without a model
FIRST_TOKENS = 16  # prompt tokens of the first group
GROWTH = 4  # most times as many tokens in a group as in any group before
GROUP_SHARE = 0.2  # share of the warm-up's time for the largest group
FLOOR_TOKENS = 256  # prompt tokens of the largest group, also on a slow engine
ANSWER = (4, 12)  # tokens of an answer; fewer if a decode step takes long


def is_warm_up(request_id: str) -> bool:
    """True if this request belongs to the warm-up."""
    return PREFIX in request_id


def seconds_asked_for() -> float:
    """Seconds of the warm-up; raises `SettingsError` where the user's are none."""
    asked = os.environ.get(variables.WARM_UP_S, str(WARM_UP_S))
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(asked)) < math.inf:
            return seconds
    raise SettingsError(
        f"{variables.WARM_UP_S} takes seconds above 0, not {asked!r}; leave it out for {WARM_UP_S:g}"
    )


class WarmUp:
    """Iterations measured before there was a latency model."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._ms: list[float] = []
        self._prefills = 0

    def add(self, batch: Batch, ms: float) -> None:
        """Keep an iteration's batch and its time."""
        self._batches.append(batch)
        self._ms.append(ms)
        self._prefills += batch.prefills > 0

    @property
    def samples(self) -> Samples:
        """The iterations so far."""
        return Samples.of(self._batches, self._ms)

    def fitted(self) -> CorrectedModel | None:
        """The model fitted to the iterations, with residuals from cross-validation; None while they are too few.

        Iterations of any request count until there are enough.
        """
        if len(self._ms) < LEAST_SAMPLES or self._prefills < LEAST_PREFILLS:
            return None
        samples = self.samples
        predicted = cross_predictions(ConServeModel, samples)
        residuals = map(Residual, predicted.tolist(), (samples.ms / predicted).tolist())
        return CorrectedModel(fit(ConServeModel, samples), residuals)


class WarmUpGroup(NamedTuple):
    """Requests served together: the number of tokens in each prompt and in each answer."""

    prompts: tuple[int, ...]
    answers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompts)

    @property
    def iterations(self) -> int:
        """Fewest iterations that serve the group."""
        return max(self.answers)


class Growth:
    """Random groups of requests: small ones first, later ones sized by the time that earlier ones took."""

    def __init__(self, *, seconds: float, longest: int, most: int, engines: int = 1) -> None:
        """`longest`: tokens of a prompt; `most`: requests at once; `engines`: how many share the requests."""
        self._dice = random.Random(0)
        self._seconds, self._longest, self._most, self._engines = seconds, longest, most, engines
        self._served: list[tuple[WarmUpGroup, float]] = []

    @property
    def missing(self) -> int:
        """Groups still needed until every engine has seen enough for a model, if they are like the last ones."""
        if not self._served:
            return LEAST_PREFILLS * self._engines
        iterations = sum(group.iterations for group, _ in self._served)
        each = iterations / len(self._served)
        by_iterations = (LEAST_SAMPLES * self._engines - iterations) / each
        return max(0, LEAST_PREFILLS * self._engines - len(self._served), math.ceil(by_iterations))

    @property
    def left_s(self) -> float:
        """Seconds that the missing groups will take, by the later half of the served ones, which are larger."""
        later = [seconds for _, seconds in self._served[len(self._served) // 2 :]]
        return self.missing * sum(later) / max(1, len(later))

    def served(self, group: WarmUpGroup, seconds: float) -> None:
        """Note the time that a group took."""
        self._served.append((group, seconds))

    def next(self) -> WarmUpGroup:
        """A group of random size, up to the affordable one."""
        tokens, answer = self._affordable()
        dice, low = self._dice, min(ANSWER[0], answer)
        together = min(
            self._most, int(math.exp(dice.uniform(0, math.log(MOST_TOGETHER)))), max(1, tokens // 8)
        )
        longest = max(9.0, tokens / together)
        prompts = [int(math.exp(dice.uniform(math.log(8), math.log(longest)))) for _ in range(together)]
        if together == 1 and self._largest < tokens:
            prompts = [tokens]
        return WarmUpGroup(tuple(prompts), tuple(dice.randint(low, answer) for _ in prompts))

    @property
    def _largest(self) -> int:
        return max((group.tokens for group, _ in self._served), default=0)

    def _affordable(self) -> tuple[int, int]:
        """Most tokens of a group's prompts and of an answer; each may take half of a group's share of the time."""
        if not self._served:
            return min(FIRST_TOKENS, self._longest), 2
        took = np.array([seconds for _, seconds in self._served])
        work = np.array([(group.iterations, group.tokens) for group, _ in self._served], dtype=np.float64)
        step_s, token_s = non_negative(work / took[:, None], np.ones(len(took)))
        half_s = self._seconds * GROUP_SHARE / 2
        by_time = half_s / token_s if token_s > 0 else math.inf
        tokens = min(self._longest, GROWTH * self._largest, max(FLOOR_TOKENS, by_time))
        answer = half_s / step_s if step_s > 0 else math.inf
        return int(tokens), int(max(2, min(ANSWER[1], answer)))


async def grow(
    growth: Growth,
    serve: Callable[[WarmUpGroup], Awaitable[None]],
    *,
    seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    together: int = 1,
) -> None:
    """Serve groups for `seconds`, and longer, after telling the user, until there are enough for a model.

    So many groups are served `together`.
    """
    begun, said = clock(), False

    async def one_by_one() -> None:
        nonlocal said
        while (now := clock()) - begun < seconds or growth.missing:
            if now - begun >= seconds and not said:
                said = True
                say(
                    f"this engine is slow: {seconds:.0f} s are too little to learn how long iterations take; "
                    f"about {max(1.0, growth.left_s):.0f} s more (conserve profile measures it once for all starts)"
                )
            group = growth.next()
            await serve(group)
            growth.served(group, clock() - now)

    await asyncio.gather(*(one_by_one() for _ in range(together)))


async def warm_up(
    llm: AsyncLLM,
    *,
    say: Callable[[str], None],
    seconds: float,
    known: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """Serve random requests, a few at a time, of all sizes that the engine is fast enough for.

    `known` tells if the scheduler has a model; without one the warm-up goes on, for `MOST_MORE` groups at most.
    """
    dice, config = random.Random(0), llm.vllm_config
    engines = config.parallel_config.data_parallel_size
    growth = Growth(
        seconds=seconds,
        longest=min(LONGEST_PROMPT, llm.model_config.max_model_len - 64),
        most=config.scheduler_config.max_num_seqs,
        engines=engines,
    )
    # Where iterations are scheduled ahead, the first one after a pause takes longer and teaches nothing.
    together = 2 * engines if config.scheduler_config.async_scheduling else 1
    number = 0

    async def serve(group: WarmUpGroup) -> None:
        nonlocal number
        names = [f"{PREFIX}{number + place}" for place in range(len(group.prompts))]
        number += len(names)
        await asyncio.gather(
            *(
                _request(llm, name, length, answer, dice)
                for name, length, answer in zip(names, *group, strict=True)
            )
        )

    await grow(growth, serve, seconds=seconds, say=say, together=together)
    if known is not None:
        await insist(growth, serve, known, together=together)


async def insist(
    growth: Growth,
    serve: Callable[[WarmUpGroup], Awaitable[None]],
    known: Callable[[], Awaitable[bool]],
    *,
    together: int = 1,
) -> None:
    """Serve more groups while the scheduler still has no model: it counts iterations, not groups.

    A speculating engine takes fewer iterations than an answer has tokens. An engine that learns nothing from
    `MOST_MORE` groups will not learn from another.
    """
    for _ in range(MOST_MORE):
        if await known():
            return
        await asyncio.gather(*(serve(growth.next()) for _ in range(together)))


async def _request(llm: AsyncLLM, name: str, length: int, max_tokens: int, dice: random.Random) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    vocabulary = llm.model_config.get_vocab_size()
    tokens = [dice.randrange(vocabulary) for _ in range(length)]
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for _ in llm.generate({"prompt_token_ids": tokens}, params, name):
        pass
