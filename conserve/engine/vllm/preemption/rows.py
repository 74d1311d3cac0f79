"""Rows that leave a forward pass between two layers, and join a later one where they left.

A layer takes hidden states of some tokens and returns them for the next layer, so the tokens in the pass may change
from layer to layer. Everything with one entry a token is cut down when rows leave and filled up when rows join, and
the attention metadata that the layers share is built anew for the rows in the pass. A row that leaves keeps its
input to the next layer; the keys and values of the layers before are in its KV blocks. After the last layer the
hidden states get their full size back, so that vLLM's sampler finds each row in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from conserve.engine.runtime.leavers import behind, with_first
from conserve.engine.runtime.safepoint import ALL_ROWS
from conserve.engine.vllm.compat.metadata import watch_metadata
from conserve.engine.vllm.iteration import forgotten
from conserve.engine.vllm.preemption.runner import Runner
from conserve.engine.vllm.preemption.safepoints import Abandoned, Safepoints

log = logging.getLogger("vllm.conserve")
Key = int | str  # place or name of a layer's argument


@dataclass(frozen=True, slots=True)
class Suspended:
    """A row's inputs to the layer that it joins at."""

    layer: int  # the next that the row runs
    start: int  # tokens of the request before the chunk
    tokens: int  # in the chunk
    inputs: Mapping[Key, torch.Tensor]  # (tokens, ...) each: hidden states, residual

    def first(self, tokens: int) -> Mapping[Key, torch.Tensor]:
        """Inputs of the chunk's first tokens."""
        if tokens == self.tokens:
            return self.inputs
        return {key: value[:tokens] for key, value in self.inputs.items()}

    def after(self, tokens: int) -> Self:
        """Inputs of the chunk without its first tokens."""
        rest = {key: value[tokens:] for key, value in self.inputs.items()}
        return replace(self, start=self.start + tokens, tokens=self.tokens - tokens, inputs=rest)


