"""Shapes of a job: what the claims, the turns and the forecast each read of one."""

from typing import Protocol

from conserve.store.books.states import JobState, OnLate


class AnswerTokens(Protocol):
    """Tokens of answers."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class CountedJob(AnswerTokens, Protocol):
    """A job with its place in the queue and its counters; failed rows count no tokens."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def on_late(self) -> OnLate | str | None: ...
    @property
    def succeeded(self) -> int: ...


class ListedJob(CountedJob, Protocol):
    """A job as `conserve status` lists it."""

    @property
    def state(self) -> JobState: ...
    @property
    def unanswered(self) -> int: ...


class ClaimableJob(Protocol):
    """A job that may have rows to claim."""

    @property
    def id(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def next_position(self) -> int: ...
    @property
    def num_rows(self) -> int: ...


class RunnableRow(CountedJob, ClaimableJob, Protocol):
    """Row of the columns `queue_statements.RUNNABLE`."""

    @property
    def failed(self) -> int: ...
