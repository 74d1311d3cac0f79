"""Phase 2: offline requests, in the harvester's order, until time is spent (conserve-2026 Algorithm 1)."""

from collections.abc import Iterable, Sequence
from itertools import chain

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.view import Candidate

MOST_HELD = 32  # waiting requests that are looked at and held out: looking takes 10 us each
GROWTH = 2  # running requests for which one block is kept free, so that none is preempted for the next


def serve_offline(
    composer: Composer, running: list[Candidate], waiting: Iterable[Candidate], limit_ms: float
) -> None:
    """Add decode steps, then prompts under way, then those that wait; the first that is cut short ends it.

    Decode steps come first: they give a token for the least time, and free their memory soonest. What only has
    to come back from host memory takes no time.
    """
    composer.begin_offline(limit_ms)
    _free_blocks_to_grow(composer, running, limit_ms)
    waiting = _restore(composer, waiting, len(running))
    decodes = [request for request in running if request.decode]
    if composer.add_decodes(decodes, limit_ms) < len(decodes):
        return
    prompts = [request for request in running if not request.decode]
    while prompts:
        request = prompts.pop(0)
        tokens = composer.fitting(request, limit_ms)
        if not tokens or not composer.make_room(prompts, composer.blocks_for(request, tokens)):
            return
        composer.add(request, tokens)
        if tokens < request.tokens:
            return
    _admit(composer, waiting, limit_ms, first=not running)


def serve_least(
    composer: Composer, running: Sequence[Candidate], first: Sequence[Candidate], prompt_tokens: int = 1
) -> None:
    """Where no token fits, let some be computed: an idle engine gets no further, and its model is never corrected.

    `first` is who waits in front, if anybody does; a decode step is not divided.
    """
    if composer.tokens:
        return
    if running:
        request = running[0]
        tokens = min(
            request.tokens, composer.tokens_left, request.tokens if request.decode else prompt_tokens
        )
        if composer.blocks_for(request, tokens) > composer.free_blocks:
            tokens = min(tokens, 1) if not request.decode else tokens
        composer.add(request, tokens)
    elif first and _can_start(composer, first[0]):
        composer.admit(first[0], min(first[0].tokens, prompt_tokens, composer.tokens_left))


def _can_start(composer: Composer, request: Candidate) -> bool:
    """Whether nothing but time keeps the request from being admitted."""
    taken_back = request.name in composer.preempted
    return not request.restorable and not taken_back and _has_room(composer, request, first=True)


def _free_blocks_to_grow(composer: Composer, running: list[Candidate], limit_ms: float) -> None:
    """Preempt the last requests until the decode steps of the others have blocks; at least one stays.

    Only for decode steps that there is time for: the others do not grow yet.
    """
    growing = [request for request in running if request.decode]
    if composer.growth(growing) <= composer.free_blocks:
        return
    growing = growing[: composer.fitting_decodes(growing, limit_ms)]
    composer.take_back(composer.growth(growing))
    while len(running) > 1 and composer.growth(growing) > composer.free_blocks:
        saved = [index for index, request in enumerate(running) if request.saved]
        victim = running.pop(saved[-1] if saved else -1)
        composer.preempt(victim)
        if victim in growing:
            growing.remove(victim)


def _restore(composer: Composer, waiting: Iterable[Candidate], running: int) -> Iterable[Candidate]:
    """Begin to bring back those in front that were preempted; returns who waits after them."""
    rest = iter(waiting)
    for request in rest:
        if not request.restorable:
            return chain((request,), rest)
        if not _comes_back(composer, request, running):
            return ()  # nobody overtakes it: what it needs would never be free
    return ()


def _comes_back(composer: Composer, request: Candidate, running: int) -> bool:
    """Begin to restore the request, unless others are brought what it begins with; False if there is no room."""
    if composer.comes_for_others(request):
        return True
    blocks = composer.blocks_for(request, request.tokens)
    reserved = composer.reserved_blocks if running or composer.restored else 0
    spare_blocks = max(composer.watermark_blocks, composer.unwritten_blocks, reserved, running // GROWTH)
    room = composer.free_slots > composer.reserved_slots and blocks + spare_blocks <= composer.free_blocks
    if composer.preempted or composer.tokens_left < 1 or not room:
        return False
    composer.restore(request)
    return True


def _admit(composer: Composer, waiting: Iterable[Candidate], limit_ms: float, *, first: bool) -> None:
    """Admit requests in order, those last that would compute what the iteration computes for another.

    In the next iteration they find it in the prefix cache. As long as others fill this one they are held out;
    what others leave is theirs.
    """
    # Whose KV was taken again just now is there once more.
    waiting = (request for request in waiting if request.name not in composer.preempted)
    held: list[Candidate] = []
    for request in waiting:
        if composer.free_slots <= composer.reserved_slots:
            return
        if request.restorable:
            if not _comes_back(composer, request, len(composer.tokens)):
                return
            continue
        tokens = composer.fitting(request, limit_ms)
        if not tokens:
            return
        if composer.computes_next_of(request):
            held.append(request)
            if len(held) == MOST_HELD:
                break
        elif not _has_room(composer, request, first=first):
            waiting = iter(())  # but those held out may need less
            break
        else:
            composer.admit(request, tokens)
            if tokens < request.tokens:
                return
    for request in chain(held, waiting):
        if request.restorable:
            if not _comes_back(composer, request, len(composer.tokens)):
                return
            continue
        tokens = composer.fitting(request, limit_ms)
        if not tokens or not _has_room(composer, request, first=first):
            return
        composer.admit(request, tokens)
        if tokens < request.tokens:
            return


def _has_room(composer: Composer, request: Candidate, *, first: bool) -> bool:
    """Whether there are a slot and KV blocks for all of a waiting request."""
    # One offline request may always run, or a large one might wait for as long as there is traffic; so may one that
    # has got its KV back, or it would lose it again before it has computed a token.
    free_of_it = (first and not composer.admitted) or composer.has_its_own(request)
    reserved_blocks = 0 if free_of_it else composer.reserved_blocks
    spare_blocks = max(composer.watermark_blocks, len(composer.tokens) // GROWTH, reserved_blocks)
    return (
        composer.free_slots > composer.reserved_slots
        and composer.blocks_for(request, request.tokens) + spare_blocks <= composer.free_blocks
    )
