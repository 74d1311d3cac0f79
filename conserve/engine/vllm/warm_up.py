"""A latency model from a warm-up: random requests that the engine serves before anybody else's.

It is rougher than a profile (contexts only as long as the prompts, seconds instead of minutes), and its
margin says so: few residuals make `quantile_margin` step beyond the largest of them.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import TYPE_CHECKING

from conserve.profiles.batch import Batch
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel, Residual
from conserve.profiles.fit import Samples, fit

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

PREFIX = "conserve-warm-up-"
WARM_UP_S = 12.0
LONGEST_PROMPT = 3000
LEAST_SAMPLES = 4 * len(ConServeModel.terms)


def is_warm_up(request_id: str) -> bool:
    """Whether this request is one of the warm-up's."""
    return PREFIX in request_id


class WarmUp:
    """Iterations seen before there was a model."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._ms: list[float] = []

    def add(self, batch: Batch, ms: float) -> None:
        """Keep an iteration."""
        self._batches.append(batch)
        self._ms.append(ms)

    def fitted(self) -> CorrectedModel | None:
        """The model that fits them, with their residuals; None while they are too few."""
        if len(self._ms) < LEAST_SAMPLES:
            return None
        samples = Samples.of(self._batches, self._ms)
        model = fit(ConServeModel, samples)
        predicted = samples.predictions(model)
        return CorrectedModel(model, map(Residual, predicted.tolist(), (samples.ms / predicted).tolist()))


async def warm_up(llm: AsyncLLM, *, seconds: float = WARM_UP_S) -> None:
    """Have the engine serve random requests, a few at a time, of all sizes."""
    dice = random.Random(0)
    longest = min(LONGEST_PROMPT, llm.model_config.max_model_len - 64)
    most = llm.vllm_config.scheduler_config.max_num_seqs
    ends_at = time.monotonic() + seconds
    number = 0
    while time.monotonic() < ends_at:
        together = min(most, int(math.exp(dice.uniform(0, math.log(32)))))
        requests = []
        for _ in range(together):
            number += 1
            length = int(math.exp(dice.uniform(math.log(8), math.log(max(9, longest / together)))))
            requests.append(_request(llm, f"{PREFIX}{number}", length, dice.randint(4, 12), dice))
        await asyncio.gather(*requests)


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
