"""vLLM's encoder cache: embeddings of images and sounds, and which requests hold them.

vLLM enters an input into the cache's books when an iteration is scheduled that encodes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from conserve.engine.policy.view import Image
from conserve.engine.vllm.lane import is_online, is_running

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing


def encoded_by(scheduler: CoServing, output: SchedulerOutput) -> dict[str, int]:
    """Names of the inputs that the iteration encodes, and their embeddings."""
    return {
        (request := scheduler.requests[name]).mm_features[number].identifier: request.get_num_encoder_embeds(
            number
        )
        for name, numbers in output.scheduled_encoder_inputs.items()
        for number in numbers
    }


def to_encode(
    scheduler: CoServing, request: Request, context: int, ms_of: Callable[[int], float]
) -> tuple[Image, ...]:
    """Images and sounds of a prompt behind so many tokens with KV; `ms_of` is the time of so many embeddings."""
    if scheduler.is_encoder_decoder and context:
        return ()  # the encoder has seen all of it
    cached = () if scheduler.is_encoder_decoder else scheduler.encoder_cache_manager.cached
    return tuple(
        Image(max(0, feature.mm_position.offset - context), ms_of(embeddings))
        for (name, embeddings), feature in zip(_inputs(request), request.mm_features, strict=True)
        if feature.mm_position.offset + feature.mm_position.length > context and name not in cached
    )


def strike_out(scheduler: CoServing, inputs: Iterable[str]) -> None:
    """Take inputs that no encoder has seen out of the books, whatever requests hold them; they are encoded later.

    vLLM would count them as cached, and its worker ends with the engine where it finds no embeddings.
    """
    cache = scheduler.encoder_cache_manager
    for name in inputs:
        for holder in list(cache.cached.get(name, ())):
            request = scheduler.requests[holder]
            for number, feature in enumerate(request.mm_features):
                if feature.identifier == name:
                    cache.free_encoder_input(request, number)
        if (embeddings := cache.freeable.pop(name, None)) is not None:  # as where vLLM needs the room
            del cache.cached[name]
            getattr(cache, "num_embeds_by_hash", {}).pop(name, None)
            cache.num_free_slots += embeddings
            cache.freed.append(name)


def in_the_way(scheduler: CoServing, context_of: Callable[[Request], int]) -> list[str]:
    """Running rows, the last first, that keep online requests from the encoders or from room for embeddings.

    vLLM cuts a prompt short before an input that it cannot encode, and serves running requests before waiting ones.
    So such a prompt would wait until rows are past their images, and they hardly get on beside it. `context_of`
    says how many tokens of a waiting request have their KV on the device.
    """
    # Encoder-decoder models cache nothing.
    encodes = scheduler.max_num_encoder_input_tokens and not scheduler.is_encoder_decoder
    wanted = _wanted_online(scheduler, context_of) if encodes else {}
    if not wanted:
        return []
    cache, most = scheduler.encoder_cache_manager, scheduler.max_num_encoder_input_tokens
    rows = {one.request_id: one for one in scheduler.running if not is_online(one) and _has_prompt_left(one)}
    encoding = {name: _next_input(scheduler, row, row.num_computed_tokens) for name, row in rows.items()}
    held = {name: holders for name, holders in cache.cached.items() if holders and holders <= rows.keys()}
    sizes = {name: size for row in rows.values() for name, size in _inputs(row)}
    gone: list[str] = []
    for row in reversed(rows):
        first = dict(chain(*(inputs.items() for inputs in encoding.values()), wanted.items()))
        room = cache.num_freeable_slots + sum(
            sizes[name] for name, holders in held.items() if holders <= {*gone}
        )
        embeddings = sum(first.values())
        if embeddings <= min(most, room):
            break
        holds = any(row in holders for holders in held.values())
        if encoding.pop(row) or (embeddings > room and holds):
            gone.append(row)
    return gone


def _wanted_online(scheduler: CoServing, context_of: Callable[[Request], int]) -> dict[str, int]:
    """Inputs that the next iteration should encode for online requests, and their embeddings; as many as it can."""
    most = min(scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager.cache_size)
    wanted: dict[str, int] = {}
    for request in chain(scheduler.running, scheduler.kv_holding_waiting, scheduler.waiting.online):
        if not is_online(request) or not _has_prompt_left(request):
            continue
        if not is_running(request) and scheduler._is_blocked_waiting_status(request.status):
            continue  # it cannot start, whatever leaves
        inputs = _next_input(scheduler, request, request.num_computed_tokens)
        if inputs and not is_running(request):
            inputs = _next_input(scheduler, request, context_of(request))
        if sum((wanted | inputs).values()) > most:
            break
        wanted |= inputs
    return wanted


def _has_prompt_left(request: Request) -> bool:
    """True if inputs may be in the part of its prompt that is not computed."""
    return bool(request.mm_features) and request.num_computed_tokens < request.num_prompt_tokens


def _next_input(scheduler: CoServing, request: Request, context: int) -> dict[str, int]:
    """The first input behind so many tokens that an iteration could reach and has to encode, if there is one."""
    reached = context + scheduler.max_num_scheduled_tokens
    for (name, size), feature in zip(_inputs(request), request.mm_features, strict=True):
        place = feature.mm_position
        if place.offset >= reached:
            break
        if place.offset + place.length > context and name not in scheduler.encoder_cache_manager.cached:
            return {name: size}
    return {}


def _inputs(request: Request) -> Iterator[tuple[str, int]]:
    """Names and numbers of embeddings of the request's images and sounds, in their order."""
    for number, feature in enumerate(request.mm_features):
        yield feature.identifier, request.get_num_encoder_embeds(number)
