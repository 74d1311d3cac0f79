"""vLLM's encoder cache: embeddings of images and sounds, and which requests hold them.

vLLM enters an input into the cache's books when an iteration is scheduled that encodes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput


def encoded_by(scheduler: Any, output: SchedulerOutput) -> frozenset[str]:
    """Names of the inputs that the iteration encodes."""
    return frozenset(
        scheduler.requests[name].mm_features[number].identifier
        for name, numbers in output.scheduled_encoder_inputs.items()
        for number in numbers
    )


def strike_out(scheduler: Any, inputs: Iterable[str]) -> None:
    """Take inputs that no encoder has seen out of the books, whoever holds them; they are encoded later.

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
