"""What a policy sees: the engine's requests, its free room, its latency model and the promises to keep."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from conserve.profiles.model import LatencyModel

OFFLINE_PRIORITY = 1000  # vLLM's `priority` from which on a request is offline
TTFT_ARGUMENT = "conserve_ttft_ms"  # in a request\'s `vllm_xargs`: a TTFT promise of its own


class Candidate(NamedTuple):
    """One request that could compute something in the next iteration."""

    name: str
    tokens: int  # that it would compute if nothing held it back, at least one
    context: int  # tokens whose KV is there: computed, or found in the prefix cache
    decode: bool = False
    blocks: int = 0  # KV blocks that it has, or will share with requests that run
    age_ms: float = 0.0  # since it arrived
    answered: bool = False  # its first token is out
    surcharge_ms: float = 0.0  # what one of its tokens takes beyond the model (prompt logprobs)
    saved: bool = False  # it would hardly lose anything with its memory: host memory has its KV
    restorable: int = 0  # of the tokens, first ones whose KV host memory has
    prefix: Sequence[Hashable] = ()  # its full KV blocks; equal for two requests that begin alike up to there


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The promises to online requests, in ms: until the first token, and between two tokens."""

    ttft_ms: float = inf
    tbt_ms: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The engine between two iterations; requests are in the order in which they should be served.

    `waiting_offline` may be long and is only read as far as requests fit.
    """

    online: Sequence[Candidate] = ()  # running
    offline: Sequence[Candidate] = ()  # running
    waiting_online: Iterable[Candidate] = ()
    waiting_offline: Iterable[Candidate] = ()
    queued_online: int = 0  # online requests that wait, also those that cannot start yet
    model: LatencyModel
    slo: Slo
    prompt_tokens: int = 0  # of a typical online request of late
    arrivals_per_s: float = 0.0  # of online requests of late
    preemptible: bool = False  # offline rows can leave the iteration for those who arrive while it runs
    resumable: bool = False  # and go on later where they left
    max_tokens: int  # of one iteration
    free_slots: int  # sequences that could be added to those running
    reserved_slots: int = (
        0  # of them, for online requests to come: preempting for each costs its victim's work
    )
    free_blocks: int
    reserved_blocks: int = 0  # of them, for the same; those of rows that are saved can be taken back instead
    used_blocks: int | None = None  # that are not free, each counted once
    watermark_blocks: int = 0  # of the free ones: vLLM admits nobody into them while somebody runs
    held: Sequence[Candidate] = ()  # waiting offline requests that have their KV back: it can be taken again
    coming: frozenset[Hashable] = frozenset()  # KV blocks that are on their way back for some request
    unwritten_blocks: int = 0  # of the free ones: prompts under way will want them, and no restore takes them
    block_tokens: int
