"""Phase 2: offline requests in the harvester's order, until the time is used up (conserve-2026 Algorithm 1)."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from math import frexp

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.decode_sums import Steps
from conserve.engine.policy.view import Candidate, View

MOST_DEFERRED = 32  # waiting requests that are deferred at most: looking at one takes 10 us
MOST_PASSED = 256  # waiting requests that are passed over at most, since their LoRA adapter is one too many
OVERTAKE_MS = 60_000.0  # by which rows overtake one whose LoRA adapter is one too many, at most
ENDING = 0.25  # of each doubling of a row's age, at its end: no row overtakes it then
MOST_PUSHED = 32  # waiting requests among which pushed ones are looked for
GROWTH = 2  # running requests for which one block is kept free, so that the next decode step evicts none


class Overtaking:
    """Decides if rows begin before one that lacks memory: only where live requests hold what it lacks.

    Otherwise it waits for rows that end. Rows that overtake it hold memory in turn, and live requests may leave
    enough of it for moments alone. So none overtakes it in the last quarter of each doubling of its age: however
    long rows run, they have ended in one of these, and it begins as soon as the memory is there. Its age is bounded
    by the time that the harvester gives an answer.
    """

    def __init__(self, composer: Composer, running: Sequence[Candidate]) -> None:
        """Made before a row is planned; live requests are."""
        self._composer, self._running, self._free_blocks = composer, running, composer.free_blocks
        self._passed = 0
        self._ends = False

    @cached_property
    def _blocks(self) -> tuple[int, int]:
        """KV blocks that rows could have together now, and without live requests."""
        view = self._composer.view
        without_rows = self._free_blocks + _blocks_of(chain(self._running, view.waiting_with_blocks))
        return without_rows, without_rows + _blocks_of(view.online)

    def lets_pass(self, request: Candidate) -> bool:
        """True if the rows behind this one may begin, which lacks memory or another thing."""
        blocks = self._composer.blocks_for(request, request.tokens) + self._composer.watermark_blocks
        without_rows, without_any = self._blocks
        if not without_rows < blocks <= without_any:
            return False
        if not self._passed:
            self._ends = frexp(request.age_ms / OVERTAKE_MS)[0] >= 1 - ENDING / 2
        self._passed += 1
        return self._passed < MOST_DEFERRED and not self._ends


def serve_offline(
    composer: Composer, running: Sequence[Candidate], waiting: Iterable[Candidate], limit_ms: float
) -> Sequence[Candidate]:
    """Add decode steps, then running prompts, then waiting requests; stop at the first one that is cut short.

    Decode steps come first, since they give a token for the least time and free their memory soonest. A request
    that only has to be restored from host memory takes no time of the iteration. Rows leave the KV blocks that are
    kept for live requests, but for one: it may always run. Returns the running requests that were not evicted.
    """
    composer.begin_offline(limit_ms)
    overtaking = Overtaking(composer, running)
    if composer.kept_blocks and len(running[:2]) > 1:
        composer.leave_kept()
    running, steps, fitting = _with_blocks_to_grow(composer, running, limit_ms)
    waiting = _restore(composer, _with_adapters(composer, waiting), running, overtaking)
    if steps.has(composer.add_decodes(steps, limit_ms, most=fitting) + 1):
        return running
    prompts = [request for request in running if not request.decode]
    passed_over: list[Candidate] = []  # in front of an image that finds no time
    while prompts:
        request = prompts.pop(0)
        tokens = composer.row_budget(request, limit_ms)
        passed = not composer.can_encode(request, limit_ms)
        if not tokens and passed:
            passed_over.append(request)
            continue
        blocks = composer.blocks_for(request, tokens)
        if not tokens or not (composer.make_room(prompts, blocks) or composer.make_room(passed_over, blocks)):
            return running
        composer.add(request, tokens)
        if tokens < request.tokens and not passed:
            return running
    if running:
        composer.leave_kept()
    _admit(composer, waiting, limit_ms, first=not running, overtaking=overtaking)
    return running


def serve_least(
    composer: Composer, running: Sequence[Candidate], first: Sequence[Candidate], prompt_tokens: int = 1
) -> None:
    """Add a few tokens where not even one fitted: an idle engine would make no progress and correct no model.

    `first` holds the first waiting request, if there is one. A decode step is not divided.
    """
    if composer.tokens:
        return
    if running:
        request = running[0]
        tokens = min(
            request.tokens, composer.tokens_left, request.tokens if request.decode else prompt_tokens
        )
        while (
            not request.decode and tokens > 1 and composer.blocks_for(request, tokens) > composer.free_blocks
        ):
            tokens -= 1
        composer.add(request, tokens)
    elif first and _can_start(composer, first[0]):
        composer.admit(first[0], min(first[0].tokens, prompt_tokens, composer.tokens_left))


def serve_pushed(composer: Composer, view: View, running: Sequence[Candidate], limit_ms: float) -> None:
    """Let pushed rows go on up to a longer limit than that at which all rows stopped (docs/adr/0030).

    Nothing is evicted or restored for them, and no other request gets a token more or less. A limit of 0 is none.
    """
    if limit_ms <= 0:
        return
    before = dict(composer.tokens)
    mine = [row for row in running if row.name in view.pushed and row.name not in composer.evicted]
    left = [row for row in mine if row.name not in before]
    prompts = [row for row in mine if not row.decode]
    waiting = [
        row
        for row in _with_adapters(composer, islice(view.waiting_offline, MOST_PUSHED))
        if row.name in view.pushed and not row.restorable
    ]
    composer.add_decodes(composer.steps(left), limit_ms)
    for row in (*prompts, *waiting):
        if row.name in before:
            composer.extend(row, limit_ms)
    for row in prompts:
        tokens = 0 if row.name in before else composer.row_budget(row, limit_ms)
        if tokens and composer.blocks_for(row, tokens) <= composer.free_blocks:
            composer.add(row, tokens)
    _admit(composer, (row for row in waiting if row.name not in before), limit_ms, first=False)
    composer.push(before, limit_ms)


def _blocks_of(requests: Iterable[Candidate]) -> int:
    return sum(request.blocks for request in requests)


def _can_start(composer: Composer, request: Candidate) -> bool:
    """True if only time keeps the request from being admitted."""
    taken_back = request.name in composer.evicted
    return not request.restorable and not taken_back and _has_room(composer, request, first=True)


def _with_blocks_to_grow(
    composer: Composer, running: Sequence[Candidate], limit_ms: float
) -> tuple[Sequence[Candidate], Steps, int | None]:
    """Evict the last requests until the decode steps of the others have KV blocks; at least one request stays.

    Returns the requests that stay, their decode steps, and how many of these find time, unless that has changed.
    Only those need KV blocks: the others do not grow in this iteration.
    """
    steps = composer.steps(running)
    fitting = composer.fitting_decodes(steps, limit_ms)
    if steps.blocks(fitting) <= composer.free_blocks:
        return running, steps, fitting
    staying, growing = [*running], steps.requests[:fitting]
    composer.take_back(composer.growth(growing))
    while len(staying) > 1 and composer.growth(growing) > composer.free_blocks:
        saved = [index for index, request in enumerate(staying) if request.saved]
        victim = staying.pop(saved[-1] if saved else -1)
        composer.evict(victim)
        if victim in growing:
            growing.remove(victim)
    return staying, composer.steps(staying), None


def _with_adapters(composer: Composer, waiting: Iterable[Candidate]) -> Iterator[Candidate]:
    """The waiting requests whose LoRA adapter fits when their turn comes.

    The first one that is passed over waits until an adapter has no running request. So rows that came long after it
    begin with no adapter that rows alone use: one with ever new rows would never leave.
    """
    passed = 0
    first: Candidate | None = None
    for request in waiting:
        late = first is not None and first.age_ms - request.age_ms > OVERTAKE_MS
        if composer.adapter_fits(request) and not (late and composer.keeps_adapter(request)):
            yield request
            continue
        first = first or request
        passed += 1
        if passed == MOST_PASSED:
            return


def _restore(
    composer: Composer, waiting: Iterable[Candidate], running: Sequence[Candidate], overtaking: Overtaking
) -> Iterable[Candidate]:
    """Begin to restore the evicted requests in front; returns the waiting requests after them."""
    rest = iter(waiting)
    for request in rest:
        if not request.restorable:
            return chain((request,), rest)
        if not _comes_back(composer, request, len(running)) and not overtaking.lets_pass(request):
            return ()  # or the blocks that it needs would never be free
    return ()


def _comes_back(composer: Composer, request: Candidate, running: int) -> bool:
    """Begin to restore the request, unless its first block is on the way for another; False if there is no room."""
    if composer.comes_for_others(request):
        return True
    blocks = composer.blocks_for(request, request.tokens)
    others = running or composer.restored
    reserved, kept = (composer.reserved_blocks, composer.kept_blocks) if others else (0, 0)
    spare_blocks = max(composer.watermark_blocks, composer.unwritten_blocks, reserved, running // GROWTH)
    room = (
        composer.free_slots > composer.reserved_slots and blocks + spare_blocks + kept <= composer.free_blocks
    )
    if composer.evicted or composer.tokens_left < 1 or not room:
        return False
    composer.restore(request)
    return True


def _admit(
    composer: Composer,
    waiting: Iterable[Candidate],
    limit_ms: float,
    *,
    first: bool,
    overtaking: Overtaking | None = None,
) -> None:
    """Admit requests in order, and defer the ones whose first KV block this iteration computes for another.

    Without `overtaking` none begins behind one that lacks memory.
    """
    # A deferred request finds that block in the prefix cache in the next iteration. It is admitted to this one only
    # if the others leave room.
    # A request that was evicted in this plan waits again: do not admit it at once.
    waiting = (request for request in waiting if request.name not in composer.evicted)
    if first and composer.free_slots > composer.reserved_slots:
        waiting = _with_blocks_of_others(composer, waiting, limit_ms)
    deferred: list[Candidate] = []
    passed = 0
    for request in waiting:
        if composer.free_slots <= composer.reserved_slots:
            return
        if request.restorable:
            back = _comes_back(composer, request, len(composer.tokens))
            if not back and not (overtaking and overtaking.lets_pass(request)):
                return
            continue
        if request.images and not composer.token_budget(request, limit_ms):
            return
        if not composer.can_encode(request, limit_ms):  # it would hold its memory while it waits for time
            passed += 1
            if passed == MOST_DEFERRED:
                break
            continue
        tokens = composer.row_budget(request, limit_ms)
        if not tokens:
            return
        if composer.computes_next_of(request):
            deferred.append(request)
            if len(deferred) == MOST_DEFERRED:
                break
        elif not _has_room(composer, request, first=first):
            if overtaking is None or not overtaking.lets_pass(request):
                waiting = iter(())  # but deferred requests may need less room
                break
        else:
            composer.admit(request, tokens)
            if tokens < request.tokens:
                return
    for request in chain(deferred, waiting):
        if not _begins(composer, request, limit_ms, first=first):
            return


def _begins(composer: Composer, request: Candidate, limit_ms: float, *, first: bool) -> bool:
    """Restore or admit a waiting request; False if the ones behind it have to wait."""
    if request.restorable:
        return _comes_back(composer, request, len(composer.tokens))
    tokens = composer.row_budget(request, limit_ms) if composer.can_encode(request, limit_ms) else 0
    if not tokens or not _has_room(composer, request, first=first):
        return False
    composer.admit(request, tokens)
    return tokens == request.tokens


def _with_blocks_of_others(
    composer: Composer, waiting: Iterator[Candidate], limit_ms: float
) -> Iterator[Candidate]:
    """The waiting requests, of which the first has the KV blocks that it lacks, if others behind it have them.

    No row runs. Each that waits in the middle of its prompt might lack blocks that the others hold, for ever.
    """
    request = next(waiting, None)
    if request is None:
        return iter(())
    wanted = composer.blocks_for(request, request.tokens) + _spare_blocks(composer, 0)
    lacking = wanted - composer.free_blocks
    if 0 < lacking <= composer.blocks_behind(request) and composer.row_budget(request, limit_ms):
        composer.take_back(wanted)
    return chain((request,), waiting)


def _has_room(composer: Composer, request: Candidate, *, first: bool) -> bool:
    """True if a slot and KV blocks are free for all tokens of a waiting request."""
    # One offline request may always run, or a large one might wait as long as there is live traffic. So may a
    # request that has its KV back, or it would lose it again before it has computed a token.
    free_of_it = (first and not composer.admitted) or composer.has_its_own(request)
    reserved_blocks, kept = (0, 0) if free_of_it else (composer.reserved_blocks, composer.kept_blocks)
    spare_blocks = _spare_blocks(composer, reserved_blocks)
    return (
        composer.free_slots > composer.reserved_slots
        and composer.adapter_fits(request)
        and composer.blocks_for(request, request.tokens) + spare_blocks + kept <= composer.free_blocks
    )


def _spare_blocks(composer: Composer, reserved_blocks: int) -> int:
    """KV blocks that stay free beside those of a request that begins."""
    return max(composer.watermark_blocks, len(composer.tokens) // GROWTH, reserved_blocks)
