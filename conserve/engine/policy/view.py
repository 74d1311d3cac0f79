"""Views of an engine for policies: its requests, its free room, its latency model and the promises to keep."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, overload

from conserve.engine.policy.kv_groups import KvGroup
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

T = TypeVar("T")

OFFLINE_PRIORITY = 1000  # vLLM's `priority` from which on a request is offline
DEFAULT_CLASS = "default"  # of requests that no class claims
QUEUES = ("online", "offline", "waiting_online", "waiting_offline", "waiting_with_blocks")  # fields of a view
BY_CLASS = ("slos", "classes", "served")  # the same


class Image(NamedTuple):
    """An image or a sound in a prompt: the iteration that computes its first token encodes all of it."""

    before: int  # tokens to compute before its first one
    ms: float  # predicted time of the encoder


class Candidate(NamedTuple):
    """One request that could compute something in the next iteration."""

    name: str
    tokens: int  # tokens it would compute if nothing limited it, at least one
    context: int  # tokens with their KV on the device: computed, or found in the prefix cache
    decode: bool = False
    blocks: int = 0  # KV blocks that the request has, or will share with running requests
    age_ms: float = 0.0  # time since its arrival
    answered: bool = False  # its first token is out
    surcharge_ms: float = 0.0  # time of one of its tokens beyond the model's prediction (prompt logprobs)
    saved: bool = False  # host memory has its KV, so that an eviction costs next to nothing
    restorable: int = 0  # first tokens after `context` with their KV in host memory
    prefix: Sequence[Hashable] = ()  # one name per full KV block; equal names mean equal tokens up to there
    images: Sequence[Image] = ()  # and sounds, in their order, that are not encoded yet

    def beyond_ms(self, tokens: int) -> float:
        """Time that so many of its tokens take beyond the latency model's prediction, images in them included."""
        if not self.images:
            return tokens * self.surcharge_ms
        return tokens * self.surcharge_ms + sum(ms for before, ms in self.images if before < tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The promises to online requests, as bounds on the next iteration.

    `ttft_ms` and `tbt_ms` bound iterations with offline tokens. They are below the largest promise while a smaller
    one (a median, a mean) has no credit left: then the next latencies have to be short. Iterations of online
    requests alone keep to `largest_ttft_ms` and `largest_tbt_ms`.
    """

    ttft_ms: float = inf  # until the first token
    tbt_ms: float = inf  # between two tokens
    harm: float | None = None  # share of their own time that offline tokens may add; None without the promise
    largest_ttft_ms: float | None = None  # None where it is `ttft_ms`
    largest_tbt_ms: float | None = None
    stand_in_ttft_harm: float | None = None  # harm in place of a TTFT promise that is not kept or not made
    stand_in_tbt_harm: float | None = None  # harm in place of a TBT promise that is not kept or not made

    @property
    def ttft_harm(self) -> float | None:
        """Share of a prompt's own time that an arrival may wait for offline tokens; None without such a bound."""
        return least(self.harm, self.stand_in_ttft_harm)

    @property
    def tbt_harm(self) -> float | None:
        """Share of its own time by which offline tokens may lengthen an iteration; None without such a bound."""
        return least(self.harm, self.stand_in_tbt_harm)

    @property
    def online_ttft_ms(self) -> float:
        """TTFT that is promised at most."""
        return self.ttft_ms if self.largest_ttft_ms is None else self.largest_ttft_ms

    @property
    def online_tbt_ms(self) -> float:
        """TBT that is promised at most."""
        return self.tbt_ms if self.largest_tbt_ms is None else self.largest_tbt_ms


def tightest(slos: Iterable[Slo]) -> Slo:
    """Smallest bound of each kind among several promises; no promise without any."""
    several = list(slos)
    return Slo(
        ttft_ms=min((slo.ttft_ms for slo in several), default=inf),
        tbt_ms=min((slo.tbt_ms for slo in several), default=inf),
        harm=least(*(slo.harm for slo in several)),
        largest_ttft_ms=min((slo.online_ttft_ms for slo in several), default=inf),
        largest_tbt_ms=min((slo.online_tbt_ms for slo in several), default=inf),
        stand_in_ttft_harm=least(*(slo.stand_in_ttft_harm for slo in several)),
        stand_in_tbt_harm=least(*(slo.stand_in_tbt_harm for slo in several)),
    )


def least(*bounds: float | None) -> float | None:
    """Smallest of the bounds that there are; None without any."""
    return min((bound for bound in bounds if bound is not None), default=None)


class Lazy(Sequence[T]):
    """A sequence that is made as far as it is read, and only once: every reading gives the same values."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._read: list[T] = []

    @property
    def known(self) -> int:
        """Number of values that have been read."""
        return len(self._read)

    def has(self, count: int) -> bool:
        """True if there are at least so many values; these are read, and no others."""
        missing = count - len(self._read)
        if missing > 0:
            self._read.extend(islice(self._source, missing))
        return len(self._read) >= count

    def __bool__(self) -> bool:
        return self.has(1)

    def __len__(self) -> int:
        self._read.extend(self._source)
        return len(self._read)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        if isinstance(place, int):
            reach = place + 1 if place >= 0 else None
        else:
            forwards = (place.start or 0) >= 0 and (place.step or 1) > 0
            reach = place.stop if forwards else None
        if reach is None or reach < 0:
            len(self)
        else:
            self.has(reach)
        return self._read[place]

    def __iter__(self) -> Iterator[T]:
        read, source = self._read, self._source
        place = 0
        while True:
            if place == len(read):
                try:
                    read.append(next(source))
                except StopIteration:
                    return
            yield read[place]
            place += 1


class ReadOnly(Sequence[T]):
    """A list of the engine's as a policy sees it: it cannot be changed, and nothing is copied."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[T]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: Any) -> Any:
        return self._values[place]

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return [*self] == [*other] if isinstance(other, ReadOnly) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a list


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The engine between two iterations. Requests are in the order in which they are served.

    Reading a view changes nothing in the engine, and a view cannot be changed: the plan is checked against it, and
    another policy plans from it where the plan is refused. The waiting queues may hold thousands of requests; a
    request is looked at when it is read, so a policy should read as far as requests fit.
    """

    online: Sequence[Candidate] = ()  # running
    offline: Sequence[Candidate] = ()  # running; each is looked at when it is read
    waiting_online: Iterable[Candidate] = ()
    waiting_offline: Iterable[Candidate] = ()
    queued_online: int = 0  # waiting online requests, with the ones that cannot start yet
    model: LatencyModel
    slo: Slo  # with classes of live traffic: the tightest bounds that an arrival may bring
    slos: Mapping[str, Slo] = field(default_factory=dict)  # bounds by class; empty without classes
    classes: Mapping[str, str] = field(default_factory=dict)  # online request -> class, unless the default
    served: Mapping[str, float] = field(default_factory=dict)  # class -> cost of its tokens (policy/fairness)
    prompt_tokens: int = 0  # median prompt of recent online requests
    rare_starts: bool = False  # hardly any online request arrives in an iteration after a quiet minute
    arrivals_per_s: float = 0.0  # online requests, mean of the last 60 s
    rows_leave: bool = False  # offline rows can leave the iteration when an online request arrives
    rows_join: bool = False  # and join a later iteration at the layer where they left
    ahead: bool = False  # scheduled while the iteration before it runs: an arrival waits for both
    layers: int = 1  # of the model: an arrival waits for one of them where rows join
    online_waited_ms: float = 0.0  # time of the last iteration, if running online requests were not in it
    live_busy: float = 0.0  # share of iterations of live requests that is beyond the constant part
    own_ms: float = 0.0  # that our scheduling takes of an iteration: stock vLLM would be faster by it
    max_tokens: int  # of one iteration
    free_slots: int  # sequences that could be added to the running ones
    parks: bool = False  # a row that gives its slot up may wait with its KV blocks, and go on where it was
    reserved_slots: int = 0  # of these, no row takes: for online requests, and rows that come back
    # Of the free blocks, rows leave `set_aside_blocks`. No request is admitted into `watermark_blocks` while
    # another one runs. No restore takes `unwritten_blocks`. Live requests may take all that the watermark leaves.
    free_blocks: int
    kept_blocks: int = 0  # of these, with KV that live requests may find: no row takes them
    reserved_blocks: int = 0  # of the free ones, for requests to come; evicting saved rows makes up for them
    used_blocks: int | None = None  # blocks that are not free, each counted once
    watermark_blocks: int = 0  # of the free ones: vLLM admits no request into them while another one runs
    waiting_with_blocks: Sequence[Candidate] = ()  # offline requests, restored or parked; they can be evicted
    coming: frozenset[Hashable] = frozenset()  # names of KV blocks that are being restored
    computing: frozenset[Hashable] = frozenset()  # names of KV blocks that an iteration under way computes
    unwritten_blocks: int = 0  # of the free ones: running prompts will need them, and no restore takes them
    block_tokens: int
    adapters: Mapping[str, int] = field(default_factory=dict)  # request -> LoRA adapter, of those with one
    most_adapters: int | None = None  # of the requests that run; None without adapters
    resting_adapters: Sequence[int] = ()  # of running requests that are left out: they have to wait a step
    kv_groups: Sequence[KvGroup] = ()  # empty where one group keeps the KV of all tokens
    batches: bool = True  # batching mode is allowed
    budget_ms: float | None = None  # HyGen's latency budget of an iteration
    rows_due: int | None = None  # first waiting rows that a fixed rate lets run now; None without a rate
    utility: float = 0.9  # HyGen's share of rows that are taken for their prefix
    pushed: Set[str] = frozenset()  # offline requests whose jobs would miss their deadline (docs/adr/0030)
    push_scale: float = 1.0  # times an iteration's limit that these may fill

    def __post_init__(self) -> None:
        """Make tuples of lists, and mappings read-only; lazy queues stay lazy, and no mapping is copied."""
        for name in (*QUEUES, "kv_groups", "resting_adapters"):
            if isinstance(queue := getattr(self, name), list):
                object.__setattr__(self, name, tuple(queue))
        for name in (*BY_CLASS, "adapters"):
            if not isinstance(found := getattr(self, name), MappingProxyType):
                object.__setattr__(self, name, MappingProxyType(found))

    @property
    def set_aside_blocks(self) -> int:
        """Free blocks that are not for rows now: those kept with KV are room for arrivals, too."""
        return max(self.reserved_blocks, self.kept_blocks)

    @property
    def quiet(self) -> bool:
        """True if no online request is in the engine, and none has arrived for a minute: batching mode."""
        if not self.batches:
            return False
        seen = self.online or self.queued_online or self.prompt_tokens or self.arrivals_per_s
        return not seen and not any(True for _ in self.waiting_online)

    @property
    def typical_prompt_ms(self) -> float:
        """Predicted time of a typical prompt alone, in ms."""
        return self.model.predict(Batch.of([Slice(self.prompt_tokens, 0)] if self.prompt_tokens else []))

    def class_of(self, request: Candidate) -> str:
        """Class of an online request."""
        return self.classes.get(request.name, DEFAULT_CLASS)

    def slo_of(self, request: Candidate) -> Slo:
        """Bounds of an online request's class."""
        return self.slos[self.class_of(request)] if self.slos else self.slo

    def slo_among(self, requests: Iterable[Candidate]) -> Slo:
        """Tightest bounds of these online requests' classes; without classes, the bounds of all."""
        if not self.slos:
            return self.slo
        return tightest(self.slos[name] for name in {self.class_of(request) for request in requests})

    @property
    def apart(self) -> bool:
        """True if offline rows can leave only an iteration that has no online request in it."""
        return self.rows_leave and not self.rows_join
