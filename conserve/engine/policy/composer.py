"""A batch in the making: what fits into it by time, tokens, slots and KV blocks.

Exact and incremental, since this runs before every iteration: adding a request is O(1), and decode steps,
which all take about the same time, are added many at a time.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import Candidate, View
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel


class Composer:
    """Adds requests to the next batch, and takes back what others hold."""

    def __init__(self, view: View) -> None:
        self._model = view.model
        self._block_tokens = view.block_tokens
        self.batch = Batch()
        self.tokens: dict[str, int] = {}
        self._computing: set[Hashable] = set()  # KV blocks that prompts of the batch compute, also in part
        self.admitted: list[str] = []
        self.restored: list[str] = []
        self.preempted: list[str] = []
        self.surcharge_ms = 0.0
        self.limit_ms: float | None = None  # on the iteration, from `begin_offline` on
        self._online_requests: int | None = None  # in the batch when the first offline one could join
        self.tokens_left = view.max_tokens
        self.free_slots = view.free_slots
        self.reserved_slots = view.reserved_slots
        self._reserved_blocks = view.reserved_blocks
        self._revocable_blocks = revocable_blocks(view)
        self.free_blocks = view.free_blocks
        self.watermark_blocks = view.watermark_blocks
        self.unwritten_blocks = view.unwritten_blocks
        self._held = list(view.held)
        self._coming = set(view.coming)

    def plan(self) -> Plan:
        """The plan so far."""
        return Plan(
            tokens=self.tokens,
            batch=self.batch,
            admitted=self.admitted,
            restored=self.restored,
            preempted=self.preempted,
            predicted_ms=self.predicted_ms if self.tokens else 0.0,
            limit_ms=None if self._online_requests == self.batch.requests else self.limit_ms,
        )

    @property
    def reserved_blocks(self) -> int:
        """Of the free blocks, those kept for online requests to come: what can be taken back for nothing counts."""
        return max(0, self._reserved_blocks - max(0, self._revocable_blocks))

    @property
    def predicted_ms(self) -> float:
        """How long the batch takes."""
        return self._model.predict(self.batch) + self.surcharge_ms

    def begin_offline(self, limit_ms: float) -> None:
        """From here on requests are added only if the whole iteration stays within the time."""
        self.limit_ms, self._online_requests = limit_ms, self.batch.requests

    def alone_ms(self, candidate: Candidate) -> float:
        """How long an iteration takes that computes all of the request and nothing else."""
        whole = Batch.of([Slice(candidate.tokens, candidate.context, candidate.decode)])
        return self._model.predict(whole) + candidate.tokens * candidate.surcharge_ms

    def longer_ms(self, candidate: Candidate, tokens: int) -> float:
        """How much longer the batch takes with so many of the request's tokens."""
        batch = replace(self.batch)
        batch.add(tokens, candidate.context, candidate.decode)
        return self._model.predict(batch) - self._model.predict(self.batch) + tokens * candidate.surcharge_ms

    def fitting(self, candidate: Candidate, limit_ms: float) -> int:
        """How many of the request's tokens fit into the time and the iteration."""
        most = min(candidate.tokens, self.tokens_left)
        if most < 1:
            return 0
        if limit_ms == inf:
            return most
        limit_ms -= self.surcharge_ms
        if candidate.surcharge_ms:
            return self._fitting_with_surcharge(candidate, most, limit_ms)
        return self._model.can_schedule(
            self.batch, Slice(most, candidate.context, candidate.decode), limit_ms
        )

    def _fitting_with_surcharge(self, candidate: Candidate, most: int, limit_ms: float) -> int:
        def exceeds(tokens: int) -> bool:
            left_ms = limit_ms - tokens * candidate.surcharge_ms
            return self._model.can_schedule(self.batch, Slice(tokens, candidate.context), left_ms) < tokens

        return _most(most, exceeds)

    def blocks_for(self, candidate: Candidate, tokens: int) -> int:
        """KV blocks that the request needs beyond those it has."""
        wanted = -(-(candidate.context + tokens) // self._block_tokens)
        return max(0, wanted - candidate.blocks)

    def computes_next_of(self, candidate: Candidate) -> bool:
        """Whether the batch computes the KV block that the request would begin with."""
        size = self._block_tokens
        block = candidate.context // size
        usable = (block + 1) * size < candidate.context + candidate.tokens  # one token is always computed
        return usable and block < len(candidate.prefix) and candidate.prefix[block] in self._computing

    def add(self, candidate: Candidate, tokens: int) -> None:
        """Let the request compute this many tokens."""
        first, end = candidate.context // self._block_tokens, candidate.context + tokens
        self._computing.update(candidate.prefix[first : -(-end // self._block_tokens)])
        self.batch.add(tokens, candidate.context, candidate.decode)
        self.tokens[candidate.name] = tokens
        self.tokens_left -= tokens
        self.free_blocks -= self.blocks_for(candidate, tokens)
        self.surcharge_ms += tokens * candidate.surcharge_ms

    def admit(self, candidate: Candidate, tokens: int) -> None:
        """Add a request that was waiting; it is given room for its whole prompt."""
        self.free_blocks -= self.blocks_for(candidate, candidate.tokens) - self.blocks_for(candidate, tokens)
        self.add(candidate, tokens)
        self.free_slots -= 1
        self.admitted.append(candidate.name)

    def restore(self, candidate: Candidate) -> None:
        """Give a request blocks for its KV to come back into while others compute.

        vLLM looks at nobody any more once an iteration is full, so one token of it stays free.
        """
        if not self.restored:
            self.tokens_left -= 1
        size = self._block_tokens
        last = (candidate.context + candidate.tokens) // size
        self._coming.update(candidate.prefix[candidate.context // size : last])
        self.free_blocks -= self.blocks_for(candidate, candidate.tokens)
        self.free_slots -= 1
        self.restored.append(candidate.name)

    def comes_for_others(self, candidate: Candidate) -> bool:
        """Whether the block that the request would begin with is on its way back for another."""
        block = candidate.context // self._block_tokens
        return block < len(candidate.prefix) and candidate.prefix[block] in self._coming

    def has_its_own(self, candidate: Candidate) -> bool:
        """Whether the request, which waits, has got its KV back."""
        return any(held.name == candidate.name for held in self._held)

    def take_back(self, blocks: int) -> None:
        """Take KV from requests that got it back and still wait, until so many blocks are free or all is taken."""
        while self._held and self.free_blocks < blocks:
            self._lose(self._held.pop())

    def make_room(self, victims: list[Candidate], blocks: int, slots: int = 0) -> bool:
        """Preempt victims, the last first, until so many blocks and slots are free; none if it cannot."""
        missing = blocks - self.free_blocks
        if missing > 0 and sum(victim.blocks for victim in (*self._held, *victims)) < missing:
            return False
        if self.free_slots + len(victims) < slots:
            return False
        self.take_back(blocks)
        while self.free_blocks < blocks or self.free_slots < slots:
            self.preempt(victims.pop())
        return True

    def preempt(self, victim: Candidate) -> None:
        """Take back what a running request has; it starts again from its tokens later."""
        self._lose(victim)
        self.free_slots += 1

    def _lose(self, victim: Candidate) -> None:
        self.preempted.append(victim.name)
        self.free_blocks += victim.blocks
        self._revocable_blocks -= victim.blocks if victim.saved else 0

    def add_decodes(self, candidates: Sequence[Candidate], limit_ms: float) -> int:
        """Add as many decode steps, in order, as there are time, tokens and blocks for; returns how many."""
        most = self.fitting_decodes(candidates[: self._with_blocks(candidates)], limit_ms)
        self.add_all(candidates[:most])
        return most

    def add_all(self, decodes: Sequence[Candidate]) -> None:
        """Add all of these decode steps: `add` for many at once."""
        _extend(self.batch, decodes)
        self.tokens.update((candidate.name, candidate.tokens) for candidate in decodes)
        self.tokens_left -= sum(candidate.tokens for candidate in decodes)
        self.free_blocks -= self.growth(decodes)

    def fitting_decodes(self, candidates: Sequence[Candidate], limit_ms: float) -> int:
        """How many of the decode steps, in order, there are time and tokens for."""
        most = _within(self.tokens_left, (candidate.tokens for candidate in candidates))
        if most and not self._fit(candidates[:most], limit_ms):
            most = _most(most, lambda count: not self._fit(candidates[:count], limit_ms))
        return most

    def _with_blocks(self, candidates: Sequence[Candidate]) -> int:
        """How many of the decode steps, in order, there are blocks for."""
        if self.growth(candidates) <= self.free_blocks:
            return len(candidates)
        return _within(self.free_blocks, (self.blocks_for(request, request.tokens) for request in candidates))

    def growth(self, candidates: Sequence[Candidate]) -> int:
        """New blocks that decode steps take together; most of them take none."""
        size = self._block_tokens
        return sum(
            self.blocks_for(candidate, candidate.tokens)
            for candidate in candidates
            if candidate.context + candidate.tokens > candidate.blocks * size
        )

    def _fit(self, candidates: Sequence[Candidate], limit_ms: float) -> bool:
        """Whether the batch with all of these decode steps stays within the time."""
        if limit_ms == inf:
            return True
        batch = replace(self.batch)
        _extend(batch, candidates[:-1])
        last = candidates[-1]
        wanted = Slice(last.tokens, last.context, last.decode)
        return self._model.can_schedule(batch, wanted, limit_ms - self.surcharge_ms) == last.tokens


def revocable_blocks(view: View) -> int:
    """KV blocks that can be taken from offline rows for nothing, since host memory has what is in them.

    Rows that begin alike share blocks, and one that others have too is not freed: no more than the blocks in use
    beside those of everybody else.
    """
    if not view.reserved_blocks:
        return 0
    saved = sum(row.blocks for row in (*view.offline, *view.held) if row.saved)
    others = sum(row.blocks for row in (*view.online, *view.offline) if not row.saved)
    return saved if view.used_blocks is None else min(saved, max(0, view.used_blocks - others))


def smallest_ms(model: LatencyModel) -> float:
    """How long the smallest iteration takes: mostly the constant part that all of them have.

    A fit may have no constant at all, or a large one for iterations with prompts in them.
    """
    return max(model.predict(Batch.of([Slice(1, 0, decode)])) for decode in (True, False))


def _most(largest: int, exceeds: Callable[[int], bool]) -> int:
    """Largest number up to `largest` that fits; the predicate must be monotone, so it is bisected."""
    return bisect_left(range(1, largest + 1), True, key=exceeds)


def _within(room: int, wanted: Iterable[int]) -> int:
    """How many of the wishes there is room for, one after the other."""
    count = 0
    for count, total in enumerate(accumulate(wanted), 1):
        if total > room:
            return count - 1
    return count


def _extend(batch: Batch, candidates: Sequence[Candidate]) -> None:
    if all(candidate.tokens == 1 for candidate in candidates):
        batch.add_decodes([candidate.context for candidate in candidates])
        return
    for candidate in candidates:  # speculative tokens
        batch.add(candidate.tokens, candidate.context, candidate.decode)
