"""The report of a server that co-serves, `GET /v1/conserve`, as its readers have it (docs/reference/json.md).

Fields of a later ConServe are ignored. A field without a default is there in every report: a report that lacks one,
as of an earlier ConServe, is refused by `msgspec.ValidationError`.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Generic, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Meta

PATH = "/v1/conserve"  # route at which a server tells of its scheduler
SPILL_PATH = f"{PATH}/spill"
WITHIN = "within_s"  # parameter of GET: seconds after which the last report will do
WITHIN_S = 1.0  # after which a server in the middle of an iteration answers with its last report, however old
RECENT = f"{PATH}?{WITHIN}={WITHIN_S:g}"
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # raised for content that is no report

T = TypeVar("T")


class FrontEndReport(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the server in front of the engine adds for a caller; none of them ever changes."""

    version: Annotated[str, Meta(max_length=100, pattern="^[^\\x00]*$")]
    identity: Annotated[str, Meta(max_length=4096, pattern="^[^\\x00]+$")]  # no database takes more
    resumes: bool  # True if our key is the harvester's
    engines: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=1_000_000)]  # of all engines together
    offline_priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class ByLatency(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A value for each latency of live requests."""

    ttft_ms: T
    tbt_ms: T

    def items(self) -> tuple[tuple[str, T], tuple[str, T]]:
        """Names of the latencies with their values."""
        return ("ttft_ms", self.ttft_ms), ("tbt_ms", self.tbt_ms)

    def of(self, latency: str) -> T:
        """The value of a latency by its name."""
        return dict(self.items())[latency]


class MedianAndP99(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A value for the median and for the P99."""

    p50: T
    p99: T

    def items(self) -> tuple[tuple[str, T], tuple[str, T]]:
        """Names of the quantiles with their values."""
        return ("p50", self.p50), ("p99", self.p99)


Quantiles = MedianAndP99[float | None]  # None without a measurement


class RefusalsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of a class of the user's own that were refused."""

    count: int
    reasons: list[str]


class SloReport(ByLatency[float | None], frozen=True, kw_only=True):
    """Promises to live requests: the largest time of each latency, harms as shares, and all of them by name."""

    harm: float | None
    default_harm: float | None  # to the latency without an SLO
    promises: ByLatency[dict[str, float]]

    def without_harm(self) -> Self:
        """Report without a promise of harm."""
        return msgspec.structs.replace(self, harm=None, default_harm=None)


class AloneReport(ByLatency[float], frozen=True, kw_only=True):
    """Latencies of a short request with the engine to itself."""

    prompt_tokens: int


class ErrorsReport(MedianAndP99[float | None], frozen=True, kw_only=True):
    """Errors of the latency model, as shares of the iterations' times."""

    iterations: int


class EncodersReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times of encoders."""

    iterations: int
    input_ms: float
    embedding_ms: float


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The latency model that plans."""

    name: str
    source: str
    coefficients: dict[str, float]
    scale: float
    refits: int
    off: ErrorsReport
    encoders: EncodersReport


class SwitchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A mechanism that is on or off."""

    policy: str


class HygenReport(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of HyGen's policies, and its latency predictor once it is fitted."""

    budget_ms: float | None
    tokens: int | None
    offline_per_s: float | None
    utility: float
    coefficients: dict[str, float] | None = None


class PromiseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A promise beside the same figure of the last minute."""

    promised_ms: float
    seen_ms: float | None
    kept: bool


class CountsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies since the server's start, and those above what is promised."""

    all: int
    late: int


class HistogramReport(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies between bounds since the server's start; the last count is of those above all bounds."""

    bounds_ms: list[float]
    counts: list[int]
    sum_ms: float


class LiveReport(ByLatency[Quantiles], frozen=True, kw_only=True):
    """Live requests in the last minute."""

    requests: int  # since the server's start
    attainment: float
    held_back: list[str]
    paused_for: list[str]
    way_ms: ByLatency[dict[str, float]]
    promises: ByLatency[dict[str, PromiseReport]]
    counts: ByLatency[CountsReport]
    histograms: ByLatency[HistogramReport]

    @property
    def measured(self) -> bool:
        """True if there was a latency to measure, without which the attainment of an SLO is 1."""
        return any(latency.p99 is not None for _, latency in self.items())


class ClassReport(LiveReport, frozen=True, kw_only=True):
    """A class of live traffic, with what is promised to it."""

    slo: SloReport


class OfflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Offline rows."""

    tokens: int
    tokens_per_s: float  # over the last minute
    work: float
    decode_steps: int
    rows: int  # in the engine now


class PushingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of jobs that would be late."""

    largest_slo_scale: float
    slo_scale: float
    rows: int
    tokens: int


class RatioReport(msgspec.Struct, frozen=True, kw_only=True):
    """A quantile beside offline work and in its pauses, and its interval once there is one."""

    with_ms: float
    without_ms: float
    ratio: float
    low: float | None
    high: float | None


class HarmReport(ByLatency[MedianAndP99[RatioReport | None]], frozen=True, kw_only=True):
    """Harm that was measured in pauses of the rows."""

    pauses: int
    compared: int


class PrefixesReport(msgspec.Struct, frozen=True, kw_only=True):
    """KV that live requests will find."""

    share: float
    kept_blocks: int
    most_blocks: int
    most_age_s: float
    prompt_tokens: int
    found_tokens: int
    lost_tokens: int


class PreemptionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Iterations that rows left, since the server's start."""

    policy: str
    why_off: str | None
    rows_go_on: bool
    iterations_left: int
    abandoned: int
    rows: int
    parked: int
    layers_run: int
    scheduled_ahead: int
    refused: int
    tokens_redone: int
    tokens_wasted: float
    live_tokens_recomputed: int
    reaction_ms: Quantiles


class SpillReport(msgspec.Struct, frozen=True, kw_only=True):
    """KV on disk: what a stop writes, and what the next start takes in."""

    why_off: str | None
    refused: str | None
    blocks_spilled: int
    bytes_spilled: int
    blocks_taken_in: int
    tokens_taken_in: int


class BlockTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of copying one block, in ms."""

    to_host: float
    to_device: float


class CheckpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """KV of rows in host memory; an engine without it has no figures of that memory."""

    policy: str
    why_off: str | None
    refused_choices: RefusalsReport
    tokens_saved: int
    tokens_restored: int
    tokens_recomputed: int
    restores: int
    blocks_saved: int
    blocks_restored: int
    blocks_failed: int
    blocks_refused: int
    restoring: int | None = None
    host_blocks: int | None = None
    host_used: int | None = None
    block_ms: BlockTimes | None = None
    spill: SpillReport | None = None


class SchedulerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's report; of several engines put together."""

    policy: str
    refused_plans: RefusalsReport
    slo: SloReport
    alone: AloneReport | None
    latency_model: ModelReport | None
    batching: SwitchReport
    hygen: HygenReport
    max_num_batched_tokens: int
    scheduling_ms: float
    online: LiveReport
    offline: OfflineReport
    harm: HarmReport
    pushing: PushingReport
    iterations: int
    planned: int
    overruns: int
    standstills: int
    busy_s: float
    live_prefixes: PrefixesReport
    preemption: PreemptionReport
    checkpoint: CheckpointReport
    classes: dict[str, ClassReport] | None = None  # None on a server without classes of live traffic
    weights: str | None = None  # version of weights that were replaced
    age_s: float | None = None  # None where the caller waited for the scheduler


class ServerReport(NamedTuple):
    """Answer to GET: its two halves."""

    front_end: FrontEndReport
    scheduler: SchedulerReport


def read_front_end(content: bytes) -> FrontEndReport:
    """Read what the front end says, which a harvester needs; raises one of `UNREADABLE`."""
    return msgspec.json.decode(content, type=FrontEndReport)


def read_scheduler(content: bytes) -> SchedulerReport:
    """Read what the scheduler says; raises one of `UNREADABLE`."""
    return msgspec.json.decode(content, type=SchedulerReport)


def read(content: bytes) -> ServerReport:
    """Read a whole answer; raises one of `UNREADABLE`."""
    return ServerReport(read_front_end(content), read_scheduler(content))


def of_engine(said: Mapping[str, Any]) -> SchedulerReport:
    """The report that an engine gave in Python's own types or NumPy's, and that may have infinite figures."""
    return msgspec.convert(json.loads(json.dumps(said)), SchedulerReport)
