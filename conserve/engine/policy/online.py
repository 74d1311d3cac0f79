"""Phase 1: online requests, all of them, before anybody else (conserve-2026 Algorithm 1)."""

from itertools import chain
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from conserve.engine.policy.composer import Composer, smallest_ms
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import Candidate, Slo, View


class OnlineShare(NamedTuple):
    """What phase 1 leaves to phase 2."""

    complete: bool  # every online request got all it could use
    limit_ms: float  # the most that the iteration may take for the sake of those in it
    running_offline: list[Candidate]  # those that were not preempted


def serve_online(composer: Composer, view: View, *, tbt_ms: float) -> OnlineShare:
    """Add decode steps, then prompts under way, then those that wait, preempting offline requests for them.

    Decode steps always run. Where there are some, chunks of prompts stay within `tbt_ms`, unless a prompt
    would miss its TTFT for it: then its chunk is as large as vLLM would have made it (docs/adr/0006).
    """
    victims = sorted(view.offline, key=attrgetter("saved"))  # the last goes first
    limit_ms, first_tokens_ms = inf, inf
    decodes = [request for request in view.online if request.decode]
    if decodes:
        limit_ms = tbt_ms
        _add_steps(composer, victims, decodes)
    first_tokens = 0  # that this iteration brings
    prompts = ((request, False) for request in view.online if not request.decode)
    for request, waiting in chain(prompts, ((request, True) for request in view.waiting_online)):
        if request.restorable:
            if composer.tokens_left < 1 or not _make_place(composer, victims, request):
                return OnlineShare(False, limit_ms, _left(view, composer))
            composer.restore(request)
            if not request.answered:
                first_tokens_ms = min(first_tokens_ms, view.slo.ttft_ms - request.age_ms)
            continue
        if _holds_up(composer, request, first_tokens, view):
            return OnlineShare(False, limit_ms, _left(view, composer))
        tokens = chunk(composer, request, limit_ms, view.slo)
        if not tokens or not _place(composer, victims, request, tokens, waiting=waiting):
            return OnlineShare(False, limit_ms, _left(view, composer))
        if tokens < request.tokens:
            return OnlineShare(False, limit_ms, _left(view, composer))
        if not request.answered:
            first_tokens += 1
            first_tokens_ms = min(first_tokens_ms, view.slo.ttft_ms - request.age_ms)
    if view.preemptible and first_tokens_ms < inf:  # who waits for a first token waits for nothing else
        first_tokens_ms = min(first_tokens_ms, composer.predicted_ms + PATIENCE * view.slo.ttft_ms)
    return OnlineShare(composer.free_blocks >= 0, min(limit_ms, first_tokens_ms), _left(view, composer))


def _add_steps(composer: Composer, victims: list[Candidate], decodes: list[Candidate]) -> None:
    """Add all decode steps; vLLM preempts among online requests where offline ones have not enough to give."""
    if composer.free_slots >= 0 and composer.growth(decodes) <= composer.free_blocks:
        composer.add_all(decodes)
        return
    for request in decodes:
        composer.make_room(victims, composer.blocks_for(request, request.tokens))
        composer.add(request, request.tokens)


def _left(view: View, composer: Composer) -> list[Candidate]:
    """The offline requests that were not preempted, in the order in which they are served."""
    gone = set(composer.preempted)
    return [request for request in view.offline if request.name not in gone]


def _holds_up(composer: Composer, request: Candidate, first_tokens: int, view: View) -> bool:
    """Whether the request is better served in an iteration of its own: all of them together wait less.

    Those who get their first tokens from this one wait for the request's prompt too; apart, the request and those
    behind it wait for one more iteration's constant part. In a long queue prompts are computed together, in a
    short one each as soon as it can be.
    """
    if view.slo.ttft_ms == inf:
        return False
    waits_ms = first_tokens * composer.longer_ms(request, min(request.tokens, composer.tokens_left))
    return waits_ms > max(1, view.queued_online) * smallest_ms(view.model)


def chunk(composer: Composer, request: Candidate, limit_ms: float, slo: Slo) -> int:
    """Tokens of an online prompt to compute: within the limit if its TTFT allows, else at full speed."""
    tokens = composer.fitting(request, limit_ms)
    left_ms = slo.ttft_ms - request.age_ms
    if tokens:
        in_time = ceil(request.tokens / tokens) * limit_ms <= left_ms
    else:
        # It can wait for one more iteration; without a promise it would wait for all the decoding ones.
        in_time = limit_ms + composer.alone_ms(request) <= left_ms < inf
    return tokens if in_time else composer.fitting(request, inf)


def _place(
    composer: Composer, victims: list[Candidate], request: Candidate, tokens: int, *, waiting: bool
) -> bool:
    """Add the request, preempting for it; False if it has to wait for room."""
    if not waiting:
        composer.make_room(victims, composer.blocks_for(request, tokens))
        composer.add(request, tokens)
        return True
    if not _make_place(composer, victims, request):
        return False
    composer.admit(request, tokens)
    return True


def _make_place(composer: Composer, victims: list[Candidate], request: Candidate) -> bool:
    """Preempt for a request that waits, until there is room for all of it; False if there cannot be."""
    whole = composer.blocks_for(request, request.tokens)
    return any(
        composer.make_room(victims, blocks, slots=1) for blocks in (whole + composer.watermark_blocks, whole)
    )