class RunnerRows:
    """Rows of vLLM's model runner while the decoder layers run."""

    def __init__(self, runner: Runner, safepoints: Safepoints) -> None:
        self.left: frozenset[str] = frozenset()  # rows that left this iteration
        self.joined = 0  # rows that joined at a layer behind the first
        self.busy = False  # rows may leave or join the pass
        self.possible = True  # the layers' inputs can be cut down
        self._runner = runner
        self._safepoints = safepoints
        self._suspended: dict[str, tuple[Suspended, ...]] = {}  # parts of a row, the first tokens first
        self._joining: dict[int, list[str]] = {}  # layer -> rows that join at it
        self._absent: set[str] = set()  # rows that have left, or are yet to join
        # Indices of tokens in the pass, (tokens in,), ascending; None: all.
        self._in: torch.Tensor | None = None
        self._total = 0  # tokens of the iteration
        # Which of a layer's outputs are tensors; () for one alone.
        self._returns: tuple[bool, ...] | None = None
        # By id() of the attention group: what its metadata is made from, and the function that builds it.
        self._metadata: dict[int, Any] = {}
        self._build: dict[int, Callable[..., Any]] = {}
        for group in runner.groups:
            self._remember(group)

    def begin(self, output: Any, *, watched: bool) -> None:
        """Begin an iteration; rows that finished or were evicted will not join one any more."""
        if self._suspended:
            for name in forgotten(output):
                self._suspended.pop(name, None)
        self.left, self.joined = frozenset(), 0
        self._joining, self._absent, self._in = {}, set(), None
        self._total = output.total_num_scheduled_tokens
        watched = watched and self.possible
        self.busy = watched or not self._suspended.keys().isdisjoint(output.num_scheduled_tokens)

    @property
    def suspended(self) -> dict[str, int]:
        """Rows that can join a later iteration, and the layers at which they do."""
        return {name: parts[0].layer for name, parts in self._suspended.items()}

    def end(self, scheduled: Mapping[str, int]) -> None:
        """End the pass; a row that ran part of its chunk keeps the remaining tokens."""
        self.busy = False
        for name in self._suspended.keys() & scheduled.keys() - self.left:
            if rest := behind(self._suspended.pop(name), scheduled[name]):
                self._suspended[name] = rest

    def run(
        self, index: int, last: bool, forward: Callable[..., Any], args: Sequence[Any], kw: dict[str, Any]
    ) -> Any:
        """Run one decoder layer on the rows that are in the pass by then; rows leave and join before it.

        `args` and `kw` are the layer's inputs, tensors (tokens, hidden) and indices (..., tokens) among them, of
        the whole iteration or of the tokens in the pass. Returns what `forward` returns for the tokens in the pass;
        the last layer's outputs are filled up to all tokens of the iteration. Raises `Abandoned` if no row stays.
        """
        if self._returns is None and not self._suits([*args, *kw.values()]):
            self.possible = self.busy = False
            log.info("rows cannot leave after all: the layers get tensors inside of others")
            self._safepoints.abandon_if_asked(index)
            return forward(*args, **kw)
        rows = self._safepoints.check(index)
        if self._in is None and not rows and not (index == 0 and self._suspended):
            return self._learning(forward(*args, **kw))  # all rows are in, and stay
        inputs: dict[Key, Any] = dict(enumerate(args))
        inputs.update(kw)
        self._cut_whole(inputs, is_hidden)  # what the model passes to each layer
        self._exchange(rows, index, inputs)
        if self._in is not None and not len(self._in):  # all rows of the pass join later
            passing = next(value for value in inputs.values() if is_hidden(value))
            return tuple(passing if kept else None for kept in self._returns) if self._returns else passing
        self._cut_whole(inputs, is_index)  # positions
        out = forward(*(inputs[place] for place in range(len(args))), **{name: inputs[name] for name in kw})
        self._learning(out)
        if not last or self._in is None:
            return out
        return tuple(map(self._whole, out)) if isinstance(out, tuple) else self._whole(out)

    def _exchange(self, rows: int, index: int, inputs: dict[Key, Any]) -> None:
        """Let rows join at this place, and the stamp's first `rows` leave; `inputs` are cut down and filled up."""
        if index == 0:
            self._settle_joining(inputs)
        if index in self._joining:
            self._join(self._joining.pop(index), inputs)
        if rows:
            self._leave(rows, index, inputs)

    def _suits(self, inputs: Sequence[Any]) -> bool:
        """True if a layer's inputs can be cut down: no tensor is inside of a list, tuple or dict."""
        return not any(isinstance(value, list | tuple | dict) for value in inputs)

    def _learning(self, out: Any) -> Any:
        self._returns = tuple(map(is_hidden, out)) if isinstance(out, tuple) else ()
        return out

    def _cut_whole(self, inputs: dict[Key, Any], of_kind: Callable[[Any], bool]) -> None:
        """Cut inputs with an entry for every token of the iteration down to the tokens in the pass."""
        if self._in is None or len(self._in) == self._total:
            return
        for key, value in inputs.items():
            if of_kind(value):
                if is_index(value) and value.shape[-1] == self._total:
                    inputs[key] = value[..., self._in]
                elif is_hidden(value) and value.shape[0] == self._total:
                    inputs[key] = value[self._in]

    # Rows in the pass.

    def _settle_joining(self, inputs: dict[Key, Any]) -> None:
        """Before the first layer, find the rows of the batch that join at a later one."""
        batch = self._runner.batch
        for place, name in enumerate(batch.names):
            if name not in self._suspended:
                continue
            one, tokens = self._suspended[name][0], len(batch.tokens_of(place))
            if one.start == batch.computed[place] and tokens <= one.tokens:
                self._joining.setdefault(one.layer, []).append(name)
                self._absent.add(name)
                self.joined += 1
            else:
                del self._suspended[name]
        if self._absent:
            self._change(inputs)

    def _join(self, names: Sequence[str], inputs: dict[Key, Any]) -> None:
        before = self._in
        self._absent.difference_update(names)
        assert before is not None
        batch = self._runner.batch
        coming = sorted((batch.places[name], self._suspended[name][0]) for name in names)
        tokens = [batch.tokens_of(place) for place, _ in coming]
        self._change(
            inputs,
            coming=(
                torch.from_numpy(np.concatenate(tokens)).to(before.device),
                [one.first(len(own)) for (_, one), own in zip(coming, tokens, strict=True)],
            ),
        )

    def _leave(self, rows: int, index: int, inputs: dict[Key, Any]) -> None:
        """Take the stamp's first rows out and keep their inputs; raises `Abandoned` if no row stays."""
        stamp = self._safepoints.stamp
        assert stamp is not None
        batch = self._runner.batch
        leaving = set(batch.names)
        if rows != ALL_ROWS:
            leaving &= set(stamp.rows[:rows])
        leaving -= self.left
        if not leaving:
            return
        if index:
            self._keep(leaving - self._absent, index, inputs)
        self.left |= leaving
        self._absent |= leaving
        for names in self._joining.values():
            names[:] = [name for name in names if name not in leaving]
        self._joining = {layer: names for layer, names in self._joining.items() if names}
        if len(self.left) == len(batch.names):
            raise Abandoned
        self._change(inputs)

    def _keep(self, leaving: Collection[str], layer: int, inputs: Mapping[Key, Any]) -> None:
        """Copy the leaving rows' inputs to this layer: all decode steps at once, each prompt on its own.

        There may be hundreds of decode steps, and an arrival waits meanwhile. A copy takes memory until the last of
        its rows has joined: one token of each decode step, and so not those of prompts.
        """
        batch = self._runner.batch
        tokens = {name: batch.tokens_of(batch.places[name]) for name in leaving}
        steps = [name for name, own in tokens.items() if len(own) == 1]
        prompts = [[name] for name, own in tokens.items() if len(own) > 1]
        per_token = {key: value for key, value in inputs.items() if self._is_per_token(value)}
        for names in filter(None, [steps, *prompts]):
            own = torch.from_numpy(np.concatenate([tokens[name] for name in names])).to(self._runner.device)
            places = own if self._in is None else torch.searchsorted(self._in, own)
            each = len(own) // len(names)
            copies = {key: value[places].split(each) for key, value in per_token.items()}
            for number, name in enumerate(names):
                start = int(batch.computed[batch.places[name]])
                part = Suspended(layer, start, each, {key: copy[number] for key, copy in copies.items()})
                self._suspended[name] = with_first(part, self._suspended.get(name, ()))

    def _change(
        self,
        inputs: dict[Key, Any],
        coming: tuple[torch.Tensor, list[Mapping[Key, torch.Tensor]]] | None = None,
    ) -> None:
        """Rows have left or joined: change the layer's inputs, and the metadata that all layers share."""
        batch = self._runner.batch
        requests = [place for place, name in enumerate(batch.names) if name not in self._absent]
        device = self._runner.device
        tokens = (
            np.concatenate([batch.tokens_of(place) for place in requests])
            if requests
            else np.empty(0, np.int64)
        )
        on_host = torch.from_numpy(tokens)
        now = on_host.to(device)
        before = self._in
        if coming is None:
            stay = now if before is None else torch.searchsorted(before, now)
            for key, value in inputs.items():
                if self._is_per_token(value):
                    inputs[key] = value[stay]
        else:
            assert before is not None
            own, saved = coming
            for key in saved[0]:
                first = saved[0][key]
                merged = first.new_empty((len(now), *first.shape[1:]))
                if len(before):
                    merged[torch.searchsorted(now, before)] = inputs[key]
                merged[torch.searchsorted(now, own)] = torch.cat([one[key] for one in saved])
                inputs[key] = merged
        self._in = now
        if requests:
            self._safepoints.finish_launched()
            self._share(torch.tensor(requests), on_host)

    def _is_per_token(self, value: Any) -> bool:
        entries = self._total if self._in is None else len(self._in)
        return is_hidden(value) and value.shape[0] == entries

    def _whole(self, value: Any) -> Any:
        if not is_hidden(value):
            return value
        whole = value.new_zeros((self._total, *value.shape[1:]))
        whole[self._in] = value
        return whole

    # The attention metadata.

    def _remember(self, group: Any) -> None:
        def remember(common: Any) -> None:
            if self.busy:
                self._metadata[id(group)] = common

        self._build[id(group)] = watch_metadata(group, remember)

    def _share(self, requests: torch.Tensor, tokens: torch.Tensor) -> None:
        context = get_forward_context()
        metadata, slots = dict(context.attn_metadata), dict(context.slot_mapping)
        for group in self._runner.groups:
            common = of_requests(self._metadata[id(group)], requests, tokens)
            built = self._build[id(group)](common)
            for name in group.layer_names:
                metadata[name], slots[name] = built, common.slot_mapping
        context.attn_metadata, context.slot_mapping = metadata, slots


def is_hidden(value: Any) -> bool:
    """True for a tensor of floating-point numbers, as hidden states are."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.is_floating_point()


def is_index(value: Any) -> bool:
    """True for a tensor of integers, as positions are."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.is_floating_point()


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
