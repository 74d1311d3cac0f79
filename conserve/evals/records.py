"""Records of a run: what it was, what it scored, and the facts that two runs must share to compare."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

PREVIOUS, HISTORY = "previous", "history"  # what a run is compared with, besides a run by its name


class RunState(StrEnum):
    """State of a run."""

    RUNNING = "running"
    """Under way, or killed: the next `conserve eval run` goes on with it."""
    FINISHED = "finished"
    """All suites have scores."""
    FAILED = "failed"
    """Ended, and a suite has an error instead of scores."""
    GIVEN_UP = "given up"
    """Another run began in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanScore:
    """Mean score of a suite's items by one metric, with the bounds of its interval."""

    metric: str
    mean: float
    low: float
    high: float
    items: int
    lower_is_better: bool = False
    same: bool = False  # every item has this very score


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRecord:
    """A suite of a run that has ended: its scores, or its error."""

    name: str
    kind: str
    target: str = ""
    error: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    scores: tuple[MeanScore, ...] = ()
    items: int = 0
    failed: int = 0  # items without an answer
    first_error: str | None = None  # of the first of them
    prompt_tokens: int = 0
    answer_tokens: int = 0
    jobs: tuple[str, ...] = ()
    file: str | None = None  # of its items, in the run's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLatencies:
    """Latencies of live requests while a server answered the run's rows; None where nothing was measured."""

    ttft_p99_ms: float | None = None  # of the worst minute that was looked at
    tbt_p99_ms: float | None = None
    ttft_p99_ratio: float | None = None  # with rows over without, the largest of a server's in its pauses
    tbt_p99_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run of a nightly.toml. Times are in s since 1970."""

    id: str
    token: str = ""  # tells its jobs from those of another store's run of this name in the same minute
    evaluation: str  # name in nightly.toml: its runs form one history
    state: RunState
    began_at: float
    ended_at: float | None = None
    plan: str  # text of nightly.toml at its beginning
    folder: str  # that relative paths in it begin at
    overrides: Mapping[str, str | int] = field(default_factory=dict)  # flags of `conserve eval run`
    suites: tuple[SuiteRecord, ...] = ()
    work_s: float = 0.0  # in which rows were answered
    error: str | None = None
    harm: LiveLatencies | None = None

    def suite(self, name: str) -> SuiteRecord | None:
        """Suite of this name; None if it has not ended."""
        return next((suite for suite in self.suites if suite.name == name), None)
