"""Phase 1: all online requests, before any offline one (conserve-2026 Algorithm 1)."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.fairness import others_limit_ms, prompts_in_turn
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.victims import Victims
from conserve.engine.policy.view import Candidate, Slo, View
from conserve.profiles.model import smallest_ms


class OnlineShare(NamedTuple):
    """Result of phase 1 that phase 2 builds on."""

    complete: bool  # every online request got all tokens it could use
    limit_ms: float  # longest iteration that the online requests in it can bear
    running_offline: Sequence[Candidate]  # running offline requests that were neither evicted nor parked


def serve_online(composer: Composer, view: View, *, tbt_ms: float | None = None) -> OnlineShare:
    """Add decode steps, then running prompts, then waiting requests, evicting offline requests for them.

    All decode steps run. Beside them a chunk of a prompt stays within `tbt_ms`, unless the prompt would miss its
    TTFT for it: then the chunk is as large as vLLM would have made it (docs/adr/0006). None stands for the TBT that
    is promised to these requests, and a late prompt then keeps to what other classes bear (docs/adr/0023).
    """
    victims = Victims(view.offline)
    limit_ms, first_tokens_ms, gap_ms, patience_ms = inf, inf, inf, inf
    decodes = [request for request in view.online if request.decode]
    if decodes:
        slo = view.slo_among(decodes)
        limit_ms = slo.online_tbt_ms - view.online_waited_ms if tbt_ms is None else tbt_ms
        gap_ms = slo.tbt_ms - view.online_waited_ms
        add_steps(composer, victims, decodes)
    typical_ms = view.typical_prompt_ms if view.prompt_tokens else inf
    first_tokens, another_ms = 0, 0.0  # of requests whose prompt ends in this iteration; time of one more
    crowded_out: list[str] = []  # a waiting request that found no room
    others_adapters = False  # a waiting request wants an adapter in the place of one that live requests use
    # KV blocks that running prompts lack: a waiting one of a class that was served less takes none of these.
    owed = sum(composer.blocks_for(one, one.tokens) for one in view.online if not one.decode)
    for request, waiting in prompts_in_turn(view, lambda: not crowded_out):
        slo = view.slo_of(request)
        if waiting and not composer.adapter_comes(request, victims):
            others_adapters = True
            continue
        if request.restorable:
            if composer.tokens_left < 1:
                return OnlineShare(False, limit_ms, rows_left(view, composer))
            if not make_place(composer, victims, request, owed):
                crowded_out.append(request.name)
                continue
            composer.restore(request)
            if not request.answered:
                first_tokens_ms = min(first_tokens_ms, slo.ttft_ms - request.age_ms)
                patience_ms = min(patience_ms, PATIENCE * slo.ttft_ms)
            continue
        another_ms = another_ms or max(smallest_ms(view.model), composer.predicted_ms)  # before any prompt
        if _holds_up(composer, request, first_tokens, another_ms, limit_ms, view):
            return OnlineShare(False, limit_ms, rows_left(view, composer))
        late_ms = others_limit_ms(view, request, decodes) if tbt_ms is None else inf
        # With classes the queue is mostly that of others, which this class's turns overtake.
        behind = 0 if view.slos else max(0, view.queued_online - len(composer.admitted) - waiting)
        tokens = chunk(composer, request, limit_ms, slo, late_ms, behind=behind, typical_ms=typical_ms)
        if not waiting:
            owed -= composer.blocks_for(request, request.tokens)
        if tokens and not place(composer, victims, request, tokens, waiting=waiting, owed=owed):
            crowded_out.append(request.name)
            continue
        if tokens < request.tokens:
            return OnlineShare(False, limit_ms, rows_left(view, composer))
        if not request.answered:
            first_tokens += 1
            first_tokens_ms = min(first_tokens_ms, slo.ttft_ms - request.age_ms)
            patience_ms = min(patience_ms, PATIENCE * slo.ttft_ms)
    if view.rows_leave:  # offline tokens delay a first token by `PATIENCE` at most
        first_tokens_ms = min(first_tokens_ms, composer.predicted_ms + patience_ms)
    complete = not (crowded_out or others_adapters) and composer.free_blocks >= 0
    return OnlineShare(complete, min(limit_ms, first_tokens_ms, gap_ms), rows_left(view, composer))


def add_steps(composer: Composer, victims: Victims, decodes: list[Candidate]) -> None:
    """Add all decode steps; vLLM evicts online requests where the offline ones have too few blocks."""
    steps = composer.steps(decodes)
    if composer.free_slots >= 0 and steps.blocks(len(steps)) <= composer.free_blocks:
        composer.add_first(steps, len(steps))
        return
    for request in decodes:
        composer.make_room(victims, composer.blocks_for(request, request.tokens))
        composer.add(request, request.tokens)


def rows_left(view: View, composer: Composer) -> Sequence[Candidate]:
    """Running offline requests that were neither evicted nor parked, in serving order."""
    if not (composer.evicted or composer.parked):
        return view.offline
    gone = {*composer.evicted, *composer.parked}
    return [request for request in view.offline if request.name not in gone]


def _holds_up(
    composer: Composer,
    request: Candidate,
    first_tokens: int,
    another_ms: float,
    limit_ms: float,
    view: View,
) -> bool:
    """True if an iteration of its own for this request lowers the total waiting time."""
    # Requests that get their first token from this iteration would also wait for the request's prompt. Apart, the
    # request and those queued behind it wait for one more iteration, with all decode steps once more. So prompts
    # share an iteration while the queue is long, and each has its own while it is short. Decode steps weigh nothing
    # where both prompts would make a gap longer than is promised.
    if view.slo.ttft_ms == inf:
        return False
    longer_ms = composer.longer_ms(request, min(request.tokens, composer.tokens_left))
    if composer.predicted_ms + longer_ms > limit_ms:
        another_ms = smallest_ms(view.model)
    return first_tokens * longer_ms > max(1, view.queued_online) * another_ms


def chunk(
    composer: Composer,
    request: Candidate,
    limit_ms: float,
    slo: Slo,
    late_ms: float,
    *,
    behind: int,
    typical_ms: float,
) -> int:
    """Number of tokens of an online prompt to compute.

    As many as fit into `limit_ms` if the prompt still keeps its TTFT that way, and so would it behind as many
    others as are `behind` it, each of which takes as long as this one or a typical prompt, whichever is shorter;
    else as many as the iteration takes within `late_ms`. A request that has its first token and lost its KV has no
    TTFT to keep any more. Where nothing of it fits it would wait for all decoding requests.
    """
    tokens = composer.token_budget(request, limit_ms)
    if request.answered:
        return tokens or composer.token_budget(request, late_ms)
    left_ms = slo.online_ttft_ms - request.age_ms
    if tokens:
        queue_ms = behind * min(composer.alone_ms(request), typical_ms) if behind else 0.0
        in_time = chunks_ms(composer, request, tokens, limit_ms) + queue_ms <= left_ms
    else:
        # A prompt can wait for one more iteration. Without a TTFT promise it would wait for all decoding requests.
        in_time = limit_ms + composer.alone_ms(request) <= left_ms < inf
    return tokens if in_time else composer.token_budget(request, late_ms)


def chunks_ms(composer: Composer, request: Candidate, tokens: int, limit_ms: float) -> float:
    """Time until the first token of a prompt in chunks of so many tokens.

    The last iteration is as long as its chunk takes beside the decode steps: offline tokens hardly delay a first
    token, so the limit is reached by the others alone.
    """
    whole = (request.tokens - 1) // tokens
    if not whole:
        return limit_ms
    rest = request.tokens - whole * tokens
    last = request._replace(context=request.context + whole * tokens)
    return whole * limit_ms + composer.predicted_ms + composer.longer_ms(last, rest)


def place(
    composer: Composer,
    victims: Victims,
    request: Candidate,
    tokens: int,
    *,
    waiting: bool,
    owed: int = 0,
) -> bool:
    """Add the request, evicting others for it; False if it waits and finds no room beside `owed` KV blocks."""
    if not waiting:
        composer.make_room(victims, composer.blocks_for(request, tokens))
        composer.add(request, tokens)
        return True
    if not make_place(composer, victims, request, owed):
        return False
    composer.admit(request, tokens)
    return True


def make_place(composer: Composer, victims: Victims, request: Candidate, owed: int = 0) -> bool:
    """Evict others until a waiting request has room for all its tokens, and `owed` KV blocks stay free.

    One that comes back leaves those too that running prompts will need: vLLM begins no restore into them. False if
    that cannot be.
    """
    composer.make_adapter_room(victims, request)
    left = max(owed, composer.unwritten_blocks) if request.restorable else owed
    whole = left + composer.blocks_for(request, request.tokens)
    return any(
        composer.make_room(victims, blocks, slots=1) for blocks in (whole + composer.watermark_blocks, whole)
    )
