"""The batch of the next iteration while it is planned: which requests fit by time, tokens, slots and KV blocks.

The token budget of Algorithm 1 (conserve-2026) is computed here: `Composer.token_budget` for a request's prompt,
`fitting_decodes` for decode steps.

The composer runs before every iteration, so its work is incremental: adding a request is O(1), and decode steps,
which all take about the same time, are added many at a time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from functools import cached_property
from itertools import dropwhile, islice
from math import inf

from conserve.engine.policy.adapters import Adapters
from conserve.engine.policy.decode_sums import Steps
from conserve.engine.policy.kv_groups import blocks_lacking
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.victims import last_begun, revocable_blocks
from conserve.engine.policy.view import Candidate, View
from conserve.profiles.batch import Batch, Slice


class Composer:
    """Adds requests to the next batch, and evicts or parks others to make room for them."""

    def __init__(self, view: View) -> None:
        self._model = view.model
        self._block_tokens = view.block_tokens
        self._kv_groups = view.kv_groups
        self.batch = Batch()
        self.tokens: dict[str, int] = {}
        self._computing = set(view.computing)  # and KV blocks that its prompts compute, wholly or in part
        self.admitted: list[str] = []
        self.restored: list[str] = []
        self.evicted: list[str] = []
        self.parked: list[str] = []
        self.pushed: dict[str, int] = {}  # of the tokens, those beyond the usual limit
        self.surcharge_ms = 0.0  # of the batch's tokens beyond the model's prediction
        self._encodes = False  # the batch has an image
        self.is_turn = False  # live requests wait for an iteration of rows alone
        self.limit_ms: float | None = None  # longest iteration allowed; set by `begin_offline`
        self._online: Batch | None = None  # the batch before the first offline request
        self._online_surcharge_ms = 0.0
        self.tokens_left = view.max_tokens  # of vLLM's own token budget (max_num_batched_tokens)
        self.free_slots = view.free_slots
        self.reserved_slots = view.reserved_slots
        self._reserved_blocks = view.set_aside_blocks - view.kept_blocks
        self.view = view
        self._revoked_blocks = 0  # of those that could be evicted at no cost
        self.free_blocks = view.free_blocks
        self.kept_blocks = view.kept_blocks  # of these, which rows leave: 0 once they are not among them
        self.watermark_blocks = view.watermark_blocks
        self.unwritten_blocks = view.unwritten_blocks
        self._adapters = Adapters(view)
        self._coming = set(view.coming)

    def plan(self) -> Plan:
        """The plan so far."""
        predicted_ms = self.predicted_ms if self.tokens else 0.0
        before_rows = self._online if self._online != self.batch else None
        return Plan(
            tokens=self.tokens,
            batch=self.batch,
            admitted=self.admitted,
            restored=self.restored,
            evicted=self.evicted,
            parked=self.parked,
            predicted_ms=predicted_ms,
            online_ms=self._online_ms(before_rows) if before_rows is not None else predicted_ms,
            limit_ms=self.limit_ms if before_rows is not None else None,
            pushed=self.pushed,
        )

    @property
    def reserved_blocks(self) -> int:
        """Free blocks kept for online requests to come, less those that can be evicted at no cost."""
        if not self._reserved_blocks:
            return 0
        return max(0, self._reserved_blocks - max(0, self._revocable_blocks - self._revoked_blocks))

    @cached_property
    def _waiting_with_blocks(self) -> list[Candidate]:
        return list(self.view.waiting_with_blocks)

    @cached_property
    def _revocable_blocks(self) -> int:
        return revocable_blocks(self.view)

    @property
    def predicted_ms(self) -> float:
        """Predicted time of the batch."""
        return self._model.predict(self.batch) + self.surcharge_ms

    def _online_ms(self, online: Batch) -> float:
        """Predicted time of the batch before the first offline request; 0 without a live request."""
        return self._model.predict(online) + self._online_surcharge_ms if online.requests else 0.0

    def begin_offline(self, limit_ms: float) -> None:
        """Hold the whole iteration within `limit_ms` for every request added from here on."""
        self.limit_ms = limit_ms
        self._online, self._online_surcharge_ms = self.batch.copy(), self.surcharge_ms

    @property
    def _live_waits(self) -> bool:
        """True if live requests wait for the end of the iteration, in it or for their turn."""
        return self.is_turn or bool(self._online and self._online.requests)

    def leave_kept(self) -> None:
        """Take no KV block from here on that live requests may find."""
        self.free_blocks = max(min(0, self.free_blocks), self.free_blocks - self.kept_blocks)
        self.kept_blocks = 0

    def push(self, before: Mapping[str, int], limit_ms: float) -> None:
        """Note the tokens since `before` as those beyond the usual limit, and `limit_ms` as theirs."""
        self.pushed = {
            name: tokens - before.get(name, 0)
            for name, tokens in self.tokens.items()
            if tokens > before.get(name, 0)
        }
        if self.pushed:
            self.limit_ms = limit_ms

    def alone_ms(self, candidate: Candidate) -> float:
        """Predicted time of an iteration that computes all tokens of the request and nothing else."""
        whole = Batch.of([Slice(candidate.tokens, candidate.context, candidate.decode)])
        return self._model.predict(whole) + candidate.beyond_ms(candidate.tokens)

    def longer_ms(self, candidate: Candidate, tokens: int) -> float:
        """Predicted time that this many tokens of the request add to the batch."""
        batch = self.batch.copy()
        batch.add(tokens, candidate.context, candidate.decode)
        return self._model.predict(batch) - self._model.predict(self.batch) + candidate.beyond_ms(tokens)

    def token_budget(self, candidate: Candidate, limit_ms: float) -> int:
        """Token budget of a request: the most of its tokens that the iteration takes within `limit_ms`.

        KV blocks are not counted. Nor are images: a live request has its image encoded at once.
        """
        most = min(candidate.tokens, self.tokens_left)
        if most < 1:
            return 0
        if limit_ms == inf:
            return most
        limit_ms -= self.surcharge_ms
        if candidate.surcharge_ms:
            return self._budget_with_surcharge(candidate, most, limit_ms)
        return self._model.can_schedule(
            self.batch, Slice(most, candidate.context, candidate.decode), limit_ms
        )

    def _budget_with_surcharge(self, candidate: Candidate, most: int, limit_ms: float) -> int:
        def exceeds(tokens: int) -> bool:
            left_ms = limit_ms - tokens * candidate.surcharge_ms
            return self._model.can_schedule(self.batch, Slice(tokens, candidate.context), left_ms) < tokens

        return _most(most, exceeds)

    def has_time(self, limit_ms: float) -> bool:
        """True if the shortest of decode steps would find time."""
        left_ms = limit_ms - self.surcharge_ms
        return limit_ms == inf or self._model.can_schedule(self.batch, Slice(1, 0, True), left_ms) > 0

    def row_budget(self, candidate: Candidate, limit_ms: float) -> int:
        """Token budget of a row, in tokens: that of a request, up to the first image that there is no time for.

        KV blocks are not counted. An image is encoded whole. Where no live request waits for the iteration, one
        image may take longer than `limit_ms`: rows would not get on with it otherwise.
        """
        tokens = self.token_budget(candidate, limit_ms)
        if not candidate.images or limit_ms == inf:
            return tokens
        spare = 0 if self._live_waits or self._encodes else 1
        reached = sum(before < tokens for before, _ in candidate.images)
        for images in range(reached, spare, -1):
            before = candidate.images[images - 1].before
            left_ms = limit_ms - sum(ms for _, ms in candidate.images[spare:images])
            if (fitting := self.token_budget(candidate, left_ms)) > before:
                return min(tokens, fitting)
            tokens = min(tokens, before)
        return tokens

    def can_encode(self, candidate: Candidate, limit_ms: float) -> bool:
        """True if each image of a row would find time in this iteration with no other row in it."""
        if self._online is None or not candidate.images or not self._live_waits or limit_ms == inf:
            return True
        left_ms = limit_ms - max(image.ms for image in candidate.images) - self._online_surcharge_ms
        return self._model.can_schedule(self._online, Slice(1, candidate.context), left_ms) > 0

    def blocks_for(self, candidate: Candidate, tokens: int) -> int:
        """KV blocks that the request needs beyond the ones it has."""
        return blocks_lacking(candidate, tokens, self._kv_groups, self._block_tokens)

    def computes_next_of(self, candidate: Candidate) -> bool:
        """True if the batch or an iteration under way computes the KV block that the request would begin with."""
        size = self._block_tokens
        block = candidate.context // size
        usable = (block + 1) * size < candidate.context + candidate.tokens  # one token is always computed
        return usable and block < len(candidate.prefix) and candidate.prefix[block] in self._computing

    def add(self, candidate: Candidate, tokens: int) -> None:
        """Add this many tokens of the request to the batch."""
        first, end = candidate.context // self._block_tokens, candidate.context + tokens
        self._computing.update(candidate.prefix[first : -(-end // self._block_tokens)])
        self.batch.add(tokens, candidate.context, candidate.decode)
        self.tokens[candidate.name] = tokens
        self.tokens_left -= tokens
        self.free_blocks -= self.blocks_for(candidate, tokens)
        self.surcharge_ms += candidate.beyond_ms(tokens)
        self._encodes = self._encodes or any(before < tokens for before, _ in candidate.images)

    def extend(self, candidate: Candidate, limit_ms: float) -> None:
        """Give a prompt of the batch as many more tokens as `limit_ms` and the free KV blocks allow."""
        had = self.tokens[candidate.name]
        self.batch.remove(had, candidate.context, candidate.decode)
        self.tokens_left += had
        self.surcharge_ms -= candidate.beyond_ms(had)
        # A request that waited has the blocks of its whole prompt.
        kept = self.blocks_for(candidate, candidate.tokens if candidate.name in self.admitted else had)
        self.free_blocks += kept
        tokens = max(had, self.row_budget(candidate, limit_ms))
        if self.blocks_for(candidate, tokens) > max(kept, self.free_blocks):
            tokens = had
        self.free_blocks -= max(0, kept - self.blocks_for(candidate, tokens))
        self.add(candidate, tokens)

    def admit(self, candidate: Candidate, tokens: int) -> None:
        """Add a waiting request, and take KV blocks for its whole prompt."""
        self.free_blocks -= self.blocks_for(candidate, candidate.tokens) - self.blocks_for(candidate, tokens)
        self.add(candidate, tokens)
        self.free_slots -= 1
        self.admitted.append(candidate.name)
        self._adapters.enter(candidate.name)

    def restore(self, candidate: Candidate) -> None:
        """Give a waiting request the blocks into which its KV is copied back while others compute.

        One token of the iteration stays free: vLLM looks at no further request once an iteration is full.
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
        """True if the block that the request would begin with is being copied back for another request."""
        block = candidate.context // self._block_tokens
        return block < len(candidate.prefix) and candidate.prefix[block] in self._coming

    def has_its_own(self, candidate: Candidate) -> bool:
        """True if this waiting request has its KV on the device."""
        return any(held.name == candidate.name for held in self._waiting_with_blocks)

    def take_back(self, blocks: int) -> None:
        """Evict waiting requests that have KV blocks, the last first, until `blocks` are free or none is left."""
        while self._waiting_with_blocks and self.free_blocks < blocks:
            victim = self._waiting_with_blocks.pop()
            if victim.name in self.parked:
                self.parked.remove(victim.name)
            self._free_blocks_of(victim)

    def blocks_behind(self, candidate: Candidate) -> int:
        """KV blocks of the requests that wait with theirs behind this one; 0 if it has none itself."""
        from_it = dropwhile(lambda held: held.name != candidate.name, self._waiting_with_blocks)
        return sum(held.blocks for held in islice(from_it, 1, None))

    def make_room(self, victims: MutableSequence[Candidate], blocks: int, slots: int = 0) -> bool:
        """Evict victims, the last first, until `blocks` are free, and park or evict others until `slots` are.

        False, and none of them is touched, if all would not suffice.
        """
        missing = blocks - self.free_blocks
        if missing <= 0 and self.free_slots >= slots:
            return True
        if missing > 0 and sum(victim.blocks for victim in (*self._waiting_with_blocks, *victims)) < missing:
            return False
        if self.free_slots + len(victims) < slots:
            return False
        self.take_back(blocks)
        while self.free_blocks < blocks:
            self.evict(victims.pop())
        while self.free_slots < slots:
            if self.view.parks:
                self.park(last_begun(victims))
            else:
                self.evict(victims.pop())
        return True

    def evict(self, victim: Candidate) -> None:
        """Free a running request's slot and KV blocks; it is scheduled again from its tokens later."""
        self._free_blocks_of(victim)
        self.free_slots += 1
        self._adapters.leave(victim.name)

    def park(self, victim: Candidate) -> None:
        """Free a running request's slot; it waits with its KV blocks, taken after those of others that wait."""
        self.parked.append(victim.name)
        self._waiting_with_blocks.insert(0, victim)
        self.free_slots += 1
        self._adapters.leave(victim.name)

    def adapter_fits(self, candidate: Candidate) -> bool:
        """True if the waiting request has no LoRA adapter too many beside those of running requests."""
        return self._adapters.fits(candidate.name)

    def keeps_adapter(self, candidate: Candidate) -> bool:
        """True if the waiting request has a LoRA adapter that goes with the last row that runs with it."""
        return self._adapters.of_rows_alone(candidate.name)

    def adapter_comes(self, candidate: Candidate, victims: Sequence[Candidate]) -> bool:
        """True if the waiting request's adapter fits, or would without some of the victims."""
        return self.adapter_fits(candidate) or bool(self._adapters.in_the_way(victims))

    def make_adapter_room(self, victims: MutableSequence[Candidate], candidate: Candidate) -> None:
        """Evict the victims whose adapter is in the waiting request's way."""
        if self.adapter_fits(candidate):
            return
        for victim in self._adapters.in_the_way(victims):
            victims.remove(victim)
            self.evict(victim)

    def _free_blocks_of(self, victim: Candidate) -> None:
        self.evicted.append(victim.name)
        self.free_blocks += victim.blocks
        self._revoked_blocks += victim.blocks if victim.saved else 0

    def steps(self, among: Sequence[Candidate]) -> Steps:
        """The decode steps among these requests, with their sums."""
        return Steps(among, self._kv_groups, self._block_tokens)

    def growth(self, decodes: Iterable[Candidate]) -> int:
        """New KV blocks that the decode steps of these requests take together."""
        return sum(self.blocks_for(request, request.tokens) for request in decodes)

    def add_decodes(self, steps: Steps, limit_ms: float, *, most: int | None = None) -> int:
        """Add decode steps in order while time, tokens and blocks last; returns how many were added.

        `most`: if it is known that no more find time.
        """
        fitting = self.fitting_decodes(steps, limit_ms, blocks=self.free_blocks, most=most)
        self.add_first(steps, fitting)
        return fitting

    def add_first(self, steps: Steps, count: int) -> None:
        """Add the first `count` decode steps, without checks."""
        steps.add_to(self.batch, count)
        self.tokens.update(steps.named(count))
        self.tokens_left -= steps.tokens(count)
        self.free_blocks -= steps.blocks(count)

    def fitting_decodes(
        self, steps: Steps, limit_ms: float, *, blocks: float = inf, most: int | None = None
    ) -> int:
        """Number of decode steps, in order, that time, tokens and so many new KV blocks suffice for.

        `most`, if it is known that no more find time, is tried first.
        """

        def exceeds(count: int) -> bool:
            if not steps.has(count) or steps.tokens(count) > self.tokens_left or steps.blocks(count) > blocks:
                return True
            return not self._fit(steps, count, limit_ms)

        if most is None:
            if limit_ms < inf and self._live_waits:
                return _most(inf, exceeds)
            most = len(steps)  # it is likely that all of them find time
        return _most(most - 1, exceeds) if most and exceeds(most) else most

    def _fit(self, steps: Steps, count: int, limit_ms: float) -> bool:
        """True if the batch with the first `count` decode steps stays within `limit_ms`."""
        if limit_ms == inf:
            return True
        batch = self.batch.copy()
        steps.add_to(batch, count - 1)
        last = steps.requests[count - 1]
        wanted = Slice(last.tokens, last.context, last.decode)
        return self._model.can_schedule(batch, wanted, limit_ms - self.surcharge_ms) == last.tokens


def _most(largest: float, exceeds: Callable[[int], bool]) -> int:
    """Largest number from 0 to `largest` that does not exceed; `exceeds` must be monotone.

    Doubled, then bisected: beside live requests there is mostly time for few decode steps of hundreds, or none.
    """
    fits, tried = 0, 1
    while tried <= largest and not exceeds(tried):
        fits, tried = tried, 2 * tried
    return fits + bisect_left(range(fits + 1, int(min(tried, largest + 1))), True, key=exceeds)
