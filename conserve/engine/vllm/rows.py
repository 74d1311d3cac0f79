"""Rows that leave a forward pass in the middle of it, while the others go on (eager mode).

Before a layer, everything that has one entry a token is cut down to the tokens that stay: the hidden states that
go from layer to layer, the positions that every layer gets anew, and the attention metadata that the layers share.
After the last layer the hidden states get their full size back, so that vLLM's sampler finds its rows where they
were; what it samples for those that left is thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from conserve.engine.vllm.stamp import Stamp


class LeavingRows:
    """Implements `safepoints.Rows` on vLLM's model runner (V1)."""

    def __init__(self, runner: Any, layers: int) -> None:
        self.left = 0
        self.names: frozenset[str] = frozenset()  # of those that left
        self._runner = runner
        self._last = layers - 1
        self._stamp: Stamp | None = None
        self._tokens = 0  # of the whole batch
        self._kept: torch.Tensor | None = None  # indices of the tokens that stay, (kept tokens,)
        self._cuts: dict[int, torch.Tensor] = {}  # number of tokens in a tensor -> which of them stay
        self._metadata: dict[int, Any] = {}  # by id() of the attention group: what its metadata was made from
        for group in groups_of(runner):
            self._remember(group)

    def begin(self, stamp: Stamp, tokens: int) -> None:
        """An iteration with so many tokens begins, with everybody in it."""
        self.left, self.names, self._kept = 0, frozenset(), None
        self._stamp, self._tokens = stamp, tokens

    def leave(self, rows: int) -> bool:
        """Cut the batch down; False if nobody would be left."""
        assert self._stamp is not None
        runner = self._runner
        names = frozenset(self._stamp.rows[:rows])
        requests: list[str] = runner.input_batch.req_ids
        kept = [index for index, name in enumerate(requests) if name not in names]
        if not kept:
            return False
        starts = runner.query_start_loc.np
        tokens = torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i + 1]) for i in kept]))
        self._rebuild_metadata(torch.tensor(kept), tokens)
        before, self._kept = self._kept, tokens.to(runner.device)
        self._cuts = {self._tokens: self._kept}
        if before is not None:  # others have left before these
            self._cuts[len(before)] = torch.searchsorted(before, self._kept)
        for index, name in enumerate(requests):
            if name in names:
                runner.discard_request_mask.np[index] = True
        self.left, self.names = rows, names
        return True

    def on_those_left(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        """The layer's forward on the tokens that stay."""

        def cut(*args: Any, **kw: Any) -> Any:
            if self._kept is None:
                return forward(*args, **kw)
            out = forward(*map(self._cut, args), **{name: self._cut(value) for name, value in kw.items()})
            if index != self._last:
                return out
            return tuple(map(self._whole, out)) if isinstance(out, tuple) else self._whole(out)

        return cut

    @contextlib.contextmanager
    def discarded(self) -> Iterator[None]:
        """While vLLM samples: those that left must draw no random number and complete no prompt's logprobs."""
        runner = self._runner
        batch = runner.input_batch
        logprobs, generators = {}, {}
        for name in self.names:
            if name in runner.num_prompt_logprobs:
                logprobs[name] = runner.num_prompt_logprobs.pop(name)
            index = batch.req_id_to_index.get(name)
            if index in batch.generators:
                generators[index] = batch.generators.pop(index)
        try:
            yield
        finally:
            runner.num_prompt_logprobs.update(logprobs)
            batch.generators.update(generators)

    def _remember(self, group: Any) -> None:
        build = group.build_metadata

        def remembering(common: Any, *args: Any, **kw: Any) -> Any:
            if self._stamp is not None:
                self._metadata[id(group)] = common
            return build(common, *args, **kw)

        group.build_metadata = remembering
        group.conserve_build = build

    def _rebuild_metadata(self, requests: torch.Tensor, tokens: torch.Tensor) -> None:
        context = get_forward_context()
        metadata, slots = dict(context.attn_metadata), dict(context.slot_mapping)
        for group in groups_of(self._runner):
            common = of_requests(self._metadata[id(group)], requests, tokens)
            built = group.conserve_build(common)
            for name in group.layer_names:
                metadata[name], slots[name] = built, common.slot_mapping
        context.attn_metadata, context.slot_mapping = metadata, slots

    def _cut(self, value: Any) -> Any:
        """A tensor with an entry for each token, cut down to those that stay; anything else as it is."""
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if value.is_floating_point():
            stay = self._cuts.get(value.shape[0])
            return value if stay is None else value[stay]
        stay = self._cuts.get(value.shape[-1])  # positions
        return value if stay is None else value[..., stay]

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        assert self._kept is not None
        whole = value.new_zeros((self._tokens, *value.shape[1:]))
        whole[self._kept] = value
        return whole


def groups_of(runner: Any) -> Iterator[Any]:
    """The layers that share attention metadata."""
    for groups in runner.attn_groups:
        yield from groups


def of_requests(common: Any, requests: torch.Tensor, tokens: torch.Tensor) -> Any:
    """vLLM's `CommonAttentionMetadata` of some of its requests, in their order.

    `requests` (kept requests,) and `tokens` (kept tokens,) are indices into the whole batch, on the CPU.
    """
    device = common.query_start_loc.device
    on_device = requests.to(device)
    lengths = common.query_start_loc_cpu.diff()[requests]
    starts = torch.zeros(len(requests) + 1, dtype=common.query_start_loc_cpu.dtype)
    torch.cumsum(lengths, 0, out=starts[1:])

    def of(value: Any) -> Any:
        return value[requests.to(value.device)] if isinstance(value, torch.Tensor) else value

    lengths_of = common.seq_lens_cpu_upper_bound
    bound = of(lengths_of)
    return common.replace(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[on_device],
        num_reqs=len(requests),
        num_actual_tokens=len(tokens),
        max_query_len=int(lengths.max()),
        max_seq_len=int(bound.max()) if bound is not None else common.max_seq_len,
        block_table_tensor=common.block_table_tensor[on_device],
        slot_mapping=common.slot_mapping[tokens.to(common.slot_mapping.device)],
        causal=of(common.causal),
        is_prefilling=of(common.is_prefilling),
        seq_lens_cpu_upper_bound=bound,
        positions=common.positions[..., tokens.to(common.positions.device)]
        if common.positions is not None
        else None,
        req_idx=common.req_idx[requests.numpy()] if common.req_idx is not None else None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
