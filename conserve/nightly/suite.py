"""The protocols between a night and the kinds of its suites."""

from pathlib import Path
from typing import Any, Protocol

from conserve.api.handing import Source
from conserve.api.job import Job
from conserve.api.store import Store
from conserve.config import Settings
from conserve.evals.outcome import SuiteOutcome
from conserve.evals.plan import ModelTarget, SuitePlan


class Night(Protocol):
    """One suite of one run, as its kind sees it. A killed run is the same run when it goes on.

    `await_answers` blocks its suite's thread. Once each suite of the run waits or has ended, the rows of all their
    jobs run together, ordered by prefix.
    """

    @property
    def store(self) -> Store:
        """Store of the jobs."""

    @property
    def settings(self) -> Settings:
        """Settings of the run."""

    @property
    def run_id(self) -> str:
        """Id of the run."""

    @property
    def suite(self) -> SuitePlan:
        """The suite's name, seed, limit, epochs and own options."""

    @property
    def target(self) -> ModelTarget:
        """Model or endpoint that is asked."""

    @property
    def folder(self) -> Path:
        """Folder of nightly.toml, which relative paths begin at."""

    def submit_once(self, key: str, source: Source, *, target: ModelTarget | None = None, **task: Any) -> Job:
        """Job of this run, suite and key: one that an earlier try has queued, else a new one of `Store.submit`.

        `target` is asked instead of the suite's; `task` are further arguments of `Store.submit`. The key
        must change with whatever changes the requests, as the digest of a data set does: an answer that is kept
        under the same key is never asked for again.
        """

    def await_answers(self, *jobs: Job) -> None:
        """Wait until each row of these jobs has a result.

        Raises `JobRefused` for a job that may not run, and for one that another model than the target's answered.
        """


class SuiteKind(Protocol):
    """A kind of suite, made without arguments. `conserve.nightly.kinds.KINDS` names the modules."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        """Raise `UsageError` for options that make no sense, or a file that is missing. Asks nothing."""

    def run(self, night: Night) -> SuiteOutcome:
        """Ask and score the suite, in a thread of its own. Items come in the same order every night."""
