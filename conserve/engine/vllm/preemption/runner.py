"""The interface of vLLM's model runners for rows that leave; `runner_v1` and `runner_v2` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class RunnerBatch(NamedTuple):
    """Requests of the iteration under way, in the model runner's order."""

    names: Sequence[str]
    places: Mapping[str, int]  # by name
    starts: np.ndarray[Any, Any]  # (requests + 1,) or longer: where a request's tokens begin in the iteration
    computed: np.ndarray[Any, Any]  # (requests,): tokens of a request before the iteration

    def tokens_of(self, place: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Indices of a request's tokens in the iteration, ascending."""
        return np.arange(self.starts[place], self.starts[place + 1], dtype=np.int64)


class Runner(Protocol):
    """One of vLLM's model runners, as far as rows that leave concern it."""

    @property
    def device(self) -> torch.device:
        """Device that the layers run on."""

    @property
    def groups(self) -> Sequence[Any]:
        """Groups of layers that share attention metadata (vLLM's `AttentionGroup`)."""

    @property
    def batch(self) -> RunnerBatch:
        """The batch under way; valid from the first layer to the last."""

    @property
    def most_tokens(self) -> int:
        """Most tokens that an iteration can have."""

    def run_dummy(self, tokens: int) -> None:
        """Run a pass of exactly so many tokens of no request, without attention and CUDA graphs."""

    def discarding(self, left: frozenset[str]) -> AbstractContextManager[None]:
        """Give rows that left no token while vLLM samples, and count none of their chunk as computed.

        They draw no random number, and their hidden states, which are zeros, end up in no prompt logprobs.
        """

    def transferred(self, scheduler_output: Any) -> Any:
        """The KV connector's output of the iteration that was just abandoned."""

    def refusing(self) -> AbstractContextManager[None]:
        """Meanwhile, raise `Abandoned` once vLLM has taken an iteration's requests in, before it makes a batch."""

    def transferred_alone(self, scheduler_output: Any) -> Any:
        """Make the copies of an iteration that was refused, and return the KV connector's output."""


class VllmRunner:
    """The part of the interface that both of vLLM's runners answer alike."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def groups(self) -> Sequence[Any]:
        return [group for groups in self._runner.attn_groups for group in groups]

    @property
    def most_tokens(self) -> int:
        return int(self._runner.max_num_tokens)
